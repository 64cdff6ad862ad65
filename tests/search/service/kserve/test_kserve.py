"""The KServe v2 protocol over gRPC and HTTP: what Triton's clients send, errors, priorities, timeouts, streams."""

import base64
import json
import math
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from callers_files import callers_file
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from raw_client import NO_PROXY, bearer
from scripted_orchestrator import ScriptedOrchestrator
from server_thread import PATIENCE, ServerThread, wait_until

from espalier.kserve import inference_pb2 as pb
from espalier.kserve.inference_pb2_grpc import GRPCInferenceServiceStub
from espalier.search.service.settings import ServerSettings

BODIES = Path(__file__).with_name("bodies")
SENT = json.loads((BODIES / "tritonclient.json").read_text())
TEXT = "6*7=42\n\nThe answer is \\boxed{42}."
MODEL = "espalier@beam-n2-m2"
URL = f"/v2/models/{MODEL}"


@pytest.fixture(scope="module")
def fake() -> ScriptedOrchestrator:
    return ScriptedOrchestrator()


@pytest.fixture(scope="module")
def server(fake: ScriptedOrchestrator) -> Iterator[ServerThread]:
    """One for all tests, none of which leaves anything in it."""
    running = ServerThread(lambda: fake, ServerSettings(port=0, http_port=0))
    running.wait_loaded()
    yield running
    running.close()


@pytest.fixture(autouse=True)
def _leaves_nothing(fake: ScriptedOrchestrator) -> Iterator[None]:
    yield
    wait_until(lambda: fake.running == 0)
    fake.release.clear()


@pytest.fixture(scope="module")
def http(server: ServerThread) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url or "", timeout=PATIENCE, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def stub(server: ServerThread) -> Iterator[Any]:
    with grpc.insecure_channel(server.address, options=NO_PROXY) as channel:
        yield GRPCInferenceServiceStub(channel)


@pytest.fixture
def another(start: Any) -> Iterator[Any]:
    """Starts a server with other settings, and makes a stub of it."""
    with ExitStack() as opened:

        def make(**settings: Any) -> tuple[ServerThread, ScriptedOrchestrator, Any]:
            its = ScriptedOrchestrator()
            server = start(lambda: its, http_port=0, **settings)
            server.wait_loaded()
            channel = opened.enter_context(grpc.insecure_channel(server.address, options=NO_PROXY))
            return server, its, GRPCInferenceServiceStub(channel)

        yield make


def raw(*texts: str) -> bytes:
    return b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)


def infer(problem: str = "solve", /, model: str = MODEL, **parameters: Any) -> pb.ModelInferRequest:
    """A request as Triton's client makes it."""
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    tensor = pb.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1])
    values = {name: pb.InferParameter(**{kinds[type(value)]: value}) for name, value in parameters.items()}
    return pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[raw(problem)], parameters=values)


def sent(kind: str, index: int) -> Any:
    """What tritonclient has sent, as it was recorded."""
    return SENT[kind][index]


def outputs(response: pb.ModelInferResponse) -> dict[str, Any]:
    """Outputs as tritonclient's `as_numpy` reads them."""
    found: dict[str, Any] = {}
    assert len(response.outputs) == len(response.raw_output_contents)
    for tensor, content in zip(response.outputs, response.raw_output_contents, strict=True):
        if tensor.datatype == "FP32":
            (found[tensor.name],) = struct.unpack("<f", content)
        else:
            (length,) = struct.unpack_from("<I", content)
            assert length == len(content) - 4
            found[tensor.name] = content[4:].decode()
    return found


