"""Accuracy of weights and inputs in FP8 (e4m3), emulated on a CPU before any kernel is written for it.

Each row of a weight of the layers' products has a scale of its own, the largest of the row being 448; embeddings, norms
and heads stay as they are. Where inputs are rounded too, each token's input has a scale of its own.

    W8A16    weights in FP8, inputs as they are: how a generator of few rows would compute
    W8A8     both in FP8: how a verifier would read many tokens

The first compares best-of-16 of the pair with both models' weights rounded, problem by problem; the scores of steps are
compared on the solutions that the unrounded pair wrote.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Annotated
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
import typer
from safetensors.torch import load_file, save_file

from espalier.experiments.demo import generator_path, verifier_path
from espalier.experiments.lab.bench.options import JsonPath
from espalier.experiments.lab.bench.report import Report
from espalier.experiments.runs.benchmarks import Problem, load_benchmark
from espalier.experiments.runs.statistics import paired_interval
from espalier.kernels import layers
from espalier.kernels.torch_backend import TorchBackend
from espalier.search.grading.answers import exact_match_key
from espalier.search.result import SearchResult
from espalier.search.solver import Scorer, Solver

LARGEST = 448.0
"""Of float8_e4m3fn."""


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Numbers as FP8 keeps them, float32 `[rows, width]`: each row by a scale of its own."""
    scale = x.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale


def write_rounded(checkpoint: Path, folder: Path) -> str:
    """A copy of a checkpoint's folder whose layers' products have rounded weights, in float32."""
    copytree(checkpoint, folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        products = {name: rounded(each) for name, each in tensors.items() if name.endswith("proj.weight")}
        save_file({name: products.get(name, each.float()) for name, each in tensors.items()}, file)
    return str(folder)


@contextmanager
def inputs_rounded() -> Iterator[None]:
    """Models that are loaded and run within it round the inputs of their layers' products."""

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(rounded(x), weight, bias)

    with (
        mock.patch.object(layers, "F", mock.Mock(wraps=F, linear=linear)),
        mock.patch("espalier.engine.models.decoder.choose_backend", return_value=TorchBackend()),
    ):
        yield


def solve(pair: Sequence[str], problems: Sequence[Problem], paths: int) -> list[SearchResult]:
    """Best-of-N of each problem by a generator and a verifier, with the same seeds whatever the models."""
    generator, verifier = pair
    with Solver(generator=generator, verifier=verifier, max_running=16) as solver:
        fields = {"algorithm": "best-of-n", "beam_width": paths, "seed": 5, "early_stop": "off"}
        return list(solver.solve_many([problem.problem for problem in problems], **fields))


def score(verifier: str, solved: Sequence[SearchResult]) -> np.ndarray:
    """The scores of all steps of the solutions of searches, one after another."""
    found = list[float]()
    with Scorer(verifier=verifier) as scorer:
        for result in solved:
            steps = [[step.text for step in candidate.steps] for candidate in result.candidates]
            scores = scorer.score(result.configuration.problem, steps) if steps else None
            found += [each or 0.0 for solution in (scores.solutions if scores else ()) for each in solution.step_scores]
    return np.array(found)


def rank_correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Spearman's, with mean ranks of equal scores."""

    def ranks(values: np.ndarray) -> np.ndarray:
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[inverse]

    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


def command(
    limit: Annotated[int, typer.Option(min=1, help="Problems of the demo benchmark.")] = 300,
    paths: Annotated[int, typer.Option("-N", min=1, help="Paths of each search.")] = 16,
    scored: Annotated[int, typer.Option(min=1, help="Problems whose solutions' steps are scored.")] = 100,
    json: JsonPath = None,
) -> None:
    """Emulate FP8 on the bundled pair: rank correlation of step scores, and accuracy of best-of-N."""
    report, problems = Report("FP8, emulated on the bundled pair", json), load_benchmark("demo", limit)
    pair = generator_path(), verifier_path()
    with TemporaryDirectory() as kept:
        fp8 = [write_rounded(each, Path(kept) / each.name) for each in pair]
        found = [solve(models, problems, paths) for models in (list(map(str, pair)), fp8)]
        keys = [exact_match_key(problem.answer) for problem in problems]
        right = [[exact_match_key(r.answer) == key for r, key in zip(each, keys, strict=True)] for each in found]
        lost, won = (sum(a and not b for a, b in zip(*each, strict=True)) for each in (right, right[::-1]))
        low, high = paired_interval(lost, won, len(problems))
        base = score(str(pair[1]), found[0][:scored])
        by_weights = rank_correlation(base, score(fp8[1], found[0][:scored]))
        with inputs_rounded():
            by_both = rank_correlation(base, score(fp8[1], found[0][:scored]))
    accuracies = [100 * sum(each) / len(problems) for each in right]
    gained = accuracies[1] - accuracies[0]
    rows = [
        {"what": f"accuracy % of best-of-{paths}", "unrounded": accuracies[0], "W8A16": accuracies[1]},
        {
            "what": "difference, paired 95%",
            "W8A16": gained,
            "low": 100 * low,
            "high": 100 * high,
        },
        {"what": f"rank correlation of {len(base)} step scores", "W8A16": by_weights, "W8A8": by_both},
    ]
    columns = ("what", "unrounded", "W8A16", "W8A8", "low", "high")
    report.finish([{name: row.get(name, "") for name in columns} for row in rows], {})
