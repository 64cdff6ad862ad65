"""The host's share of a token early and late on a long path: a search whose model is replaced by nothing."""

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer

from espalier.engine.engine import Engine, EngineSettings
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.hub import locate
from espalier.engine.models.model import Model, load_generator
from espalier.engine.roles import GENERATOR
from espalier.experiments.lab.bench.engine.host import without_model
from espalier.experiments.lab.bench.options import JsonPath
from espalier.experiments.lab.bench.report import Report, Show, nothing_shown
from espalier.search.request import AlgorithmName, make_request
from espalier.search.run.generator import Generator
from espalier.search.run.orchestrator import Orchestrator

RULES = ("paragraph", "tokens:64")
EARLY = 500
"""Tokens of the path where its first figure is taken."""
_PARAGRAPH = 6
"""Tokens of a paragraph: as few as the steps of the bundled generator have."""
_MEASURED = 960
"""Tokens that a figure is the mean of: whole steps of each rule."""


def run(tokens: int, repeats: int, show: Show = nothing_shown) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Measure one path of a search that thinks.

    Args:
        tokens: length of the path at which the second figure is taken.
        repeats: paths for each step rule; each gives both figures, and their ratio.
        show: gets the rows so far.

    Returns:
        A row for each step rule with microseconds of the host's CPU time for a token, of all paths the median; and the
        medians of the paths' ratios.
    """
    model = load_generator(Checkpoint(locate("demo-thinking-generator")), torch.float32, "cpu")
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for rule in RULES:
        figures = [_path(model, rule, tokens) for _ in range(repeats)]
        early, late = (1e6 * statistics.median(figure[place] for figure in figures) for place in (0, 1))
        rows.append({"step rule": rule, f"at {EARLY} tokens, µs": early, f"at {tokens} tokens, µs": late})
        ratios[f"{rule}, at {tokens} tokens against {EARLY}"] = statistics.median(
            late / early for early, late in figures
        )
        show(rows, ratios)
    return rows, ratios


def _path(model: Model, rule: str, tokens: int) -> tuple[float, float]:
    """Seconds of CPU time for a token behind `EARLY` and behind `tokens` tokens of a path."""
    length = tokens + 4 * _MEASURED
    config = replace(model.config, max_positions=2 * length)
    decoder = type(model.decoder)(config, model.decoder.backend, model.decoder.layers, model.decoder.weight_bytes)
    endless = without_model(replace(model, decoder=decoder), _words(model))
    block_bytes = 16 * config.num_layers * 2 * config.num_kv_heads * config.head_dim * 4
    engine = Engine({GENERATOR: endless}, EngineSettings(length // 16 * block_bytes + 2**26))
    orchestrator = Orchestrator(engine, Generator(engine, "", {"temperature": 1.0}), None)
    rules = {"step_rule": rule, "thinking": str(length), "max_tokens": length + 2048}
    orchestrator.submit(make_request("1+1", {"algorithm": AlgorithmName.MAJORITY, "beam_width": 1, **rules}))
    orchestrator.step()  # the prompt, and the first token
    figures = list[float]()
    for place, before in ((EARLY, 1), (tokens, EARLY + _MEASURED)):
        for _ in range(place - before):
            orchestrator.step()
        start = time.thread_time()
        for _ in range(_MEASURED):
            orchestrator.step()
        figures.append((time.thread_time() - start) / _MEASURED)
        assert orchestrator.busy, "the path has not ended"
    orchestrator.close()
    return figures[0], figures[1]


def _words(model: Model) -> Iterator[int]:
    """Letters at random, in paragraphs, without end."""
    letters = [i for i, text in enumerate(model.tokenizer.token_bytes) if text.isalpha() and len(text) == 1]
    (blank_line,) = model.tokenizer.encode("\n\n")
    drawn = random.Random(1)
    while True:
        yield from drawn.choices(letters, k=_PARAGRAPH - 1)
        yield blank_line


def command(
    tokens: Annotated[int, typer.Option(min=2000, help="Length of the path, in tokens.")] = 20_000,
    repeats: Annotated[int, typer.Option(min=1, help="Paths for each step rule.")] = 3,
    json_path: JsonPath = None,
) -> None:
    """Host time of a token early and late on a long path in microseconds, with the model replaced by nothing."""
    report = Report("host time of a token on a long path", json_path)
    report.finish(*run(tokens, repeats, report.show))
