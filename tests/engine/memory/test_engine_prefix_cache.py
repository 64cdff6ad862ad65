"""Prompts seen before are not computed again, and nothing else changes."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from engine_driver import drain, generate, read, release
from tiny_pools import tiny_pools

from espalier.engine.engine import Engine
from espalier.engine.errors import PoolExhaustedError
from espalier.engine.memory.blocks import EvictableBlocks, PrefixCache, chain_hashes
from espalier.engine.memory.sequences import KVSequence, SequenceTable
from espalier.engine.work import Sampling, Score

Make = Callable[..., Engine]
PROMPT = [5 + i % 40 for i in range(37)]  # two full blocks of 16 and a tail


@pytest.fixture
def make(make_engine: Make) -> Make:
    def make(*models: str, **options: object) -> Engine:
        return make_engine(*models, **({"block_size": 16} | options))

    return make


def compute(engine: Engine, role: str, token_ids: list[int], salt: bytes = b"") -> int:
    """Tokens computed for a prompt that is opened and released again."""
    sequence = engine.open(role, token_ids, salt)
    engine.submit(Score("reader", sequence, (), ()))
    (done,) = drain(engine)
    release(engine, sequence)
    return done.computed_tokens


def test_hashes_are_chained():
    one, other = list(range(12)), [99, *range(1, 12)]
    assert len(chain_hashes(b"m", one, 4)) == 3
    assert len(chain_hashes(b"m", one[:11], 4)) == 2
    assert chain_hashes(b"m", one, 4)[:2] == chain_hashes(b"m", one[:8], 4)
    assert not set(chain_hashes(b"m", one, 4)) & set(chain_hashes(b"m", other, 4)), "a first token changes all"
    assert not set(chain_hashes(b"m", one, 4)) & set(chain_hashes(b"n", one, 4))


def test_full_blocks_of_a_prompt_are_computed_once(make: Make):
    engine = make()
    assert [compute(engine, "generator", PROMPT) for _ in range(3)] == [37, 5, 5]
    stats = engine.stats()["generator"]
    assert (stats.cached_blocks, stats.cache_hits, stats.live_blocks) == (2, 4, 0)


def test_each_full_block_of_a_prompt_is_counted_as_looked_up_once(make: Make):
    engine, without = make(), make(prefix_cache=False)
    for _ in range(3):
        compute(engine, "generator", PROMPT)
        compute(without, "generator", PROMPT)
    stats = engine.stats()["generator"]
    assert (stats.cache_lookups, stats.cache_hits) == (6, 4)
    assert without.stats()["generator"].cache_lookups == 0


def test_a_prompt_is_shared_while_its_first_owner_still_holds_it(make: Make):
    engine = make()
    first = engine.open("generator", PROMPT)
    engine.submit(Score("reader", first, (), ()))
    drain(engine)
    second = engine.open("generator", [*PROMPT[:32], 9, 9])
    assert engine.footprint([first, second]).physical_blocks == 3
    read(engine, second, [7])
    release(engine, first, second)


def test_what_follows_a_cached_prompt_has_the_same_bits(make: Make):
    def texts(engine: Engine) -> list[tuple[list[int], float]]:
        sequence = engine.open("generator", PROMPT)
        children = generate(engine, sequence, *(Sampling(key=key) for key in range(4)), delimiter="")
        release(engine, sequence, *(child.sequence for child in children))
        return [(child.token_ids, child.log_probability) for child in children]

    engine, without = make(), make(prefix_cache=False)
    expected = texts(without)
    assert texts(engine) == expected
    assert texts(engine) == expected
    assert engine.stats()["generator"].cache_hits == 2
    assert without.stats()["generator"].cache_hits == without.stats()["generator"].cached_blocks == 0


def test_scores_after_a_cached_prompt_have_the_same_bits(make: Make):
    engine = make("qwen2-untied", "qwen2-tied")
    values = []
    for _ in range(2):
        sequence = engine.open("verifier", PROMPT)
        values.append(torch.from_numpy(read(engine, sequence, [3, 4, 5])))
        release(engine, sequence)
    assert torch.equal(*values)


def test_salts_and_models_do_not_share(make: Make):
    engine = make("qwen2-untied", "qwen2-tied")
    assert compute(engine, "generator", PROMPT, b"alice") == 37
    assert compute(engine, "generator", PROMPT, b"bob") == 37
    assert compute(engine, "verifier", PROMPT, b"alice") == 37
    assert compute(engine, "generator", PROMPT, b"alice") == 5


def test_a_prompt_computed_in_chunks_is_known_too(make: Make):
    engine = make(max_batch_tokens=7)
    assert compute(engine, "generator", PROMPT) == 37
    assert compute(engine, "generator", PROMPT) == 5


def test_cancelled_work_leaves_no_unfinished_prompt_behind(make: Make):
    engine = make(max_batch_tokens=20)
    sequence = engine.open("generator", PROMPT)
    engine.submit(Score("reader", sequence, (), ()))
    engine.step()
    engine.cancel("reader")
    release(engine, sequence)
    assert compute(engine, "generator", PROMPT) == 37 - 16, "only the block that was finished is known"


def test_cached_blocks_give_way_the_least_recently_used_first(make: Make):
    engine = make(kv_memory_bytes=2**18)
    room = engine.schedulers["generator"].pools[0].allocatable_blocks
    prompts = [
        [i + 2, *PROMPT] for i in range(room)
    ]  # three blocks each, two of them kept: more than there is room for
    for prompt in prompts:
        compute(engine, "generator", prompt)
        compute(engine, "generator", prompts[0])  # in use all the time
    stats = engine.stats()["generator"]
    assert stats.evicted_blocks > 0
    assert engine.schedulers["generator"].pools[0].allocatable_blocks == room, "cached blocks take no room from anyone"
    assert compute(engine, "generator", prompts[0]) == len(prompts[0]) - 32
    assert compute(engine, "generator", prompts[1]) == len(prompts[1])


def test_a_slab_of_cached_blocks_moves_to_the_other_model(make: Make):
    engine = make("qwen2-untied", "qwen2-tied", kv_memory_bytes=2**18)
    for i in range(engine.schedulers["generator"].pools[0].allocatable_blocks):
        compute(engine, "generator", [i + 2, *PROMPT])
    assert engine.kv_pool.free_slabs < engine.kv_pool.num_slabs
    pool = engine.schedulers["verifier"].pools[0]
    assert pool.allocatable_blocks == engine.kv_pool.num_slabs * pool.layout.blocks_per_slab
    blocks = [pool.allocate() for _ in range(pool.allocatable_blocks)]
    with pytest.raises(PoolExhaustedError):
        pool.allocate()
    assert engine.stats()["generator"].owned_slabs == 0
    pool.free(blocks)


def test_of_two_blocks_with_the_same_tokens_the_first_stays_the_known_one():
    cache = PrefixCache()
    cache.register(3, b"x")
    cache.register(4, b"x")
    assert cache.longest([b"x", b"y"], passed=[0, 0, 0]) == 1
    assert cache.find([b"x"]) == [3]
    assert 3 in cache
    assert 4 not in cache
    cache.check_integrity(held={3, 4})
    with pytest.raises(AssertionError, match="neither live nor evictable"):
        cache.check_integrity(held={4})
    cache.forget(3)
    assert cache.longest([b"x"], passed=[0, 0]) == 0


def test_a_chain_goes_on_where_the_blocks_that_are_seen_are_known():
    cache = PrefixCache()
    for block, digest in enumerate([b"b", b"c", b"e"]):
        cache.register(block, digest)
    chain = [b"a", b"b", b"c", b"d", b"e"]
    assert cache.longest(chain, passed=[0, 0, 0, 1, 2, 3]) == 3, "after c, whose window begins with b"
    assert cache.longest(chain[:2], passed=[0, 0, 0]) == 0, "a is seen after b"
    assert cache.longest(chain, passed=[0, 0, 1, 2, 3, 4]) == 5


def test_kept_blocks_give_way_by_slab_and_age():
    kept = EvictableBlocks(live := {0, 1, 2})
    for block, slab in ((0, 0), (10, 1), (1, 0), (20, 2)):
        kept.keep(block, slab)
    assert kept.oldest_in_live_slab() == (10, 1), "slab 0 was used again after it"
    kept.remove(10, 1)
    assert kept.oldest_in_live_slab() == (0, 0)
    assert kept.oldest_idle_slab() is None
    for slab in (2, 0):
        live.remove(slab)
        kept.touch(slab)
    assert (kept.oldest_idle_slab(), kept.oldest_in_live_slab()) == (2, None)
    live.add(2)
    kept.touch(2)
    assert (kept.oldest_idle_slab(), kept.oldest_in_live_slab()) == (0, (20, 2))
    assert (len(kept), kept.of(0), kept.of(1)) == (3, [0, 1], [])


def test_transient_blocks_give_way_before_others_of_any_age():
    kept = EvictableBlocks(live := {0, 1, 2, 3})
    for block, slab, transient in ((0, 0, False), (1, 0, True), (10, 1, False), (20, 2, True), (30, 3, True)):
        kept.keep(block, slab, transient)
    assert (kept.oldest_in_live_slab(), kept.next_is_transient()) == ((1, 0), (True, True))
    for slab in (1, 0, 3, 2):
        live.remove(slab)
        kept.touch(slab)
    assert (kept.oldest_idle_slab(), kept.oldest_idle_slab(lasting=False)) == (3, 3)
    assert (kept.of(0), kept.next_is_transient()) == ([1, 0], (False, True))
    kept.remove(30, 3)
    kept.remove(20, 2)
    assert (kept.oldest_idle_slab(), kept.oldest_idle_slab(lasting=False)) == (1, None), (
        "slab 0 holds a lasting one, too"
    )
    assert kept.next_is_transient() == (False, False)
    live.add(0)
    kept.touch(0)
    assert (kept.oldest_in_live_slab(), len(kept)) == ((1, 0), 3)


def test_a_transient_block_lasts_once_it_is_found():
    cache = PrefixCache()
    cache.register(3, b"x", transient=True)
    cache.register(4, b"y", transient=True)
    cache.register(5, b"z")
    assert [cache.is_transient(block) for block in (3, 4, 5)] == [True, True, False]
    assert cache.find([b"x"]) == [3]
    cache.register(4, b"y")
    assert not any(map(cache.is_transient, (3, 4)))
    cache.forget(3)
    cache.register(3, b"w", transient=True)
    cache.forget(3)
    assert not cache.is_transient(3)
    cache.check_integrity(held={4, 5})


def test_slabs_of_transient_blocks_move_to_another_model_first():
    pools = tiny_pools(4, states=True)
    states, verifier = pools["generator/states"], pools["verifier"]
    for pool, transient in ((pools["generator"], False), (states, True)):
        blocks = [pool.allocate() for _ in range(2 * pool.layout.blocks_per_slab)]
        for block in blocks:
            pool.cache.register(block, b"%d" % block, transient)
        pool.free(blocks)
    held = [verifier.allocate() for _ in range(2 * verifier.layout.blocks_per_slab)]
    assert [pools[name].owned_slabs for name in ("generator", "generator/states", "verifier")] == [2, 0, 2]
    verifier.free(held)


def test_without_the_cache_no_block_outlives_its_sequence(make: Make):
    engine = make(prefix_cache=False)
    assert [compute(engine, "generator", PROMPT) for _ in range(2)] == [37, 37]
    assert engine.stats()["generator"].cached_blocks == 0


def test_prompts_that_arrive_together_are_computed_once(make: Make):
    engine = make()
    sequences = [engine.open("generator", [*PROMPT[:32], 9, i]) for i in range(3)]
    for sequence in sequences:
        engine.submit(Score("reader", sequence, (), ()))
    done = drain(engine)
    assert sorted(d.computed_tokens for d in done) == [2, 2, 34]
    assert engine.stats()["generator"].steps == 1
    release(engine, *sequences)


def test_an_interrupted_step_leaves_nothing_behind_that_was_not_computed(make: Make, monkeypatch: pytest.MonkeyPatch):
    engine, without = make(), make()
    samplings = [Sampling(key=key) for key in range(3)]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    sequences = [engine.open("generator", [*PROMPT, last]) for last in (7, 8)]
    for sequence in sequences:
        engine.submit(Score("reader", sequence, (), ()))
    with monkeypatch.context() as patch:
        patch.setattr("espalier.engine.execution.runner.build_batch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.check_integrity()
    engine.cancel("reader")
    release(engine, *sequences)
    texts = []
    for each in (engine, without):
        sequence = each.open("generator", [*PROMPT, 7])
        children = generate(each, sequence, *samplings, delimiter="")
        texts.append([(child.token_ids, child.log_probability) for child in children])
        release(each, sequence, *(child.sequence for child in children))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("states", [False, True])
def test_tokens_that_took_the_place_of_others_are_not_known_by_them(states: bool):
    pools = tiny_pools(states=states)
    table = SequenceTable([pools["generator"], *([pools["generator/states"]] if states else ())])
    sequence = table.open("generator", [1, 2, 3, 4, 5])
    table.truncate(sequence.row, 3)
    table.append(sequence, [7, 8, 9])
    table.prefixes.begin_step()
    count = table.prefixes.tokens_to_stop(sequence.row, 6)
    table.prepare_write(np.array([sequence.row]), np.array([count]))
    table.computed[sequence.row] = count
    table.prefixes.register(sequence.row, count)
    assert table.computed[table.open("generator", [1, 2, 3, 4, 5]).row] == 0
    table.drop_kv_of(table.of_owner(None))
    for pool in table.pools:
        pool.check_integrity([])


def _computed(states: bool) -> tuple[SequenceTable, KVSequence]:
    """A table with one sequence, whose 10 tokens, two full blocks and two more, have their KV in blocks."""
    pools = tiny_pools(states=states)
    table = SequenceTable([pools["generator"], *([pools["generator/states"]] if states else ())])
    sequence = table.open("generator", list(range(10)))
    while missing := table.missing(sequence.row):
        table.prefixes.begin_step()
        count = table.prefixes.tokens_to_stop(sequence.row, missing)
        table.prepare_write(np.array([sequence.row]), np.array([count]))
        table.computed[sequence.row] += count
        table.prefixes.register(sequence.row, int(table.computed[sequence.row]))
    return table, sequence


def test_a_fork_at_fewer_tokens_than_a_state_has_goes_on_from_a_cached_one():
    table, sequence = _computed(states=True)
    child = table.fork(sequence, 9)
    assert table.computed[child.row] == 0
    assert table.prefixes.match(child.row, 9)
    assert table.computed[child.row] == 8


@pytest.mark.parametrize("states", [False, True])
def test_a_fork_of_a_sequence_without_kv_is_looked_up_as_that_is(states: bool):
    table, sequence = _computed(states)
    table.drop_kv_of(table.of_owner(None))
    child = table.fork(sequence)
    for each in (child, sequence):
        assert table.computed[each.row] == 0
        assert table.prefixes.match(each.row, 9)
        assert table.computed[each.row] == 8


def test_a_released_state_is_kept_once_nobody_else_goes_on_from_it():
    table, sequence = _computed(states=True)
    child = table.fork(sequence)
    state = int(table.held(child.row, 1)[-1])
    table.release(child)
    assert state not in table.pools[1].cache, "whoever still holds it may go on without a copy"
    table.release(sequence)
    assert table.pools[1].cache.is_transient(state)
