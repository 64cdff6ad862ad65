"""Blocks behind the windows of all layers are given up, and nothing that is computed changes."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_driver import generate, read, release

from espalier.engine.engine import Engine
from espalier.engine.errors import DeviceError
from espalier.engine.memory.blocks import BlockPool
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_generator
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Generated, Sampling

WINDOW, BLOCK = 64, 4
OF_A_WINDOW = WINDOW // BLOCK + 1
"""Blocks that a sequence holds at most: its window begins inside of one, and ends inside of another."""
PROMPT = [9 + i * i % 101 for i in range(2000)]
DRAWS = tuple(Sampling(key=key) for key in range(16))


@pytest.fixture
def load_windowed(copy_of: Callable[[str], Path]) -> Callable[[str], Model]:
    """Loads a tiny generator with windows of 64 tokens."""

    def load(name: str) -> Model:
        folder = copy_of(name)
        config = json.loads((folder / "config.json").read_text())
        config |= {"sliding_window": WINDOW, "max_position_embeddings": 4096}
        (folder / "config.json").write_text(json.dumps(config))
        return load_generator(Checkpoint(folder), torch.float32, "cpu")

    return load


@pytest.fixture
def windowed(load_windowed: Callable[[str], Model]) -> Model:
    """A generator whose layers all have a window of 64 tokens."""
    return load_windowed("mistral-window")


@pytest.fixture
def keep_all(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes engines keep the blocks behind windows, as if a layer saw all of the context."""

    def keep() -> None:
        made = BlockPool.__init__
        monkeypatch.setattr(BlockPool, "__init__", lambda self, *given: made(self, *given[:4], None, given[5]))

    return keep


def pool_of(engine: Engine) -> BlockPool:
    return engine.schedulers[GENERATOR].pools[0]


def outcomes(done: list[Generated]) -> list[tuple]:
    return sorted((d.indices, tuple(d.token_ids), tuple(d.log_probabilities), d.cause) for d in done)


