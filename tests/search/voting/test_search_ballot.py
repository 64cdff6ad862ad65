"""Answers are grouped by what tells them apart, in an order that no timing changes."""

import itertools
import random

import pytest
from scripted_grouping import ScriptedGrouping

from espalier.search.request import Vote
from espalier.search.result import Candidate
from espalier.search.voting.equivalence import BySpelling
from espalier.search.voting.vote import Ballot


def candidates(*answers: str) -> list[Candidate]:
    """One for each answer, the earlier the better scored, by little."""
    return [Candidate(i, answer, 0.5 - i / 100, 1, ()) for i, answer in enumerate(answers)]


def same_letter(one: str, other: str) -> bool:
    return one[0] == other[0]


def settled(ballot: Ballot, grouping: ScriptedGrouping) -> Ballot:
    for _ in range(1000):
        if ballot.settled():
            return ballot
        grouping.answer()
    raise AssertionError("it never ends")


def majority(grouping: ScriptedGrouping, *answers: str) -> str:
    winner = settled(Ballot(candidates(*answers), Vote.MAJORITY, grouping), grouping).elect()
    assert winner is not None
    assert len(set(grouping.asked)) == len(grouping.asked), "a pair was asked a second time"
    return winner.answer


def test_answers_that_are_called_equal_vote_together():
    assert majority(ScriptedGrouping(), "b", "a1", "a2", "b", "a3") == "b"
    assert majority(ScriptedGrouping(same_letter), "b", "a1", "a2", "b", "a3") == "a1"


def test_weights_of_equal_answers_add_up():
    grouping, field = ScriptedGrouping(same_letter), candidates("b", "a1", "a2")
    ballot = settled(Ballot(field, Vote.WEIGHTED, grouping), grouping)
    assert ballot.elect() == field[1]
    assert Ballot(field, Vote.WEIGHTED, BySpelling()).elect() == field[0]


def test_each_pair_is_asked_once_and_the_earlier_answer_is_the_gold_one():
    grouping = ScriptedGrouping(same_letter)
    majority(grouping, "a1", "b1", "a 1", "a2", "b1", "c", "b2")
    heads = {"a1", "b1", "c"}
    assert all(one in heads for one, _ in grouping.asked)
    assert grouping.asked == [
        ("a1", "b1"), ("a1", "a2"), ("b1", "a2"), ("a1", "c"), ("b1", "c"), ("a1", "b2"), ("b1", "b2"), ("c", "b2"),
    ]  # fmt: skip


def test_two_plain_numbers_are_never_asked_about_and_a_number_and_a_formula_are():
    grouping = ScriptedGrouping()
    majority(grouping, "1", "2.5", "-3", "1/3", "1,000")
    assert grouping.asked == []
    majority(grouping, "1", "2", "x")
    assert grouping.asked == [("1", "x"), ("2", "x")]


@pytest.mark.parametrize("answers", [("x",), ("x", "x ", "$x$"), ("", "x"), ("", ""), ()])
def test_nothing_is_asked_where_all_say_the_same(answers: tuple[str, ...]):
    ballot = Ballot(candidates(*answers), Vote.MAJORITY, grouping := ScriptedGrouping())
    assert ballot.settled()
    assert grouping.asked == []
    assert (ballot.elect() is None) == (not any(answers))


def test_a_vote_of_one_path_asks_nothing():
    ballot = Ballot(candidates("x", "y", "z"), Vote.NAIVE, grouping := ScriptedGrouping())
    assert ballot.settled()
    assert (grouping.asked, ballot.grader) == ([], "spelling")


def test_an_empty_answer_never_wins_nor_is_asked_about():
    grouping = ScriptedGrouping(lambda one, other: True)
    assert majority(grouping, "", "", "", "x", "") == "x"
    assert grouping.asked == []


