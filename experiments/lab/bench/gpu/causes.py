"""Why a step takes as long as it does: time by kernel, products alone, variants of attention, a loop of plain torch.

Totals are in `measured.py`. Each part shows its rows as they come, and can be rehearsed on a CPU.
"""

import dataclasses
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from espalier.engine.models.config import DecoderConfig
from espalier.experiments.lab.bench.gpu.measured import (
    BLOCK_SIZE,
    REHEARSED,
    Bench,
    batch_of,
    layer_floors,
    make_layers,
    tables_of,
)
from espalier.experiments.lab.bench.report import Show, nothing_shown
from espalier.experiments.planning.roofline import MODELS
from espalier.kernels.attention import Terms
from espalier.kernels.layout import StepBatch
from espalier.kernels.linear import Linear
from espalier.kernels.triton import attention
from espalier.kernels.triton.plan import plan_attention
from espalier.kernels.triton.steps import DeviceStep, StepTokens

CONTEXT, SHARED = 450, 192
_KINDS = {
    "attention": "attend_items",
    "merge": "merge_partials",
    "norm": "add_and_norm",
    "rotation": "rotate_and_write",
    "gate": "activate_and_multiply",
    "split-K": "splitk|reduce_kernel",
    "product": "gemm|nvjet|cutlass|gemv|wgmma|product",
}
"""Kinds of kernels, by what their names contain."""
_LAYERS = 8
_COPIES_BYTES = 4e8
"""Bytes of the copies of a weight that are multiplied in turn, so that none comes from a cache."""


def profile_rows(bench: Bench, show: Show = nothing_shown) -> list[dict[str, Any]]:
    """Time of a step by kind of kernel, us a layer, beside the floor of each; of a replay alone, and with its launch.

    One row for each number of rows that decode, and for the steps of 50 tokens that a verifier scores.
    """
    found: list[dict[str, Any]] = []
    for name, tokens, sizes in (
        ("Qwen2.5-1.5B", 1, (1, 16, 64, 256, 512)),
        ("Qwen2.5-Math-PRM-7B", 1, (1, 16, 64)),
        ("Qwen2.5-Math-PRM-7B", 50, (5, 20, 40)),
    ):
        s = REHEARSED if bench.rehearse else MODELS[name]
        c, layers = s.config, make_layers(bench, s.config)
        sizes, tokens = ((1,), min(tokens, 5)) if bench.rehearse else (sizes, tokens)
        layout, pool = bench.layout(c, tables_of(max(sizes), CONTEXT, SHARED).max() + 1)
        layer_kvs = [layout.layer_view(pool, index) for index in range(c.num_layers)]
        layers.warm_up(layer_kvs, decodes=tokens == 1)
        for rows in sizes:
            step = StepBatch(*batch_of(tables_of(rows, CONTEXT, SHARED), CONTEXT, tokens, layout.blocks_per_slab))
            run = partial(layers.forward, step, layer_kvs)
            floors = layer_floors(s, bench.card, rows * tokens, SHARED + rows * (CONTEXT - SHARED))
            found.append(
                {
                    "model": name,
                    "rows": rows,
                    "tokens of each": tokens,
                    "ms": 1e3 * bench.seconds(run),
                    "replay ms": 1e3 * (bench.replay_seconds(layers, step, layer_kvs) or 0) or None,
                    "floors ms": 1e3 * c.num_layers * sum(floors.values()),
                    **_by_kind(run, c.num_layers, bench.rehearse),
                }
            )
            show(found, {})
            del run
        del layers, layer_kvs, pool
        bench.free_memory()
    return found


def _by_kind(run: Callable[[], object], layers: int, rehearse: bool, repeats: int = 10) -> dict[str, Any]:
    """Launches and their time, by kind, a layer."""
    with profile(activities=[ProfilerActivity.CPU if rehearse else ProfilerActivity.CUDA]) as traced:
        for _ in range(1 if rehearse else repeats):
            run()
        if not rehearse:
            torch.cuda.synchronize()
    times, launches = defaultdict[str, float](float), defaultdict[str, int](int)
    for event in traced.events() or ():
        if event.device_type.name != "CUDA" or re.search("Memcpy|Memset", event.name):
            continue
        kind = next((kind for kind, pattern in _KINDS.items() if re.search(pattern, event.name, re.I)), "others")
        times[kind] += event.time_range.elapsed_us()
        launches[kind] += 1
    each = repeats * layers
    measured: dict[str, Any] = {"launches a layer": round(sum(launches.values()) / each, 1)}
    return measured | {f"{kind}, us": round(us / each, 2) for kind, us in sorted(times.items())}


