import numpy as np
import pytest
from tiny_pools import BLOCK_SIZE, check, tiny_pools

from espalier.engine.errors import PoolExhaustedError
from espalier.engine.memory.blocks import BlockPool, KVPool
from espalier.engine.memory.sequences import SequenceTable


def take(pool: BlockPool, count: int) -> list[int]:
    return [pool.allocate() for _ in range(count)]


def test_a_pool_owns_no_slab_until_it_needs_a_block():
    pools = tiny_pools(slabs=2)
    assert pools["generator"].owned_slabs == 0
    pools["generator"].allocate()
    assert (pools["generator"].owned_slabs, pools["generator"].free_blocks) == (1, 2)


def test_blocks_are_distinct_and_in_owned_slabs():
    pools = tiny_pools()
    blocks = take(pools["generator"], 7)
    assert len(set(blocks)) == 7
    assert {block // 3 for block in blocks} == pools["generator"].kv_pool.owned_by("generator")
    check(pools, {"generator": [np.array(blocks)], "verifier": []})


def test_a_slab_serves_the_other_model_once_its_last_block_is_free():
    pools = tiny_pools(slabs=1)
    generator, verifier = pools["generator"], pools["verifier"]
    blocks = take(generator, 3)
    generator.free(blocks[:2])
    with pytest.raises(PoolExhaustedError):
        verifier.allocate()
    generator.free(blocks[2:])
    assert len(take(verifier, 2)) == 2


def test_room_in_an_owned_slab_is_used_before_a_new_slab():
    pools = tiny_pools()
    generator = pools["generator"]
    blocks = take(generator, 6)
    generator.free([blocks[1]])
    generator.free([blocks[4]])
    assert set(take(generator, 2)) == {blocks[1], blocks[4]}
    assert generator.owned_slabs == 2


def test_allocation_prefers_the_lowest_slab_so_that_the_last_ones_run_empty():
    generator = tiny_pools()["generator"]
    blocks = take(generator, 9)
    generator.free([blocks[7], blocks[1]])
    assert generator.allocate() == blocks[1]


def test_a_shared_block_is_free_only_after_its_last_owner():
    generator = tiny_pools()["generator"]
    block = generator.allocate()
    generator.share(np.array([block]))
    generator.free([block])
    assert generator.live_blocks == 1
    generator.free([block])
    assert generator.live_blocks == 0


def test_an_exhausted_pool_says_what_to_change_and_stays_whole():
    pools = tiny_pools(slabs=2)
    blocks = take(pools["generator"], 6)
    with pytest.raises(PoolExhaustedError, match="--kv-memory"):
        pools["generator"].allocate()
    check(pools, {"generator": [np.array(blocks)], "verifier": []})


def test_what_can_be_allocated_is_free_slots_and_free_slabs():
    pools = tiny_pools(slabs=3)
    take(pools["verifier"], 1)
    generator = pools["generator"]
    take(generator, 1)
    assert generator.allocatable_blocks == 2 + 3
    take(generator, 5)


def cached(pool: BlockPool, *names: bytes) -> list[int]:
    """Blocks that are known to the prefix cache by these names, live."""
    blocks = take(pool, len(names))
    for block, name in zip(blocks, names, strict=True):
        pool.cache.register(block, name)
    return blocks


def test_cached_blocks_are_used_again_only_where_no_slab_is_taken_that_the_other_model_has_reserved():
    pools = tiny_pools(slabs=2)
    generator, verifier = pools["generator"], pools["verifier"]
    names = [b"a", b"b", b"c", b"d"]  # three in one slab, the last in another
    blocks = cached(generator, *names)
    generator.free(blocks)
    assert (generator.cached_blocks, generator.free_blocks, generator.idle_slabs) == (4, 2, 2)
    verifier.reserved_slabs = 2
    assert generator.take(names) == []
    assert generator.live_slabs == 0
    verifier.reserved_slabs = 1
    assert generator.take(names) == blocks[:3], "the fourth lies in the slab that is left for the verifier"
    check(pools, {"generator": [np.array(blocks[:3])], "verifier": []})
    assert len(take(verifier, 2)) == 2
    generator.reserved_slabs = 2
    assert generator.take(names[:2]) == blocks[:2], "live blocks cost nothing"


def test_a_sequence_begins_with_those_cached_blocks_that_it_may_use():
    pools = tiny_pools(slabs=2)
    table, prompt = SequenceTable([pools["generator"]]), list(range(4 * BLOCK_SIZE))
    first = table.open("generator", prompt)
    table.prepare_write(np.array([first.row]), np.array([len(prompt)]))
    table.prefixes.register(first.row, len(prompt))
    table.release(first)
    computed = {}
    for reserved in (2, 1, 0):
        pools["verifier"].reserved_slabs = reserved
        sequence = table.open("generator", prompt)
        computed[reserved] = int(table.computed[sequence.row]) // BLOCK_SIZE
        check(pools, {"generator": table.live_block_tables(), "verifier": []})
        table.release(sequence)
    assert computed == {2: 0, 1: 3, 0: 4}, "three lie in one slab, the last in another"
    assert (table.counters.cache_lookups, table.counters.cache_hits) == (16, 7)


def test_a_model_takes_a_cached_block_of_its_own_before_a_slab_that_the_other_has_reserved():
    pools = tiny_pools(slabs=2)
    generator, verifier = pools["generator"], pools["verifier"]
    held = cached(generator, b"a", b"b", b"c")
    generator.free([held[1]])
    verifier.reserved_slabs = 1
    assert generator.allocate() == held[1]
    assert (generator.counters.evicted_blocks, generator.owned_slabs) == (1, 1)
    generator.free([held[1]])
    assert generator.allocate() == held[1], "a free slot of its own comes first of all"
    generator.free([held[0]])
    verifier.reserved_slabs = 0
    assert generator.allocate() // 3 != held[0] // 3, "a slab that nobody has reserved is opened before any eviction"
    assert generator.counters.evicted_blocks == 1


def test_freeing_a_free_block_or_sharing_one_is_refused():
    generator = tiny_pools()["generator"]
    block = generator.allocate()
    generator.free([block])
    with pytest.raises(AssertionError, match="already free"):
        generator.free([block])
    with pytest.raises(AssertionError, match="cannot be shared"):
        generator.share(np.array([block]))


@pytest.mark.parametrize("wrong", ["a missing table", "a table twice", "a lost live count", "a stolen slab"])
def test_check_integrity_finds(wrong: str):
    pools = tiny_pools()
    generator = pools["generator"]
    table = np.array(take(generator, 4))
    tables = [table]
    if wrong == "a missing table":
        tables = []
    elif wrong == "a table twice":
        tables = [table, table]
    elif wrong == "a lost live count":
        generator.live_blocks -= 1
    else:
        generator.kv_pool.take("generator")
    with pytest.raises(AssertionError):
        check(pools, {"generator": tables, "verifier": []})


def test_an_kv_pool_returns_a_slab_only_to_its_owner():
    kv_pool = KVPool(3 * 64, 64)
    slab = kv_pool.take("generator")
    assert slab is not None
    with pytest.raises(AssertionError, match="belongs to generator"):
        kv_pool.give_back(slab, "verifier")
    kv_pool.give_back(slab, "generator")
    kv_pool.check_integrity()


def test_an_kv_pool_holds_whole_slabs_and_hands_each_out_once():
    kv_pool = KVPool(3 * 64 + 63, 64)
    assert (kv_pool.num_slabs, kv_pool.num_bytes, kv_pool.bytes.numel()) == (3, 192, 192)
    assert {kv_pool.take("a"), kv_pool.take("b"), kv_pool.take("a")} == {0, 1, 2}
    assert kv_pool.take("b") is None
    assert kv_pool.owned_by("b") == {1}
