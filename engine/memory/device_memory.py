"""How a GPU's memory is shared out among weights, what steps need while they run, and the KV pool."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from espalier.engine.errors import CheckpointError
from espalier.engine.models.config import DecoderConfig

log = logging.getLogger(__name__)
_LIBRARIES = 256 * 2**20
"""What cuBLAS and recorded steps take besides, in bytes."""
_MOST_DRAWS = 256
"""Rows of logits that are drawn from at a time, usually at most."""


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
    workspace = _LIBRARIES + max(_workspace(model, max_batch_tokens, item_bytes) for model in models)
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
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    of_token = 4 * model.hidden_size + 2 * heads + 3 * model.intermediate_size
    partials = 4 * 4 * model.num_heads * (model.head_dim + 1)
    return tokens * (of_token * item_bytes + partials) + 4 * 4 * _MOST_DRAWS * model.vocab_size
