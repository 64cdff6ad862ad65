"""What each algorithm says it may need, against a generator that does its worst: every path long, none alike."""

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from engine_driver import scripted
from search_runs import (
    ADAPTIVE,
    AUTO,
    BEAM,
    BEST_OF_N,
    CHAIN,
    DVTS,
    GIBBS,
    LOOKAHEAD,
    MAJORITY,
    MCTS,
    PARTICLE,
    REBASE,
    run,
)

from espalier.engine.memory.blocks import BlockPool
from espalier.engine.models.model import Model
from espalier.search.algorithms import auto
from espalier.search.request import SearchRequest
from espalier.search.run.orchestrator import Orchestrator


def limited(request: SearchRequest, steps: int, step_tokens: int) -> SearchRequest:
    return replace(request, max_steps=steps, max_step_tokens=step_tokens, max_tokens=steps * step_tokens)


WORST = {
    "beam": BEAM,
    "wide beam": replace(BEAM, beam_width=6, expansion=1),
    "best-of-n": BEST_OF_N,
    "majority": MAJORITY,
    "chain": CHAIN,
    "adaptive": ADAPTIVE,
    "dvts": replace(DVTS, beam_width=6, expansion=2),
    "lookahead": replace(LOOKAHEAD, lookahead_steps=3),
    "rebase": replace(REBASE, rebase_temperature=100.0),
    "particle": PARTICLE,
    "gibbs": GIBBS,
    "mcts": replace(MCTS, simulations=12, exploration=100.0),
    "easy auto": AUTO,
    "hard auto": AUTO,
}
WORST = {name: limited(request, 4, 5) for name, request in WORST.items()} | {
    "gibbs of many short steps": limited(GIBBS, 10, 2),
    "easy auto of many short steps": limited(AUTO, 10, 2),
    "mcts of many short steps": limited(WORST["mcts"], 10, 2),
}


def worst_generator(talker: Model, steps: int, step_tokens: int) -> Model:
    """Every step as long as a step may be, of tokens drawn from many; the last one of a path holds an answer."""
    ids = talker.tokenizer.encode("0123456789 ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    (delimiter,), (box,) = talker.tokenizer.encode("\n\n"), talker.tokenizer.encode("\\boxed{1}")
    step = [tuple(ids)] * (step_tokens - 1) + [delimiter]
    last = [tuple(ids)] * (step_tokens - 2) + [box, delimiter]
    return scripted(talker, itertools.cycle(step * (steps - 1) + last))


@pytest.mark.parametrize("block_size", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("name", WORST)
def test_the_worst_generator_stays_within_what_was_set_aside_and_uses_a_good_part_of_it(
    name: str,
    block_size: int,
    load_model: Callable[[str], Model],
    make_orchestrator: Callable[..., Orchestrator],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(auto, "EASY", 0.0 if name.startswith("easy") else 2.0)
    request = WORST[name]
    model = worst_generator(load_model("talker"), request.max_steps, request.max_step_tokens)
    orchestrator = make_orchestrator(model, "classifier", block_size=block_size, kv_memory_bytes=2**24)
    engine, step = orchestrator.engine, orchestrator.engine.step
    held, reserved = defaultdict(int), defaultdict(int)

    def watched_step():
        done = step()
        for role, stats in engine.stats().items():
            held[role] = max(held[role], stats.live_blocks)
            reserved[role] = max(reserved[role], engine.admission.reserved_blocks[role])
        return done

    monkeypatch.setattr(engine, "step", watched_step)
    assert run(orchestrator, request).only.answer == "1"
    assert all(held[role] <= reserved[role] for role in held), (dict(held), dict(reserved))
    if block_size == 1 and "short" not in name:
        assert held["generator"] > 0.4 * reserved["generator"], (dict(held), dict(reserved))


@pytest.mark.parametrize("model", ["mistral-window", "qwen3-mixed-window"])
@pytest.mark.parametrize("name", WORST)
def test_models_with_windows_stay_within_what_was_set_aside_for_each_kv_group(
    name: str,
    model: str,
    load_model: Callable[[str], Model],
    make_orchestrator: Callable[..., Orchestrator],
    monkeypatch: pytest.MonkeyPatch,
):
    """Windows are of 5 and 6 tokens, paths of 20; while a step runs, what it writes is held besides."""
    monkeypatch.setattr(auto, "EASY", 0.0 if name.startswith("easy") else 2.0)
    request = WORST[name]
    generator = worst_generator(load_model(model), request.max_steps or 0, request.max_step_tokens or 0)
    orchestrator = make_orchestrator(
        generator, "classifier", block_size=2, kv_memory_bytes=2**22, max_batch_tokens=16, prefix_cache=False
    )
    admission, held = orchestrator.engine.admission, defaultdict[str, int](int)

    def watched(pool: BlockPool, allocate: Callable[[], int]) -> int:
        block = allocate()
        held[pool.name] = max(held[pool.name], pool.live_blocks)
        assert pool.live_blocks <= admission.reserved_blocks[pool.name], pool.name
        return block

    for pool in admission.pools.values():
        monkeypatch.setattr(pool, "allocate", partial(watched, pool, pool.allocate))
    assert run(orchestrator, request).only.answer == "1"
    windowed = orchestrator.engine.schedulers["generator"].pools[0]
    assert windowed.window
    assert held[windowed.name] > 0
    assert sum(stats.preemptions for stats in orchestrator.engine.stats().values()) == 0
