import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_examples import random_examples
from scripted_equivalence import ScriptedEquivalence
from scripted_tree import BOXED, EOS, LENGTH, Step, drive

from espalier.search.algorithms.adaptive import AdaptivePaths, leader_stays_first
from espalier.search.grading import answers as grading
from espalier.search.grading.answers import extract_answer, leader_and_rival
from espalier.search.request import AlgorithmName, SearchRequest, Vote
from espalier.search.result import Candidate
from espalier.search.voting.vote import select


def adaptive(paths: int, batch: int, vote: Vote = Vote.MAJORITY, confidence: float = 1.0):
    request = SearchRequest("-", AlgorithmName.ADAPTIVE, paths, batch, vote, confidence=confidence)
    return lambda root: AdaptivePaths(request, root)


def answers(*given: str, scores: tuple[float, ...] = ()) -> dict:
    """One-step paths with these answers; a dot stands for one that was cut short, a dash for one without an answer."""
    script = {}
    for i, (answer, score) in enumerate(itertools.zip_longest(given, scores)):
        if answer == ".":
            script[i,] = Step(None, LENGTH, "cut")
        elif answer == "-":
            script[i,] = Step(score, EOS, "no answer")
        else:
            script[i,] = Step(score, BOXED, f"\\boxed{{{answer}}}")
    return script


def sampled(outcome) -> int:
    return sum(children for ((_, children),) in outcome.asked)


def test_a_majority_that_cannot_be_overtaken_ends_the_search():
    assert sampled(drive(adaptive(8, 1), answers(*"aaaaabcd"))) == 5  # 5 against 3 that are left
    assert sampled(drive(adaptive(8, 1), answers(*"abababab"))) == 8
    assert sampled(drive(adaptive(8, 1), answers(*"aabaabbb"))) == 8  # 4 to 3 with one left could still be a tie


def test_paths_come_in_rounds_of_m_and_never_more_than_n():
    outcome = drive(adaptive(8, 3), answers(*"abcdefgh"))
    assert outcome.asked == [[((), 3)], [((), 3)], [((), 2)]]
    assert len(outcome.votes) == 8


def test_paths_without_an_answer_are_spent_and_do_not_vote():
    assert sampled(drive(adaptive(6, 1), answers(*"a.-a-a"))) == 5  # 2 against the 1 that is left
    assert drive(adaptive(3, 3), answers(*"a.a")).votes == {(0,): 1, (2,): 1}
    assert drive(adaptive(4, 2), answers(*"....")).votes == {}


def test_equal_answers_spelled_differently_are_one():
    assert sampled(drive(adaptive(5, 1), answers("1/2", "0.5", "\\frac{1}{3}", "2/4", "7"))) == 4


def test_answers_that_may_mean_the_same_are_counted_as_one_against_the_leader():
    split = "x=4", "x=4", "x=4", "4=x", "{x}=4", "x=4"
    assert sampled(drive(adaptive(6, 1), answers(*split))) == 6  # 3 to 1 and 1, which may be 2, with one left
    assert sampled(drive(adaptive(6, 1), answers("4", "4", "4", "5", "6", "4"))) == 5  # numbers are what they are


def test_units_that_may_contradict_each_other_are_not_counted_together():
    assert sampled(drive(adaptive(6, 1), answers("10 cm", "10 m", "10 cm", "10 m", "10", "10"))) == 6


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"4": 3}, (3, 0)),
        ({"4": 3, "5": 2, "6": 2}, (3, 2)),
        ({"4": 3, "x": 2, "y": 1}, (3, 3)),
        ({"x": 3, "4": 2, "5": 1, "y": 1}, (3, 3)),
        ({"x": 0.5, "4": 0.25}, (0.5, 0.25)),
    ],
)
def test_leader_and_rival_by_hand(weights: dict[str, float], expected: tuple[float, float]):
    assert leader_and_rival(weights) == expected


def test_confidence_ends_the_search_earlier():
    assert sampled(drive(adaptive(16, 1, confidence=0.95), answers(*"a" * 16))) == 4  # 1 - 1/32 is the first above
    assert sampled(drive(adaptive(16, 1, confidence=0.96), answers(*"a" * 16))) == 4
    assert sampled(drive(adaptive(16, 1, confidence=0.97), answers(*"a" * 16))) == 5
    assert sampled(drive(adaptive(16, 1, confidence=1.0), answers(*"a" * 16))) == 9


def test_full_confidence_is_not_reached_by_a_probability_that_rounds_to_it():
    assert leader_stays_first(53, 0) == 1.0
    assert sampled(drive(adaptive(256, 1), answers(*"a" * 256))) == 129