def refused(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code().name, caught.value.details()  # type: ignore[attr-defined]


def asked(fake: ScriptedOrchestrator) -> Any:
    """The last request that was searched."""
    return list(fake.requests.values())[-1]


# ---- what tritonclient has sent


def test_a_recorded_message_is_searched_as_it_says(stub: Any, fake: ScriptedOrchestrator) -> None:
    message = pb.ModelInferRequest.FromString(base64.b64decode(sent("grpc", 0)["message"]))
    response = stub.ModelInfer(message)
    assert (response.id, response.model_name, response.model_version) == ("42", MODEL, "1")
    assert outputs(response) == {"text_output": TEXT, "score": 0.5}
    request = asked(fake)
    assert (request.beam_width, request.expansion, request.temperature, request.vote) == (4, 2, 0.5, "weighted")
    assert request.time_limit == 5.0
    assert response.parameters["seed"].int64_param == request.seed
    assert response.parameters["stop_reason"].string_param == "finished"
    assert response.parameters["generated_tokens"].int64_param > 0


def test_a_recorded_stream_has_the_steps_and_an_empty_last_response(stub: Any) -> None:
    message = pb.ModelInferRequest.FromString(base64.b64decode(sent("grpc", 1)["message"]))
    told = [each.infer_response for each in stub.ModelStreamInfer(iter([message]))]
    assert {each.id for each in told} == {"s1"}
    assert "".join(outputs(each).get("text_output", "") for each in told) == TEXT
    assert len(told) == 3
    assert outputs(told[1])["answer"] == "42"
    assert not told[2].outputs
    assert [each.parameters["triton_final_response"].bool_param for each in told] == [False, False, True]


def test_a_recorded_body_with_binary_tensors_is_answered_by_binary_tensors(http: httpx2.Client) -> None:
    record = sent("http", 0)
    response = http.post(record["path"], content=base64.b64decode(record["body"]), headers=record["headers"])
    assert response.status_code == 200, response.text
    length = int(response.headers["inference-header-content-length"])
    head, tail = json.loads(response.content[:length]), response.content[length:]
    assert (head["id"], head["model_name"], head["model_version"]) == ("42", MODEL, "1")
    assert [(each["name"], each["parameters"]["binary_data_size"]) for each in head["outputs"]] == [
        ("text_output", 4 + len(TEXT)), ("answer", 6), ("score", 4)
    ]  # fmt: skip
    assert tail == raw(TEXT, "42") + struct.pack("<f", 0.5)


def test_a_recorded_body_may_want_each_output_in_its_own_form(http: httpx2.Client) -> None:
    record = sent("http", 1)
    response = http.post(record["path"], content=base64.b64decode(record["body"]), headers=record["headers"])
    length = int(response.headers["inference-header-content-length"])
    text, answer = json.loads(response.content[:length])["outputs"]
    assert (text["shape"], text["parameters"]) == ([1, 1], {"binary_data_size": 4 + len(TEXT)})
    assert (answer["shape"], answer["data"]) == ([1, 1], ["42"])
    assert response.content[length:] == raw(TEXT)


def test_a_body_without_binary_tensors_is_answered_in_json(http: httpx2.Client, fake: ScriptedOrchestrator) -> None:
    body = (BODIES / "triton_infer_rest.json").read_bytes()
    response = http.post("/v2/models/espalier/infer", content=body)
    answer = response.json()
    assert (answer["id"], answer["model_name"], answer["model_version"]) == ("42", "espalier", "1")
    (output,) = answer["outputs"]
    assert output == {"name": "text_output", "datatype": "BYTES", "shape": [1, 1], "data": [TEXT]}
    assert (asked(fake).problem, asked(fake).beam_width, asked(fake).time_limit) == ("What is 3 + 4?", 4, 1.0)


# ---- the server and its models


def test_readiness_and_metadata_are_the_same_over_both(stub: Any, http: httpx2.Client) -> None:
    assert stub.ServerLive(pb.ServerLiveRequest()).live
    assert stub.ServerReady(pb.ServerReadyRequest()).ready
    assert http.get("/v2/health/live").json() == {"live": True}
    assert http.get("/v2/health/ready").json() == {"ready": True}
    server, told = stub.ServerMetadata(pb.ServerMetadataRequest()), http.get("/v2").json()
    assert (server.name, server.version, list(server.extensions)) == tuple(told.values())
    model, told = stub.ModelMetadata(pb.ModelMetadataRequest(name=MODEL)), http.get(URL).json()
    assert (model.name, list(model.versions)) == (told["name"], told["versions"]) == (MODEL, ["1"])
    assert [(each.name, each.datatype, list(each.shape)) for each in (*model.inputs, *model.outputs)] == [
        tuple(each.values()) for each in (*told["inputs"], *told["outputs"])
    ]
    for name, version, ready in ((MODEL, "", True), (MODEL, "1", True), (MODEL, "2", False), ("other", "", False)):
        assert stub.ModelReady(pb.ModelReadyRequest(name=name, version=version)).ready is ready
        path = f"/v2/models/{name}{version and f'/versions/{version}'}/ready"
        assert http.get(path).status_code == (200 if ready else 404)


def test_a_server_that_drains_is_alive_and_not_ready(another: Any) -> None:
    server, _, stub = another()
    server.server.session.refuse_new()
    with httpx2.Client(base_url=server.url, timeout=PATIENCE, trust_env=False) as http:
        assert stub.ServerLive(pb.ServerLiveRequest()).live
        assert not stub.ServerReady(pb.ServerReadyRequest()).ready
        assert not stub.ModelReady(pb.ModelReadyRequest(name=MODEL)).ready
        assert http.get("/v2/health/live").status_code == 200
        assert http.get("/v2/health/ready").status_code == http.get(f"{URL}/ready").status_code == 503
        assert refused(lambda: stub.ModelInfer(infer()))[0] == "UNAVAILABLE"


def test_reflection_describes_the_protocol(server: ServerThread) -> None:
    with grpc.insecure_channel(server.address, options=NO_PROXY) as channel:
        found = ProtoReflectionDescriptorDatabase(channel)
        assert "inference.GRPCInferenceService" in found.get_services()
        assert found.FindFileContainingSymbol("inference.ModelInferRequest").package == "inference"


def test_only_live_and_ready_need_no_login(another: Any, tmp_path: Path) -> None:
    server, _, stub = another(callers=callers_file(tmp_path, ann=""))
    with httpx2.Client(base_url=server.url, timeout=PATIENCE, trust_env=False) as http:
        assert stub.ServerLive(pb.ServerLiveRequest()).live
        assert stub.ServerReady(pb.ServerReadyRequest()).ready
        assert http.get("/v2/health/ready").status_code == 200
        closed = (
            lambda: stub.ServerMetadata(pb.ServerMetadataRequest()),
            lambda: stub.ModelReady(pb.ModelReadyRequest(name=MODEL)),
            lambda: stub.ModelMetadata(pb.ModelMetadataRequest(name=MODEL)),
            lambda: stub.ModelInfer(infer()),
            lambda: list(stub.ModelStreamInfer(iter([infer()]))),
        )
        assert {refused(call)[0] for call in closed} == {"UNAUTHENTICATED"}
        for answer in (http.get("/v2"), http.get(URL), http.get(f"{URL}/ready"), http.post(f"{URL}/infer")):
            assert answer.status_code == 401
            assert isinstance(answer.json()["error"], str)
        assert outputs(stub.ModelInfer(infer(), metadata=bearer("ann")))["answer"] == "42"


# ---- searches


def test_elements_may_stand_in_the_tensor(stub: Any) -> None:
    request = infer()
    del request.raw_input_contents[:]
    request.inputs[0].contents.bytes_contents.append(b"solve")
    assert outputs(stub.ModelInfer(request))["answer"] == "42"


def test_a_score_that_there_is_not_is_no_number(stub: Any, http: httpx2.Client) -> None:
    told = outputs(stub.ModelInfer(infer("nothing")))
    assert told["answer"] == ""
    assert math.isnan(told["score"])
    assert http.post(f"{URL}/generate", json={"text_input": "nothing"}).json()["score"] is None


def test_generated_text_has_what_the_extension_says(http: httpx2.Client, fake: ScriptedOrchestrator) -> None:
    body = {"id": "7", "text_input": "solve", "parameters": {"stream": False, "temperature": 0, "beam_width": 3}}
    for path in (f"{URL}/generate", f"{URL}/versions/1/generate"):
        answer = http.post(path, json=body).json()
        parameters = answer.pop("parameters")
        assert answer == {
            "id": "7", "model_name": MODEL, "model_version": "1", "text_output": TEXT, "answer": "42", "score": 0.5
        }  # fmt: skip
        assert (asked(fake).beam_width, asked(fake).expansion, asked(fake).temperature) == (3, 2, 0)
        assert parameters["seed"] == asked(fake).seed


def test_a_stream_of_generated_text_adds_up_to_the_text(http: httpx2.Client) -> None:
    def events(**parameters: Any) -> list[dict[str, Any]]:
        answer = http.post(f"{URL}/generate_stream", json={"text_input": "solve", "parameters": parameters})
        assert answer.headers["content-type"].startswith("text/event-stream")
        return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line]

    first, last = events()
    assert first["text_output"] + last["text_output"] == TEXT
    assert "answer" not in first
    assert last["answer"] == "42"
    assert [each["text_output"] for each in events(stream=False)] == [TEXT]


