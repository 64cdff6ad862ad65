"""Kernels, decode steps, scoring and whole searches on a GPU, beside the time that bytes and products alone take.

Each part shows its rows as they come. The weights are random: only sizes count; the vocabulary of searches is the
demo's. `rehearse` runs all of it with tiny models on a CPU, where figures mean nothing.
"""

import dataclasses
import gc
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import AutoTokenizer

from espalier.engine.execution.runner import ModelRunner
from espalier.engine.models.config import DecoderConfig
from espalier.engine.models.options import LoadFormat
from espalier.experiments.demo import generator_path, verifier_path
from espalier.experiments.lab.bench.baselines.transformers_models import TransformersModels
from espalier.experiments.lab.bench.report import Show, nothing_shown
from espalier.experiments.planning.roofline import (
    MODELS,
    PAIRS,
    Card,
    ModelShape,
    decode_seconds,
    known_model,
    scoring_seconds,
)
from espalier.kernels.attention import Terms
from espalier.kernels.backend import choose_backend
from espalier.kernels.layers import Activation, DecoderSpec, EmbeddingAndNorm, Layers, LayerWeights
from espalier.kernels.layout import AttentionBatch, KVLayout, LayerKV, StepBatch
from espalier.kernels.linear import Linear
from espalier.kernels.sampling import Filters
from espalier.kernels.triton.attention import attend, rows_of_tiles
from espalier.kernels.triton.backend import TritonBackend
from espalier.kernels.triton.cache import TokenMajorLayout, norm_rotate_write
from espalier.kernels.triton.layers import TritonLayers
from espalier.kernels.triton.plan import Costs, plan_attention
from espalier.kernels.triton.pointwise import add_norm, gated
from espalier.kernels.triton.row_linear import RowLinear
from espalier.kernels.triton.sampling import draw_tokens
from espalier.kernels.triton.steps import DeviceStep, StepTokens
from espalier.search.request import AnswerEquivalence, make_request
from espalier.search.run.load import load_orchestrator
from espalier.search.run.settings import RuntimeSettings

BLOCK_SIZE = 16
REHEARSED = known_model("tiny", (2, 64, 96, 4, 2, 16, 645), 645)


