"""Scores of given solutions over gRPC, by Espalier's clients; over a real engine."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
from server_thread import PATIENCE, ServerThread, wait_until

from espalier.engine.errors import InvalidRequestError
from espalier.search.client import AsyncSearchClient, SearchClient
from espalier.search.common_fields import Aggregation
from espalier.search.conversation import ChatMessage, ChatRole
from espalier.search.result import StopReason
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.scores import ScoreRequest
from espalier.search.service.grpc_api.convert import request_from_wire, request_to_wire
from espalier.v1 import search_pb2 as pb

PROBLEM = "Tom starts with 38 coins. He finds 47 more."
SOLUTIONS = (("38+47=85", "85-12=73"), ("38+47=85", "85-12=63"), ("38+47=75",))
REQUEST = ScoreRequest(
    PROBLEM, SOLUTIONS, (ChatMessage(ChatRole.USER, "Hello"),), Aggregation.MIN, 7, verifier_budget=500, time_limit=9.5
)


@pytest.fixture
def orchestrator(make_orchestrator: Callable[..., Orchestrator]) -> Orchestrator:
    return make_orchestrator()


@pytest.fixture
def server(orchestrator: Orchestrator, start: Callable[..., ServerThread]) -> ServerThread:
    running = start(lambda: orchestrator)
    running.wait_loaded()
    return running


@pytest.fixture
def client(server: ServerThread) -> Iterator[SearchClient]:
    with SearchClient(server.address) as client:
        yield client


def test_every_field_of_a_request_comes_through() -> None:
    message = request_to_wire(REQUEST, pb.ScoreSolutionRequest, priority=3)
    assert request_from_wire(message) == (REQUEST, [])
    assert message.priority == 3
    assert {field.name for field in message.DESCRIPTOR.fields} == {field.name for field in fields(REQUEST)} | {
        "priority"
    }


def test_scores_over_grpc_are_those_of_the_engine(
    client: SearchClient, make_orchestrator: Callable[..., Orchestrator]
) -> None:
    served = client.score(PROBLEM, SOLUTIONS, PATIENCE)
    alone = make_orchestrator()
    alone.submit(ScoreRequest(PROBLEM, SOLUTIONS))
    results: list[Any] = []
    while alone.busy:
        results += alone.step()
    assert served.solutions == results[0].solutions
    assert served.stop_reason is StopReason.FINISHED
    assert (served.scorer, served.digests) == (results[0].scorer, results[0].digests)
    assert served.usage.verifier_tokens == results[0].usage.verifier_tokens


def test_an_asyncio_client_scores_many_at_once(server: ServerThread) -> None:
    async def ask() -> list[Any]:
        async with AsyncSearchClient(server.address) as client:
            return await asyncio.gather(*(client.score(PROBLEM, [steps], PATIENCE) for steps in SOLUTIONS))

    together = SearchClient(server.address)
    expected = together.score(PROBLEM, SOLUTIONS, PATIENCE).solutions
    together.close()
    assert [result.solutions for result in asyncio.run(ask())] == [(each,) for each in expected]


def test_steps_beyond_a_budget_have_no_score_and_say_why(client: SearchClient) -> None:
    result = client.score(ScoreRequest(PROBLEM, SOLUTIONS, verifier_budget=1), timeout=PATIENCE)
    assert result.stop_reason is StopReason.BUDGET
    assert [each.step_scores for each in result.solutions] == [(None, None), (None, None), (None,)]
    assert {each.reason for each in result.solutions} == {"verifier_budget is used up"}


@pytest.mark.parametrize("solutions", [(), ((),), ((" ",),), (("a",),) * 300, (("a",),) * 2000])
def test_wrong_solutions_are_refused_by_name(solutions: Any, client: SearchClient) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        client.score(PROBLEM, solutions, PATIENCE)
    assert {violation.field.partition("[")[0] for violation in refused.value.violations} == {"solutions"}


def test_an_unknown_enum_value_is_refused_by_name() -> None:
    message = pb.ScoreSolutionRequest(problem=PROBLEM, aggregation=99)  # type: ignore[arg-type]
    _, violations = request_from_wire(message)
    assert [violation.field for violation in violations] == ["aggregation"]


def test_a_client_that_leaves_ends_its_scores(client: SearchClient, orchestrator: Orchestrator) -> None:
    long = [[f"Step {i} of {n}: add the numbers." for i in range(40)] for n in range(20)]
    with pytest.raises(Exception, match=r"DEADLINE|deadline|time"):
        client.score(PROBLEM, long, 0.05)
    wait_until(lambda: not orchestrator.busy)
