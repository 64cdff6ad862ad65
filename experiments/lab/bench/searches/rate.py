"""Search throughput in problems/min, some searches at once, against search-and-learn on transformers and vLLM."""

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import typer

from espalier.engine.models.options import Quantization
from espalier.experiments.cli.options import parse_int_list, parse_list
from espalier.experiments.lab.bench.baselines.search_and_learn import Peer
from espalier.experiments.lab.bench.options import JsonPath, SearchAndLearnFolder, VllmPython, read_quantizations
from espalier.experiments.lab.bench.report import Report, Show, nothing_shown
from espalier.experiments.lab.bench.searches.peers import GENERATOR, TITLES, VERIFIER, running_peers
from espalier.experiments.runs.benchmarks import Problem, load_benchmark
from espalier.experiments.runs.statistics import paired_interval, wilson_interval
from espalier.search.grading.answers import canonical
from espalier.search.request import AlgorithmName, AnswerEquivalence, SearchRequest
from espalier.search.run.load import load_orchestrator
from espalier.search.run.settings import RuntimeSettings

IN_FLIGHT = (1, 8, 32)
_WARM_UP_PROBLEMS = 32


@dataclass(frozen=True, slots=True)
class _Run:
    """Result of one contestant in one repetition: problems/min, correctness per problem, and tokens per problem."""

    rate: float
    right: list[bool]
    generated_tokens: float
    verifier_tokens: float


@dataclass(frozen=True, slots=True)
class _Setup:
    """Espalier as a contestant: with or without merging equal samples, at a precision, with so many in flight."""

    merge: bool
    quantization: Quantization
    in_flight: int

    def named(self, algorithm: AlgorithmName) -> str:
        """The contestant's name, without its searches in flight."""
        parts = algorithm, "" if self.merge else "unmerged", "" if self.quantization == "none" else self.quantization
        return ", ".join(part for part in parts if part)


_Ours = dict[_Setup, list[_Run]]
_Theirs = dict[str, list[_Run]]


