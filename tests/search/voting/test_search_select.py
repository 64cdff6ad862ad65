"""Answers vote together with those they equal, in an order that no timing changes."""

import pytest
from scripted_equivalence import ScriptedEquivalence

from espalier.search.request import Vote
from espalier.search.result import Candidate
from espalier.search.voting.vote import select


def candidates(*answers: str) -> list[Candidate]:
    """One for each answer, the earlier the better scored, by little."""
    return [Candidate(i, answer, 0.5 - i / 100, 1, ()) for i, answer in enumerate(answers)]


def same_letter(one: str, other: str) -> bool:
    return one[0] == other[0]


def majority(equivalence: ScriptedEquivalence, *answers: str) -> str:
    winner = select(candidates(*answers), Vote.MAJORITY, equivalence).best
    assert winner is not None
    assert len(set(equivalence.asked)) == len(equivalence.asked), "a pair was asked a second time"
    return winner.answer


def test_answers_that_are_called_equal_vote_together():
    assert majority(ScriptedEquivalence(), "b", "a1", "a2", "b", "a3") == "b"
    assert majority(ScriptedEquivalence(same_letter), "b", "a1", "a2", "b", "a3") == "a1"


def test_weights_of_equal_answers_add_up():
    field = candidates("b", "a1", "a2")
    assert select(field, Vote.WEIGHTED, ScriptedEquivalence(same_letter)).best == field[1]
    assert select(field, Vote.WEIGHTED).best == field[0]


def test_each_pair_is_asked_once_and_the_earlier_answer_is_the_gold_one():
    equivalence = ScriptedEquivalence(same_letter)
    majority(equivalence, "a1", "b1", "a 1", "a2", "b1", "c", "b2")
    assert equivalence.asked == [("a1", "b1"), ("a1", "a2"), ("a1", "c"), ("b1", "c"), ("a1", "b2"), ("b1", "b2")]


def test_two_plain_numbers_are_never_asked_about_and_a_number_and_a_formula_are():
    equivalence = ScriptedEquivalence()
    majority(equivalence, "1", "2.5", "-3", "1/3", "1,000")
    assert equivalence.asked == []
    majority(equivalence, "1", "2", "x")
    assert equivalence.asked == [("1", "x"), ("2", "x")]


@pytest.mark.parametrize("answers", [("x",), ("x", "x ", "$x$"), ("", "x"), ("", ""), ()])
def test_nothing_is_asked_where_all_say_the_same(answers: tuple[str, ...]):
    result = select(candidates(*answers), Vote.MAJORITY, equivalence := ScriptedEquivalence())
    assert equivalence.asked == []
    assert (result.best is None) == (not any(answers))


def test_a_vote_of_one_path_asks_nothing():
    result = select(candidates("x", "y", "z"), Vote.NAIVE, equivalence := ScriptedEquivalence())
    assert (equivalence.asked, result.grader) == ([], "exact-match")


def test_an_empty_answer_never_wins_nor_is_asked_about():
    equivalence = ScriptedEquivalence(lambda one, other: True)
    assert majority(equivalence, "", "", "", "x", "") == "x"
    assert equivalence.asked == []


def test_an_answer_joins_the_first_earlier_group_that_it_equals():
    """x equals both a and b, which differ: it is a's, as a came first, and b stays alone."""
    x_is_all = ScriptedEquivalence(lambda one, other: other == "x")
    assert majority(x_is_all, "a", "b", "b", "x", "x") == "a"
    assert x_is_all.asked == [("a", "b"), ("a", "x")]


def test_a_group_is_spoken_for_by_its_first_answer():
    """y equals x, which is a's; it does not equal a: it founds a group."""
    equivalence = ScriptedEquivalence(lambda one, other: (one, other) in {("a", "x"), ("x", "y")})
    assert majority(equivalence, "y", "a", "x") == "a"
    equivalence = ScriptedEquivalence(lambda one, other: (one, other) in {("a", "x"), ("x", "y")})
    assert majority(equivalence, "a", "x", "y", "y", "b", "b", "b") == "b"
    assert ("x", "y") not in equivalence.asked


def test_given_up_it_goes_by_exact_match_alone_and_asks_no_more():
    equivalence = ScriptedEquivalence(same_letter)
    field = candidates("b", "a1", "a2", "a3", "a4", "b")
    result = select(field, Vote.MAJORITY, equivalence, stopped=lambda: len(equivalence.asked) == 3)
    assert result.best == field[0]
    assert (result.grader, len(equivalence.asked)) == ("exact-match", 3)


def test_it_names_what_told_the_answers_apart():
    equivalence = ScriptedEquivalence()
    assert select(candidates("x", "y"), Vote.MAJORITY, equivalence).grader == "script 1"
    assert select(candidates("1", "2"), Vote.MAJORITY, equivalence).grader == "exact-match"
    assert select(candidates("x", "y"), Vote.MAJORITY).grader == "exact-match"


def test_nothing_is_asked_where_one_answer_outweighs_all_others():
    equivalence = ScriptedEquivalence(same_letter)
    assert majority(equivalence, "b", "a1", "b", "a2", "b") == "b"
    assert equivalence.asked == []
    assert majority(equivalence, "b", "a1", "b", "a2") == "b", "even, the earlier is ahead; but it had to be asked"
    assert equivalence.asked
