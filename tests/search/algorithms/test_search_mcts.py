import math

import pytest
from scripted_tree import EOS, LENGTH, Step, drive

from espalier.search.algorithms.mcts import MonteCarloSearch
from espalier.search.request import AlgorithmName, SearchRequest


def mcts(expansion: int, simulations: int, exploration: float = 1.0):
    request = SearchRequest(
        "-", AlgorithmName.MCTS, expansion=expansion, simulations=simulations, exploration=exploration
    )
    return lambda root: MonteCarloSearch(request, root)


def asked(outcome) -> list:
    return [one for (one,) in outcome.asked]


SCRIPT = {
    (0,): Step(0.6),
    (1,): Step(0.5),
    (0, 0): Step(0.1),
    (0, 1): Step(0.3),
    (1, 0): Step(0.8, EOS),
    (1, 1): Step(0.2),
    (0, 1, 0): Step(0.4, EOS),
    (0, 1, 1): Step(0.1, EOS),
    (0, 0, 0): Step(0.1, EOS),
    (0, 0, 1): Step(0.1, EOS),
    (1, 1, 0): Step(0.1, EOS),
    (1, 1, 1): Step(0.1, EOS),
}


def test_four_simulations_by_hand():
    """With c = 1 and priors of one half.

    1. The root is sampled from: values 0.6 and 0.5.
    2. Both children were visited once, so (0,) is ahead; its children are worth 0.1 and 0.3.
    3. Q of (0,) is 1/3 after three visits of four: 1/3 + sqrt(4)/2/4 = 0.583 against 0.5 + sqrt(4)/2/2 = 1.0.
       (1,) is sampled from: 0.8, complete, and 0.2.
    4. Q are 1/3 and 1/2, visits three each of six: (1,) again, and below it 0.8 is ahead: it is complete, and 0.8 is
       backed up once more.
    """
    outcome = drive(mcts(2, 4), SCRIPT)
    assert asked(outcome) == [((), 2), ((0,), 2), ((1,), 2)]
    assert outcome.votes == {(1, 0): 1}


def test_a_complete_path_takes_simulations_without_being_sampled_from():
    script = {(0,): Step(0.9, EOS), (1,): Step(0.1), (1, 0): Step(0.2, EOS), (1, 1): Step(0.1, EOS)}
    # Visits of (0,) lower what it is worth until (1,) is ahead: 0.9 + sqrt(v)/2/(1 + v0) against 0.1 + sqrt(v)/2/2.
    visits, needed = 2, 0
    while 0.9 + math.sqrt(visits) / 2 / visits >= 0.1 + math.sqrt(visits) / 4:
        visits, needed = visits + 1, needed + 1
    assert needed == 12
    assert asked(drive(mcts(2, 1 + needed), script)) == [((), 2)]
    assert asked(drive(mcts(2, 2 + needed), script)) == [((), 2), ((1,), 2)]


def test_a_search_without_exploration_follows_the_best_value():
    outcome = drive(mcts(2, 3, exploration=0.0), SCRIPT)
    assert asked(outcome) == [((), 2), ((0,), 2), ((1,), 2)]  # after 0.1 and 0.3, the mean of (0,) is below 0.5


def test_the_search_ends_when_everything_is_complete_or_cut_short():
    outcome = drive(mcts(2, 1000), SCRIPT)
    assert len(outcome.asked) == 6
    assert len(outcome.votes) == 7


def test_what_is_cut_short_is_worth_nothing_and_never_visited():
    script = {(0,): Step(0.4), (1,): Step(None, LENGTH), (0, 0): Step(0.1, EOS), (0, 1): Step(None, LENGTH)}
    outcome = drive(mcts(2, 3), script)
    assert asked(outcome) == [((), 2), ((0,), 2)]
    assert outcome.votes == {(0, 0): 1}


def test_a_node_whose_children_are_all_cut_short_is_not_visited_again_whatever_its_value():
    script = {(0,): Step(0.9), (1,): Step(0.1), (1, 0): Step(0.1), (1, 1): Step(0.1)}
    script |= {(0, i): Step(None, LENGTH) for i in range(2)} | {(1, 0, i): Step(0.1, EOS) for i in range(2)}
    outcome = drive(mcts(2, 4, exploration=0.0), script)  # the value of (0,) is 0.3 by then
    assert asked(outcome) == [((), 2), ((0,), 2), ((1,), 2), ((1, 0), 2)]
    assert outcome.votes == {(1, 0, 0): 1, (1, 0, 1): 1}


def test_a_child_cut_short_lowers_the_value_of_its_parent():
    script = SCRIPT | {(0, 0): Step(0.4), (0, 1): Step(None, LENGTH)}
    outcome = drive(mcts(2, 3, exploration=0.0), script)  # (0.6 + 0.4 + 0) / 3 is below 0.5
    assert asked(outcome) == [((), 2), ((0,), 2), ((1,), 2)]


def test_open_leaves_stay_alive_while_simulations_last():
    outcome = drive(mcts(2, 4), SCRIPT)
    assert sorted(outcome.kept[0]) == [(0,), (1,)]
    assert sorted(outcome.kept[1]) == [(0, 0), (0, 1), (1,)]


def test_without_a_complete_path_the_most_visited_one_is_carried_to_its_end():
    outcome = drive(mcts(2, 2), SCRIPT)
    assert asked(outcome) == [((), 2), ((0,), 2), ((0, 0), 1)]  # (0,) has three visits, its children one each
    assert [expand.to_end for (expand,) in outcome.expands] == [False, False, True]
    assert outcome.votes == {(0, 0, 0): 1}


@pytest.mark.parametrize("expansion", [1, 3])
def test_a_prior_is_the_share_of_the_samples(expansion: int):
    """Three samples, two of them alike: the pair has 2/3 of the prior, and counts as two visits."""
    from espalier.search.tree import Node

    root = Node(0, None, ())
    search = mcts(3 * expansion, 10)(root)
    pair, one = (Node(i, root, (i,), score=0.5, draws=(i,)) for i in (1, 2))
    pair.multiplicity, one.multiplicity = 2 * expansion, expansion
    search.tell([pair, one])
    places = {place.node: place for place in search._root.children}
    assert [round(places[node].prior, 9) for node in (pair, one)] == [round(2 / 3, 9), round(1 / 3, 9)]
    assert [places[node].visits for node in (pair, one)] == [2 * expansion, expansion]
    assert search._root.visits == 3 * expansion
