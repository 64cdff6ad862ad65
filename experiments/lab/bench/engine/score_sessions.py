"""Steps scored as they come: a session beside vLLM's pooling, which is sent each path again with every step."""

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated, Any

import typer

from espalier.engine.models.hub import locate
from espalier.experiments.lab.bench.baselines.vllm_process import VllmProcess, VllmSettings, optional_vllm
from espalier.experiments.lab.bench.options import JsonPath, VllmPython
from espalier.experiments.lab.bench.report import Report, Show, nothing_shown
from espalier.prm.base import StepPath
from espalier.prm.verifier import Verifier
from espalier.search.solver import Scorer

SESSION, RESENT, CACHED = "session", "vLLM, re-sent", "vLLM, re-sent, prefix cache"


def run(
    verifier: str,
    paths: int,
    steps: int,
    equations: int,
    repeats: int,
    vllm_python: str | None,
    show: Show = nothing_shown,
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Score `paths` paths of one problem, a step of each at a time, `steps` times; a problem of its own each repeat.

    vLLM gets token ids; the session gets text. Its pooling of every token, which scores of steps are, never reads its
    prefix cache; so it also runs with the classifier's head on the last token alone, which does, and gives the same
    score of the newest step.

    Args:
        verifier: a token classifier.
        paths: number of paths; they share the problem alone.
        steps: steps of each.
        equations: equations in a step, about nine tokens each with the bundled tokenizer.
        repeats: counted repetitions.
        vllm_python: see `optional_vllm`.
        show: see `Report.show`.

    Returns:
        Rows with the tokens that the verifier computed and steps per second, and ratios over each contestant.
    """
    settings = VllmSettings(None, locate(verifier), max_batch_tokens=2048)
    seconds: dict[str, list[float]] = {SESSION: []}
    tokens: dict[str, int] = {}
    differs: dict[str, float] = {}
    with ExitStack() as stack:
        scorer = stack.enter_context(Scorer(verifier, dtype="float32", device="cpu"))
        peers = dict[str, VllmProcess]()
        if vllm := stack.enter_context(optional_vllm(vllm_python, settings)):
            peers[RESENT] = vllm
            peers[CACHED] = stack.enter_context(VllmProcess(vllm.python, replace(settings, last_token=True)))
        for repeat in range(repeats + 1):
            problem, texts = _paths(repeat, paths, steps, equations)
            start = time.perf_counter()
            scores, tokens[SESSION] = _by_session(scorer, problem, texts)
            times = {SESSION: time.perf_counter() - start}
            rows = _rows(scorer, problem, texts)
            for name, peer in peers.items():
                theirs, tokens[name], times[name] = _resent(peer, rows)
                differs[name] = max(abs(a - b) for a, b in zip(scores, theirs, strict=True))
            if repeat:  # the first is the warm-up
                for name, its in times.items():
                    seconds.setdefault(name, []).append(its)
                show(*_found(seconds, tokens, differs, paths * steps))
    return _found(seconds, tokens, differs, paths * steps)


def _paths(repeat: int, paths: int, steps: int, equations: int) -> tuple[str, list[list[str]]]:
    """A problem, and the steps of each path."""

    def step(path: int, depth: int) -> str:
        first = 10 + 7 * path + 3 * depth + repeat
        return " ".join(f"{first + i}+{i + 2}={first + 2 * i + 2}" for i in range(equations)) + "\n\n"

    problem = f"Tom has {50 + repeat} coins. (a) He finds 47 more. (b) He loses 12. How many coins does he have now?"
    return problem, [[step(path, depth) for depth in range(steps)] for path in range(paths)]


def _by_session(scorer: Scorer, problem: str, texts: Sequence[Sequence[str]]) -> tuple[list[float], int]:
    """The scores, all paths' first steps first, and the tokens that were computed."""
    scores: list[float] = []
    count = len(texts) * len(texts[0])
    with scorer.session(problem, max_nodes=count, max_tokens=2**16) as session:
        nodes = [0] * len(texts)
        for depth in range(len(texts[0])):
            scored = session.score_many(zip(nodes, (path[depth] for path in texts), strict=True))
            assert all(each.score is not None for each in scored), scored
            scores += [each.score or 0.0 for each in scored]
            session.release(*(node for node in nodes if node))
            nodes = [each.node for each in scored]
    return scores, session.close().usage.verifier_tokens


def _rows(scorer: Scorer, problem: str, texts: Sequence[Sequence[str]]) -> list[list[list[int]]]:
    """The token ids of each path up to its newest step, by depth."""
    verifier = scorer.verifier
    assert isinstance(verifier, Verifier), "scores of steps come from a process reward model"
    depths = range(1, len(texts[0]) + 1)
    read = verifier.family.full_path
    return [[list(read(StepPath(problem, tuple(path[:depth]))).token_ids) for path in texts] for depth in depths]


def _resent(peer: VllmProcess, rows: Sequence[list[list[int]]]) -> tuple[list[float], int, float]:
    """The scores, the tokens that were computed, and the seconds."""
    scores, tokens, seconds = list[float](), 0, 0.0
    for row in rows:
        its, computed, took = peer.score_last(row)
        scores, tokens, seconds = scores + its, tokens + computed, seconds + took
    return scores, tokens, seconds


def _found(
    seconds: dict[str, list[float]], tokens: dict[str, int], differs: dict[str, float], steps: int
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    rows, ratios = [], {}
    for name, times in seconds.items():
        rate = steps / statistics.median(times)
        row = {"contestant": name, "verifier tokens": tokens[name], "steps/s": rate}
        rows.append(row | {"largest difference of a score": differs.get(name, 0.0)})
        if name != SESSION:
            pairs = zip(times, seconds[SESSION], strict=True)
            ratios[f"tokens, {name}/{SESSION}"] = tokens[name] / tokens[SESSION]
            ratios[f"steps/s, {SESSION}/{name}"] = statistics.median(theirs / ours for theirs, ours in pairs)
    return rows, ratios


def command(
    verifier: Annotated[str, typer.Option(help="A token classifier.")] = "demo-verifier",
    paths: Annotated[int, typer.Option(min=1, help="Paths of one problem.")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each path.")] = 10,
    equations: Annotated[int, typer.Option(min=1, help="Equations in a step, about nine tokens each.")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Counted repetitions.")] = 5,
    vllm_python: VllmPython = None,
    json_path: JsonPath = None,
) -> None:
    """Verifier tokens and steps/s of steps scored as they come, compared with vLLM's pooling of each path re-sent."""
    report = Report(f"scores of {paths} paths, one step of each at a time, {steps} steps, float32", json_path)
    report.finish(*run(verifier, paths, steps, equations, repeats, vllm_python, report.show))
