"""What the verifier is for: on the demo pair, searches that use it beat those that do not. Minutes long."""

from dataclasses import replace
from functools import cache

import pytest

from espalier.experiments.lab.bench.searches.accuracy import mean_interval
from espalier.experiments.runs.benchmarks import load_benchmark
from espalier.search.grading.answers import canonical
from espalier.search.request import AlgorithmName, AnswerEquivalence, SearchRequest
from espalier.search.run.load import load_orchestrator
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.settings import RuntimeSettings

PROBLEMS, SEEDS = 150, (11, 12)
MAJORITY = SearchRequest("-", AlgorithmName.MAJORITY, beam_width=16)
CHAIN = SearchRequest("-", AlgorithmName.CHAIN)


@cache
def pair() -> Orchestrator:
    return load_orchestrator(RuntimeSettings(max_running=32, answer_equivalence=AnswerEquivalence.EXACT_MATCH))


@cache
def solved(request: SearchRequest) -> list[float]:
    """Of each problem, the share of seeds with which it was solved. The demo's answers are plain numbers."""
    problems, orchestrator = load_benchmark("demo", PROBLEMS), pair()
    right = dict.fromkeys((p.unique_id for p in problems), 0.0)
    for seed in SEEDS:
        seeded = replace(request, seed=seed)
        by_search = {orchestrator.submit(replace(seeded, problem=p.problem)): p for p in problems}
        while orchestrator.busy:
            for result in orchestrator.step():
                problem = by_search[result.search_id]
                right[problem.unique_id] += (canonical(result.answer) == canonical(problem.answer)) / len(SEEDS)
    return list(right.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [AlgorithmName.BEAM, AlgorithmName.DVTS, AlgorithmName.REBASE, AlgorithmName.LOOKAHEAD, AlgorithmName.AUTO],
)
def test_a_search_by_steps_beats_a_single_chain(algorithm: AlgorithmName):
    difference = [a - b for a, b in zip(solved(SearchRequest("-", algorithm)), solved(CHAIN), strict=True)]
    mean, half = mean_interval(difference)
    assert mean - half > 0.1


@pytest.mark.slow
def test_votes_weighted_by_the_verifier_beat_the_majority_of_the_same_paths():
    weighted = solved(replace(MAJORITY, algorithm=AlgorithmName.BEST_OF_N))
    mean, half = mean_interval([a - b for a, b in zip(weighted, solved(MAJORITY), strict=True)])
    assert mean - half > 0


@pytest.mark.slow
def test_particles_beat_a_single_chain():
    particles = solved(SearchRequest("-", AlgorithmName.PARTICLE, beam_width=16))
    mean, half = mean_interval([a - b for a, b in zip(particles, solved(CHAIN), strict=True)])
    assert mean - half > 0.1
