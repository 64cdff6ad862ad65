import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.search.grading.answers import exact_match_key
from espalier.search.request import Aggregation, Vote
from espalier.search.result import Candidate
from espalier.search.tree import aggregate
from espalier.search.voting.vote import select


def candidate(answer: str, score: float | None = None, multiplicity: int = 1, node_id: int = 0) -> Candidate:
    return Candidate(node_id, answer, score, multiplicity, ())


def selected(vote: Vote, *candidates: Candidate) -> Candidate | None:
    return select(candidates, vote).best


@pytest.mark.parametrize(
    ("how", "expected"),
    [(Aggregation.LAST, 0.5), (Aggregation.MIN, 0.2), (Aggregation.MEAN, 0.5), (Aggregation.PROD, 0.08)],
)
def test_aggregation_by_hand(how: Aggregation, expected: float):
    assert aggregate([0.8, 0.2, 0.5], how) == pytest.approx(expected)


@pytest.mark.parametrize(
    "answers",
    [
        ("No", "NO", "Yes", "YES", "YES"),
        ("x=1", "x=1", "no solution", "There are no real solutions.", "\\emptyset"),
        ("3:2", "2:3", "2:3", "6:4", "3/2"),
        ("9.8 m/s", "9.8 m/s", "9.8 m/s^2", "9.8 \\frac{m}{s^2}", "9.8\\,\\mathrm{m\\,s^{-2}}"),
        ("12:5", "12:05", "12:05"),
        ("13_{\\text{seven}}", "13_7", "13_6", "13_{\\text{six}}", "13 base six"),
        ("150 minutes", "2 hours 30 minutes", "2.5 hours"),
    ],
)
def test_votes_for_the_last_answer_are_not_split_by_how_it_is_spelled(answers: tuple[str, ...]):
    won = selected(Vote.MAJORITY, *map(candidate, answers))
    assert won is not None
    assert exact_match_key(won.answer) == exact_match_key(answers[-1])


@pytest.mark.parametrize("how", list(Aggregation))
def test_a_path_without_scored_steps_has_no_score(how: Aggregation):
    assert aggregate([], how) is None


@pytest.mark.parametrize("how", list(Aggregation))
def test_one_step_is_the_paths_score(how: Aggregation):
    assert aggregate([0.37], how) == pytest.approx(0.37)


def test_a_product_with_an_impossible_step_is_zero():
    assert aggregate([0.9, 0.0, 0.9], Aggregation.PROD) == 0.0


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=30))
def test_a_product_of_many_steps_is_that_of_math_prod(scores: list[float]):
    assert aggregate(scores, Aggregation.PROD) == pytest.approx(math.prod(scores), rel=1e-9)


@pytest.mark.parametrize("vote", list(Vote))
def test_nothing_is_selected_without_candidates(vote: Vote):
    assert selected(vote) is None


@pytest.mark.parametrize("vote", list(Vote))
def test_candidates_without_an_answer_never_win(vote: Vote):
    assert selected(vote, candidate("", 1.0, 50), candidate("3", 0.1)) == candidate("3", 0.1)
    assert selected(vote, candidate("", 1.0, 50)) is None


def test_naive_takes_the_best_scored_path():
    assert selected(Vote.NAIVE, candidate("1", 0.6), candidate("1", 0.6), candidate("2", 0.7)).answer == "2"


def test_weighted_takes_the_largest_sum_of_scores():
    winner = selected(Vote.WEIGHTED, candidate("1", 0.3), candidate("2", 0.5), candidate("1", 0.4))
    assert winner == candidate("1", 0.4)


def test_majority_takes_the_largest_group_whatever_the_scores():
    winner = selected(Vote.MAJORITY, candidate("1", 0.9), candidate("2", 0.1), candidate("2", 0.2))
    assert winner == candidate("2", 0.2)


def test_merged_paths_count_each_in_sums_and_majorities_but_not_in_naive():
    field = [candidate("1", 0.5), candidate("2", 0.3, multiplicity=3)]
    assert selected(Vote.WEIGHTED, *field).answer == "2"
    assert selected(Vote.MAJORITY, *field).answer == "2"
    assert selected(Vote.NAIVE, *field).answer == "1"


def test_answers_spelled_differently_vote_together():
    field = [candidate("5", 0.4), candidate("1/2", 0.3), candidate("0.50", 0.2), candidate("$\\frac12$", 0.1)]
    assert selected(Vote.WEIGHTED, *field) == candidate("1/2", 0.3)


def test_a_tied_majority_goes_to_the_better_scored_answer():
    field = [candidate("1", 0.2), candidate("2", 0.6), candidate("1", 0.5), candidate("2", 0.1)]
    assert selected(Vote.MAJORITY, *field) == candidate("2", 0.6)


@pytest.mark.parametrize("vote", list(Vote))
def test_a_full_tie_goes_to_the_earlier_candidate(vote: Vote):
    field = [candidate("1", 0.5, node_id=7), candidate("2", 0.5, node_id=3)]
    assert selected(vote, *field).node_id == 7


def test_without_scores_the_majority_still_decides():
    assert selected(Vote.MAJORITY, candidate("1"), candidate("2"), candidate("2")).answer == "2"
    assert selected(Vote.MAJORITY, candidate("1"), candidate("2")).answer == "1"


@pytest.mark.parametrize(
    "same",
    [
        ("18", "18 dollars", r"18\text{ eggs}", "$18.00"),
        ("10", "10 cm", "10 centimeters"),
        ("5", "x = 5", "$x=5$"),
        ("(C)", r"\textbf{(C)}\ 5", "C"),
        ("60 miles per hour", "60 mph", "60 miles"),
    ],
)
def test_an_answer_and_the_same_with_its_unit_or_name_vote_together(same: tuple[str, ...]):
    others = [candidate("20"), candidate("20")]
    winner = selected(Vote.MAJORITY, *others, *map(candidate, same))
    assert winner is not None
    assert winner.answer in same


@pytest.mark.parametrize(
    "different",
    [("10 cm", "10", "10 m"), ("x=5", "5", "y=5"), ("(C) 5", "C", "(C) 6"), ("18 cents", "18", "$18")],
)
def test_answers_whose_units_or_names_contradict_each_other_vote_apart(different: tuple[str, ...]):
    winner = selected(Vote.MAJORITY, *map(candidate, different), candidate("20"), candidate("20"))
    assert winner is not None
    assert winner.answer == "20"


def test_a_percentage_votes_with_its_hundredth_part_and_not_with_its_number():
    fifths = candidate("20%"), candidate("0.2"), candidate("1/5")
    assert selected(Vote.MAJORITY, candidate("20"), candidate("20"), *fifths) in fifths
