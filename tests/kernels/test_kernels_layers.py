"""A whole decoder: the compiled path beside the torch reference."""

import dataclasses
import random
import weakref

import numpy as np
import pytest
import torch
from layer_steps import LAYERS, OF_ALL_KINDS, VOCABULARY, make_step, random_layer, random_outer

from espalier.kernels.backend import Backend, choose_backend
from espalier.kernels.cpu import threads as workers
from espalier.kernels.cpu.backend import CpuBackend
from espalier.kernels.cpu.decoder import CpuLayers
from espalier.kernels.cpu.products.linear import unpack
from espalier.kernels.layers import DecoderSpec, Layers, LayerWeights, TorchLayers, UnsupportedShapeError, rms_norm
from espalier.kernels.torch_backend import TorchBackend


def given_tensors(layer: LayerWeights) -> dict[str, torch.Tensor]:
    return {name: t for name in LayerWeights.__slots__ if (t := getattr(layer, name)) is not None}


SHAPES = {
    "panels filled": (64, 96, DecoderSpec(4, 2, 32, 1e-6), True),
    "panels cut": (40, 50, DecoderSpec(3, 1, 10, 1e-5), False),
    "one group": (48, 72, DecoderSpec(6, 6, 8, 1e-6), True),
}
SEQUENCES = [(40, 40), (7, 1), (65, 1), (33, 9), (16, 16), (1, 1), (80, 70)]


@pytest.mark.parametrize(("hidden", "inner", "shape", "bias"), SHAPES.values(), ids=SHAPES.keys())
def test_compiled_layers_equal_the_reference(hidden: int, inner: int, shape: DecoderSpec, bias: bool):
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
    shape = DecoderSpec(4, 2, 12, 1e-6, windows)
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


@pytest.mark.parametrize("hidden", [40, 64])
@pytest.mark.parametrize("out_bias", [True, False])
def test_compiled_layers_equal_the_reference_where_layers_differ_and_results_are_normalised(
    hidden: int, out_bias: bool
):
    step, outer = make_step([*SEQUENCES, (700, 3)], OF_ALL_KINDS), random_outer(hidden, OF_ALL_KINDS)
    one, other = (
        backend.prepare_layers(
            LAYERS, lambda i: random_layer(i, hidden, 50, OF_ALL_KINDS, True, True, out_bias, True), OF_ALL_KINDS, outer
        )
        for backend in (CpuBackend(), TorchBackend())
    )
    (output, kv_pool), (expected, expected_kv_pool) = step.run(one), step.run(other)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kv_pool, expected_kv_pool, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", [CpuBackend(), TorchBackend()], ids=["compiled", "torch"])
@pytest.mark.parametrize(("shape", "post_norms"), [(DecoderSpec(3, 1, 10, 1e-5), False), (OF_ALL_KINDS, True)])
def test_the_states_that_enter_a_layer_are_the_last_ones_of_a_decoder_that_ends_there(
    backend: TorchBackend, shape: DecoderSpec, post_norms: bool
):
    def decoder(count: int) -> Layers:
        def layer(index: int) -> LayerWeights:
            return random_layer(index, 40, 50, shape, False, True, True, post_norms)

        return backend.prepare_layers(count, layer, shape, random_outer(40, shape))

    step, layers = make_step(SEQUENCES, shape), decoder(LAYERS)
    plain, _ = step.run(layers)
    layers.tap([2])
    layers.tap([1, 2])
    tapped, _ = step.run(layers)
    assert layers.taps == (1, 2)
    assert tapped.shape == (len(plain), 3 * 40)
    assert torch.equal(tapped[:, :40], plain)
    for place, count in enumerate((1, 2), start=1):
        kv_pool = step.kv_pool.clone()
        kvs = [step.layout.layer_view(kv_pool, i) for i in range(count)]
        expected = decoder(count).forward(step.given(), kvs)
        assert torch.equal(tapped[:, 40 * place : 40 * (place + 1)], expected), count
    for layer in range(LAYERS):
        layers.tap_raw(layer)
        with_raw, _ = step.run(layers)
        assert with_raw.shape == (len(plain), 4 * 40)
        assert torch.equal(with_raw[:, :120], tapped)
        if layer in layers.taps:
            normed = rms_norm(with_raw[:, 120:], random_outer(40, shape).norm, shape.norm_eps)
            torch.testing.assert_close(normed, tapped[:, 40 * layer : 40 * (layer + 1)], rtol=1e-5, atol=1e-6)
    for beyond in (-1, LAYERS):
        with pytest.raises(UnsupportedShapeError, match=f"no layer {beyond}"):
            layers.tap_raw(beyond)


