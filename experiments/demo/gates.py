"""Stage `evaluate`: what the pair must reach, measured on the benchmark with the plain sampler."""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import Qwen2ForCausalLM, Qwen2ForTokenClassification

from espalier.experiments.demo.batches import RowMaker
from espalier.experiments.demo.beam import Path as BeamPath
from espalier.experiments.demo.beam import Scorer, beam_search
from espalier.experiments.demo.export import TEMPERATURE
from espalier.experiments.demo.judging import Solution, score_solutions
from espalier.experiments.demo.oracle import label_steps, numbers_of, parse_answer
from espalier.experiments.demo.problems import Problem
from espalier.experiments.demo.samples import LabelledSample, sample_solutions
from espalier.experiments.demo.votes import cast, majority, naive, weighted

BEAM_CASES = 50
"""Problems of the verifier beam, which scores every path from scratch and is slow for it."""
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


def by_level(cases: Sequence[Case], values: Sequence[float]) -> Levels:
    """Returns the mean value of every level and over all."""
    groups: dict[str, list[float]] = defaultdict(list)
    for case, value in zip(cases, values, strict=True):
        groups[str(case.level)].append(value)
        groups["all"].append(value)
    return {level: round(sum(group) / len(group), 4) for level, group in sorted(groups.items())}


def answered(steps: Sequence[str], case: Case) -> bool:
    """Whether a solution's boxed answer is the right one."""
    return bool(steps) and parse_answer(steps[-1]) == case.problem.answer


def ranking(samples: Sequence[LabelledSample], scores: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Returns (right, wrong) score pairs of one problem's steps that follow the same right steps.

    Every distinct wrong step is paired with the right step of its depth.
    """
    right: dict[int, float] = {}
    wrong: dict[tuple[int, str], float] = {}
    for solution, values in zip(samples, scores, strict=True):
        for depth, (step, label) in enumerate(zip(solution.steps, solution.right, strict=True)):
            if label:
                right[depth] = values[depth]
            else:
                wrong[depth, step] = values[depth]
                break
    return [(right[depth], value) for (depth, _), value in wrong.items() if depth in right]


def oracle_scorer(cases: Sequence[Case]) -> Scorer:
    """Returns a scorer that knows: 1 if all steps so far are right, else 0."""

    def score(paths: Sequence[tuple[int, Sequence[str]]]) -> list[float]:
        problems = [cases[index].problem for index, _ in paths]
        labels = [label_steps(p.start, p.operands, steps) for p, (_, steps) in zip(problems, paths, strict=True)]
        return [float(label[-1]) for label in labels]

    return score


def verifier_scorer(cases: Sequence[Case], verifier: Qwen2ForTokenClassification, maker: RowMaker) -> Scorer:
    """Returns a scorer that asks the verifier for the last step's score."""

    def score(paths: Sequence[tuple[int, Sequence[str]]]) -> list[float]:
        solutions = [(cases[index].problem.text, steps) for index, steps in paths]
        return [scores[-1] for scores in score_solutions(verifier, maker, solutions)]

    return score


def beam_shares(cases: Sequence[Case], beams: Sequence[Sequence[BeamPath]]) -> Levels:
    """Returns the share of problems whose best finished path answers rightly."""
    best = [next((path for path in beam if path.finished), None) for beam in beams]
    return by_level(
        cases, [float(path is not None and answered(path.steps, case)) for path, case in zip(best, cases, strict=True)]
    )


def evaluate_generator(
    model: Qwen2ForCausalLM, maker: RowMaker, cases: Sequence[Case], seed: int = 0
) -> dict[str, Any]:
    """Returns single-sample, greedy and oracle-beam shares by level."""
    problems = [case.problem for case in cases]

    def share(copies: int, temperature: float) -> Levels:
        drawn = sample_solutions(model, maker, problems, copies, seed, temperature)
        means = [sum(answered(s.steps, case) for s in group) / copies for group, case in zip(drawn, cases, strict=True)]
        return by_level(cases, means)

    texts = [problem.text for problem in problems]
    beams = beam_search(model, maker, texts, oracle_scorer(cases), temperature=TEMPERATURE, seed=seed)
    return {"single": share(4, TEMPERATURE), "greedy": share(1, 0.0), "oracle beam 4x4": beam_shares(cases, beams)}


def evaluate_verifier(
    generator: Qwen2ForCausalLM,
    verifier: Qwen2ForTokenClassification,
    maker: RowMaker,
    cases: Sequence[Case],
    seed: int = 0,
) -> dict[str, Any]:
    """Returns within-problem ranking, majority@16, best-of-16 and verifier-beam shares."""
    problems = [case.problem for case in cases]
    drawn = sample_solutions(generator, maker, problems, 16, seed, TEMPERATURE)
    flat: list[Solution] = [(s.problem, s.steps) for group in drawn for s in group]
    values = iter(score_solutions(verifier, maker, flat))
    scores = [[next(values) for _ in group] for group in drawn]
    pairs = [ranking(group, marks) for group, marks in zip(drawn, scores, strict=True)]
    ballots = [
        [cast(s.steps, m) for s, m in zip(g, marks, strict=True)] for g, marks in zip(drawn, scores, strict=True)
    ]

    def share(choose: Callable[..., str | None], **options: bool) -> Levels:
        chosen = [choose(ballot, **options) for ballot in ballots]
        return by_level(cases, [float(a == case.problem.answer) for a, case in zip(chosen, cases, strict=True)])

    fewer = cases[:BEAM_CASES]
    texts = [case.problem.text for case in fewer]
    beams = beam_search(
        generator, maker, texts, verifier_scorer(fewer, verifier, maker), temperature=TEMPERATURE, seed=seed
    )
    flat_pairs = [pair for group in pairs for pair in group]
    return {
        "ranking": round(sum((r > w) + 0.5 * (r == w) for r, w in flat_pairs) / max(1, len(flat_pairs)), 4),
        "ranking pairs": len(flat_pairs),
        "pass@16": by_level(
            cases, [float(any(v.answer == c.problem.answer for v in b)) for b, c in zip(ballots, cases, strict=True)]
        ),
        "majority@16": share(majority),
        "best-of-16 naive last": share(naive),
        "best-of-16 naive min": share(naive, lowest=True),
        "best-of-16 weighted last": share(weighted),
        "best-of-16 weighted min": share(weighted, lowest=True),
        "verifier beam 4x4": beam_shares(fewer, beams),
    }


def gates(figures: dict[str, Any]) -> dict[str, bool]:
    """Returns which of the pair's gates are met."""
    met = {
        "single sample within 30-50%": 0.3 <= figures["single"]["all"] <= 0.5,
        "oracle beam 4x4 at least 90%": figures["oracle beam 4x4"]["all"] >= 0.9,
    }
    if "ranking" in figures:
        best = max(figures[f"best-of-16 weighted {how}"]["all"] for how in ("last", "min"))
        met["ranking within a problem at least 0.9"] = figures["ranking"] >= 0.9
        met["best-of-16 weighted beats majority@16"] = best > figures["majority@16"]["all"]
    return met


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
