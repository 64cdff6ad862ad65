"""Pools without models: two block sizes in one KV pool."""

import torch

from espalier.engine.memory.blocks import BlockPool, KVPool
from espalier.kernels.layout import KVLayout, StateLayout

BLOCK_SIZE = 4


def tiny_pools(slabs: int = 6, window: int | None = None, states: bool = False) -> dict[str, BlockPool]:
    """A generator with 3 blocks a slab and a verifier with 2, in one KV pool.

    With a `window` the generator has another KV group, with that window and 2 blocks a slab; with `states` recurrent
    states, 3 a slab.
    """
    kv_pool = KVPool(slabs * 768, 768)
    small = KVLayout(1, 1, 8, BLOCK_SIZE, torch.float32, 768)
    large = KVLayout(1, 1, 12, BLOCK_SIZE, torch.float32, 768)
    assert (small.blocks_per_slab, large.blocks_per_slab) == (3, 2)
    pools = {
        "generator": BlockPool("generator", small, kv_pool),
        "verifier": BlockPool("verifier", large, kv_pool),
    }
    if window is not None:
        pools["generator/1"] = BlockPool("generator", large, kv_pool, window=window, name="generator/1")
    if states:
        pools["generator/states"] = BlockPool(
            "generator", StateLayout(((9, 3), (30,)), BLOCK_SIZE, 768), kv_pool, name="generator/states"
        )
    return pools


def check(pools: dict[str, BlockPool], tables: dict[str, list]) -> None:
    """Everything that must always hold of pools whose live sequences have these block tables."""
    kv_pool = next(iter(pools.values())).kv_pool
    kv_pool.check_integrity()
    for role, pool in pools.items():
        pool.check_integrity(tables[role])
    assert kv_pool.free_slabs + sum(pool.owned_slabs for pool in pools.values()) == kv_pool.num_slabs
