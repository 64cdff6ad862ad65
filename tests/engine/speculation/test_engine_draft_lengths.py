"""How much is drafted, on machines that are made up: what a step takes and what is accepted are given."""

import random
from collections.abc import Callable, Sequence

import pytest

from espalier.engine.speculation.lengths import MeasuredLength

Seconds = Callable[[int], float]


def memory_bound(rows: int) -> float:
    """A step that reads the weights, and computes a little for each row."""
    return 0.040 + 0.001 * rows


def two_cores(rows: int) -> float:
    """Rows cost little up to four and much beyond."""
    return 0.040 + 0.002 * min(rows, 4) + 0.009 * max(0, rows - 4)


def busy(rows: int) -> float:
    return 0.010 * rows


def run(
    seconds_of: Seconds,
    batches: Sequence[int],
    likely: float,
    most: int = 8,
    draft: float = 0.0,
    noise: float = 0.1,
    lengths: MeasuredLength | None = None,
) -> float:
    """Time of so many branches, one step after another, over that without drafts; a step's noise is the same in both.

    Args:
        seconds_of: what a step of so many rows takes.
        batches: branches in each step.
        likely: chance that a drafted token is accepted.
        most: the longest draft.
        draft: what drafting a token takes, for all branches.
        noise: of a step's time.
        lengths: what chooses.
    """
    lengths, draws = lengths or MeasuredLength(most), random.Random(5)
    with_drafts = without = 0.0
    for branches in batches:
        length, tokens = lengths.choose(branches), branches
        for _ in range(branches):
            accepted = 0
            while accepted < length and draws.random() < likely:
                accepted += 1
            tokens += accepted
        slow = 1 + noise * draws.random() + (3 if draws.random() < 0.01 else 0)
        seconds = slow * (seconds_of(branches * (1 + length)) + draft * length)
        lengths.record(branches, length, tokens, seconds)
        with_drafts += seconds
        without += slow * seconds_of(branches) * tokens / branches
    return with_drafts / without


@pytest.mark.parametrize("machine", [memory_bound, two_cores, busy])
@pytest.mark.parametrize("likely", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("batches", [[1] * 3000, [16] * 3000, [4, 16, 64, 7, 2] * 600], ids=["1", "16", "mixed"])
def test_drafts_cost_no_more_than_two_percent_wherever_they_do_not_pay(
    machine: Seconds, likely: float, batches: list[int]
):
    assert run(machine, batches, likely) <= 1.02
    assert run(machine, batches, likely, draft=0.015) <= 1.02


@pytest.mark.parametrize(("most", "at_best"), [(2, 0.45), (8, 0.25)])
def test_as_many_tokens_are_drafted_as_pay(most: int, at_best: float):
    assert run(memory_bound, [1] * 2000, 0.95, most) < at_best
    lengths = MeasuredLength(8)
    run(memory_bound, [1] * 1000, 0.95, lengths=lengths)
    assert lengths._of_size[1].best >= 6
    run(busy, [1] * 2000, 0.3, lengths=lengths)  # the machine and the text became others
    assert lengths._of_size[1].best == 0


def test_a_large_batch_drafts_nothing_where_a_small_one_drafts_much():
    lengths = MeasuredLength(8)
    run(two_cores, [1, 64] * 1000, 0.9, lengths=lengths)
    assert lengths._of_size[1].best >= 2
    assert lengths._of_size[64].best == 0


def test_nothing_is_drafted_before_it_is_known_what_a_step_takes_without():
    lengths = MeasuredLength(8)
    for _ in range(4):
        assert lengths.choose(3) == 0
        lengths.record(3, 0, 3, 0.04)
    assert lengths.choose(3) == 2
