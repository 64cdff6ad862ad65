"""How a GPU's memory is shared out; no GPU is asked."""

from types import SimpleNamespace

import pytest

from espalier.engine.errors import CheckpointError
from espalier.engine.memory.model_memory import RECORDED_PARTIALS, RECORDED_TOKENS, plan_memory

QWEN_1_5B = SimpleNamespace(
    hidden_size=1536, intermediate_size=8960, num_heads=12, num_kv_heads=2, head_dim=128, vocab_size=151_936
)
PRM_7B = SimpleNamespace(
    hidden_size=3584, intermediate_size=18_944, num_heads=28, num_kv_heads=4, head_dim=128, vocab_size=152_064
)
GIB = 2**30


def test_the_pool_is_what_weights_and_a_step_leave_of_the_share_that_may_be_used():
    plan = plan_memory(80 * GIB, 62 * GIB, 0.9, [QWEN_1_5B, PRM_7B], 2048, 2)
    assert plan.used == 18 * GIB
    assert plan.used + plan.workspace + plan.kv_pool == 72 * GIB
    assert GIB // 2 < plan.workspace < 3 * GIB, "some hundred MiB of activations and logits"
    assert str(plan).startswith("memory of the GPU, 80.0 GiB: weights and other processes 18.0 GiB, workspace ")


def test_models_take_turns_so_that_the_larger_ones_workspace_serves_both():
    both, larger = (plan_memory(80 * GIB, 62 * GIB, 0.9, models, 2048, 2) for models in ([QWEN_1_5B, PRM_7B], [PRM_7B]))
    assert 0 < both.workspace - larger.workspace < 160 * 2**20, "that of the smaller one's recorded steps, which stays"
    assert plan_memory(80 * GIB, 62 * GIB, 0.9, [PRM_7B], 8192, 2).workspace > larger.workspace


def test_the_largest_recorded_step_is_the_one_that_is_planned_for():
    recording = pytest.importorskip("espalier.kernels.triton.recording")
    largest = recording.room_of(recording.LADDER[-1])
    assert (largest.tokens, largest.partials) == (RECORDED_TOKENS, RECORDED_PARTIALS)


def test_a_gpu_that_the_weights_fill_is_named_as_too_small():
    with pytest.raises(CheckpointError, match="gpu-memory-utilization"):
        plan_memory(16 * GIB, 1 * GIB, 0.9, [PRM_7B], 2048, 2)
