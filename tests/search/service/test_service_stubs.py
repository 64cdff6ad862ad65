from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from espalier.v1 import search_pb2

PROTO = Path(__file__).parents[3] / "proto"


def test_the_committed_stubs_are_made_from_the_committed_contract(tmp_path):
    protoc = pytest.importorskip("grpc_tools.protoc", reason="needs grpcio-tools")
    well_known = Path(protoc.__file__).parent / "_proto"
    out = tmp_path / "set.bin"
    contract = "espalier/v1/search.proto"
    assert (
        protoc.main(
            ["", f"--proto_path={PROTO}", f"--proto_path={well_known}", f"--descriptor_set_out={out}", contract]
        )
        == 0
    )

    (made,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    for message in made.message_type:
        for field in (*message.field, *(f for nested in message.nested_type for f in nested.field)):
            field.ClearField("json_name")  # stubs leave it out
    committed = descriptor_pb2.FileDescriptorProto()
    search_pb2.DESCRIPTOR.CopyToProto(committed)
    assert committed == made, "run `make proto`"
