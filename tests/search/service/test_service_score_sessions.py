"""Sessions of scores over gRPC, by Espalier's clients and by raw messages; over a real engine."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import grpc
import pytest
from callers_files import callers_file
from raw_client import NO_PROXY
from server_thread import PATIENCE, ServerThread, wait_until

from espalier.engine.errors import InvalidRequestError, MisuseError
from espalier.search.client import NO_RETRIES, AsyncSearchClient, SearchClient, ServiceError
from espalier.search.client.score_session import AsyncScoreSession
from espalier.search.conversation import ChatMessage, ChatRole
from espalier.search.result import Finished, StopReason
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.scores import (
    NodeScore,
    ScoreResult,
    ScoreSessionRequest,
    SessionStep,
    SessionTurn,
    StepsScored,
)
from espalier.search.service.grpc_api import convert, servicer
from espalier.v1 import search_pb2 as pb
from espalier.v1.search_pb2_grpc import SearchServiceStub

PROBLEM = "Tom starts with 38 coins. He finds 47 more."
FIRST, SECOND, OTHER = "38+47=85", "85-12=73", "38+47=75"
REQUEST = ScoreSessionRequest(
    PROBLEM,
    (ChatMessage(ChatRole.USER, "Hello"),),
    max_nodes=8,
    max_tokens=300,
    seed=7,
    verifier_budget=500,
    time_limit=9.5,
)
SMALL = {"max_nodes": 16, "max_tokens": 256}


@pytest.fixture
def orchestrator(make_orchestrator: Callable[..., Orchestrator]) -> Orchestrator:
    return make_orchestrator()


@pytest.fixture
def server(orchestrator: Orchestrator, start: Callable[..., ServerThread]) -> Iterator[ServerThread]:
    running = start(lambda: orchestrator)
    running.wait_loaded()
    yield running
    wait_until(lambda: nothing_left(running))


@pytest.fixture
def client(server: ServerThread) -> Iterator[SearchClient]:
    with SearchClient(server.address) as client:
        yield client


def nothing_left(server: ServerThread) -> bool:
    seen = server.info()
    live = sum(blocks.live for blocks in seen.occupancy.kv_blocks.values())
    return (live, seen.occupancy.running, seen.admitted_calls, seen.waiting_calls) == (0, 0, 0, 0)


def raw(server: ServerThread, messages: Any) -> tuple[str, list[pb.ScoreStepsResponse]]:
    """Send messages as a session, and close its side; its status, and what came before."""
    with grpc.insecure_channel(server.address, options=NO_PROXY) as channel:
        received: list[Any] = []
        try:
            for response in SearchServiceStub(channel).ScoreSteps(iter(messages), timeout=PATIENCE):  # type: ignore[attr-defined]
                received.append(response)
        except grpc.RpcError as error:
            return error.code().name, received  # type: ignore[attr-defined]
        return "OK", received


# ---- messages


def test_every_field_of_a_session_comes_through() -> None:
    message = convert.request_to_wire(REQUEST, pb.ScoreSession, priority=3)
    assert convert.request_from_wire(message) == (REQUEST, [])
    assert message.priority == 3
    assert {field.name for field in message.DESCRIPTOR.fields} == {field.name for field in fields(REQUEST)} | {
        "priority"
    }
    turn = SessionTurn((SessionStep(2**62, 0, "a"), SessionStep(3, 2**62, "b")), (3,))
    assert convert.from_wire(convert.to_wire(turn)) == turn
    scored = StepsScored("s", (NodeScore(2, 0.5), NodeScore(3, reason="why")))
    assert convert.event_from_wire(convert.event_to_wire(scored, kind=pb.ScoreStepsResponse)) == scored
    assert convert.event_from_wire(pb.ScoreStepsResponse()) is None


# ---- the clients


def test_scores_of_a_session_are_those_of_whole_solutions(client: SearchClient) -> None:
    whole = client.score(PROBLEM, [[FIRST, SECOND], [FIRST, OTHER]], PATIENCE)
    with client.score_session(PROBLEM, PATIENCE, **SMALL) as session:
        first = session.score(FIRST)
        below = session.score_many([(first.node, SECOND), (first.node, OTHER)])
        assert session.result is None
    result = session.close()
    assert [(first.score, each.score) for each in below] == [each.step_scores for each in whole.solutions]
    assert result.usage.verifier_tokens == whole.usage.verifier_tokens
    assert (result.scorer, result.digests, result.stop_reason) == (whole.scorer, whole.digests, StopReason.FINISHED)
    assert result.configuration == ScoreSessionRequest(PROBLEM, **SMALL)  # type: ignore[arg-type]


def test_steps_of_one_solution_may_be_given_as_one_list(client: SearchClient) -> None:
    one = client.score(PROBLEM, [FIRST, SECOND], PATIENCE)
    assert one.solutions == client.score(PROBLEM, [[FIRST, SECOND]], PATIENCE).solutions


def test_tasks_of_asyncio_share_a_session_and_several_are_open_at_once(server: ServerThread) -> None:
    async def path(session: Any, *steps: str) -> list[float | None]:
        node, scores = 0, list[float | None]()
        for step in steps:
            scored = await session.score(step, node)
            node = scored.node
            scores.append(scored.score)
        return scores

    async def one(client: AsyncSearchClient) -> list[list[float | None]]:
        async with client.score_session(PROBLEM, PATIENCE, **SMALL) as session:
            return await asyncio.gather(path(session, FIRST, SECOND), path(session, FIRST, OTHER))

    async def run() -> list[Any]:
        async with AsyncSearchClient(server.address) as client:
            return await asyncio.gather(*(one(client) for _ in range(8)))

    with SearchClient(server.address) as client:
        whole = client.score(PROBLEM, [[FIRST, SECOND], [FIRST, OTHER]], PATIENCE)
    expected = [list(solution.step_scores) for solution in whole.solutions]
    assert asyncio.run(run()) == [expected] * 8


def test_released_nodes_take_no_more_steps_and_make_room(client: SearchClient) -> None:
    with client.score_session(PROBLEM, PATIENCE, max_nodes=2, max_tokens=256) as session:
        first, other = session.score_many([(0, FIRST), (0, OTHER)])
        assert "max_nodes=2; release nodes" in session.score(SECOND, first.node).reason
        session.release(other.node)
        assert session.score(SECOND, first.node).score is not None
        with pytest.raises(InvalidRequestError, match=f"there is no node {other.node}, or it was released"):
            session.score(SECOND, other.node)
        assert session.score(OTHER, first.node).score is None


def test_a_session_that_has_ended_says_why(client: SearchClient) -> None:
    session = client.score_session(PROBLEM, PATIENCE, time_limit=0.2, **SMALL)
    assert session.score(FIRST).score is not None
    wait_until(lambda: session.result is not None)
    scored = session.score(SECOND)
    assert (scored.score, scored.reason) == (None, "the session has ended: deadline")
    with pytest.raises(MisuseError, match="the session has ended: deadline"):
        session.release(1)
    assert session.close().stop_reason is StopReason.DEADLINE


class EndedCall:
    """A call that gives a session's result, and then fails, as gRPC says where a step was written at that moment."""

    def __init__(self, result: ScoreResult) -> None:
        self.result = result
        self.cancelled = False

    async def __aiter__(self) -> AsyncIterator[pb.ScoreStepsResponse]:
        yield convert.event_to_wire(Finished("id", self.result), kind=pb.ScoreStepsResponse)
        await asyncio.sleep(0)
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, "Internal error from Core")

    async def write(self, _: pb.ScoreStepsRequest) -> None:
        raise asyncio.InvalidStateError

    def cancel(self) -> None:
        self.cancelled = True


