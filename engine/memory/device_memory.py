"""Division of a GPU's memory among weights, what steps need while they run, and the KV pool."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from espalier.engine.errors import CheckpointError
from espalier.engine.execution.sampling import ROWS_AT_A_TIME
from espalier.engine.models.config import DecoderConfig

log = logging.getLogger(__name__)
_LIBRARIES = 256 * 2**20
"""Bytes that cuBLAS, which has a workspace of 32 MiB for each of a few streams, and compiled kernels take, in bytes."""

RECORDED_TOKENS, RECORDED_PARTIALS = 1024, 8192
"""Tokens, and partial results of their attention, that the largest recorded step has room for."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of a GPU's memory.

    Attributes:
        total: all of it.
        used: taken already: weights, and what other processes hold.
        workspace: what steps need while they run.
        kv_pool: what is left for keys and values, within the share of the memory that may be used.
    """

    total: int
    used: int
    workspace: int
    kv_pool: int

    def __str__(self) -> str:
        """A line for the log."""
        total, used, workspace, pool = (
            f"{size / 2**30:.1f} GiB" for size in (self.total, self.used, self.workspace, self.kv_pool)
        )
        return f"memory of the GPU, {total}: weights and other processes {used}, workspace {workspace}, KV pool {pool}"


def plan_memory(
    total: int, free: int, utilization: float, models: Iterable[DecoderConfig], max_batch_tokens: int, item_bytes: int
) -> MemoryPlan:
    """Plan a GPU's memory once the weights are loaded.

    Args:
        total: bytes of the GPU's memory.
        free: bytes that nobody uses.
        utilization: share of the memory that may be used.
        models: sizes of the loaded models, which take turns.
        max_batch_tokens: tokens of a step at most.
        item_bytes: bytes of an element of the weights.

    Raises:
        CheckpointError: when nothing is left for the KV pool.
    """
    models = list(models)
    workspace = _LIBRARIES + max(_workspace(model, max_batch_tokens, item_bytes) for model in models)
    workspace += sum(_recorded(model, item_bytes) for model in models)
    plan = MemoryPlan(total, total - free, workspace, int(total * utilization) - (total - free) - workspace)
    if plan.kv_pool <= 0:
        raise CheckpointError(
            f"{plan.used / 2**30:.1f} of the GPU's {total / 2**30:.1f} GiB are used and a step needs "
            f"{workspace / 2**30:.1f}, which leaves nothing for the KV pool; use a smaller model, quantize it, lower "
            "--max-batch-tokens, or raise --gpu-memory-utilization"
        )
    return plan


def _workspace(model: DecoderConfig, tokens: int, item_bytes: int) -> int:
    """Bytes of a layer's intermediate results, of partial results of attention, and of logits in float32."""
    logits = 4 * 4 * ROWS_AT_A_TIME * model.vocab_size
    return tokens * _activations(model, item_bytes) + 4 * tokens * _partial(model) + logits


def _recorded(model: DecoderConfig, item_bytes: int) -> int:
    """Bytes that recorded steps keep for themselves: those of the largest, in which the others run too."""
    return RECORDED_TOKENS * _activations(model, item_bytes) + RECORDED_PARTIALS * _partial(model)


def _activations(model: DecoderConfig, item_bytes: int) -> int:
    """Bytes of a token's intermediate results in one layer."""
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    return (4 * model.hidden_size + 2 * heads + 3 * model.intermediate_size) * item_bytes


def _partial(model: DecoderConfig) -> int:
    """Bytes of one partial result of a token's attention, float32."""
    return 4 * model.num_heads * (model.head_dim + 1)
