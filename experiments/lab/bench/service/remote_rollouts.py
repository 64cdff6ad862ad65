"""Trees of solutions in sampled tokens/s by a server, compared with the same trees in one process."""

import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from espalier.engine.errors import EspalierError
from espalier.experiments.lab.bench.options import JsonPath
from espalier.experiments.lab.bench.report import Report, Show, nothing_shown
from espalier.experiments.lab.bench.service.server_process import serving
from espalier.experiments.runs.benchmarks import load_benchmark
from espalier.experiments.verifier_training.rollouts import RemoteSampler, RolloutSampler
from espalier.experiments.verifier_training.tree_file import TreeRecord
from espalier.search.client import SearchClient
from espalier.search.grading.math_verify import Grader
from espalier.search.rollout import RolloutSettings
from espalier.search.run.load import load_generator_alone
from espalier.search.run.settings import RuntimeSettings

_LOCAL, _SERVER = "one process", "gRPC"


def run(
    problems: int,
    in_flight: int,
    solutions: int,
    repeats: int,
    show: Show = nothing_shown,
    generator: str = "demo-generator",
    max_tokens: int = 2048,
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Sample the trees of `problems` both ways in turn, `in_flight` at once, `solutions` in each.

    A solution has at most `max_tokens`. Each turn has problems of its own: one process would find the prompts of an
    earlier turn in its prefix cache, which calls to a server without a login do not share.

    Returns:
        Rows with median sampled tokens/s of the trees, and processor time in milliseconds a tree, of this process and
        of the server; and the median ratio of pairs, in tokens/s.

    Raises:
        EspalierError: the trees of the two ways differ, or there are too few problems.
    """
    turns = repeats + 1  # the first is the warm-up
    found = load_benchmark("demo", problems * turns)
    if len(found) < problems * turns:
        raise EspalierError(f"{turns} turns of {problems} problems are more than the {len(found)} that there are")
    engine, loaded = load_generator_alone(RuntimeSettings(generator=generator))
    with (
        serving("--generator", generator, "--max-searches", str(in_flight)) as server,
        SearchClient(server.address) as client,
        Grader() as grader,
    ):

        def sampler(way: str, seed: int) -> RemoteSampler | RolloutSampler:
            settings = RolloutSettings(solutions=solutions, max_tokens=max_tokens, seed=seed)
            if way == _SERVER:
                return RemoteSampler(client, settings, grader, in_flight)
            return RolloutSampler(engine, loaded, settings, grader, in_flight)

        rates: dict[str, list[float]] = {_LOCAL: [], _SERVER: []}
        spent: dict[str, list[tuple[float, float]]] = {_LOCAL: [], _SERVER: []}
        rows, ratios = list[dict[str, Any]](), dict[str, float]()
        for turn in range(turns):
            trees, asked = {}, found[turn * problems : (turn + 1) * problems]
            for way in (_LOCAL, _SERVER) if turn % 2 else (_SERVER, _LOCAL):
                begun, own, servers = time.perf_counter(), time.process_time(), server.cpu_seconds()
                trees[way] = {tree.problem_id: tree for tree in sampler(way, turn).sample(asked)}
                if turn:
                    seconds = time.perf_counter() - begun
                    rates[way].append(_tokens(trees[way].values()) / seconds)
                    spent[way].append((time.process_time() - own, server.cpu_seconds() - servers))
            if trees[_LOCAL] != trees[_SERVER]:
                raise EspalierError("the server's trees are not those of one process")
            if turn:
                rows = [_row(way, rates[way], spent[way], problems) for way in rates]
                pairs = zip(rates[_SERVER], rates[_LOCAL], strict=True)
                ratios[f"{_SERVER}/{_LOCAL}"] = statistics.median(one / two for one, two in pairs)
                show(rows, ratios)
    return rows, ratios


def _tokens(trees: Iterable[TreeRecord]) -> int:
    return sum(len(step.token_ids) for tree in trees for step in tree.steps)


def _row(way: str, rates: list[float], spent: list[tuple[float, float]], problems: int) -> dict[str, Any]:
    here, there = (1000 * statistics.median(times) / problems for times in zip(*spent, strict=True))
    return {
        "way": way,
        "tokens/s": statistics.median(rates),
        "this process, CPU ms a tree": here,
        "server, CPU ms a tree": there,
    }


def command(
    problems: Annotated[int, typer.Option(min=1, max=500, help="Trees in each turn, of problems of its own.")] = 80,
    in_flight: Annotated[int, typer.Option(min=1, help="Trees at once.")] = 32,
    solutions: Annotated[int, typer.Option(min=1, help="Solutions of each problem.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Counted pairs of turns.")] = 5,
    generator: Annotated[str, typer.Option(help="As --generator of `espalier serve`.")] = "demo-generator",
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of a solution.")] = 2048,
    json_path: JsonPath = None,
) -> None:
    """Trees of solutions in tokens/s by a server, compared with one process; they must be the same."""
    title = f"trees of {solutions} solutions, {in_flight} at once, {Path(generator).name}"
    report = Report(title, json_path)
    report.finish(*run(problems, in_flight, solutions, repeats, report.show, generator, max_tokens))
