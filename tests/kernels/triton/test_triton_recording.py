"""Decode steps that are recorded and replayed, with a stand-in for a CUDA graph that computes again."""

from collections.abc import Callable

import pytest
import torch
from layer_steps import LAYERS, Step, make_step, random_layer, random_outer

from espalier.kernels.layers import LayerShape
from espalier.kernels.torch_backend import TorchBackend
from espalier.kernels.triton import layers as triton_layers
from espalier.kernels.triton.backend import TritonBackend
from espalier.kernels.triton.cache import TokenMajorLayout
from espalier.kernels.triton.plan import Costs
from espalier.kernels.triton.recording import LADDER, room_of

SHAPE = LayerShape(4, 2, 12, 1e-6)


class StandIn:
    """Records a step by keeping what computes it; counts recordings and replays."""

    def __init__(self) -> None:
        self.recorded: list[int] = []
        self.replays = 0

    def __call__(self, compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        output = compute()
        self.recorded.append(len(output))

        def replay() -> None:
            self.replays += 1
            output.copy_(compute())

        return replay, output


@pytest.fixture
def recorder() -> StandIn:
    return StandIn()


@pytest.fixture
def layers(recorder: StandIn):
    return make_layers(TritonBackend(Costs(processors=1), recorder))


def make_layers(backend):
    return backend.prepare_layers(
        LAYERS, lambda i: random_layer(i, 40, 50, SHAPE, True), SHAPE, random_outer(40, SHAPE)
    )


def check(step: Step, layers) -> None:
    """The layers' hidden states and their writes are those of the reference."""
    (output, kv_pool), (expected, expected_kv_pool) = step.run(layers), step.run(make_layers(TorchBackend()))
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kv_pool, expected_kv_pool, rtol=1e-4, atol=1e-4)


def test_tokens_that_were_just_drawn_are_filled_in_on_the_device(layers, recorder: StandIn):
    drawn = torch.tensor([7, 3, 11])
    for sequences in ([(30, 1)] * 4, [(30, 5), (8, 1)]):
        step = make_step(sequences, SHAPE, TokenMajorLayout)
        kvs = [step.layout.layer_view(step.kv_pool, i) for i in range(LAYERS)]
        known, expected_ids = step.token_ids.clone(), step.token_ids.clone()
        known[1], known[3], expected_ids[1], expected_ids[3] = -1 - 2, -1, drawn[2], drawn[0]
        found = layers.forward(known, step.positions, kvs, step.batch, drawn).clone()
        expected = layers.forward(expected_ids, step.positions, kvs, step.batch)
        assert torch.equal(found, expected)
    assert recorder.replays == 2, "the first is replayed, twice; the second is launched kernel by kernel"


def test_steps_of_fewer_tokens_than_were_recorded_are_replayed_and_write_nothing_more(layers, recorder: StandIn):
    pool = make_step([(30, 1)] * 4, SHAPE, TokenMajorLayout)
    kvs = [pool.layout.layer_view(pool.kv_pool, i) for i in range(LAYERS)]
    for sequences in ([(30, 1)] * 4, [(70, 1), (7, 1), (1, 1)], [(5, 1)] * 4):
        step = make_step(sequences, SHAPE, TokenMajorLayout)
        before = torch.randn(pool.kv_pool.numel() // 4, generator=torch.Generator().manual_seed(3)).view(torch.uint8)
        pool.kv_pool.copy_(before)
        copies = before.clone()
        found = layers.forward(step.token_ids, step.positions, kvs, step.batch).clone()
        reference = [pool.layout.layer_view(copies, i) for i in range(LAYERS)]
        expected = make_layers(TorchBackend()).forward(step.token_ids, step.positions, reference, step.batch)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(pool.kv_pool.view(torch.float32), copies.view(torch.float32), rtol=1e-4, atol=1e-4)
    assert recorder.recorded == [4], "three tokens take the step of four"
    assert recorder.replays == 3


def test_a_prompt_and_a_step_without_room_are_launched_kernel_by_kernel(
    layers, recorder: StandIn, monkeypatch: pytest.MonkeyPatch
):
    check(make_step([(20, 20), (7, 1)], SHAPE, TokenMajorLayout), layers)
    assert recorder.replays == 0
    monkeypatch.setattr(triton_layers, "room_of", lambda tokens: room_of(tokens)._replace(table_entries=4))
    check(make_step([(40, 1), (70, 1)], SHAPE, TokenMajorLayout), layers)
    assert recorder.replays == 0
    monkeypatch.setattr(triton_layers, "LADDER", (1,))
    check(make_step([(4, 1), (7, 1)], SHAPE, TokenMajorLayout), layers)
    assert recorder.replays == 0


def test_every_number_of_tokens_can_be_recorded_at_start_the_largest_first(
    layers, recorder: StandIn, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(triton_layers, "LADDER", (1, 2, 4))
    step = make_step([(40, 1)], SHAPE, TokenMajorLayout)
    kvs = [step.layout.layer_view(step.kv_pool, i) for i in range(LAYERS)]
    before = step.kv_pool.clone()
    layers.warm_up(kvs)
    assert recorder.recorded == [4, 2, 1]
    assert torch.equal(step.kv_pool, before), "tokens without a place are written nowhere"
    layers.forward(step.token_ids, step.positions, kvs, step.batch)
    assert recorder.recorded == [4, 2, 1]
    assert recorder.replays == 1


def test_the_ladder_has_a_step_near_every_number_of_tokens():
    assert LADDER[0] == 1
    assert all(next(rung for rung in LADDER if rung >= tokens) <= tokens + 7 for tokens in range(1, LADDER[-1] + 1))
