"""A whole decoder: the compiled path beside the torch reference."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from paged_batch import paged_problem

from espalier.kernels.backend import Backend, choose_backend
from espalier.kernels.batch import AttentionBatch
from espalier.kernels.cpu import threads as workers
from espalier.kernels.cpu.backend import CpuBackend
from espalier.kernels.cpu.decoder import CpuLayers
from espalier.kernels.layers import Layers, LayerShape, LayerWeights, OuterWeights, TorchLayers
from espalier.kernels.layout import KVLayout
from espalier.kernels.rotary import inverse_frequencies
from espalier.kernels.torch_backend import TorchBackend

LAYERS, VOCABULARY = 3, 90


def given_tensors(layer: LayerWeights) -> dict[str, torch.Tensor]:
    return {name: t for name in LayerWeights.__slots__ if (t := getattr(layer, name)) is not None}


def random_layer(
    seed: int, hidden: int, inner: int, shape: LayerShape, bias: bool, head_norms: bool = False, out_bias: bool = False
) -> LayerWeights:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return LayerWeights(
        attention_norm=1 + 0.1 * torch.randn(hidden, generator=generator),
        qkv=matrix(qkv, hidden),
        qkv_bias=torch.randn(qkv, generator=generator) if bias else None,
        out=matrix(hidden, shape.num_heads * shape.head_dim),
        mlp_norm=1 + 0.1 * torch.randn(hidden, generator=generator),
        gate_up=matrix(2 * inner, hidden),
        down=matrix(hidden, inner),
        out_bias=torch.randn(hidden, generator=generator) if out_bias else None,
        query_norm=1 + 0.3 * torch.randn(shape.head_dim, generator=generator) if head_norms else None,
        key_norm=1 + 0.3 * torch.randn(shape.head_dim, generator=generator) if head_norms else None,
    )


def random_outer(hidden: int, shape: LayerShape) -> OuterWeights:
    generator = torch.Generator().manual_seed(hidden)
    embedding = torch.randn(VOCABULARY, hidden, generator=generator)
    norm = 1 + 0.1 * torch.randn(hidden, generator=generator)
    return OuterWeights(embedding, norm, inverse_frequencies(shape.head_dim, 10_000.0, None), 1.25)


@dataclasses.dataclass
class Step:
    """Some tokens of paged sequences, as the layers are given them, over a KV pool of random KV."""

    batch: AttentionBatch
    layout: KVLayout
    kv_pool: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor

    def run(self, layers: Layers) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layers give, and the KV pool that they leave."""
        kv_pool = self.kv_pool.clone()
        kvs = [self.layout.layer_view(kv_pool, i) for i in range(LAYERS)]
        return layers.forward(self.token_ids, self.positions, kvs, self.batch), kv_pool.view(torch.float32)

    def only(self, sequence: int) -> "Step":
        """The step of one sequence alone."""
        b = self.batch
        start, end = int(b.query_starts[sequence]), int(b.query_starts[sequence + 1])
        rows = slice(start, end)
        batch = AttentionBatch(
            query_starts=torch.tensor([0, end - start], dtype=torch.int32),
            row_sequences=torch.zeros(end - start, dtype=torch.int32),
            context_lengths=b.context_lengths[sequence : sequence + 1],
            block_tables=b.block_tables[sequence : sequence + 1],
            write_slabs=b.write_slabs[rows],
            write_slots=b.write_slots[rows],
            write_offsets=b.write_offsets[rows],
            write_rows=None,
        )
        return dataclasses.replace(self, batch=batch, token_ids=self.token_ids[rows], positions=self.positions[rows])


