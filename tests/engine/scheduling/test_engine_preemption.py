"""Whoever ranks first goes on, whatever memory others hold and wherever its own blocks lie."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from engine_driver import drain, release

from espalier.engine.engine import Engine
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.models.model import Model
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.engine.scheduling.admission import Preemption, Reservation
from espalier.engine.scheduling.planner import BlockedWork
from espalier.engine.work import Generate, Sampling, Score

Make = Callable[..., Engine]
SLAB = 3 * 2 * 2 * 12 * 4 * 4 * 2  # layers, key and value, kv heads, head dim, bytes, tokens, blocks
GENERATOR_BLOCKS, VERIFIER_BLOCKS = 2, 9  # of a slab


@pytest.fixture
def make(make_engine: Make, load_model: Callable[[str], Model]) -> Make:
    """Makes an engine whose pool holds so many slabs; nothing that is sampled ends early."""
    models = [replace(load_model(name), eos_token_ids=()) for name in ("qwen2-untied", "qwen2-tied")]

    def make(slabs: int, **options: object) -> Engine:
        options = {"prefix_cache": False, "reserved_share": 0.01, **options}
        engine = make_engine(*models, kv_memory_bytes=slabs * SLAB, slab_bytes=SLAB, **options)
        layouts = [scheduler.pools[0].layout.blocks_per_slab for scheduler in engine.schedulers.values()]
        assert layouts == [GENERATOR_BLOCKS, VERIFIER_BLOCKS]
        return engine

    return make


def admit(engine: Engine, owner: str, generator_slabs: int, verifier_slabs: int) -> Reservation:
    blocks = {GENERATOR: generator_slabs * GENERATOR_BLOCKS, VERIFIER: verifier_slabs * VERIFIER_BLOCKS}
    reservation = engine.admission.try_reserve(blocks, owner)
    assert reservation is not None
    return reservation


def prefill(engine: Engine, role: str, owner: str, tokens: int, start: int = 0) -> KVSequence:
    sequence = engine.open(role, [5 + start + i % 40 for i in range(tokens)], owner=owner)
    engine.submit(Score(owner, sequence, (), ()))
    return sequence


def decode(engine: Engine, role: str, owner: str, prompt: int, tokens: int) -> KVSequence:
    sequence = engine.open(role, [5 + i % 40 for i in range(prompt)], owner=owner)
    engine.submit(Generate(owner, sequence, (Sampling(temperature=0.0),), tokens, "", in_place=True))
    return sequence


def finish(engine: Engine, sequences: list[KVSequence], reservations: list[Reservation]) -> None:
    release(engine, *sequences)
    for reservation in reservations:
        engine.admission.release(reservation)


def interleave(engine: Engine, role: str, slabs: int) -> list[KVSequence]:
    """Slabs full of blocks of `second`, but for one of `first` in each; the sequences of `first` come first."""
    owners = ["first", *["second"] * (engine.schedulers[role].pools[0].layout.blocks_per_slab - 1)] * slabs
    sequences = [prefill(engine, role, owner, 4, start=i) for i, owner in enumerate(owners)]
    sequences.sort(key=lambda sequence: sequence.owner)
    drain(engine)
    assert engine.schedulers[role].pools[0].live_slabs == slabs
    assert engine.schedulers[role].table.blocks_of("first") == slabs
    return sequences


@pytest.mark.parametrize("launch_ahead", [False, True])
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("asks_with", ["its prompt", "a branch"])
@pytest.mark.parametrize(("scattered", "asked", "blocks"), [(VERIFIER, GENERATOR, 12), (GENERATOR, VERIFIER, 36)])
def test_blocks_of_the_first_scattered_over_one_models_slabs_do_not_keep_its_work_on_the_other_from_going_on(
    scattered: str,
    asked: str,
    blocks: int,
    asks_with: str,
    prefix_cache: bool,
    launch_ahead: bool,
    make: Make,
):
    """Only three slabs can be had even if all others give up theirs, and more are needed."""
    engine = make(8, launch_ahead=launch_ahead, prefix_cache=prefix_cache)
    need = {scattered: 3, asked: 5} if scattered == GENERATOR else {scattered: 1, asked: 7}
    reservations = [admit(engine, owner, need[GENERATOR], need[VERIFIER]) for owner in ("first", "second")]
    sequences = interleave(engine, scattered, 5)
    engine.submit(Score("first", sequences[0], (9, 9), (0, 1)))
    own = 4 * (blocks - (1 if asks_with == "its prompt" else blocks // 2)) - 1
    sequences.append(decode(engine, asked, "first", own, 4 * blocks - own))
    done = drain(engine)
    assert len(done) == 2
    assert engine.schedulers[asked].table.blocks_of("first") == blocks
    engine.submit(Score("first", sequences[1], (9,), (0,)))
    assert len(drain(engine)) == 1
    finish(engine, sequences, reservations)


def test_one_that_holds_nothing_and_finds_no_room_beside_the_first_waits_for_it(make: Make):
    """The first works on one model, so the other model's batch has nobody who could give anything up."""
    engine = make(6)
    reservations = [admit(engine, "first", 1, 5), admit(engine, "second", 6, 0)]
    sequences = [decode(engine, VERIFIER, "first", 4 * 38, 20)]
    for _ in range(3):
        engine.step()
    assert engine.kv_pool.available_slabs == 1
    sequences.append(prefill(engine, GENERATOR, "second", 40))
    done = drain(engine)
    assert [d.work.owner for d in done] == ["first", "second"]
    assert engine.stats()[VERIFIER].preemptions == 1, "once it had nothing to do"
    finish(engine, sequences, reservations)


