from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_driver import drain, generate, read, release
from plain import plain_logits

from espalier.engine.engine import Engine
from espalier.engine.errors import EspalierError, MisuseError, PoolExhaustedError
from espalier.engine.work import Generate, Sampling, Score, Scored

KEYS = [Sampling(key=key) for key in range(4)]


def live_blocks(engine: Engine) -> int:
    return engine.stats()["generator"].live_blocks


def copied_blocks(engine: Engine) -> int:
    return engine.stats()["generator"].copied_blocks


def append(engine: Engine, sequence: object, count: int) -> None:
    read(engine, sequence, [9] * count, [])  # type: ignore[arg-type]


def test_a_fork_takes_no_block_until_it_writes(make_engine: Callable[..., Engine]):
    engine = make_engine()
    parent = engine.open("generator", [5] * 10)
    append(engine, parent, 1)
    before = live_blocks(engine)
    children = engine.fork(parent, 8)
    assert live_blocks(engine) == before == 3
    release(engine, parent, *children)


def test_a_fork_copies_only_the_partial_tail(make_engine: Callable[..., Engine]):
    engine = make_engine()
    parent = engine.open("generator", [])
    append(engine, parent, 10)  # two full blocks and half of a third
    child = engine.fork(parent, 1)[0]
    append(engine, child, 1)
    table = engine.schedulers["generator"].table
    assert copied_blocks(engine) == 1
    assert table.block_table(child)[:2].tolist() == table.block_table(parent)[:2].tolist()
    assert table.block_table(child)[2] != table.block_table(parent)[2]
    release(engine, parent, child)


def test_a_fork_at_a_block_boundary_copies_nothing(make_engine: Callable[..., Engine]):
    engine = make_engine()
    parent = engine.open("generator", [])
    append(engine, parent, 8)
    children = engine.fork(parent, 2)
    for sequence in (*children, parent):
        append(engine, sequence, 3)
    assert copied_blocks(engine) == 0
    release(engine, parent, *children)


def test_the_last_owner_of_a_partial_tail_writes_it_without_a_copy(make_engine: Callable[..., Engine]):
    engine = make_engine()
    parent = engine.open("generator", [])
    append(engine, parent, 6)
    children = engine.fork(parent, 2)
    append(engine, children[0], 1)
    engine.release(parent)
    append(engine, children[1], 1)
    assert copied_blocks(engine) == 1
    release(engine, *children)


def test_of_siblings_that_write_in_one_batch_all_but_the_last_copy_the_tail(make_engine: Callable[..., Engine]):
    engine = make_engine()
    parent = engine.open("generator", [])
    append(engine, parent, 6)
    children = engine.fork(parent, 3)
    engine.release(parent)
    for child in children:
        engine.submit(Score("reader", child, (9,), ()))
    drain(engine)
    assert copied_blocks(engine) == 2
    release(engine, *children)


def test_generated_children_share_the_prompts_full_blocks(make_engine: Callable[..., Engine]):
    engine = make_engine()
    sequence = engine.open("generator", [7] * 16)
    children = [done.sequence for done in generate(engine, sequence, *KEYS, tokens=3, delimiter="")]
    footprint = engine.footprint([sequence, *children])
    assert footprint.logical_blocks == 4 + 4 * 5
    assert footprint.physical_blocks == 4 + 4
    assert footprint.physical_bytes == 8 * engine.schedulers["generator"].pools[0].layout.block_bytes
    release(engine, sequence, *children)


def test_footprint_adds_both_models(make_engine: Callable[..., Engine]):
    engine = make_engine("qwen2-untied", "qwen2-tied")
    sequences = [engine.open(role, [7] * 9) for role in ("generator", "verifier")]
    for sequence in sequences:
        engine.submit(Score("reader", sequence, (), ()))
    drain(engine)
    footprint = engine.footprint(sequences)
    size = sum(3 * scheduler.pools[0].layout.block_bytes for scheduler in engine.schedulers.values())
    assert (footprint.logical_blocks, footprint.physical_blocks, footprint.physical_bytes) == (6, 6, size)
    release(engine, *sequences)


