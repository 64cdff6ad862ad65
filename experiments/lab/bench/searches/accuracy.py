"""Accuracy on the demo benchmark: each search with the same seed and problems, with 95% intervals."""

import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Annotated, Any

import typer

from espalier.experiments.cli.progress import share_progress
from espalier.experiments.lab.bench.options import JsonPath
from espalier.experiments.lab.bench.report import Report, Show, nothing_shown
from espalier.experiments.runs.benchmarks import load_benchmark
from espalier.experiments.runs.evaluate import Evaluation
from espalier.experiments.runs.folder import RunFolder
from espalier.experiments.runs.summary import Summary
from espalier.search.grading.math_verify import Grader
from espalier.search.request import AlgorithmName, SearchRequest
from espalier.search.run.load import load_orchestrator
from espalier.search.run.settings import RuntimeSettings

_ANY = SearchRequest("-")
CONTESTANTS = {
    "greedy": replace(_ANY, algorithm=AlgorithmName.GREEDY),
    "single sample": replace(_ANY, algorithm=AlgorithmName.MAJORITY, beam_width=1),
    "majority@16": replace(_ANY, algorithm=AlgorithmName.MAJORITY, beam_width=16),
    "best-of-16, weighted": replace(_ANY, algorithm=AlgorithmName.BEST_OF_N, beam_width=16),
    "best-of-64, weighted": replace(_ANY, algorithm=AlgorithmName.BEST_OF_N, beam_width=64),
    "beam N=4 M=4": replace(_ANY, algorithm=AlgorithmName.BEAM, beam_width=4, expansion=4),
    "beam N=16 M=4": replace(_ANY, algorithm=AlgorithmName.BEAM, beam_width=16, expansion=4),
}


REFERENCES = {
    "greedy": "greedy",
    "best-of-16, weighted": "best-of-16",
    "best-of-64, weighted": "best-of-64",
    "beam N=4 M=4": "beam 4x4",
}
"""Contestants that all others are compared with, and their column names."""


def run(
    limit: int, seed: int, out: Path, settings: RuntimeSettings | None = None, show: Show = nothing_shown
) -> tuple[list[dict[str, Any]], dict[str, list[bool]]]:
    """Evaluate every contestant on the first `limit` problems and store samples in `out`; running again resumes.

    Args:
        limit: number of problems of the demo benchmark.
        seed: seed of every search.
        out: folder for the samples.
        settings: engine and models; by default the bundled pair.
        show: gets the rows after each contestant, without the differences, which come last.

    Returns:
        One row per contestant, and whether it solved each problem, in order. Differences are in percentage points and
        paired by problem, with half the width of their 95% interval.
    """
    problems = load_benchmark("demo", limit)  # levels alternate, so any limit has the same mix
    orchestrator = load_orchestrator(settings or RuntimeSettings(max_running=32))
    rows: list[dict[str, Any]] = []
    right: dict[str, list[bool]] = {}
    progress = share_progress(len(problems) * len(CONTESTANTS), 0)
    with closing(orchestrator), Grader() as grader, progress as advance:
        for name, contestant in CONTESTANTS.items():
            request = replace(contestant, seed=seed)
            evaluation = Evaluation(
                orchestrator, problems, grader, "demo", on_sample=lambda sample: advance(sample.correct, 1)
            )
            folder = RunFolder(out / name.replace(",", "").replace(" ", "-"), evaluation.configuration(request))
            summary = evaluation.run(request, folder)
            rows.append(_row(name, summary))
            show(rows, {})
            correct = {sample.unique_id: sample.correct for sample in folder.samples_of(problems)}
            right[name] = [correct[problem.unique_id] for problem in problems]
    for row in rows:
        for reference, short in REFERENCES.items():
            pairs = zip(right[row["search"]], right[reference], strict=True)
            mean, half = mean_interval([100.0 * (mine - theirs) for mine, theirs in pairs])
            row |= {f"over {short}": mean, f"± {short}": half}
    return rows, right


def _row(name: str, summary: Summary) -> dict[str, Any]:
    return {
        "search": name,
        "accuracy %": 100 * summary.accuracy,
        "95% low": 100 * summary.low,
        "95% high": 100 * summary.high,
        "generated tokens": summary.generated_tokens,
        "verifier tokens": summary.verifier_tokens,
        "verifier computed / tree": summary.verifier_redundancy or 0.0,
        "blocks held / logical": summary.blocks_shared,
    }


def mean_interval(values: list[float]) -> tuple[float, float]:
    """Mean of independent values, and half the width of its 95% interval by the central limit theorem.

    Raises:
        ValueError: there are fewer than two values.
    """
    if len(values) < 2:
        raise ValueError("an interval needs at least two values")
    return fmean(values), NormalDist().inv_cdf(0.975) * stdev(values) / math.sqrt(len(values))


def command(
    limit: Annotated[int, typer.Option(min=1, max=500, help="Problems of the demo benchmark, levels mixed.")] = 500,
    seed: Annotated[int, typer.Option(help="Seed of all sampling.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the samples; running the command again resumes.")] = Path(
        "runs/accuracy"
    ),
    json_path: JsonPath = None,
) -> None:
    """Accuracy of each search on the demo benchmark, with 95% intervals."""
    report = Report(f"demo benchmark, {limit} problems, seed {seed}", json_path)
    report.finish(run(limit, seed, out, show=report.show)[0], {})
