"""Savings of ending a decided search, and whether its answers stay the same."""

import time
from contextlib import closing
from dataclasses import replace
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import typer

from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.experiments.lab.bench.options import JsonPath
from espalier.experiments.lab.bench.report import Report, Show, nothing_shown
from espalier.experiments.runs.benchmarks import Problem, load_benchmark
from espalier.search.request import AlgorithmName, AnswerEquivalence, EarlyStop, SearchRequest, Vote
from espalier.search.result import SearchResult
from espalier.search.run.executor import ResolvedRequest
from espalier.search.run.load import load_orchestrator
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.settings import RuntimeSettings
from espalier.search.voting.vote import select

CONTESTANTS = (
    (AlgorithmName.MAJORITY, Vote.MAJORITY),
    (AlgorithmName.BEST_OF_N, Vote.WEIGHTED),
    (AlgorithmName.BEST_OF_N, Vote.MAJORITY),
    (AlgorithmName.BEST_OF_N, Vote.NAIVE),
)


class _Run(NamedTuple):
    results: list[SearchResult]
    seconds: float

    def mean(self, what: str) -> float:
        return fmean(getattr(result.usage, what) for result in self.results)


def run(
    limit: int, paths: int, seed: int, in_flight: int, merge_duplicates: bool, show: Show = nothing_shown
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Search the same problems with every vote, without and with each kind of early stop.

    Answers are compared by exact match, which suffices for the demo benchmark's whole numbers. Without early stop, the
    algorithm's paths do not depend on the vote, so it runs once and each vote selects from its paths.

    Args:
        limit: number of problems of the demo benchmark.
        paths: N.
        seed: seed of every search.
        in_flight: searches running at once.
        merge_duplicates: see `SearchRequest`.
        show: gets the figures that there are so far, whenever there are more.

    Returns:
        A row for each search, vote and early stop. `same` is the number of problems with the same answer, letter for
        letter; `stopped` those that ended early. Tokens are means over problems without the prompt, `-%` is the share
        saved: `generated` are those that the generator decodes, equal samples once, `sampled` counts them for each
        sample, `verified` are those that the verifier reads. `seconds` are those of a search from its start to its
        end, `a minute` are problems. And the ratios of generated tokens with and without, `ALGORITHM, VOTE, STOP`.
    """
    problems = load_benchmark("demo", limit)  # levels alternate, so any limit has the same mix
    settings = RuntimeSettings(max_running=in_flight, answer_equivalence=AnswerEquivalence.EXACT_MATCH)
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    whole: dict[AlgorithmName, _Run] = {}
    with closing(load_orchestrator(settings)) as orchestrator:
        checked = [orchestrator.check(SearchRequest(problem.problem)) for problem in problems]
        resolved = [each for each in checked if isinstance(each, ResolvedRequest)]
        prompt = {
            GENERATOR: fmean(len(each.generator_prompt) for each in resolved),
            VERIFIER: fmean(len(each.verifier_prompt) for each in resolved),
        }
        for algorithm, vote in CONTESTANTS:
            request = SearchRequest("-", algorithm, paths, vote=vote, seed=seed, merge_duplicates=merge_duplicates)
            if algorithm not in whole:
                whole[algorithm] = _search(orchestrator, problems, replace(request, early_stop=EarlyStop.OFF))
            reference = whole[algorithm]
            answers = [_answer(result, vote) for result in reference.results]
            before = _tokens(reference, prompt)
            for stop in EarlyStop:
                found, same = reference, len(answers)
                if stop is not EarlyStop.OFF:
                    found = _search(orchestrator, problems, replace(request, early_stop=stop))
                    same = sum(a == result.answer for a, result in zip(answers, found.results, strict=True))
                tokens = _tokens(found, prompt)
                row: dict[str, Any] = {"search": f"{algorithm}, {vote}", "stop": str(stop)}
                row |= {"same": same, "stopped": sum(result.usage.stopped_paths > 0 for result in found.results)}
                for name, count in tokens.items():
                    row |= {name: count, f"{name} -%": 100 * (1 - count / before[name]) if before[name] else None}
                rows.append(row | {"seconds": found.mean("seconds"), "a minute": 60 * len(problems) / found.seconds})
                ratios[f"{algorithm}, {vote}, {stop}"] = tokens["generated"] / before["generated"]
                show(rows, ratios)
    return rows, ratios


def _tokens(run: _Run, prompt: dict[str, float]) -> dict[str, float]:
    """Tokens per problem without the prompt."""
    verified = run.mean("verifier_tree_tokens")
    return {
        "generated": run.mean("generator_tree_tokens") - prompt[GENERATOR],
        "sampled": run.mean("generated_tokens"),
        "verified": verified and verified - prompt[VERIFIER],
    }


def _search(orchestrator: Orchestrator, problems: list[Problem], request: SearchRequest) -> _Run:
    start = time.perf_counter()
    order = [orchestrator.submit(replace(request, problem=problem.problem)) for problem in problems]
    ended: dict[str, SearchResult] = {}
    while orchestrator.busy:
        ended |= {result.search_id: result for result in orchestrator.step() if isinstance(result, SearchResult)}
    orchestrator.engine.check_drained()
    return _Run([ended[search_id] for search_id in order], time.perf_counter() - start)


def _answer(result: SearchResult, vote: Vote) -> str:
    best = select(result.candidates, vote).best
    return best.answer if best else ""


def command(
    limit: Annotated[int, typer.Option(min=1, max=500, help="Problems of the demo benchmark, levels mixed.")] = 300,
    paths: Annotated[int, typer.Option("-N", min=1, max=256, help="Paths of each search.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all sampling.")] = 0,
    in_flight: Annotated[int, typer.Option(min=1, help="Searches running at once.")] = 16,
    merge_duplicates: Annotated[bool, typer.Option(help="Compute equal samples of a step once.")] = True,
    json_path: JsonPath = None,
) -> None:
    """Tokens that ending a decided search saves, for every vote, and whether the answers are the same."""
    merged = "" if merge_duplicates else ", unmerged"
    title = f"early stop, demo benchmark, {limit} problems, N = {paths}, {in_flight} in flight{merged}"
    report = Report(title, json_path)
    report.finish(*run(limit, paths, seed, in_flight, merge_duplicates, report.show))
