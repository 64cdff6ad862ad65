from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from espalier.kernels.attention import write_kv
from espalier.kernels.layout import AttentionBatch, KVLayout, copy_blocks, copy_blocks_on_host

LAYOUT = KVLayout(3, 2, 4, 5, torch.float32, slab_bytes=3 * 3 * 2 * 2 * 4 * 4 * 5 + 64)
SLABS = 4


def numbered_kv_pool() -> torch.Tensor:
    """a KV pool whose every float32 is different, so that any stray write shows."""
    return torch.arange(SLABS * LAYOUT.slab_bytes // 4, dtype=torch.float32).view(torch.uint8)


def changed(before: torch.Tensor, after: torch.Tensor) -> int:
    return int((before.view(torch.float32) != after.view(torch.float32)).sum())


def write_batch(blocks: list[int], offsets: list[int], rows: list[int] | None) -> AttentionBatch:
    nothing = torch.zeros(0, dtype=torch.int32)
    block = torch.tensor(blocks, dtype=torch.int64)
    return AttentionBatch(
        query_starts=nothing,
        row_sequences=nothing,
        context_lengths=nothing,
        block_tables=nothing,
        write_slabs=block // LAYOUT.blocks_per_slab,
        write_slots=block % LAYOUT.blocks_per_slab,
        write_offsets=torch.tensor(offsets, dtype=torch.int64),
        write_rows=None if rows is None else torch.tensor(rows, dtype=torch.int64),
    )


def test_write_kv_touches_the_named_places_of_one_layer_and_nothing_else():
    kv_pool = numbered_kv_pool()
    before = kv_pool.clone()
    key, value = -torch.rand(3, 2, 4) - 1, -torch.rand(3, 2, 4) - 1
    write_kv(LAYOUT.layer_view(kv_pool, 1), key, value, write_batch([0, 4, 11], [4, 0, 2], None))
    for i, (block, offset) in enumerate([(0, 4), (4, 0), (11, 2)]):
        layer = LAYOUT.layer_view(kv_pool, 1)
        assert torch.equal(layer.keys[block // 3, block % 3, offset], key[i])
        assert torch.equal(layer.values[block // 3, block % 3, offset], value[i])
    assert changed(before, kv_pool) == key.numel() + value.numel()


def test_write_kv_leaves_out_rows_that_are_only_recomputed():
    kv_pool = numbered_kv_pool()
    before = kv_pool.clone()
    key, value = -torch.rand(3, 2, 4) - 1, -torch.rand(3, 2, 4) - 1
    write_kv(LAYOUT.layer_view(kv_pool, 0), key, value, write_batch([7], [1], [2]))
    layer = LAYOUT.layer_view(kv_pool, 0)
    assert torch.equal(layer.keys[2, 1, 1], key[2])
    assert torch.equal(layer.values[2, 1, 1], value[2])
    assert changed(before, kv_pool) == 2 * key[2].numel()


def test_write_kv_of_no_rows_writes_nothing():
    kv_pool = numbered_kv_pool()
    before = kv_pool.clone()
    write_kv(LAYOUT.layer_view(kv_pool, 0), torch.rand(1, 2, 4), torch.rand(1, 2, 4), write_batch([], [], []))
    assert changed(before, kv_pool) == 0


@pytest.mark.parametrize("copy", [copy_blocks, copy_blocks_on_host])
@pytest.mark.parametrize("layout", [LAYOUT, replace(LAYOUT, value_dim=3)], ids=["equal widths", "narrow values"])
def test_copy_blocks_copies_every_layer_of_the_named_blocks_and_nothing_else(
    layout: KVLayout, copy: Callable[..., None]
):
    kv_pool = numbered_kv_pool()
    before = kv_pool.clone()
    copy(layout, kv_pool, sources=[0, 5, 0], destinations=[10, 1, 8])
    for layer in range(layout.num_layers):
        old, new = layout.layer_view(before, layer), layout.layer_view(kv_pool, layer)
        for source, destination in ((0, 10), (5, 1), (0, 8)):
            for one, other in ((old.keys, new.keys), (old.values, new.values)):
                assert torch.equal(other[destination // 3, destination % 3], one[source // 3, source % 3])
    assert changed(before, kv_pool) == 3 * layout.block_bytes // 4


@pytest.mark.parametrize("copy", [copy_blocks, copy_blocks_on_host])
def test_copy_blocks_of_nothing_does_nothing(copy: Callable[..., None]):
    kv_pool = numbered_kv_pool()
    before = kv_pool.clone()
    copy(LAYOUT, kv_pool, [], [])
    assert changed(before, kv_pool) == 0
