"""Accuracy against compute: every algorithm on the demo benchmark, with several seeds and paired differences."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from espalier.experiments.cli.render import sample_progress
from espalier.experiments.evaluation.benchmarks import Problem, load_benchmark
from espalier.experiments.evaluation.evaluate import evaluate, run_configuration
from espalier.experiments.evaluation.run_folder import RunFolder
from espalier.experiments.evaluation.sample import Sample
from espalier.experiments.evaluation.statistics import mean_interval
from espalier.search.request import AlgorithmName, SearchRequest
from espalier.search.run.load import RuntimeSettings, load_orchestrator
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.voting.math_verify import Grader

CEILING = "pass@N"
"""Not an algorithm: whether any of best-of-N's paths is right."""
REFERENCE = AlgorithmName.BEST_OF_N
_EXPANSION = 4
_BY_STEP = (AlgorithmName.BEAM, AlgorithmName.DVTS, AlgorithmName.LOOKAHEAD, AlgorithmName.REBASE, AlgorithmName.AUTO)
_BY_PATH = (REFERENCE, AlgorithmName.MAJORITY, AlgorithmName.ADAPTIVE, AlgorithmName.PARTICLE)


def contestants(paths: int) -> dict[AlgorithmName, SearchRequest]:
    """A search by every algorithm that takes `paths` at a time.

    That is N independent paths or particles, or N*M candidates a step with M = 4. Adaptive sampling takes at most so
    many, a quarter of them at a time; Monte Carlo tree search walks down as many times and samples M steps in each.
    With one path there is greedy decoding and a single chain of thought.
    """
    if paths < _EXPANSION:
        algorithms = {name: SearchRequest("-", name) for name in (AlgorithmName.GREEDY, AlgorithmName.CHAIN)}
        return algorithms if paths == 1 else {}
    batch = max(1, paths // 4)
    by_path = {name: SearchRequest("-", name, beam_width=paths, expansion=batch) for name in _BY_PATH}
    by_step = {name: SearchRequest("-", name, beam_width=batch, expansion=_EXPANSION) for name in _BY_STEP}
    tree = SearchRequest("-", AlgorithmName.MCTS, expansion=_EXPANSION, simulations=paths)
    return {**by_path, **by_step, AlgorithmName.MCTS: tree}


def run(
    limit: int, seeds: list[int], paths: list[int], only: list[AlgorithmName], out: Path, budget: int | None = None
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Evaluate every algorithm, keeping samples in `out`; running again resumes.

    Args:
        limit: first problems of the demo benchmark, levels mixed.
        seeds: each problem is searched once with each.
        paths: see `contestants`.
        only: algorithms to run; empty for all.
        out: where samples are kept.
        budget: limit on the tokens that each search may generate.

    Returns:
        Rows with accuracy over all seeds, an interval over problems, tokens, and the paired difference to best-of-N of
        as many paths; and ratios `ALGORITHM@PATHS/best-of-n` of the accuracies, none where best-of-N solves nothing.
    """
    problems = load_benchmark("demo", limit)
    orchestrator = load_orchestrator(RuntimeSettings(max_running=32))
    cells = [(count, name, request) for count in paths for name, request in contestants(count).items()]
    cells = [cell for cell in cells if not only or cell[1] in only]
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    reference: dict[int, dict[str, float]] = {}
    progress = sample_progress(len(problems) * len(seeds) * len(cells), 0)
    with closing(orchestrator), Grader() as grader, progress as on_sample:
        for count, name, request in cells:
            samples = []
            for seed in seeds:
                seeded = replace(request, seed=seed, generator_budget=budget)
                configuration = run_configuration("demo", seeded, orchestrator)
                limited = "" if budget is None else f"-budget{budget}"
                folder = RunFolder(out / f"{name}-{count}{limited}-seed{seed}", configuration)
                samples += _samples(orchestrator, problems, seeded, grader, folder, on_sample)
            right = _by_problem(samples, [sample.correct for sample in samples])
            if name is REFERENCE:
                reference[count] = right
                rows.append(_ceiling(count, samples, grader))
            rows.append(_row(name, count, samples, right, reference.get(count)))
            if count in reference and (theirs := fmean(reference[count].values())):
                ratios[f"{name}@{count}/{REFERENCE}"] = fmean(right.values()) / theirs
    return rows, ratios


def _samples(
    orchestrator: Orchestrator,
    problems: list[Problem],
    request: SearchRequest,
    grader: Grader,
    folder: RunFolder,
    on_sample: Any,
) -> list[Sample]:
    evaluate(orchestrator, problems, request, grader, benchmark="demo", folder=folder, on_sample=on_sample)
    return folder.samples_of(problems)


def _by_problem(samples: list[Sample], right: list[bool]) -> dict[str, float]:
    """Share of the seeds with which each problem was solved."""
    found: dict[str, list[bool]] = {}
    for sample, correct in zip(samples, right, strict=True):
        found.setdefault(sample.unique_id, []).append(correct)
    return {problem: fmean(values) for problem, values in found.items()}


def _ceiling(count: int, samples: list[Sample], grader: Grader) -> dict[str, Any]:
    """Whether any path was right, each distinct answer graded once."""
    asked = {(s.gold, answer): grader.submit(s.gold, answer) for s in samples for answer in s.answers}
    right = {key: grader.resolve(future).correct for key, future in asked.items()}
    passed = [any(right[s.gold, answer] for answer in s.answers) for s in samples]
    return _row(CEILING, count, samples, _by_problem(samples, passed), None)


def _row(
    name: str, count: int, samples: list[Sample], right: dict[str, float], reference: dict[str, float] | None
) -> dict[str, Any]:
    accuracy, half = mean_interval(list(right.values()))
    row: dict[str, Any] = {
        "algorithm": str(name),
        "paths": count,
        "accuracy %": 100 * accuracy,
        "95% +-": 100 * half,
        "generated tokens": fmean(s.usage["generated_tokens"] for s in samples),
        "verifier tokens": fmean(s.usage["verifier_tokens"] for s in samples),
        "against best-of-n": None,
        "its 95% +-": None,
    }
    if reference and name != REFERENCE:
        difference, half = mean_interval([right[problem] - reference[problem] for problem in right])
        row |= {"against best-of-n": 100 * difference, "its 95% +-": 100 * half}
    return row
