"""Pools without models: two block sizes in one arena."""

import torch

from espalier.engine.memory.blocks import BlockPool
from espalier.engine.memory.pool import Arena
from espalier.kernels.layout import KVLayout

BLOCK_SIZE = 4


def tiny_pools(sectors: int = 6) -> dict[str, BlockPool]:
    """A generator with 3 blocks a sector and a verifier with 2, in one arena."""
    arena = Arena(sectors * 768, 768)
    small = KVLayout(1, 1, 8, BLOCK_SIZE, torch.float32, 768)
    large = KVLayout(1, 1, 12, BLOCK_SIZE, torch.float32, 768)
    assert (small.blocks_per_sector, large.blocks_per_sector) == (3, 2)
    return {"generator": BlockPool("generator", small, arena), "verifier": BlockPool("verifier", large, arena)}


def check(pools: dict[str, BlockPool], tables: dict[str, list]) -> None:
    """Everything that must always hold of pools whose live sequences have these block tables."""
    arena = next(iter(pools.values())).arena
    arena.check_integrity()
    for role, pool in pools.items():
        pool.check_integrity(tables[role])
    assert arena.free_sectors + sum(pool.owned_sectors for pool in pools.values()) == arena.num_sectors
