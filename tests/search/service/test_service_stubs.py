from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from espalier.kserve import inference_pb2
from espalier.v1 import search_pb2

PROTO = Path(__file__).parents[3] / "proto"


def all_messages(messages):
    for message in messages:
        yield message
        yield from all_messages(message.nested_type)


@pytest.mark.parametrize(
    ("contract", "stubs"),
    [("espalier/v1/search.proto", search_pb2), ("espalier/kserve/inference.proto", inference_pb2)],
)
def test_the_committed_stubs_are_made_from_the_committed_contract(contract, stubs, tmp_path):
    protoc = pytest.importorskip("grpc_tools.protoc", reason="needs grpcio-tools")
    well_known = Path(protoc.__file__).parent / "_proto"
    out = tmp_path / "set.bin"
    assert (
        protoc.main(
            ["", f"--proto_path={PROTO}", f"--proto_path={well_known}", f"--descriptor_set_out={out}", contract]
        )
        == 0
    )

    (made,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    for message in all_messages(made.message_type):
        for field in message.field:
            field.ClearField("json_name")  # stubs leave it out
    committed = descriptor_pb2.FileDescriptorProto()
    stubs.DESCRIPTOR.CopyToProto(committed)
    assert committed == made, "run `make proto`"
