"""Decode steps that are recorded and replayed, with a stand-in for a CUDA graph that computes again."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda
from fake_cuda.launches import Launch
from layer_steps import LAYERS, Step, make_step, random_layer, random_outer
from stand_in import StandIn

from espalier.kernels.backend import choose_backend
from espalier.kernels.layers import DecoderSpec, LayerWeights
from espalier.kernels.torch_backend import TorchBackend
from espalier.kernels.triton import recording
from espalier.kernels.triton.backend import TritonBackend
from espalier.kernels.triton.cache import TokenMajorLayout
from espalier.kernels.triton.plan import FIELDS, AttentionPlan, Costs, Cut
from espalier.kernels.triton.recording import LADDER, GraphRecorder, RecordedStep, room_of
from espalier.kernels.triton.steps import DeviceStep, Room, StepTokens

SHAPE = DecoderSpec(4, 2, 12, 1e-6)


@pytest.fixture(autouse=True)
def short_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "LADDER", (1, 2, 4))


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
        layers.warm_up(kvs, decodes=True)
        known, expected_ids = step.token_ids.clone(), step.token_ids.clone()
        known[1], known[3], expected_ids[1], expected_ids[3] = -1 - 2, -1, drawn[2], drawn[0]
        found = layers.forward(step.given(known, drawn), kvs).clone()
        expected = layers.forward(step.given(expected_ids), kvs)
        assert torch.equal(found, expected)
    assert recorder.replayed == [4, 4], "the first is replayed, twice; the second is launched kernel by kernel"


def test_steps_of_fewer_tokens_than_were_recorded_are_replayed_and_write_nothing_more(layers, recorder: StandIn):
    pool = make_step([(30, 1)] * 4, SHAPE, TokenMajorLayout)
    kvs = [pool.layout.layer_view(pool.kv_pool, i) for i in range(LAYERS)]
    layers.warm_up(kvs, decodes=True)
    for sequences in ([(30, 1)] * 4, [(70, 1), (7, 1), (1, 1)], [(5, 1)] * 4):
        step = make_step(sequences, SHAPE, TokenMajorLayout)
        before = torch.randn(pool.kv_pool.numel() // 4, generator=torch.Generator().manual_seed(3)).view(torch.uint8)
        pool.kv_pool.copy_(before)
        copies = before.clone()
        found = layers.forward(step.given(), kvs).clone()
        reference = [pool.layout.layer_view(copies, i) for i in range(LAYERS)]
        expected = make_layers(TorchBackend()).forward(step.given(), reference)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(pool.kv_pool.view(torch.float32), copies.view(torch.float32), rtol=1e-4, atol=1e-4)
    assert recorder.replayed == [4, 4, 4], "three tokens take the step of four"


def test_a_step_replayed_over_a_larger_one_looks_up_no_token_of_that(layers, recorder: StandIn):
    """Ids that stand for draws are negative: left in the room of a smaller step, they would be read as tokens."""
    pool = make_step([(30, 1)] * 4, SHAPE, TokenMajorLayout)
    kvs = [pool.layout.layer_view(pool.kv_pool, i) for i in range(LAYERS)]
    layers.warm_up(kvs, decodes=True)
    drawn = torch.tensor([7, 3, 11, 5])
    for rows in (4, 4, 3, 3, 3):
        step = make_step([(30, 1)] * rows, SHAPE, TokenMajorLayout)
        layers.forward(step.given(-1 - torch.arange(rows), drawn), kvs)
    assert recorder.replayed == [4] * 5


def test_memory_that_is_copied_to_the_device_is_not_overwritten_before_that():
    """Whether or not anything is fetched meanwhile: the third step takes the memory of the first."""
    if torch.cuda.is_available():
        pytest.skip("there is a real GPU, which a fake one must not replace")
    with FakeCuda(torch.zeros).installed() as cuda:
        on_device = DeviceStep(room_of(4), 1, [1], Costs(), torch.device("cuda"))
        with cuda.running() as counted:
            for position in range(7):
                tokens, none = np.full(2, position), np.empty((0, FIELDS), np.int32)
                plan = AttentionPlan(none, none, tokens[:0], np.zeros(3, np.int32), tokens[:0], 0, Cut(128, False), 0.0)
                on_device.load(StepTokens(tokens, tokens, [tokens.astype(np.int64)], [np.zeros((2, 3))], [plan]))
            torch.cuda.synchronize()
    assert counted["to_device"] == 2 * 7


def test_recorded_steps_share_memory_and_output_and_hold_long_contexts(layers, monkeypatch: pytest.MonkeyPatch):
    step = make_step([(30, 1)], SHAPE, TokenMajorLayout)
    kvs = [step.layout.layer_view(step.kv_pool, i) for i in range(LAYERS)]
    kept: list[RecordedStep] = []

    def keep(*arguments: Any) -> RecordedStep:
        kept.append(RecordedStep(*arguments))
        return kept[-1]

    monkeypatch.setattr(recording, "RecordedStep", keep)
    layers.warm_up(kvs, decodes=True)
    assert [len(each.output) for each in kept] == [4, 2, 1]
    assert len({each.output.data_ptr() for each in kept}) == 1
    assert len({id(each.on_device.memory) for each in kept}) == 1
    blocks = -(-16384 // 16)
    assert room_of(64).holds(Room(64, 0, 0, 0, 0, 64 * blocks)), "64 sequences of 16,384 tokens"


def test_steps_of_several_sizes_take_turns_in_the_same_memory(layers, recorder: StandIn):
    pool = make_step([(90, 1)] * 4, SHAPE, TokenMajorLayout)
    kvs = [pool.layout.layer_view(pool.kv_pool, i) for i in range(LAYERS)]
    layers.warm_up(kvs, decodes=True)
    pool.kv_pool.copy_(
        torch.randn(pool.kv_pool.numel() // 4, generator=torch.Generator().manual_seed(3)).view(torch.uint8)
    )
    for sequences in ([(90, 1)] * 4, [(70, 1)], [(90, 1)] * 4, [(70, 1), (7, 1)], [(70, 1)]):
        step = make_step(sequences, SHAPE, TokenMajorLayout)
        copies = pool.kv_pool.clone()
        reference = [pool.layout.layer_view(copies, i) for i in range(LAYERS)]
        found = layers.forward(step.given(), kvs)
        expected = make_layers(TorchBackend()).forward(step.given(), reference)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert recorder.replayed == [4, 1, 4, 2, 1]


def test_layers_cannot_be_tapped_once_steps_are_recorded(layers):
    step = make_step([(30, 1)], SHAPE, TokenMajorLayout)
    layers.warm_up([step.layout.layer_view(step.kv_pool, i) for i in range(LAYERS)], decodes=True)
    with pytest.raises(RuntimeError, match="before an engine is made"):
        layers.tap([1])
    assert layers.taps == ()
    layers.release([step.layout.layer_view(step.kv_pool, i) for i in range(LAYERS)])
    layers.tap([1])


def test_other_threads_may_allocate_while_a_step_is_recorded_and_products_add_in_float32():
    if torch.cuda.is_available():
        pytest.skip("there is a real GPU, which a fake one must not replace")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    with FakeCuda(torch.zeros).installed() as cuda:
        backend = choose_backend("cuda", torch.bfloat16)
        assert isinstance(backend, TritonBackend)
        GraphRecorder()(lambda: torch.zeros(3, device="cuda"))
    assert cuda.counts["captures, thread_local"] == 1
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


class CountedGraphs(GraphRecorder):
    """Graphs of the fake device, with what each holds: launches of Triton's kernels, and operations in all."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda
        self.launches: list[list[Launch]] = []
        self.operations: list[int] = []

    def __call__(self, compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        before = len(self._cuda.launched)
        replay, output = super().__call__(compute)
        launched = self._cuda.launched[before:]
        self.launches.append(launched[len(launched) // 2 :])  # behind those of the rehearsal
        graph: Any = replay
        self.operations.append(len(graph.__self__.work))
        return replay, output


def there(weights: Any) -> Any:
    """Weights on the fake device."""
    tensors = {name: getattr(weights, name) for name in weights.__slots__}
    moved = {name: x.to("cuda", torch.bfloat16) for name, x in tensors.items() if x is not None}
    return replace(weights, **moved)


def record(count: int, costs: Costs, cuda: FakeCuda, **norms: bool) -> CountedGraphs:
    """Record steps of 72, 64 and 1 tokens of a decoder with so many layers on the fake device."""
    step = make_step([(30, 1)], SHAPE, TokenMajorLayout)
    pool = step.kv_pool.view(torch.float32).to("cuda", torch.bfloat16).view(torch.uint8)
    layout = replace(step.layout, dtype=torch.bfloat16, slab_bytes=step.layout.slab_bytes // 2)
    graphs = CountedGraphs(cuda)

    def layer(index: int) -> LayerWeights:
        return there(random_layer(index, 40, 50, SHAPE, bias=True, **norms))

    outer = there(random_outer(40, SHAPE))
    layers = TritonBackend(costs, graphs).prepare_layers(count, layer, SHAPE, outer)
    layers.warm_up([layout.layer_view(pool, index) for index in range(count)], decodes=True)
    return graphs


@pytest.mark.parametrize(
    ("norms", "fused"), [({"head_norms": True, "out_bias": True}, True), ({"post_norms": True}, False)], ids=str
)
def test_a_layer_of_a_recorded_step_of_few_rows_is_five_launches_and_attentions(
    norms: dict[str, bool], fused: bool, monkeypatch: pytest.MonkeyPatch
):
    if torch.cuda.is_available():
        pytest.skip("there is a real GPU, which a fake one must not replace")
    monkeypatch.setattr(recording, "LADDER", (1, 64, 72))
    with FakeCuda(torch.zeros).installed() as cuda:
        two, three = record(2, Costs(), cuda, **norms), record(3, Costs(), cuda, **norms)
    layers = [
        Counter(launch.kernel for launch in more) - Counter(launch.kernel for launch in less)
        for more, less in zip(three.launches, two.launches, strict=True)
    ]
    operations = [more - less for more, less in zip(three.operations, two.operations, strict=True)]
    by_library = {"rotate_and_write": 1, "add_and_norm": 2, "activate_and_multiply": 1}, 4
    alone = {"rotate_and_write": 1, "multiply_rows": 4}, 0
    # One token has narrow items alone.
    for layer, total, (expected, products), attention in zip(
        layers, operations, [by_library, *[alone if fused else by_library] * 2], (2, 2, 1), strict=True
    ):
        assert layer.pop("attend_items") == attention
        assert layer == expected
        assert total == sum(expected.values()) + products + attention, "what a graph holds of one layer"


@pytest.mark.parametrize("major", [8, 9])
def test_kernels_begin_before_the_last_one_ends_where_the_device_has_that(major: int, monkeypatch: pytest.MonkeyPatch):
    if torch.cuda.is_available():
        pytest.skip("there is a real GPU, which a fake one must not replace")
    with FakeCuda(torch.zeros).installed() as cuda:
        card = torch.cuda.get_device_properties(0)
        card.major = major
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
        backend = choose_backend("cuda", torch.bfloat16)
        assert isinstance(backend, TritonBackend)
        graphs = record(2, backend._costs, cuda)
    ahead = {
        (launch.kernel, dict(launch.variant)["DEPENDENT"])
        for launch in graphs.launches[-1]
        if dict(launch.variant).get("launch_pdl", False)
    }
    assert ahead == ({("multiply_rows", True), ("rotate_and_write", True)} if major == 9 else set())


def test_a_gpu_without_triton_is_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr("espalier.kernels.backend.find_spec", lambda _: None)
    assert type(choose_backend("cuda", torch.bfloat16)) is TorchBackend
    assert "triton is not installed" in caplog.text


def test_a_kv_pool_that_was_released_is_not_replayed_on(layers, recorder: StandIn):
    step = make_step([(30, 1)] * 4, SHAPE, TokenMajorLayout)
    kvs = [step.layout.layer_view(step.kv_pool, i) for i in range(LAYERS)]
    layers.warm_up(kvs, decodes=True)
    layers.release(kvs)
    layers.forward(step.given(), kvs)
    assert recorder.replayed == []


def test_a_prompt_and_a_step_without_room_are_launched_kernel_by_kernel(
    layers, recorder: StandIn, monkeypatch: pytest.MonkeyPatch
):
    check(make_step([(20, 20), (7, 1)], SHAPE, TokenMajorLayout), layers)
    assert recorder.replayed == []
    monkeypatch.setattr(recording, "room_of", lambda tokens: room_of(tokens)._replace(table_entries=4))
    check(make_step([(40, 1), (70, 1)], SHAPE, TokenMajorLayout), layers)
    assert recorder.replayed == []
    check(make_step([(7, 1)] * 5, SHAPE, TokenMajorLayout), layers)
    assert recorder.replayed == []


def test_every_number_of_tokens_can_be_recorded_at_start_the_largest_first(layers, recorder: StandIn):
    step = make_step([(40, 1)], SHAPE, TokenMajorLayout)
    kvs = [step.layout.layer_view(step.kv_pool, i) for i in range(LAYERS)]
    before = step.kv_pool.clone()
    layers.warm_up(kvs, decodes=True)
    assert recorder.recorded == [4, 2, 1]
    assert torch.equal(step.kv_pool, before), "tokens without a place are written nowhere"
    layers.forward(step.given(), kvs)
    assert recorder.recorded == [4, 2, 1]
    assert recorder.replayed == [1]


def test_the_ladder_has_a_step_near_every_number_of_tokens():
    assert LADDER[0] == 1
    assert all(
        next(rung for rung in LADDER if rung >= tokens) <= 9 / 8 * tokens + 7 for tokens in range(1, LADDER[-1] + 1)
    )