def test_a_budget_smaller_than_the_number_of_owners_keeps_nobody_from_going_on(make: Make):
    """The one token of a step would go to the second, which asks for more and finds no block."""
    engine = make(6, max_batch_tokens=1)
    reservations = [admit(engine, owner, 6, 0) for owner in ("first", "second")]
    sequences = [decode(engine, GENERATOR, "first", 4 * 11 + 1, 3)]
    for _ in range(4 * 11 + 1):
        engine.step()
    sequences.append(prefill(engine, GENERATOR, "second", 40))
    done = drain(engine)
    assert [d.work.owner for d in done] == ["first", "second"]
    finish(engine, sequences, reservations)


def test_a_large_prompt_that_waits_does_not_hold_up_a_small_one_of_a_higher_rank(make: Make):
    engine = make(6)
    reservations = [admit(engine, owner, 6, 0) for owner in ("first", "second")]
    idle = [prefill(engine, GENERATOR, "first", 4 * 8)]
    drain(engine)
    sequences = [prefill(engine, GENERATOR, "second", 40), prefill(engine, GENERATOR, "first", 8)]
    assert [d.work.owner for d in engine.step()] == ["first"]
    assert [d.work.owner for d in drain(engine)] == ["second"]
    finish(engine, idle + sequences, reservations)


def test_nobody_is_preempted_for_work_that_has_been_placed(make: Make):
    """Room for the second's prompt is made in the same step in which it finds none."""
    engine = make(7)
    reservations = [admit(engine, owner, 6, 1) for owner in ("first", "second", "third")]
    sequences = [prefill(engine, GENERATOR, "first", 4 * 8)]
    drain(engine)
    sequences.append(decode(engine, VERIFIER, "third", 8, 9))
    engine.step()
    sequences.append(decode(engine, GENERATOR, "second", 4 * 10, 4))
    drain(engine)
    assert engine.schedulers[GENERATOR].table.blocks_of("first") == 0, "it has no work"
    assert engine.stats()[VERIFIER].preemptions == 0
    finish(engine, sequences, reservations)


def test_a_prompt_opened_by_one_that_is_preempted_keeps_no_cached_block_from_the_first(make: Make):
    engine = make(6, prefix_cache=True)
    reservations = [admit(engine, owner, 6, 0) for owner in ("first", "second")]
    sequences = [prefill(engine, GENERATOR, "second", 4 * 6)]
    drain(engine)
    engine.suspend("second")
    engine.submit(Score("second", sequences[0], (9,), (0,)))
    sequences.append(engine.open(GENERATOR, engine.token_ids(sequences[0]), owner="second"))
    assert engine.schedulers[GENERATOR].table.blocks_of("second") == 6, "found in the prefix cache"
    sequences.append(prefill(engine, GENERATOR, "first", 4 * 12 - 1, start=50))
    assert [d.work.owner for d in engine.step()] == ["first"]
    engine.resume_owner("second")
    assert [d.work.owner for d in drain(engine)] == ["second"]
    finish(engine, sequences, reservations)


# The policy alone: nothing is computed.


