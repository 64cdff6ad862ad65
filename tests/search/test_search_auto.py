import pytest
from scripted_tree import EOS, LENGTH, Step, drive

from espalier.search.algorithms.auto import EASY, AutoSearch, ease
from espalier.search.node import Node
from espalier.search.request import Aggregation

FIRST = {(0,): Step(1.0), (1,): Step(EASY), (2,): Step(2 * EASY - 1, EOS), (3,): Step(EASY)}  # on average EASY


def auto(width: int, expansion: int):
    return lambda root: AutoSearch(root, width, expansion, Aggregation.LAST)


def test_an_easy_problem_carries_every_first_step_to_its_end():
    script = FIRST | {(0, 0): Step(0.7, EOS), (1, 0): Step(0.6), (1, 0, 0): Step(0.5, EOS), (3, 0): Step(0.4, LENGTH)}
    outcome = drive(auto(2, 2), script)
    assert outcome.asked == [[((), 4)], [((0,), 1), ((1,), 1), ((3,), 1)]]
    assert [expand.to_end for expand in outcome.expands[1]] == [True, True, True]
    assert outcome.votes == {(0, 0): 1, (1, 0, 0): 1, (2,): 1}


def test_a_hard_problem_goes_on_as_the_beam_search_it_began_as():
    script = FIRST | {(2,): Step(0.5, EOS)} | {(i, j): Step(0.4, EOS) for i in range(2) for j in range(2)}
    outcome = drive(auto(2, 2), script)
    assert outcome.asked == [[((), 4)], [((0,), 2), ((1,), 2)]]
    assert not any(expand.to_end for expand in outcome.expands[1])
    assert len(outcome.votes) == 2


def test_an_easy_problem_solved_by_its_first_steps_needs_no_second_round():
    assert drive(auto(1, 2), {(0,): Step(0.99, EOS), (1,): Step(0.99, EOS)}).asked == [[((), 2)]]


def test_ease_counts_equal_siblings_each_and_those_cut_short_as_nothing():
    root = Node(0, None, ())
    pair, one, cut = (Node(i, root, (i,), score=score) for i, score in enumerate((0.9, 0.3, 0.8)))
    pair.multiplicity, cut.termination = 2, LENGTH
    assert ease([pair, one, cut], Aggregation.LAST) == pytest.approx((2 * 0.9 + 0.3) / 4)
    assert 0 < EASY < 1
