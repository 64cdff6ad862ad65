"""Memory for models: what is free of the host's, how a GPU's is divided, the pool and tables of an engine's models."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from espalier.engine.errors import CheckpointError, PoolTooSmallError
from espalier.engine.execution.sampling import ROWS_AT_A_TIME
from espalier.engine.memory.blocks import BlockPool, KVPool
from espalier.engine.memory.sequences import SequenceTable
from espalier.engine.models.config import DecoderConfig
from espalier.engine.models.model import Model
from espalier.engine.models.options import Quantization
from espalier.engine.models.quantization import layer_bytes, linear_bytes
from espalier.engine.models.zoo.description import TransformersConfig
from espalier.engine.stats import RoleCounters
from espalier.kernels.layout import Layout, StateLayout, kv_groups

log = logging.getLogger(__name__)
_ANY_SLAB = 2**62
_LIBRARIES = 256 * 2**20
"""Bytes that cuBLAS, which has a workspace of 32 MiB for each of a few streams, and compiled kernels take, in bytes."""

RECORDED_TOKENS, RECORDED_PARTIALS = 1024, 8192
"""Tokens, and partial results of their attention, that the largest recorded step has room for."""
_MEMINFO = Path("/proc/meminfo")
_CONTAINER = Path("/sys/fs/cgroup")


def free_memory(meminfo: Path = _MEMINFO, container: Path = _CONTAINER) -> int | None:
    """Bytes that this process can still take without swapping, or less where a container limits it.

    What the system keeps of files in memory counts as free. None where the system does not say.
    """
    if (free := _number(meminfo, "MemAvailable:")) is None:
        return None
    limit, used = _number(container / "memory.max"), _number(container / "memory.current")
    if limit is None or used is None:
        return 1024 * free
    return min(1024 * free, max(0, limit - used + (_number(container / "memory.stat", "inactive_file") or 0)))


def model_bytes(config: DecoderConfig, dtype: torch.dtype, quantization: Quantization, generates: bool) -> int:
    """Bytes of a model's weights once it is loaded on a CPU; those of its norms and biases are left out.

    Args:
        config: its shape.
        dtype: dtype of what is not quantised.
        quantization: of its layers, and of a generator's head.
        generates: whether it has a head over the vocabulary; in float32 a tied one is a copy, too.
    """
    if isinstance(config, TransformersConfig):
        return config.weight_bytes(dtype, quantization)

    layers = config.num_layers * layer_bytes(config, dtype.itemsize, quantization)
    embedding = config.vocab_size * config.hidden_size * dtype.itemsize
    if not generates or (config.tied and dtype != torch.float32):
        return embedding + layers
    return embedding + layers + linear_bytes(config.vocab_size, config.hidden_size, dtype.itemsize, quantization)


def require_host_memory(models: Mapping[str, int], free: int | None) -> None:
    """Refuse models that do not fit, before any memory is taken for them.

    Args:
        models: bytes of each, by the flag that names it.
        free: see `free_memory`.

    Raises:
        CheckpointError: they take more than is free; it gives the numbers.
    """
    if free is None or (needed := sum(models.values())) <= free:
        return
    each = " and ".join(f"{flag} {size / 2**30:.1f} GiB" for flag, size in models.items())
    raise CheckpointError(
        f"the weights take {needed / 2**30:.1f} GiB of memory ({each}), and {free / 2**30:.1f} GiB are free; use a "
        "smaller model, quantize it (--generator-quantization, --verifier-quantization), or free memory"
    )


def _number(file: Path, name: str = "") -> int | None:
    """The number after a name, in a file of one such pair a line; without a name, that of a file of nothing else."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
        return next((int(line.removeprefix(name).split()[0]) for line in lines if line.startswith(name)), None)
    except (OSError, ValueError, IndexError):  # no such file, or "max"
        return None


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
        total, used, workspace, pool = (f"{size / 2**30:.1f} GiB" for size in astuple(self))
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
    # Of each model that takes its turn: a layer's intermediate results, partial results of attention, and logits: as
    # the head gives them, a copy where draws of a row differ, and in 4 bytes each penalized ones and tokens' counts.
    workspace = _LIBRARIES + max(
        max_batch_tokens * (_activations(model, item_bytes) + 4 * _partial(model))
        + (2 * item_bytes + 8) * ROWS_AT_A_TIME * model.vocab_size
        for model in models
    )
    # Recorded steps keep what the largest of them needs, in which the others run, too.
    for model in models:
        workspace += RECORDED_TOKENS * _activations(model, item_bytes) + RECORDED_PARTIALS * _partial(model)
    plan = MemoryPlan(total, total - free, workspace, int(total * utilization) - (total - free) - workspace)
    if plan.kv_pool <= 0:
        raise CheckpointError(
            f"{plan.used / 2**30:.1f} of the GPU's {total / 2**30:.1f} GiB are used and a step needs "
            f"{workspace / 2**30:.1f}, which leaves nothing for the KV pool; use a smaller model, quantize it, lower "
            "--max-batch-tokens, or raise --gpu-memory-utilization"
        )
    return plan


