"""Whatever is raised on behalf of one search ends that search with a reason, and nobody else notices."""

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from scripted_equivalence import ScriptedEquivalence
from search_runs import ADAPTIVE, BEAM, BEST_OF_N, GREEDY, MAJORITY, MCTS, outcome, outcome_alone, run

from espalier.engine.errors import DeviceError, FatalError, NumericalError, PoolExhaustedError
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Generate, Sampling
from espalier.kernels.cpu.decoder import CpuLayers
from espalier.prm.verifier import StepSession
from espalier.search import algorithms
from espalier.search.grading.answers import extract_answer
from espalier.search.growth import search as running
from espalier.search.request import SearchRequest, SubmitOptions, Vote
from espalier.search.result import CandidateDone, Event, Finished, SearchResult, Started, StepDone, StopReason
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.voting import vote as voting
from espalier.search.voting.equivalence import Comparison

Make = Callable[..., Orchestrator]
SECRET = "secret of /home/someone/weights"
VICTIM = "Victim: 12+5?"
OTHERS = (
    replace(BEAM, problem="Other: 3+4?", seed=8, vote=Vote.NAIVE),
    replace(MAJORITY, problem="Another: 7-1?", vote=Vote.NAIVE),
)
VICTIMS = {
    request.algorithm.value: replace(request, problem=VICTIM, vote=Vote.WEIGHTED, seed=11)
    for request in (BEAM, BEST_OF_N, MCTS)
}


Alone = Callable[[SearchRequest], tuple]


@pytest.fixture
def alone(make_orchestrator: Make) -> Alone:
    """The outcome of a search with an engine to itself."""
    return lambda request: outcome_alone(request, make_orchestrator)


@dataclass
class Fault:
    """Raises once, in the call of this number among those made for the victim.

    Attributes:
        number: from 0.
        victim: the search's id, once it has one.
        left: calls still to come before it.
    """

    number: int
    error: Exception
    victim: str = ""
    fired: bool = False

    def met(self, for_victim: bool) -> None:
        if for_victim and not self.fired:
            self.number -= 1
            if self.number < 0:
                self.fired = True
                raise self.error

    def before(self, call: Callable[..., Any], is_victims: Callable[..., bool]) -> Callable[..., Any]:
        """`call`, raising instead of it where it is the one."""

        def instead(*args: Any, **named: Any) -> Any:
            self.met(is_victims(*args, **named))
            return call(*args, **named)

        return instead


@pytest.fixture
def faulty(make_orchestrator: Make, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Orchestrator, Fault]]:
    """An orchestrator in which one call for the victim raises, by what is called and the call's number."""

    def make(site: str, number: int, **options: Any) -> tuple[Orchestrator, Fault]:
        fault = Fault(number, RuntimeError(SECRET))
        make_algorithm = algorithms.make_algorithm

        def algorithm_of(request: SearchRequest, root: Any) -> Any:
            algorithm = make_algorithm(request, root)
            if request.problem == VICTIM and site in ("ask", "tell", "finished", "kept"):
                setattr(algorithm, site, fault.before(getattr(algorithm, site), lambda *_: True))
            return algorithm

        monkeypatch.setattr(running, "make_algorithm", algorithm_of)
        orchestrator = make_orchestrator(**options)
        engine, family = orchestrator.engine, orchestrator._scorer.family  # type: ignore[union-attr]
        owner_of: dict[str, Callable[..., Any]] = {
            "open": lambda role, ids, salt=b"", owner=None: owner,
            "submit": lambda work: work.owner,
            "footprint": lambda sequences: sequences[0].owner if sequences else None,
            **dict.fromkeys(("fork", "release", "length", "token_ids"), lambda sequence, *_: sequence.owner),
            **dict.fromkeys(("cancel", "suspend", "resume_owner"), lambda owner: owner),
        }
        if site in owner_of:
            call = fault.before(getattr(engine, site), lambda *a, **n: owner_of[site](*a, **n) == fault.victim)
            monkeypatch.setattr(engine, site, call)
        elif site == "generator prompt":
            generator = orchestrator._generator
            monkeypatch.setattr(generator, "prompt", fault.before(generator.prompt, lambda p, *_: p == VICTIM))
        elif site == "verifier prompt":
            monkeypatch.setattr(family, "prompt_ids", fault.before(family.prompt_ids, lambda p: p == VICTIM))
        elif site == "read":
            monkeypatch.setattr(family, "read", fault.before(family.read, lambda path: path.problem == VICTIM))
        elif site == "take":
            take = fault.before(StepSession.take, lambda self, done: done.work.owner == fault.victim)
            monkeypatch.setattr(StepSession, "take", take)
        elif site == "select":
            select = fault.before(voting.select, lambda candidates, vote, *_: vote is Vote.WEIGHTED)
            monkeypatch.setattr(running, "select", select)
        return orchestrator, fault

    return make


