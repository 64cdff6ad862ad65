"""Stage `evaluate`: what the exported pair must reach on the benchmark, by the searches it is made for."""

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from espalier.experiments.demo import benchmark_path
from espalier.experiments.demo.batches import RowMaker
from espalier.experiments.demo.export import (
    GENERATOR,
    TEMPERATURE,
    VERIFIER,
    load_exported_generator,
    load_exported_tokenizer,
)
from espalier.experiments.demo.oracle import label_steps, numbers_of, parse_answer
from espalier.experiments.demo.oracle_beam import beam_search
from espalier.experiments.demo.problems import Problem
from espalier.search.aggregation import aggregate
from espalier.search.orchestrator import Orchestrator
from espalier.search.request import Aggregation, AlgorithmName, SearchRequest, Vote
from espalier.search.result import Candidate, SearchResult
from espalier.search.runtime import RuntimeSettings, load_orchestrator
from espalier.search.voting import GroupingName, elect

Levels = dict[str, float]
"""A share for each level and for `all`."""


@dataclass(frozen=True, slots=True)
class Case:
    """A benchmark problem with its numbers."""

    problem: Problem
    level: int


def read_cases(path: Path, limit: int) -> list[Case]:
    """Returns the first `limit` problems of the benchmark; levels take turns in it."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:limit]]
    return [Case(Problem(r["problem"], r["subject"], *numbers_of(r["solution"])), r["level"]) for r in records]


def by_level(cases: Sequence[Case], values: Iterable[float]) -> Levels:
    """Returns the mean value of every level and over all."""
    groups: dict[str, list[float]] = defaultdict(list)
    for case, value in zip(cases, values, strict=True):
        groups[str(case.level)].append(value)
        groups["all"].append(value)
    return {level: round(sum(group) / len(group), 4) for level, group in sorted(groups.items())}


def ranking(case: Case, candidates: Sequence[Candidate]) -> list[tuple[float, float]]:
    """Returns (right, wrong) score pairs of one problem's steps that follow the same right steps.

    Every distinct wrong step is paired with the right step of its depth.
    """
    right: dict[int, float] = {}
    wrong: dict[tuple[int, str], float] = {}
    for candidate in candidates:
        steps = [step.text.strip() for step in candidate.steps]
        labels = label_steps(case.problem.start, case.problem.operands, steps)
        for depth, (step, label) in enumerate(zip(candidate.steps, labels, strict=True)):
            if step.score is None:  # a step without text
                break
            if not label:
                wrong[depth, step.text] = step.score
                break
            right[depth] = step.score
    return [(right[depth], value) for (depth, _), value in wrong.items() if depth in right]


def _search(orchestrator: Orchestrator, cases: Sequence[Case], request: SearchRequest) -> list[SearchResult]:
    """Returns one result for each case, in their order."""
    order = [orchestrator.submit(replace(request, problem=case.problem.text)) for case in cases]
    results: dict[str, SearchResult] = {}
    while orchestrator.busy:
        results |= {result.search_id: result for result in orchestrator.step()}
    return [results[search_id] for search_id in order]


def _rescored(candidates: Sequence[Candidate], how: Aggregation) -> list[Candidate]:
    scores = [[step.score for step in c.steps if step.score is not None] for c in candidates]
    return [replace(c, score=aggregate(s, how)) for c, s in zip(candidates, scores, strict=True)]


def _oracle_beam(pair: Path, cases: Sequence[Case], seed: int) -> Levels:
    maker = RowMaker(load_exported_tokenizer(pair))
    beams = beam_search(
        load_exported_generator(pair), maker, [case.problem for case in cases], temperature=TEMPERATURE, seed=seed
    )
    best = [next((path for path in beam if path.finished), None) for beam in beams]
    return by_level(
        cases,
        (
            float(path is not None and parse_answer(path.steps[-1]) == case.problem.answer)
            for path, case in zip(best, cases, strict=True)
        ),
    )


def evaluate_pair(pair: Path, limit: int, seed: int) -> dict[str, Any]:
    """Returns shares of right answers by level and the share of step pairs ranked rightly.

    Args:
        pair: Folder of the exported pair.
        limit: Problems of the benchmark.
        seed: Of all sampling.
    """
    cases = read_cases(benchmark_path(), limit)
    oracle = _oracle_beam(pair, cases, seed)
    orchestrator = load_orchestrator(
        RuntimeSettings(
            generator=str(pair / GENERATOR),
            verifier=str(pair / VERIFIER),
            max_running=32,
            grouping=GroupingName.SPELLING,
        )
    )
    any_request = SearchRequest("-", temperature=TEMPERATURE, seed=seed)
    greedy = _search(orchestrator, cases, replace(any_request, algorithm=AlgorithmName.GREEDY))
    best_of_16 = _search(orchestrator, cases, replace(any_request, algorithm=AlgorithmName.BEST_OF_N, beam_width=16))
    beam = _search(orchestrator, cases, replace(any_request, algorithm=AlgorithmName.BEAM))
    ballots = [result.candidates for result in best_of_16]

    def share(answers: Iterable[str]) -> Levels:
        return by_level(cases, (float(a == case.problem.answer) for a, case in zip(answers, cases, strict=True)))

    def elected(vote: Vote, how: Aggregation) -> Levels:
        winners = [elect(_rescored(ballot, how), vote) for ballot in ballots]
        return share(winner.answer if winner else "" for winner in winners)

    def right(ballot: Sequence[Candidate], case: Case) -> list[bool]:
        return [candidate.answer == case.problem.answer for candidate in ballot]

    pairs = [pair for case, ballot in zip(cases, ballots, strict=True) for pair in ranking(case, ballot)]
    return {
        "problems": len(cases),
        "single": by_level(cases, (sum(right(b, c)) / 16 for b, c in zip(ballots, cases, strict=True))),
        "greedy": share(result.answer for result in greedy),
        "oracle beam 4x4": oracle,
        "ranking": round(sum((r > w) + 0.5 * (r == w) for r, w in pairs) / max(1, len(pairs)), 4),
        "ranking pairs": len(pairs),
        "pass@16": by_level(cases, (float(any(right(b, c))) for b, c in zip(ballots, cases, strict=True))),
        "majority@16": elected(Vote.MAJORITY, Aggregation.LAST),
        **{
            f"best-of-16 {vote} {how}": elected(vote, how)
            for vote in (Vote.NAIVE, Vote.WEIGHTED)
            for how in (Aggregation.LAST, Aggregation.MIN)
        },
        "beam 4x4": share(result.answer for result in beam),
    }


def gates(figures: dict[str, Any]) -> dict[str, bool]:
    """Returns which of the pair's gates are met."""
    weighted = figures["best-of-16 weighted last"]["all"]
    beam = figures["beam 4x4"]["all"]
    return {
        "single sample within 30-50%": 0.3 <= figures["single"]["all"] <= 0.5,
        "oracle beam 4x4 at least 90%": figures["oracle beam 4x4"]["all"] >= 0.9,
        "ranking within a problem at least 0.9": figures["ranking"] >= 0.9,
        "best-of-16 weighted beats majority@16": weighted > figures["majority@16"]["all"],
        "beam 4x4 25 points above a single sample": beam >= figures["single"]["all"] + 0.25,
        "beam 4x4 at least best-of-16 weighted": beam >= weighted,
    }


def print_figures(figures: dict[str, Any], started: float) -> None:
    """Prints a table of shares by level, then the gates."""
    print(f"{'':26}" + "".join(f"{level:>8}" for level in ("1", "2", "3", "4", "5", "all")))
    for name, value in figures.items():
        if isinstance(value, dict):
            print(f"{name:26}" + "".join(f"{value[level]:8.3f}" for level in sorted(value)))
        else:
            print(f"{name:26}{value:>8}")
    for name, met in gates(figures).items():
        print(f"{'met   ' if met else 'MISSED'} {name}")
    print(f"{time.perf_counter() - started:.0f} s", flush=True)