def test_a_step_that_is_written_as_its_session_ends_is_told_why_there_is_no_score(client: SearchClient) -> None:
    with client.score_session(PROBLEM, PATIENCE, **SMALL) as session:
        pass
    assert session.result

    async def run(call: EndedCall) -> NodeScore:
        async def open_call() -> EndedCall:
            return call

        late = AsyncScoreSession(open_call, REQUEST, "server", "id")
        await late.open()
        scored = await late.score(SECOND)
        with pytest.raises(MisuseError, match="the session has ended"):
            await late.release(1)
        return scored

    ended = EndedCall(session.result)
    scored = asyncio.run(run(ended))
    assert (scored.score, scored.reason) == (None, f"the session has ended: {session.result.stop_reason}")
    assert ended.cancelled


def test_what_is_wrong_with_a_session_is_said_as_it_is_opened(client: SearchClient) -> None:
    with pytest.raises(InvalidRequestError, match="max_paths"):
        client.score_session(PROBLEM, PATIENCE, max_paths=3)
    with pytest.raises(InvalidRequestError) as refused:
        client.score_session(ScoreSessionRequest(" ", max_nodes=0), PATIENCE)
    assert {violation.field for violation in refused.value.violations} == {"problem", "max_nodes"}
    with pytest.raises(InvalidRequestError, match="lower max_nodes or max_tokens of the session"):
        client.score_session(PROBLEM, PATIENCE, max_tokens=2**20)