def test_an_answer_joins_the_first_earlier_group_that_it_equals():
    """x equals both a and b, which differ: it is a's, as a came first, and b stays alone."""
    x_is_all = ScriptedGrouping(lambda one, other: other == "x")
    assert majority(x_is_all, "a", "b", "b", "x", "x") == "a"
    assert x_is_all.asked == [("a", "b"), ("a", "x"), ("b", "x")]


def test_a_group_is_spoken_for_by_its_first_answer():
    """y equals x, which is a's; it does not equal a: it founds a group."""
    grouping = ScriptedGrouping(lambda one, other: (one, other) in {("a", "x"), ("x", "y")})
    assert majority(grouping, "y", "a", "x") == "a"
    grouping = ScriptedGrouping(lambda one, other: (one, other) in {("a", "x"), ("x", "y")})
    assert majority(grouping, "a", "x", "y", "y", "b", "b", "b") == "b"
    assert ("x", "y") not in grouping.asked


def test_nothing_depends_on_which_question_is_answered_first():
    numbers = random.Random(5)
    names = [f"{letter}{i}" for letter in "abcd" for i in range(3)]
    for trial in range(30):
        relation = {pair for pair in itertools.permutations(names, 2) if numbers.random() < 0.3}
        field, outcomes = candidates(*numbers.choices(names, k=14)), set()
        for order in range(6):
            shuffle = random.Random(order)
            grouping = ScriptedGrouping(lambda one, other, relation=relation: (one, other) in relation)
            ballot = Ballot(field, Vote.MAJORITY, grouping)
            while not ballot.settled():
                grouping.answer(shuffle.choice(grouping.waiting()))
            outcomes.add((ballot.elect(), tuple(ballot._group_of.items())))
        assert len(outcomes) == 1, f"trial {trial}"


def test_a_question_that_fails_or_is_dropped_is_a_difference_and_the_vote_goes_on():
    for ruin in (lambda grouping: grouping.fail(TimeoutError()), lambda grouping: grouping.drop()):
        grouping = ScriptedGrouping(same_letter)
        ballot = Ballot(candidates("a1", "b", "a2", "b"), Vote.MAJORITY, grouping)
        assert not ballot.settled()
        ruin(grouping)  # a1 and b
        assert not ballot.settled()
        ruin(grouping)  # a1 and a2, b and a2
        assert settled(ballot, grouping).elect().answer == "b"  # type: ignore[union-attr]
        assert ballot.grader == "script 1"


def test_ended_early_it_goes_by_spelling_alone():
    grouping = ScriptedGrouping(same_letter)
    ballot = Ballot(candidates("b", "a1", "a2", "a3", "a4", "b"), Vote.MAJORITY, grouping)
    while ("b", "a4") not in grouping.asked:
        assert not ballot.settled()
        grouping.answer(*[pair for pair in grouping.waiting() if pair[1] != "a4"])
    ballot.settle_by_spelling()
    assert ballot.settled()
    assert ballot.elect().answer == "b"  # type: ignore[union-attr]
    assert (ballot.grader, ballot.waits_for) == ("spelling", [])


def test_it_names_what_grouped_the_answers():
    grouping = ScriptedGrouping()
    assert settled(Ballot(candidates("x", "y"), Vote.MAJORITY, grouping), grouping).grader == "script 1"
    assert settled(Ballot(candidates("1", "2"), Vote.MAJORITY, grouping), grouping).grader == "spelling"
    by_spelling = Ballot(candidates("x", "y"), Vote.MAJORITY, BySpelling())
    assert by_spelling.settled()
    assert by_spelling.grader == "spelling"


def test_nothing_is_asked_where_one_spelling_outweighs_all_others():
    grouping = ScriptedGrouping(same_letter)
    assert majority(grouping, "b", "a1", "b", "a2", "b") == "b"
    assert grouping.asked == []
    assert majority(grouping, "b", "a1", "b", "a2") == "b", "even, the earlier is ahead; but it had to be asked"
    assert grouping.asked