def hold(engine: Engine, works: Mapping[str, bool], blocks: int = 2, role: str = GENERATOR) -> list[KVSequence]:
    """Owners that hold so many blocks each, with work or without."""
    sequences = [prefill(engine, role, owner, 4 * blocks, start=i) for i, owner in enumerate(works)]
    drain(engine)
    for sequence in sequences:
        if works[sequence.owner]:
            engine.submit(Score(sequence.owner, sequence, (9,), (0,)))
    return sequences


def test_owners_without_work_are_preempted_before_those_with_some_and_of_either_the_last_one_first(make: Make):
    engine = make(6)
    works = {"idle": False, "first": True, "second": True, "third": True, "last": False}
    reservations = [admit(engine, owner, 6, 0) for owner in works]
    sequences = hold(engine, works)
    policy, table = Preemption(engine.kv_pool, engine.schedulers, engine.admission), engine.schedulers[GENERATOR].table
    gone: list[str] = []
    while policy.make_room({"second", "first"}):
        gone += [owner for owner in works if not table.blocks_of(owner) and owner not in gone]
    assert gone == ["last", "idle", "third", "second"]
    assert {role: each.preemptions for role, each in engine.stats().items()} == {GENERATOR: 4, VERIFIER: 0}
    assert engine.schedulers[GENERATOR].planner.paused == set(gone)
    assert engine.schedulers[VERIFIER].planner.paused == set(gone)
    for owner in works:
        policy.forget(owner)
        engine.cancel(owner)
    finish(engine, sequences, reservations)


def test_nobody_who_ranks_before_all_that_ask_is_preempted(make: Make):
    engine = make(6)
    works = {"first": True, "second": True, "third": True}
    reservations = [admit(engine, owner, 6, 0) for owner in works]
    sequences = hold(engine, works)
    policy = Preemption(engine.kv_pool, engine.schedulers, engine.admission)
    assert not policy.make_room({"third"})
    assert policy.make_room({"second", "third"})
    assert not policy.make_room({"second"})
    table = engine.schedulers[GENERATOR].table
    assert [table.blocks_of(owner) for owner in works] == [2, 2, 0]
    for owner in works:
        policy.forget(owner)
        engine.cancel(owner)
    finish(engine, sequences, reservations)


@pytest.mark.parametrize(
    ("slabs", "blocked", "resumed"),
    [
        (3, None, {"second", "third"}),  # each held one, and there is one more to grow into
        (2, None, {"second"}),
        (1, None, set()),
        (9, "first", set()),
        (9, "second", {"second"}),
        (9, "third", {"second", "third"}),
    ],
)
def test_preempted_owners_resume_in_order_while_there_is_room_and_none_before_a_higher_one_that_is_blocked(
    slabs: int, blocked: str | None, resumed: set[str], make: Make
):
    engine = make(12)
    owners = ("first", "second", "third")
    reservations = [admit(engine, owner, 12, 0) for owner in owners]
    sequences = hold(engine, dict.fromkeys(owners, True))
    policy, scheduler = Preemption(engine.kv_pool, engine.schedulers, engine.admission), engine.schedulers[GENERATOR]
    for owner in ("third", "second"):
        policy.preempt(owner)
    taken = [scheduler.pools[0].allocate() for _ in range((11 - slabs) * GENERATOR_BLOCKS)]
    assert engine.kv_pool.available_slabs == slabs
    scheduler.planner.blocked = blocked and BlockedWork(blocked, 1)
    policy.resume()
    assert scheduler.planner.paused == {"second", "third"} - resumed
    scheduler.planner.blocked = None
    scheduler.pools[0].free(taken)
    engine.cancel("first")
    policy.resume()
    assert not scheduler.planner.paused
    for owner in owners:
        engine.cancel(owner)
    finish(engine, sequences, reservations)


@pytest.mark.parametrize("idle", [False, True])
def test_sequences_of_one_owner_that_do_not_fit_together_take_turns(make: Make, idle: bool):
    def sampled(slabs: int) -> list[list[int]]:
        engine = make(slabs)
        reservation = admit(engine, "a", 8, 0)
        held = prefill(engine, GENERATOR, "a", 40) if idle else None
        drain(engine)
        sequences = [decode(engine, GENERATOR, "a", 5 + place, 40) for place in range(4)]
        drain(engine)
        assert (engine.stats()[GENERATOR].preemptions > 0) == (slabs < 40)
        found = [engine.token_ids(sequence) for sequence in sequences]
        finish(engine, sequences + ([held] if held else []), [reservation])
        return found

    assert sampled(8) == sampled(48)