def test_requests_of_a_stream_run_side_by_side_and_a_wrong_one_ends_none(
    stub: Any, fake: ScriptedOrchestrator, server: ServerThread
) -> None:
    requests = [infer("hold", stream=False), infer("solve", stream=False, beam_width=-1), infer("solve", stream=False)]
    for number, request in enumerate(requests):
        request.id = str(number)
    told = stub.ModelStreamInfer(iter(requests))
    wrong, solved = sorted((next(told), next(told)), key=lambda each: each.infer_response.id)
    assert (wrong.infer_response.id, solved.infer_response.id) == ("1", "2")
    assert wrong.error_message.startswith("INVALID_ARGUMENT: parameters.beam_width: ")
    assert outputs(solved.infer_response)["answer"] == "42"
    fake.release.set()
    held = next(told)
    assert held.infer_response.id == "0"
    assert held.infer_response.parameters["triton_final_response"].bool_param
    assert next(told, None) is None


def test_a_message_that_cannot_be_decoded_ends_a_stream_behind_what_came_before(server: ServerThread) -> None:
    raws = [infer(stream=False).SerializeToString(), b"\0"]
    with grpc.insecure_channel(server.address, options=NO_PROXY) as channel:
        method = "/inference.GRPCInferenceService/ModelStreamInfer"
        call: Any = channel.stream_stream(method, bytes, pb.ModelStreamInferResponse.FromString)(iter(raws))
        assert outputs(next(call).infer_response)["answer"] == "42"
        assert refused(lambda: next(call))[0] == "INVALID_ARGUMENT"


