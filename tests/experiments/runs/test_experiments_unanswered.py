"""Searches that end without an answer are counted by reason, with the option that would help."""

from dataclasses import replace
from io import StringIO

import pytest
from hand_made import ROOT, node, result
from rich.console import Console
from run_samples import REQUEST, sample

from espalier.experiments.cli.render import show_result, show_summary
from espalier.experiments.runs.benchmarks import Problem
from espalier.experiments.runs.evaluate import Evaluation
from espalier.experiments.runs.record import Sample, Unanswered, unanswered_in, unanswered_text, why_unanswered
from espalier.experiments.runs.summary import summarise
from espalier.search.request import AlgorithmName, SearchRequest
from espalier.search.result import Candidate, NodeRecord, StopReason

LONG = 98
"""Words of a problem that leave a few of the tiny generator's 512 tokens of context."""
REQUESTED = SearchRequest("What?", max_tokens=12, max_steps=3, max_step_tokens=6)


def step(number: int, path: tuple[int, ...], tokens: int, end: str = "", times: int = 1) -> NodeRecord:
    return replace(node(number, 0, len(path), "x", 0.5, end, times), path=path, tokens=tokens)


def reason(*nodes: NodeRecord, limit: int | None = None, **changes: object) -> Unanswered | None:
    fields = {"answer": "", "best": None, "candidates": (), "nodes": (ROOT, *nodes), "configuration": REQUESTED}
    return why_unanswered(result(**(fields | changes)), limit)


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ((step(1, (0,), 6), step(2, (0, 0), 6, "length")), "max-tokens"),
        ((step(1, (0,), 2), step(2, (0, 0), 2), step(3, (0, 0, 1), 2, "length")), "max-steps"),
        ((step(1, (0,), 6, "length"),), "verifier"),
        ((step(1, (0,), 3, "length"),), "verifier"),
        ((step(1, (0,), 3, "degenerate"),), "repetition"),
        ((step(1, (0,), 3, "budget"),), "budget"),
        ((step(1, (0,), 3, "unclosed"),), "thought"),
        ((step(1, (0,), 3, "pruned"),), "unknown"),
        ((step(1, (0,), 6, "length"), step(2, (1,), 3, "degenerate", times=2), step(3, (2,), 3, "pruned", times=9)),
         "repetition"),
    ],
)  # fmt: skip
def test_the_reason_is_how_most_paths_ended(nodes, why):
    assert reason(*nodes) == why


def test_a_path_that_fills_the_context_is_told_from_one_of_the_asked_length():
    nodes = (step(1, (0,), 6), step(2, (0, 0), 6, "length"))
    assert reason(*nodes, limit=12) is Unanswered.MAX_TOKENS
    assert reason(*nodes, limit=13) is Unanswered.CONTEXT


def test_why_the_search_ended_comes_before_how_its_paths_did():
    cut = step(1, (0,), 6, "length")
    assert reason(cut, stop_reason=StopReason.DEADLINE) is Unanswered.TIME_LIMIT
    assert reason(cut, stop_reason=StopReason.BUDGET) is Unanswered.BUDGET
    assert reason(cut, candidates=(Candidate(1, "", None, 1, ()),)) is Unanswered.NO_FINAL_ANSWER
    assert reason(cut, answer="7") is None


def test_counts_are_one_sentence_with_what_would_help():
    assert unanswered_text({}, 15) == ""
    assert unanswered_text({"repetition": 2, "max-tokens": 10}, 15) == (
        "12 of 15 searches ended without an answer: 10 cut by --max-tokens, 2 lost in repetition; "
        "raise --max-tokens, raise --temperature"
    )
    assert unanswered_text({"unknown": 1}, 2) == "1 of 2 searches ended without an answer: 1 without a recorded reason"
    runs = [("a", {"max-tokens": 3}, 5), ("b", {}, 5), ("c", {"max-tokens": 1}, 5)]
    assert unanswered_in(runs) == (
        "4 of 10 searches ended without an answer: 4 cut by --max-tokens; raise --max-tokens (a, c)"
    )


def test_a_summary_counts_them_and_leaves_out_what_was_refused():
    samples = [
        sample("a", answer="", correct=False, unanswered="max-tokens"),
        sample("b", answer="", correct=False),
        sample("c", answer="", correct=False, stop_reason="refused", error="too long"),
        sample("d"),
    ]
    summary = summarise(samples, "some", {}, "grader 1")
    assert summary.unanswered == {"max-tokens": 1, "unknown": 1}
    shown = Console(file=StringIO(), width=200)
    show_summary(shown, summary)
    assert isinstance(shown.file, StringIO)
    line = next(line for line in shown.file.getvalue().splitlines() if "no answer" in line)
    assert "2 of 4 searches ended without an answer: 1 cut by --max-tokens, 1 without a recorded reason" in line


@pytest.mark.parametrize(
    ("problem", "changes", "why"),
    [
        ("What is 1+1?", {"max_tokens": 12, "max_step_tokens": 12}, "max-tokens"),
        ("What is 1+1?", {"max_steps": 1, "max_step_tokens": 8}, "max-steps"),
        ("word " * LONG, {"max_tokens": 100, "max_step_tokens": 100}, "context"),
        ("What is 1+1?", {"time_limit": 1e-9}, "time-limit"),
        ("What is 1+1?", {"generator_budget": 9}, "budget"),
    ],
)
def test_an_evaluation_tells_why_each_search_has_no_answer(make_orchestrator, grader, problem, changes, why):
    samples: list[Sample] = []
    request = replace(REQUEST, algorithm=AlgorithmName.GREEDY, **changes)
    problems = [Problem("p", problem, "1", None)]
    summary = Evaluation(make_orchestrator(), problems, grader, "some", on_sample=samples.append).run(request)
    assert [each.unanswered for each in samples] == [why]
    assert summary.unanswered == {why: 1}


def test_solve_says_which_limit_left_it_without_an_answer():
    shown = Console(file=StringIO(), width=200)
    nodes = (ROOT, step(1, (0,), 6), step(2, (0, 0), 6, "length"))
    show_result(shown, result(answer="", best=None, candidates=(), nodes=nodes, configuration=REQUESTED), "48")
    assert isinstance(shown.file, StringIO)
    assert "no answer: cut by --max-tokens; raise --max-tokens   (expected 48)" in shown.file.getvalue()
