from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_examples import random_examples
from scripted_tree import EOS, LENGTH, RandomTree, Step, drive

from espalier.search.algorithms.particle import ParticleSearch, picks, systematic, uniforms, weigh
from espalier.search.request import AlgorithmName, SearchRequest


def particles(count: int, iterations: int = 1, seed: int = 0, problem: str = "1+1?"):
    request = SearchRequest(problem, AlgorithmName.PARTICLE, count, seed=seed, iterations=iterations)
    return lambda root: ParticleSearch(request, root)


def test_a_weight_is_the_odds_and_finite_at_the_ends():
    assert weigh(0.5) == 1
    assert weigh(0.75) == pytest.approx(3)
    assert weigh(0.0) == pytest.approx(1e-7, rel=1e-3)
    assert weigh(1.0) == pytest.approx(1e7, rel=1e-3)


def test_systematic_resampling_by_hand():
    """Points at 0.1, 0.35, 0.6 and 0.85 of the weight, which changes hands at 0.5 and 0.8."""
    assert systematic([5, 3, 2], 4, 0.4) == [2, 1, 1]
    assert systematic([5, 3, 2], 4, 0.0) == [2, 2, 0]
    assert systematic([0, 1, 0], 3, 0.99) == [0, 3, 0]
    assert picks([0, 1, 0, 3], [0.0, 0.249, 0.25, 0.999]) == [0, 2, 0, 2]


@random_examples(300)
@given(
    st.lists(st.floats(0, 1e7, allow_subnormal=False), min_size=1, max_size=20).filter(lambda w: sum(w) > 1e-9),
    st.integers(1, 50),
    st.floats(0, 1, exclude_max=True, allow_subnormal=False),
)
def test_resampled_counts_sum_to_all_particles_and_are_within_one_of_what_is_expected(
    weights: list[float], count: int, draw: float
):
    counts = systematic(weights, count, draw)
    assert sum(counts) == count
    for taken, weight in zip(counts, weights, strict=True):
        assert abs(taken - count * weight / sum(weights)) <= 1 + 1e-6
        assert weight > 0 or not taken


def test_draws_depend_on_seed_problem_label_and_round_and_on_nothing_else():
    usual = uniforms(1, "p", "a", 2, 3)
    assert uniforms(1, "p", "a", 2, 3) == usual
    others = [uniforms(2, "p", "a", 2, 3), uniforms(1, "q", "a", 2, 3), uniforms(1, "p", "b", 2, 3)]
    others.append(uniforms(1, "p", "a", 3, 3))
    assert all(not set(usual) & set(other) for other in others)
    assert len(set(usual)) == 3
    many = uniforms(0, "p", "a", 0, 4000)
    assert 0 <= min(many) < 0.01
    assert 0.99 < max(many) < 1
    assert sum(many) / 4000 == pytest.approx(0.5, abs=0.02)


def test_particles_on_bad_steps_move_to_good_ones():
    """Odds of 99 to 1/99: of four particles, all end up on the good step whatever is drawn."""
    script = {(0,): Step(0.01), (1,): Step(0.99), (2,): Step(0.01), (3,): Step(0.01)}
    script |= {(1, i): Step(0.5, EOS) for i in range(4)}
    for seed in range(20):
        outcome = drive(particles(4, seed=seed), script)
        assert outcome.asked == [[((), 4)], [((1,), 4)]]
        assert outcome.votes == {(1, i): 1 for i in range(4)}


def test_a_complete_particle_stays_in_the_population_and_is_resampled_with_the_others():
    script = {(0,): Step(0.99, EOS), (1,): Step(0.01), (2,): Step(0.01)}
    outcome = drive(particles(3), script)
    assert outcome.asked == [[((), 3)]]
    assert outcome.votes == {(0,): 3}


def test_a_complete_particle_waits_for_the_others_and_may_take_their_places_later():
    """Equal odds leave one particle on each path; the one that goes on then finds nothing."""
    script = {(0,): Step(0.99, EOS), (1,): Step(0.99), (1, 0): Step(0.01)}
    outcome = drive(particles(2), script)
    assert outcome.asked == [[((), 2)], [((1,), 1)]]
    assert outcome.votes == {(0,): 2}


def test_a_complete_particle_can_lose_its_place():
    script = {(0,): Step(0.01, EOS), (1,): Step(0.99), (1, 0): Step(0.2, EOS), (1, 1): Step(0.2, EOS)}
    outcome = drive(particles(2), script)
    assert outcome.votes == {(1, 0): 1, (1, 1): 1}