def make_step(sequences: list[tuple[int, int]], shape: LayerShape) -> Step:
    problem = paged_problem(sequences, heads=shape.num_heads, kv_heads=shape.num_kv_heads, head_dim=shape.head_dim)
    generator = torch.Generator().manual_seed(1)
    layout = dataclasses.replace(problem.layout, num_layers=LAYERS)
    layout = dataclasses.replace(layout, slab_bytes=problem.layout.blocks_per_slab * layout.block_bytes + 64)
    slabs = problem.layer_kv.keys.shape[0]
    kv_pool = torch.randn(slabs * layout.slab_bytes // 4, generator=generator).view(torch.uint8)
    positions = torch.cat([torch.arange(c - n, c) for c, n in sequences])
    size, slots = layout.block_size, layout.blocks_per_slab
    blocks = torch.stack(
        [
            problem.batch.block_tables[s, p // size]
            for s, p in zip(problem.batch.row_sequences.tolist(), positions.tolist(), strict=True)
        ]
    ).long()
    batch = dataclasses.replace(
        problem.batch, write_slabs=blocks // slots, write_slots=blocks % slots, write_offsets=positions % size
    )
    token_ids = torch.randint(VOCABULARY, (len(positions),), generator=generator)
    return Step(batch, layout, kv_pool, token_ids, positions)


SHAPES = {
    "panels filled": (64, 96, LayerShape(4, 2, 32, 1e-6), True),
    "panels cut": (40, 50, LayerShape(3, 1, 10, 1e-5), False),
    "one group": (48, 72, LayerShape(6, 6, 8, 1e-6), True),
}
SEQUENCES = [(40, 40), (7, 1), (65, 1), (33, 9), (16, 16), (1, 1), (80, 70)]


@pytest.mark.parametrize(("hidden", "inner", "shape", "bias"), SHAPES.values(), ids=SHAPES.keys())
def test_compiled_layers_equal_the_reference(hidden: int, inner: int, shape: LayerShape, bias: bool):
    step = make_step(SEQUENCES, shape)
    one, other = (
        backend.prepare_layers(
            LAYERS, lambda i: random_layer(i, hidden, inner, shape, bias), shape, random_outer(hidden, shape)
        )
        for backend in (CpuBackend(), TorchBackend())
    )
    (output, kv_pool), (expected, expected_kv_pool) = step.run(one), step.run(other)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kv_pool, expected_kv_pool, rtol=1e-4, atol=1e-4)
    assert not torch.equal(kv_pool, step.kv_pool.view(torch.float32)), "keys and values were written"


@pytest.mark.parametrize("windows", [(), (4, None, 33), (300, 1, 16)], ids=str)
@pytest.mark.parametrize(("head_norms", "out_bias"), [(True, False), (False, True), (True, True)])
def test_compiled_layers_equal_the_reference_with_all_that_a_layer_may_have(windows, head_norms: bool, out_bias: bool):
    hidden, inner = 40, 50
    shape = LayerShape(4, 2, 12, 1e-6, windows)
    step, outer = make_step([*SEQUENCES, (700, 3), (530, 20)], shape), random_outer(hidden, shape)
    one, other = (
        backend.prepare_layers(
            LAYERS, lambda i: random_layer(i, hidden, inner, shape, True, head_norms, out_bias), shape, outer
        )
        for backend in (CpuBackend(), TorchBackend())
    )
    (output, kv_pool), (expected, expected_kv_pool) = step.run(one), step.run(other)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kv_pool, expected_kv_pool, rtol=1e-4, atol=1e-4)


def test_a_sequence_has_the_same_bits_alone_and_in_company_on_any_number_of_threads():
    hidden, inner, shape, bias = 40, 50, LayerShape(3, 1, 10, 1e-5, (None, 7, 40)), False
    layers = CpuLayers(
        LAYERS, lambda i: random_layer(i, hidden, inner, shape, bias, True, True), shape, random_outer(hidden, shape)
    )
    step = make_step(SEQUENCES, shape)
    together, _ = step.run(layers)
    before = workers.num_threads()
    try:
        for threads in (1, 2, 5):
            workers.set_threads(threads)
            assert torch.equal(step.run(layers)[0], together), f"{threads} threads"
            for s in range(len(SEQUENCES)):
                rows = slice(int(step.batch.query_starts[s]), int(step.batch.query_starts[s + 1]))
                assert torch.equal(step.only(s).run(layers)[0], together[rows]), f"sequence {s}, {threads} threads"
    finally:
        workers.set_threads(before)


def test_bits_do_not_depend_on_where_arrays_happen_to_lie():
    hidden, inner, shape, bias = 48, 96, LayerShape(4, 2, 12, 1e-6), True
    layers = CpuLayers(
        LAYERS, lambda i: random_layer(i, hidden, inner, shape, bias), shape, random_outer(hidden, shape)
    )
    step = make_step(SEQUENCES[:4], shape)
    expected, _ = step.run(layers)
    kv_pool, sizes, kept = step.kv_pool.clone(), random.Random(0), []
    kvs = [step.layout.layer_view(kv_pool, i) for i in range(LAYERS)]
    for _ in range(500):
        kept = [*kept[-20:], np.empty(sizes.randint(1, 9000)), torch.empty(sizes.randint(1, 20_000))]
        assert torch.equal(layers.forward(step.token_ids, step.positions, kvs, step.batch), expected)