@pytest.mark.parametrize(
    ("shape", "post_norms"), [(DecoderSpec(3, 1, 10, 1e-5, (None, 7, 40)), False), (OF_ALL_KINDS, True)]
)
def test_a_sequence_has_the_same_bits_alone_and_in_company_on_any_number_of_threads(
    shape: DecoderSpec, post_norms: bool
):
    hidden, inner = 40, 50
    layers = CpuLayers(
        LAYERS,
        lambda i: random_layer(i, hidden, inner, shape, False, True, True, post_norms),
        shape,
        random_outer(hidden, shape),
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
    hidden, inner, shape, bias = 48, 96, DecoderSpec(4, 2, 12, 1e-6), True
    layers = CpuLayers(
        LAYERS, lambda i: random_layer(i, hidden, inner, shape, bias), shape, random_outer(hidden, shape)
    )
    step = make_step(SEQUENCES[:4], shape)
    expected, _ = step.run(layers)
    kv_pool, sizes, kept = step.kv_pool.clone(), random.Random(0), []
    kvs = [step.layout.layer_view(kv_pool, i) for i in range(LAYERS)]
    for _ in range(500):
        kept = [*kept[-20:], np.empty(sizes.randint(1, 9000)), torch.empty(sizes.randint(1, 20_000))]
        assert torch.equal(layers.forward(step.given(), [*kvs]), expected)  # in other buffers, as on another KV pool


def test_steps_of_as_many_rows_read_and_write_their_own_kv_pools_and_a_released_one_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(workers._helpers, "wanted", 0)  # a late helper would hold the arrays of its call
    hidden, inner, shape, bias = 40, 50, DecoderSpec(4, 2, 12, 1e-6), False
    layers = CpuLayers(
        LAYERS, lambda i: random_layer(i, hidden, inner, shape, bias), shape, random_outer(hidden, shape)
    )
    step = make_step(SEQUENCES[:4], shape)
    expected, written = step.run(layers)
    pools = [step.kv_pool.clone(), torch.zeros_like(step.kv_pool)]
    both = [[step.layout.layer_view(pool, i) for i in range(LAYERS)] for pool in pools]
    of_zeros = layers.forward(step.given(), both[1])
    assert torch.equal(layers.forward(step.given(), both[0]), expected)
    assert torch.equal(layers.forward(step.given(), both[0]), expected)
    assert torch.equal(pools[0].view(torch.float32), written)
    assert torch.equal(layers.forward(step.given(), both[1]), of_zeros)
    assert not torch.equal(of_zeros, expected)
    last = weakref.ref(pools[1].untyped_storage())
    layers.release(both[0])  # which no step is prepared for any more
    del pools, both[0]
    assert last() is not None
    layers.release(both[0])
    del both
    assert last() is None


@pytest.mark.parametrize("backend", [CpuBackend(), TorchBackend()], ids=["compiled", "torch"])
def test_layers_of_a_kv_group_read_and_write_where_its_block_tables_say(backend: TorchBackend):
    hidden, inner, shape, bias = 40, 50, DecoderSpec(4, 2, 12, 1e-6), False
    layers = backend.prepare_layers(
        LAYERS, lambda i: random_layer(i, hidden, inner, shape, bias), shape, random_outer(hidden, shape)
    )
    step = make_step(SEQUENCES[:4], shape)
    expected, _ = step.run(layers)
    b, kv_pool, slots = step.batch, step.kv_pool.clone(), step.layout.blocks_per_slab
    kvs = [dataclasses.replace(step.layout.layer_view(kv_pool, i), group=1 + i % 2) for i in range(LAYERS)]
    slabs = len(kvs[0].keys)
    for layer_kv in kvs[1::2]:  # of group 2, whose slabs lie the other way round
        layer_kv.keys.copy_(layer_kv.keys.flip(0).clone())
        layer_kv.values.copy_(layer_kv.values.flip(0).clone())
    tables = (slabs - 1 - b.block_tables.long() // slots) * slots + b.block_tables % slots
    turned = b.in_other_group(tables.int(), slabs - 1 - b.write_slabs, b.write_slots)
    nowhere = b.in_other_group(torch.zeros_like(b.block_tables), b.write_slabs, b.write_slots)
    batch = dataclasses.replace(nowhere, others=(b, turned))
    assert torch.equal(layers.forward(dataclasses.replace(step, batch=batch).given(), kvs), expected)


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


def test_weights_can_be_had_back():
    hidden, inner, shape, _ = SHAPES["panels cut"]

    def load(index: int) -> LayerWeights:
        return random_layer(index, hidden, inner, shape, *[False] * 4)

    layers = CpuLayers(LAYERS, load, shape, random_outer(hidden, shape))
    for index in range(LAYERS):
        given, packed = load(index), layers.stacked.packed
        for name in ("qkv", "out"):
            weight = getattr(given, name)
            assert torch.equal(unpack(getattr(packed, name)[index], len(weight)), weight), name
        halves = torch.cat([unpack(half, inner) for half in packed.gate_up[index].chunk(2)])
        assert torch.equal(halves, given.gate_up)
        assert torch.equal(unpack(packed.down[index], hidden)[:, :inner], given.down)


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
