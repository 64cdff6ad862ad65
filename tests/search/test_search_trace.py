"""Traces are written, read and replayed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from search_runs import ALL, BEAM, run

from espalier.search.request import SearchRequest
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.trace import TraceError, read_trace, replay, trace_of, write_trace

Make = Callable[..., Orchestrator]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("request_", ALL.values(), ids=ALL.keys())
def test_an_algorithm_fed_its_own_trace_makes_the_same_choices(
    request_: SearchRequest, seed: int, make_orchestrator: Make, tmp_path: Path
):
    result = run(make_orchestrator(), replace(request_, seed=seed)).only
    write_trace(result, tmp_path / "trace.json")
    trace = read_trace(tmp_path / "trace.json")
    assert replay(trace) == len(result.rounds) >= 1
    assert len(trace["nodes"]) == len(result.nodes)
    assert trace["grader"] == result.grader == "exact-match"
    assert trace["best"] == (result.best.node_id if result.best else None)
    assert [(c["node_id"], c["answer"]) for c in trace["candidates"]] == [
        (candidate.node_id, candidate.answer) for candidate in result.candidates
    ]


@pytest.mark.parametrize("steps", [1, 4, 9, 16])
def test_a_search_cut_short_has_a_trace_that_replays(steps: int, make_orchestrator: Make):
    orchestrator = make_orchestrator()
    search_id = orchestrator.submit(BEAM)
    for _ in range(steps):
        orchestrator.step()
    orchestrator.cancel(search_id)
    (result,) = orchestrator.step()
    assert replay(json.loads(json.dumps(trace_of(result)))) == len(result.rounds)


@pytest.fixture
def trace(make_orchestrator: Make) -> dict[str, Any]:
    return json.loads(json.dumps(trace_of(run(make_orchestrator(), BEAM).only)))


def drop_a_round(trace: dict[str, Any]) -> None:
    del trace["rounds"][-1]


def ask_for_more(trace: dict[str, Any]) -> None:
    trace["rounds"][0]["asked"][0]["children"] += 1


def keep_another(trace: dict[str, Any]) -> None:
    trace["rounds"][0]["kept"] = [*trace["rounds"][0]["kept"][::-1], [99]]


def turn_scores_round(trace: dict[str, Any]) -> None:
    for node in trace["nodes"]:
        node["score"] = None if node["score"] is None else 1 - node["score"]


def change_the_beam(trace: dict[str, Any]) -> None:
    trace["configuration"]["beam_width"] += 1


@pytest.mark.parametrize("change", [drop_a_round, ask_for_more, keep_another, turn_scores_round, change_the_beam])
def test_a_trace_that_was_tampered_with_is_found_out(change: Callable[[dict[str, Any]], None], trace: dict[str, Any]):
    assert replay(trace) > 1
    change(trace)
    with pytest.raises(TraceError, match="round"):
        replay(trace)


def test_a_trace_without_its_parts_is_refused_as_one(trace: dict[str, Any]):
    for part in ("nodes", "rounds", "configuration"):
        with pytest.raises(TraceError, match="contradicts itself"):
            replay({name: value for name, value in trace.items() if name != part})
    trace["configuration"]["spin"] = 1
    with pytest.raises(TraceError, match="spin"):
        replay(trace)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read a trace"),
        ('{"score": NaN}', "NaN is no number"),
        ("[]", "is no trace"),
        ('{"schema": "other"}', "is no trace"),
        ('{"schema": "espalier.trace", "version": 1}', "of version 1; this Espalier reads version 2.*--trace"),
        ('{"schema": "espalier.trace", "version": 2, "nodes": []}', "without search_id, configuration.*rounds"),
    ],
)
def test_what_is_no_trace_is_refused(text: str, message: str, tmp_path: Path):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(TraceError, match=message):
        read_trace(tmp_path / "t.json")
    with pytest.raises(TraceError, match="cannot read a trace"):
        read_trace(tmp_path / "missing.json")
