"""Making the memory of an engine's models: the pool that they share, and the table of each one's sequences."""

from collections.abc import Iterable

from espalier.engine.errors import PoolTooSmallError
from espalier.engine.memory.blocks import BlockPool
from espalier.engine.memory.pool import KVPool
from espalier.engine.memory.sequences import SequenceTable
from espalier.engine.models.config import DecoderConfig
from espalier.engine.models.model import Model
from espalier.engine.stats import RoleCounters
from espalier.kernels.layout import Layout, StateLayout, kv_groups

_ANY_SLAB = 2**62


def pool_names(role: str, config: DecoderConfig) -> list[str]:
    """Names of a model's block pools, one for each KV group, its role if there is one; then that of its states."""
    groups = kv_groups(config.kv_layers)
    names = [role] if len(groups) == 1 else [f"{role}/{group}" for group in range(len(groups))]
    return [*names, f"{role}/states"] if config.state_shapes else names


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
    layouts = _layouts(model, block_size, kv_pool.slab_bytes)
    windows = [shape.window and shape.window + further for shape in kv_groups(model.config.kv_layers)]
    names, counters = pool_names(role, model.config), RoleCounters()
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
