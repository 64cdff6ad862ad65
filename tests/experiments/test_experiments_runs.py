"""Evaluation on tiny random models, and the folders that keep its samples."""

import json
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from espalier.engine.errors import EspalierError, InvalidRequestError
from espalier.experiments.benchmarks import Problem
from espalier.experiments.evaluate import RunFolder, Sample, Summary, evaluate, run_configuration, summarise
from espalier.experiments.statistics import wilson_interval
from espalier.search.grading import Grade, Grader
from espalier.search.orchestrator import Orchestrator
from espalier.search.request import AlgorithmName, SearchRequest

REQUEST = SearchRequest("-", AlgorithmName.BEAM, 2, 2, max_steps=4, max_step_tokens=10, seed=5)
CONFIGURATION = {"benchmark": "some", "seed": 5}
PROBLEMS = [Problem(f"p/{i}", f"What is {i}+1?", str(i % 3), 1 + i % 2) for i in range(4)]
TOO_LONG = Problem("long", "word " * 600, "1", 5)


@pytest.fixture
def run(make_orchestrator: Callable[..., Orchestrator], grader) -> Callable[..., Summary]:
    """Evaluates, on an orchestrator of its own unless one is given."""

    def run(problems=PROBLEMS, request=REQUEST, orchestrator=None, **options: Any) -> Summary:
        return evaluate(orchestrator or make_orchestrator(), problems, request, grader, benchmark="some", **options)

    return run


@pytest.fixture
def collect() -> tuple[list[Sample], Callable[[Sample], None]]:
    samples: list[Sample] = []
    return samples, samples.append


def sample(name: str, **changes: Any) -> Sample:
    accounting = {
        "generated_tokens": 10,
        "generator_tokens": 30,
        "generator_tree_tokens": 20,
        "verifier_tokens": 8,
        "verifier_tree_tokens": 8,
        "physical_blocks": 3,
        "logical_blocks": 6,
    }
    plain = Sample(name, 1, "1", "1", True, "", 0.5, "finished", "\\boxed{1}", {"1": 1}, accounting)
    return replace(plain, **changes)


def outcome(sample: Sample) -> tuple[Any, ...]:
    """What must not depend on what ran beside the search; the score may differ in its last bits."""
    score = None if sample.score is None else round(sample.score, 4)
    return sample.unique_id, sample.answer, sample.correct, sample.text, score, sample.accounting["nodes"]


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
        assert getattr(summary, name) == pytest.approx(sum(s.accounting[name] for s in samples) / 4)
    assert summary.verifier_redundancy == pytest.approx(
        sum(s.accounting["verifier_tokens"] for s in samples)
        / sum(s.accounting["verifier_tree_tokens"] for s in samples)
    )
    shares = [s.accounting["physical_blocks"] / s.accounting["logical_blocks"] for s in samples]
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
    other = {**sample("x").accounting, "generated_tokens": 30, "verifier_tokens": 24, "logical_blocks": 0}
    summary = summarise(
        [sample("a"), sample("b", correct=False, level=2, accounting=other), sample("c", level=None)],
        "some", REQUEST, "grader 1", seconds=30.0, fresh=2,
    )  # fmt: skip
    assert (summary.problems, summary.correct) == (3, 2)
    assert summary.accuracy_by_level == {"1": 1.0, "2": 0.0}
    assert summary.generated_tokens == pytest.approx(50 / 3)
    assert summary.verifier_redundancy == pytest.approx(40 / 24)
    assert summary.generator_redundancy == pytest.approx(1.5)
    assert summary.blocks_shared == pytest.approx(0.5)
    assert summary.problems_per_minute == 4.0


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
    assert asdict(run([PROBLEMS[0], TOO_LONG])).get("refused") == 1


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
    assert second.problems_per_minute is None
    timing = {"seconds": 0.0, "problems_per_minute": None}
    assert replace(second, **timing) == replace(first, **timing)


