"""Continuations of steps a second: forked from their tree, and asked for with the whole text as a prompt."""

import statistics
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from espalier.engine.engine import Engine
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.models.hub import locate
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Generate, Generated, Sampling, Score, stream_key
from espalier.experiments.lab.bench.baselines.vllm_process import VllmProcess, VllmSettings, optional_vllm
from espalier.experiments.lab.bench.options import JsonPath, VllmPython
from espalier.experiments.lab.bench.report import Report, Show, nothing_shown
from espalier.experiments.runs.benchmarks import load_benchmark
from espalier.experiments.verifier_training.rollouts import RolloutSampler
from espalier.experiments.verifier_training.tree_file import TreeRecord
from espalier.search.grading.math_verify import Grader
from espalier.search.rollout import RolloutSettings
from espalier.search.run.load import load_generator_alone
from espalier.search.run.settings import RuntimeSettings

_SOLUTIONS = 16
_MAX_TOKENS = 256
_COMPARED_WITH = {
    "re-prompted": ("forked",),
    "re-prompted, unmerged": ("forked, unmerged",),
    "re-prompted, vLLM": ("forked", "forked, unmerged"),
}
_AT_ONCE = 4
"""Problems whose steps are continued at once; a server gets their requests together."""


def run(
    limit: int, continuations: int, repeats: int, vllm: VllmProcess | None = None, show: Show = nothing_shown
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Continue every step of the same trees with every contestant, in turn, `repeats` times after a warm-up.

    The trees are 16 solutions of problems of `demo-training`. *Forked* has their KV, as Monte-Carlo labels do: these
    are sampled while the tree is there. *Re-prompted* opens each step's whole text as a prompt, with the prefix cache
    that servers have, on this engine and on vLLM. Equal samples of a step are merged in Espalier and not in vLLM, so
    that both are also run unmerged.

    Args:
        limit: number of problems.
        continuations: of each step.
        repeats: counted repetitions.
        vllm: running on the same generator; None to leave it out.
        show: gets the figures that there are so far, whenever there are more.

    Returns:
        A row for each contestant with the median of continuations a second, and the tokens that it computes for one;
        and the medians of the paired ratios of forked over the others.
    """
    engine, generator = load_generator_alone(RuntimeSettings(kv_memory=2**30))
    settings = RolloutSettings(solutions=_SOLUTIONS, temperature=1.0)
    with Grader() as grader:
        sampler = RolloutSampler(engine, generator, settings, grader, in_flight=16)
        trees = list(sampler.sample(load_benchmark("demo-training", limit)))
    groups = [trees[i : i + _AT_ONCE] for i in range(0, len(trees), _AT_ONCE)]
    total = continuations * sum(step.end is None for tree in trees for step in tree.steps)
    rates: dict[str, list[float]] = {}
    computed: dict[str, float] = {}
    figures: tuple[list[dict[str, Any]], dict[str, float]] = ([], {})
    for repeat in range(repeats + 1):
        for merge in (True, False):
            for name, measure in (("forked", _forked), ("re-prompted", _prompted)):
                title = f"{name}{'' if merge else ', unmerged'}"
                before = engine.stats()[GENERATOR].computed_tokens
                shared = [measure(engine, group, continuations, merge) for group in groups]
                rates.setdefault(title, []).append(total / sum(seconds for seconds, _ in shared))
                tokens = engine.stats()[GENERATOR].computed_tokens - before - sum(own for _, own in shared)
                computed[title] = tokens / total
        if vllm:
            seconds = sum(_asked(vllm, group, continuations, generator.model.eos_token_ids) for group in groups)
            rates.setdefault("re-prompted, vLLM", []).append(total / seconds)
        if repeat:  # the first is the warm-up
            figures = _figures({name: values[1:] for name, values in rates.items()}, computed)
            show(*figures)
    return figures


def _figures(
    rates: dict[str, list[float]], computed: dict[str, float]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    rows = [
        {
            "continuations": name,
            "a second": statistics.median(values),
            "tokens computed for one": computed.get(name),
        }
        for name, values in rates.items()
    ]
    ratios = {
        f"{forked}/{name}": statistics.median(a / b for a, b in zip(rates[forked], values, strict=True))
        for name, values in rates.items()
        if not name.startswith("forked")
        for forked in _COMPARED_WITH[name]
    }
    return rows, ratios


def vllm_settings() -> VllmSettings:
    """Settings of vLLM for `run`: room for the prefixes of all steps in its cache."""
    return VllmSettings(locate("demo-generator"), max_sequences=256)


def _forked(engine: Engine, trees: list[TreeRecord], count: int, merge: bool) -> tuple[float, int]:
    """Seconds of the continuations, forked from sequences that hold the trees; and tokens computed before them."""
    before = engine.stats()[GENERATOR].computed_tokens
    sequences = {(tree.problem_id, i): s for tree in trees for i, s in _computed(engine, tree).items()}
    own = engine.stats()[GENERATOR].computed_tokens - before
    start = time.perf_counter()
    forks: list[KVSequence] = []
    for tree in trees:
        for index in _open_steps(tree):
            (fork,) = engine.fork(sequences[tree.problem_id, index], 1)
            forks.append(fork)
            _continue(engine, fork, tree, index, count, merge)
    _drain(engine)
    seconds = time.perf_counter() - start
    for sequence in (*forks, *sequences.values()):
        engine.release(sequence)
    return seconds, own


def _prompted(engine: Engine, trees: list[TreeRecord], count: int, merge: bool) -> tuple[float, int]:
    """Seconds of the continuations, each step's whole text a prompt; see `_forked`."""
    start = time.perf_counter()
    opened: list[KVSequence] = []
    for tree in trees:
        for index in _open_steps(tree):
            opened.append(engine.open(GENERATOR, _ids(tree, index), owner="bench"))
            _continue(engine, opened[-1], tree, index, count, merge)
    _drain(engine)
    seconds = time.perf_counter() - start
    for sequence in opened:
        engine.release(sequence)
    return seconds, 0


def _asked(vllm: VllmProcess, trees: list[TreeRecord], count: int, eos: tuple[int, ...]) -> float:
    rows = [_ids(tree, index) for tree in trees for index in _open_steps(tree) for _ in range(count)]
    start = time.perf_counter()
    vllm.sample(rows, eos, _MAX_TOKENS)
    return time.perf_counter() - start


def _open_steps(tree: TreeRecord) -> Iterator[int]:
    return (index for index, step in enumerate(tree.steps) if step.end is None)


def _ids(tree: TreeRecord, index: int) -> list[int]:
    return [*tree.prompt_token_ids, *(token for i in tree.lineage(index) for token in tree.steps[i].token_ids)]


def _computed(engine: Engine, tree: TreeRecord) -> dict[int, KVSequence]:
    """A sequence for each step that goes on, its last token not computed yet, as after sampling."""
    held: dict[int, KVSequence] = {}
    root = engine.open(GENERATOR, tree.prompt_token_ids, owner="bench")
    engine.submit(Score("bench", root, (), ()))
    _drain(engine)
    for index in _open_steps(tree):  # parents come first
        parent = tree.steps[index].parent
        (held[index],) = engine.fork(root if parent is None else held[parent], 1)
        engine.submit(Score("bench", held[index], tuple(tree.steps[index].token_ids), ()))
        _drain(engine)
    engine.release(root)
    return held


def _continue(engine: Engine, sequence: KVSequence, tree: TreeRecord, index: int, count: int, merge: bool) -> None:
    keys = (stream_key(0, tree.problem, (index, i)) for i in range(count))
    samplings = tuple(Sampling(1.0, key=key) for key in keys)
    engine.submit(Generate("bench", sequence, samplings, _MAX_TOKENS, delimiter="", merge_equal=merge))


def _drain(engine: Engine) -> None:
    while engine.busy:
        for done in engine.step():
            if isinstance(done, Generated):
                engine.release(done.sequence)


def command(
    limit: Annotated[int, typer.Option(min=1, max=2000, help="Problems of demo-training.")] = 16,
    continuations: Annotated[int, typer.Option(min=1, help="Continuations of each step.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Counted repetitions.")] = 3,
    vllm_python: VllmPython = None,
    json_path: JsonPath = None,
) -> None:
    """Continuations of steps a second, forked from their tree, beside those of the whole text as a prompt."""
    with optional_vllm(vllm_python, vllm_settings()) as vllm:
        beside = f", {vllm.description}" if vllm else ""
        report = Report(f"{continuations} continuations of each step, {limit} problems{beside}", json_path)
        found = run(limit, continuations, repeats, vllm, report.show)
    report.finish(*found)
