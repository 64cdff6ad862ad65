import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_tree import EOS, LENGTH, RandomTree, Step, drive

from espalier.search.algorithms import auto, make_algorithm
from espalier.search.algorithms.auto import EASY, AutoSearch, first_scores, many_subtrees
from espalier.search.algorithms.base import SearchAlgorithm
from espalier.search.algorithms.dvts import DiverseTreeSearch
from espalier.search.algorithms.rebase import RewardBalancedSearch
from espalier.search.request import Aggregation, AlgorithmName, SearchRequest
from espalier.search.tree import Node

FIRST = {(0,): Step(1.0), (1,): Step(EASY), (2,): Step(2 * EASY - 1, EOS), (3,): Step(EASY)}  # on average EASY
SECOND = {(i, j): Step(0.1 * (2 * i + j), EOS) for i in range(4) for j in range(4)}


def auto_search(candidates: int, budgets: tuple[int | None, int | None] = (None, None)):
    """Auto search with so many candidates, within budgets; a path may have a million tokens."""
    limits = {
        "generator_budget": budgets[0],
        "verifier_budget": budgets[1],
        "max_steps": 1000,
        "max_step_tokens": 1000,
        "max_tokens": 10**6,
    }
    request = SearchRequest("-", AlgorithmName.AUTO, candidates, 1, **limits)
    return lambda root: AutoSearch(request, root)


def test_an_easy_problem_goes_on_in_subtrees_of_two():
    outcome = drive(auto_search(4), FIRST | SECOND)
    assert outcome.asked == [[((), 4)], [((0,), 2), ((3,), 2)]]  # the best of each two first steps
    assert outcome.votes == {(0, 1): 1, (3, 1): 1}


def test_a_hard_problem_goes_on_in_proportion_to_scores():
    """Three samples are left once one path is complete, for scores of 1, 0.9 and 0.89: 1.75, 0.65 and 0.6 of them."""
    outcome = drive(auto_search(4), FIRST | SECOND | {(3,): Step(EASY - 0.01)})
    assert outcome.asked == [[((), 4)], [((0,), 2), ((1,), 1)]]
    assert outcome.votes == {(2,): 1, (0, 0): 1, (0, 1): 1, (1, 0): 1}


def test_an_easy_problem_solved_by_its_first_steps_needs_no_second_round():
    assert drive(auto_search(2), {(0,): Step(0.99, EOS), (1,): Step(0.99, EOS)}).asked == [[((), 2)]]


def test_a_problem_whose_first_steps_are_all_cut_short_ends_without_a_vote():
    assert drive(auto_search(4), dict.fromkeys([(i,) for i in range(4)], Step(1.0, LENGTH))).votes == {}


def test_scores_count_equal_siblings_each_and_those_cut_short_as_nothing():
    root = Node(0, None, ())
    pair, one, cut = (Node(i, root, (i,), score=score) for i, score in enumerate((0.9, 0.3, 0.8)))
    pair.multiplicity, cut.termination = 2, LENGTH
    assert first_scores([pair, one, cut], Aggregation.LAST) == [0.9, 0.9, 0.3, 0.0]
    assert 0 < EASY < 1


@pytest.mark.parametrize(
    ("candidates", "subtrees", "children"),
    [(1, 1, 1), (2, 1, 2), (3, 1, 3), (4, 2, 2), (5, 2, 2), (13, 6, 2), (16, 8, 2), (1024, 512, 2)],
)
def test_how_candidates_are_split_into_subtrees(candidates: int, subtrees: int, children: int):
    assert many_subtrees(candidates) == (subtrees, children)


@pytest.mark.parametrize("easy", [False, True])
@given(st.integers(0, 1000), st.sampled_from([(1, 4), (2, 2), (4, 1), (4, 3), (3, 4), (4, 4), (2, 8)]))
def test_it_is_the_search_it_chose_from_the_first_step_on(easy: bool, seed: int, split: tuple[int, int]):
    """And only the product of the request's N and M counts."""
    request, tree = SearchRequest("?", AlgorithmName.AUTO, *split), RandomTree(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "EASY", 0.0 if easy else 2.0)
        chosen = drive(lambda root: make_algorithm(request, root), tree)
    budget = request.candidates

    def fixed_search(root: Node) -> SearchAlgorithm:
        if easy:
            return DiverseTreeSearch(SearchRequest("?", AlgorithmName.DVTS, *many_subtrees(budget)), root)
        return RewardBalancedSearch(SearchRequest("?", AlgorithmName.REBASE, budget, 1), root)

    fixed = drive(fixed_search, tree)
    assert (chosen.asked, chosen.kept, chosen.votes) == (fixed.asked, fixed.kept, fixed.votes)


# --- within a budget -----------------------------------------------------------------------------------------------