def test_release_returns_slabs_to_the_kv_pool(make_engine: Callable[..., Engine]):
    engine = make_engine()
    sequences = [engine.open("generator", [5] * 40) for _ in range(5)]
    for sequence in sequences:
        append(engine, sequence, 1)
    assert engine.kv_pool.available_slabs < engine.kv_pool.num_slabs
    release(engine, *sequences)
    assert engine.kv_pool.available_slabs == engine.kv_pool.num_slabs


def test_a_sequence_cannot_be_released_twice(make_engine: Callable[..., Engine]):
    engine = make_engine()
    sequence = engine.open("generator", [5])
    engine.release(sequence)
    with pytest.raises(MisuseError, match="already released"):
        engine.release(sequence)


def test_check_drained_names_what_is_still_held(make_engine: Callable[..., Engine]):
    engine = make_engine()
    sequence = engine.open("generator", [5] * 5)
    with pytest.raises(AssertionError, match="1 sequences were not released"):
        engine.check_drained()
    engine.submit(Score("reader", sequence, (), ()))
    with pytest.raises(AssertionError, match="still has work"):
        engine.check_drained()
    drain(engine)
    release(engine, sequence)
    reservation = engine.admission.try_reserve({"generator": 3})
    assert reservation is not None
    with pytest.raises(AssertionError, match="reservation"):
        engine.check_drained()
    engine.admission.release(reservation)


def small_engine(make_engine: Callable[..., Engine], blocks: int) -> Engine:
    """An engine whose pool holds exactly `blocks` blocks, one a slab."""
    block = 3 * 2 * 2 * 12 * 4 * 4  # layers, key and value, kv heads, head dim, bytes, tokens
    return make_engine("qwen2-untied", kv_memory_bytes=blocks * block, slab_bytes=block)


def test_an_exhausted_pool_is_a_typed_error_and_release_makes_room_again(make_engine: Callable[..., Engine]):
    engine = small_engine(make_engine, 4)
    sequence = engine.open("generator", [5] * 20)
    engine.submit(Generate("greedy", sequence, (KEYS[0],), 4))
    with pytest.raises(PoolExhaustedError, match="--kv-memory"):
        engine.step()
    engine.check_integrity()
    engine.cancel("greedy")
    engine.release(sequence)
    assert not engine.busy
    small = engine.open("generator", [5] * 3)
    assert len(generate(engine, small, KEYS[0], tokens=2, in_place=True)) == 1
    release(engine, small)


def test_sequences_without_work_give_up_their_memory_to_those_with_work_and_get_it_back(
    make_engine: Callable[..., Engine], tiny_checkpoints: dict[str, Path]
):
    engine = small_engine(make_engine, 5)
    hoard = engine.open("generator", [], owner="idle")
    append(engine, hoard, 8)
    parent = engine.open("generator", [], owner="reader")
    ids = [31, 32, 33, 34, 35, 36]
    read(engine, parent, ids, [])
    children = engine.fork(parent, 2)  # of 5 blocks one is free, and both children need a copy of the tail
    for child, token in zip(children, (40, 50), strict=True):
        engine.submit(Score("reader", child, (token,), (0,)))
    done = engine.step()
    assert len(done) == 1, "there is room for one of them"
    done += drain(engine)
    assert engine.stats()["generator"].preemptions == 1
    assert len(engine.schedulers["generator"].table.block_table(hoard)) == 0
    values = {d.work.token_ids[0]: d.values for d in done if isinstance(d, Scored)}
    release(engine, parent, *children)
    for token in (40, 50):
        expected = plain_logits(tiny_checkpoints["qwen2-untied"], [*ids, token])[-1:]
        torch.testing.assert_close(torch.from_numpy(values[token]), expected, rtol=1e-4, atol=1e-4)
    text = engine.schedulers["generator"].table.token_ids(hoard)
    looked_up = engine.stats()["generator"].cache_lookups
    again = torch.from_numpy(read(engine, hoard, [60]))
    expected = plain_logits(tiny_checkpoints["qwen2-untied"], [*text, 60])[-1:]
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-4)
    stats = engine.stats()["generator"]
    assert stats.cache_lookups - looked_up == len(text) // 4, "what was given up is looked up again"
    assert stats.cache_hits <= stats.cache_lookups
    release(engine, hoard)


def test_a_pool_too_small_for_one_block_is_a_typed_error(make_engine: Callable[..., Engine]):
    with pytest.raises(EspalierError, match="--kv-memory"):
        make_engine("qwen2-untied", kv_memory_bytes=1000)