def test_once_all_particles_are_complete_they_are_not_resampled_again():
    script = {(0,): Step(0.99, EOS), (1,): Step(0.01, EOS)}
    assert drive(particles(2), script).votes == {(0,): 1, (1,): 1}


def test_a_particle_cut_short_has_no_weight():
    script = {(0,): Step(0.99, LENGTH), (1,): Step(0.01), (1, 0): Step(0.3, EOS), (1, 1): Step(0.4, LENGTH)}
    outcome = drive(particles(2), script)
    assert outcome.asked == [[((), 2)], [((1,), 2)]]
    assert outcome.votes == {(1, 0): 1}


@random_examples(200)
@given(st.integers(0, 10_000), st.integers(1, 8))
def test_there_are_as_many_particles_in_every_round_as_at_first(seed: int, count: int):
    populations = []

    class Counted(ParticleSearch):
        def ask(self):
            asked = super().ask()
            complete = [node.multiplicity for node in self.kept() if node.complete]
            populations.append(sum(complete) + sum(expand.children for expand in asked))
            return asked

    drive(
        lambda root: Counted(SearchRequest("1+1?", AlgorithmName.PARTICLE, count, seed=seed), root),
        RandomTree(seed, depth=6),
    )
    assert set(populations) == {count}


def test_resampling_follows_the_weights_over_many_seeds():
    """Two paths of odds 3 and 1: three quarters of the particles are on the first."""
    script = {(0,): Step(0.75), (1,): Step(0.5), (0, 0): Step(0.5, EOS), (0, 1): Step(0.5, EOS)}
    script |= {(1, 0): Step(0.5, EOS), (1, 1): Step(0.5, EOS)}
    taken: Counter[int] = Counter()
    for seed in range(400):
        for path, count in drive(particles(2, seed=seed), script).votes.items():
            taken[path[0]] += count
    assert taken[0] / 800 == pytest.approx(0.75, abs=0.03)


def test_gibbs_holds_a_path_of_the_iteration_before_and_samples_one_fewer_beside_it():
    script = {(i,): Step(0.5, EOS) for i in range(9)}
    outcome = drive(particles(3, iterations=3), script)
    assert outcome.asked == [[((), 3)], [((), 2)], [((), 2)]]
    assert sum(outcome.votes.values()) == 9, "every iteration's particles vote, the reference again in each"
    assert set(outcome.votes) == {(i,) for i in range(7)}


def test_gibbs_prefers_a_reference_of_large_weight():
    script = {(i,): Step(0.999 if i == 1 else 0.001, EOS) for i in range(5)}
    for seed in range(10):
        assert drive(particles(3, iterations=2, seed=seed), script).votes == {
            (0,): 1,
            (1,): 2,
            (2,): 1,
            (3,): 1,
            (4,): 1,
        }


def test_gibbs_may_branch_from_the_middle_of_its_reference():
    """The reference has the only good first step, so the free particles of the second run continue it."""
    script = {(0,): Step(0.99), (1,): Step(0.01), (2,): Step(0.01), (3,): Step(0.01)}
    script |= {(0, i): Step(0.5, EOS) for i in range(4)}
    for seed in range(10):
        outcome = drive(particles(2, iterations=2, seed=seed), script)
        assert outcome.asked == [[((), 2)], [((0,), 2)], [((), 1)], [((0,), 1)]]
        reference = next(path for path, count in outcome.votes.items() if count == 2)
        assert reference in ((0, 0), (0, 1))
        assert outcome.votes[0, 2] == 1


def test_a_lone_particle_needs_no_second_iteration():
    script = {(0,): Step(0.5), (0, 0): Step(0.5, EOS)}
    assert drive(particles(1, iterations=4), script).asked == [[((), 1)], [((0,), 1)]]


def test_gibbs_whose_free_particles_are_all_cut_short_goes_on_from_the_reference():
    script = {(0,): Step(0.5), (1,): Step(None, LENGTH), (0, 0): Step(0.5, EOS), (0, 1): Step(0.5, EOS)}
    script |= {(2,): Step(None, LENGTH), (0, 2): Step(0.5, EOS)}
    outcome = drive(particles(2, iterations=2), script)
    assert outcome.asked[2:] == [[((), 1)], [((0,), 1)]]
    assert sum(outcome.votes.values()) == 4


def test_other_seeds_resample_otherwise():
    tree = RandomTree(3, depth=5, scores=(0.3, 0.5, 0.7))
    votes = {tuple(sorted(drive(particles(4, seed=seed), tree).votes.items())) for seed in range(20)}
    assert len(votes) > 1