class Bench:
    """One device, and how long things take there."""

    def __init__(self, rehearse: bool) -> None:
        """Measure the device's ceilings; `rehearse` takes the CPU."""
        self.rehearse = rehearse
        self.device = torch.device("cpu" if rehearse else "cuda")
        self.dtype = torch.float32 if rehearse else torch.bfloat16
        self.costs = Costs(1)
        if not rehearse:
            card = torch.cuda.get_device_properties(0)
            self.costs = Costs(card.multi_processor_count, dependent=card.major >= 9)
        self.repeats = 1 if rehearse else 50
        size = 2**16 if rehearse else 2**31
        source = torch.empty(size, dtype=torch.uint8, device=self.device).random_()
        target = torch.empty_like(source)
        wide = 64 if rehearse else 8192
        left, right = (torch.randn(wide, wide, device=self.device, dtype=self.dtype) for _ in range(2))
        self.card = Card(
            bandwidth=2 * size / self.seconds(lambda: target.copy_(source)),
            matrix_rate=2 * wide**3 / self.seconds(lambda: left @ right),
        )

    def seconds(self, run: Callable[[], object], repeats: int | None = None) -> float:
        """Median time of a call on the device."""
        run()
        times = []
        for _ in range(repeats or self.repeats):
            if self.rehearse:
                start = time.perf_counter()
                run()
                times.append(time.perf_counter() - start)
                continue
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            run()
            after.record()
            after.synchronize()
            times.append(before.elapsed_time(after) / 1e3)
        return statistics.median(times)

    def kernel_seconds(self, run: Callable[[], object]) -> float:
        """Median time of kernels alone: they are recorded as a graph, for launching them takes Python longer."""
        if self.rehearse:
            return self.seconds(run)
        from triton.testing import do_bench_cudagraph

        milliseconds: Any = do_bench_cudagraph(run, return_mode="median")
        return milliseconds / 1e3

    def replay_seconds(self, layers: Layers, step: StepBatch, layer_kvs: list[LayerKV]) -> float | None:
        """Median time of a recorded step alone, without what the host does for it; None where it is not recorded."""
        if not isinstance(layers, TritonLayers):
            return None
        recorded = layers.recorded(step, layer_kvs)
        return None if recorded is None else self.seconds(recorded.replay)

    def free_memory(self) -> None:
        """Give back what nobody refers to any more, so that the next model or engine finds it."""
        gc.collect()
        if not self.rehearse:
            torch.cuda.empty_cache()

    def layout(self, c: DecoderConfig, blocks: int) -> tuple[KVLayout, torch.Tensor]:
        """A layout, and a KV pool of random numbers with that many blocks."""
        one = TokenMajorLayout(c.num_layers, c.num_kv_heads, c.head_dim, BLOCK_SIZE, self.dtype, 2**62)
        layout = dataclasses.replace(one, slab_bytes=64 * one.block_bytes)
        slabs = -(-int(blocks) // 64)  # no int32 of numpy's, which overflows
        pool = torch.empty(slabs * layout.slab_bytes // self.dtype.itemsize, dtype=self.dtype, device=self.device)
        return layout, pool.normal_().view(torch.uint8)


def tables_of(rows: int, context: int, shared: int) -> np.ndarray:
    """Block tables of `rows` sequences whose first `shared` tokens are the same blocks."""
    width, common = -(-context // BLOCK_SIZE), shared // BLOCK_SIZE
    tables = np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    tables[:, :common] = tables[0, :common]
    return tables


def ceiling_rows(bench: Bench, show: Show = nothing_shown) -> list[dict[str, Any]]:
    """Rates that a copy and a product of large matrices reach."""
    found = [{"copy, GB/s": bench.card.bandwidth / 1e9, "product, TFLOP/s": bench.card.matrix_rate / 1e12}]
    show(found, {})
    return found


def attention_rows(bench: Bench, show: Show = nothing_shown) -> list[dict[str, Any]]:
    """Attention of one layer in a decode step: bytes a second, of those that must be read, as a share of a copy's."""
    s = REHEARSED if bench.rehearse else MODELS["Qwen2.5-1.5B"]
    c = dataclasses.replace(s.config, num_layers=1)
    s = dataclasses.replace(s, config=c)
    found = []
    for name, rows, context, shared, share in (
        ("no sharing", 64, 2048, 0, True),
        ("64 children on 4096 tokens, read by each", 64, 4160, 4096, False),
        ("64 children on 4096 tokens, read once", 64, 4160, 4096, True),
        ("16 children on 512 tokens, read by each", 16, 576, 512, False),
        ("16 children on 512 tokens, read once", 16, 576, 512, True),
        ("one row", 1, 4096, 0, True),
    ):
        if bench.rehearse:
            rows, context, shared = min(rows, 4), context // 16, shared // 16
        tables = tables_of(rows, context, shared)
        layout, pool = bench.layout(c, tables.max() + 1)
        layer_kv = layout.layer_view(pool, 0)
        starts, contexts = np.arange(rows + 1, dtype=np.int32), np.full(rows, context, np.int32)
        tiles = rows_of_tiles(c.num_heads // c.num_kv_heads)
        plan = plan_attention(starts, contexts, tables, BLOCK_SIZE, c.num_kv_heads, *tiles, bench.costs, share=share)
        nothing = np.zeros(rows, np.int32)
        step = StepTokens(nothing, nothing + context - 1, [np.full(rows, -1, np.int64)], [tables], [plan])
        on_device = DeviceStep(step.room, 1, [c.num_kv_heads], bench.costs, bench.device)
        on_device.load(step)
        query = torch.randn(rows, c.num_heads, c.head_dim, device=bench.device, dtype=bench.dtype)

        places = on_device.plans[0], on_device.positions, on_device.tables[0]
        run = partial(attend, query, layer_kv, *places, Terms(c.head_dim**-0.5, None))
        seconds = bench.kernel_seconds(run)
        needed = (shared + rows * (context - shared)) * s.kv_bytes_per_token
        found.append(
            {
                "attention": name,
                "us": 1e6 * seconds,
                "unique GB/s": needed / seconds / 1e9,
                "share of a copy's %": 100 * needed / seconds / bench.card.bandwidth,
            }
        )
        show(found, {})
    return found


def kernel_rows(bench: Bench, show: Show = nothing_shown) -> list[dict[str, Any]]:
    """The other kernels of a step, once each: bytes a second, of those that must be moved, as a share of a copy's."""
    c = (REHEARSED if bench.rehearse else MODELS["Qwen2.5-1.5B"]).config
    found: list[dict[str, Any]] = []

    def measure(kernel: str, rows: int, run: Callable[[], object], moved: int) -> None:
        seconds = bench.kernel_seconds(run)
        share = 100 * moved / seconds / bench.card.bandwidth
        found.append({"kernel": kernel, "rows": rows, "us": 1e6 * seconds, "share of a copy's %": share})
        show(found, {})

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device=bench.device, dtype=dtype)

    def full(rows: int, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, device=bench.device, dtype=dtype)

    for rows in (1, 4) if bench.rehearse else (1, 64, 256):
        logits, temperatures = 3 * random(rows, c.vocab_size, dtype=bench.dtype), full(rows, 0.8)
        uniforms, each = full(rows, 0.5, torch.float64), torch.arange(rows, device=bench.device)
        for name, top_k, top_p, some in (
            ("draw", 0, 1.0, logits),
            ("draw, top-k 50", 50, 1.0, logits),
            ("draw, top-k 20 and top-p 0.8", 20, 0.8, logits),
            ("draw, top-p 0.95", 0, 0.95, 2 * logits),
            ("draw, top-p 0.95 of nearly equal tokens", 0, 0.95, logits / 3),
        ):
            filters = Filters(each, full(rows, top_k, torch.int64), full(rows, top_p), full(rows, 0))
            given = some, some, temperatures, uniforms, each, filters if top_k or top_p < 1 else None
            measure(name, rows, partial(draw_tokens, *given), logits.nbytes)
        hidden, weight = random(rows, c.hidden_size, dtype=bench.dtype), random(c.hidden_size, dtype=bench.dtype)
        measure("add and norm", rows, partial(add_norm, hidden, hidden, weight, 1e-6), 4 * hidden.nbytes)
        gate_up = random(rows, 2 * c.intermediate_size, dtype=bench.dtype)
        measure("gate", rows, partial(gated, gate_up), 3 * gate_up.nbytes // 2)
        layout, pool = bench.layout(dataclasses.replace(c, num_layers=1), rows)
        qkv = random(rows, c.num_heads + 2 * c.num_kv_heads, c.head_dim, dtype=bench.dtype)
        angles = random(rows, 1, c.head_dim // 2)
        places = BLOCK_SIZE * c.num_kv_heads * c.head_dim * (each % layout.blocks_per_slab)
        rotate = partial(norm_rotate_write, qkv, angles, angles, None, 1e-6, places, layout.layer_view(pool, 0))
        measure("rotate and write", rows, rotate, 2 * qkv.nbytes)
    return found


def product_rows(bench: Bench, show: Show = nothing_shown) -> list[dict[str, Any]]:
    """Products of few rows by torch and by `RowLinear`, whose gate is in it: weights read, as a share of a copy's rate.

    Weights are taken in turn from more than the L2 holds.
    """
    c = (REHEARSED if bench.rehearse else MODELS["Qwen2.5-1.5B"]).config
    heads, of_tensors = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, {"device": bench.device, "dtype": bench.dtype}
    found: list[dict[str, Any]] = []

    def multiply(products: list[Linear], x: torch.Tensor) -> None:
        for product in products:
            product(x)

    for name, outputs, inputs, gate in (
        ("qkv", heads, c.hidden_size, None),
        ("gate_up", 2 * c.intermediate_size, c.hidden_size, Activation.SILU),
        ("down", c.hidden_size, c.intermediate_size, None),
    ):
        size = outputs * inputs * bench.dtype.itemsize
        weights = [
            torch.randn(outputs, inputs, **of_tensors) for _ in range(1 if bench.rehearse else 4 * 10**8 // size)
        ]
        own = partial(RowLinear, gate=gate, dependent=bench.costs.dependent)
        for by, make in (("torch", Linear), ("few rows", partial(own, fixed=False)), ("batch-invariant", own)):
            products = [make(weight) for weight in weights]
            for rows in (1, 4) if bench.rehearse else (1, 16, 64):
                x = torch.randn(rows, inputs, **of_tensors)
                seconds = bench.kernel_seconds(partial(multiply, products, x)) / len(products)
                share = 100 * size / seconds / bench.card.bandwidth
                found.append(
                    {"product": name, "by": by, "rows": rows, "us": 1e6 * seconds, "share of a copy's %": share}
                )
                show(found, {})
        bench.free_memory()
    return found


def layer_floors(s: ModelShape, card: Card, tokens: int, read: int) -> dict[str, float]:
    """The least seconds of each kernel of one layer: they run one after the other, so a step's floor is their sum.

    Args:
        s: the model.
        card: the device.
        tokens: of the step.
        read: tokens whose keys and values are read.
    """
    c, size = s.config, s.item_bytes

    def moved(elements: int) -> float:
        return size * elements / card.bandwidth

    heads = c.num_heads * c.head_dim
    floors = {
        "attention": read * s.kv_bytes_per_token / c.num_layers / card.bandwidth + moved(2 * tokens * heads),
        "norms": 2 * moved(4 * tokens * c.hidden_size),
        "rotation": moved(2 * tokens * (heads + 2 * c.num_kv_heads * c.head_dim)),
        "gate": moved(3 * tokens * c.intermediate_size),
    }
    for index, (outputs, inputs) in enumerate(c.layer_products):
        multiplied = 2 * tokens * outputs * inputs / card.matrix_rate
        floors[f"product {index}"] = max(moved(outputs * inputs + tokens * (outputs + inputs)), multiplied)
    return floors


def make_layers(bench: Bench, c: DecoderConfig, batch_invariant: bool = False) -> Layers:
    """Random layers of a model's sizes, on the backend that is chosen for the device."""

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=bench.device, dtype=bench.dtype) / columns**0.5

    def layer(_: int) -> LayerWeights:
        heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        ones = torch.ones(c.hidden_size, device=bench.device, dtype=bench.dtype)
        qkv, out = matrix(heads, c.hidden_size), matrix(c.hidden_size, c.num_heads * c.head_dim)
        gate_up, down = matrix(2 * c.intermediate_size, c.hidden_size), matrix(c.hidden_size, c.intermediate_size)
        return LayerWeights(ones, qkv, None, out, ones, gate_up, down)

    spec = DecoderSpec(c.num_heads, c.num_kv_heads, c.head_dim, 1e-6)
    outer = EmbeddingAndNorm(matrix(c.vocab_size, c.hidden_size), torch.ones_like(layer(0).attention_norm))
    if bench.rehearse:
        backend = TritonBackend(bench.costs, batch_invariant=batch_invariant)
    else:
        backend = choose_backend(bench.device, bench.dtype, batch_invariant)
    return backend.prepare_layers(c.num_layers, layer, spec, outer)


def batch_of(
    tables: np.ndarray, context: int, new: int, slots: int
) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
    """A step of `new` tokens for each sequence: token ids, positions and the batch."""
    rows = len(tables)
    positions = np.tile(np.arange(context - new, context), rows)
    sequences = np.repeat(np.arange(rows), new)
    blocks = tables[sequences, positions // BLOCK_SIZE].astype(np.int64)
    batch = AttentionBatch(
        query_starts=torch.arange(rows + 1, dtype=torch.int32) * new,
        row_sequences=torch.from_numpy(sequences.astype(np.int32)),
        context_lengths=torch.full((rows,), context, dtype=torch.int32),
        block_tables=torch.from_numpy(tables),
        write_slabs=torch.from_numpy(blocks // slots),
        write_slots=torch.from_numpy(blocks % slots),
        write_offsets=torch.from_numpy(positions % BLOCK_SIZE),
        write_rows=None,
    )
    return torch.randint(3, 600, (rows * new,)), torch.from_numpy(positions), batch


def step_rows(
    bench: Bench,
    show: Show = nothing_shown,
    context: int = 450,
    shared: int = 192,
    batch_invariant: bool = False,
) -> list[dict[str, Any]]:
    """Decode steps of generators and scoring by verifiers, whole forward passes, over their floors.

    `floor ms` is for a step whose kernels all overlap, `kernels' floor ms` the sum of what each takes at least.
    """
    pairs = [(REHEARSED, REHEARSED)] if bench.rehearse else [(MODELS[a], MODELS[b]) for a, b in PAIRS]
    found = []
    for pair in pairs:
        for s, new in zip(pair, (1, 50), strict=True):
            c = s.config
            layers = make_layers(bench, c, batch_invariant)
            most = 4 if bench.rehearse else 512 if new == 1 else 40
            layout, pool = bench.layout(c, tables_of(most, context, shared).max() + 1)
            layer_kvs = [layout.layer_view(pool, index) for index in range(c.num_layers)]
            if new == 1:
                layers.warm_up(layer_kvs, decodes=True)
            for rows in (1, 4) if bench.rehearse else (1, 16, 64, 256, 512) if new == 1 else (5, 10, 20, 40):
                step = StepBatch(*batch_of(tables_of(rows, context, shared), context, new, layout.blocks_per_slab))

                run = partial(layers.forward, step, layer_kvs)
                seconds = bench.seconds(run)
                body = dataclasses.replace(s, outputs=0)
                floor = (
                    decode_seconds(body, bench.card, rows, context, shared)
                    if new == 1
                    else scoring_seconds(body, bench.card, rows * new, shared + rows * (context - shared - new))
                )
                read = shared + rows * (context - shared)
                each = c.num_layers * sum(layer_floors(body, bench.card, rows * new, read).values())
                replay = bench.replay_seconds(layers, step, layer_kvs) if new == 1 else None
                found.append(
                    {
                        "model": s.name,
                        "rows": rows,
                        "tokens of each": new,
                        "ms": 1e3 * seconds,
                        "replay ms": replay and 1e3 * replay,
                        "kernels' floor ms": 1e3 * each,
                        "over kernels' floor": (replay or seconds) / each,
                        "tokens/s": rows * new / seconds,
                        "floor ms": 1e3 * floor,
                        "over floor": seconds / floor,
                    }
                )
                show(found, {})
                del run
            del layers, layer_kvs, pool
            bench.free_memory()
    return found


def write_checkpoint(source: Path, target: Path, c: DecoderConfig) -> None:
    """A checkpoint without weights: the demo's tokenizer and configuration, with other sizes."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config |= {
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "layer_types": ["full_attention"] * c.num_layers,
    }
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")


class DeviceTime:
    """Time of batches on the device, between the launch of a batch's first kernel and the end of its last."""

    def __init__(self, bench: Bench, monkeypatch: ExitStack) -> None:
        """Time every batch of every engine until `monkeypatch` is closed."""
        self._rehearse = bench.rehearse
        self._spans: list[tuple[Any, Any]] = []
        launch = ModelRunner.launch

        def timed(runner: ModelRunner, *arguments: Any) -> Any:
            before = self._now()
            launched = launch(runner, *arguments)
            self._spans.append((before, self._now()))
            return launched

        monkeypatch.enter_context(mock.patch.object(ModelRunner, "launch", timed))

    @property
    def seconds(self) -> float:
        """All batches together."""
        if self._rehearse:
            return sum(after - before for before, after in self._spans)
        torch.cuda.synchronize()
        return sum(before.elapsed_time(after) for before, after in self._spans) / 1e3

    def _now(self) -> Any:
        if self._rehearse:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def search_rows(bench: Bench, show: Show = nothing_shown) -> list[dict[str, Any]]:
    """Beam searches of 64 candidates a round with random weights: tokens a second, and how busy the device is.

    The first row is search-and-learn's way on transformers: one search at a time, whose paths the verifier reads anew
    after each step. There every step has its full length; here a few paths end before, at an end token drawn by chance.
    """
    sizes = _SearchSizes(2, 2, 2, 4) if bench.rehearse else _SearchSizes()
    names = ("tiny", "tiny") if bench.rehearse else PAIRS[0]
    shapes = [REHEARSED if name == "tiny" else MODELS[name] for name in names]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder) / role for role in ("generator", "verifier")]
        for source, target, s in zip((generator_path(), verifier_path()), folders, shapes, strict=True):
            write_checkpoint(source, target, s.config)
        found = [_baseline(bench, sizes, folders)]
        show(found, {})
        for searches in (1,) if bench.rehearse else (1, 8, 32):
            for ahead in (False, True):
                bench.free_memory()  # of the models and the engine before
                row = _searches(bench, sizes, folders, searches, ahead)
                found.append(row | {"over transformers": row["generated tokens/s"] / found[0]["generated tokens/s"]})
                show(found, {})
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _SearchSizes:
    """A beam search, whose steps are blocks of tokens."""

    beam_width: int = 16
    expansion: int = 4
    steps: int = 8
    step_tokens: int = 48
    problem: str = "one two three " * 20


def _searches(bench: Bench, sizes: _SearchSizes, folders: list[Path], searches: int, ahead: bool) -> dict[str, Any]:
    settings = RuntimeSettings(
        generator=str(folders[0]),
        verifier=str(folders[1]),
        load_format=LoadFormat.DUMMY,
        device=bench.device.type,
        launch_ahead=ahead,
        # Not what is left: beside another engine's remains, that would be another size for each row.
        kv_memory=2**26 if bench.rehearse else torch.cuda.get_device_properties(0).total_memory // 2,
        answer_equivalence=AnswerEquivalence.EXACT_MATCH,
    )
    request = make_request(
        sizes.problem,
        {
            "beam_width": sizes.beam_width,
            "expansion": sizes.expansion,
            "max_steps": sizes.steps,
            "step_rule": f"tokens:{sizes.step_tokens}",
            "merge_duplicates": False,
        },
    )
    orchestrator = load_orchestrator(settings)
    orchestrator.submit(request)
    while orchestrator.busy:  # what happens once
        orchestrator.step()
    with ExitStack() as timed:
        device_time = DeviceTime(bench, timed)
        for seed in range(searches):
            orchestrator.submit(dataclasses.replace(request, seed=1 + seed))
        start, results = time.perf_counter(), []
        while orchestrator.busy:
            results += orchestrator.step()
        seconds = time.perf_counter() - start
    reserved = 0 if bench.rehearse else torch.cuda.memory_reserved()
    orchestrator.close()
    orchestrator.engine.close()
    rounds = sum(max((node.depth for node in result.nodes), default=0) for result in results)
    generated = sum(r.usage.generated_tokens for r in results)
    tokens = sum(r.usage.generator_tokens + r.usage.verifier_tokens for r in results)
    return {
        "run by": "Espalier, launching ahead" if ahead else "Espalier",
        "searches at once": searches,
        "rounds/s": rounds / seconds,
        "generated tokens/s": generated / seconds,
        "computed tokens/s": tokens / seconds,
        "device busy %": 100 * device_time.seconds / seconds,
        "reserved GiB": reserved / 2**30,
    }


def _baseline(bench: Bench, sizes: _SearchSizes, folders: list[Path]) -> dict[str, Any]:
    generator, verifier = folders
    models = TransformersModels(generator, verifier, bench.device, bench.dtype, random=True)
    prompt = AutoTokenizer.from_pretrained(str(generator)).encode(sizes.problem)
    rows = [prompt] * (sizes.beam_width * sizes.expansion)
    models.sample(rows, [], 2)  # what happens once
    start, tokens = time.perf_counter(), 0
    for _ in range(sizes.steps):
        rows = [row + new for row, new in zip(rows, models.sample(rows, [], sizes.step_tokens), strict=True)]
        models.classify(rows)
        tokens += sum(map(len, rows)) + len(rows) * sizes.step_tokens
    seconds = time.perf_counter() - start
    return {
        "run by": "transformers",
        "searches at once": 1,
        "rounds/s": sizes.steps / seconds,
        "generated tokens/s": sizes.steps * len(rows) * sizes.step_tokens / seconds,
        "computed tokens/s": tokens / seconds,
        "device busy %": None,
        "reserved GiB": None,
        "over transformers": 1.0,
    }


PARTS: dict[str, Callable[[Bench, Show], list[dict[str, Any]]]] = {
    "ceilings": ceiling_rows,
    "attention": attention_rows,
    "kernels": kernel_rows,
    "products": product_rows,
    "steps": step_rows,
    "invariant": partial(step_rows, batch_invariant=True),
    "searches": search_rows,
}
"""Measurements by name, in order."""