def test_a_stream_that_is_left_ends_its_searches(stub: Any, fake: ScriptedOrchestrator, server: ServerThread) -> None:
    told = stub.ModelStreamInfer(iter([infer("hold"), infer("hold")]))
    wait_until(lambda: fake.running == 2)
    told.cancel()
    wait_until(lambda: fake.running == 0)
    wait_until(lambda: server.server.session.queue.held == 0)


# ---- priorities, timeouts, quotas


def test_a_lower_priority_is_sooner(another: Any) -> None:
    _, fake, stub = another(max_priority=10)
    for theirs, ours in ((0, 0), (1, 10), (2, 9), (11, 0), (12, -1), (111, -100)):
        stub.ModelInfer(infer(priority=theirs))
        assert list(fake.options.values())[-1].priority == ours, theirs
    code, text = refused(lambda: stub.ModelInfer(infer(priority=112)))
    assert (code, "parameters.priority" in text) == ("INVALID_ARGUMENT", True)


def test_a_timeout_is_in_microseconds_and_gives_the_best_so_far(stub: Any, fake: ScriptedOrchestrator) -> None:
    response = stub.ModelInfer(infer("hold", timeout=20_000))
    assert response.parameters["stop_reason"].string_param == "deadline"
    stub.ModelInfer(infer(timeout=2_000_000, time_limit=1.0))
    assert asked(fake).time_limit == 1.0
    stub.ModelInfer(infer(timeout=0))
    assert asked(fake).time_limit is None


def test_each_request_of_a_stream_counts_for_its_caller(another: Any, tmp_path: Path) -> None:
    _, fake, stub = another(callers=callers_file(tmp_path, ann="max_searches = 1"))
    told = stub.ModelStreamInfer(iter([infer("hold"), infer("hold")]), metadata=bearer("ann"))
    assert next(told).error_message.startswith("RESOURCE_EXHAUSTED: ann may have 1 searches")
    fake.release.set()
    assert not next(told).error_message


# ---- errors


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"nonsense": 1}, "parameters.nonsense"),
        ({"problem": "x"}, "parameters.problem"),
        ({"beam_width": 0}, "parameters.beam_width"),
        ({"budget": 0}, "parameters.budget"),
        ({"temperature": "hot"}, "parameters.temperature"),
        ({"priority": -1}, "parameters.priority"),
        ({"priority": True}, "parameters.priority"),
        ({"timeout": -1}, "parameters.timeout"),
        ({"timeout": 0.5}, "parameters.timeout"),
        ({"sequence_id": 3}, "parameters.sequence_id"),
        ({"stream": True}, "parameters.stream"),
        ({"stream": "yes"}, "parameters.stream"),
    ],
)
def test_wrong_parameters_are_named_over_both(
    change: dict[str, Any], place: str, stub: Any, http: httpx2.Client
) -> None:
    code, text = refused(lambda: stub.ModelInfer(infer(**change)))
    assert (code, f"{place}: " in text) == ("INVALID_ARGUMENT", True), text
    answer = http.post(f"{URL}/generate", json={"text_input": "solve", "parameters": change})
    assert answer.status_code == 400
    assert f"{place}: " in answer.json()["error"]


def changed(**fields: Any) -> pb.ModelInferRequest:
    request = infer()
    for name, value in fields.items():
        if name in ("shape", "raw_input_contents", "outputs", "inputs"):
            target = request.inputs[0].shape if name == "shape" else getattr(request, name)
            del target[:]
            target.extend(value)
        else:
            setattr(request.inputs[0], name, value)
    return request


