"""Evaluation on tiny random models, and the folders that keep its samples."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from run_samples import CONFIGURATION, REQUEST, sample

from espalier.engine.errors import InvalidRequestError
from espalier.experiments.runs.benchmarks import Problem
from espalier.experiments.runs.evaluate import Evaluation
from espalier.experiments.runs.folder import RunFolder
from espalier.experiments.runs.record import Sample
from espalier.experiments.runs.statistics import wilson_interval
from espalier.experiments.runs.summary import Summary, summarise
from espalier.search.grading.math_verify import Grade, Grader
from espalier.search.request import AlgorithmName
from espalier.search.run.orchestrator import Orchestrator

PROBLEMS = [Problem(f"p/{i}", f"What is {i}+1?", str(i % 3), 1 + i % 2) for i in range(4)]
TOO_LONG = Problem("long", "word " * 600, "1", 5)


@pytest.fixture
def run(make_orchestrator: Callable[..., Orchestrator], grader) -> Callable[..., Summary]:
    """Evaluates, on an orchestrator of its own unless one is given."""

    def run(problems=PROBLEMS, request=REQUEST, orchestrator=None, **options: Any) -> Summary:
        kept = {name: options.pop(name) for name in ("folder", "smaller") if name in options}
        return Evaluation(orchestrator or make_orchestrator(), problems, grader, "some", **options).run(request, **kept)

    return run


@pytest.fixture
def collect() -> tuple[list[Sample], Callable[[Sample], None]]:
    samples: list[Sample] = []
    return samples, samples.append


def outcome(sample: Sample) -> tuple[Any, ...]:
    """What must not depend on what ran beside the search; the score may differ in its last bits."""
    score = None if sample.score is None else round(sample.score, 4)
    return sample.unique_id, sample.answer, sample.correct, sample.text, score, sample.usage["nodes"]


# --- the summary ---------------------------------------------------------------------------------------------------


def test_summary_agrees_with_its_samples(run, collect):
    samples, on_sample = collect
    summary = run(on_sample=on_sample)

    assert {s.unique_id for s in samples} == {p.unique_id for p in PROBLEMS}
    assert summary.problems == len(samples) == 4
    assert summary.correct == sum(s.correct for s in samples)
    assert summary.accuracy == summary.correct / 4
    assert (summary.low, summary.high) == wilson_interval(summary.correct, 4)
    for level in (1, 2):
        right = [s.correct for s in samples if s.level == level]
        assert summary.accuracy_by_level[str(level)] == sum(right) / len(right)
    for name in ("generated_tokens", "verifier_tokens"):
        assert getattr(summary, name) == pytest.approx(sum(s.usage[name] for s in samples) / 4)
    assert summary.verifier_redundancy == pytest.approx(
        sum(s.usage["verifier_tokens"] for s in samples) / sum(s.usage["verifier_tree_tokens"] for s in samples)
    )
    shares = [s.usage["physical_blocks"] / s.usage["logical_blocks"] for s in samples]
    assert summary.blocks_shared == pytest.approx(sum(shares) / 4)
    assert summary.configuration["beam_width"] == 2
    assert "problem" not in summary.configuration
    assert summary.grader.startswith("math-verify ")
    assert summary.problems_per_minute == pytest.approx(4 * 60 / summary.seconds)


def test_samples_are_graded_by_the_gold_of_their_own_problem(run, collect):
    samples, on_sample = collect
    run(on_sample=on_sample)
    golds = {p.unique_id: p.answer for p in PROBLEMS}
    assert any(s.answer for s in samples)
    for s in samples:
        assert s.gold == golds[s.unique_id]
        assert s.correct == (s.answer == s.gold)


def test_means_and_shares_by_hand():
    other = {**sample("x").usage, "generated_tokens": 30, "verifier_tokens": 24, "logical_blocks": 0}
    summary = summarise(
        [
            sample("a", wall_seconds=20.0),
            sample("b", correct=False, level=2, usage=other, wall_seconds=10.0),
            sample("c", level=None),
        ],
        "some", {}, "grader 1",
    )  # fmt: skip
    assert (summary.problems, summary.correct) == (3, 2)
    assert summary.accuracy_by_level == {"1": 1.0, "2": 0.0}
    assert summary.generated_tokens == pytest.approx(50 / 3)
    assert summary.verifier_redundancy == pytest.approx(40 / 24)
    assert summary.generator_redundancy == pytest.approx(1.5)
    assert summary.blocks_shared == pytest.approx(0.5)
    assert (summary.seconds, summary.problems_per_minute) == (30.0, 4.0)


def test_searches_without_a_verifier_have_no_verifier_redundancy(run, make_orchestrator):
    request = replace(REQUEST, algorithm=AlgorithmName.MAJORITY, beam_width=3)
    summary = run(request=request, orchestrator=make_orchestrator(verifier=None))
    assert summary.verifier_redundancy is None
    assert summary.verifier_tokens == 0
    assert summary.generated_tokens > 0


def test_every_algorithm_can_be_evaluated(run):
    for algorithm in AlgorithmName:
        assert run(PROBLEMS[:2], replace(REQUEST, algorithm=algorithm)).problems == 2


# --- refusals ------------------------------------------------------------------------------------------------------


def test_problem_that_is_too_long_is_counted_and_named_and_the_others_run(run, collect):
    samples, on_sample = collect
    summary = run([PROBLEMS[0], TOO_LONG, PROBLEMS[1]], on_sample=on_sample)

    assert summary.problems == 3
    (refused,) = [s for s in samples if s.stop_reason == "refused"]
    assert refused.unique_id == "long"
    assert not refused.correct
    assert "512" in refused.error
    assert "context" in refused.error
    assert all(s.stop_reason == "finished" for s in samples if s is not refused)


def test_summary_says_how_many_problems_were_refused(run):
    summary = run([PROBLEMS[0], TOO_LONG])
    assert summary.refused == 1
    assert "long: " in summary.errors["refused"]


def test_request_that_breaks_a_rule_ends_the_evaluation_before_any_search(run, make_orchestrator):
    orchestrator = make_orchestrator()
    with pytest.raises(InvalidRequestError, match="beam_width"):
        run(request=replace(REQUEST, beam_width=0), orchestrator=orchestrator)
    assert orchestrator.engine.stats()["generator"].steps == 0


def test_problem_that_breaks_a_rule_leaves_no_search_behind(run, make_orchestrator):
    orchestrator = make_orchestrator()
    samples: list[Sample] = []
    summary = run([*PROBLEMS, Problem("empty", " ", "1", 1)], orchestrator=orchestrator, on_sample=samples.append)
    assert summary.refused == 1
    assert summary.problems == len(PROBLEMS) + 1
    assert {s.unique_id: s.error for s in samples}["empty"] == "problem: must not be empty"
    assert not orchestrator.busy


def test_search_that_breaks_a_rule_is_refused_whole(run, make_orchestrator):
    orchestrator = make_orchestrator()
    with pytest.raises(InvalidRequestError, match="max_steps"):
        run(PROBLEMS, orchestrator=orchestrator, request=replace(REQUEST, max_steps=0))
    assert not orchestrator.busy


# --- resuming ------------------------------------------------------------------------------------------------------


def test_interrupted_run_resumes_to_the_samples_of_an_uninterrupted_one(run, tmp_path):
    whole = RunFolder(tmp_path / "whole", CONFIGURATION)
    run(folder=whole)

    def interrupt(_: Sample) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(folder=RunFolder(tmp_path / "parts", CONFIGURATION), on_sample=interrupt)
    parts = RunFolder(tmp_path / "parts", CONFIGURATION)
    before = parts.done()
    assert len(before) == 1

    new: list[Sample] = []
    summary = run(folder=parts, on_sample=new.append)
    assert len(new) == 3
    assert before[0].unique_id not in {s.unique_id for s in new}
    assert summary.problems == 4
    assert sorted(map(outcome, parts.done())) == sorted(map(outcome, whole.done()))


@pytest.mark.parametrize("early", [False, True])
def test_it_leaves_open_an_orchestrator_that_it_did_not_open(
    early: bool, run, make_orchestrator, monkeypatch: pytest.MonkeyPatch
):
    orchestrator, closed = make_orchestrator(), list[bool]()
    monkeypatch.setattr(orchestrator, "close", lambda: closed.append(True))

    def interrupt(_: Sample) -> None:
        raise KeyboardInterrupt

    if early:
        with pytest.raises(KeyboardInterrupt):
            run(orchestrator=orchestrator, on_sample=interrupt)
    assert not orchestrator.busy
    assert run(orchestrator=orchestrator).problems == len(PROBLEMS)
    assert not closed


def test_interruption_leaves_nothing_running(run, make_orchestrator):
    orchestrator = make_orchestrator()

    def interrupt(_: Sample) -> None:
        raise KeyboardInterrupt

    caught = None
    try:
        run(orchestrator=orchestrator, on_sample=interrupt)
    except KeyboardInterrupt as error:
        caught = error  # with its frames, which hold on to what they have not closed
    assert caught is not None
    assert not orchestrator.busy
    orchestrator.engine.check_drained()


def test_finished_run_computes_nothing_again(run, make_orchestrator, tmp_path):
    folder = RunFolder(tmp_path, CONFIGURATION)
    first = run(folder=folder)
    text = (tmp_path / "samples.jsonl").read_text()
    orchestrator = make_orchestrator()
    second = run(folder=RunFolder(tmp_path, CONFIGURATION), orchestrator=orchestrator)

    assert orchestrator.engine.stats()["generator"].steps == 0
    assert (tmp_path / "samples.jsonl").read_text() == text
    assert second == first  # its seconds too
    assert second.seconds > 0


def test_seconds_are_those_of_all_commands_that_searched(run, tmp_path, monkeypatch: pytest.MonkeyPatch):
    from espalier.experiments.runs import evaluate as module

    ticks = iter(range(1000))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(ticks)))

    def interrupt(_: Sample) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(folder=RunFolder(tmp_path, CONFIGURATION), on_sample=interrupt, orchestrator=None)
    kept = RunFolder(tmp_path, CONFIGURATION).done()[0].wall_seconds
    whole = run(folder=RunFolder(tmp_path, CONFIGURATION))
    assert kept > 0
    assert whole.seconds == sum(s.wall_seconds for s in RunFolder(tmp_path, CONFIGURATION).done()) > kept
    assert whole.problems_per_minute == pytest.approx(4 * 60 / whole.seconds)


def test_what_was_asked_for_is_kept_until_it_is_there(run, tmp_path):
    def asked() -> int:
        return json.loads((tmp_path / "config.json").read_text())["asked"]

    def interrupt(_: Sample) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(folder=RunFolder(tmp_path, CONFIGURATION), on_sample=interrupt)
    assert asked() == 4
    run(asked=PROBLEMS[:1], folder=RunFolder(tmp_path, CONFIGURATION))
    assert asked() == 4  # of which there is one still
    run(epochs=2, asked=PROBLEMS[:2], folder=RunFolder(tmp_path, CONFIGURATION))
    assert asked() == len(RunFolder(tmp_path, CONFIGURATION).done()) == 4
    run(epochs=2, folder=RunFolder(tmp_path, CONFIGURATION))
    assert asked() == len(RunFolder(tmp_path, CONFIGURATION).done()) == 8


def test_larger_limit_adds_to_a_run_and_a_smaller_one_takes_nothing_away(run, tmp_path):
    run(asked=PROBLEMS[:2], folder=RunFolder(tmp_path, CONFIGURATION))
    new: list[Sample] = []
    all_four = run(folder=RunFolder(tmp_path, CONFIGURATION), on_sample=new.append)
    assert all_four.problems == 4
    assert {s.unique_id for s in new} == {"p/2", "p/3"}
    assert run(asked=PROBLEMS[:1], folder=RunFolder(tmp_path, CONFIGURATION)) == all_four
    assert json.loads((tmp_path / "summary.json").read_text()) == json.loads(json.dumps(all_four.to_dict()))


def test_refused_problem_beyond_the_limit_still_counts(run, tmp_path):
    both = run([PROBLEMS[0], TOO_LONG], folder=RunFolder(tmp_path, CONFIGURATION))
    assert run([PROBLEMS[0], TOO_LONG], asked=PROBLEMS[:1], folder=RunFolder(tmp_path, CONFIGURATION)) == both
    assert (both.problems, both.refused) == (2, 1)


def test_problem_refused_again_for_the_same_reason_adds_nothing_to_the_file(run, tmp_path):
    first = run([PROBLEMS[0], TOO_LONG], folder=RunFolder(tmp_path, CONFIGURATION))
    text = (tmp_path / "samples.jsonl").read_text()
    assert run([PROBLEMS[0], TOO_LONG], folder=RunFolder(tmp_path, CONFIGURATION)) == first
    assert (tmp_path / "samples.jsonl").read_text() == text


def test_sample_of_a_problem_that_the_file_holds_no_more_does_not_count(run, tmp_path):
    run(folder=RunFolder(tmp_path, CONFIGURATION))
    assert run(PROBLEMS[:3], folder=RunFolder(tmp_path, CONFIGURATION)).problems == 3


def test_sample_that_is_there_twice_counts_once(run, tmp_path):
    run(folder=RunFolder(tmp_path, CONFIGURATION))
    first = (tmp_path / "samples.jsonl").read_text().splitlines(keepends=True)[0]
    with (tmp_path / "samples.jsonl").open("a") as stream:
        stream.write(first)  # as two runs into one folder leave it
    assert run(folder=RunFolder(tmp_path, CONFIGURATION)).problems == 4


def test_problem_refused_for_want_of_memory_runs_once_there_is_enough(run, make_orchestrator, tmp_path):
    small = make_orchestrator(kv_memory_bytes=2**15)
    refused = run(orchestrator=small, folder=RunFolder(tmp_path, CONFIGURATION))
    assert refused.refused == 4
    again = run(folder=RunFolder(tmp_path, CONFIGURATION))
    assert (again.refused, again.problems) == (0, 4)
    assert again.correct == run().correct


@pytest.fixture
def ungraded(run, tmp_path, monkeypatch: pytest.MonkeyPatch) -> Summary:
    """A run in `tmp_path` whose answers could not be graded."""
    with monkeypatch.context() as patch:
        patch.setattr(Grader, "resolve", lambda *_: Grade(False, "the grading process died"))
        return run(folder=RunFolder(tmp_path, CONFIGURATION))


def test_answer_that_could_not_be_graded_is_graded_again_and_not_searched_again(
    run, ungraded, make_orchestrator, tmp_path
):
    assert (ungraded.ungraded, ungraded.correct) == (4, 0)
    assert ungraded.errors == {"ungraded": "p/0: the grading process died"}
    orchestrator, new = make_orchestrator(), []
    again = run(folder=RunFolder(tmp_path, CONFIGURATION), orchestrator=orchestrator, on_sample=new.append)
    assert orchestrator.engine.stats()["generator"].steps == 0
    assert new == []
    assert (again.ungraded, again.correct, again.seconds) == (0, run().correct, ungraded.seconds)
    assert all(not sample.error for sample in RunFolder(tmp_path, CONFIGURATION).done())


def test_answer_that_cannot_be_graded_at_all_settles_as_that(run, ungraded, make_orchestrator, tmp_path, monkeypatch):
    text, orchestrator = (tmp_path / "samples.jsonl").read_text(), make_orchestrator()
    monkeypatch.setattr(Grader, "resolve", lambda *_: Grade(False, "the grading process died"))
    assert run(folder=RunFolder(tmp_path, CONFIGURATION), orchestrator=orchestrator) == ungraded
    assert orchestrator.engine.stats()["generator"].steps == 0
    assert (tmp_path / "samples.jsonl").read_text() == text


def test_any_of_several_gold_answers_is_right(run, collect):
    samples, on_sample = collect
    run(on_sample=on_sample)
    answers = {s.unique_id: s.answer for s in samples}
    problems = [replace(p, answer="nothing like it", alternatives=("7x", answers[p.unique_id])) for p in PROBLEMS]
    given = [p for p in problems if answers[p.unique_id]]
    assert given
    assert run(given).correct == len(given)
    assert run([replace(p, alternatives=("7x",)) for p in given]).correct == 0


@pytest.mark.parametrize("change", [{"problem": "What is 7+1?"}, {"answer": "8"}])
def test_problem_that_became_another_under_the_same_name_is_searched_again(run, tmp_path, change: dict[str, str]):
    run(folder=RunFolder(tmp_path, CONFIGURATION))
    new: list[Sample] = []
    changed = [replace(PROBLEMS[0], **change), *PROBLEMS[1:]]
    assert run(changed, folder=RunFolder(tmp_path, CONFIGURATION), on_sample=new.append).problems == 4
    assert [s.unique_id for s in new] == ["p/0"]


def test_time_limit_counts_from_the_start_of_each_search(make_orchestrator, run, collect, monkeypatch):
    samples, on_sample = collect
    orchestrator = make_orchestrator(max_running=1)
    # A second is a step of the engine.
    monkeypatch.setattr(
        orchestrator, "_clock", lambda: sum(role.steps for role in orchestrator.engine.stats().values())
    )
    problems = [replace(PROBLEMS[0], unique_id=str(i)) for i in range(20)]
    run(problems, replace(REQUEST, time_limit=40.0), orchestrator, on_sample=on_sample)
    assert {s.stop_reason for s in samples} == {"finished"}
    assert max(s.usage["seconds"] for s in samples) < 40 < max(s.usage["queue_seconds"] for s in samples)
    late: list[Sample] = []
    run(problems, replace(REQUEST, time_limit=3.0), orchestrator, on_sample=late.append)
    assert {s.stop_reason for s in late} == {"deadline"}


def test_run_folder_holds_configuration_samples_and_summary(run, tmp_path):
    summary = run(folder=RunFolder(tmp_path / "a" / "b", CONFIGURATION))
    folder = tmp_path / "a" / "b"
    assert json.loads((folder / "config.json").read_text()) == {**CONFIGURATION, "asked": len(PROBLEMS)}
    assert json.loads((folder / "summary.json").read_text()) == json.loads(json.dumps(summary.to_dict()))
    lines = (folder / "samples.jsonl").read_text().splitlines()
    assert {json.loads(line)["unique_id"] for line in lines} == {p.unique_id for p in PROBLEMS}