def test_a_session_waits_for_its_place_and_one_too_many_is_refused(
    orchestrator: Orchestrator, start: Callable[..., ServerThread]
) -> None:
    server = start(lambda: orchestrator, max_searches=1, max_queue=1)
    server.wait_loaded()
    with SearchClient(server.address, retry=NO_RETRIES) as client, ThreadPoolExecutor(1) as pool:
        first = client.score_session(PROBLEM, PATIENCE, **SMALL)
        waiting = pool.submit(client.score_session, PROBLEM, PATIENCE, **SMALL)
        wait_until(lambda: server.info().waiting_calls == 1)
        with pytest.raises(ServiceError) as refused:
            client.score_session(PROBLEM, PATIENCE, **SMALL)
        assert refused.value.code == "RESOURCE_EXHAUSTED"
        assert not waiting.done()
        first.close()
        with waiting.result(PATIENCE) as second:
            assert second.score(FIRST).score is not None
    wait_until(lambda: nothing_left(server))


def test_a_server_without_a_verifier_refuses_sessions(
    make_orchestrator: Callable[..., Orchestrator], start: Callable[..., ServerThread]
) -> None:
    alone = make_orchestrator(verifier=None)
    server = start(lambda: alone)
    server.wait_loaded()
    with SearchClient(server.address) as client, pytest.raises(InvalidRequestError, match="no verifier is loaded"):
        client.score_session(PROBLEM, PATIENCE)


# ---- whoever leaves


def test_an_exception_within_a_session_ends_it_on_the_server(client: SearchClient, server: ServerThread) -> None:
    def leave() -> None:
        with client.score_session(PROBLEM, PATIENCE, **SMALL) as session:
            session.score(FIRST)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave()
    wait_until(lambda: nothing_left(server))


def test_a_client_that_is_closed_ends_its_sessions(server: ServerThread) -> None:
    client = SearchClient(server.address)
    session = client.score_session(PROBLEM, PATIENCE, **SMALL)
    session.score(FIRST)
    client.close()
    wait_until(lambda: nothing_left(server))
    with pytest.raises((ServiceError, MisuseError)):
        session.score(SECOND)


def test_a_connection_that_breaks_frees_every_block(server: ServerThread, orchestrator: Orchestrator) -> None:
    channel = grpc.insecure_channel(server.address, options=NO_PROXY)
    hold = threading.Event()

    def messages() -> Iterator[pb.ScoreStepsRequest]:
        steps = [pb.SessionStep(node=i + 1, parent=i, text=FIRST) for i in range(8)]
        yield pb.ScoreStepsRequest(open=pb.ScoreSession(problem=PROBLEM, **SMALL), steps=steps)
        hold.wait(PATIENCE)

    call = SearchServiceStub(channel).ScoreSteps(messages(), timeout=PATIENCE)  # type: ignore[attr-defined]
    next(call)
    assert not nothing_left(server)
    channel.close()
    hold.set()
    wait_until(lambda: nothing_left(server))
    wait_until(lambda: not orchestrator.busy)
    orchestrator.engine.check_drained()


def test_a_server_that_shuts_down_ends_sessions(orchestrator: Orchestrator, start: Callable[..., ServerThread]) -> None:
    server = start(lambda: orchestrator, drain_seconds=0.1)
    server.wait_loaded()
    with SearchClient(server.address) as client:
        session = client.score_session(PROBLEM, PATIENCE, **SMALL)
        session.score(FIRST)
        server.call(server.server.stop())
        with pytest.raises(ServiceError) as ended:
            session.score(SECOND)
        assert ended.value.code == "UNAVAILABLE"


# ---- raw messages


def opening(*steps: tuple[int, int, str], release: tuple[int, ...] = (), **open_: Any) -> pb.ScoreStepsRequest:
    whole = pb.ScoreSession(**{"problem": PROBLEM, **SMALL, **open_})
    return pb.ScoreStepsRequest(open=whole, steps=some(*steps), release=release)


def some(*steps: tuple[int, int, str]) -> list[pb.SessionStep]:
    return [pb.SessionStep(node=node, parent=parent, text=text) for node, parent, text in steps]


