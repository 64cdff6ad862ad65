"""Rollouts: trees of solutions with their values, and the file that holds them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plain import plain_logits

from espalier.engine.engine import Engine
from espalier.engine.errors import EspalierError
from espalier.experiments.prm_evaluation.solutions import Format, read_solutions
from espalier.experiments.runs.benchmarks import Problem, load_benchmark
from espalier.experiments.runs.files import open_lines
from espalier.experiments.verifier_training.rollouts import RolloutSampler, sample_into
from espalier.experiments.verifier_training.tree_file import (
    TreeRecord,
    claim,
    read_trees,
    write_math_shepherd,
    write_tree,
    write_trl,
)
from espalier.search.grading.math_verify import Grader
from espalier.search.rollout import Labels, RolloutSettings, StepRecord
from espalier.search.run.generator import Generator

PROBLEMS = [
    Problem(str(i), f"Tom has {i} coins. How many has he?", answer, None) for i, answer in enumerate("0121", start=3)
]
SETTINGS = RolloutSettings(
    solutions=6, continuations=5, temperature=1.0, max_steps=4, max_step_tokens=12, max_tokens=40
)


@pytest.fixture
def sample(make_engine: Callable[..., Engine], grader: Grader) -> Callable[..., list[TreeRecord]]:
    def run(
        settings: RolloutSettings = SETTINGS, problems: list[Problem] = PROBLEMS, in_flight: int = 3, **options: object
    ) -> list[TreeRecord]:
        engine = make_engine("talker", **{"kv_memory_bytes": 2**23, **options})
        generator = Generator(engine, "", {"temperature": 1.0})
        trees = list(RolloutSampler(engine, generator, settings, grader, in_flight).sample(problems))
        engine.check_drained()
        run.computed = engine.stats()["generator"].computed_tokens  # type: ignore[attr-defined]
        return sorted(trees, key=lambda tree: tree.problem_id)

    return run


def solutions(tree: TreeRecord) -> list[str]:
    """The text of every solution, as often as it was sampled."""
    ends = [(i, step) for i, step in enumerate(tree.steps) if step.end]
    return sorted("".join(tree.steps[j].text for j in tree.lineage(i)) for i, step in ends for _ in range(step.samples))


def right_of(tree: TreeRecord, index: int) -> int:
    """How many solutions with a step end right."""
    ends = [(i, step) for i, step in enumerate(tree.steps) if step.right]
    return sum(step.samples for i, step in ends if index in tree.lineage(i))


def test_a_tree_holds_every_solution_with_its_outcome(sample: Callable[..., list[TreeRecord]]):
    trees = sample()
    assert [tree.problem_id for tree in trees] == [problem.unique_id for problem in PROBLEMS]
    ends = {step.end for tree in trees for step in tree.steps}
    assert {None, "eos"} < ends
    assert any(step.right for tree in trees for step in tree.steps)
    for tree in trees:
        assert len(solutions(tree)) == 6
        for index, step in enumerate(tree.steps):
            children = [other for other in tree.steps if other.parent == index]
            assert step.parent is None or step.parent < index
            assert (step.end is None) == bool(children)
            assert step.samples == sum(child.samples for child in children) or step.end
            assert step.value == pytest.approx(right_of(tree, index) / step.samples, abs=1e-6)
            if step.end in ("eos", "boxed"):
                assert step.right == (step.answer == tree.answer)
            elif step.end == "length":
                assert (step.answer, step.right) == (None, False)
            else:
                assert (step.answer, step.right) == (None, None)
        assert sum(step.samples for step in tree.steps if step.parent is None) == 6


def test_tokens_and_log_probabilities_are_the_models(
    sample: Callable[..., list[TreeRecord]], tiny_checkpoints: dict[str, Path]
):
    tree = sample()[0]
    for index in range(len(tree.steps)):
        path = [tree.steps[i] for i in tree.lineage(index)]
        ids = [*tree.prompt_token_ids, *(token for step in path for token in step.token_ids)]
        count = len(path[-1].token_ids)
        found = torch.log_softmax(plain_logits(tiny_checkpoints["talker"], ids), -1)[-count - 1 : -1]
        of_tokens = found.gather(1, torch.tensor(ids[-count:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(path[-1].log_probabilities), of_tokens, atol=1e-4, rtol=1e-4)


def test_neither_the_others_nor_the_memory_nor_more_solutions_change_a_solution(
    sample: Callable[..., list[TreeRecord]],
):
    for labels in Labels:
        settings = replace(SETTINGS, labels=labels)
        trees = sample(settings)
        assert sample(settings, in_flight=1) == trees
        assert sample(settings, kv_memory_bytes=3 * 2**18, slab_bytes=2**14, reserved_share=0.0) == trees
    fewer = sample(replace(SETTINGS, solutions=3))
    for few, many in zip(fewer, sample(), strict=True):
        left = solutions(many)
        for text in solutions(few):
            left.remove(text)  # raises where it is not among them
    assert sample(replace(SETTINGS, seed=1)) != sample()


def test_monte_carlo_continues_every_open_step_and_computes_no_prefix_again(sample: Callable[..., list[TreeRecord]]):
    plain = sample()
    trees = sample(replace(SETTINGS, labels=Labels.MONTE_CARLO))
    computed = sample.computed  # type: ignore[attr-defined]
    assert list(map(solutions, trees)) == list(map(solutions, plain))
    assert any(0 < step.continuations_right < step.continuations for tree in trees for step in tree.steps)
    for tree in trees:
        for index, step in enumerate(tree.steps):
            assert step.continuations == (0 if step.end else 5)
            right = right_of(tree, index) + step.continuations_right
            assert step.value == pytest.approx(right / (step.samples + step.continuations), abs=1e-6)
    opened = sum(step.continuations for tree in trees for step in tree.steps)
    own = sum(len(tree.prompt_token_ids) + sum(len(step.token_ids) for step in tree.steps) for tree in trees)
    assert computed <= own + opened * 40 + opened  # continuations of at most 40 tokens; no prompt of over 20 for each


def test_binary_search_labels_what_can_still_end_right(sample: Callable[..., list[TreeRecord]]):
    settings = replace(SETTINGS, solutions=12, max_steps=8, max_tokens=80)
    everywhere = sample(replace(settings, labels=Labels.MONTE_CARLO))
    trees = sample(replace(settings, labels=Labels.BINARY_SEARCH))
    assert list(map(solutions, trees)) == list(map(solutions, everywhere))
    continued = [[step.continuations for tree in some for step in tree.steps] for some in (trees, everywhere)]
    assert 0 < sum(continued[0]) < sum(continued[1])
    for tree in trees:
        for index, step in enumerate(tree.steps):
            below = [i for i in range(len(tree.steps)) if index in tree.lineage(i)]
            reached = any(tree.steps[i].right or tree.steps[i].continuations_right for i in below)
            assert step.value == float(reached)
            if step.end and not step.right:  # its first wrong step is located: the prefix before it was seen to reach
                path = [tree.steps[i] for i in tree.lineage(index)]
                wrong = next(i for i, one in enumerate(path) if not one.value)
                assert path[wrong].continuations or wrong == len(path) - 1 or path[wrong].end
                assert all(not one.value for one in path[wrong:])


class TestFile:
    @pytest.fixture
    def write(self, make_engine: Callable[..., Engine], grader: Grader, tmp_path: Path) -> Callable[..., Path]:
        def run(problems: list[Problem] = PROBLEMS, name: str = "trees", **configuration: object) -> Path:
            engine = make_engine("talker", kv_memory_bytes=2**23)
            path = tmp_path / f"{name}.jsonl"
            claim(path, {"seed": 0, **configuration})
            sampler = RolloutSampler(engine, Generator(engine, "", {}), SETTINGS, grader, 2)
            seen = list(sample_into(path, problems, sampler.sample))
            run.seen = seen  # type: ignore[attr-defined]
            return path

        return run

    def test_an_interrupted_run_goes_on(self, write: Callable[..., Path]):
        whole = sorted(write(name="whole").read_text().splitlines())
        path = write(PROBLEMS[:2])
        path.write_bytes(path.read_bytes()[:-40])  # in the midst of the last line
        assert sorted(write().read_text().splitlines()) == whole
        assert len(write.seen) == 3  # type: ignore[attr-defined]
        assert [tree.problem for tree in read_trees(path)] != []
        write()
        assert write.seen == []  # type: ignore[attr-defined]

    def test_another_configuration_is_refused_by_name(self, write: Callable[..., Path]):
        path = write(PROBLEMS[:1])
        with pytest.raises(EspalierError, match=r"holds rollouts with another seed; name another --out"):
            write(seed=1)
        path.with_suffix(".json").unlink()
        with pytest.raises(EspalierError, match=r"no trees.json that says what it holds"):
            write()

    def test_a_damaged_line_is_named(self, write: Callable[..., Path]):
        path = write(PROBLEMS[:2])
        lines = path.read_text().splitlines(keepends=True)
        for wrong, message in (
            ("{}\n", r"trees.jsonl:1 is damaged: it has no 'format'"),
            (lines[0].replace('"format": 1', '"format": 7'), r"trees.jsonl:1 is damaged: it has another format than 1"),
        ):
            path.write_text(wrong + lines[1])
            with pytest.raises(EspalierError, match=message):
                list(read_trees(path))

    def test_a_record_reads_as_it_was_written(self, write: Callable[..., Path], tmp_path: Path):
        path = write(PROBLEMS[:1])
        (tree,) = read_trees(path)
        with open_lines(tmp_path / "again.jsonl") as stream:
            write_tree(stream, tree)
        assert (tmp_path / "again.jsonl").read_text() == path.read_text()

    def test_a_problem_that_does_not_fit_says_why_and_the_others_are_sampled(self, write: Callable[..., Path]):
        long = Problem("long", "coins " * 600, "1", None)
        refused, *others = sorted(read_trees(write([long, *PROBLEMS[:2]])), key=lambda tree: not tree.refused)
        assert refused.problem_id == "long"
        assert "the generator's context is 512" in refused.refused
        assert all(tree.steps for tree in others)


def test_labelled_steps_are_read_back_with_their_labels(tmp_path: Path):
    def step(parent: int | None, text: str, value: float, end: str | None = None) -> StepRecord:
        return StepRecord(parent, text, [1], [0.0], 2, end, value=value)

    steps = [
        step(None, "## Step 1: Add\n\n", 0.25),
        step(0, "It is 5; \n- руки ки, really\n\n", 0.1),
        step(1, " \n", 0.1, "eos"),
        step(1, "Step 3: So 6.\n\n", 0.0, "boxed"),
        step(0, "It is 6.", 0.0, "length"),
        step(None, "", 0.0, "length"),
    ]
    tree = TreeRecord("p", "What is it +\nin Step 1 or 2?", "5", [1], steps)
    write_trl(tmp_path / "trl.jsonl", [tree, TreeRecord("q", "?", "", refused="too long")])
    write_math_shepherd(tmp_path / "shepherd.jsonl", [tree])
    _, trl = read_solutions(tmp_path / "trl.jsonl")
    _, shepherd = read_solutions(tmp_path / "shepherd.jsonl")
    assert [each.label for each in trl] == [each.label for each in shepherd] == [-1, 2, 1]
    assert {each.problem for each in (*trl, *shepherd)} == {tree.problem}
    assert trl[1].steps == ("## Step 1: Add", "It is 5; \n- руки ки, really", "Step 3: So 6.")
    assert shepherd[1].steps == ("Step 1: Add", "Step 2: It is 5; \n- руки ки, really", "Step 3: So 6.")


def test_training_problems_are_not_those_of_the_benchmark():
    training, held_out = load_benchmark("demo-training", 300), load_benchmark("demo")
    assert len({problem.problem for problem in training}) == 300
    assert not {problem.problem for problem in training} & {problem.problem for problem in held_out}
    assert {problem.level for problem in training} == {1, 2, 3, 4, 5}
    assert load_benchmark("demo-training", 10) == training[:10]


def test_the_command_writes_resumes_and_says_what_there_is(espalier, tmp_path: Path):
    out = tmp_path / "folder" / "trees.jsonl"
    flags = ("rollouts", "--out", out, "-N", 4, "--labels", "monte-carlo", "--continuations", 2)
    trl, shepherd = tmp_path / "trl.jsonl", tmp_path / "more" / "shepherd.jsonl"
    first = espalier(*flags, "--limit", 3, "--trl", trl, "--math-shepherd", shepherd)
    assert first.code == 0, first.err
    (one, solutions), (other, same) = read_solutions(trl), read_solutions(shepherd)
    assert (one, other) == (Format.TRL, Format.MATH_SHEPHERD)
    assert [each.label for each in solutions] == [each.label for each in same]
    assert {each.problem for each in solutions} == {tree.problem for tree in read_trees(out)}
    assert "3 problems, 12 solutions" in first.out
    assert "continuations" in first.out
    before = out.read_text()
    assert espalier(*flags, "--limit", 4).code == 0
    assert out.read_text().startswith(before)
    assert len(out.read_text().splitlines()) == 4
    assert json.loads(out.with_suffix(".json").read_text())["labels"] == "monte-carlo"
    again = espalier(*flags, "--limit", 4, "--seed", 1)
    assert again.code == 2
    assert "holds rollouts with another seed" in again.err
