"""However a call ends, through whichever endpoint, nothing of it is left: 32 callers at once, seen from outside."""

import json
import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from exposition import scrape
from raw_client import NO_PROXY
from raw_http import RawConnection, post
from server_thread import ServerThread
from tiny_models import disturb

from espalier.experiments.demo import generator_path
from espalier.experiments.executors.process_transport import ProcessTransport
from espalier.experiments.executors.worker_executor import WorkerExecutor
from espalier.kserve import inference_pb2 as kserve
from espalier.kserve.inference_pb2_grpc import GRPCInferenceServiceStub
from espalier.search import algorithms
from espalier.search.client import SearchClient, ServiceError
from espalier.search.growth import search as running
from espalier.search.run.completion import RunningCompletion
from espalier.search.run.load import load_orchestrator
from espalier.search.run.rollout import RolloutTree
from espalier.search.run.scores import RunningScoreSession
from espalier.search.run.settings import RuntimeSettings
from espalier.v1 import search_pb2 as pb
from espalier.v1.search_pb2_grpc import SearchServiceStub

CALLERS = 32
LONG = 60.0
"""Seconds that anything may take before the test fails."""
FAULT = "A problem at which the algorithm breaks."
SMALL = {
    "problem": "Tom has 38 coins. (a) He finds 47 more. (b) He loses 12. How many coins does he have now?",
    "beam_width": 2,
    "expansion": 2,
}
SEEDED = {"seed": 0}
"""Without a seed, KServe's endpoints draw one, and now and then no path of `SMALL` is right."""
LARGE = {**SMALL, "algorithm": "majority", "beam_width": 128, "expansion": 1, "temperature": 2.0, "early_stop": "off"}
"""Takes seconds beside seven others, so that no test meets its end."""

CODES = {400: "INVALID_ARGUMENT", 429: "RESOURCE_EXHAUSTED", 500: "INTERNAL", 503: "UNAVAILABLE"}
WORDS = {"internal_error": "INTERNAL", "service_unavailable": "UNAVAILABLE"}
"""Codes of the error that ends a stream of HTTP."""


class Unary:
    """One call of a kind, and how it ended: `OK`, or the name of a google.rpc code."""

    def __init__(self, server: ServerThread) -> None:
        self._channel = grpc.insecure_channel(
            server.address, options=[*NO_PROXY, ("grpc.use_local_subchannel_pool", 1)]
        )
        self._stub = SearchServiceStub(self._channel)

    def ask(self, fields: dict[str, Any], seconds: float = LONG) -> str:
        """Wait for the end, or leave after some seconds."""
        try:
            self._wait(self._begin(fields, seconds))
        except grpc.RpcError as error:
            return error.code().name  # type: ignore[attr-defined]
        return "OK"

    def leave(self, fields: dict[str, Any], when: Callable[[], object]) -> None:
        """Begin a call and cancel it when told."""
        call = self._begin(fields, LONG)
        when()
        call.cancel()

    def close(self) -> None:
        self._channel.close()

    def _begin(self, fields: dict[str, Any], seconds: float) -> Any:
        return self._stub.SolveProblem.future(message(fields), seconds)  # type: ignore[attr-defined]

    def _wait(self, call: Any) -> None:
        assert call.result().result.answer == "73"


class Stream(Unary):
    def _begin(self, fields: dict[str, Any], seconds: float) -> Any:
        return self._stub.SolveProblemStream(pb.SolveProblemStreamRequest(request=message(fields)), timeout=seconds)

    def _wait(self, call: Any) -> None:
        *_, last = call
        assert last.result.answer == "73"


