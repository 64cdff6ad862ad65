"""Tokens computed for each token of the search tree, for both models."""

from dataclasses import replace
from typing import Any

from espalier.experiments.evaluation.benchmarks import load_benchmark
from espalier.search.request import AlgorithmName, GroupingName, SearchRequest
from espalier.search.run.load import RuntimeSettings, load_orchestrator

_ANY = SearchRequest("-")
SEARCHES = {
    "best-of-16": replace(_ANY, algorithm=AlgorithmName.BEST_OF_N, beam_width=16),
    "beam N=4 M=4": replace(_ANY, beam_width=4, expansion=4),
    "beam N=16 M=4": replace(_ANY, beam_width=16, expansion=4),
}


def run(problems: int, in_flight: int, seed: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Run each search on the first `problems` of the demo benchmark.

    Returns:
        Rows with tokens a problem, and ratios `redundancy@SEARCH/ROLE`: computed over those of the tree.
    """
    chosen = load_benchmark("demo", problems)
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for name, search in SEARCHES.items():
        orchestrator = load_orchestrator(RuntimeSettings(max_running=in_flight, grouping=GroupingName.SPELLING))
        for problem in chosen:
            orchestrator.submit(replace(search, problem=problem.problem, seed=seed))
        accounts = []
        while orchestrator.busy:
            accounts += [result.usage for result in orchestrator.step()]
        orchestrator.engine.check_drained()
        row: dict[str, Any] = {"search": name}
        for role in ("generator", "verifier"):
            computed = sum(getattr(account, f"{role}_tokens") for account in accounts)
            tree = sum(getattr(account, f"{role}_tree_tokens") for account in accounts)
            row |= {f"{role} computed": computed / problems, f"{role} tree": tree / problems}
            ratios[f"redundancy@{name}/{role}"] = computed / tree
        rows.append(row)
    return rows, ratios