def run(
    algorithms: Sequence[AlgorithmName],
    beam_width: int,
    expansion: int,
    problems: int,
    peer_problems: int,
    repeats: int,
    peers: Mapping[str, Peer],
    quantizations: Sequence[Quantization] = (),
    in_flight: Sequence[int] = (),
    show: Show = nothing_shown,
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Search the same problems with every contestant, in turn, `repeats` times with different seeds.

    Every algorithm samples N*M candidates at a time. Espalier runs with and without merging equal samples; the latter
    corresponds to a model whose steps rarely repeat. It runs in float32 and, for each of `quantizations`, with both
    models' weights kept so; with each number of searches of `in_flight`, by default `IN_FLIGHT`. The peers, by the
    names of `TITLES`, are slower and search only the first `peer_problems` problems in each repetition; vLLM samples
    from one seed throughout. Answers are compared by exact match, which suffices for the demo benchmark's whole
    numbers. `show` gets the figures so far after each repetition.

    Returns:
        Rows with medians over repetitions, and the accuracy over all repetitions with its interval, on the problems
        that every contestant searches, and its difference to the last peer's, paired by problem, with its interval; and
        ratios, each the median over pairs: `beam@F/1` for F in flight over one at a time, `beam@F/PEER` over each peer,
        and the same for `beam, unmerged@F`, `beam, int8@F` and the other algorithms.
    """
    chosen = load_benchmark("demo", problems)  # levels alternate, so any share has the same mix
    for_peer = chosen[:peer_problems]
    threads = torch.get_num_threads()
    kinds = (Quantization.NONE, *quantizations)
    setups = [_Setup(*each) for each in itertools.product((True, False), kinds, in_flight or IN_FLIGHT)]
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for algorithm in algorithms:
        width = beam_width * expansion if algorithm is AlgorithmName.BEST_OF_N else beam_width
        request = SearchRequest("-", algorithm, beam_width=width, expansion=expansion)
        ours: _Ours = {setup: [] for setup in setups}
        theirs: _Theirs = {name: [] for name in peers}
        before = len(rows)
        for repeat in range(repeats + 1):
            most = len(chosen) if repeat else _WARM_UP_PROBLEMS
            for setup, runs in ours.items():
                runs.append(_ours(chosen[:most], setup, replace(request, seed=repeat)))
            torch.set_num_threads(threads)  # the engine sets torch to one thread and has its own
            for name, runs in theirs.items():
                runs.append(_theirs(peers[name], for_peer[:most], algorithm, beam_width, expansion, repeat))
            if not repeat:  # the warm-up
                for runs in (*ours.values(), *theirs.values()):
                    runs.clear()
                continue
            rows[before:] = _rows(algorithm, ours, theirs, len(for_peer))
            ratios |= _ratios(algorithm, ours, theirs)
            show(rows, ratios)
    return rows, ratios


def _rows(algorithm: AlgorithmName, ours: _Ours, theirs: _Theirs, judged: int) -> list[dict[str, Any]]:
    own = {f"espalier {setup.named(algorithm)}, {setup.in_flight} in flight": runs for setup, runs in ours.items()}
    peers = {TITLES[peer].format(algorithm): runs for peer, runs in theirs.items()}
    beside = list(theirs.values())[-1]
    return [_row(name, runs, judged, beside) for name, runs in (own | peers).items()]


def _ratios(algorithm: AlgorithmName, ours: _Ours, theirs: _Theirs) -> dict[str, float]:
    ratios = {}
    first = min(setup.in_flight for setup in ours)
    for setup, runs in ours.items():
        name, count = setup.named(algorithm), setup.in_flight
        if count != first:
            ratios[f"{name}@{count}/{first}"] = _ratio(runs, ours[replace(setup, in_flight=first)])
        for peer, of_peer in theirs.items():
            ratios[f"{name}@{count}/{peer}"] = _ratio(runs, of_peer)
    return ratios


def _ours(problems: list[Problem], setup: _Setup, request: SearchRequest) -> _Run:
    settings = RuntimeSettings(
        GENERATOR,
        VERIFIER,
        max_running=setup.in_flight,
        generator_quantization=setup.quantization,
        verifier_quantization=setup.quantization,
        answer_equivalence=AnswerEquivalence.EXACT_MATCH,
    )
    orchestrator = load_orchestrator(settings)
    request = replace(request, merge_duplicates=setup.merge)
    gold = {}
    for problem in problems:
        gold[orchestrator.submit(replace(request, problem=problem.problem))] = problem.answer
    ended = {}
    start = time.perf_counter()
    while orchestrator.busy:
        ended |= {result.search_id: result for result in orchestrator.step()}
    seconds = time.perf_counter() - start
    orchestrator.engine.check_drained()
    count = len(problems)
    return _Run(
        60 * count / seconds,
        [canonical(ended[search_id].answer) == canonical(answer) for search_id, answer in gold.items()],
        sum(result.usage.generated_tokens for result in ended.values()) / count,
        sum(result.usage.verifier_tokens for result in ended.values()) / count,
    )


def _theirs(
    peer: Peer,
    problems: list[Problem],
    algorithm: AlgorithmName,
    beam_width: int,
    expansion: int,
    seed: int,
) -> _Run:
    torch.manual_seed(seed)
    peer.generated_tokens = peer.verifier_tokens = 0
    start = time.perf_counter()
    answers = peer.solve_all([p.problem for p in problems], algorithm, beam_width * expansion, expansion)
    seconds = time.perf_counter() - start
    count = len(problems)
    right = [canonical(a) == canonical(p.answer) for a, p in zip(answers, problems, strict=True)]
    return _Run(60 * count / seconds, right, peer.generated_tokens / count, peer.verifier_tokens / count)


def _row(name: str, runs: list[_Run], judged: int, beside: list[_Run]) -> dict[str, Any]:
    right, theirs = ([correct for run in of for correct in run.right[:judged]] for of in (runs, beside))
    low, high = wilson_interval(sum(right), len(right))
    lost, won = (sum(a > b for a, b in zip(*pair, strict=True)) for pair in ((theirs, right), (right, theirs)))
    at_least, at_most = paired_interval(lost, won, len(right))
    return {
        "contestant": name,
        "problems/min": statistics.median(r.rate for r in runs),
        "accuracy %": 100 * sum(right) / len(right),
        "95% low": 100 * low,
        "95% high": 100 * high,
        "minus last peer": 100 * (won - lost) / len(right),
        "minus, low": 100 * at_least,
        "minus, high": 100 * at_most,
        "generated tokens": statistics.median(r.generated_tokens for r in runs),
        "verifier tokens": statistics.median(r.verifier_tokens for r in runs),
    }


def _ratio(ours: list[_Run], theirs: list[_Run]) -> float:
    return statistics.median(a.rate / b.rate for a, b in zip(ours, theirs, strict=True))


def command(
    beam_width: Annotated[int, typer.Option("-N", help="Beam width N.")] = 4,
    expansion: Annotated[int, typer.Option("-M", help="Expansion M.")] = 4,
    algorithms: Annotated[str, typer.Option(help="Comma-separated list of beam, dvts and best-of-n.")] = "beam",
    problems: Annotated[int, typer.Option(min=1, max=500, help="Problems in each run.")] = 64,
    peer_problems: Annotated[int, typer.Option(min=1, help="Problems that the baseline solves in each run.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Counted repetitions.")] = 5,
    in_flight: Annotated[str | None, typer.Option(help="Searches at once; default: 1,8,32.")] = None,
    quantization: Annotated[
        str, typer.Option(help="Take part with both models quantised, too: int8, int4 or both.")
    ] = "",
    peers: Annotated[
        str,
        typer.Option(
            help="Comma-separated list of transformers, vllm, original, original-int8; default: all that can run."
        ),
    ] = "",
    search_and_learn: SearchAndLearnFolder = None,
    vllm_python: VllmPython = None,
    json_path: JsonPath = None,
) -> None:
    """Searches in problems/min, 1, 8 and 32 at once, compared with search-and-learn on transformers and on vLLM."""
    chosen = [AlgorithmName(name) for name in algorithms.split(",") if name in ("beam", "dvts", "best-of-n")]
    if len(chosen) != len(algorithms.split(",")):
        raise typer.BadParameter(
            "must be a comma-separated list of beam, dvts and best-of-n", param_hint="--algorithms"
        )
    kinds, flights = read_quantizations(quantization), parse_int_list(in_flight, "--in-flight") if in_flight else ()
    only = parse_list(peers or None, "--peers")
    if unknown := set(only) - TITLES.keys():
        raise typer.BadParameter(f"{min(unknown)!r} is not one of {', '.join(TITLES)}", param_hint="--peers")
    counts = problems, min(peer_problems, problems), repeats
    with running_peers(vllm_python, search_and_learn, only, beam_width * expansion) as (running, remarks):
        title = ", ".join([algorithms, f"N={beam_width} M={expansion}", f"{problems} problems", *remarks])
        report = Report(title, json_path)
        found = run(chosen, beam_width, expansion, *counts, running, kinds, flights, report.show)
    report.finish(*found)
