"""Ten thousand calls that hypothesis makes up, and raw bytes, on both endpoints of a server with the bundled pair.

Nothing may end as a fault of the server, and its memory must stay as it is.
"""

import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx2
import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from raw_client import NO_PROXY

from espalier.experiments.lab.bench.service.server_process import ServerProcess, serving
from espalier.kserve import inference_pb2 as kserve
from espalier.search.client import SearchClient
from espalier.search.request import SearchRequest
from espalier.v1 import search_pb2 as pb

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc"),
]

PATIENCE = 60.0
PROMPT = "Tom has 38 coins."
PROBLEM = "Tom has 38 coins. (a) He finds 47 more. How many coins does he have now?"
GROWTH = 24 * 2**20
"""Bytes that a server may grow by after its warm-up: numba and allocators are not done with a few hundred calls."""
WARM = 2 * 2**20
"""Bytes that it grows by in 250 calls once it is warm."""


_SEARCH = pb.DESCRIPTOR.services_by_name["SearchService"]
_INFERENCE = kserve.DESCRIPTOR.services_by_name["GRPCInferenceService"]


class Served:
    """A server process, with limits that let it answer quickly."""

    def __init__(self, process: ServerProcess) -> None:
        self.resident_bytes = process.resident_bytes
        self.address, self.url = process.address, process.url or ""
        self.channel = grpc.insecure_channel(self.address, options=NO_PROXY)

    def send(self, method: str, raw: bytes | list[bytes]) -> str:
        """Send bytes as a message, or a session's as several; the code it ended with."""
        many = "Stream" in method or method in ("ScoreSteps", "Rollout")
        kind = self.channel.unary_stream if many else self.channel.unary_unary
        sent: Any = raw
        if method in ("ScoreSteps", "ModelStreamInfer"):
            kind, sent = self.channel.stream_stream, iter([raw] if isinstance(raw, bytes) else raw)
        service = _INFERENCE if method in _INFERENCE.methods_by_name else _SEARCH
        call = kind(f"/{service.full_name}/{method}", lambda raw: raw, lambda raw: raw)
        try:
            list(call(sent, timeout=PATIENCE)) if many else call(sent, timeout=PATIENCE)
        except grpc.RpcError as error:
            return error.code().name  # type: ignore[attr-defined]
        return "OK"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = str(tmp_path_factory.mktemp("weights"))
    limits = ("--search-seconds", "0.02", "--kv-memory", "128M", "--max-searches", "4", "--reload-folder", folder)
    with serving("--http-port", "0", *limits) as process:
        served = Served(process)
        before = 0
        for turn in range(20):  # until every page of the KV pool was written once, which a busy processor delays
            for i in range(250 * turn, 250 * turn + 250):
                problem = PROBLEM.replace("38", str(10 + i % 90)).replace("47", str(10 + i // 90))
                request = pb.SolveProblemRequest(problem=problem, algorithm=pb.ALGORITHM_BEAM, beam_width=2)
                assert served.send("SolveProblem", request.SerializeToString()) == "OK"
            if turn and served.resident_bytes() < before + WARM:
                break
            before = served.resident_bytes()
        yield served


@pytest.fixture(autouse=True)
def _leaves_nothing(served: Served) -> Iterator[None]:
    yield
    with SearchClient(served.address) as client:
        seen = client.server_info(PATIENCE)
        assert (seen.occupancy.running, seen.admitted_calls, seen.waiting_calls) == (0, 0, 0)
        assert sum(blocks.live for blocks in seen.occupancy.kv_blocks.values()) == 0


def attack(served: Served, made_up: Any, count: int, send: Callable[[Any], str]) -> Counter[str]:
    """Send what hypothesis makes up: a third to warm up, and the rest, which must not make the server grow."""
    ended: Counter[str] = Counter()

    def send_many(count: int) -> None:
        @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(made_up)
        def sent(one: Any) -> None:
            code = send(one)
            ended[code] += 1
            assert code not in ("INTERNAL", "UNKNOWN", "500"), one

        sent()

    send_many(count // 3)
    before = served.resident_bytes()
    send_many(count - count // 3)
    assert served.resident_bytes() < before + GROWTH
    return ended


# ---- gRPC

_BOUNDS = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_ENUM: (-1, 30),
}


def value_of(field: Any) -> Any:
    """What a field may be given, sensible values among it."""
    if field.type in _BOUNDS:
        low, high = _BOUNDS[field.type]
        one: Any = some.integers(max(low, -2), min(high, 20)) | some.integers(low, high)
    elif field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        one = some.floats(0, 2) | some.floats()
    elif field.type == FieldDescriptor.TYPE_BOOL:
        one = some.booleans()
    elif field.type == FieldDescriptor.TYPE_STRING:
        one = some.just(PROBLEM) | some.text(some.characters(codec="utf-8"), max_size=40)
    elif field.type == FieldDescriptor.TYPE_BYTES:
        one = some.binary(max_size=20)
    else:
        one = message_of(field.message_type)
    is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
    return some.lists(one, max_size=3) if field.is_repeated and not is_map else one


def message_of(kind: Any) -> Any:
    if kind.GetOptions().map_entry:
        key, value = (value_of(kind.fields_by_name[name]) for name in ("key", "value"))
        return some.dictionaries(key, value, max_size=3)
    return some.fixed_dictionaries({}, optional={field.name: value_of(field) for field in kind.fields})


def request_with(values: dict[str, Any]) -> pb.SolveProblemRequest:
    return pb.SolveProblemRequest(**values)


_SOLVED = {"solutions": [{"steps": ["38+47=85", "85"]}]}
_REQUESTS = message_of(pb.SolveProblemRequest.DESCRIPTOR)
_FEW_CHANGES = some.tuples(_REQUESTS, some.integers(0, 3)).map(
    lambda drawn: {"problem": PROBLEM, **dict(list(drawn[0].items())[: drawn[1]])}
)


@pytest.mark.parametrize("method", ["SolveProblem", "SolveProblemStream"])
def test_messages(method: str, served: Served):
    def send(values: dict[str, Any]) -> str:
        request = request_with(values)
        whole = pb.SolveProblemStreamRequest(request=request) if "Stream" in method else request
        return served.send(method, whole.SerializeToString())

    ended = attack(served, _REQUESTS | _FEW_CHANGES, 2500, send)
    assert ended.keys() <= {"OK", "INVALID_ARGUMENT"}
    assert min(ended["OK"], ended["INVALID_ARGUMENT"]) > 50, "both happen often, else it is no test"


def test_messages_for_scores(served: Served):
    made_up = message_of(pb.ScoreSolutionRequest.DESCRIPTOR)
    few = some.integers(0, 2).flatmap(
        lambda count: made_up.map(lambda drawn: {"problem": PROBLEM, **_SOLVED, **dict(list(drawn.items())[:count])})
    )
    ended = attack(
        served,
        made_up | few,
        900,
        lambda values: served.send("ScoreSolution", pb.ScoreSolutionRequest(**values).SerializeToString()),
    )
    assert ended.keys() <= {"OK", "INVALID_ARGUMENT"}
    assert min(ended["OK"], ended["INVALID_ARGUMENT"]) > 20, "both happen often, else it is no test"


def test_messages_for_rollouts(served: Served):
    made_up = message_of(pb.RolloutRequest.DESCRIPTOR)
    small = {"problem": PROBLEM, "solutions": 2, "max_tokens": 32}
    for solutions in (64, 128, 256):  # until the largest batches were computed
        wide = pb.RolloutRequest(problem=PROBLEM, solutions=solutions, max_tokens=64, temperature=2.0)
        assert served.send("Rollout", wide.SerializeToString()) == "OK"
    few = some.integers(0, 2).flatmap(
        lambda count: made_up.map(lambda drawn: {**small, **dict(list(drawn.items())[:count])})
    )
    ended = attack(
        served,
        made_up | few,
        900,
        lambda values: served.send("Rollout", pb.RolloutRequest(**values).SerializeToString()),
    )
    assert ended.keys() <= {"OK", "INVALID_ARGUMENT"}
    assert min(ended["OK"], ended["INVALID_ARGUMENT"]) > 20, "both happen often, else it is no test"


def test_messages_of_sessions(served: Served):
    """Several a session: the first opens it, most of the others name nodes that there are."""
    node = some.integers(0, 6) | some.integers(-(2**63), 2**63 - 1)
    step = some.fixed_dictionaries(
        {"node": node, "parent": some.integers(0, 3) | node, "text": some.just("38+47=85") | some.text(max_size=9)}
    )
    turn = some.fixed_dictionaries({}, optional={"steps": some.lists(step, max_size=4), "release": some.lists(node)})
    opening = some.just({"problem": PROBLEM, "max_nodes": 8, "max_tokens": 256})
    opened = some.fixed_dictionaries(
        {"open": opening | message_of(pb.ScoreSession.DESCRIPTOR)}, optional={"steps": some.lists(step, max_size=3)}
    )
    first = {"open": {"problem": PROBLEM, "max_nodes": 8, "max_tokens": 256}, "steps": [{"node": 1, "text": "38"}]}
    whole = some.tuples(some.just(first) | opened, some.lists(turn, max_size=3))

    def send(drawn: tuple[dict[str, Any], list[dict[str, Any]]]) -> str:
        messages = [pb.ScoreStepsRequest(**each).SerializeToString() for each in (drawn[0], *drawn[1])]
        return served.send("ScoreSteps", messages)

    ended = attack(served, whole, 1500, send)
    assert ended.keys() <= {"OK", "INVALID_ARGUMENT"}
    assert min(ended["OK"], ended["INVALID_ARGUMENT"]) > 20, "both happen often, else it is no test"


def test_messages_for_inference(served: Served):
    """Of the KServe protocol: sensible tensors, with parameters that are made up."""
    name = some.sampled_from(["beam_width", "budget", "temperature", "priority", "timeout", "stream", "vote", "seed"])
    parameter = message_of(kserve.InferParameter.DESCRIPTOR)
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"38+47?"]}}
    sensible = {"model_name": "demo-generator@greedy", "inputs": [tensor]}
    few = some.dictionaries(name, parameter, max_size=2).map(lambda drawn: {**sensible, "parameters": drawn})
    any_ = message_of(kserve.ModelInferRequest.DESCRIPTOR)
    half = any_.map(lambda drawn: {**drawn, **sensible})

    def send(values: dict[str, Any]) -> str:
        raw = kserve.ModelInferRequest(**values).SerializeToString()
        assert served.send("ModelStreamInfer", [raw, raw]) == "OK"
        return served.send("ModelInfer", raw)

    ended = attack(served, few | half | any_, 900, send)
    assert ended.keys() <= {"OK", "INVALID_ARGUMENT", "NOT_FOUND"}
    assert min(ended["OK"], ended["INVALID_ARGUMENT"]) > 20, "both happen often, else it is no test"


