"""What holds for every algorithm, on random trees; and that beam search, DVTS and REBASE do what a plain loop does."""

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_examples import random_examples
from scripted_tree import LENGTH, Outcome, RandomTree, State, Step, Streams, drive, texts_of

from espalier.search.algorithms import PARAMETERS, answers_suffice, make_algorithm, unused_fields
from espalier.search.algorithms.base import SearchAlgorithm
from espalier.search.algorithms.rebase import apportion
from espalier.search.request import Aggregation, AlgorithmName, SearchRequest
from espalier.search.tree import Node, Termination, aggregate

NAMES = list(AlgorithmName)


def requested(name: AlgorithmName, **fields: object) -> Callable[[Node], SearchAlgorithm]:
    request = SearchRequest("1+1?", name, **{"simulations": 12, **fields})
    return lambda root: make_algorithm(request, root)


some_request = {
    "name": st.sampled_from(NAMES),
    "seed": st.integers(0, 10_000),
    "width": st.integers(1, 4),
    "expansion": st.integers(1, 4),
    "times": st.integers(1, 3),
    "how": st.sampled_from(list(Aggregation)),
}


def outcome_of(
    name: AlgorithmName, seed: int, width: int, expansion: int, times: int, how: Aggregation, shuffled: bool = False
) -> Outcome:
    make = requested(
        name,
        beam_width=width,
        expansion=expansion,
        aggregation=how,
        seed=seed,
        lookahead_steps=times,
        iterations=times,
    )
    return drive(make, RandomTree(seed), random.Random(seed) if shuffled else None)


@random_examples(400)
@given(**some_request)
def test_no_algorithm_depends_on_the_order_or_the_numbers_of_the_nodes_it_is_told(**request):
    ordered, shuffled = outcome_of(**request), outcome_of(**request, shuffled=True)
    assert [sorted(asked) for asked in shuffled.asked] == [sorted(asked) for asked in ordered.asked]
    assert [sorted(kept) for kept in shuffled.kept] == [sorted(kept) for kept in ordered.kept]
    assert shuffled.votes == ordered.votes


@random_examples(400)
@given(**some_request)
def test_only_complete_paths_vote_and_nothing_that_ended_is_kept_for_more(**request):
    outcome = outcome_of(**request)
    assert all(node.complete and not node.rollout and node.multiplicity >= 1 for node in outcome.voters)
    for kept in outcome.kept:
        assert not set(kept) & outcome.of_termination(LENGTH)
    assert not set(outcome.votes) & outcome.of_termination(Termination.PRUNED)


@random_examples(300)
@given(**some_request)
def test_every_leaf_votes_was_cut_short_or_is_marked_as_pruned(**request):
    outcome = outcome_of(**request)
    parents = {node.parent for node in outcome.nodes.values() if not node.rollout}
    for path, node in outcome.nodes.items():
        if node not in parents and node not in outcome.voters:
            assert node.termination in (LENGTH, Termination.PRUNED), path


OTHER_VALUES = {
    "beam_width": (2, 3),
    "expansion": (2, 3),
    "aggregation": (Aggregation.LAST, Aggregation.MIN),
    "lookahead_steps": (1, 3),
    "simulations": (3, 12),
    "exploration": (0.1, 20.0),
    "rebase_temperature": (0.01, 1.0),
    "iterations": (1, 3),
    "confidence": (0.5, 1.0),
}

assert PARAMETERS.keys() <= OTHER_VALUES.keys(), "each parameter of an algorithm is tried"


@pytest.mark.parametrize("field", OTHER_VALUES)
@pytest.mark.parametrize("name", NAMES)
def test_a_field_changes_what_an_algorithm_does_exactly_if_it_declares_to_use_it(name: AlgorithmName, field: str):
    def differs(seed: int) -> bool:
        requests = ({"beam_width": 8, "expansion": 2, field: value} for value in OTHER_VALUES[field])
        one, other = (drive(requested(name, **fields), RandomTree(seed)) for fields in requests)
        return (one.asked, one.kept, one.votes) != (other.asked, other.kept, other.votes)

    vote_alone = field == "aggregation" and not needs_steps(name)
    assert any(map(differs, range(20))) is (field not in unused_fields(SearchRequest("-", name)) and not vote_alone)


def needs_steps(name: AlgorithmName) -> bool:
    return not answers_suffice(SearchRequest("-", name))