def test_2000_tokens_and_16_forks_hold_a_window_a_block_and_the_tails_of_the_forks(
    windowed: Model, make_engine: Callable[..., Engine], keep_all: Callable[[], None]
):
    def search(engine: Engine, most_live: Callable[[int], int]) -> list[tuple]:
        root, found = engine.open(GENERATOR, PROMPT), []
        engine.on_step = lambda record: live.append(pool_of(engine).live_blocks)
        live: list[int] = []
        children = generate(engine, root, *DRAWS, tokens=40, delimiter="", merge_equal=False)
        found += outcomes(children)
        assert max(live) <= most_live(len(DRAWS))
        release(engine, root)
        for child in children:  # a fork of each goes on: its siblings stay where they are
            found += outcomes(generate(engine, child.sequence, DRAWS[0], tokens=80, delimiter="", in_place=True))
        assert pool_of(engine).live_blocks <= most_live(0) + len(DRAWS) * OF_A_WINDOW
        release(engine, *(child.sequence for child in children))
        return found

    chunk = 128
    engine = make_engine(windowed, block_size=BLOCK, max_batch_tokens=chunk)
    tail = 40 // BLOCK + 1
    found = search(engine, lambda forks: OF_A_WINDOW + max(chunk // BLOCK, forks * tail))
    keep_all()
    everything = make_engine(windowed, block_size=BLOCK, max_batch_tokens=chunk, kv_memory_bytes=2**23)
    assert found == search(everything, lambda forks: 2**20)
    assert pool_of(everything).kv_pool.num_slabs > 0


def test_only_layers_with_a_window_give_blocks_up(
    load_windowed: Callable[[str], Model], make_engine: Callable[..., Engine], keep_all: Callable[[], None]
):
    model = load_windowed("qwen3-mixed-window")

    def search(engine: Engine) -> list[tuple]:
        root = engine.open(GENERATOR, PROMPT[:600])
        children = generate(engine, root, *DRAWS[:4], tokens=150, delimiter="", merge_equal=False)
        held = [pool.live_blocks for pool in engine.schedulers[GENERATOR].pools]
        footprint = engine.footprint([root, *(child.sequence for child in children)])
        assert footprint.blocks_by_role == {GENERATOR: sum(held)}
        assert footprint.bytes_by_role[GENERATOR] == engine.stats()[GENERATOR].live_bytes
        release(engine, root, *(child.sequence for child in children))
        live.append(held)
        return outcomes(children)

    live: list[list[int]] = []
    found = search(make_engine(model, max_batch_tokens=128))
    keep_all()
    assert found == search(make_engine(model, max_batch_tokens=128))
    (in_windows, whole), (kept, also) = live
    assert in_windows <= 5 * OF_A_WINDOW
    assert whole == also == kept > 200


def test_a_sequence_can_go_back_as_far_as_it_holds_all_that_the_next_token_sees(
    load_windowed: Callable[[str], Model], make_engine: Callable[..., Engine]
):
    engine = make_engine(load_windowed("qwen3-mixed-window"), block_size=BLOCK, max_batch_tokens=4096)
    sequence = engine.open(GENERATOR, PROMPT[:300])
    read(engine, sequence, PROMPT[300:301])
    table, row = engine.schedulers[GENERATOR].table, sequence.row
    windows = [len(PROMPT) if pool.window is None else pool.window for pool in table.pools]
    assert sorted(windows) == [WINDOW, len(PROMPT)]
    seen = list[bool]()
    for computed in range(301):  # the token behind so many sees a window's tokens, itself among them
        first = [max(0, computed + 1 - window) // BLOCK for window in windows]
        held = (table.blocks[group, row, begin : computed // BLOCK + 1] for group, begin in enumerate(first))
        seen.append(all((blocks >= 0).all() for blocks in held))
        assert table.sees_back_to(row, computed) == seen[-1], computed
    assert seen == sorted(seen)
    assert 0 < sum(seen) < BLOCK + 2
    release(engine, sequence)


def test_what_a_failed_step_wrote_is_not_used_though_it_is_behind_a_window(
    windowed: Model, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    engine = make_engine(windowed)
    runner, wait = engine._runners[GENERATOR], engine._runners[GENERATOR].wait
    sequence = engine.open(GENERATOR, PROMPT[:300])
    expected = read(engine, sequence, PROMPT[300:301])
    release(engine, sequence)
    while pool_of(engine).reclaim_idle_slab():
        pass

    def fail(*_: object) -> None:
        engine.kv_pool.bytes.fill_(255)  # not numbers
        raise DeviceError(GENERATOR, "cpu", RuntimeError("lost"))

    monkeypatch.setattr(runner, "wait", fail)
    sequence = engine.open(GENERATOR, PROMPT[:300])
    with pytest.raises(DeviceError, match="lost"):
        read(engine, sequence, PROMPT[300:301])
    monkeypatch.setattr(runner, "wait", wait)
    assert np.array_equal(engine.step()[0].values, expected)  # type: ignore[union-attr]
    release(engine, sequence)


def test_a_fork_of_a_sequence_whose_children_went_on_has_its_own_window(
    windowed: Model, make_engine: Callable[..., Engine]
):
    engine = make_engine(windowed, prefix_cache=False)
    root = engine.open(GENERATOR, PROMPT[:300])
    (child,) = generate(engine, root, DRAWS[1], tokens=200, delimiter="")
    (back,) = generate(engine, root, DRAWS[1], tokens=200, delimiter="")
    assert outcomes([back]) == outcomes([child])
    assert engine.footprint([root]).logical_blocks <= OF_A_WINDOW
    release(engine, root, child.sequence, back.sequence)


def test_kv_given_up_by_preemption_is_computed_again_alike(windowed: Model, make_engine: Callable[..., Engine]):
    engine = make_engine(windowed, max_batch_tokens=64)
    root = engine.open(GENERATOR, PROMPT[:300], owner="one")
    (first,) = generate(engine, root, DRAWS[1], tokens=90, delimiter="")
    engine.suspend("one")
    assert pool_of(engine).live_blocks == 0
    engine.resume_owner("one")
    (again,) = generate(engine, root, DRAWS[1], tokens=90, delimiter="")
    assert outcomes([again]) == outcomes([first])
    release(engine, root, first.sequence, again.sequence)


def test_a_cached_prefix_is_used_as_far_as_its_window_is_whole(windowed: Model, make_engine: Callable[..., Engine]):
    engine = make_engine(windowed, max_batch_tokens=4096, kv_memory_bytes=2**22)
    pool = pool_of(engine)

    def read_end(text: list[int]) -> tuple[bytes, int]:
        """The logits after a text's last token, and how many of its tokens were computed for them."""
        before = engine.stats()[GENERATOR].computed_tokens
        sequence = engine.open(GENERATOR, text[:-1])
        values = read(engine, sequence, text[-1:]).tobytes()
        release(engine, sequence)
        return values, engine.stats()[GENERATOR].computed_tokens - before

    values, computed = read_end(PROMPT[:401])
    assert computed == 401
    assert pool.cached_blocks == 100, "those behind the window are kept as long as there is room"
    while pool.cached_blocks > 50:
        assert pool.reclaim_idle_slab()
    assert read_end(PROMPT[:401]) == (values, 1)
    shorter = PROMPT[:379]
    found, computed = read_end(shorter)
    assert computed == 3, "the last full block ends before them"
    longer = read_end(PROMPT[:300])
    assert longer[1] == 300, "what comes before is gone"
    while pool.cached_blocks >= OF_A_WINDOW:
        assert pool.reclaim_idle_slab()
    assert read_end(PROMPT[:401]) == (values, 401)
    assert read_end(shorter) == (found, 3)
