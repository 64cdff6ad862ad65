"""Answers that are right within a tolerance; the first cases are the examples of OlympiadBench's own judge."""

import pytest

from espalier.search.grading.equality import is_right_within


@pytest.mark.parametrize(
    ("gold", "answer", "tolerances", "right"),
    [
        (r"\cos ^{10}(\frac{\pi}{10})", "0.6054", [1e-4], True),
        (r"7 \times 10^{35}", r"7.1 \cdot 10^{35}", [1e34], True),
        (r"7 \times 10^{35}", r"7.1 \cdot 10^{35}", [1e33], False),
        (r"7 \times 10^{35}, 0.002", r"0.001, 7.1 \cdot 10^{35}", [1e34, 1e-3], True),
        ("0.003, 5.233", "0.002, 5.234", [1e-3], True),
    ],
)
def test_the_examples_of_olympiad_bench(gold: str, answer: str, tolerances: list[float], right: bool):
    assert is_right_within(gold, answer, tolerances) is right


@pytest.mark.parametrize(
    ("gold", "answer", "tolerances", "right"),
    [
        ("5.2", "5.3", [0.1], True),  # apart by 0.1 but for rounding
        ("5.2", "5.31", [0.1], False),
        ("$5.2$", "5.3", [0.1], True),
        ("5.2", "x = 5.25", [0.1], True),
        ("5.2", r"5.25 \text{ m}", [0.1], True),
        ("v = 5.2", "w = 5.25", [0.1], False),
        (r"5.2 \text{ kg}", r"5.25 \text{ m}", [0.1], False),
        ("5.2", r"5.25 \%", [0.1], False),
        ("5", "0.05", [0.1], False),  # no factor of 100
        (r"\sqrt{2}", "1.4", [0.02], True),
        (r"\sqrt{2}", "1.4", [0.01], False),
        ("5.2", "x", [0.1], False),
        ("5.2", "2i", [9.0], False),
        ("2x", "2.01x", [0.1], False),
        ("2x", "x+x", [0.1], True),
        ("1, 2", "2.05", [0.1], False),
        ("1, 2", "2.05, 1.05, 1", [0.1], False),
        ("1, 2", "2.05, 1.05", [0.1, 0.01], False),
        ("1, 2", "2.005, 1.05", [0.1, 0.01], True),
        ("1.0, 1.4", "1.35, 0.9", [0.5, 0.1], True),  # the nearest to the first is the second's only one
        ("1.0, 1.1", "1.05, 5", [0.1], False),  # one is near both, and stands for one
        (r"\pm 2", "-2.05, 1.95", [0.1], True),
        ("[0, 1.5]", "[0.01, 1.49]", [0.02], True),
        ("[0, 1.5]", "(0.01, 1.49)", [0.02], False),
        ("[0, 1.5]", "[1.49, 0.01]", [0.02], False),
        ("[0, 1.5]", "0.01, 1.49", [0.02], False),
        ("1, 2", ", ".join(["1.05", "2.05"] * 40), [0.1], False),
    ],
)
def test_numbers_may_be_off_by_their_tolerance(gold: str, answer: str, tolerances: list[float], right: bool):
    assert is_right_within(gold, answer, tolerances) is right


def test_tolerances_must_be_of_the_gold_answers_members():
    with pytest.raises(ValueError, match="2 tolerances for the 3 members of '1, 2, 3'"):
        is_right_within("1, 2, 3", "1, 2, 4", [0.1, 0.2])
