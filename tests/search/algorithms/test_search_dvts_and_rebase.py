from collections.abc import Callable

from scripted_tree import EOS, LENGTH, Path, Step, Streams, drive

from espalier.search.algorithms.dvts import DiverseTreeSearch
from espalier.search.algorithms.rebase import RewardBalancedSearch, apportion
from espalier.search.request import Aggregation, AlgorithmName, SearchRequest
from espalier.search.tree import Node


def dvts(subtrees: int, expansion: int, how: Aggregation = Aggregation.LAST) -> Callable[[Node], DiverseTreeSearch]:
    return lambda root: DiverseTreeSearch(
        SearchRequest("-", AlgorithmName.DVTS, subtrees, expansion, aggregation=how), root
    )


def rebase(
    budget: int, temperature: float = 0.1, how: Aggregation = Aggregation.LAST
) -> Callable[[Node], RewardBalancedSearch]:
    request = SearchRequest("-", AlgorithmName.REBASE, budget, 1, aggregation=how, rebase_temperature=temperature)
    return lambda root: RewardBalancedSearch(request, root)


class Fixed(Streams):
    """What follows a text is written down; the stream of a text that is not there fails the test."""

    def __init__(self, steps: dict[tuple[str, ...], list[Step]]) -> None:
        self._steps = {state: iter(stream) for state, stream in steps.items()}

    def next(self, state):
        return next(self._steps[state])


def test_dvts_goes_on_from_the_best_child_of_each_subtree_though_others_are_better_elsewhere():
    script = {
        # the first subtree's: both better than anything of the second
        (0,): Step(0.8), (1,): Step(0.9),
        (2,): Step(0.1), (3,): Step(0.3),
        (1, 0): Step(0.7, EOS), (1, 1): Step(0.6),
        (3, 0): Step(0.2), (3, 1): Step(0.25),
        (3, 1, 0): Step(0.2, EOS), (3, 1, 1): Step(0.1),
    }  # fmt: skip
    outcome = drive(dvts(2, 2), script)
    assert outcome.asked == [[((), 4)], [((1,), 2), ((3,), 2)], [((3, 1), 2)]]
    assert outcome.votes == {(1, 0): 1, (3, 1, 0): 1}


def test_a_dvts_subtree_of_which_every_child_was_cut_short_is_lost_and_the_others_go_on():
    script: dict[Path, Step] = {
        (0,): Step(0.9, LENGTH), (1,): Step(0.8, LENGTH),
        (2,): Step(0.1), (3,): Step(0.05),
        (2, 0): Step(0.3, LENGTH), (2, 1): Step(0.2, EOS),
    }  # fmt: skip
    outcome = drive(dvts(2, 2), script)
    assert outcome.votes == {(2, 1): 1}


def test_dvts_ties_go_to_the_earlier_draw():
    script = {(i,): Step(0.5, EOS) for i in range(6)}
    assert drive(dvts(2, 3), script).votes == {(0,): 1, (3,): 1}


def test_two_dvts_subtrees_on_one_merged_node_get_children_of_their_own_in_order():
    """Draws a, b of the first subtree and a, c of the second; a is the best of both."""
    streams = Fixed(
        {
            (): [Step(0.9, text="a"), Step(0.1, text="b"), Step(0.9, text="a"), Step(0.2, text="c")],
            ("a",): [
                Step(0.3, EOS, "x"), Step(0.4, EOS, "y"),  # the first subtree's
                Step(0.3, EOS, "x"), Step(0.1, EOS, "z"),  # the second's: y is not for it to take
            ],
        }
    )  # fmt: skip
    outcome = drive(dvts(2, 2), streams)
    assert outcome.asked == [[((), 4)], [((0,), 4)]]
    assert outcome.votes == {(0, 1): 1, (0, 0): 1}


def test_a_complete_path_held_by_two_dvts_subtrees_votes_twice():
    streams = Fixed({(): [Step(0.9, EOS, "a"), Step(0.1, text="b"), Step(0.2, text="c"), Step(0.9, EOS, "a")]})
    assert drive(dvts(2, 2), streams).votes == {(0,): 2}


def test_shares_by_hand():
    assert apportion(4, [1, 1, 1, 1]) == [1, 1, 1, 1]
    assert apportion(5, [1, 1, 1, 1]) == [2, 1, 1, 1]  # of equal remainders the first
    assert apportion(7, [0.5, 0.3, 0.2]) == [4, 2, 1]  # 3.5, 2.1, 1.4: the largest remainder is rounded up
    assert apportion(2, [0.6, 0.3, 0.1]) == [1, 1, 0]
    assert apportion(0, [0.6, 0.4]) == [0, 0]


def test_rebase_shares_its_budget_by_the_softmax_of_the_scores():
    """At T = 0.5, exp(score / T) is 4 for 0.693, 2 for 0.347 and 1 for 0: 8 samples make 4.57, 2.29, 1.14."""
    script = {(0,): Step(0.34657359), (1,): Step(0.69314718), (2,): Step(0.0)} | {
        (i,): Step(1.0, LENGTH) for i in range(3, 8)
    }
    script |= {(i, j): Step(0.5, EOS) for i in range(3) for j in range(8)}
    outcome = drive(rebase(8, temperature=0.5), script)
    assert [sorted(asked) for asked in outcome.asked] == [[((), 8)], [((0,), 2), ((1,), 5), ((2,), 1)]]
    assert len(outcome.votes) == 8


def test_rebase_takes_complete_paths_out_of_the_budget_and_keeps_them():
    script: dict[Path, Step] = {(0,): Step(0.1, EOS), (1,): Step(0.5), (2,): Step(0.5), (3,): Step(0.2, EOS)}
    script |= {(1, 0): Step(0.5), (2, 0): Step(0.5, EOS), (1, 0, 0): Step(0.1, EOS)}
    outcome = drive(rebase(4), script)
    assert [sorted(asked) for asked in outcome.asked] == [[((), 4)], [((1,), 1), ((2,), 1)], [((1, 0), 1)]]
    assert sorted(outcome.votes) == [(0,), (1, 0, 0), (2, 0), (3,)]


def test_rebase_gives_the_share_of_a_path_cut_short_to_the_open_ones():
    script = {(0,): Step(0.5), (1,): Step(None, LENGTH), (0, 0): Step(0.5, EOS), (0, 1): Step(0.4, EOS)}
    assert drive(rebase(2), script).asked == [[((), 2)], [((0,), 2)]]


def test_rebase_gives_up_open_nodes_without_a_share():
    script = {(0,): Step(0.9), (1,): Step(0.1), (0, 0): Step(0.5, EOS), (0, 1): Step(0.4, EOS)}
    outcome = drive(rebase(2), script)
    assert outcome.asked == [[((), 2)], [((0,), 2)]]
    assert outcome.kept[0] == [(0,)]


def test_a_high_rebase_temperature_shares_evenly_and_a_low_one_gives_all_to_the_best():
    script = {(0,): Step(0.9), (1,): Step(0.6), (2,): Step(0.5), (3,): Step(0.4)}
    script |= {(i, j): Step(0.5, EOS) for i in range(4) for j in range(4)}
    assert drive(rebase(4, 100.0), script).asked[1] == [((i,), 1) for i in range(4)]
    assert drive(rebase(4, 0.001), script).asked[1] == [((0,), 4)]
