"""A verifier on the generator's own trunk, read while it decodes, beside one of the same weights as a second model."""

import json
import shutil
import statistics
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file, save_file

from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.hub import locate
from espalier.experiments.lab.bench.options import JsonPath
from espalier.experiments.lab.bench.report import Report, Show, nothing_shown
from espalier.experiments.runs.benchmarks import Problem, load_benchmark
from espalier.prm.scorers.trunk_head import ARCHITECTURE
from espalier.search.request import AlgorithmName, AnswerEquivalence, SearchRequest
from espalier.search.result import SearchResult
from espalier.search.run.load import load_orchestrator
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.settings import RuntimeSettings

_PAIRS = ("trunk head", "second model")


def run(
    limit: int, in_flight: int, repeats: int, show: Show = nothing_shown
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Search the same problems with both verifiers, in turn, `repeats` times with different seeds, after a warm-up.

    The head is random and in both verifiers the same: figures of work, not of accuracy. The second model is the
    generator's trunk with this head, which reads every step after its blank line; the trunk head is read at the state
    that the blank line is drawn from, so scores, and with them the trees, differ a little.

    Args:
        limit: number of problems of the demo benchmark.
        in_flight: searches running at once.
        repeats: counted repetitions.
        show: gets the figures that there are so far, whenever there are more.

    Returns:
        A row for each search and verifier with medians: problems a minute, and tokens that each model computes, blocks
        of both at the peak and bytes of the verifier's KV per token; and for each search the median of the paired
        ratios of problems a minute.
    """
    problems = load_benchmark("demo", limit)
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        verifiers = dict(zip(_PAIRS, _write_verifiers(work), strict=True))
        settings = RuntimeSettings(max_running=in_flight, answer_equivalence=AnswerEquivalence.EXACT_MATCH)
        contestants = {
            name: stack.enter_context(closing(load_orchestrator(replace(settings, verifier=str(folder)))))
            for name, folder in verifiers.items()
        }
        for algorithm, merge in ((a, m) for a in (AlgorithmName.BEAM, AlgorithmName.BEST_OF_N) for m in (True, False)):
            width = 4 if algorithm is AlgorithmName.BEAM else 16
            request = SearchRequest("-", algorithm, width, 4, merge_duplicates=merge)
            runs: dict[str, list[tuple[float, list[SearchResult]]]] = {name: [] for name in contestants}
            title, before = f"{algorithm}{'' if merge else ', unmerged'}", len(rows)
            for seed in range(repeats + 1):
                found = {
                    name: _search(orchestrator, problems, replace(request, seed=seed))
                    for name, orchestrator in contestants.items()
                }
                if not seed:  # the warm-up
                    continue
                for name, one in found.items():
                    runs[name].append(one)
                rows[before:] = [_row(title, name, contestants[name], some) for name, some in runs.items()]
                pairs = zip(*(runs[name] for name in _PAIRS), strict=True)
                ratios[f"{title}: trunk head/second model"] = statistics.median(one[0] / two[0] for one, two in pairs)
                show(rows, ratios)
    return rows, ratios


def _search(
    orchestrator: Orchestrator, problems: list[Problem], request: SearchRequest
) -> tuple[float, list[SearchResult]]:
    """Problems a minute, and the results."""
    start = time.perf_counter()
    for problem in problems:
        orchestrator.submit(replace(request, problem=problem.problem))
    ended: list[SearchResult] = []
    while orchestrator.busy:
        ended += [each for each in orchestrator.step() if isinstance(each, SearchResult)]
    orchestrator.engine.check_drained()
    return 60 * len(problems) / (time.perf_counter() - start), ended


def _row(
    title: str, verifier: str, orchestrator: Orchestrator, runs: list[tuple[float, list[SearchResult]]]
) -> dict[str, Any]:
    results = [result for _, some in runs for result in some]
    scored = sum(node.score is not None for result in results for node in result.nodes)

    def mean(name: str) -> float:
        return sum(getattr(result.usage, name) for result in results) / len(results)

    stats = orchestrator.engine.stats()
    return {
        "search": title,
        "verifier": verifier,
        "problems/min": statistics.median(rate for rate, _ in runs),
        "generator tokens": mean("generator_tokens"),
        "verifier tokens": mean("verifier_tokens"),
        "verifier tokens a step": mean("verifier_tokens") * len(results) / scored,
        "KV blocks at the peak": mean("physical_blocks"),
        "verifier KV bytes a token": stats["verifier"].bytes_per_token if "verifier" in stats else 0,
    }


def _write_verifiers(work: Path) -> tuple[Path, Path]:
    """A random head for the demo generator's trunk; and that trunk with the head, as a token classifier."""
    generator = locate("demo-generator")
    config = json.loads((generator / "config.json").read_text(encoding="utf-8"))
    torch.manual_seed(0)
    weight = torch.randn(1, config["hidden_size"]) / config["hidden_size"] ** 0.5
    head, second = work / "head", work / "second"
    head.mkdir()
    trunk = {"name": "demo-generator", "digest": Checkpoint(generator).digest()}
    _write_json(head / "config.json", {"architectures": [ARCHITECTURE], "model_type": "trunk-head", "trunk": trunk})
    save_file({"score.0.weight": weight, "score.0.bias": torch.zeros(1)}, head / "model.safetensors")
    shutil.copytree(generator, second)
    prm = {"family": "token-classifier", "prompt": "chat", "step_separator": "\n\n", "score": "p1"}
    _write_json(second / "config.json", config | {"architectures": ["Qwen2ForTokenClassification"], "prm": prm})
    tensors = load_file(second / "model.safetensors")
    labels = torch.cat((torch.zeros_like(weight), weight)).to(next(iter(tensors.values())).dtype)
    save_file(tensors | {"score.weight": labels, "score.bias": torch.zeros(2)}, second / "model.safetensors")
    return head, second


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")


def command(
    limit: Annotated[int, typer.Option(min=1, max=500, help="Problems of the demo benchmark, levels mixed.")] = 64,
    in_flight: Annotated[int, typer.Option(min=1, help="Searches running at once.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Counted repetitions.")] = 5,
    json_path: JsonPath = None,
) -> None:
    """Problems a minute of a verifier on the generator's trunk, beside the same trunk as a second model."""
    title = f"verifier on the generator's trunk, demo benchmark, {limit} problems, {in_flight} in flight"
    report = Report(title, json_path)
    report.finish(*run(limit, in_flight, repeats, report.show))