def finish(
    orchestrator: Orchestrator,
    fault: Fault,
    victim: SearchRequest,
    cancel_after: int | None = None,
) -> tuple[SearchResult, list[SearchResult], list[Event]]:
    """Run the victim between two others: its result, theirs, and its events."""
    events: list[Event] = []
    first = orchestrator.submit(OTHERS[0])
    fault.victim = orchestrator.submit(victim, events.append)
    last = orchestrator.submit(OTHERS[1])
    ended: dict[str, SearchResult] = {}
    for step in range(10_000):
        if not orchestrator.busy:
            break
        if step == cancel_after:
            orchestrator.cancel(fault.victim)
        ended |= {result.search_id: result for result in orchestrator.step()}
        orchestrator.engine.check_integrity()
    return ended.pop(fault.victim), [ended.pop(first), ended.pop(last)], events


def expect_failed_alone(
    orchestrator: Orchestrator,
    result: SearchResult,
    others: list[SearchResult],
    events: list[Event],
    alone: Callable[[SearchRequest], tuple],
) -> None:
    """The victim has failed and said so, the others are as when `alone`, nothing is held, and new searches run."""
    assert result.stop_reason is StopReason.FAILED
    assert result.error == f"internal error, id={result.search_id}"
    assert SECRET not in str(result.to_dict())
    assert events[-1] == Finished(result.search_id, result)
    orchestrator.engine.check_drained()
    assert list(map(outcome, others)) == list(map(alone, OTHERS))
    assert outcome(run(orchestrator, OTHERS[0]).only) == outcome(others[0])


SITES = [
    *((site, n) for site in ("open", "cancel") for n in (0,)),
    *((site, n) for site in ("submit", "fork", "length") for n in (0, 1, 3)),
    *((site, n) for site in ("release", "footprint") for n in (0,)),
    *((site, n) for site in ("read", "take") for n in (0, 3)),
    *((site, n) for site in ("ask", "tell", "finished", "kept", "select") for n in (0, 1)),
    ("release", 3),
    ("open", 1),
]
OF_ALGORITHMS = {"ask", "tell", "finished", "kept", "select"}
"""Sites of which each algorithm makes its own use; the others are the same whichever it is."""


@pytest.mark.parametrize(
    ("site", "number", "name"),
    [
        pytest.param(*site, name, marks=() if name == "beam" or site[0] in OF_ALGORITHMS else pytest.mark.slow)
        for site in SITES
        for name in VICTIMS
        if not (name == "best-of-n" and site[1] and site[0] in ("ask", "tell", "select"))  # it has one round
    ],
)
def test_a_call_that_raises_ends_the_search_it_was_made_for(
    site: str, number: int, name: str, faulty: Callable, alone: Alone, caplog: pytest.LogCaptureFixture
):
    orchestrator, fault = faulty(site, number)
    with caplog.at_level(logging.ERROR, "espalier.search"):
        ended = finish(orchestrator, fault, VICTIMS[name], cancel_after=4 if site == "cancel" else None)
    assert fault.fired, "no such call was made"
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is fault.error
    expect_failed_alone(orchestrator, *ended, alone)


@pytest.mark.parametrize("how", ["cancelled in the queue", "late in the queue", "late as it runs"])
def test_a_fault_as_a_search_is_stopped_is_its_own(how: str, faulty: Callable, alone: Alone):
    orchestrator, fault = faulty("cancel", 0)
    times = itertools.count()
    if "late" in how:
        orchestrator._clock = lambda: float(next(times))
    limit = 1.0 if "queue" in how else 60.0
    victim = replace(VICTIMS["beam"], time_limit=limit if "late" in how else None)
    ended = finish(orchestrator, fault, victim, cancel_after=0 if "cancelled" in how else None)
    assert fault.fired
    expect_failed_alone(orchestrator, *ended, alone)


