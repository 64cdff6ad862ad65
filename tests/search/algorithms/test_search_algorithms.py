import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_examples import random_examples
from scripted_tree import BOXED, EOS, LENGTH, Path, RandomTree, Step, drive

from espalier.search.algorithms import answers_suffice, make_algorithm, needs_verifier, with_defaults
from espalier.search.algorithms.adaptive import AdaptivePaths
from espalier.search.algorithms.auto import AutoSearch
from espalier.search.algorithms.beam import BeamSearch
from espalier.search.algorithms.dvts import DiverseTreeSearch
from espalier.search.algorithms.independent import IndependentPaths
from espalier.search.algorithms.lookahead import LookaheadSearch
from espalier.search.algorithms.mcts import MonteCarloSearch
from espalier.search.algorithms.particle import ParticleSearch
from espalier.search.algorithms.rebase import RewardBalancedSearch
from espalier.search.request import Aggregation, AlgorithmName, SearchRequest, Vote
from espalier.search.tree import Node, Termination

TWO_BY_TWO: dict[Path, Step] = {
    (0,): Step(0.9),
    (1,): Step(0.2),
    (2,): Step(0.6),
    (3,): Step(0.5),
    (0, 0): Step(0.1),
    (0, 1): Step(0.3),
    (2, 0): Step(0.8, EOS),
    (2, 1): Step(0.4),
    # by last and min (2, 1) goes on; by product and mean (0, 1) does
    (2, 1, 0): Step(0.7, BOXED),
    (2, 1, 1): Step(0.2, BOXED),
    (0, 1, 0): Step(0.5, BOXED),
    (0, 1, 1): Step(0.9, EOS),
}


def beam(width: int, expansion: int, aggregation: Aggregation = Aggregation.LAST):
    return lambda root: BeamSearch(
        SearchRequest("-", AlgorithmName.BEAM, width, expansion, aggregation=aggregation), root
    )


@pytest.mark.parametrize(
    ("aggregation", "second", "final"),
    [
        (Aggregation.LAST, [(2, 0), (2, 1)], [(2, 0), (2, 1, 0)]),
        (Aggregation.MIN, [(2, 0), (2, 1)], [(2, 0), (2, 1, 0)]),
        (Aggregation.PROD, [(2, 0), (0, 1)], [(2, 0), (0, 1, 1)]),  # 0.48, 0.27; then 0.9 * 0.3 * 0.9
        (Aggregation.MEAN, [(2, 0), (0, 1)], [(2, 0), (0, 1, 1)]),  # 0.7, 0.6; then 2.1 / 3 ties with 0.7
    ],
)
def test_beam_keeps_the_best_paths_by_hand(aggregation: Aggregation, second: list[Path], final: list[Path]):
    outcome = drive(beam(2, 2, aggregation), TWO_BY_TWO)
    assert outcome.kept[0] == [(0,), (2,)]
    assert outcome.kept[1] == second
    assert sorted(outcome.final) == sorted(final)


def test_beam_asks_for_all_candidates_first_and_then_for_each_open_path():
    outcome = drive(beam(2, 2), TWO_BY_TWO)
    assert outcome.asked == [[((), 4)], [((0,), 2), ((2,), 2)], [((2, 1), 2)]]


def test_a_complete_path_keeps_its_place_and_is_not_expanded_again():
    script = {
        (0,): Step(0.9, EOS),
        (1,): Step(0.8),
        (2,): Step(0.1),
        (3,): Step(0.2),
        (1, 0): Step(0.5),
        (1, 1): Step(0.4),
        (1, 0, 0): Step(0.3, EOS),
        (1, 0, 1): Step(0.2, EOS),
    }
    outcome = drive(beam(2, 2), script)
    assert outcome.kept == [[(0,), (1,)], [(0,), (1, 0)], [(0,), (1, 0, 0)]]
    assert outcome.asked[1:] == [[((1,), 2)], [((1, 0), 2)]]


def test_a_complete_path_can_be_overtaken():
    script = {
        (0,): Step(0.5, EOS),
        (1,): Step(0.6),
        (2,): Step(0.1),
        (3,): Step(0.1),
        (1, 0): Step(0.7, EOS),
        (1, 1): Step(0.8, EOS),
    }
    outcome = drive(beam(2, 2), script)
    assert outcome.final == [(1, 1), (1, 0)]
    assert outcome.nodes[0,].termination is Termination.PRUNED


def test_paths_cut_short_are_never_kept_whatever_their_score():
    script = {
        (0,): Step(0.99, LENGTH),
        (1,): Step(0.1),
        (2,): Step(0.2, EOS),
        (3,): Step(0.98, LENGTH),
        (1, 0): Step(0.9, LENGTH),
        (1, 1): Step(0.05, EOS),
    }
    outcome = drive(beam(2, 2), script)
    assert outcome.kept == [[(2,), (1,)], [(2,), (1, 1)]]
    assert outcome.nodes[0,].termination is LENGTH


def test_a_beam_of_which_nothing_is_left_is_finished_with_nothing():
    outcome = drive(beam(1, 2), {(0,): Step(0.9, LENGTH), (1,): Step(0.8, LENGTH)})
    assert outcome.kept == [[]]


def test_what_falls_out_of_the_beam_is_marked_pruned():
    outcome = drive(beam(2, 2), TWO_BY_TWO)
    pruned = {path for path, node in outcome.nodes.items() if node.termination is Termination.PRUNED}
    assert pruned == {(1,), (3,), (0, 0), (0, 1), (2, 1, 1)}


def test_equal_scores_keep_the_lower_path():
    script = {(i,): Step(0.5, EOS) for i in range(6)}
    assert drive(beam(2, 3), script).final == [(0,), (1,)]


