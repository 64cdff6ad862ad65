"""Stage `evaluate`: what the exported pair must reach on the benchmark, by the searches it is made for."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from espalier.experiments.bench.accuracy import CONTESTANTS, run
from espalier.experiments.demo import benchmark_path
from espalier.experiments.demo.export import GENERATOR, VERIFIER
from espalier.experiments.demo.judge import figures, judged_steps
from espalier.experiments.demo.oracle import numbers_of
from espalier.experiments.demo.oracle_beam import beam_search, make_engine
from espalier.experiments.demo.problems import Problem
from espalier.experiments.evaluation.statistics import wilson_interval
from espalier.search.request import SearchRequest
from espalier.search.result import SearchResult
from espalier.search.run.load import RuntimeSettings, load_orchestrator


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
        results |= {result.search_id: result for result in orchestrator.step()}
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