class Http:
    stream = False
    path = "/v1/searches"

    def __init__(self, server: ServerThread) -> None:
        self._url = server.url or ""

    def ask(self, fields: dict[str, Any], seconds: float = LONG) -> str:
        timeout = httpx2.Timeout(LONG, read=seconds)
        try:
            # A stream's comments would reset the clock, but do not come so soon.
            with (
                httpx2.Client(timeout=timeout, trust_env=False) as client,
                client.stream("POST", f"{self._url}{self.path}", json=self._body(fields)) as response,
            ):
                return self._end(response, time.monotonic() + seconds)
        except httpx2.ReadTimeout:
            return "DEADLINE_EXCEEDED"
        except httpx2.NetworkError:
            return "UNAVAILABLE"

    def leave(self, fields: dict[str, Any], when: Callable[[], object]) -> None:
        body = json.dumps(self._body(fields)).encode()
        with RawConnection(self._url) as connection:
            connection.send(post(body, self.path))
            when()

    def close(self) -> None:
        pass

    def _body(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {**fields, "stream": self.stream}

    def _end(self, response: httpx2.Response, due: float) -> str:
        if response.status_code != 200:
            response.read()
            return CODES[response.status_code]
        assert json.loads(response.read())["answer"] == "73"
        return "OK"


class HttpStream(Http):
    stream = True

    def _end(self, response: httpx2.Response, due: float) -> str:
        if response.status_code != 200:
            return super()._end(response, due)
        event = ""
        for line in response.iter_lines():
            if time.monotonic() > due:
                return "DEADLINE_EXCEEDED"
            name, _, data = line.partition(": ")
            if name == "event":
                event = data
            elif name == "data" and event == "error":
                return WORDS[json.loads(data)["error"]["code"]]
            elif name == "data" and event == "result":
                assert json.loads(data)["result"]["answer"] == "73"
                return "OK"
        return "UNAVAILABLE"


class Completions(Http):
    """Plain sampling in the place of a search: as many samples as that has paths."""

    path = "/v1/completions"

    def _body(self, fields: dict[str, Any]) -> dict[str, Any]:
        sampling = {name: fields[name] for name in ("temperature",) if name in fields}
        head = {"model": "espalier", "prompt": fields["problem"], "stream": self.stream, "max_tokens": 400}
        return {**head, "n": fields["beam_width"], "seed": 1, "logprobs": 0, **sampling}

    def _end(self, response: httpx2.Response, due: float) -> str:
        if response.status_code != 200:
            response.read()
            return CODES[response.status_code]
        assert all(choice["finish_reason"] for choice in json.loads(response.read())["choices"])
        return "OK"


class CompletionsStream(Completions):
    stream = True

    def _end(self, response: httpx2.Response, due: float) -> str:
        if response.status_code != 200:
            return super()._end(response, due)
        ended: Counter[int] = Counter()
        for line in response.iter_lines():
            if time.monotonic() > due:
                return "DEADLINE_EXCEEDED"
            name, _, data = line.partition(": ")
            if name != "data":
                continue
            if data == "[DONE]":
                assert set(ended.values()) == {1}
                return "OK"
            if error := json.loads(data).get("error"):
                return WORDS[error["code"]]
            for choice in json.loads(data)["choices"]:
                assert not ended[choice["index"]], "text after the end of a choice"
                ended[choice["index"]] += choice["finish_reason"] is not None
        return "UNAVAILABLE"


class Infer(Unary):
    """The same searches by the KServe protocol."""

    def __init__(self, server: ServerThread) -> None:
        super().__init__(server)
        self._inference: Any = GRPCInferenceServiceStub(self._channel)

    def _begin(self, fields: dict[str, Any], seconds: float) -> Any:
        return self._inference.ModelInfer.future(inference(fields), seconds)

    def _wait(self, call: Any) -> None:
        self._check(call.result())

    def _check(self, response: kserve.ModelInferResponse) -> None:
        assert [output.name for output in response.outputs] == ["text_output", "answer", "score"]
        assert response.raw_output_contents[1] == b"\2\0\0\x0073"


class InferStream(Infer):
    """A stream of one request: how it ended is told in the stream, not by the call's status."""

    def ask(self, fields: dict[str, Any], seconds: float = LONG) -> str:
        try:
            (told,) = self._begin(fields, seconds)
        except grpc.RpcError as error:
            return error.code().name  # type: ignore[attr-defined]
        if told.error_message:
            return told.error_message.partition(":")[0]
        self._check(told.infer_response)
        return "OK"

    def _begin(self, fields: dict[str, Any], seconds: float) -> Any:
        return self._inference.ModelStreamInfer(iter([inference(fields, stream=False)]), seconds)


class GenerateStream(Http):
    path = "/v2/models/espalier/generate_stream"

    def _body(self, fields: dict[str, Any]) -> dict[str, Any]:
        parameters = {name: value for name, value in {**SEEDED, **fields}.items() if name != "problem"}
        return {"text_input": fields["problem"], "parameters": parameters}

    def _end(self, response: httpx2.Response, due: float) -> str:
        if response.status_code != 200:
            return super()._end(response, due)
        for line in response.iter_lines():
            if time.monotonic() > due:
                return "DEADLINE_EXCEEDED"
            if line.startswith("data: ") and json.loads(line[6:]).get("answer") == "73":
                return "OK"
        return "UNAVAILABLE"


class Rollouts(Unary):
    """Trees of rollouts in the place of searches, with as many solutions as those have paths."""

    def _begin(self, fields: dict[str, Any], seconds: float) -> Any:
        width = fields["beam_width"]
        size: dict[str, Any] = {"max_tokens": 64}
        if width == LARGE["beam_width"]:
            size = {"max_tokens": 2048, "max_step_tokens": 8, "labels": pb.LABELS_MONTE_CARLO, "continuations": 8}
        sampled = {"temperature": fields.get("temperature", 0.8), **size}
        asked = pb.RolloutRequest(problem=fields["problem"], solutions=width, golds=["73"], **sampled)
        return self._stub.Rollout(asked, timeout=seconds)  # type: ignore[attr-defined]

    def _wait(self, call: Any) -> None:
        *pieces, last = call
        steps = [step for piece in pieces for step in piece.steps.steps]
        ends = sum(step.samples for step in steps if step.HasField("end"))
        assert ends == sum(step.samples for step in steps if not step.HasField("parent"))
        assert last.result.stop_reason == pb.STOP_REASON_FINISHED


class Sessions(Unary):
    """Sessions of scores in the place of searches: the larger, the longer they stay open."""

    def __init__(self, server: ServerThread) -> None:
        super().__init__(server)
        self._over = threading.Event()

    def close(self) -> None:
        self._over.set()
        super().close()

    def _begin(self, fields: dict[str, Any], seconds: float) -> Any:
        width = fields["beam_width"]

        def messages() -> Iterator[pb.ScoreStepsRequest]:
            opening = pb.ScoreSession(problem=fields["problem"], max_nodes=64 if width > 0 else width, max_tokens=1024)
            steps = [pb.SessionStep(node=i + 1, parent=i // 2, text=f"{i}+1={i + 1}") for i in range(16)]
            yield pb.ScoreStepsRequest(open=opening, steps=steps)
            if width > 2:
                self._over.wait(LONG if width == LARGE["beam_width"] else 1.0)

        call = self._stub.ScoreSteps(messages(), timeout=seconds)  # type: ignore[attr-defined]
        call.add_callback(self._over.set)
        return call

    def _wait(self, call: Any) -> None:
        *scored, last = call
        assert sum(len(each.scored.scores) for each in scored) == 16
        assert all(score.HasField("score") for each in scored for score in each.scored.scores)
        assert last.result.usage.nodes == 16


ENDPOINTS = {
    "grpc": Unary,
    "grpc stream": Stream,
    "http": Http,
    "http stream": HttpStream,
    "completions": Completions,
    "completions stream": CompletionsStream,
    "infer": Infer,
    "infer stream": InferStream,
    "generate stream": GenerateStream,
    "rollouts": Rollouts,
    "sessions": Sessions,
}
ways_in = pytest.mark.parametrize(
    "endpoints",
    [list(ENDPOINTS.values()), *(pytest.param([each], marks=pytest.mark.slow) for each in ENDPOINTS.values())],
    ids=["all at once", *ENDPOINTS],
)


def message(fields: dict[str, Any]) -> pb.SolveProblemRequest:
    enums = {"algorithm": "ALGORITHM_", "early_stop": "EARLY_STOP_"}
    names = {name: prefix + str(fields[name]).upper() for name, prefix in enums.items() if name in fields}
    return pb.SolveProblemRequest(**{**fields, **names})


def inference(fields: dict[str, Any], **more: Any) -> kserve.ModelInferRequest:
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    values = {name: value for name, value in {**SEEDED, **fields, **more}.items() if name != "problem"}
    parameters = {name: kserve.InferParameter(**{kinds[type(value)]: value}) for name, value in values.items()}
    tensor = kserve.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(fields["problem"].encode())
    return kserve.ModelInferRequest(model_name="espalier", inputs=[tensor], parameters=parameters)


@pytest.fixture(scope="module")
def orchestrator() -> Iterator[Any]:
    """The bundled pair; its algorithms break at one problem, after they have grown a step."""
    make_algorithm = algorithms.make_algorithm

    def broken(request: Any, root: Any) -> Any:
        algorithm = make_algorithm(request, root)
        if request.problem == FAULT:
            algorithm.tell = None  # type: ignore[method-assign, assignment]
        return algorithm

    finish = RunningCompletion._finish

    def broken_finish(self: RunningCompletion, *args: Any) -> None:
        if self.resolved.request.prompts == (FAULT,):
            raise RuntimeError(FAULT)
        finish(self, *args)

    add = RunningScoreSession._add

    def broken_add(self: RunningScoreSession, *args: Any) -> None:
        if self.resolved.request.problem == FAULT:
            raise RuntimeError(FAULT)
        add(self, *args)

    sample = RolloutTree._add

    def broken_tree(self: RolloutTree, *args: Any) -> None:
        if self._settings.problem == FAULT:
            raise RuntimeError(FAULT)
        sample(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutTree, "_add", broken_tree)
        patch.setattr(RunningScoreSession, "_add", broken_add)
        patch.setattr(running, "make_algorithm", broken)
        patch.setattr(RunningCompletion, "_finish", broken_finish)
        yield load_orchestrator(RuntimeSettings(kv_memory=2**30, max_running=8))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the bundled generator, and one with slightly other weights."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in ("original", "changed"):
        shutil.copytree(generator_path(), folder / name)
    disturb(folder / "changed", share=0.001)
    return folder


@pytest.fixture
def server(orchestrator: Any, checkpoints: Path, start: Callable[..., ServerThread]) -> ServerThread:
    running = start(lambda: orchestrator, max_searches=8, http_port=0, reload_folder=checkpoints)
    running.wait_loaded()
    return running


@pytest.fixture
def callers(server: ServerThread) -> Iterator[Callable[[list[Any]], list[Any]]]:
    """Makes the callers, who take turns at the endpoints."""
    with ExitStack() as opened:

        def make(endpoints: list[Any]) -> list[Any]:
            made = [endpoint(server) for endpoint in islice(cycle(endpoints), CALLERS)]
            for each in made:
                opened.callback(each.close)
            return made

        yield make


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(CALLERS) as pool:
        yield pool


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def nothing_left(server: ServerThread) -> bool:
    """Whether the server says that it holds nothing, and still answers."""
    with SearchClient(server.address) as client:
        seen = client.server_info(LONG)
        held = seen.occupancy
        live = sum(blocks.live for blocks in held.kv_blocks.values())
        return (live, held.running, held.waiting, seen.admitted_calls, seen.waiting_calls) == (0, 0, 0, 0, 0)


def outcomes(server: ServerThread) -> set[str]:
    """How searches have ended, as the server counts them: one that nobody cancelled would have finished."""
    return set(scrape(server).series("espalier_searches_total", "outcome"))


def all_in(server: ServerThread, count: int = CALLERS) -> bool:
    with SearchClient(server.address) as client:
        seen = client.server_info(LONG)
        return seen.admitted_calls + seen.waiting_calls >= count


@ways_in
def test_calls_that_are_answered_leave_nothing(endpoints, server, callers, pool):
    assert Counter(pool.map(lambda each: each.ask(SMALL), callers(endpoints))) == {"OK": CALLERS}
    wait_until(lambda: nothing_left(server))


@ways_in
def test_calls_that_are_cancelled_end_their_searches(endpoints, server, callers, pool):
    leave = threading.Event()
    together = [pool.submit(each.leave, LARGE, lambda: leave.wait(LONG)) for each in callers(endpoints)]
    wait_until(lambda: all_in(server))
    leave.set()
    for each in together:
        each.result(LONG)
    wait_until(lambda: nothing_left(server))
    assert outcomes(server) == {"cancelled"}


@ways_in
def test_calls_whose_deadline_passes_end_their_searches(endpoints, server, callers, pool):
    ended = Counter(pool.map(lambda each: each.ask(LARGE, 0.5), callers(endpoints)))
    assert ended == {"DEADLINE_EXCEEDED": CALLERS}
    wait_until(lambda: nothing_left(server))
    assert outcomes(server) == {"cancelled"}


@ways_in
def test_wrong_calls_leave_nothing(endpoints, server, callers, pool):
    ended = Counter(pool.map(lambda each: each.ask({**SMALL, "beam_width": -1}), callers(endpoints)))
    assert ended == {"INVALID_ARGUMENT": CALLERS}
    wait_until(lambda: nothing_left(server))


@ways_in
def test_calls_that_are_too_many_are_refused_and_leave_nothing(endpoints, orchestrator, start, pool):
    server = start(lambda: orchestrator, max_searches=4, max_queue=4, http_port=0)
    server.wait_loaded()
    with ExitStack() as opened:
        made = [endpoint(server) for endpoint in islice(cycle(endpoints), CALLERS)]
        for each in made:
            opened.callback(each.close)
        ended = Counter(pool.map(lambda each: each.ask({**LARGE, "temperature": 0.3, "beam_width": 16}), made))
    assert set(ended) == {"OK", "RESOURCE_EXHAUSTED"}
    assert ended["OK"] >= 8
    wait_until(lambda: nothing_left(server))


@ways_in
def test_searches_that_break_leave_nothing_and_the_others_go_on(endpoints, server, callers, pool):
    made = callers(endpoints)
    faults = [pool.submit(each.ask, {**SMALL, "problem": FAULT}) for each in made[::2]]
    others = [pool.submit(each.ask, SMALL) for each in made[1::2]]
    assert {each.result(LONG) for each in faults} == {"INTERNAL"}
    assert {each.result(LONG) for each in others} == {"OK"}
    wait_until(lambda: nothing_left(server))


@ways_in
def test_a_server_that_shuts_down_tells_every_call_and_leaves_nothing(endpoints, server, callers, pool, orchestrator):
    together = [pool.submit(each.ask, LARGE) for each in callers(endpoints)]
    wait_until(lambda: all_in(server))
    server.call(server.server.stop())
    assert {each.result(LONG) for each in together} == {"UNAVAILABLE"}
    with SearchClient(server.address) as client, pytest.raises(ServiceError):
        client.server_info(1.0)
    orchestrator.engine.check_drained()


def test_no_call_is_lost_with_a_worker_that_is_killed(start, pool):
    """Callers at all endpoints at once, as each worker takes seconds to start."""
    runtime = RuntimeSettings(kv_memory=2**28, threads=1, max_running=4)
    transport = ProcessTransport(runtime, 2)
    server = start(lambda: WorkerExecutor(transport, runtime), max_searches=8, http_port=0)
    wait_until(lambda: server.server.engine.loaded.done())
    with ExitStack() as opened:
        made = [endpoint(server) for endpoint in ENDPOINTS.values() for _ in range(CALLERS // len(ENDPOINTS))]
        for each in made:
            opened.callback(each.close)
        request = {**LARGE, "temperature": 0.3, "beam_width": 24}
        together = [(type(each), pool.submit(each.ask, request)) for each in made]
        wait_until(lambda: all_in(server, 8))
        process = transport._processes[0]
        assert process
        os.kill(process.pid, signal.SIGKILL)
        assert {(endpoint, each.result(LONG)) for endpoint, each in together} == {
            (endpoint, "OK") for endpoint in ENDPOINTS.values()
        }
    wait_until(lambda: nothing_left(server))


def test_no_call_is_lost_when_weights_are_reloaded(server: ServerThread, pool, orchestrator):
    """Callers at all endpoints at once; half of the reloads lead back."""
    before = orchestrator.describe_models()["generator"]
    with ExitStack() as opened:
        client = opened.enter_context(SearchClient(server.address))
        made = [endpoint(server) for endpoint in ENDPOINTS.values() for _ in range(CALLERS // len(ENDPOINTS))]
        for each in made:
            opened.callback(each.close)
        request = {**LARGE, "temperature": 0.3, "beam_width": 24}
        together = [(type(each), pool.submit(each.ask, request)) for each in made]
        wait_until(lambda: all_in(server, 8))
        begun = sum(not each.done() for _, each in together)
        digests = [client.reload(name).digest for name in ("changed", "original") * 2]
        assert begun > 8, "calls were in flight"
        assert not all(each.done() for _, each in together)
        assert {(endpoint, each.result(LONG)) for endpoint, each in together} == {
            (endpoint, "OK") for endpoint in ENDPOINTS.values()
        }
    assert digests[1::2] == [before] * 2
    assert len({*digests}) == 2
    wait_until(lambda: nothing_left(server))
    orchestrator.engine.check_drained()