@pytest.mark.parametrize(
    "method",
    [
        "SolveProblem",
        "SolveProblemStream",
        "ScoreSolution",
        "ScoreSteps",
        "GetServerInfo",
        "Reload",
        "Nothing",
        *_INFERENCE.methods_by_name,
    ],
)
def test_bytes_for_messages(method: str, served: Served):
    ended = attack(served, some.binary(max_size=200), 500, lambda raw: served.send(method, raw))
    assert ended.keys() <= {"OK", "INVALID_ARGUMENT", "UNIMPLEMENTED", "NOT_FOUND"}


def test_bytes_for_http2(served: Served):
    host, _, port = served.address.rpartition(":")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

    def send(raw: bytes) -> str:
        with socket.create_connection((host, int(port)), PATIENCE) as opened:
            opened.sendall(raw)
            opened.shutdown(socket.SHUT_WR)
            try:
                while opened.recv(65536):
                    pass
            except ConnectionResetError:
                return "reset"
        return "closed"

    attack(served, some.binary(max_size=300) | some.binary(max_size=300).map(lambda raw: preface + raw), 1000, send)
    assert served.send("GetServerInfo", b"") == "OK"


# ---- HTTP

_LEAVES = (
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=20) | some.just(PROBLEM)
    | some.sampled_from(["user", "assistant", "system", "demo-generator@greedy", "beam", "best-of-n", "\ud800"])
)  # fmt: skip
_JSON = some.recursive(
    _LEAVES,
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_MESSAGE = some.fixed_dictionaries({"role": some.just("user") | _JSON, "content": some.just(PROBLEM) | _JSON})
_MESSAGES = some.lists(_MESSAGE, max_size=3)
_CHATS = some.fixed_dictionaries(
    {"model": some.just("demo-generator@greedy") | _JSON, "messages": _MESSAGES | _JSON},
    optional=dict.fromkeys(
        ("temperature", "top_p", "seed", "max_tokens", "stream", "n", "stop", "espalier", "stream_options"), _JSON
    ),
)
_SMALL = some.integers(-1, 4)
_SAMPLING = {
    **dict.fromkeys(("temperature", "top_p", "seed", "stop", "espalier", "min_p"), _JSON | _SMALL),
    **dict.fromkeys(("n", "max_tokens", "logprobs", "top_k"), _SMALL | _JSON),
    **dict.fromkeys(("stream", "echo", "return_token_ids", "include_stop_str_in_output"), some.booleans() | _JSON),
}
_IDS = some.lists(some.integers(0, 300) | some.integers(), max_size=4)
_PROMPT = some.just(PROMPT) | _IDS | some.lists(_IDS | some.just(PROMPT), max_size=3) | _JSON
_COMPLETIONS = some.fixed_dictionaries(
    {"model": some.just("demo-generator") | _JSON, "prompt": _PROMPT}, optional=_SAMPLING
)
_PLAIN = {**_SAMPLING, **dict.fromkeys(("continue_final_message", "logprobs"), some.booleans())}
_PLAIN_CHATS = some.fixed_dictionaries(
    {"model": some.just("demo-generator@plain"), "messages": _MESSAGES},
    optional={**_PLAIN, "chat_template_kwargs": some.dictionaries(some.text(max_size=8), _JSON, max_size=2)},
)
_ITEM = some.fixed_dictionaries({"role": some.just("user") | _JSON, "content": some.just(PROBLEM) | _JSON})
_RESPONSES = some.fixed_dictionaries(
    {
        "model": some.sampled_from(["demo-generator@greedy", "demo-generator@plain"]) | _JSON,
        "input": some.just(PROBLEM) | some.lists(_ITEM, max_size=2) | _JSON,
    },
    optional=dict.fromkeys(
        ("instructions", "max_output_tokens", "temperature", "stream", "reasoning", "text", "store", "espalier"), _JSON
    ),
)
_TOKENS = some.fixed_dictionaries({}, optional={"prompt": some.just(PROMPT) | _JSON, "messages": _MESSAGES | _JSON})
_STEPS = some.lists(some.sampled_from(["38+47=85", " ", "so"]) | _JSON, max_size=3)
_SCORES = some.fixed_dictionaries(
    {"problem": some.just(PROBLEM) | _JSON, "steps": some.lists(_STEPS, max_size=3) | _STEPS | _JSON},
    optional={"espalier": _JSON, "messages": _MESSAGES, "text_1": _JSON, "text_2": _JSON, "use_activation": _JSON},
)
_SEARCHES = some.fixed_dictionaries(
    {"problem": some.just(PROBLEM) | _JSON},
    optional={name: some.integers(-1, 5) | _JSON for name in SearchRequest.__dataclass_fields__ if name != "problem"},
)


_PARAMETERS = some.dictionaries(
    some.sampled_from(["beam_width", "budget", "temperature", "priority", "timeout", "binary_data_output", "x"]),
    _SMALL | _JSON,
    max_size=2,
)
_GENERATE = some.fixed_dictionaries(
    {"text_input": some.just(PROBLEM) | _JSON}, optional={"parameters": _PARAMETERS | _JSON, "id": _JSON, "x": _JSON}
)
_TENSOR = some.fixed_dictionaries(
    {
        "name": some.just("text_input") | _JSON,
        "shape": some.sampled_from([[1], [1, 1]]) | _JSON,
        "datatype": some.just("BYTES") | _JSON,
    },
    optional={"data": some.just([PROBLEM]) | _JSON, "parameters": _JSON},
)
_WHOLE = some.just({"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROBLEM]})
_INFER = some.fixed_dictionaries(
    {"inputs": some.lists(_WHOLE | _TENSOR, min_size=1, max_size=1) | _JSON},
    optional={"outputs": some.just([{"name": "answer"}]) | _JSON, "parameters": _PARAMETERS | _JSON},
)


@pytest.mark.parametrize(
    ("path", "bodies"),
    [
        ("/v2/models/demo-generator@greedy/infer", _INFER | _JSON),
        ("/v2/models/demo-generator@greedy/generate", _GENERATE | _JSON),
        ("/v2/models/demo-generator@greedy/generate_stream", _GENERATE | _JSON),
        ("/v1/chat/completions", _CHATS | _JSON),
        ("/v1/searches", _SEARCHES | _JSON),
        ("/v1/completions", _COMPLETIONS | _JSON),
        ("/v1/chat/completions", _PLAIN_CHATS),
        ("/tokenize", _TOKENS | _JSON),
        ("/v1/score", _SCORES | _JSON),
        ("/v1/responses", _RESPONSES | _JSON),
        ("/detokenize", some.fixed_dictionaries({"tokens": _IDS | _JSON})),
    ],
    ids=[
        "infer",
        "generate",
        "generate stream",
        "chats",
        "searches",
        "completions",
        "plain chats",
        "tokenize",
        "scores",
        "responses",
        "detokenize",
    ],
)
def test_bodies(path: str, bodies: Any, served: Served):
    with httpx2.Client(base_url=served.url, timeout=PATIENCE, trust_env=False) as client:

        def send(body: Any) -> str:
            raw = json.dumps(body)
            response = client.post(path, content=raw, headers={"content-type": "application/json"})
            return str(response.status_code)

        ended = attack(served, bodies, 1500, send)
    assert ended.keys() <= {"200", "400", "404"}
    assert min(ended["200"], ended["400"]) > 5, "both happen often, else it is no test"


def test_bytes_for_http(served: Served):
    parts = urlsplit(served.url)
    head = b"POST /v1/searches HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"

    def send(raw: bytes) -> str:
        with socket.create_connection((parts.hostname, parts.port or 0), PATIENCE) as opened:
            opened.sendall(raw)
            opened.shutdown(socket.SHUT_WR)
            received = b""
            try:
                while more := opened.recv(65536):
                    received += more
            except ConnectionResetError:
                return "reset"
        return received.split(b" ", 2)[1].decode() if received.startswith(b"HTTP/1.1 ") else "closed"

    whole = some.binary(max_size=100).map(lambda raw: head + b"content-length: %d\r\n\r\n" % len(raw) + raw)
    chunks = some.binary(max_size=100).map(lambda raw: head + b"transfer-encoding: chunked\r\n\r\n" + raw)
    ended = attack(served, some.binary(max_size=300) | whole | chunks, 1500, send)
    assert ended.keys() <= {"400", "403", "404", "405", "408", "closed", "reset"}