def _activations(model: DecoderConfig, item_bytes: int) -> int:
    """Bytes of a token's intermediate results in one layer."""
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    return (4 * model.hidden_size + 2 * heads + 3 * model.intermediate_size) * item_bytes


def _partial(model: DecoderConfig) -> int:
    """Bytes of one partial result of a token's attention, float32."""
    return 4 * model.num_heads * (model.head_dim + 1)


def make_kv_pool(models: Iterable[Model], num_bytes: int, block_size: int, slab_bytes: int | None) -> KVPool:
    """Allocate the pool for models on one device; a slab has at least one block of each of them.

    Args:
        models: on one device.
        num_bytes: of the pool, at most.
        block_size: tokens of a block.
        slab_bytes: of a slab; None for a 128th of the pool.

    Raises:
        PoolTooSmallError: when not even one slab fits.
    """
    models = list(models)
    block_bytes = [layout.block_bytes for model in models for layout in _layouts(model, block_size, _ANY_SLAB)]
    slab = slab_bytes or max(num_bytes // 128, *block_bytes)
    slab = max(slab - slab % 64, *block_bytes)  # 64: keeps every model's view of a slab aligned
    if any(model.config.state_shapes for model in models):
        slab += -slab % 64
    if num_bytes < slab:
        raise PoolTooSmallError(slab, num_bytes)
    return KVPool(num_bytes, slab, models[0].decoder.device)


def make_table(
    role: str, model: Model, kv_pool: KVPool, block_size: int, enable_prefix_cache: bool, further: int
) -> SequenceTable:
    """Make the table of a model's sequences, whose blocks lie in `kv_pool`.

    Args:
        role: the model's.
        model: see above.
        kv_pool: see above.
        block_size: tokens of a block.
        enable_prefix_cache: whether prefixes are found again.
        further: tokens that its windows reach back further, for sequences that go back by as many.
    """
    layouts, counters = _layouts(model, block_size, kv_pool.slab_bytes), RoleCounters()
    windows = [shape.window and shape.window + further for shape in kv_groups(model.config.kv_layers)]
    # One pool for each KV group, and then that of the states.
    names = [role] if len(windows) == 1 else [f"{role}/{group}" for group in range(len(windows))]
    names.append(f"{role}/states")
    pools = [
        BlockPool(role, layout, kv_pool, enable_prefix_cache, window, name, counters)
        for layout, window, name in zip(layouts, [*windows, None], names, strict=False)
    ]
    return SequenceTable(pools, cache_seed=model.digest.encode())


def _layouts(model: Model, block_size: int, slab_bytes: int) -> list[Layout]:
    """Layouts of the blocks of a model's KV groups, and of its states last if it has any."""
    decoder, groups = model.decoder, kv_groups(model.config.kv_layers)
    layouts: list[Layout] = [
        decoder.backend.layout(
            len(layers), shape.kv_heads, shape.key_dim, block_size, decoder.dtype, slab_bytes, shape.value_dim, group
        )
        for group, (shape, layers) in enumerate(groups.items())
    ]
    if shapes := model.config.state_shapes:
        layouts.append(StateLayout(shapes, block_size, slab_bytes))
    return layouts
