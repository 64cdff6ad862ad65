"""Writing keys and values into blocks, and copying whole blocks."""

import torch

from espalier.kernels.batch import AttentionBatch
from espalier.kernels.layout import LayerKV, Layout


def write_kv(layer_kv: LayerKV, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch) -> None:
    """Store a step's keys and values of one layer in their blocks.

    Args:
        layer_kv: from `KVLayout.layer_view`; written in place.
        key: `[T, kv_head, head_dim]`.
        value: `[T, kv_head, value_dim]`.
        batch: the block and position that each token is written to.
    """
    if batch.write_rows is not None:
        key, value = key[batch.write_rows], value[batch.write_rows]
    places = (batch.write_slabs, batch.write_slots, batch.write_offsets)
    layer_kv.keys[places] = key
    layer_kv.values[places] = value


def copy_blocks(layout: Layout, kv_pool: torch.Tensor, sources: list[int], destinations: list[int]) -> None:
    """Copy whole blocks, all layers of a KV group, in one call; a block may not be both source and destination.

    Args:
        layout: that of the group, or of states.
        kv_pool: uint8 KV pool, written in place.
        sources: block ids to read.
        destinations: block ids to write, one for each source.
    """
    slots = layout.blocks_per_slab
    source = torch.tensor(sources, dtype=torch.int64, device=kv_pool.device)
    target = torch.tensor(destinations, dtype=torch.int64, device=kv_pool.device)
    for blocks in layout.block_views(kv_pool):
        blocks[target // slots, :, target % slots] = blocks[source // slots, :, source % slots]