def test_a_session_in_one_message_is_answered_and_summed_up(server: ServerThread) -> None:
    code, received = raw(server, [opening((5, 0, FIRST), (9, 5, SECOND), release=(5,))])
    assert code == "OK"
    *scored, last = received
    assert [score.node for each in scored for score in each.scored.scores] == [5, 9]
    assert last.result.usage.nodes == 2
    assert last.result.stop_reason == pb.STOP_REASON_FINISHED
    assert not last.result.solutions


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [pb.ScoreStepsRequest(steps=some((1, 0, FIRST)))],
        [opening(), opening()],
        [opening((1, 0, FIRST), (1, 0, OTHER))],
        [opening((1, 4, FIRST))],
        [opening((0, 0, FIRST))],
        [opening((-1, 0, FIRST))],
        [opening((1, 0, ""))],
        [opening(release=(7,))],
        [opening(priority=101)],
        [opening(max_nodes=-1)],
        [opening(problem="")],
        [opening((1, 0, FIRST)), pb.ScoreStepsRequest(steps=some((2, 9, SECOND)))],
    ],
)
def test_wrong_messages_end_a_session_as_invalid(messages: list[Any], server: ServerThread) -> None:
    code, _ = raw(server, messages)
    assert code == "INVALID_ARGUMENT"
    wait_until(lambda: nothing_left(server))


def test_steps_that_come_faster_than_they_are_scored_are_all_answered(server: ServerThread) -> None:
    def messages() -> Iterator[pb.ScoreStepsRequest]:
        yield opening()
        for i in range(300):
            steps = some(*((100 * i + j + 1, 0, FIRST) for j in range(60)))
            yield pb.ScoreStepsRequest(steps=steps, release=[step.node for step in steps])

    code, received = raw(server, messages())
    assert code == "OK"
    scores = [score for each in received for score in each.scored.scores]
    assert len(scores) == len({score.node for score in scores}) == 300 * 60
    assert all(score.HasField("score") != bool(score.reason) for score in scores)


# ---- access


def test_sessions_need_a_login_count_against_quotas_and_are_logged(
    orchestrator: Orchestrator, start: Callable[..., ServerThread], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "espalier.access")
    server = start(lambda: orchestrator, callers=callers_file(tmp_path, ann="tokens_per_minute = 10"))
    server.wait_loaded()
    with SearchClient(server.address, retry=NO_RETRIES) as nobody, pytest.raises(ServiceError) as refused:
        nobody.score_session(PROBLEM, PATIENCE)
    assert refused.value.code == "UNAUTHENTICATED"
    with SearchClient(server.address, token="ann", retry=NO_RETRIES) as client:
        with client.score_session(PROBLEM, PATIENCE, **SMALL) as session:
            session.score(FIRST)
        result: ScoreResult = session.close()
        with pytest.raises(ServiceError, match="tokens"):
            client.score_session(PROBLEM, PATIENCE, **SMALL)
    wait_until(lambda: any("method=ScoreSteps code=OK" in line for line in caplog.messages))
    (line,) = [line for line in caplog.messages if "method=ScoreSteps code=OK" in line]
    assert "caller=ann" in line
    assert "algorithm=score-session stop_reason=finished" in line
    assert f"verifier_tokens={result.usage.verifier_tokens}" in line
    assert PROBLEM not in line


def test_each_of_many_sessions_without_a_login_is_told_so(start: Callable[..., ServerThread], tmp_path: Path) -> None:
    server = start(callers=callers_file(tmp_path, ann=""))

    def code(client: SearchClient) -> str:
        with pytest.raises(ServiceError) as refused:
            client.score_session(PROBLEM, PATIENCE)
        return refused.value.code

    with SearchClient(server.address, retry=NO_RETRIES) as client, ThreadPoolExecutor(8) as pool:
        assert set(pool.map(code, [client] * 200)) == {"UNAUTHENTICATED"}


def test_a_stream_that_stays_silent_ends(server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "_FIRST_SECONDS", 0.1)
    hold = threading.Event()
    call_over: list[str] = []
    with grpc.insecure_channel(server.address, options=NO_PROXY) as channel:
        silent = (message for message in [pb.ScoreStepsRequest()] if not hold.wait(PATIENCE))
        try:
            list(SearchServiceStub(channel).ScoreSteps(silent, timeout=PATIENCE))  # type: ignore[attr-defined]
        except grpc.RpcError as error:
            call_over.append(error.code().name)  # type: ignore[attr-defined]
        hold.set()
    assert call_over == ["INVALID_ARGUMENT"]