def library_rows(bench: Bench, show: Show = nothing_shown) -> list[dict[str, Any]]:
    """A layer's products at few and many rows: by cuBLAS in three ways, and in FP8 by rows."""
    found: list[dict[str, Any]] = []
    names = ("Qwen2.5-1.5B", "Qwen2.5-Math-PRM-7B")
    models = [("tiny", REHEARSED.config)] if bench.rehearse else [(name, MODELS[name].config) for name in names]
    ways = ("cuBLAS", "cuBLASLt", "cuBLAS, reductions in bfloat16", "FP8 by rows")
    for (model, c), way in itertools.product(models, ways):
        if not bench.rehearse:
            torch.backends.cuda.preferred_blas_library("cublaslt" if way == "cuBLASLt" else "cublas")
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = "reductions" in way
        for outputs, inputs in c.layer_products:
            copies = 1 if bench.rehearse else max(1, min(8, int(_COPIES_BYTES / (2 * outputs * inputs))))
            for rows in (1, 8) if bench.rehearse else (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048):
                row = {"model": model, "outputs": outputs, "inputs": inputs, "by": way, "rows": rows}
                try:
                    runs = _products(bench, way, rows, outputs, inputs, copies)
                    seconds = bench.kernel_seconds(lambda runs=runs: [run() for run in runs]) / copies
                except (RuntimeError, NotImplementedError) as error:  # a shape or device that has no such kernel
                    found.append(row | {"us": None, "error": str(error).partition("\n")[0][:80]})
                else:
                    read = (1 if "FP8" in way else 2) * outputs * inputs / seconds / bench.card.bandwidth
                    rate = 2 * rows * outputs * inputs / seconds / bench.card.matrix_rate
                    shares = {"share of a copy's %": 100 * read, "share of a product's %": 100 * rate}
                    found.append(row | {"us": 1e6 * seconds} | shares)
                show(found, {})
            bench.free_memory()
    return found


def _products(
    bench: Bench, way: str, rows: int, outputs: int, inputs: int, copies: int
) -> list[Callable[[], torch.Tensor]]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=bench.device, dtype=bench.dtype) / shape[-1] ** 0.5

    def in_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = x.float().abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        return (x / scale).to(torch.float8_e4m3fn), scale

    x, weights = random(rows, inputs), [random(outputs, inputs) for _ in range(copies)]
    if way == "FP8 by rows":
        (values, scale), packed = in_fp8(x), [in_fp8(weight) for weight in weights]
        product: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
        options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        return [partial(product, values, w.t(), scale, s.t(), **options) for w, s in packed]
    return [partial(Linear(weight), x) for weight in weights]


def attention_variant_rows(bench: Bench, show: Show = nothing_shown) -> list[dict[str, Any]]:
    """Attention of one layer in decode steps: tiles compiled in other ways, sharing or not, beside torch's own."""
    found: list[dict[str, Any]] = []
    cases = ((1, 0), (16, 0), (64, 0), (256, 0), (512, 0), (64, 2048), (64, 4096))
    for name, (rows, longer) in itertools.product(("Qwen2.5-1.5B", "Llama-3.2-1B"), cases):
        c = (REHEARSED if bench.rehearse else MODELS[name]).config
        context, shared = (CONTEXT, SHARED) if not longer else (longer + 64, longer)
        if bench.rehearse and (rows > 1 or name != "Qwen2.5-1.5B"):
            continue
        row = {"model": name, "rows": rows, "context": context, "shared": shared}
        query = torch.randn(rows, c.num_heads, c.head_dim, device=bench.device, dtype=bench.dtype)
        plain = query.view(rows, c.num_kv_heads, -1, c.head_dim)  # query heads of a KV head are rows of one tile
        kvs = [
            torch.randn(2, rows, c.num_kv_heads, context, c.head_dim, device=bench.device, dtype=bench.dtype)
            for _ in range(1 if bench.rehearse else _LAYERS)
        ]
        runs = [partial(F.scaled_dot_product_attention, plain, *each) for each in kvs]
        seconds = bench.kernel_seconds(lambda runs=runs: [run() for run in runs]) / len(runs)
        found.append(row | {"by": "torch, each row its own", "us": 1e6 * seconds})
        show(found, {})
        for options, share in itertools.product(_variants(rows), (True, False)):
            warps, stages, registers = options
            given = {"num_warps": warps, "num_stages": stages} | ({"maxnreg": registers} if registers else {})
            wide = attention.Tile(64, {"num_warps": 8, "num_stages": stages})
            tiles = {512: (attention.Tile(16, given), wide)}
            with mock.patch.dict(attention._TILES, tiles):  # pyright: ignore[reportPrivateUsage]
                run = _attention(bench, c, query, context, shared, share=share)
                seconds = bench.kernel_seconds(run) / _LAYERS
            of = f"{warps} warps, {stages} stages" + (f", {registers} registers" if registers else "")
            found.append(row | {"by": of + ", shared" * share, "us": 1e6 * seconds})
            show(found, {})
        bench.free_memory()
    return found


def _variants(rows: int) -> Iterator[tuple[int, int, int | None]]:
    yield from ((4, 3, None), (4, 5, None))
    if rows in (64, 256):
        yield from ((4, 5, 168), (4, 4, 128), (2, 3, None))