def test_each_paths_answer_is_extracted_once(monkeypatch):
    read = []
    monkeypatch.setattr(grading, "extract_answer", lambda text: read.append(text) or extract_answer(text))
    assert sampled(drive(adaptive(8, 1), answers(*"abcdef-."))) == 8
    assert len(read) == 7  # all but the one that was cut short


def test_the_posterior_by_hand():
    assert leader_stays_first(0, 0) == 0.5
    assert leader_stays_first(4, 0) == 1 - 1 / 32
    assert leader_stays_first(3, 3) == 0.5
    assert leader_stays_first(2, 1) == (1 + 4 + 6) / 16  # at most two heads of four


@random_examples(60)
@given(st.integers(0, 30), st.integers(0, 30))
def test_the_posterior_is_the_mass_of_the_beta_distribution_above_one_half(first: int, second: int):
    points = 2_000
    density = (((i + 0.5) / points) ** first * (1 - (i + 0.5) / points) ** second for i in range(points))
    below, above = (sum(itertools.islice(density, points // 2)) for _ in range(2))
    assert leader_stays_first(first, second) == pytest.approx(above / (below + above), abs=1e-4)


def test_a_weighted_vote_ends_when_the_gap_cannot_be_closed():
    script = answers(*"aabaa", scores=(0.9, 0.9, 0.2, 0.9, 0.9))
    assert sampled(drive(adaptive(5, 1, Vote.WEIGHTED), script)) == 4  # 2.7 - 0.2 with one left, 1.6 with two is not it
    assert sampled(drive(adaptive(4, 1, Vote.WEIGHTED), script)) == 3  # 1.8 - 0.2 is more than 1


def test_a_weighted_vote_counts_scores_and_not_heads():
    script = answers(*"aaab", scores=(0.1, 0.1, 0.1, 0.9))
    assert sampled(drive(adaptive(4, 1, Vote.WEIGHTED), script)) == 4


def test_a_naive_vote_ends_at_a_perfect_score():
    assert sampled(drive(adaptive(4, 1, Vote.NAIVE), answers(*"abcd", scores=(0.5, 1.0, 0.2, 0.1)))) == 2
    assert sampled(drive(adaptive(4, 1, Vote.NAIVE), answers(*"abcd", scores=(0.5, 0.9, 0.2, 0.1)))) == 4


@random_examples(300)
@given(
    st.lists(st.tuples(st.sampled_from("abc-"), st.floats(0, 1, allow_subnormal=False)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.sampled_from([vote for vote in Vote if not vote.reads_confidence]),
)
def test_with_full_confidence_the_selected_answer_is_that_of_all_paths(
    paths: list[tuple[str, float]], batch: int, vote: Vote
):
    script = answers(*(answer for answer, _ in paths), scores=tuple(score for _, score in paths))

    def selected(indices: list[int]) -> str:
        candidates = [
            Candidate(i, "" if paths[i][0] == "-" else paths[i][0], paths[i][1], 1, ()) for i in sorted(indices)
        ]
        best = select(candidates, vote).best
        return best.answer if best else ""

    outcome = drive(adaptive(len(paths), batch, vote), script)
    assert selected([path[0] for path in outcome.votes]) == selected(list(range(len(paths))))


@random_examples(400)
@given(
    st.lists(
        st.tuples(st.sampled_from(["1", "2", "x", "y", "z", "-"]), st.floats(0, 1, allow_subnormal=False)),
        min_size=1,
        max_size=12,
    ),
    st.fixed_dictionaries({name: st.sampled_from(["1", "2", name]) for name in "xyz"}),
    st.integers(1, 3),
    st.sampled_from([Vote.MAJORITY, Vote.WEIGHTED]),
)
def test_with_full_confidence_it_never_ends_before_a_vote_that_groups_by_meaning_is_decided(
    paths: list[tuple[str, float]], meaning: dict[str, str], batch: int, vote: Vote
):
    script = answers(*(answer for answer, _ in paths), scores=tuple(score for _, score in paths))

    def selected(count: int) -> str:
        given = [(i, "" if answer == "-" else answer, score) for i, (answer, score) in enumerate(paths[:count])]
        candidates = [Candidate(i, answer, score, 1, ()) for i, answer, score in given]
        best = select(candidates, vote, ScriptedEquivalence(lambda one, other: meant(one) == meant(other))).best
        return meant(best.answer) if best else ""

    def meant(answer: str) -> str:
        return meaning.get(answer, answer)

    assert selected(sampled(drive(adaptive(len(paths), batch, vote), script))) == selected(len(paths))