def test_tokens_that_are_only_computed_again_write_nothing():
    hidden, inner, shape, bias = SHAPES["panels filled"]
    layers = CpuLayers(
        LAYERS, lambda i: random_layer(i, hidden, inner, shape, bias), shape, random_outer(hidden, shape)
    )
    step = make_step([(20, 3)], shape)
    b = step.batch
    again = dataclasses.replace(
        b,
        write_slabs=b.write_slabs[2:],
        write_slots=b.write_slots[2:],
        write_offsets=b.write_offsets[2:],
        write_rows=torch.tensor([2]),
    )
    _, kv_pool = dataclasses.replace(step, batch=again).run(layers)
    changed = [
        (step.layout.layer_view(kv_pool.view(torch.uint8), i), step.layout.layer_view(step.kv_pool, i))
        for i in range(LAYERS)
    ]
    for after, before in changed:
        for name in ("keys", "values"):
            differs = (getattr(after, name) != getattr(before, name)).any(-1).any(-1).nonzero()
            assert differs.tolist() == [[int(b.write_slabs[2]), int(b.write_slots[2]), int(b.write_offsets[2])]]


@pytest.mark.parametrize("all_there_is", [False, True])
def test_weights_can_be_had_back(all_there_is: bool):
    hidden, inner, shape, _ = SHAPES["panels cut"]

    def load(index: int) -> LayerWeights:
        return random_layer(index, hidden, inner, shape, *[all_there_is] * 3)

    layers = CpuLayers(LAYERS, load, shape, random_outer(hidden, shape))
    for index in range(LAYERS):
        given, had = load(index), layers.weights(index)
        for name in LayerWeights.__slots__:
            mine, theirs = getattr(had, name), getattr(given, name)
            assert mine is theirs is None or torch.equal(mine, theirs), name


def test_each_layer_is_asked_for_once_and_the_path_goes_by_dtype():
    hidden, inner, shape, bias = SHAPES["panels filled"]
    asked: list[int] = []

    def load(index: int, dtype: torch.dtype = torch.float32) -> LayerWeights:
        asked.append(index)
        layer = random_layer(index, hidden, inner, shape, bias)
        return dataclasses.replace(layer, **{name: t.to(dtype) for name, t in given_tensors(layer).items()})

    outer = random_outer(hidden, shape)
    layers = choose_backend("cpu", torch.float32).prepare_layers(LAYERS, load, shape, outer)
    assert isinstance(layers, CpuLayers)
    assert asked == [0, 1, 2]
    assert len(layers) == LAYERS
    halves = choose_backend("cpu", torch.bfloat16)
    assert isinstance(halves.prepare_layers(LAYERS, lambda i: load(i, torch.bfloat16), shape, outer), TorchLayers)


@pytest.mark.parametrize("backend", [CpuBackend(), TorchBackend()])
@pytest.mark.parametrize("token_id", [-1, VOCABULARY, 2**40])
def test_a_token_that_the_embedding_does_not_have_is_refused(backend: Backend, token_id: int):
    hidden, inner, shape, bias = SHAPES["one group"]
    outer = random_outer(hidden, shape)
    layers = backend.prepare_layers(LAYERS, lambda i: random_layer(i, hidden, inner, shape, bias), shape, outer)
    step = make_step([(5, 3)], shape)
    step.token_ids[1] = token_id
    with pytest.raises(IndexError):
        step.run(layers)


def test_layers_leave_numbers_below_the_least_normal_one_to_their_caller():
    hidden, inner, shape, bias = SHAPES["panels filled"]
    layers = CpuLayers(
        LAYERS, lambda i: random_layer(i, hidden, inner, shape, bias), shape, random_outer(hidden, shape)
    )
    make_step([(7, 1)], shape).run(layers)
    assert (np.full(16, 1e-30, np.float32) * np.float32(1e-10) > 0).all()