def _attention(
    bench: Bench, c: DecoderConfig, query: torch.Tensor, context: int, shared: int, *, share: bool
) -> Callable[[], object]:
    """Attention in some layers, in turn, so that no cache holds what is read."""
    rows = len(query)
    tables = tables_of(rows, context, shared)
    layout, pool = bench.layout(dataclasses.replace(c, num_layers=_LAYERS), tables.max() + 1)
    layer_kvs = [layout.layer_view(pool, index) for index in range(_LAYERS)]
    starts, contexts = np.arange(rows + 1, dtype=np.int32), np.full(rows, context, np.int32)
    tiles = attention.rows_of_tiles(c.num_heads // c.num_kv_heads)
    plan = plan_attention(starts, contexts, tables, BLOCK_SIZE, c.num_kv_heads, *tiles, bench.costs, share=share)
    nothing = np.zeros(rows, np.int32)
    step = StepTokens(nothing, contexts - 1, [np.full(rows, -1, np.int64)], [tables], [plan])
    on_device = DeviceStep(step.room, 1, [c.num_kv_heads], bench.costs, bench.device)
    on_device.load(step)
    places = on_device.plans[0], on_device.positions, on_device.tables[0], Terms(c.head_dim**-0.5)
    return lambda: [attention.attend(query, layer_kv, *places) for layer_kv in layer_kvs]


def plain_rows(bench: Bench, show: Show = nothing_shown) -> list[dict[str, Any]]:
    """A decode step with head and draw in plain torch, replayed as a graph, eager and compiled: the baseline."""
    found: list[dict[str, Any]] = []
    for compiled, rows in itertools.product((False, True), (1, 16, 64, 256)):
        if bench.rehearse and (compiled or rows > 16):
            continue
        c = (REHEARSED if bench.rehearse else MODELS["Qwen2.5-1.5B"]).config
        model = _PlainModel(c, rows, CONTEXT).to(bench.device, bench.dtype)
        run: Any = torch.compile(model, mode="max-autotune-no-cudagraphs", fullgraph=True) if compiled else model
        ids, place = (torch.full((n,), value, device=bench.device) for n, value in ((rows, 3), (1, CONTEXT - 1)))
        with torch.inference_mode():
            seconds = bench.kernel_seconds(partial(run, ids, place))
        by = "torch.compile" if compiled else "torch"
        found.append({"by": by, "rows": rows, "ms": 1e3 * seconds, "tokens/s": rows / seconds})
        show(found, {})
        del model, run
        bench.free_memory()
    return found


class _PlainLayer(nn.Module):
    """A layer over static KV, `[rows, kv_heads, context, head_dim]`, all of which is attended to."""

    def __init__(self, c: DecoderConfig, rows: int, context: int) -> None:
        super().__init__()

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5, requires_grad=False)

        self.sizes = c.num_heads, c.num_kv_heads, c.head_dim
        width, heads = c.hidden_size, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        self.qkv, self.out = weight(heads, width), weight(width, c.num_heads * c.head_dim)
        self.gate_up, self.down = weight(2 * c.intermediate_size, width), weight(width, c.intermediate_size)
        self.norms = weight(2, width)
        self.keys, self.values = (weight(rows, c.num_kv_heads, context, c.head_dim) for _ in range(2))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        heads, kv_heads, dim = self.sizes
        qkv = F.linear(F.rms_norm(x, x.shape[-1:], self.norms[0], 1e-6), self.qkv).view(len(x), -1, dim)
        first, second = qkv[:, : heads + kv_heads].float().chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
        self.keys.index_copy_(2, place, turned[:, heads:, None])
        self.values.index_copy_(2, place, qkv[:, heads + kv_heads :, None])
        query = turned[:, :heads].reshape(len(x), kv_heads, -1, dim)
        mixed = F.scaled_dot_product_attention(query, self.keys, self.values)
        x = x + F.linear(mixed.reshape(len(x), -1), self.out)
        gate, up = F.linear(F.rms_norm(x, x.shape[-1:], self.norms[1], 1e-6), self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)


class _PlainModel(nn.Module):
    """Layers, tied head and a draw by Gumbel noise, as gpt-fast has them."""

    def __init__(self, c: DecoderConfig, rows: int, context: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_PlainLayer(c, rows, context) for _ in range(c.num_layers))
        embedding = torch.randn(c.vocab_size, c.hidden_size) / c.hidden_size**0.5
        self.embedding = nn.Parameter(embedding, requires_grad=False)
        self.inverse = nn.Parameter(1e6 ** (-torch.arange(0, c.head_dim, 2) / c.head_dim), requires_grad=False)

    def forward(self, ids: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Ids `[rows]` of the tokens at `place`, `[1]`, to those drawn behind them."""
        angles = place.float()[:, None, None] * self.inverse.float()
        x = F.embedding(ids, self.embedding)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin(), place)
        logits = F.linear(F.rms_norm(x, x.shape[-1:]), self.embedding).float()
        return (logits - torch.empty_like(logits).exponential_().log()).argmax(-1)


CAUSES: dict[str, Callable[[Bench, Show], list[dict[str, Any]]]] = {
    "profile": profile_rows,
    "libraries": library_rows,
    "attention-variants": attention_variant_rows,
    "plain": plain_rows,
}
"""Measurements by name, in order."""
