"""Decode steps with every row guided beside the same steps without: what masks and matchers cost."""

import dataclasses
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from espalier.engine.engine import Engine, EngineSettings
from espalier.engine.guidance.compiled import GrammarCompiler
from espalier.engine.guidance.grammar import Grammar
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.decoder import chosen_quantization
from espalier.engine.models.hub import locate
from espalier.engine.models.model import Model, load_generator
from espalier.engine.models.options import LoadFormat, Quantization
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Generate, Sampling, stream_key
from espalier.experiments.lab.bench.options import JsonPath
from espalier.experiments.lab.bench.report import Report, Show, nothing_shown
from espalier.search.rules import Form

_PROMPT, _WARM_UP = 16, 2
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
_PEOPLE = {"type": "array", "items": _PERSON, "minItems": 200}
"""A text that does not end within a run."""
FORMS: Mapping[str, Grammar | None] = {
    "free": None,
    "JSON schema": Form("json", json.dumps(_PEOPLE)).grammar(),
    "answer in a box": Form("regex", r"\d+").in_box(),
}


def _seconds(model: Model, grammar: Grammar | None, rows: int, steps: int) -> tuple[float, float]:
    """Mean CPU and wall seconds of a decode step of `rows` sequences, each with draws of its own."""
    compiler = GrammarCompiler(model)
    matcher = compiler.compile(grammar) if grammar else None
    blocks = rows * (-(-(_PROMPT + steps + _WARM_UP) // 16) + 1)
    config = model.config
    block_bytes = 16 * config.num_layers * 2 * config.num_kv_heads * config.head_dim * 4
    endless = dataclasses.replace(model, eos_token_ids=())
    engine = Engine({GENERATOR: endless}, EngineSettings(2 * blocks * block_bytes + 2**26, max_batch_tokens=8192))
    for row in range(rows):
        sequence = engine.open(GENERATOR, [100 + row] * _PROMPT)
        sampling = Sampling(temperature=0.8, key=stream_key(0, str(row), (0,)))
        engine.submit(Generate(None, sequence, (sampling,), steps + _WARM_UP, "", in_place=True, matcher=matcher))
    for _ in range(_WARM_UP):
        engine.step()
    start = time.process_time(), time.perf_counter()
    for _ in range(steps):
        engine.step()
    taken = (time.process_time() - start[0]) / steps, (time.perf_counter() - start[1]) / steps
    engine.close()
    return taken


def run(
    checkpoint: str, rows: int, steps: int, repeats: int, quantization: Quantization, show: Show = nothing_shown
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Milliseconds of a step by form, medians of `repeats` turns, and what each form costs beside none, in pairs."""
    read = Checkpoint(locate(checkpoint), LoadFormat.AUTO, quantization)
    if quantization is Quantization.AUTO:
        read.quantization = chosen_quantization(read.decoder_config, torch.float32, on_cpu=True)
    model = load_generator(read, torch.float32, "cpu")
    taken: dict[str, list[tuple[float, float]]] = {form: [] for form in FORMS}
    table: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for _ in range(repeats):
        for form, grammar in FORMS.items():
            taken[form].append(_seconds(model, grammar, rows, steps))
        table = [_row(form, taken[form]) for form in FORMS]
        pairs = {form: zip(taken[form], taken["free"], strict=True) for form in FORMS if form != "free"}
        ratios = {
            f"CPU time, {form}, to free": statistics.median(own[0] / free[0] for own, free in each)
            for form, each in pairs.items()
        }
        show(table, ratios)
    return table, ratios


def _row(form: str, taken: list[tuple[float, float]]) -> dict[str, Any]:
    cpu, wall = (statistics.median(times) * 1e3 for times in zip(*taken, strict=True))
    return {"form": form, "CPU ms a step": round(cpu, 1), "ms a step": round(wall, 1), "turns": len(taken)}


def command(
    generator: Annotated[str, typer.Option(help="Checkpoint to decode with.")] = "demo-generator",
    rows: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps in each turn.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each form.")] = 5,
    quantization: Annotated[Quantization, typer.Option(help="The weights' format.")] = Quantization.NONE,
    json_path: JsonPath = None,
) -> None:
    """Decode steps with every row guided, by a JSON schema or an answer's form, beside the same without."""
    weights = "float32" if quantization is Quantization.NONE else str(quantization)
    report = Report(f"guided decoding, {Path(generator).stem}, {weights}, {rows} rows", json_path)
    report.finish(*run(generator, rows, steps, repeats, quantization, report.show))
