"""A vote that is said to be decided is decided: by brute force over everything that the other paths could say."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_examples import random_examples
from scripted_equivalence import ScriptedEquivalence

from espalier.search.algorithms import stops_early, unused_fields
from espalier.search.grading.answers import canonical
from espalier.search.grading.reading import read
from espalier.search.growth.early_stop import PartialVote, PathGate
from espalier.search.request import AlgorithmName, EarlyStop, SearchRequest, Vote
from espalier.search.result import Candidate
from espalier.search.tree import Node, Termination
from espalier.search.voting.vote import select

ANSWERS = "4", "5", "x", "y", "4 cm", "4 m"
SCORES = 0.0, 0.5, 1.0
EQUALITIES = [{}, {"x": "4"}, {"x": "5"}, {"x": "y"}, {"x": "4", "y": "4"}, {"x": "4", "y": "5"}]
"""What `x` and `y` may turn out to be; 4 and 5 are never equal."""


@dataclass(frozen=True)
class Path:
    """A path that has ended, or may end so: its place in path order, answer, score and multiplicity."""

    place: int
    answer: str
    score: float | None = None
    multiplicity: int = 1

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.place, self.answer, self.score, self.multiplicity, ())


def partial(vote: Vote, scored: bool, ended: Iterable[Path]) -> PartialVote:
    votes = PartialVote(vote, scored)
    for path in ended:
        votes.add(path.answer, path.score, path.multiplicity, (path.place,))
    return votes


def winner(paths: Iterable[Path], vote: Vote, equal: dict[str, str]) -> Candidate | None:
    ordered = [path.candidate for path in sorted(paths, key=lambda path: path.place)]
    means = lambda answer: equal.get(canonical(answer), canonical(answer))  # noqa: E731
    return select(ordered, vote, ScriptedEquivalence(lambda one, other: means(one) == means(other))).best


def completions(places: list[int], scored: bool) -> Iterator[list[Path]]:
    """Everything that the paths at these places could say."""
    ends = [(answer, score) for answer in ("", *ANSWERS) for score in (SCORES if scored else [None])]
    for chosen in itertools.product(ends, repeat=len(places)):
        yield [Path(place, answer, score) for place, (answer, score) in zip(places, chosen, strict=True)]


@st.composite
def scenes(draw: Callable, answers: tuple[str, ...] = ANSWERS) -> tuple[Vote, bool, list[Path], list[int]]:
    """A vote, whether it has scores, the paths that have ended, and the places of those that have not."""
    vote, scored = draw(st.sampled_from([(Vote.MAJORITY, False), (Vote.MAJORITY, True), (Vote.WEIGHTED, True)]))
    leader = draw(st.sampled_from(answers))
    said = draw(st.lists(st.just(leader) | st.sampled_from(("", *answers)), min_size=1, max_size=6))
    places = draw(st.permutations(range(len(said) + draw(st.integers(1, 2)))))
    ended = [
        Path(place, answer, draw(st.sampled_from(SCORES)) if scored else None, draw(st.integers(1, 2)))
        for place, answer in zip(places, said, strict=False)
    ]
    return vote, scored, ended, list(places[len(said) :])


def same_value(one: str, other: str, equal: dict[str, str]) -> bool:
    first, second = read(one), read(other)
    if first.mark and second.mark and first.mark != second.mark:
        return False
    return equal.get(first.key, first.key) == equal.get(second.key, second.key)


@random_examples(150)
@given(scenes())
def test_whatever_the_others_say_a_decided_answer_wins(scene: tuple[Vote, bool, list[Path], list[int]]):
    vote, scored, ended, places = scene
    if not partial(vote, scored, ended).decided(len(places), (min(places),)):
        return
    before = winner(ended, vote, {})
    assert before is not None
    for rest, equal in itertools.product(completions(places, scored), EQUALITIES):
        after = winner([*ended, *rest], vote, equal)
        assert after is not None
        assert same_value(after.answer, before.answer, equal), rest


@random_examples(200)
@given(scenes(answers=("4", "5")))
def test_a_majority_of_numbers_is_decided_as_soon_as_nothing_can_change_it(
    scene: tuple[Vote, bool, list[Path], list[int]],
):
    ended = [Path(place, path.answer, None, path.multiplicity) for place, path in enumerate(scene[2])]
    places = list(range(len(ended), len(ended) + len(scene[3])))
    found = [winner([*ended, *rest], Vote.MAJORITY, {}) for rest in completions(places, scored=False)]
    values = {canonical(best.answer) if best else "" for best in found}
    assert partial(Vote.MAJORITY, False, ended).decided(len(places), (min(places),)) is (len(values) == 1)


@random_examples(200)
@given(scenes())
def test_no_vote_is_decided_before_the_fewest_further_paths_have_ended(
    scene: tuple[Vote, bool, list[Path], list[int]],
):
    vote, scored, ended, places = scene
    votes, left = partial(vote, scored, ended), len(places)
    fewest = votes.fewest_to_decide(left)
    assert 1 <= fewest <= left
    if votes.decided(left, (min(places),)):
        return
    for count in range(1, fewest):
        for said in completions(places[:count], scored):
            first = (min(places[count:]),)
            assert not partial(vote, scored, [*ended, *said]).decided(left - count, first)


@pytest.mark.parametrize(
    ("scored", "ended", "left", "fewest"),
    [
        (True, "445", 3, 2),  # one more for 4 leaves a tie, which 5 could win by its score
        (False, "445", 3, 1),  # a tie goes to 4, which was first
        (True, "44", 4, 2),
        (False, "44", 4, 1),
        (True, "445", 4, 2),
        (False, "445", 4, 2),
        (True, "4455", 5, 3),
        (False, "4455", 5, 3),
        (True, "4444", 3, 1),
        (True, "", 3, 2),
        (False, "4", 1, 1),
    ],
)
def test_if_the_fewest_further_paths_agree_the_vote_is_decided(scored: bool, ended: str, left: int, fewest: int):
    score = 1.0 if scored else None
    said = [Path(place, answer, score) for place, answer in enumerate(ended)]
    agreeing = [Path(len(said) + more, "4", score) for more in range(fewest)]

    def decided(paths: list[Path]) -> bool:
        rest = left + len(said) - len(paths)
        return partial(Vote.MAJORITY, scored, paths).decided(rest, (len(paths),))

    assert partial(Vote.MAJORITY, scored, said).fewest_to_decide(left) == fewest
    assert decided([*said, *agreeing])
    assert fewest == 1 or not decided([*said, *agreeing[:-1]])


@random_examples(200)
@given(scenes())
def test_a_vote_that_may_not_be_decided_is_not_whatever_is_pending(scene: tuple[Vote, bool, list[Path], list[int]]):
    vote, scored, ended, places = scene
    for count in range(len(places)):
        if not partial(vote, scored, ended).may_be_decided(count, len(places) - count):
            first = (min(places[count:]),)
            for said in completions(places[:count], scored):
                assert not partial(vote, scored, [*ended, *said]).decided(len(places) - count, first)


@pytest.mark.parametrize(
    ("ended", "left", "decided"),
    [
        ("444", 2, True),
        ("445", 1, True),  # a tie at worst, which the first path wins
        ("544", 1, False),  # a tie, which 5 would win
        ("44xy", 1, False),  # x and y may be the same
        ("44xy4", 0, True),
        ("4445", 2, True),
        ("--4", 0, True),
        ("--", 0, False),
    ],
)
def test_majorities_by_hand(ended: str, left: int, decided: bool):
    paths = [Path(place, "" if answer == "-" else answer) for place, answer in enumerate(ended)]
    assert partial(Vote.MAJORITY, False, paths).decided(left, (len(ended),)) is decided


def test_a_tie_may_go_to_a_path_that_comes_before():
    votes = partial(Vote.MAJORITY, False, [Path(3, "4"), Path(5, "4")])
    assert votes.decided(2, (4,))
    assert not votes.decided(2, (1,))
    assert not partial(Vote.MAJORITY, True, [Path(3, "4", 0.5), Path(5, "4", 0.5)]).decided(2, (4,))


def test_a_weighted_vote_counts_an_open_path_as_one():
    votes = partial(Vote.WEIGHTED, True, [Path(0, "4", 0.9, multiplicity=3), Path(1, "5", 0.6)])
    assert votes.decided(2)
    assert not votes.decided(3)
    exact = partial(Vote.WEIGHTED, True, [Path(0, "4", 1.0, multiplicity=2)])
    assert not exact.decided(2)  # a tie, which a better path could win
    assert exact.decided(1)


# ---- the gate


def node(*path: int, multiplicity: int = 1, ended: bool = False) -> Node:
    step = Node(0, None, ())
    for i in range(len(path)):
        step = Node(sum(path) + i, step, path[: i + 1], num_tokens=10, multiplicity=multiplicity)
    step.termination = Termination.EOS if ended else None
    return step


def says(answer: str) -> Candidate:
    return Candidate(0, answer, None, 1, ())


def test_the_slower_half_never_waits():
    gate = PathGate(PartialVote(Vote.MAJORITY, False), paths=4, frugal=False)
    first, second, third = node(0), node(1), node(2)
    assert gate.release([first]) == []  # the other three might end here and agree
    assert gate.release([first, second]) == []  # a tie, which they could win
    assert gate.release([first, second, third]) == [first, second, third]
    assert gate.release([late := node(3)]) == [late]


def test_deep_paths_wait_for_one_another_ever_more_seldom():
    gate = PathGate(PartialVote(Vote.MAJORITY, False), paths=2, frugal=False)
    waited = list[int]()
    for depth in range(1, 200):
        first, second = node(0, *[0] * (depth - 1)), node(1, *[0] * (depth - 1))
        if gate.release([first]) != [first]:
            waited.append(depth)
            assert gate.release([first, second]) == [first, second]
    assert waited[:17] == [*range(1, 17), 18]
    assert waited[-2:] == [162, 182]


def test_the_gate_stays_closed_once_the_vote_is_decided():
    gate = PathGate(PartialVote(Vote.MAJORITY, False), paths=5, frugal=False)
    gate.end(node(0, ended=True, multiplicity=3), says("4"))
    waiting = [node(1), node(2)]
    assert gate.release(waiting) == []
    assert gate.decided
    assert gate.tokens_left(waiting) == 0
    assert gate.tokens_left([node(1)]) == 0


def test_a_frugal_gate_sends_as_many_as_could_decide_the_longest_first():
    gate = PathGate(PartialVote(Vote.MAJORITY, True), paths=9, frugal=True)
    small, large, deep = node(0, multiplicity=2), node(1, multiplicity=4), node(2, 0, multiplicity=3)
    assert gate.release([small, large]) == []  # not all wait
    assert gate.release([small, large, deep]) == [deep, large]  # five of nine
    for path in (deep, large):
        gate.end(path, says("4"))
    assert gate.release([small]) == []
    assert gate.decided
    assert gate.tokens_left([small]) == round(2 * ((3 * 20 + 4 * 10) / 7 - 10))


@pytest.mark.parametrize(
    ("algorithm", "vote", "stop", "gated"),
    [
        (AlgorithmName.MAJORITY, Vote.MAJORITY, EarlyStop.DECIDED, True),
        (AlgorithmName.BEST_OF_N, Vote.WEIGHTED, EarlyStop.FRUGAL, True),
        (AlgorithmName.BEST_OF_N, Vote.NAIVE, EarlyStop.FRUGAL, False),
        (AlgorithmName.BEST_OF_N, Vote.WEIGHTED, EarlyStop.OFF, False),
        (AlgorithmName.ADAPTIVE, Vote.MAJORITY, EarlyStop.DECIDED, False),
        (AlgorithmName.BEAM, Vote.WEIGHTED, EarlyStop.DECIDED, False),
    ],
)
def test_which_searches_stop_early(algorithm: AlgorithmName, vote: Vote, stop: EarlyStop, gated: bool):
    assert stops_early(SearchRequest("1+1?", algorithm, vote=vote, early_stop=stop)) is gated


def test_a_search_that_cannot_stop_early_does_not_use_the_option():
    assert "early_stop" in unused_fields(SearchRequest("1+1?", AlgorithmName.BEAM))
    assert "early_stop" not in unused_fields(SearchRequest("1+1?", AlgorithmName.MAJORITY))
