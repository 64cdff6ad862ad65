import pytest
from scripted_tree import EOS, LENGTH, Step, drive

from espalier.search.algorithms.lookahead import LookaheadSearch
from espalier.search.request import Aggregation, AlgorithmName, SearchRequest
from espalier.search.tree import Termination


def lookahead(width: int, expansion: int, steps: int, how: Aggregation = Aggregation.LAST):
    request = SearchRequest("-", AlgorithmName.LOOKAHEAD, width, expansion, aggregation=how, lookahead_steps=steps)
    return lambda root: LookaheadSearch(request, root)


SHORT_SIGHTED = {
    (0,): Step(0.9),
    (1,): Step(0.4),
    # greedy steps: (0, 0) shows that (0,) leads nowhere
    (0, 0): Step(0.1),
    (1, 0): Step(0.8),
    # sampled ones
    (1, 1): Step(0.7, EOS),
    (1, 2): Step(0.3, EOS),
}


def test_a_child_is_scored_by_the_step_after_it():
    outcome = drive(lookahead(1, 2, 1), SHORT_SIGHTED)
    assert outcome.asked == [[((), 2)], [((0,), 1), ((1,), 1)], [((1,), 2)]]
    assert [[expand.greedy for expand in round_] for round_ in outcome.expands] == [[False], [True, True], [False]]
    assert outcome.votes == {(1, 1): 1}


@pytest.mark.parametrize(
    ("how", "chosen"),
    [
        (Aggregation.LAST, 1),  # 0.1 against 0.8
        (Aggregation.MIN, 1),  # 0.1 against 0.4
        (Aggregation.MEAN, 1),  # 0.5 against 0.6
        (Aggregation.PROD, 1),  # 0.09 against 0.32
    ],
)
def test_the_rollouts_own_steps_count_in_the_aggregate(how: Aggregation, chosen: int):
    assert drive(lookahead(1, 2, 1, how), SHORT_SIGHTED).asked[2] == [((chosen,), 2)]


def test_two_steps_ahead_see_what_one_does_not():
    script = SHORT_SIGHTED | {
        (0, 0, 0): Step(0.95),
        (1, 0, 0): Step(0.2),
        (0, 1): Step(0.6, EOS),
        (0, 2): Step(0.5, EOS),
    }
    outcome = drive(lookahead(1, 2, 2), script)
    assert outcome.asked == [[((), 2)], [((0,), 1), ((1,), 1)], [((0, 0), 1), ((1, 0), 1)], [((0,), 2)]]
    assert outcome.votes == {(0, 1): 1}


def test_a_rollout_is_never_an_answer_and_is_dropped():
    script = {(0,): Step(0.5), (0, 0): Step(0.99, EOS), (0, 1): Step(0.3, EOS)}
    outcome = drive(lookahead(1, 1, 3), script)
    assert outcome.asked == [[((), 1)], [((0,), 1)], [((0,), 1)]]
    assert outcome.votes == {(0, 1): 1}
    assert outcome.nodes[0, 0].termination is Termination.PRUNED


def test_a_rollout_that_ends_early_counts_with_its_end():
    script = {
        (0,): Step(0.5), (1,): Step(0.6),
        (0, 0): Step(0.9, EOS), (1, 0): Step(0.95),
        (1, 0, 0): Step(0.2),
        (0, 1): Step(0.5, EOS), (0, 2): Step(0.5, EOS),
    }  # fmt: skip
    outcome = drive(lookahead(1, 2, 2), script)
    assert outcome.asked[1:] == [[((0,), 1), ((1,), 1)], [((1, 0), 1)], [((0,), 2)]]


def test_a_rollout_that_is_cut_short_counts_as_far_as_it_was_whole():
    script = {
        (0,): Step(0.5), (1,): Step(0.4),
        (0, 0): Step(0.0, LENGTH), (1, 0): Step(0.45),
        (0, 1): Step(0.5, EOS), (0, 2): Step(0.5, EOS),
    }  # fmt: skip
    assert drive(lookahead(1, 2, 1), script).asked[2] == [((0,), 2)]


def test_complete_children_need_no_rollout_and_keep_their_own_score():
    script = {(0,): Step(0.7, EOS), (1,): Step(0.9), (1, 0): Step(0.6)}
    outcome = drive(lookahead(1, 2, 1), script)
    assert outcome.asked == [[((), 2)], [((1,), 1)]]
    assert outcome.votes == {(0,): 1}
    assert outcome.of_termination(Termination.PRUNED) == {(1,), (1, 0)}
