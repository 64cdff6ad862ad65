"""Recorded steps beside the same steps launched kernel by kernel; imports nothing above `kernels`."""

# pyright: reportMissingImports=false, reportArgumentType=false
# (what tests share lies elsewhere, and arguments come as lists)

from dataclasses import dataclass, replace

import pytest
import torch
from layer_steps import LAYERS, Step, make_step, random_layer, random_outer
from on_gpu import DEVICE, error

from espalier.kernels.layers import DecoderSpec, EmbeddingAndNorm, Layers, LayerWeights
from espalier.kernels.layout import LayerKV
from espalier.kernels.triton.cache import TokenMajorLayout


@dataclass(frozen=True)
class Model:
    hidden: int
    inner: int
    shape: DecoderSpec


SMALL = Model(1536, 8960, DecoderSpec(12, 2, 128, 1e-6))
LARGE = Model(3584, 18_944, DecoderSpec(28, 4, 128, 1e-6))
"""The sizes of a 1.5B generator and of a 7B verifier."""


def layers_of(model: Model, *, recorded: bool) -> Layers:
    """Random layers in bfloat16 on the device."""
    from espalier.kernels.triton.backend import TritonBackend
    from espalier.kernels.triton.plan import Costs
    from espalier.kernels.triton.recording import GraphRecorder

    def there(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(DEVICE, torch.bfloat16)

    def layer(index: int) -> LayerWeights:
        made = random_layer(index, model.hidden, model.inner, model.shape, bias=True)
        return LayerWeights(*(there(getattr(made, name)) for name in made.__slots__))

    outer = random_outer(model.hidden, model.shape)
    outer = EmbeddingAndNorm(there(outer.embedding), there(outer.norm))
    card = torch.cuda.get_device_properties(0)
    costs = Costs(card.multi_processor_count, dependent=card.major >= 9)
    backend = TritonBackend(costs, GraphRecorder() if recorded else None)
    return backend.prepare_layers(LAYERS, layer, model.shape, outer)


def kv_of(step: Step) -> tuple[torch.Tensor, list[LayerKV]]:
    """The step's KV pool in bfloat16 on the device."""
    pool = step.kv_pool.view(torch.float32).to(DEVICE, torch.bfloat16).view(torch.uint8)
    layout = replace(step.layout, dtype=torch.bfloat16, slab_bytes=step.layout.slab_bytes // 2)
    return pool, [layout.layer_view(pool, index) for index in range(LAYERS)]


@pytest.mark.parametrize("model", [SMALL, LARGE], ids=["1.5B", "7B"])
def test_a_recorded_step_equals_the_eager_one_bit_by_bit(model: Model):
    pool, kvs = kv_of(make_step([(70, 1)] * 256, model.shape, TokenMajorLayout))
    before = pool.clone()
    recorded, eager = layers_of(model, recorded=True), layers_of(model, recorded=False)
    recorded.warm_up(kvs, decodes=True)
    assert torch.equal(pool, before), "recording writes nowhere"
    for rows in (256, 8, 1):
        step = make_step([(70, 1)] * rows, model.shape, TokenMajorLayout)
        found = recorded.forward(step.given(), kvs).clone()
        written = pool.clone()
        pool.copy_(before)
        assert torch.equal(found, eager.forward(step.given(), kvs)), rows
        assert torch.equal(written, pool)
        pool.copy_(before)


def test_steps_of_fewer_rows_follow_larger_ones_whose_tokens_were_drawn_on_the_device():
    _, kvs = kv_of(make_step([(70, 1)] * 8, SMALL.shape, TokenMajorLayout))
    recorded, eager = layers_of(SMALL, recorded=True), layers_of(SMALL, recorded=False)
    recorded.warm_up(kvs, decodes=True)
    drawn = torch.arange(11, 19)
    for rows in (8, 8, 7, 7, 1, 8, 3):
        step = make_step([(70, 1)] * rows, SMALL.shape, TokenMajorLayout)
        waiting = -1 - torch.arange(rows)
        found = recorded.forward(step.given(waiting, drawn.to(DEVICE)), kvs).clone()
        assert error(found, eager.forward(step.given(drawn[:rows]), kvs)) < 1e-2
    torch.cuda.synchronize()


def test_a_step_whose_kernels_begin_early_has_the_same_bits_a_thousand_times():
    """A kernel that read before the one before it had written would show here, and nowhere else."""
    pool, kvs = kv_of(make_step([(70, 1)] * 8, SMALL.shape, TokenMajorLayout))
    layers = layers_of(SMALL, recorded=True)
    layers.warm_up(kvs, decodes=True)
    before = pool.clone()
    for rows in (8, 1):
        step = make_step([(70, 1)] * rows, SMALL.shape, TokenMajorLayout).given()
        expected = layers.forward(step, kvs).clone()
        differences = torch.zeros((), dtype=torch.int64, device=DEVICE)
        for _ in range(1000):
            pool.copy_(before)
            differences += (layers.forward(step, kvs) != expected).sum()
        assert int(differences) == 0