@pytest.mark.parametrize(
    ("request_", "place"),
    [
        (changed(shape=[2]), "text_input"),
        (changed(shape=[-1]), "text_input"),
        (changed(shape=[1] * 9), "text_input"),
        (changed(datatype="FP32"), "text_input.datatype"),
        (changed(name="prompt"), "inputs"),
        (changed(inputs=[], raw_input_contents=[]), "inputs"),
        (changed(raw_input_contents=[]), "text_input"),
        (changed(raw_input_contents=[raw("a", "b")]), "text_input"),
        (changed(raw_input_contents=[raw("a"), raw("b")]), "raw_input_contents"),
        (changed(raw_input_contents=[b"\xff\0\0\0"]), "raw_input_contents[0]"),
        (changed(raw_input_contents=[b"\1\0"]), "raw_input_contents[0]"),
        (changed(raw_input_contents=[b"\1\0\0\0\xff"]), "text_input"),
        (changed(outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="logits")]), "outputs.logits"),
        (changed(outputs=2 * [pb.ModelInferRequest.InferRequestedOutputTensor(name="answer")]), "outputs.answer"),
    ],
)
def test_wrong_tensors_are_named(request_: pb.ModelInferRequest, place: str, stub: Any) -> None:
    code, text = refused(lambda: stub.ModelInfer(request_))
    assert (code, f"{place}: " in text) == ("INVALID_ARGUMENT", True), text


@pytest.mark.parametrize(
    ("body", "headers", "part"),
    [
        (b"{", {}, "not JSON"),
        (b"[]", {}, "JSON object"),
        (b"{}", {}, "inputs: is missing"),
        (b"{}", {"inference-header-content-length": "9"}, "the body has 2 bytes"),
        (b"{}", {"inference-header-content-length": "x"}, "a number of bytes"),
        (b'{"inputs":[{"name":"text_input","shape":[1],"datatype":"BYTES","data":["a"]}]}xx',
         {"inference-header-content-length": "78"}, "2 bytes behind the JSON unread"),
        (b'{"inputs":[{"name":"text_input","shape":[1],"datatype":"BYTES",'
         b'"parameters":{"binary_data_size":5}}]}', {}, "binary_data_size"),
        (b'{"inputs":[{"name":"text_input","shape":[1],"datatype":"BYTES","data":["a","b"]}]}', {}, "one element"),
        (b'{"inputs":[{"name":"text_input","shape":[1],"datatype":"BYTES","data":["a"],'
         b'"parameters":{"shared_memory_region":"x"}}]}', {}, "shared_memory_region"),
    ],
)  # fmt: skip
def test_wrong_bodies_are_refused_by_a_text(
    body: bytes, headers: dict[str, str], part: str, http: httpx2.Client
) -> None:
    answer = http.post(f"{URL}/infer", content=body, headers=headers)
    assert answer.status_code == 400
    assert part in answer.json()["error"]


def test_unknown_models_versions_and_paths_are_not_found(stub: Any, http: httpx2.Client) -> None:
    for name, version in (("other", ""), ("espalier@nonsense", ""), ("espalier@plain", ""), (MODEL, "2")):
        request = infer(model=name)
        request.model_version = version
        assert refused(lambda request=request: stub.ModelInfer(request))[0] == "NOT_FOUND"
        path = f"/v2/models/{name}{version and f'/versions/{version}'}/generate"
        answer = http.post(path, json={"text_input": "solve"})
        assert (answer.status_code, isinstance(answer.json()["error"], str)) == (404, True)
    assert isinstance(http.get("/v2/nothing").json()["error"], str)
    assert isinstance(http.get(f"{URL}/infer/x/y").json()["error"], str)
    assert http.post(f"{URL}/ready").status_code == 405


def test_failures_of_searches_have_their_codes(stub: Any, http: httpx2.Client) -> None:
    assert refused(lambda: stub.ModelInfer(infer("fail")))[0] == "INTERNAL"
    assert http.post(f"{URL}/generate", json={"text_input": "fail"}).status_code == 500
    answer = http.post(f"{URL}/generate_stream", json={"text_input": "fail"})
    assert (answer.status_code, isinstance(answer.json()["error"], str)) == (500, True)
    (told,) = stub.ModelStreamInfer(iter([infer("fail")]))
    assert told.error_message.startswith("INTERNAL: ")


def test_compressed_bodies_are_refused(http: httpx2.Client) -> None:
    answer = http.post(f"{URL}/infer", content=b"x", headers={"content-encoding": "gzip"})
    assert (answer.status_code, answer.json()) == (415, {"error": "compressed bodies are not read"})