class Costly(dict):
    """Complete at the second step; each step is 10 tokens of the generator's and 5 of the verifier's."""

    def __init__(self, score: float = 1.0) -> None:
        super().__init__()
        self._score = score

    def __missing__(self, path: tuple[int, ...]) -> Step:
        return Step(self._score, EOS if len(path) == 2 else None, tokens=10, verifier_tokens=5)


def limited(candidates: int, generator: int | None = None, verifier: int | None = None):
    return auto_search(candidates, budgets=(generator, verifier))


PILOT = [[((), 2)], [((0,), 2)]]  # 2 children a step, for two steps


@pytest.mark.parametrize(
    ("budget", "candidates"),
    [
        (40, 0),  # spent
        (89, 0),  # 0.8 of 49 does not pay for another subtree of 40
        (90, 2),
        (239, 6),
        (240, 8),
        (360, 12),
        (10**6, 16),  # N*M at most
        (16 * 10**6 - 1, 16),
    ],
)
@pytest.mark.parametrize("of", ["generator", "verifier"])
def test_a_budget_buys_as_many_candidates_a_step_as_the_pilot_says(budget: int, candidates: int, of: str):
    generator, verifier = (budget, None) if of == "generator" else (None, budget // 2)
    asked = drive(limited(16, generator, verifier), Costly()).asked
    assert asked[:2] == PILOT
    assert [count for _, count in asked[2]] == [candidates] if candidates else len(asked) == 2


def test_the_tighter_of_two_budgets_counts():
    assert drive(limited(16, 240, 45), Costly()).asked[2] == [((), 2)]
    assert drive(limited(16, 90, 120), Costly()).asked[2] == [((), 2)]


@pytest.mark.parametrize(("score", "second_round"), [(1.0, 4), (0.1, 8)])
def test_what_the_budget_buys_goes_to_the_search_that_the_first_steps_choose(score: float, second_round: int):
    """Candidates: 8 a step, so 4 subtrees of 2, or 8 paths that are shared out among equal scores."""
    outcome = drive(limited(16, 240), Costly(score))
    assert [path for path, _ in outcome.asked[2]] == [()]
    assert len(outcome.asked[3]) == second_round
    assert sum(outcome.votes.values()) == second_round + 1  # and the pilot votes


def test_first_steps_of_the_pilot_count_too():
    """On average EASY with them, so each subtree goes on; REBASE would go on from all four."""
    tree = Costly()
    tree |= {(2,): Step(EASY), (3,): Step(EASY), (4,): Step(EASY - 0.05), (5,): Step(EASY - 0.05)}
    asked = drive(limited(4, 10**6), tree).asked
    assert asked[2:] == [[((), 4)], [((2,), 2), ((4,), 2)]]


@pytest.mark.parametrize("budgets", [(16 * 10**6, None), (None, 16 * 10**6), (16 * 10**6, 10**9)])
def test_what_pays_for_the_longest_paths_needs_no_pilot(budgets: tuple[int | None, int | None]):
    free = drive(auto_search(16), Costly())
    ample = drive(auto_search(16, budgets=budgets), Costly())
    assert (ample.asked, ample.votes) == (free.asked, free.votes)


def test_two_candidates_a_step_need_no_pilot():
    assert drive(limited(2, 10), Costly()).asked == [[((), 2)], [((0,), 2)]]


@pytest.mark.parametrize(("problem", "candidates"), [(0, 8), (15, 6), (30, 4), (75, 2), (76, 0), (200, 0)])
def test_the_verifiers_budget_pays_for_the_problem_first(problem: int, candidates: int):
    """Of 100 + 20 for the pilot, 0.8 of what the problem leaves buys pairs of 20."""

    def make(root: Node) -> AutoSearch:
        root.verifier_tokens = problem
        return limited(16, verifier=120)(root)

    asked = drive(make, Costly()).asked
    assert asked[:2] == PILOT
    assert [count for _, count in asked[2]] == [candidates] if candidates else len(asked) == 2


def test_what_pays_for_the_longest_paths_but_not_for_the_problem_needs_a_pilot():
    def make(root: Node) -> AutoSearch:
        root.verifier_tokens = 1
        return auto_search(16, budgets=(None, 16 * 10**6))(root)

    assert drive(make, Costly()).asked[:2] == PILOT


def test_a_pilot_that_the_verifier_did_not_read_is_no_promise_of_paths_that_cost_nothing():
    """Cut short after 20 tokens each, of which it read none: pairs of 40 then, out of 0.8 of 120."""
    cut = Costly()
    cut |= dict.fromkeys([(0,), (1,)], Step(None, LENGTH, tokens=20))
    assert drive(limited(16, verifier=120), cut).asked[:2] == [[((), 2)], [((), 4)]]
    assert drive(limited(16, verifier=49), cut).asked == [[((), 2)]]