def test_larger_limit_adds_to_a_run_and_a_smaller_one_reads_part_of_it(run, tmp_path):
    run(PROBLEMS[:2], folder=RunFolder(tmp_path, CONFIGURATION))
    new: list[Sample] = []
    assert run(folder=RunFolder(tmp_path, CONFIGURATION), on_sample=new.append).problems == 4
    assert {s.unique_id for s in new} == {"p/2", "p/3"}
    assert run(PROBLEMS[:1], folder=RunFolder(tmp_path, CONFIGURATION)).problems == 1


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


def test_answer_that_could_not_be_graded_is_graded_anew(run, tmp_path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(Grader, "resolve", lambda *_: Grade(False, "the grading process died"))
        run(folder=RunFolder(tmp_path, CONFIGURATION))
    assert run(folder=RunFolder(tmp_path, CONFIGURATION)).correct == run().correct
    assert all(not sample.error for sample in RunFolder(tmp_path, CONFIGURATION).done())


@pytest.mark.parametrize("change", [{"problem": "What is 7+1?"}, {"answer": "8"}])
def test_problem_that_became_another_under_the_same_name_is_searched_again(run, tmp_path, change: dict[str, str]):
    run(folder=RunFolder(tmp_path, CONFIGURATION))
    new: list[Sample] = []
    changed = [replace(PROBLEMS[0], **change), *PROBLEMS[1:]]
    assert run(changed, folder=RunFolder(tmp_path, CONFIGURATION), on_sample=new.append).problems == 4
    assert [s.unique_id for s in new] == ["p/0"]


def test_samples_of_an_older_version_are_known_by_their_gold(run, tmp_path):
    run(folder=RunFolder(tmp_path, CONFIGURATION))
    file = tmp_path / "samples.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({k: v for k, v in line.items() if k != "asked"}) + "\n" for line in lines))
    new: list[Sample] = []
    changed = [replace(PROBLEMS[0], answer="8"), *PROBLEMS[1:]]
    run(changed, folder=RunFolder(tmp_path, CONFIGURATION), on_sample=new.append)
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
    assert max(s.accounting["seconds"] for s in samples) < 40 < max(s.accounting["queue_seconds"] for s in samples)
    late: list[Sample] = []
    run(problems, replace(REQUEST, time_limit=3.0), orchestrator, on_sample=late.append)
    assert {s.stop_reason for s in late} == {"deadline"}


def test_run_folder_holds_configuration_samples_and_summary(run, tmp_path):
    summary = run(folder=RunFolder(tmp_path / "a" / "b", CONFIGURATION))
    folder = tmp_path / "a" / "b"
    assert json.loads((folder / "config.json").read_text()) == CONFIGURATION
    assert json.loads((folder / "summary.json").read_text()) == json.loads(json.dumps(asdict(summary)))
    lines = (folder / "samples.jsonl").read_text().splitlines()
    assert {json.loads(line)["unique_id"] for line in lines} == {p.unique_id for p in PROBLEMS}


# --- the folder by itself ------------------------------------------------------------------------------------------


def keep(folder: RunFolder, *samples: Sample) -> None:
    with folder.open_samples() as stream:
        stream.writelines(json.dumps(asdict(s)) + "\n" for s in samples)


def test_folder_of_another_configuration_is_refused(tmp_path):
    RunFolder(tmp_path / "run", CONFIGURATION)
    with pytest.raises(EspalierError, match=r"run holds a run of another configuration.*--out"):
        RunFolder(tmp_path / "run", {**CONFIGURATION, "seed": 6})
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == CONFIGURATION


def test_request_survives_the_way_through_the_configuration_file(tmp_path):
    configuration = {k: v for k, v in REQUEST.to_dict().items() if k != "problem"}
    RunFolder(tmp_path, configuration)
    written = (tmp_path / "config.json").read_text()
    RunFolder(tmp_path, configuration)  # another process with the same request takes it as its own
    assert (tmp_path / "config.json").read_text() == written
    assert json.loads(written) == json.loads(json.dumps(configuration))


def whole_configuration(**changes: Any) -> dict[str, Any]:
    """As `run_configuration` makes it, of models by any name."""
    search = {k: v for k, v in replace(REQUEST, **changes).to_dict().items() if k != "problem"}
    return {"benchmark": "some", **search, "generator": "a1", "verifier": "b2", "grouping": "spelling"}


def write_configuration(folder: Path, configuration: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(configuration))


@pytest.mark.parametrize(
    "field", sorted(f.name for f in fields(SearchRequest) if f.default is None and f.name not in ("top_k", "min_p"))
)
def test_field_that_an_older_folder_lacks_counts_as_its_default(tmp_path: Path, field: str):
    new = whole_configuration()
    write_configuration(tmp_path, {name: value for name, value in new.items() if name != field})
    RunFolder(tmp_path, new)
    assert json.loads((tmp_path / "config.json").read_text()) == new  # and from now on it says so


def test_field_that_an_older_folder_lacks_and_that_is_set_now_is_refused_by_name(tmp_path: Path):
    old = {name: value for name, value in whole_configuration().items() if name not in ("simulations", "time_limit")}
    write_configuration(tmp_path, old)
    with pytest.raises(EspalierError, match=r"\(simulations, time_limit differ\)"):
        RunFolder(tmp_path, whole_configuration(simulations=8, time_limit=2.0))
    assert json.loads((tmp_path / "config.json").read_text()) == old


def test_folder_from_before_answers_were_grouped_went_by_spelling(tmp_path: Path):
    write_configuration(tmp_path, {k: v for k, v in whole_configuration().items() if k != "grouping"})
    with pytest.raises(EspalierError, match=r"\(grouping differ\)"):
        RunFolder(tmp_path, {**whole_configuration(), "grouping": "math-verify 0.8"})
    RunFolder(tmp_path, whole_configuration())


def test_samples_of_an_algorithm_that_came_to_choose_otherwise_are_not_mixed(make_orchestrator, tmp_path: Path):
    orchestrator = make_orchestrator()
    for algorithm, mixes in ((AlgorithmName.BEAM, True), (AlgorithmName.AUTO, False)):
        new = run_configuration("some", replace(REQUEST, algorithm=algorithm), orchestrator)
        folder = tmp_path / algorithm
        folder.mkdir()
        write_configuration(folder, {name: value for name, value in new.items() if name != "revision"})
        with nullcontext() if mixes else pytest.raises(EspalierError, match=r"\(revision differ\)"):
            RunFolder(folder, new)


@pytest.mark.parametrize("field", ["top_k", "min_p"])
def test_folder_from_before_a_filter_of_tokens_sampled_without_it(tmp_path: Path, field: str):
    write_configuration(tmp_path, {k: v for k, v in whole_configuration().items() if k != field})
    with pytest.raises(EspalierError, match=rf"\({field} differ\)"):
        RunFolder(tmp_path, whole_configuration())  # the checkpoint's own now, and it may have one
    RunFolder(tmp_path, whole_configuration(**{field: 0}))


def test_models_that_an_older_folder_does_not_name_are_another_configuration(tmp_path: Path):
    write_configuration(tmp_path, {k: v for k, v in whole_configuration().items() if k != "verifier"})
    with pytest.raises(EspalierError, match=r"\(verifier differ\)"):
        RunFolder(tmp_path, whole_configuration())


def test_field_of_a_newer_version_is_refused_by_name(tmp_path: Path):
    write_configuration(tmp_path, {**whole_configuration(), "foresight": None})
    with pytest.raises(EspalierError, match=r"\(foresight differ\)"):
        RunFolder(tmp_path, whole_configuration())


def test_evaluation_of_an_older_version_resumes(run, make_orchestrator, tmp_path: Path):
    orchestrator = make_orchestrator()
    configuration = run_configuration("some", REQUEST, orchestrator)
    run(PROBLEMS[:2], folder=RunFolder(tmp_path, configuration), orchestrator=orchestrator)
    late = ("time_limit", "generator_budget", "verifier_budget", "confidence", "grouping")
    write_configuration(tmp_path, {name: value for name, value in configuration.items() if name not in late})
    new: list[Sample] = []
    assert run(folder=RunFolder(tmp_path, configuration), on_sample=new.append).problems == 4
    assert {s.unique_id for s in new} == {"p/2", "p/3"}


def test_new_folder_has_no_samples(tmp_path):
    assert RunFolder(tmp_path / "new", CONFIGURATION).done() == []


def test_last_line_cut_short_is_dropped_from_the_file(tmp_path):
    folder = RunFolder(tmp_path, CONFIGURATION)
    keep(folder, sample("a"), sample("b"))
    whole = (tmp_path / "samples.jsonl").read_text()
    with folder.open_samples() as stream:
        stream.write(json.dumps(asdict(sample("c")))[:40])

    assert [s.unique_id for s in folder.done()] == ["a", "b"]
    keep(folder, sample("c"))
    assert (tmp_path / "samples.jsonl").read_text().startswith(whole + '{"unique_id": "c"')
    assert [s.unique_id for s in folder.done()] == ["a", "b", "c"]


def test_last_line_that_lacks_only_its_end_does_not_swallow_the_next(tmp_path):
    folder = RunFolder(tmp_path, CONFIGURATION)
    with folder.open_samples() as stream:
        stream.write(json.dumps(asdict(sample("a"))))
    folder.done()
    keep(folder, sample("b"), sample("c"))
    assert [s.unique_id for s in folder.done()][-2:] == ["b", "c"]


def test_damage_in_the_middle_does_not_cost_the_samples_behind_it(tmp_path):
    folder = RunFolder(tmp_path, CONFIGURATION)
    keep(folder, sample("a"))
    with folder.open_samples() as stream:
        stream.write("damaged\n")
    keep(folder, sample("c"))
    with suppress(EspalierError):  # to refuse the file is as good as to read on
        folder.done()
    assert '"c"' in (tmp_path / "samples.jsonl").read_text()


@pytest.mark.parametrize("damage", [{"correct": "maybe"}, {"accounting": None}])
def test_sample_whose_fields_are_of_another_kind_is_refused_by_its_line(tmp_path: Path, damage: dict[str, Any]):
    folder = RunFolder(tmp_path, CONFIGURATION)
    line = json.dumps(asdict(sample("a")) | damage)
    (tmp_path / "samples.jsonl").write_text(f"{line}\n")
    with pytest.raises(EspalierError, match=r"samples\.jsonl:1 is damaged"):
        folder.done()


def test_folder_that_cannot_be_made_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EspalierError, match="file"):
        RunFolder(tmp_path / "file", CONFIGURATION)


def test_samples_of_nobody_knows_what_are_refused(tmp_path: Path):
    keep(RunFolder(tmp_path, CONFIGURATION), sample("a"))
    (tmp_path / "config.json").unlink()
    with pytest.raises(EspalierError, match=r"no config\.json.*--out"):
        RunFolder(tmp_path, CONFIGURATION)
    assert not (tmp_path / "config.json").exists()


def test_last_line_of_bytes_that_are_no_text_is_dropped(tmp_path: Path):
    folder = RunFolder(tmp_path, CONFIGURATION)
    keep(folder, sample("a"))
    with (tmp_path / "samples.jsonl").open("ab") as stream:
        stream.write(b"\xff\xfe\x00")
    assert [s.unique_id for s in folder.done()] == ["a"]
    keep(folder, sample("b"))
    assert [s.unique_id for s in folder.done()] == ["a", "b"]


def test_damaged_configuration_is_refused_by_name(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"seed"')
    with pytest.raises(EspalierError, match=r"config\.json"):
        RunFolder(tmp_path, CONFIGURATION)
