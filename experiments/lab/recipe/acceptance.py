"""Stage `evaluate`: what the pair must reach on the benchmark, and `training.json`, the record of its making."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from espalier.experiments.demo import benchmark_path
from espalier.experiments.demo.problems import Problem
from espalier.experiments.lab.bench.searches.accuracy import CONTESTANTS, run
from espalier.experiments.lab.recipe.judge import figures, judged_steps
from espalier.experiments.lab.recipe.networks import GENERATOR, TEMPERATURE, VERIFIER
from espalier.experiments.lab.recipe.oracle import beam_search, make_engine, numbers_of
from espalier.experiments.lab.recipe.samples import read_samples, samples_path
from espalier.experiments.lab.recipe.train_generator import PHASES
from espalier.experiments.lab.recipe.train_thinking import FOLDER as THINKING_GENERATOR
from espalier.experiments.lab.recipe.train_thinking import PHASES as THINKING_PHASES
from espalier.experiments.lab.recipe.train_verifier import STAGES
from espalier.experiments.runs.statistics import wilson_interval
from espalier.search.request import SearchRequest
from espalier.search.result import SearchResult
from espalier.search.run.load import load_orchestrator
from espalier.search.run.settings import RuntimeSettings


def read_problems(limit: int) -> list[Problem]:
    """Returns the first `limit` problems of the benchmark with their numbers; levels take turns in it."""
    records = [json.loads(line) for line in benchmark_path().read_text(encoding="utf-8").splitlines()[:limit]]
    return [Problem(record["problem"], record["subject"], *numbers_of(record["solution"])) for record in records]


def _search(settings: RuntimeSettings, problems: Sequence[Problem], request: SearchRequest) -> list[SearchResult]:
    """Returns one result for each problem, in their order."""
    orchestrator = load_orchestrator(settings)
    order = [orchestrator.submit(replace(request, problem=problem.text)) for problem in problems]
    results: dict[str, SearchResult] = {}
    while orchestrator.busy:
        results |= {result.search_id: result for result in orchestrator.step() if isinstance(result, SearchResult)}
    orchestrator.close()
    return [results[search_id] for search_id in order]


def evaluate_pair(work_dir: Path, pair: Path, limit: int, seed: int) -> dict[str, Any]:
    """Returns what each search solves, what it would with a perfect verifier, and how well the verifier judges.

    Args:
        work_dir: Keeps the samples; the same call again goes on.
        pair: Folder of the exported pair.
        limit: Problems of the benchmark.
        seed: Of all sampling.
    """
    settings = RuntimeSettings(str(pair / GENERATOR), str(pair / VERIFIER), max_running=32)
    problems = read_problems(limit)
    rows, right = run(limit, seed, work_dir / "runs", settings)
    oracle = beam_search(make_engine(pair), problems, beam_width=16, expansion=4, seed=seed)
    solved = sum(beam.solved for beam in oracle)
    searched = _search(settings, problems, replace(CONTESTANTS["beam N=4 M=4"], seed=seed))
    return {
        "problems": limit,
        "searches": rows,
        "solved by beam 4x4 alone": [
            index
            for index, (greedy, majority, beam) in enumerate(
                zip(right["greedy"], right["majority@16"], right["beam N=4 M=4"], strict=True)
            )
            if beam and not greedy and not majority
        ],
        "beam N=16 M=4 with a perfect verifier": [solved / limit, *wilson_interval(solved, limit)],
        "verifier": figures(judged_steps(problems, searched)),
    }


def gates(found: dict[str, Any]) -> dict[str, bool]:
    """Returns which of the pair's gates are met."""
    rows = {row["search"]: row for row in found["searches"]}
    greedy, beam, wide = rows["greedy"], rows["beam N=4 M=4"], rows["beam N=16 M=4"]
    return {
        "greedy 35% to 60%": 35 <= greedy["accuracy %"] <= 60,
        "a single sample below greedy": rows["single sample"]["accuracy %"] < greedy["accuracy %"],
        "beam 4x4 at least 25 points over greedy": beam["over greedy"] >= 25,
        "beam 4x4 above best-of-16": beam["over best-of-16"] > 0,
        "beam 16x4 above beam 4x4": wide["over beam 4x4"] > 0,
        "beam 16x4 with a perfect verifier at least 95%": found["beam N=16 M=4 with a perfect verifier"][0] >= 0.95,
    }


COMMANDS = ("problems", "generator", "sample", "trunk", "verifier", "evaluate", "thinking")


def digests(directory: Path) -> dict[str, str]:
    """Returns the sha256 of every file in a directory."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def write_summary(work_dir: Path, seed: int, pair: Path) -> None:
    """Writes `training.json`: commands, seed, schedules, tokens, minutes, final losses, gate figures and digests.

    What was not done in this work directory keeps the record it has.
    """
    path = pair / "training.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    names = (*PHASES, *STAGES, *THINKING_PHASES)
    stages = {name: stage for name, stage in before.get("stages", {}).items() if name in names}
    for name in names:
        progress_path = work_dir / f"{name}.json"
        if not progress_path.exists():
            continue
        progress = json.loads(progress_path.read_text(encoding="utf-8"))
        stages[name] = {
            "steps": progress["step"],
            "tokens": progress["tokens"],
            "minutes": round(progress["seconds"] / 60, 1),
            "final loss": round(progress["loss"], 4),
            "final accuracy at labelled positions": round(progress["accuracy"], 4),
            "schedule": progress["schedule"],
        }
    figures_path = work_dir / "figures.json"
    summary = {
        "commands": [f"python -m espalier.experiments.lab recipe {command}" for command in COMMANDS],
        "seed": seed,
        "temperature": TEMPERATURE,
        "hardware": "2 CPU cores, float32",
        "sampled solutions": len(read_samples(samples_path(work_dir))) or before.get("sampled solutions", 0),
        "stages": stages,
        "figures": json.loads(figures_path.read_text(encoding="utf-8"))
        if figures_path.exists()
        else before.get("figures"),
        "sha256": {
            "benchmark.jsonl": hashlib.sha256(benchmark_path().read_bytes()).hexdigest(),
            **{
                f"{name}/{file}": digest
                for name in (GENERATOR, VERIFIER, THINKING_GENERATOR)
                for file, digest in digests(pair / name).items()
            },
        },
    }
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
