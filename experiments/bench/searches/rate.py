"""Search throughput in problems/min: 1, 8 and 32 at once, against search-and-learn on transformers and vLLM."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from espalier.engine.models.hub import locate
from espalier.experiments.bench.baselines.search_and_learn import SearchAndLearn
from espalier.experiments.bench.baselines.vllm_process import VllmProcess, VllmSettings
from espalier.experiments.bench.report import Show, nothing_shown
from espalier.experiments.evaluation.benchmarks import Problem, load_benchmark
from espalier.experiments.evaluation.statistics import wilson_interval
from espalier.search.request import AlgorithmName, AnswerEquivalence, SearchRequest
from espalier.search.run.load import RuntimeSettings, load_orchestrator
from espalier.search.voting.answers import canonical

IN_FLIGHT = (1, 8, 32)
GENERATOR, VERIFIER = "demo-generator", "demo-verifier"
_TITLES = {"transformers": "transformers", "vllm": "vLLM"}


@dataclass(frozen=True, slots=True)
class _Run:
    """Result of one contestant in one repetition: problems/min, correctness per problem, and tokens per problem."""

    rate: float
    right: list[bool]
    generated_tokens: float
    verifier_tokens: float


_Ours = dict[tuple[bool, int], list[_Run]]
"""Espalier's runs: whether equal samples are merged, and searches in flight."""
_Theirs = dict[str, list[_Run]]


def run(
    algorithms: Sequence[AlgorithmName],
    beam_width: int,
    expansion: int,
    problems: int,
    peer_problems: int,
    repeats: int,
    vllm: VllmProcess | None = None,
    show: Show = nothing_shown,
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Search the same problems with every contestant, in turn, `repeats` times with different seeds.

    Every algorithm samples N*M candidates at a time. Espalier runs twice: with and without merging equal samples; the
    latter corresponds to a model whose steps rarely repeat. The baseline is slower and searches only the first
    `peer_problems` problems in each repetition. It runs on transformers and, with `vllm`, on vLLM as generator and
    verifier, which samples from one seed throughout. Answers are compared by exact match, which suffices for the demo
    benchmark's whole numbers. `show` gets the figures so far after each repetition.

    Returns:
        Rows with medians over repetitions, and the accuracy over all repetitions with its interval, on the problems
        that every contestant searches; and ratios, each the median over pairs: `beam@F/1` for F in flight over one at a
        time, `beam@F/transformers` and, with `vllm`, `beam@F/vllm` over the baselines, and the same for `beam,
        unmerged@F` and the other algorithms.
    """
    chosen = load_benchmark("demo", problems)  # levels alternate, so any share has the same mix
    for_peer = chosen[:peer_problems]
    peers, threads = _peers(vllm), torch.get_num_threads()
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for algorithm in algorithms:
        width = beam_width * expansion if algorithm is AlgorithmName.BEST_OF_N else beam_width
        request = SearchRequest("-", algorithm, beam_width=width, expansion=expansion)
        ours: _Ours = {(merge, n): [] for merge in (True, False) for n in IN_FLIGHT}
        theirs: _Theirs = {name: [] for name in peers}
        before = len(rows)
        for repeat in range(repeats + 1):
            for (merge, count), runs in ours.items():
                runs.append(_ours(chosen, count, replace(request, seed=repeat, merge_duplicates=merge)))
            torch.set_num_threads(threads)  # the engine sets torch to one thread and has its own
            for name, runs in theirs.items():
                runs.append(_theirs(peers[name], for_peer, algorithm, beam_width, expansion, repeat))
            if not repeat:  # the warm-up
                for runs in (*ours.values(), *theirs.values()):
                    runs.clear()
                continue
            rows[before:] = _rows(algorithm, ours, theirs, len(for_peer))
            ratios |= _ratios(algorithm, ours, theirs)
            show(rows, ratios)
    return rows, ratios


def _rows(algorithm: AlgorithmName, ours: _Ours, theirs: _Theirs, judged: int) -> list[dict[str, Any]]:
    own = {f"espalier {_named(algorithm, merge)}, {count} in flight": runs for (merge, count), runs in ours.items()}
    peers = {f"search-and-learn {algorithm} on {_TITLES[peer]}": runs for peer, runs in theirs.items()}
    return [_row(name, runs, judged) for name, runs in (own | peers).items()]


def _ratios(algorithm: AlgorithmName, ours: _Ours, theirs: _Theirs) -> dict[str, float]:
    ratios = {}
    for (merge, count), runs in ours.items():
        name = _named(algorithm, merge)
        if count != IN_FLIGHT[0]:
            ratios[f"{name}@{count}/{IN_FLIGHT[0]}"] = _ratio(runs, ours[merge, IN_FLIGHT[0]])
        for peer, of_peer in theirs.items():
            ratios[f"{name}@{count}/{peer}"] = _ratio(runs, of_peer)
    return ratios


def _named(algorithm: AlgorithmName, merge: bool) -> str:
    return f"{algorithm}" if merge else f"{algorithm}, unmerged"


def vllm_settings(candidates: int) -> VllmSettings:
    """Settings for both models, with room for all candidates of a problem in one batch, at least vLLM's default."""
    return VllmSettings(locate(GENERATOR), locate(VERIFIER), max_sequences=max(candidates, 256))


def _peers(vllm: VllmProcess | None) -> dict[str, SearchAndLearn]:
    generator, verifier = locate(GENERATOR), locate(VERIFIER)
    peers = {"transformers": SearchAndLearn(generator, verifier)}
    if vllm:
        peers["vllm"] = SearchAndLearn(generator, verifier, vllm)
    return peers


def _ours(problems: list[Problem], in_flight: int, request: SearchRequest) -> _Run:
    orchestrator = load_orchestrator(
        RuntimeSettings(GENERATOR, VERIFIER, max_running=in_flight, answer_equivalence=AnswerEquivalence.EXACT_MATCH)
    )
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
    peer: SearchAndLearn,
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


def _row(name: str, runs: list[_Run], judged: int) -> dict[str, Any]:
    right = [correct for run in runs for correct in run.right[:judged]]
    low, high = wilson_interval(sum(right), len(right))
    return {
        "contestant": name,
        "problems/min": statistics.median(r.rate for r in runs),
        "accuracy %": 100 * sum(right) / len(right),
        "95% low": 100 * low,
        "95% high": 100 * high,
        "generated tokens": statistics.median(r.generated_tokens for r in runs),
        "verifier tokens": statistics.median(r.verifier_tokens for r in runs),
    }


def _ratio(ours: list[_Run], theirs: list[_Run]) -> float:
    return statistics.median(a.rate / b.rate for a, b in zip(ours, theirs, strict=True))
