"""Searches wait for their vote without holding anything, and without holding up anybody."""

import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest
from scripted_equivalence import ScriptedEquivalence
from search_runs import BEAM, MAJORITY, crowd, outcome, run, voting

from espalier.search.fairness import NOBODY, Account
from espalier.search.grading.answers import extract_answer
from espalier.search.grading.math_verify import Grade, Grader
from espalier.search.growth import search as running
from espalier.search.request import AnswerEquivalence, SearchRequest, SubmitOptions
from espalier.search.result import CandidateDone, Event, Finished, SearchResult, StopReason
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.voting.equivalence import Comparison, MathVerify, make_equivalence

Make = Callable[..., Orchestrator]

SPLIT = replace(MAJORITY, seed=8)
"""Its paths answer 2, 1, 1, 0 and 2, the last of them twice: by exact match the first wins."""
WORDS = {"2": "x+1", "1": "2\\sqrt{2}", "0": "\\sqrt{8}"}


@pytest.fixture
def formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches answer with formulas where they would with digits."""
    monkeypatch.setattr(running, "answer_in", lambda text, _: WORDS.get(extract_answer(text), ""))


def until_voting(orchestrator: Orchestrator) -> None:
    for _ in range(1000):
        assert orchestrator.step() == []
        if voting(orchestrator):
            return
    raise AssertionError("it never votes")


@pytest.mark.usefixtures("formulas")
def test_a_search_that_waits_for_its_vote_holds_nothing(make_orchestrator: Make):
    equivalence, events = ScriptedEquivalence(lambda one, other: True, at_once=False), list[Event]()
    orchestrator = make_orchestrator(equivalence=equivalence)
    orchestrator.submit(SPLIT, events.append)
    until_voting(orchestrator)
    assert (orchestrator.running, voting(orchestrator), orchestrator.busy) == (0, 1, True)
    orchestrator.engine.check_drained()
    assert set(orchestrator.engine.admission.reserved_blocks.values()) <= {0}
    assert orchestrator.step() == []
    results: list[SearchResult] = []
    equivalence.let_go()
    while orchestrator.busy:
        results += orchestrator.step()
    (result,) = results
    assert (result.stop_reason, result.grader) == (StopReason.FINISHED, "script 1")
    assert [event for event in events if isinstance(event, Finished)] == [Finished(result.search_id, result)]


@pytest.mark.usefixtures("formulas")
def test_what_is_called_equal_wins_together(make_orchestrator: Make):
    by_exact_match = run(make_orchestrator(), SPLIT).only
    assert (by_exact_match.answer, by_exact_match.grader) == ("x+1", "exact-match")
    roots = ScriptedEquivalence(lambda one, other: "sqrt" in one and "sqrt" in other)
    together = run(make_orchestrator(equivalence=roots), SPLIT).only
    assert (together.answer, together.grader) == ("2\\sqrt{2}", "script 1")
    assert [c.steps for c in together.candidates] == [c.steps for c in by_exact_match.candidates]


@pytest.mark.usefixtures("formulas")
def test_others_grow_while_one_votes(make_orchestrator: Make):
    equivalence = ScriptedEquivalence(at_once=False)
    orchestrator = make_orchestrator(equivalence=equivalence, max_running=1)
    voter = orchestrator.submit(SPLIT)
    until_voting(orchestrator)
    others = {orchestrator.submit(replace(MAJORITY, beam_width=1, seed=seed)) for seed in range(3)}
    ended: set[str] = set()
    started = time.monotonic()
    while others - ended:
        ended |= {result.search_id for result in orchestrator.step()}
        assert time.monotonic() - started < 60
    assert voter not in ended
    orchestrator.close()


@pytest.mark.usefixtures("formulas")
def test_with_votes_alone_a_step_rests_briefly(make_orchestrator: Make):
    orchestrator = make_orchestrator(equivalence=ScriptedEquivalence(at_once=False))
    orchestrator.submit(SPLIT)
    until_voting(orchestrator)
    started = time.monotonic()
    for _ in range(10):
        assert orchestrator.step() == []
    assert 0.05 < time.monotonic() - started < 5
    orchestrator.close()


@pytest.mark.usefixtures("formulas")
def test_a_time_limit_ends_a_vote_by_exact_match(make_orchestrator: Make, monkeypatch: pytest.MonkeyPatch):
    orchestrator, now = (
        make_orchestrator(equivalence=ScriptedEquivalence(lambda one, other: True, at_once=False)),
        [0.0],
    )
    monkeypatch.setattr(orchestrator, "_clock", lambda: now[0])
    orchestrator.submit(replace(SPLIT, time_limit=5.0))
    until_voting(orchestrator)
    now[0] = 4.9
    assert orchestrator.step() == []
    now[0] = 5.0
    (result,) = orchestrator.step()
    assert (result.answer, result.grader, result.stop_reason) == ("x+1", "exact-match", StopReason.DEADLINE)
    assert not orchestrator.busy


@pytest.mark.usefixtures("formulas")
def test_a_vote_that_would_compute_for_long_is_ended_by_exact_match(make_orchestrator: Make):
    for seconds, expected in ((29.0, ("2\\sqrt{2}", "script 1")), (30.0, ("x+1", "exact-match"))):
        equal = ScriptedEquivalence(lambda one, other: one != "x+1", cpu_seconds=seconds)
        result = run(make_orchestrator(equivalence=equal), SPLIT).only
        assert (result.answer, result.grader, result.stop_reason) == (*expected, StopReason.FINISHED)


@pytest.mark.usefixtures("formulas")
def test_a_vote_takes_any_time_that_others_make_it_wait(make_orchestrator: Make, monkeypatch: pytest.MonkeyPatch):
    equivalence, now = ScriptedEquivalence(lambda one, other: one != "x+1", at_once=False), [0.0]
    orchestrator = make_orchestrator(equivalence=equivalence)
    monkeypatch.setattr(orchestrator, "_clock", lambda: now[0])
    orchestrator.submit(SPLIT, options=SubmitOptions(caller="somebody"))
    until_voting(orchestrator)
    now[0] = 600.0
    assert orchestrator.step() == []
    equivalence.let_go()
    results: list[SearchResult] = []
    while orchestrator.busy:
        results += orchestrator.step()
    assert [result.answer for result in results] == ["2\\sqrt{2}"]
    assert set(equivalence.accounts) == {Account("somebody")}


class Blocking(ScriptedEquivalence):
    """Never answers what one caller asks."""

    def compare(self, one: str, other: str, account: Account = NOBODY) -> Comparison:
        return super().compare(one, other, account) if account.caller == "many" else Comparison(True)


@pytest.mark.usefixtures("formulas")
def test_votes_of_one_caller_do_not_wait_for_anothers(make_orchestrator: Make):
    orchestrator = make_orchestrator(equivalence=Blocking(at_once=False), max_running=2)
    for _ in range(12):
        orchestrator.submit(SPLIT, options=SubmitOptions(caller="many"))
    while voting(orchestrator) < 12:
        assert orchestrator.step() == []
    few = {orchestrator.submit(SPLIT, options=SubmitOptions(caller="few")) for _ in range(6)}
    ended = set[str]()
    for _ in range(1000):
        ended |= {result.search_id for result in orchestrator.step()}
        if ended == few:
            break
    assert ended == few
    orchestrator.close()


@pytest.mark.usefixtures("formulas")
def test_a_search_cancelled_at_its_vote_answers_by_exact_match(make_orchestrator: Make):
    equivalence = ScriptedEquivalence(at_once=False)
    orchestrator = make_orchestrator(equivalence=equivalence)
    search_id = orchestrator.submit(SPLIT)
    until_voting(orchestrator)
    orchestrator.cancel(search_id)
    (result,) = orchestrator.step()
    assert (result.answer, result.grader, result.stop_reason) == ("x+1", "exact-match", StopReason.CANCELLED)
    assert not orchestrator.busy


@pytest.mark.usefixtures("formulas")
@pytest.mark.parametrize("late", [False, True])
def test_a_search_stopped_while_it_grows_does_not_wait_for_a_vote(
    late: bool, make_orchestrator: Make, monkeypatch: pytest.MonkeyPatch
):
    equivalence, now, told = ScriptedEquivalence(at_once=False), [0.0], set[str]()
    orchestrator = make_orchestrator(equivalence=equivalence)
    monkeypatch.setattr(orchestrator, "_clock", lambda: now[0])

    def note(event: Event) -> None:
        if isinstance(event, CandidateDone) and event.candidate.answer:
            told.add(event.candidate.answer)

    search_id = orchestrator.submit(replace(SPLIT, time_limit=1.0), note)
    while len(told) < 2:
        assert orchestrator.step() == []
        assert not voting(orchestrator)
    if late:
        now[0] = 1.0
    else:
        orchestrator.cancel(search_id)
    (result,) = orchestrator.step()
    assert result.stop_reason is (StopReason.DEADLINE if late else StopReason.CANCELLED)
    assert (result.answer in told, result.grader, equivalence.asked) == (True, "exact-match", [])


@pytest.mark.usefixtures("formulas")
def test_closing_ends_votes_and_closes_the_equivalence(make_orchestrator: Make):
    equivalence, events = ScriptedEquivalence(at_once=False), list[Event]()
    orchestrator = make_orchestrator(equivalence=equivalence)
    orchestrator.submit(SPLIT, events.append)
    until_voting(orchestrator)
    orchestrator.close()
    assert isinstance(events[-1], Finished)
    assert not orchestrator.busy
    assert equivalence.closed


@pytest.mark.usefixtures("formulas")
def test_votes_change_nothing_in_how_others_grow(make_orchestrator: Make):
    alone = run(make_orchestrator(), BEAM).only
    equivalence = ScriptedEquivalence()
    watched = run(make_orchestrator(equivalence=equivalence, kv_memory_bytes=2**23), SPLIT, BEAM, *crowd(6))
    assert outcome(watched.results[1]) == outcome(alone)
    assert equivalence.asked


@pytest.mark.usefixtures("formulas")
def test_math_verify_finds_equal_formulas_and_its_processes_end_with_the_orchestrator(make_orchestrator: Make):
    others = set(multiprocessing.active_children())
    orchestrator = make_orchestrator(equivalence=(equivalence := MathVerify()))
    for _ in range(2):  # closed, it can be used again
        result = run(orchestrator, SPLIT).only
        assert (result.answer, result.grader) == ("2\\sqrt{2}", equivalence.name)
        assert len(set(multiprocessing.active_children()) - others) == 1
        orchestrator.close()
        assert set(multiprocessing.active_children()) == others


@pytest.mark.parametrize("error", [TimeoutError(), MemoryError(), BrokenProcessPool()])
def test_a_question_that_fails_says_that_the_answers_differ(error: Exception, monkeypatch: pytest.MonkeyPatch):
    failed = Future[Grade]()
    failed.set_exception(error)
    monkeypatch.setattr(Grader, "compare", lambda self, one, other: failed)
    assert not MathVerify().compare("x", "x").equal


def test_closing_ends_a_question_that_is_asked_on_another_thread():
    equivalence, verdicts = MathVerify(), list[bool]()
    endless = "x^{9^{9^{9}}}", "x^{9^{9^{8}}}+1"
    thread = threading.Thread(target=lambda: verdicts.append(equivalence.compare(*endless).equal))
    thread.start()
    deadline = time.monotonic() + 60
    while thread.is_alive():
        equivalence.close()
        assert time.monotonic() < deadline
        thread.join(0.5)
    assert verdicts == [False]
    equivalence.close()


RUNAWAY = "x+10^{10^{10}}", "x^2+10^{10^{9}}"
"""Would be compared for hours."""


def test_answers_that_run_away_do_not_hold_up_others_and_change_no_verdict(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(MathVerify, "_new_grader", lambda _: Grader(cpu_seconds=5.0))
    equivalence, evil, good = MathVerify(), Account("evil"), Account("good")
    try:
        assert equivalence.compare("\\sqrt{8}", "2\\sqrt{2}", good).equal
        with ThreadPoolExecutor(8) as pool:
            runaways = [pool.submit(equivalence.compare, *RUNAWAY, evil) for _ in range(2)]
            while not any(future.running() or future.done() for future in runaways):
                time.sleep(0.01)
            for i in range(2, 5):
                assert equivalence.compare(f"\\sqrt{{{i**3}}}", f"{i}\\sqrt{{{i}}}", good).equal
                assert not equivalence.compare(f"\\sqrt{{{i}}}", f"\\sqrt{{{i + 1}}}", good).equal
            assert not any(future.done() for future in runaways), "they have run for less than one of them may"
            assert [future.result() for future in runaways] == [Comparison(False, 5.0)] * 2
    finally:
        equivalence.close()


def test_closing_ends_comparisons_that_have_not_begun():
    equivalence, evil = MathVerify(), Account("evil")
    with ThreadPoolExecutor(8) as pool:
        runaways = [pool.submit(equivalence.compare, *RUNAWAY, evil) for _ in range(8)]
        deadline = time.monotonic() + 60
        while not all(future.done() for future in runaways):
            time.sleep(0.2)
            equivalence.close()
            assert time.monotonic() < deadline
        assert not any(future.result().equal for future in runaways)


def test_plain_numbers_start_no_process(make_orchestrator: Make):
    others = set(multiprocessing.active_children())
    orchestrator = make_orchestrator(equivalence=MathVerify())
    requests: list[SearchRequest] = [replace(MAJORITY, seed=seed) for seed in range(4)]
    for result in run(orchestrator, *requests, BEAM).results:
        assert result.grader == "exact-match"
    assert set(multiprocessing.active_children()) == others
    orchestrator.close()


def test_equivalences_are_made_by_name(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    assert make_equivalence(AnswerEquivalence.EXACT_MATCH) is None
    assert isinstance(math_verify := make_equivalence(AnswerEquivalence.MATH_VERIFY), MathVerify)
    assert math_verify.name.split()[0] == "math-verify"
    monkeypatch.setattr("espalier.search.voting.equivalence.find_spec", lambda name: None)
    assert make_equivalence(AnswerEquivalence.MATH_VERIFY) is None
    assert "math-verify is not installed" in caplog.text
