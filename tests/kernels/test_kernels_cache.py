import torch

from espalier.kernels.batch import AttentionBatch
from espalier.kernels.cache import copy_blocks, write_kv
from espalier.kernels.layout import KVLayout

LAYOUT = KVLayout(3, 2, 4, 5, torch.float32, sector_bytes=3 * 3 * 2 * 2 * 4 * 4 * 5 + 64)
SECTORS = 4


def numbered_arena() -> torch.Tensor:
    """An arena whose every float32 is different, so that any stray write shows."""
    return torch.arange(SECTORS * LAYOUT.sector_bytes // 4, dtype=torch.float32).view(torch.uint8)


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
        write_sectors=block // LAYOUT.blocks_per_sector,
        write_slots=block % LAYOUT.blocks_per_sector,
        write_offsets=torch.tensor(offsets, dtype=torch.int64),
        write_rows=None if rows is None else torch.tensor(rows, dtype=torch.int64),
    )


def test_write_kv_touches_the_named_places_of_one_layer_and_nothing_else():
    arena = numbered_arena()
    before = arena.clone()
    key, value = -torch.rand(3, 2, 4) - 1, -torch.rand(3, 2, 4) - 1
    write_kv(LAYOUT.layer_view(arena, 1), key, value, write_batch([0, 4, 11], [4, 0, 2], None))
    for i, (block, offset) in enumerate([(0, 4), (4, 0), (11, 2)]):
        layer = LAYOUT.layer_view(arena, 1)
        assert torch.equal(layer.keys[block // 3, block % 3, offset], key[i])
        assert torch.equal(layer.values[block // 3, block % 3, offset], value[i])
    assert changed(before, arena) == key.numel() + value.numel()


def test_write_kv_leaves_out_rows_that_are_only_recomputed():
    arena = numbered_arena()
    before = arena.clone()
    key, value = -torch.rand(3, 2, 4) - 1, -torch.rand(3, 2, 4) - 1
    write_kv(LAYOUT.layer_view(arena, 0), key, value, write_batch([7], [1], [2]))
    layer = LAYOUT.layer_view(arena, 0)
    assert torch.equal(layer.keys[2, 1, 1], key[2])
    assert torch.equal(layer.values[2, 1, 1], value[2])
    assert changed(before, arena) == 2 * key[2].numel()


def test_write_kv_of_no_rows_writes_nothing():
    arena = numbered_arena()
    before = arena.clone()
    write_kv(LAYOUT.layer_view(arena, 0), torch.rand(1, 2, 4), torch.rand(1, 2, 4), write_batch([], [], []))
    assert changed(before, arena) == 0


def test_copy_blocks_copies_every_layer_of_the_named_blocks_and_nothing_else():
    arena = numbered_arena()
    before = arena.clone()
    copy_blocks(LAYOUT, arena, sources=[0, 5, 0], destinations=[10, 1, 8])
    old, new = LAYOUT.block_view(before), LAYOUT.block_view(arena)
    for source, destination in ((0, 10), (5, 1), (0, 8)):
        copied = new[destination // 3, :, :, destination % 3]
        assert torch.equal(copied, old[source // 3, :, :, source % 3])
    assert changed(before, arena) == 3 * LAYOUT.block_bytes // 4


def test_copy_blocks_of_nothing_does_nothing():
    arena = numbered_arena()
    before = arena.clone()
    copy_blocks(LAYOUT, arena, [], [])
    assert changed(before, arena) == 0