@pytest.mark.parametrize("site", ["generator prompt", "verifier prompt"])
def test_a_prompt_that_cannot_be_made_is_the_submitters_to_hear(site: str, faulty: Callable, alone: Alone):
    orchestrator, fault = faulty(site, 0)
    with pytest.raises(RuntimeError, match="secret"):
        orchestrator.submit(VICTIMS["beam"])
    assert fault.fired
    assert not orchestrator.busy
    assert outcome(run(orchestrator, OTHERS[0]).only) == alone(OTHERS[0])


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("kind", [NumericalError, PoolExhaustedError])
def test_work_that_cannot_go_on_ends_the_search_whose_it_is(
    kind: type, number: int, make_orchestrator: Make, alone: Alone, monkeypatch: pytest.MonkeyPatch
):
    orchestrator = make_orchestrator()
    fault = Fault(number, RuntimeError())
    step = orchestrator.engine.step

    def raising() -> Any:
        fault.error = kind("why", frozenset({fault.victim}))
        fault.met(for_victim=True)
        return step()

    monkeypatch.setattr(orchestrator.engine, "step", raising)
    result, others, events = finish(orchestrator, fault, VICTIMS["beam"])
    assert (result.stop_reason, "why" in result.error) == (StopReason.FAILED, True)
    result = replace(result, error=f"internal error, id={result.search_id}")
    events[-1] = Finished(result.search_id, result)
    expect_failed_alone(orchestrator, result, others, events, alone)


@pytest.mark.parametrize("kind", [Started, StepDone, CandidateDone, Finished])
@pytest.mark.parametrize("name", VICTIMS)
def test_a_listener_that_raises_ends_its_search_and_hears_of_it(
    name: str, kind: type, make_orchestrator: Make, alone: Alone, monkeypatch: pytest.MonkeyPatch
):
    orchestrator, fault, events = make_orchestrator(), Fault(0, RuntimeError(SECRET)), list[Event]()
    submit = orchestrator.submit

    def with_listener(request: SearchRequest, listen: Callable[[Event], None] | None = None) -> str:
        return submit(request, listen and fault.before(listen, lambda event: isinstance(event, kind)))

    monkeypatch.setattr(orchestrator, "submit", with_listener)
    result, others, events = finish(orchestrator, fault, VICTIMS[name])
    assert fault.fired
    expect_failed_alone(orchestrator, result, others, events, alone)


def test_a_listener_that_always_raises_stops_nobody(make_orchestrator: Make, alone: Alone):
    def deaf(event: Event) -> None:
        raise RuntimeError(SECRET)

    orchestrator = make_orchestrator()
    orchestrator.submit(VICTIMS["beam"], deaf)
    other = run(orchestrator, OTHERS[0]).only
    assert outcome(other) == alone(OTHERS[0])


@pytest.mark.parametrize("site", ["suspend", "resume_owner"])
def test_a_fault_as_a_search_gives_way_to_an_urgent_one_is_its_own(site: str, faulty: Callable, alone: Alone):
    orchestrator, fault = faulty(site, 0, max_running=1)
    fault.victim = orchestrator.submit(VICTIMS["beam"])
    ended: dict[str, SearchResult] = {}
    for _ in range(3):
        orchestrator.step()
    urgent = orchestrator.submit(OTHERS[0], options=SubmitOptions(1))
    while orchestrator.busy:
        ended |= {result.search_id: result for result in orchestrator.step()}
    assert fault.fired
    assert ended[fault.victim].stop_reason is StopReason.FAILED
    assert outcome(ended[urgent]) == alone(OTHERS[0])
    orchestrator.engine.check_drained()


@pytest.mark.parametrize("number", [0, 1])
def test_an_equivalence_that_raises_ends_the_search_that_asked(
    number: int, make_orchestrator: Make, monkeypatch: pytest.MonkeyPatch
):
    words = {"0": "x+1", "1": "2\\sqrt{2}", "2": "\\sqrt{8}"}
    monkeypatch.setattr(running, "answer_in", lambda text, _: words.get(extract_answer(text), ""))
    equivalence, fault = ScriptedEquivalence(), Fault(number, RuntimeError(SECRET))
    monkeypatch.setattr(equivalence, "compare", fault.before(equivalence.compare, lambda *_: Comparison(True)))
    orchestrator = make_orchestrator(equivalence=equivalence)
    victim = replace(MAJORITY, seed=1)
    assert victim.vote is None
    result, others, events = finish(orchestrator, fault, victim)
    assert fault.fired
    assert result.answer in words.values(), "what was found is voted on by exact match"
    fresh = make_orchestrator()
    expect_failed_alone(orchestrator, result, others, events, lambda request: outcome(run(fresh, request).only))


