"""Which problems of a benchmark are searched."""

import pytest

from espalier.experiments.cli.options import Selection
from espalier.experiments.runs.benchmark_files import BenchmarkError
from espalier.experiments.runs.benchmarks import Problem

SUBJECTS = ("Algebra", "Geometry", None)
PROBLEMS = [Problem(f"p/{i}", "?", "1", i % 4 if i % 4 else None, subject=SUBJECTS[i % 3]) for i in range(24)]


def test_without_a_choice_all_are_left_in_order():
    assert Selection().of(PROBLEMS) == PROBLEMS
    assert Selection(limit=3).of(PROBLEMS) == PROBLEMS[:3]


def test_ids_levels_and_subjects_must_all_fit():
    assert [p.unique_id for p in Selection(sample_ids="p/7,p/2").of(PROBLEMS)] == ["p/2", "p/7"]
    chosen = Selection(levels="1,3", subjects="algebra").of(PROBLEMS)
    assert [p.unique_id for p in chosen] == ["p/3", "p/9", "p/15", "p/21"]
    with pytest.raises(BenchmarkError, match="no problem has one of"):
        Selection(sample_ids="p/2", subjects="Algebra").of(PROBLEMS)


def test_shuffling_comes_before_the_limit_and_is_reproducible():
    first, again, other = (Selection(shuffle=True, shuffle_seed=seed, limit=6).of(PROBLEMS) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert first != PROBLEMS[:6]
    whole = Selection(shuffle=True, shuffle_seed=1).of(PROBLEMS)
    assert sorted(p.unique_id for p in whole) == sorted(p.unique_id for p in PROBLEMS)
    assert whole[:6] == first


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (Selection(sample_ids="p/1,q"), "--sample-ids: the benchmark has no q; it has p/0, p/1, .*, …"),
        (Selection(levels="7"), "--levels: the benchmark has no 7; it has 1, 2, 3"),
        (Selection(subjects="Art"), "--subjects: the benchmark has no art; it has algebra, geometry"),
    ],
)
def test_what_the_benchmark_does_not_have_is_named(choice: Selection, said: str):
    with pytest.raises(BenchmarkError, match=said):
        choice.of(PROBLEMS)
