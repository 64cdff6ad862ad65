"""The example of `proto/README.md` for another language has the names of the contract; it runs in `foreign`."""

import re
from pathlib import Path

from espalier.v1 import search_pb2 as pb

PROTO = Path(__file__).parents[3] / "proto"


def example() -> str:
    (code,) = re.findall(r"```js\n(.*?)```", (PROTO / "README.md").read_text(), re.DOTALL)
    return code


def test_the_example_uses_names_of_the_contract():
    fields = re.findall(r"(\w+)(?:: [^,}]+)?[,}]", re.findall(r"SolveProblem\(\{(.*?\})", example())[0])
    assert set(fields) - {"4"} == {"problem", "algorithm", "beam_width", "expansion"}
    assert set(fields) <= set(pb.SolveProblemRequest.DESCRIPTOR.fields_by_name)
    (algorithm,) = re.findall(r'"(ALGORITHM_\w+)"', example())
    assert algorithm in dict(pb.Algorithm.items())
    assert "answer" in pb.SolveProblemResponse.DESCRIPTOR.fields_by_name["result"].message_type.fields_by_name
