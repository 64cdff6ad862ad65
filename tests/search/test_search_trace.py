"""Traces are written, read and replayed."""

import errno
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from search_runs import ALL, BEAM, run

from espalier.search.request import SearchRequest
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.trace import TraceError, read_trace, replay, trace_of, write_trace

Make = Callable[..., Orchestrator]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
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


def test_a_trace_with_counters_of_an_older_version_is_read(trace: dict[str, Any], tmp_path: Path):
    trace["usage"] |= {"ahead_tokens": 9, "ahead_kept_tokens": 4}
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    assert replay(read_trace(tmp_path / "trace.json")) == len(trace["rounds"])


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
        ('{"schema": "espalier.trace", "version": 2, "nodes": []}', "search_id: field required"),
    ],
)
def test_what_is_no_trace_is_refused(text: str, message: str, tmp_path: Path):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(TraceError, match=message):
        read_trace(tmp_path / "t.json")
    with pytest.raises(TraceError, match="cannot read a trace"):
        read_trace(tmp_path / "missing.json")


def at(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    """Sets one value within a trace."""

    def change(trace: Any) -> None:
        for key in path[:-1]:
            trace = trace[key]
        trace[path[-1]] = value

    return change


NONSENSE = {
    "configuration": at("configuration", value=[1]),
    "digests.generator": at("digests", "generator", value=7),
    "stop_reason": at("stop_reason", value="tired"),
    "usage.nodes": at("usage", "nodes", value="48"),
    "usage.seconds": at("usage", "seconds", value=True),
    "score": at("score", value=[0.5]),
    "best": at("best", value=10**6),
    "candidates": at("candidates", value="none"),
    "candidates.0.node_id": at("candidates", 0, "node_id", value=-1),
    "nodes": at("nodes", value=[]),
    "nodes.0": at("nodes", 0, "path", value=[3]),
    "nodes.1": at("nodes", 1, value=None),
    "nodes.1.node_id": at("nodes", 1, "node_id", value=0),
    "nodes.1.parent_id": at("nodes", 1, "parent_id", value=99),
    "nodes.2.parent_id": at("nodes", 2, "path", value=[0, 0, 0, 0]),
    "nodes.2.path": at("nodes", 2, "path", value="0"),
    "nodes.2.score": at("nodes", 2, "score", value=float("inf")),
    "nodes.1.text": at("nodes", 1, "text", value=None),
    "nodes.1.score": at("nodes", 1, "score", value="high"),
    "nodes.1.termination": at("nodes", 1, "termination", value="bored"),
    "nodes.1.tokens": at("nodes", 1, "tokens", value=1.5),
    "nodes.1.tokens: ": at("nodes", 1, "tokens", value=-1),
    "rounds": at("rounds", value={}),
    "rounds.0.asked": at("rounds", 0, "asked", value=None),
    "rounds.0.asked.0.children": at("rounds", 0, "asked", 0, "children", value=0),
    "rounds.0.told.0.draws": at("rounds", 0, "told", 0, "draws", value=[None]),
    "rounds.0: there is no node": at("rounds", 0, "kept", value=[[99]]),
    "rounds.0.moments.0.blocks": at("rounds", 0, "moments", 0, "blocks", value=[1]),
    "rounds.0.moments.0.seconds": at("rounds", 0, "moments", 0, "seconds", value=-5),
    "rounds.0.moments: nodes": at("rounds", 0, "moments", 0, "nodes", value=10**9),
}


@pytest.mark.parametrize("field", NONSENSE)
def test_a_value_that_means_nothing_is_named_with_its_file_and_field(field: str, trace: dict[str, Any], tmp_path: Path):
    NONSENSE[field](trace)
    (tmp_path / "t.json").write_text(json.dumps(trace).replace("Infinity", "1e999"))
    with pytest.raises(TraceError, match=rf"t\.json is a damaged trace: {re.escape(field)}"):
        read_trace(tmp_path / "t.json")


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[" * 100_000, b'{"schema": "espalier.trace", "version": 1e999}', b"9" * 5000]
)
def test_files_of_nonsense_are_no_traces(content: bytes, tmp_path: Path):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(TraceError, match=r"t\.json"):
        read_trace(tmp_path / "t.json")


def test_a_trace_changed_anywhere_is_read_and_replayed_or_refused(trace: dict[str, Any], tmp_path: Path):
    draw = Random(0)
    refused = 0
    for _ in range(150):
        changed = json.loads(json.dumps(trace))
        place: Any = changed
        key = draw.choice(list(place))
        while isinstance(place[key], dict | list) and place[key]:
            place = place[key]
            key = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
        place[key] = draw.choice([None, True, -1, 10**30, 1.5, "x", [], {}, [[]]])
        (tmp_path / "t.json").write_text(json.dumps(changed))
        try:
            replay(read_trace(tmp_path / "t.json"))
        except TraceError:
            refused += 1
    assert refused > 50


def test_a_disk_that_is_full_leaves_the_trace_that_was_there(
    make_orchestrator: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    result = run(make_orchestrator(), BEAM).only
    write_trace(result, tmp_path / "t.json")
    before = (tmp_path / "t.json").read_text()

    def full(file: Path, text: str, **_: Any) -> None:
        file.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(TraceError, match=r"cannot write the trace .*t\.json: No space left on device"):
            write_trace(result, tmp_path / "t.json")
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"]
    assert (tmp_path / "t.json").read_text() == before