def test_a_path_without_any_score_ranks_last():
    outcome = drive(beam(1, 2), {(0,): Step(None, EOS, ""), (1,): Step(0.01, EOS)})
    assert outcome.final == [(1,)]


def test_an_unscored_step_leaves_the_paths_score_as_it_was():
    script = {
        (0,): Step(0.9),
        (1,): Step(0.5),
        (0, 0): Step(None, EOS, ""),
        (0, 1): Step(0.1, EOS),
        (1, 0): Step(0.6, EOS),
        (1, 1): Step(0.2, EOS),
    }
    assert drive(beam(2, 1), script | {(1, 0): Step(0.6, EOS)}).final == [(0, 0), (1, 0)]


@random_examples(100)
@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.sampled_from(list(Aggregation)))
def test_beam_search_does_not_depend_on_the_order_it_is_told_in(
    data: st.DataObject, width: int, expansion: int, aggregation: Aggregation
):
    seed = data.draw(st.integers(0, 10_000))

    tree = RandomTree(seed)
    ordered = drive(beam(width, expansion, aggregation), tree)
    shuffled = drive(beam(width, expansion, aggregation), tree, random.Random(seed))
    assert shuffled.kept == ordered.kept
    assert shuffled.asked == ordered.asked
    for kept in ordered.kept:
        assert len(kept) <= width
        assert len(set(kept)) == len(kept)


def test_independent_paths_are_asked_for_once_and_the_complete_ones_are_kept():
    script = {
        (0,): Step(0.5),
        (1,): Step(0.4, EOS),
        (2,): Step(0.3),
        (0, 0): Step(0.9, EOS),
        (2, 0): Step(0.1),
        (2, 0, 0): Step(0.2, LENGTH),
    }
    outcome = drive(lambda root: IndependentPaths(SearchRequest("-", AlgorithmName.MAJORITY, 3, 1), root), script)
    assert outcome.asked == [[((), 3)]]
    assert outcome.final == [(0, 0), (1,)]
    assert outcome.nodes[2, 0, 0].termination is LENGTH


@pytest.mark.parametrize(
    ("name", "kind", "verifier", "vote", "samples"),
    [
        (AlgorithmName.GREEDY, IndependentPaths, False, Vote.MAJORITY, 1),
        (AlgorithmName.CHAIN, IndependentPaths, False, Vote.MAJORITY, 1),
        (AlgorithmName.MAJORITY, IndependentPaths, False, Vote.MAJORITY, 3),
        (AlgorithmName.BEST_OF_N, IndependentPaths, True, Vote.WEIGHTED, 3),
        (AlgorithmName.ADAPTIVE, AdaptivePaths, False, Vote.MAJORITY, 2),
        (AlgorithmName.BEAM, BeamSearch, True, Vote.WEIGHTED, 6),
        (AlgorithmName.DVTS, DiverseTreeSearch, True, Vote.WEIGHTED, 6),
        (AlgorithmName.LOOKAHEAD, LookaheadSearch, True, Vote.WEIGHTED, 6),
        (AlgorithmName.REBASE, RewardBalancedSearch, True, Vote.WEIGHTED, 6),
        (AlgorithmName.PARTICLE, ParticleSearch, True, Vote.WEIGHTED, 3),
        (AlgorithmName.MCTS, MonteCarloSearch, True, Vote.WEIGHTED, 2),
        (AlgorithmName.AUTO, AutoSearch, True, Vote.WEIGHTED, 6),
    ],
)
def test_every_name_has_its_algorithm_its_vote_and_its_need_of_a_verifier(
    name: AlgorithmName, kind: type, verifier: bool, vote: Vote, samples: int
):
    request = SearchRequest("1+1?", name, beam_width=3, expansion=2)
    algorithm = make_algorithm(request, Node(0, None, ()))
    assert isinstance(algorithm, kind)
    assert needs_verifier(request) == verifier
    assert with_defaults(request).vote is vote
    assert sum(expand.children for expand in algorithm.ask()) == request.candidates == samples


def test_a_field_left_open_takes_the_usual_value_of_the_algorithm_that_reads_it_and_of_no_other():
    usual = {
        AlgorithmName.LOOKAHEAD: {"lookahead_steps": 1},
        AlgorithmName.MCTS: {"simulations": 32, "exploration": 1.25},
        AlgorithmName.REBASE: {"rebase_temperature": 0.1},
        AlgorithmName.AUTO: {"rebase_temperature": 0.1},
        AlgorithmName.PARTICLE: {"iterations": 1},
        AlgorithmName.ADAPTIVE: {"confidence": 0.95},
    }
    names = {name for values in usual.values() for name in values}
    for algorithm in AlgorithmName:
        filled = with_defaults(SearchRequest("1+1?", algorithm)).to_dict()
        assert {n: filled[n] for n in names if filled[n] is not None} == usual.get(algorithm, {}), algorithm
    assert with_defaults(SearchRequest("1+1?", AlgorithmName.MCTS, simulations=5)).simulations == 5


@pytest.mark.parametrize("name", [AlgorithmName.MAJORITY, AlgorithmName.ADAPTIVE])
@pytest.mark.parametrize(
    ("vote", "reads"), [(None, False), (Vote.MAJORITY, False), (Vote.WEIGHTED, True), (Vote.NAIVE, True)]
)
def test_majority_and_adaptive_read_scores_where_their_vote_does(name: AlgorithmName, vote: Vote | None, reads: bool):
    request = SearchRequest("1+1?", name, vote=vote)
    assert needs_verifier(request) is reads
    assert answers_suffice(request)
