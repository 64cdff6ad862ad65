"""Rollouts of a server are those of this process, token for token, cut short, refused, left."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from server_thread import ServerThread, wait_until

from espalier.engine.engine import Engine
from espalier.engine.errors import EspalierError, InvalidRequestError
from espalier.experiments.runs.benchmarks import Problem
from espalier.experiments.verifier_training.rollouts import RemoteSampler, RolloutSampler
from espalier.experiments.verifier_training.tree_file import TreeRecord
from espalier.search.client import SearchClient
from espalier.search.grading.math_verify import Grader
from espalier.search.result import StopReason
from espalier.search.rollout import Labels, RolloutRequest, RolloutSettings
from espalier.search.run.generator import Generator
from espalier.search.run.load import load_orchestrator
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.settings import RuntimeSettings
from espalier.search.service.grpc_api import convert
from espalier.search.service.grpc_api.convert import request_to_wire
from espalier.search.service.settings import ServerSettings
from espalier.v1 import search_pb2 as pb
from espalier.v1.search_pb2_grpc import SearchServiceStub

PROBLEMS = [
    Problem(str(i), f"Tom has {i} coins. How many has he?", answer, None) for i, answer in enumerate("0121", start=3)
]
SETTINGS = RolloutSettings(
    solutions=6, continuations=5, temperature=1.0, max_steps=4, max_step_tokens=12, max_tokens=40
)
LONG = replace(SETTINGS, solutions=24, max_steps=128, max_step_tokens=40, max_tokens=160)
ENDLESS = replace(LONG, labels=Labels.MONTE_CARLO, solutions=256, continuations=256)
"""Takes seconds."""


@pytest.fixture
def make_orchestrator(make_engine: Callable[..., Engine]) -> Callable[..., Orchestrator]:
    def make() -> Orchestrator:
        engine = make_engine("talker", kv_memory_bytes=2**29)
        return Orchestrator(engine, Generator(engine, "", {"temperature": 1.0}), None)

    return make


@pytest.fixture
def server(make_orchestrator: Callable[..., Orchestrator]) -> Iterator[ServerThread]:
    running = ServerThread(make_orchestrator, ServerSettings(port=0, max_send_bytes=2**20))
    running.wait_loaded()
    yield running
    wait_until(lambda: running.info().occupancy.running == 0)
    assert [blocks.live for blocks in running.info().occupancy.kv_blocks.values()] == [0]
    running.close()


@pytest.fixture
def client(server: ServerThread) -> Iterator[SearchClient]:
    with SearchClient(server.address) as client:
        yield client


@pytest.fixture
def here(make_engine: Callable[..., Engine], grader: Grader) -> Callable[..., list[TreeRecord]]:
    """Trees that are sampled in this process."""

    def run(settings: RolloutSettings, problems: list[Problem] = PROBLEMS) -> list[TreeRecord]:
        engine = make_engine("talker", kv_memory_bytes=2**29)
        generator = Generator(engine, "", {"temperature": 1.0})
        return list(RolloutSampler(engine, generator, settings, grader, 3).sample(problems))

    return run


@pytest.mark.parametrize("labels", [Labels.OUTCOME, Labels.MONTE_CARLO])
def test_trees_of_a_server_are_those_of_this_process(
    labels: Labels, client: SearchClient, here: Callable[..., list[TreeRecord]], grader: Grader
) -> None:
    settings = replace(SETTINGS, labels=labels)
    found = {tree.problem_id: tree for tree in RemoteSampler(client, settings, grader, 3).sample(PROBLEMS)}
    wanted = {tree.problem_id: tree for tree in here(settings)}
    assert found == wanted
    assert any(step.right for tree in found.values() for step in tree.steps)
    assert any(step.parent is not None for tree in found.values() for step in tree.steps)


def test_a_server_grades_where_it_is_told_the_answer(client: SearchClient, here: Any) -> None:
    settings = replace(SETTINGS, labels=Labels.MONTE_CARLO)
    fields, trees = asdict(settings), {tree.problem_id: tree for tree in here(settings)}
    right = 0
    for problem in PROBLEMS:
        tree = trees[problem.unique_id]
        graded = client.rollout(problem.problem, golds=[problem.answer], **fields)
        assert [(step.right, step.value) for step in graded.steps] == [(step.right, step.value) for step in tree.steps]
        right += sum(bool(step.right) for step in graded.steps)
        ungraded = client.rollout(problem.problem, **fields)
        assert {step.right for step in ungraded.steps} == {None}
        assert {step.value for step in ungraded.steps} == {0.0}
        assert [step.token_ids for step in ungraded.steps] == [step.token_ids for step in graded.steps]
        assert graded.prompt_token_ids == tuple(tree.prompt_token_ids)
        assert graded.usage.generated_tokens >= sum(len(step.token_ids) for step in graded.steps)
        assert graded.usage.peak_kv_bytes > 0
    assert right


def test_a_large_tree_comes_in_pieces_with_each_step_once(
    server: ServerThread, here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "_PIECE_BYTES", 2048)
    with grpc.insecure_channel(server.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub: Any = SearchServiceStub(channel)
        asked = request_to_wire(RolloutRequest(**asdict(LONG), problem=PROBLEMS[0].problem), pb.RolloutRequest)
        *pieces, last = stub.Rollout(asked)
    assert len(pieces) > 2
    (tree,) = here(LONG, PROBLEMS[:1])
    assert max(piece.ByteSize() for piece in pieces) < 2048 + 400 * 16
    steps = [step for piece in pieces for step in piece.steps.steps]
    assert [(list(step.token_ids), step.samples) for step in steps] == [
        (step.token_ids, step.samples) for step in tree.steps
    ]
    assert last.HasField("result")


def test_a_time_limit_leaves_the_tree_as_far_as_it_is(client: SearchClient) -> None:
    result = client.rollout(RolloutRequest(**asdict(ENDLESS), problem=PROBLEMS[0].problem, time_limit=0.3))
    assert result.stop_reason is StopReason.DEADLINE
    assert result.steps
    assert all(step.parent is None or step.parent < index for index, step in enumerate(result.steps))
    growing = sum(step.samples for step in result.steps if step.parent is None)
    assert growing + sum(step.continuations for step in result.steps) < ENDLESS.solutions * ENDLESS.continuations


def test_a_client_that_vanishes_frees_everything(server: ServerThread) -> None:
    channel = grpc.insecure_channel(server.address, options=[("grpc.enable_http_proxy", 0)])
    stub: Any = SearchServiceStub(channel)
    asked = request_to_wire(RolloutRequest(**asdict(ENDLESS), problem=PROBLEMS[0].problem), pb.RolloutRequest)
    calls = [stub.Rollout(asked) for _ in range(3)]
    wait_until(lambda: sum(each.live for each in server.info().occupancy.kv_blocks.values()) > 8)
    channel.close()
    wait_until(lambda: server.info().occupancy.running == server.info().admitted_calls == 0)
    assert [call.code() for call in calls] == 3 * [grpc.StatusCode.CANCELLED]


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"solutions": 0}, "solutions"),
        ({"labels": Labels.BINARY_SEARCH}, "labels"),
        ({"golds": ("1",) * 17}, "golds"),
        ({"max_step_tokens": 4096}, "max_step_tokens"),
        ({"problem": " "}, "problem"),
        ({"solutions": 1024, "labels": Labels.MONTE_CARLO, "continuations": 256, "max_step_tokens": 512}, "request"),
    ],
)
def test_wrong_requests_are_refused_by_field(fields: dict[str, Any], place: str, client: SearchClient) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        client.rollout(RolloutRequest(**{"problem": "6*7?", **fields}))
    assert [violation.field for violation in caught.value.violations] == [place]


def test_a_binary_search_is_not_asked_for(client: SearchClient, grader: Grader) -> None:
    with pytest.raises(EspalierError, match="--labels binary-search"):
        RemoteSampler(client, replace(SETTINGS, labels=Labels.BINARY_SEARCH), grader, 1)


def test_the_command_writes_the_same_file(espalier: Callable[..., Any], tmp_path: Path) -> None:
    server = ServerThread(lambda: load_orchestrator(RuntimeSettings(kv_memory=2**28)), ServerSettings(port=0))
    server.wait_loaded()
    given = ("--limit", "3", "-N", "4", "--max-tokens", "96", "--benchmark", "demo-training")
    for name, more in (("here", ()), ("there", ("--endpoint", server.address))):
        ran = espalier("rollouts", "--out", str(tmp_path / f"{name}.jsonl"), *given, *more)
        assert ran.code == 0, ran.err
    here, there = (sorted((tmp_path / f"{name}.jsonl").read_text().splitlines()) for name in ("here", "there"))
    assert here == there
    assert len(here) == 3
    assert all(json.loads(line)["steps"] for line in there)
    refused = espalier(
        "rollouts", "--out", str(tmp_path / "x.jsonl"), "--endpoint", server.address, "--kv-memory", "1G"
    )
    assert refused.code == 2
    assert "--kv-memory" in refused.err
    refused = espalier("rollouts", "--out", str(tmp_path / "x.jsonl"), "--tls")
    assert "give --endpoint" in refused.err
    server.close()
