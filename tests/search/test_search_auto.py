import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_tree import EOS, LENGTH, RandomTree, Step, drive

from espalier.search.algorithms import auto, make_algorithm
from espalier.search.algorithms.auto import EASY, AutoSearch, ease, many_subtrees, square_beam
from espalier.search.algorithms.beam import BeamSearch
from espalier.search.algorithms.dvts import DiverseTreeSearch
from espalier.search.node import Node
from espalier.search.request import Aggregation, AlgorithmName, SearchRequest

FIRST = {(0,): Step(1.0), (1,): Step(EASY), (2,): Step(2 * EASY - 1, EOS), (3,): Step(EASY)}  # on average EASY
SECOND = {(i, j): Step(0.1 * (2 * i + j), EOS) for i in range(4) for j in range(4)}


def auto_search(candidates: int):
    return lambda root: AutoSearch(root, candidates, Aggregation.LAST)


def test_an_easy_problem_goes_on_in_subtrees_of_two():
    outcome = drive(auto_search(4), FIRST | SECOND)
    assert outcome.asked == [[((), 4)], [((0,), 2), ((3,), 2)]]  # the best of each two first steps
    assert outcome.votes == {(0, 1): 1, (3, 1): 1}


def test_a_hard_problem_goes_on_as_a_beam_search():
    outcome = drive(auto_search(4), FIRST | SECOND | {(3,): Step(EASY - 0.01)})
    assert outcome.asked == [[((), 4)], [((0,), 2), ((1,), 2)]]  # the two best of all
    assert outcome.votes == {(1, 0): 1, (1, 1): 1}


def test_an_easy_problem_solved_by_its_first_steps_needs_no_second_round():
    assert drive(auto_search(2), {(0,): Step(0.99, EOS), (1,): Step(0.99, EOS)}).asked == [[((), 2)]]


def test_a_problem_whose_first_steps_are_all_cut_short_ends_without_a_vote():
    assert drive(auto_search(4), dict.fromkeys([(i,) for i in range(4)], Step(1.0, LENGTH))).votes == {}


def test_ease_counts_equal_siblings_each_and_those_cut_short_as_nothing():
    root = Node(0, None, ())
    pair, one, cut = (Node(i, root, (i,), score=score) for i, score in enumerate((0.9, 0.3, 0.8)))
    pair.multiplicity, cut.termination = 2, LENGTH
    assert ease([pair, one, cut], Aggregation.LAST) == pytest.approx((2 * 0.9 + 0.3) / 4)
    assert 0 < EASY < 1


@pytest.mark.parametrize(
    ("candidates", "subtrees", "beam"),
    [
        (1, (1, 1), (1, 1)),
        (2, (1, 2), (1, 2)),
        (4, (2, 2), (2, 2)),
        (5, (1, 5), (1, 5)),
        (12, (6, 2), (3, 4)),
        (15, (5, 3), (3, 5)),
        (16, (8, 2), (4, 4)),
        (64, (32, 2), (8, 8)),
        (1024, (512, 2), (32, 32)),
    ],
)
def test_how_candidates_are_split_by_hand(candidates: int, subtrees: tuple[int, int], beam: tuple[int, int]):
    assert many_subtrees(candidates) == subtrees
    assert square_beam(candidates) == beam


@given(st.integers(1, 1024))
def test_a_split_samples_as_many_candidates_a_step_and_leaves_something_to_choose_of(candidates: int):
    for width, expansion in (many_subtrees(candidates), square_beam(candidates)):
        assert width * expansion == candidates
        assert expansion >= min(2, candidates)


@pytest.mark.parametrize("easy", [False, True])
@given(st.integers(0, 1000), st.sampled_from([(1, 4), (2, 2), (4, 1), (4, 3), (3, 4), (4, 4), (2, 8)]))
def test_it_is_the_search_it_chose_from_the_first_step_on(easy: bool, seed: int, split: tuple[int, int]):
    """And only the product of the request's N and M counts."""
    request, tree = SearchRequest("?", AlgorithmName.AUTO, *split), RandomTree(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "EASY", 0.0 if easy else 2.0)
        chosen = drive(lambda root: make_algorithm(request, root), tree)
    kind, of = (DiverseTreeSearch, many_subtrees) if easy else (BeamSearch, square_beam)
    fixed = drive(lambda root: kind(root, *of(request.candidates), Aggregation.LAST), tree)
    assert (chosen.asked, chosen.kept, chosen.votes) == (fixed.asked, fixed.kept, fixed.votes)
