"""The demo pair's task, labels, benchmark and files; training itself is the recipe's own business."""

import hashlib
import json
import random
import re
from itertools import islice

import pytest

from espalier.experiments.demo import benchmark_path, generator_path, thinking_generator_path, verifier_path
from espalier.experiments.demo.problems import DELIMITER, MAX_OPERATIONS, MIN_OPERATIONS
from espalier.experiments.demo.taught import not_taught
from espalier.experiments.lab.recipe.corruptions import judged_solution, slipped_steps
from espalier.experiments.lab.recipe.oracle import label_steps, numbers_of
from espalier.experiments.lab.recipe.problems import make_benchmark, training_problems
from espalier.experiments.runs.benchmarks import load_benchmark


def test_the_oracle_marks_everything_after_the_first_slip_wrong() -> None:
    right = ["(a) 38+47=85", "(b) 85-12=73", "\\boxed{73}"]
    assert label_steps(38, (47, -12), right) == [True, True, True]
    assert label_steps(38, (47, -12), ["(a) 38+47=86", "(b) 86-12=74", "\\boxed{74}"]) == [False, False, False]
    assert label_steps(38, (47, -12), ["(a) 38+47=85", "(b) 85-12=72", "\\boxed{73}"]) == [True, False, False]
    assert label_steps(38, (47, -12), ["(a) 38+47=85", "\\boxed{85}"]) == [True, False]
    assert label_steps(38, (47, -12), [*right, "(c) 73+1=74"]) == [True, True, True, False]


def test_a_reference_solution_is_right_at_every_step_and_ends_in_the_answer() -> None:
    for problem in islice(training_problems(random.Random(1)), 300):
        assert all(label_steps(problem.start, problem.operands, problem.steps))
        assert numbers_of(DELIMITER.join(problem.steps)) == (problem.start, problem.operands)
        assert problem.steps[-1] == f"\\boxed{{{problem.answer}}}"


def test_slips_are_labelled_as_the_oracle_sees_them() -> None:
    rng = random.Random(2)
    wrong = 0
    for problem in islice(training_problems(rng), 300):
        steps, labels = judged_solution(rng, problem)
        assert labels == label_steps(problem.start, problem.operands, steps)
        wrong += not all(labels)
        slipped = slipped_steps(rng, problem)
        # One that would go below zero is cut off before, and may be right as far as it goes.
        if slipped and slipped[-1].startswith("\\boxed"):
            assert not all(label_steps(problem.start, problem.operands, slipped))
    assert 150 < wrong < 290


def test_every_number_of_a_problem_stands_in_its_text_in_order() -> None:
    for problem in islice(training_problems(random.Random(3)), 200):
        words = problem.text.replace(".", " ").replace("?", " ").replace(",", " ").split()
        numbers = [int(word) for word in words if word.isdigit()]
        assert numbers == [problem.start, *map(abs, problem.operands)]


def test_the_bundled_benchmark_is_what_the_recipe_makes() -> None:
    lines = benchmark_path().read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == make_benchmark(0)


def test_the_benchmark_has_a_hundred_distinct_problems_of_each_level() -> None:
    problems = load_benchmark("demo")
    assert len(problems) == len({p.problem for p in problems}) == 500
    assert [sum(p.level == level for p in problems) for level in range(1, 6)] == [100] * 5


def test_training_never_sees_the_numbers_of_a_benchmark_problem_but_every_length() -> None:
    held_out = {numbers_of(record["solution"]) for record in make_benchmark(0)}
    trained = list(islice(training_problems(random.Random(4)), 5000))
    assert not held_out & {(p.start, p.operands) for p in trained}
    assert {len(p.operands) for p in trained} == set(range(MIN_OPERATIONS, MAX_OPERATIONS + 1))
    assert {len(operands) for _, operands in held_out} <= {len(p.operands) for p in trained}


@pytest.mark.parametrize(
    "folder",
    [generator_path(), verifier_path(), thinking_generator_path()],
    ids=["generator", "verifier", "thinking generator"],
)
def test_the_bundled_checkpoints_are_the_ones_their_training_summary_describes(folder) -> None:
    summary = json.loads((benchmark_path().parent / "training.json").read_text(encoding="utf-8"))
    for file in folder.iterdir():
        assert summary["sha256"][f"{folder.name}/{file.name}"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 20_000_000


def test_the_generator_was_taught_to_read_all_of_the_task_and_few_small_numbers() -> None:
    texts = [problem.text for problem in islice(training_problems(random.Random(6)), 500)]
    texts += [problem.problem for problem in load_benchmark("demo")]
    unknown = [found for text in texts if (found := not_taught(text))]
    assert len(unknown) < 0.2 * len(texts)
    assert all(re.fullmatch(r"numbers such as \d, for few are below 10", *found) for found in unknown)


@pytest.mark.parametrize(
    ("problem", "unknown"),
    [
        ("A train leaves at noon. How far is it now?", "the words noon, far, is"),
        (
            "Tom has 3 coins. (a) Tom has 4 coins. (b) He gets 3 more. How many coins does Tom have now?",
            '"Tom has 4 coins."',
        ),
        ("Tom has 3 coins. (a) He gets 4 more. How many coins does Tom have now?", "1 operation"),
        (
            "Tom has 3 coins. "
            + "".join(f"({c}) He gets 4 more. " for c in "abcdefghi")
            + "How many coins does Tom have now?",
            "9 operations",
        ),
        ("Tom has 3 coins. He gets 4 more. He loses 2. How many coins does Tom have now?", "not lettered"),
        ("Tom has 3 coins. (a) He gets 4 more. (c) He loses 2. How many coins does Tom have now?", "not lettered"),
        ("Tom has 3 coins. (a) He gets 40000 more. (b) He loses 2. How many coins does Tom have now?", "40000"),
        ("Tom has 30 coins. (a) He gets 4 more. (b) He loses 20. How many coins does Tom have now?", "4, for few"),
        ("2+2", 'the sentence "2+2"'),
    ],
)
def test_what_the_generator_was_not_taught_is_named(problem, unknown) -> None:
    assert unknown in " or ".join(not_taught(problem))