def test_what_was_complete_before_a_fault_is_in_the_result(faulty: Callable, alone: Alone):
    adaptive = replace(ADAPTIVE, problem=VICTIM, vote=Vote.WEIGHTED)
    orchestrator, fault = faulty("tell", 1)
    result, others, events = finish(orchestrator, fault, adaptive)
    assert fault.fired
    assert result.candidates
    expect_failed_alone(orchestrator, result, others, events, alone)


@pytest.mark.parametrize("room", [0, 1, 4, 6])
@pytest.mark.parametrize("name", VICTIMS)
def test_a_search_that_finds_few_blocks_finds_the_same(name: str, room: int, make_orchestrator: Make, alone: Alone):
    """Most blocks are lost; a greedy search before it ends first, and then its own paths take turns."""
    orchestrator, greedy = make_orchestrator(reserved_share=0.1), replace(GREEDY, problem="Other: 3+4?")
    ids = [orchestrator.submit(request) for request in (greedy, VICTIMS[name])]
    for _ in range(2):
        orchestrator.step()
    pool = orchestrator.engine.schedulers[GENERATOR].pools[0]
    lost = [pool.allocate() for _ in range(pool.allocatable_blocks - room)]
    ended = {result.search_id: result for result in finish_all(orchestrator)}
    pool.free(lost)
    assert [outcome(ended[search_id]) for search_id in ids] == [alone(greedy), alone(VICTIMS[name])]
    orchestrator.engine.check_drained()


@pytest.mark.parametrize("name", VICTIMS)
def test_a_search_that_finds_no_blocks_ends_alone(name: str, make_orchestrator: Make, alone: Alone):
    """All blocks but those of a greedy search are lost, as soon as they are free."""
    orchestrator, greedy = make_orchestrator(reserved_share=0.1), replace(GREEDY, problem="Other: 3+4?")
    ids, ended = [orchestrator.submit(request) for request in (greedy, VICTIMS[name])], dict[str, SearchResult]()
    pool, lost = orchestrator.engine.schedulers[GENERATOR].pools[0], list[int]()
    while orchestrator.busy:
        ended |= {result.search_id: result for result in orchestrator.step()}
        lost += [pool.allocate() for _ in range(pool.allocatable_blocks if ids[0] in ended else 0)]
    pool.free(lost)
    first, failed = (ended[search_id] for search_id in ids)
    assert failed.stop_reason is StopReason.FAILED
    assert "KV blocks" in failed.error
    assert "--kv-memory" in failed.error
    assert outcome(first) == alone(greedy)
    orchestrator.engine.check_drained()
    assert outcome(run(orchestrator, VICTIMS[name]).only) == alone(VICTIMS[name])


def finish_all(orchestrator: Orchestrator) -> list[SearchResult]:
    results: list[SearchResult] = []
    while orchestrator.busy:
        results += orchestrator.step()
    return results


