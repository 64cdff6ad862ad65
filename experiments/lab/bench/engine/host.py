"""The host's share of a decode step: the engine's own time with model, head and draws replaced by nothing."""

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Annotated, Any

import torch
import typer

from espalier.engine.engine import Engine, EngineSettings
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.config import NativeConfig
from espalier.engine.models.decoder import Decoder
from espalier.engine.models.hub import locate
from espalier.engine.models.model import Model, load_generator
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Generate, Sampling, stream_key
from espalier.experiments.lab.bench.baselines.dense_loop import layers_as_given
from espalier.experiments.lab.bench.options import JsonPath
from espalier.experiments.lab.bench.report import Report, Show, nothing_shown
from espalier.kernels.backend import Backend
from espalier.kernels.cpu.backend import CpuBackend
from espalier.kernels.cpu.decoder import CpuLayers
from espalier.kernels.layers import Layers
from espalier.kernels.layout import LayerKV, StepBatch

ROWS = (1, 64, 256)
_PROMPT, _WARM_UP = 32, 20
_SPREAD = 128
"""Tokens by which contexts differ where they are mixed: rows then reach the end of a portion at different steps."""


class _NoLayers(Layers):
    """Layers that compute nothing."""

    def __init__(self, layers: Layers) -> None:
        self.outer = layers.outer
        self._hidden = torch.zeros(4096, layers.outer.embedding.shape[1])

    def __len__(self) -> int:
        return 0

    def forward(self, step: StepBatch, layer_kvs: Sequence[LayerKV]) -> torch.Tensor:
        """Hidden states that mean nothing, `[T, hidden]`."""
        return self._hidden[: len(step.token_ids)]


def without_model(model: Model, tokens: Iterator[int], gpu: bool = False) -> Model:
    """`model` with layers, head and draws that compute nothing.

    Args:
        model: a native one on a CPU.
        tokens: each is drawn for all rows of a step.
        gpu: whether to keep what a GPU's backend does on the host.
    """
    decoder = model.decoder

    def draw(*rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        draws = len(rows[-1])
        return torch.full((draws,), next(tokens)), torch.zeros(draws)

    backend: Any = type("Stubbed", (type(decoder.backend),), {"draw_tokens": staticmethod(draw)})()
    layers: Layers = _NoLayers(decoder.layers)
    if gpu:
        layers = _gpu_layers(decoder, backend)
    return dataclasses.replace(
        model,
        decoder=type(decoder)(decoder.config, backend, layers, decoder.weight_bytes),
        head=lambda hidden: hidden,
        eos_token_ids=(),
    )


def _gpu_layers(decoder: Decoder, backend: Backend) -> Layers:
    """Layers that plan and pack steps as on a GPU, and replay nothing."""
    from espalier.kernels.triton.cache import TokenMajorLayout
    from espalier.kernels.triton.layers import TritonLayers
    from espalier.kernels.triton.plan import Costs
    from espalier.kernels.triton.steps import DeviceStep

    class Planned(TritonLayers):
        def _compute(
            self, step: DeviceStep, layer_kvs: Sequence[LayerKV], output: torch.Tensor | None = None
        ) -> torch.Tensor:
            return torch.zeros(step.room.tokens, self.outer.embedding.shape[1]) if output is None else output

    backend.layout = TokenMajorLayout
    assert isinstance(decoder.layers, CpuLayers)
    assert isinstance(decoder.config, NativeConfig)
    return Planned(
        len(decoder.layers),
        layers_as_given(decoder.layers, decoder.config).__getitem__,
        decoder.config.spec,
        decoder.layers.outer,
        backend.prepare_linear,
        Costs(),
        None,
        lambda compute: (lambda: None, compute()),
    )


def _step_seconds(model: Model, rows: int, steps: int, spread: int) -> float:
    """Median thread time of a decode step of `rows` sequences, whose prompts differ by up to `spread` tokens."""
    blocks = rows * (-(-(_PROMPT + spread + steps) // 16) + 1)
    config = model.config
    block_bytes = 16 * config.num_layers * 2 * config.num_kv_heads * config.head_dim * 4
    engine = Engine({GENERATOR: model}, EngineSettings(2 * blocks * block_bytes + 2**24, max_batch_tokens=8192))
    for row in range(rows):
        sequence = engine.open(GENERATOR, [3 + row % 7] * (_PROMPT + row * 37 % (spread + 1)))
        sampling = Sampling(temperature=1.0, key=stream_key(0, str(row), (0,)))
        engine.submit(Generate(None, sequence, (sampling,), steps + _WARM_UP, "", in_place=True))
    engine.step()  # the prompts
    times = []
    for _ in range(steps):
        start = time.thread_time()
        engine.step()
        times.append(time.thread_time() - start)
    return statistics.median(times[_WARM_UP:])


def run(steps: int, repeats: int, show: Show = nothing_shown) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows with the milliseconds of a step's host time, of `repeats` runs the median; no ratios."""
    model = load_generator(Checkpoint(locate("demo-generator")), torch.float32, "cpu")
    assert isinstance(model.decoder.backend, CpuBackend)
    rows = []
    for count in ROWS:
        found: dict[str, Any] = {"rows": count}
        for name, gpu, spread in (
            ("layers replaced, ms", False, 0),
            ("with a GPU's plan and packing, ms", True, 0),
            ("the same, mixed contexts, ms", True, _SPREAD),
        ):
            stubbed = without_model(model, repeat(5), gpu)
            found[name] = 1e3 * statistics.median(_step_seconds(stubbed, count, steps, spread) for _ in range(repeats))
        rows.append(found)
        show(rows, {})
    return rows, {}


def command(
    steps: Annotated[int, typer.Option(min=30, help="Decode steps in each repetition.")] = 200,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions.")] = 3,
    json_path: JsonPath = None,
) -> None:
    """Host time of a decode step in ms, with the model replaced by nothing; needs triton, and no GPU."""
    report = Report("host time of a decode step", json_path)
    report.finish(*run(steps, repeats, report.show))
