"""What a search tells of its tree while it grows, if it was asked to."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from search_runs import ALL, BEAM, BEST_OF_N, outcome, run

from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.search.growth import search as running
from espalier.search.request import DEFAULT_OPTIONS, EarlyStop, SearchRequest, SubmitOptions
from espalier.search.result import Event, NodeRecord, SearchResult, StepDone
from espalier.search.run.orchestrator import Orchestrator

Make = Callable[..., Orchestrator]

ASKED = SubmitOptions(report_nodes=True)
PATHS_TO_THE_END = replace(BEST_OF_N, early_stop=EarlyStop.OFF)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports within a round come as often as there is something to say."""
    monkeypatch.setattr(running, "_PARTIAL_SECONDS", 0.0)
    monkeypatch.setattr(running, "_PARTIAL_SHARE", math.inf)


def reported(
    orchestrator: Orchestrator, request: SearchRequest, options: SubmitOptions = ASKED
) -> tuple[list[StepDone], SearchResult]:
    """A search's reports, and its result."""
    events: list[Event] = []
    orchestrator.submit(request, events.append, options)
    results: list[SearchResult] = []
    while orchestrator.busy:
        results += orchestrator.step()
    return [event for event in events if isinstance(event, StepDone)], results[0]


@pytest.mark.parametrize("request_", ALL.values(), ids=ALL.keys())
def test_the_changes_add_up_to_the_tree_of_the_result(request_: SearchRequest, make_orchestrator: Make):
    reports, result = reported(make_orchestrator(), request_)
    known: dict[int, NodeRecord] = {}
    for report in reports:
        for node in report.nodes:
            assert known.get(node.node_id) != node, "it has not changed"
            assert node.parent_id is None or node.parent_id in known, "its parent is not known"
            known[node.node_id] = node
    assert tuple(known[node_id] for node_id in sorted(known)) == result.nodes


@pytest.mark.parametrize("request_", ALL.values(), ids=ALL.keys())
def test_a_search_gives_the_same_whether_it_reports_or_not(request_: SearchRequest, make_orchestrator: Make):
    silent, talking = (reported(make_orchestrator(), request_, options)[1] for options in (DEFAULT_OPTIONS, ASKED))
    assert outcome(silent) == outcome(talking)
    assert silent.rounds == talking.rounds


def test_a_search_that_was_not_asked_reports_rounds_alone(make_orchestrator: Make):
    for request in (BEAM, PATHS_TO_THE_END):
        reports, result = reported(make_orchestrator(), request, DEFAULT_OPTIONS)
        assert len(reports) == len(result.rounds)
        assert not any(report.partial or report.nodes for report in reports)
        assert [len(done.moments) for done in result.rounds] == [1] * len(result.rounds)


def test_independent_paths_are_seen_to_grow_within_their_round(make_orchestrator: Make):
    reports, result = reported(make_orchestrator(), PATHS_TO_THE_END)
    assert len(result.rounds) == 1
    *partial, last = reports
    assert len(partial) > 2
    assert all(report.partial and report.nodes and not report.kept and report.scored == 0 for report in partial)
    assert not last.partial
    assert last.scored > 1
    assert [report.depth for report in reports] == sorted(report.depth for report in reports)
    assert partial[0].depth < last.depth


def test_steps_of_a_beam_are_reported_once_a_round(make_orchestrator: Make):
    reports, result = reported(make_orchestrator(), BEAM)
    assert len(reports) == len(result.rounds) > 1
    assert not any(report.partial for report in reports)


def test_reports_within_a_round_keep_a_distance_in_time(make_orchestrator: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(running, "_PARTIAL_SECONDS", 1000.0)
    reports, _ = reported(make_orchestrator(), PATHS_TO_THE_END)
    assert [report.partial for report in reports] == [False]


def test_looking_for_changes_takes_a_small_share_of_the_time(make_orchestrator: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(running, "_PARTIAL_SHARE", 1e-9)  # so that the first look is the last
    reports, _ = reported(make_orchestrator(), PATHS_TO_THE_END)
    assert [report.partial for report in reports] == [True, False]


def test_a_report_has_every_kept_node_where_the_tree_was_asked_for(
    make_orchestrator: Make, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(running, "_MAX_SHOWN", 1)
    (short, _), (whole, result) = (reported(make_orchestrator(), BEAM, options) for options in (DEFAULT_OPTIONS, ASKED))
    assert {len(report.kept) for report in short} == {1}
    assert [len(report.kept) for report in whole] == [len(set(done.kept)) for done in result.rounds]
    assert max(len(report.kept) for report in whole) > 1


@pytest.mark.parametrize("request_", [BEAM, PATHS_TO_THE_END], ids=["beam", "best-of-n"])
def test_reports_and_rounds_tell_the_blocks_held_and_the_time(request_: SearchRequest, make_orchestrator: Make):
    reports, result = reported(make_orchestrator(), request_)
    moments = [moment for done in result.rounds for moment in done.moments]
    assert [(m.seconds, m.blocks) for m in moments] == [(report.seconds, report.blocks) for report in reports]
    known: set[int] = set()
    for moment, report in zip(moments, reports, strict=True):
        known |= {node.node_id for node in report.nodes}
        assert known == set(range(moment.nodes))
    times = [m.seconds for m in moments]
    assert 0 < times[0] <= times[-1] <= result.usage.seconds
    assert times == sorted(times)
    ends = [done.moments[-1].blocks for done in result.rounds]
    assert all(blocks.keys() == {GENERATOR, VERIFIER} for blocks in ends)
    most = max(sum(blocks.values()) for blocks in ends)
    if request_ is BEAM:
        assert result.usage.physical_blocks == most
    else:
        assert result.usage.physical_blocks > most, "whole paths give back what they hold as they end"


def test_what_others_run_beside_a_search_is_not_in_its_reports(make_orchestrator: Make):
    alone, _ = reported(make_orchestrator(), BEAM)
    orchestrator = make_orchestrator()
    events: list[Event] = []
    orchestrator.submit(BEAM, events.append, ASKED)
    run(orchestrator, replace(BEAM, problem="another"), replace(PATHS_TO_THE_END, problem="a third"))
    beside = [event for event in events if isinstance(event, StepDone)]
    assert [report.blocks for report in beside] == [report.blocks for report in alone]