@pytest.mark.parametrize("launch_ahead", [False, True])
def test_a_device_that_fails_is_nobodys_fault_and_comes_out_as_one_line(
    launch_ahead: bool, make_orchestrator: Make, monkeypatch: pytest.MonkeyPatch
):
    orchestrator = make_orchestrator(launch_ahead=launch_ahead)
    for request in OTHERS:
        orchestrator.submit(request)
    for _ in range(3):
        orchestrator.step()

    def broken(*args: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")

    with monkeypatch.context() as patch:
        patch.setattr(CpuLayers, "forward", broken)
        with pytest.raises(DeviceError) as caught:
            finish_all(orchestrator)
    assert isinstance(caught.value, FatalError)
    assert str(caught.value).splitlines() == [str(caught.value)]
    assert "could not be run on cpu: CUDA error: an illegal memory access was encountered" in str(caught.value)
    orchestrator.close()
    orchestrator.engine.check_drained()


@pytest.mark.parametrize("launch_ahead", [False, True])
@pytest.mark.parametrize("site", ["schedule", "update", "launch"])
def test_a_fault_of_the_engine_ends_the_searches_in_its_step_and_no_other(
    site: str, launch_ahead: bool, make_orchestrator: Make, alone: Alone, monkeypatch: pytest.MonkeyPatch
):
    orchestrator, fault = make_orchestrator(launch_ahead=launch_ahead), Fault(4, RuntimeError(SECRET))
    engine = orchestrator.engine
    target = engine._runners[GENERATOR] if site == "launch" else engine.schedulers[GENERATOR]
    monkeypatch.setattr(target, site, fault.before(getattr(target, site), lambda *_: True))
    results = run(orchestrator, *OTHERS).results
    assert fault.fired
    failed = [result for result in results if result.stop_reason is StopReason.FAILED]
    assert failed
    assert all("an internal fault ended a step of the generator" in result.error for result in failed)
    expected = [request for request, result in zip(OTHERS, results, strict=True) if result not in failed]
    assert [outcome(result) for result in results if result not in failed] == list(map(alone, expected))
    engine.check_drained()
    assert outcome(run(orchestrator, OTHERS[0]).only) == alone(OTHERS[0])


def test_a_fault_that_is_no_searchs_fails_those_that_run_and_those_that_wait_go_on(
    make_orchestrator: Make, alone: Alone, monkeypatch: pytest.MonkeyPatch
):
    orchestrator, fault = make_orchestrator(max_running=1), Fault(2, KeyError(SECRET))
    monkeypatch.setattr(orchestrator.engine, "step", fault.before(orchestrator.engine.step, lambda: True))
    first, second = run(orchestrator, *OTHERS).results
    assert first.stop_reason is StopReason.FAILED
    assert first.error == f"internal error, id={first.search_id}"
    assert outcome(second) == alone(OTHERS[1])
    orchestrator.engine.check_drained()


def test_work_that_comes_back_for_a_search_that_has_ended_is_dropped(make_orchestrator: Make, alone: Alone):
    orchestrator = make_orchestrator()
    engine = orchestrator.engine
    sequence = engine.open(GENERATOR, [5, 6, 7], owner="gone")
    engine.submit(Generate("gone", sequence, (Sampling(),), 2))
    assert outcome(run(orchestrator, OTHERS[0]).only) == alone(OTHERS[0])
    engine.check_drained()


def test_a_search_that_fails_to_fail_and_to_tell_it_ends_nobody_else(
    make_orchestrator: Make, alone: Alone, monkeypatch: pytest.MonkeyPatch
):
    def deaf(event: Event) -> None:
        raise RuntimeError(SECRET)

    def cannot_fail(*_: object) -> None:
        raise KeyError(SECRET)

    orchestrator = make_orchestrator()
    monkeypatch.setattr(running.RunningSearch, "fail", cannot_fail)
    name = orchestrator.submit(VICTIMS["beam"], deaf)
    (victim,) = orchestrator.step()
    assert (victim.search_id, victim.stop_reason) == (name, StopReason.FAILED)
    orchestrator.engine.abandon(name)  # what the broken `fail` should have done
    assert outcome(run(orchestrator, OTHERS[0]).only) == alone(OTHERS[0])


def test_a_search_that_cannot_even_say_how_far_it_came_has_a_result(
    make_orchestrator: Make, alone: Alone, monkeypatch: pytest.MonkeyPatch
):
    orchestrator, fault = make_orchestrator(), Fault(0, RuntimeError(SECRET))
    monkeypatch.setattr(running.RunningSearch, "handle", fault.before(running.RunningSearch.handle, lambda *_: True))
    monkeypatch.setattr(
        running.RunningSearch, "fail", Fault(0, KeyError(SECRET)).before(lambda *_: None, lambda *_: True)
    )
    results = run(orchestrator, *OTHERS).results
    assert sorted(str(result.stop_reason) for result in results) == ["failed", "finished"]
    (failed,) = (result for result in results if result.stop_reason is StopReason.FAILED)
    assert failed.error == f"internal error, id={failed.search_id}"
    assert [outcome(result) for result in results if result is not failed] == [
        alone(request) for request, result in zip(OTHERS, results, strict=True) if result is not failed
    ]
