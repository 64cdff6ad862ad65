"""Work that finds no blocks waits for them; who is cancelled waits no longer, and nobody makes room for them."""

from collections.abc import Callable

import pytest
from engine_driver import drain, release

from espalier.engine.engine import Engine
from espalier.engine.errors import PoolExhaustedError
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Generate, Sampling, Score

Make = Callable[..., Engine]
BLOCK = 3 * 2 * 2 * 12 * 4 * 4  # layers, key and value, kv heads, head dim, bytes, tokens
KEYS = tuple(Sampling(key=i) for i in range(8))


def small(make_engine: Make, blocks: int, prefix_cache: bool = False) -> Engine:
    """An engine whose pool holds exactly `blocks` blocks of four tokens, one a slab."""
    return make_engine("qwen2-untied", kv_memory_bytes=blocks * BLOCK, slab_bytes=BLOCK, prefix_cache=prefix_cache)


def generate(engine: Engine, owner: str, prompt: int, tokens: int, start: int = 0) -> Generate:
    sequence = engine.open(GENERATOR, [5 + start] * prompt, owner=owner)
    work = Generate(owner, sequence, KEYS[:1], tokens, "", in_place=True)
    engine.submit(work)
    return work


def test_who_is_cancelled_while_held_up_makes_nobody_give_up_their_blocks(make_engine: Make):
    """`idle` holds blocks and has no work, so it would be the first to give them up to someone who still waited."""
    engine = small(make_engine, 10)
    idle = engine.open(GENERATOR, [7] * 16, owner="idle")
    engine.submit(Score("idle", idle, (), ()))
    drain(engine)
    runs = generate(engine, "runs", prompt=4, tokens=12)
    engine.step()
    blocked = generate(engine, "blocked", prompt=32, tokens=4)
    engine.step()
    held_up = engine.schedulers[GENERATOR].planner.blocked
    assert held_up is not None
    assert (held_up.owner, held_up.blocks) == ("blocked", 8)
    engine.cancel("blocked")
    release(engine, blocked.sequence)
    assert engine.schedulers[GENERATOR].planner.blocked is None
    (done,) = drain(engine)
    assert done.work is runs
    assert engine.stats()[GENERATOR].preemptions == 0, "somebody gave up blocks for work that was cancelled"
    release(engine, idle, runs.sequence)


def test_cancelling_somebody_else_leaves_the_one_who_waits_first_in_line(make_engine: Make):
    engine = small(make_engine, 10)
    runs, other = generate(engine, "runs", 4, 12), generate(engine, "other", 4, 12)
    engine.step()
    blocked = generate(engine, "blocked", prompt=32, tokens=4)
    engine.step()
    engine.cancel("other")
    held_up = engine.schedulers[GENERATOR].planner.blocked
    assert held_up is not None
    assert held_up.owner == "blocked"
    engine.cancel("runs")
    release(engine, runs.sequence, other.sequence)
    (done,) = drain(engine)
    assert done.work is blocked
    release(engine, blocked.sequence)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_room_is_made_for_the_first_of_those_that_find_no_blocks(make_engine: Make, prefix_cache: bool):
    engine = small(make_engine, 10, prefix_cache)
    works = [generate(engine, "runs", 7, 5)]
    engine.step()
    sizes = {"one": 12, "two": 28, "three": 24, "four": 24, "five": 24}  # of 8 blocks left, one takes 3
    works += [generate(engine, owner, prompt, 1, start=i) for i, (owner, prompt) in enumerate(sizes.items())]
    engine.step()
    held_up = engine.schedulers[GENERATOR].planner.blocked
    assert held_up is not None
    assert (held_up.owner, held_up.blocks) == ("two", 7)
    drain(engine)
    release(engine, *(work.sequence for work in works))


@pytest.mark.parametrize("launch_ahead", [False, True])
def test_the_one_that_finds_no_blocks_is_named_and_the_others_go_on_without_it(make_engine: Make, launch_ahead: bool):
    engine = make_engine(
        "qwen2-untied",
        kv_memory_bytes=10 * BLOCK,
        slab_bytes=BLOCK,
        prefix_cache=False,
        launch_ahead=launch_ahead,
    )
    alone = generate(engine, "first", prompt=4, tokens=16)
    (expected,) = drain(engine)
    release(engine, alone.sequence)
    works = {owner: generate(engine, owner, prompt=4, tokens=16) for owner in ("first", "second", "third")}
    done, ended = [], []
    while engine.busy:
        try:
            done += engine.step()
        except PoolExhaustedError as error:
            engine.check_integrity()
            for owner in error.owners:
                engine.abandon(owner)
            ended.append(error.owners)
    assert ended == [{"third"}]
    assert [d.work.owner for d in done] == ["first", "second"]
    assert {tuple(d.token_ids) for d in done} == {tuple(expected.token_ids)}  # type: ignore[union-attr]
    release(engine, works["first"].sequence, works["second"].sequence)


def test_a_prompt_that_no_pool_could_hold_is_named(make_engine: Make):
    engine = small(make_engine, 4)
    fits, fits_not = generate(engine, "small", 4, 2), generate(engine, "large", 40, 2)
    with pytest.raises(PoolExhaustedError, match="needs 10 KV blocks") as caught:
        drain(engine)
    assert caught.value.owners == {"large"}
    engine.abandon("large")
    drain(engine)
    assert fits_not.sequence.released
    release(engine, fits.sequence)