@random_examples(200)
@given(**some_request)
def test_no_round_samples_more_than_the_request_says(**request):
    outcome = outcome_of(**request)
    samples = SearchRequest("1+1?", request["name"], request["width"], request["expansion"]).candidates
    for asked in outcome.asked:
        assert sum(children for _, children in asked) <= samples


@pytest.mark.parametrize("name", NAMES)
def test_a_problem_on_which_every_path_is_cut_short_ends_without_a_vote(name: AlgorithmName):
    class Hopeless(RandomTree):
        def __missing__(self, path):
            return Step(0.5, LENGTH if len(path) == 2 else None)

    assert drive(requested(name, iterations=2), Hopeless(0)).votes == {}


@random_examples(200)
@given(st.integers(0, 100), st.lists(st.floats(0.0, 1.0, allow_subnormal=False), min_size=1, max_size=30).filter(any))
def test_shares_sum_to_the_budget_and_are_within_one_of_their_quota(budget: int, weights: list[float]):
    shares = apportion(budget, weights)
    assert sum(shares) == budget
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - budget * weight / sum(weights)) < 1 + 1e-9


# --- the same as a plain loop that merges nothing -------------------------------------------------------------------


class Plain:
    """A path of the plain loops: its texts and scores so far, and how it ended."""

    def __init__(self, texts: State = (), scores: tuple[float, ...] = (), end: Termination | None = None) -> None:
        self.texts, self.scores, self.end = texts, scores, end

    def children(self, streams: Streams, count: int) -> list["Plain"]:
        steps = [streams.next(self.texts) for _ in range(count)]
        return [
            Plain((*self.texts, s.text), (*self.scores, *([] if s.score is None else [s.score])), s.end) for s in steps
        ]

    @property
    def lives(self) -> bool:
        return self.end is not LENGTH

    def score(self, how: Aggregation) -> float:
        return aggregate(list(self.scores), how) or 0.0


def plain_beam(streams: Streams, width: int, expansion: int, how: Aggregation) -> list[Plain]:
    beam, grown = [], Plain().children(streams, width * expansion)
    while True:
        contenders = [*(path for path in beam if path.end), *(path for path in grown if path.lives)]
        beam = sorted(contenders, key=lambda path: -path.score(how))[:width]
        if all(path.end for path in beam):
            return beam
        grown = [child for path in beam if not path.end for child in path.children(streams, expansion)]


def plain_dvts(streams: Streams, width: int, expansion: int, how: Aggregation) -> list[Plain]:
    tips: list[Plain | None] = [Plain()] * width
    while any(tip and not tip.end for tip in tips):
        for i, tip in enumerate(tips):
            if tip and not tip.end:
                living = [child for child in tip.children(streams, expansion) if child.lives]
                tips[i] = max(living, key=lambda path: path.score(how)) if living else None
    return [tip for tip in tips if tip]


def plain_rebase(streams: Streams, width: int, expansion: int, how: Aggregation) -> list[Plain]:
    done: list[Plain] = []
    grown = Plain().children(streams, width * expansion)
    while True:
        done += [path for path in grown if path.lives and path.end]
        living, left = [path for path in grown if not path.end], width * expansion - len(done)
        if not living or not left:
            return done
        odds = [math.exp(path.score(how) / 0.3) for path in living]
        quotas = [left * weight / sum(odds) for weight in odds]
        shares = [int(quota) for quota in quotas]
        while sum(shares) < left:
            short = [quota - share for quota, share in zip(quotas, shares, strict=True)]
            shares[short.index(max(short))] += 1
        grown = [child for path, n in zip(living, shares, strict=True) for child in path.children(streams, n)]


@pytest.mark.parametrize(
    ("name", "plain"),
    [(AlgorithmName.BEAM, plain_beam), (AlgorithmName.DVTS, plain_dvts), (AlgorithmName.REBASE, plain_rebase)],
)
@random_examples(150)
@given(
    st.integers(0, 10_000),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([Aggregation.LAST, Aggregation.PROD, Aggregation.MEAN]),  # min ties, and ties go by path
)
def test_merging_equal_siblings_gives_what_a_plain_loop_without_merging_does(
    name: AlgorithmName, plain: Callable, seed: int, width: int, expansion: int, texts: int, how: Aggregation
):
    make = requested(name, beam_width=width, expansion=expansion, aggregation=how, rebase_temperature=0.3)
    outcome = drive(make, Streams(seed, texts=texts))
    votes = Counter({texts_of(node): node.multiplicity for node in outcome.voters})
    assert votes == Counter(path.texts for path in plain(Streams(seed, texts=texts), width, expansion, how))
