"""Two models in one KV pool under random use, against a model made of token lists.

Whatever is opened, forked, sampled, scored, released, cancelled or made to give up its KV, in any order and with too
little memory for all: every step and score is, bit for bit, what a second engine gives that has nothing else to do,
and when all is released not one block is left.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from scripted_drafts import FixedLength
from zoo_models import write_checkpoint

from espalier.engine import batches
from espalier.engine.engine import Engine, EngineSettings
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_generator
from espalier.engine.roles import DRAFT, GENERATOR, VERIFIER
from espalier.engine.scheduling.running_samples import RunningRequest
from espalier.engine.speculation.speculation import Speculation
from espalier.engine.work import Done, Generate, Generated, Sampling, Score, Scored

OWNERS = ("first", "second", "third")
BLOCK = 4
BATCH = 40
OPERATIONS = 50
"""At least, of each example on average."""
HEADS = {
    "sum": lambda hidden: torch.stack((hidden.sum(-1), hidden[:, 0]), dim=-1),
    "largest": lambda hidden: hidden.amax(-1, keepdim=True),
}
"""Heads on the generator's states, beside its own."""


class Alone:
    """What a step or a score is when nothing else runs, each worked out once."""

    def __init__(self, models: dict[str, Model]) -> None:
        self.engine = Engine(models, EngineSettings(2**22, block_size=16, prefix_cache=False))
        self.known: dict[tuple, object] = {}

    def run(self, sequence: KVSequence, work: Generate | Score) -> Done:
        self.engine.submit(work)
        done: list[Done] = []
        while self.engine.busy:
            done += self.engine.step()
        self.engine.release(sequence)
        return done[0]

    def step(self, text: tuple[int, ...], sampling: Sampling, tokens: int, head: str) -> tuple:
        if (key := (text, sampling, tokens, head)) not in self.known:
            sequence = self.engine.open(GENERATOR, list(text))
            done = self.run(sequence, Generate(None, sequence, (sampling,), tokens, in_place=True, head=head))
            assert isinstance(done, Generated)
            self.known[key] = outcome(done)
        return self.known[key]  # type: ignore[return-value]

    def scores(self, before: tuple[int, ...], work: Score) -> bytes:
        role = work.sequence.role
        if (key := (role, before, work.token_ids, work.score_positions, work.head)) not in self.known:
            sequence = self.engine.open(role, list(before))
            done = self.run(sequence, Score(None, sequence, work.token_ids, work.score_positions, head=work.head))
            assert isinstance(done, Scored)
            self.known[key] = done.values.tobytes()
        return self.known[key]  # type: ignore[return-value]


def outcome(done: Generated) -> tuple:
    """What must not depend on company."""
    values = None if done.values is None else done.values.tobytes()
    return tuple(done.token_ids), done.log_probability, done.cause, values


class EngineMachine(RuleBasedStateMachine):
    models: dict[str, Model]
    alone: Alone
    generator = "talker"
    slabs = 46
    slab_bytes = 5_400
    most_blocks: ClassVar = {GENERATOR: 80, VERIFIER: 60}
    """Of one owner, by KV group, nothing shared: what fits the KV pool alone."""
    launch_ahead = False
    draft_tokens = 0
    draft = ""
    operations = 0
    drafted = 0
    accepted = 0
    preemptions = 0
    evictions = 0
    throttled = 0

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(
            self.models,
            EngineSettings(
                self.slabs * self.slab_bytes,
                BLOCK,
                slab_bytes=self.slab_bytes,
                max_batch_tokens=BATCH,
                reserved_share=0.01,
                launch_ahead=self.launch_ahead,
                draft_tokens=self.draft_tokens,
            ),
        )
        if self.draft_tokens and not self.draft:
            scheduler, config = self.engine.schedulers[GENERATOR], self.models[GENERATOR].config
            drafter, lengths = KnowingDrafter(self.engine, self.alone), ChangingLength()
            scheduler.speculation = Speculation(
                scheduler.table, drafter, lengths, config.max_positions, config.vocab_size
            )
        if self.draft:
            speculation = self.engine.schedulers[GENERATOR].speculation
            speculation.lengths, speculation.length = FixedLength(self.draft_tokens), self.draft_tokens
        self.reservations = []
        for owner in OWNERS:
            reservation = self.engine.admission.try_reserve(self.most_blocks, owner)
            assert reservation is not None
            self.reservations.append(reservation)
            self.engine.sharing.assign(owner, owner)
        self.texts: dict[KVSequence, list[int]] = {}
        self.working: dict[KVSequence, Generate | Score] = {}
        for number, owner in enumerate(OWNERS):  # together more than there is room for
            for prompt in (20 * number, 20 * number + 10):
                self.open_one(GENERATOR, owner, prompt, 50, b"")
                self.open_one(VERIFIER, owner, prompt, 40, b"")
        for sequence in self.idle():
            if sequence.role == GENERATOR:
                self.submit(sequence, Generate(sequence.owner, sequence, (Sampling(key=1), Sampling(key=2)), 4))
            else:
                self.submit(sequence, Score(sequence.owner, sequence, (3,), (0,)))

    def count(self) -> None:
        EngineMachine.operations += 1

    def idle(self, role: str | None = None) -> list[KVSequence]:
        found = [s for s in self.texts if s not in self.working and role in (None, s.role)]
        return sorted(found, key=lambda s: (s.role, s.row))

    def room_for(self, owner: Hashable, role: str, lengths: list[int]) -> bool:
        """Whether sequences of these lengths leave the owner with what fits the KV pool alone."""
        held = [*lengths, *(len(text) for s, text in self.texts.items() if s.owner == owner and s.role == role)]
        for sequence, work in self.working.items():
            if sequence.owner == owner and sequence.role == role and isinstance(work, Generate):
                held += [len(self.texts[sequence]) + work.max_tokens] * len(work.samplings)
        for pool in self.engine.schedulers[role].pools:
            if pool.holds_states:
                if len(held) > self.most_blocks[pool.name]:
                    return False
                continue
            most = 2**20 if pool.window is None else (pool.window - 1) // BLOCK + 2
            if sum(min(-(-length // BLOCK), most) + 1 for length in held) > self.most_blocks[pool.name]:
                return False
        return True

    @rule(
        role=st.sampled_from([GENERATOR, VERIFIER]),
        prompt=st.integers(0, 60),
        length=st.integers(1, 40),
        salt=st.sampled_from([b"", b"", b"salt"]),
    )
    def open(self, role: str, prompt: int, length: int, salt: bytes) -> None:
        self.count()
        for other in OWNERS[: 1 + length % 3]:
            if self.room_for(other, role, [length + 5]):
                self.open_one(role, other, prompt, length, salt)

    def open_one(self, role: str, owner: str, prompt: int, length: int, salt: bytes) -> None:
        text = [9 + (prompt + i) % 100 for i in range(length)]
        self.texts[self.engine.open(role, text, salt, owner)] = text

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), count=st.integers(1, 3))
    def fork(self, data: st.DataObject, count: int) -> None:
        self.count()
        sequence = data.draw(st.sampled_from(self.idle()))
        text = self.texts[sequence]
        if self.room_for(sequence.owner, sequence.role, [len(text) + 5] * count):
            for child in self.engine.fork(sequence, count):
                assert child.owner == sequence.owner
                self.texts[child] = list(text)

    @precondition(lambda self: self.idle())
    @rule(
        data=st.data(),
        new=st.lists(st.integers(3, 40), max_size=6),
        every=st.booleans(),
        head=st.sampled_from(["", "", "", *HEADS]),
    )
    def score(self, data: st.DataObject, new: list[int], every: bool, head: str) -> None:
        """Read the verifier, or a head on the generator."""
        self.count()
        score_positions = tuple(range(len(new))) if every else tuple(range(len(new)))[-1:]
        role = GENERATOR if head else VERIFIER
        if not (idle := self.idle(role)):
            return
        for sequence in data.draw(st.lists(st.sampled_from(idle), min_size=1, max_size=6, unique=True)):
            if self.room_for(sequence.owner, role, [len(new) + 5]):
                self.submit(sequence, Score(sequence.owner, sequence, tuple(new), score_positions, head=head))

    @precondition(lambda self: self.idle(GENERATOR))
    @rule(
        data=st.data(),
        key=st.integers(0, 50),
        samplings=st.integers(1, 4),
        tokens=st.integers(1, 5),
        temperature=st.sampled_from([0.0, 0.2, 1.0]),
        in_place=st.booleans(),
        head=st.sampled_from(["", *HEADS]),
    )
    def generate(
        self, data: st.DataObject, key: int, samplings: int, tokens: int, temperature: float, in_place: bool, head: str
    ) -> None:
        self.count()
        samplings = 1 if in_place else samplings
        drawn = tuple(Sampling(temperature=temperature, key=key + i) for i in range(samplings))
        for sequence in data.draw(st.lists(st.sampled_from(self.idle(GENERATOR)), min_size=1, max_size=4, unique=True)):
            if self.room_for(sequence.owner, GENERATOR, [len(self.texts[sequence]) + tokens] * samplings):
                self.submit(sequence, Generate(sequence.owner, sequence, drawn, tokens, in_place=in_place, head=head))

    def submit(self, sequence: KVSequence, work: Generate | Score) -> None:
        self.engine.submit(work)
        self.working[sequence] = work

    @precondition(lambda self: self.working)
    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        self.count()
        for _ in range(steps):
            self.take(self.engine.step())

    @precondition(lambda self: self.working)
    @rule()
    def drain(self) -> None:
        self.count()
        for _ in range(3000):
            if not self.engine.busy:
                break
            self.take(self.engine.step())
        assert not self.working, "the engine goes round in circles"

    def take(self, finished: list[Done]) -> None:
        EngineMachine.throttled += bool(self.engine.schedulers[GENERATOR].planner.throttled)
        for done in finished:
            sequence = done.work.sequence
            before = self.texts[sequence]
            if isinstance(done, Scored):
                assert done.values.tobytes() == self.alone.scores(tuple(before), done.work)
                before += done.work.token_ids
                del self.working[sequence]
                continue
            work = done.work
            for index in done.indices:
                expected = self.alone.step(tuple(before), work.samplings[index], work.max_tokens, work.head)
                assert outcome(done) == expected
            if work.in_place:
                before += done.token_ids
            else:
                self.texts[done.sequence] = [*before, *done.token_ids]
            self.finish(work, done.indices)

    def finish(self, work: Generate, indices: tuple[int, ...]) -> None:
        """Note that some samplings of `work` have ended; the rest keeps its sequence busy."""
        left = len(self.working[work.sequence].samplings) - len(indices)  # type: ignore[union-attr]
        if left:
            rest = Generate(work.owner, work.sequence, work.samplings[:left], work.max_tokens)
            self.working[work.sequence] = rest
        else:
            del self.working[work.sequence]

    @precondition(lambda self: len(self.idle()) > 5)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.count()
        sequence = data.draw(st.sampled_from(self.idle()))
        self.engine.release(sequence)
        del self.texts[sequence]

    @precondition(lambda self: self.working)
    @rule(owner=st.sampled_from(OWNERS))
    def preempt(self, owner: str) -> None:
        self.count()
        self.engine.suspend(owner)
        self.engine.resume_owner(owner)
        for role, scheduler in self.engine.schedulers.items():
            assert scheduler.table.blocks_of(owner) == 0, role

    @precondition(lambda self: len(self.working) > 3)
    @rule(owner=st.sampled_from(OWNERS))
    def cancel(self, owner: str) -> None:
        self.count()
        self.engine.cancel(owner)
        for sequence in [s for s in self.working if s.owner == owner]:
            work = self.working.pop(sequence)
            table = self.engine.schedulers[sequence.role].table
            text = table.token_ids(sequence)
            assert text[: len(self.texts[sequence])] == self.texts[sequence]
            assert isinstance(work, Score) or work.in_place or text == self.texts[sequence]
            self.texts[sequence] = text

    @invariant()
    def all_is_whole(self) -> None:
        self.engine.check_integrity()
        for sequence, text in self.texts.items():
            if sequence not in self.working:
                assert self.engine.schedulers[sequence.role].table.token_ids(sequence) == text

    def teardown(self) -> None:
        for owner in OWNERS:
            self.engine.cancel(owner)
        for sequence in self.texts:
            self.engine.release(sequence)
        for reservation in self.reservations:
            self.engine.admission.release(reservation)
        self.engine.check_drained()
        stats = self.engine.stats().values()
        EngineMachine.drafted += sum(role.drafted_tokens for role in stats)
        EngineMachine.accepted += sum(role.accepted_tokens for role in stats)
        EngineMachine.preemptions += sum(role.preemptions for role in stats)
        EngineMachine.evictions += sum(role.evicted_blocks for role in stats)


class LaunchAheadMachine(EngineMachine):
    """The same with the next batch launched before results are taken in."""

    launch_ahead = True


class WindowedMachine(EngineMachine):
    """The same with a generator whose layers all have a window of 5 tokens."""

    generator = "mistral-window"
    slabs = 14 + 4 + 6  # for the blocks below, and those that a step writes
    most_blocks: ClassVar = {GENERATOR: 40, VERIFIER: 60}


class MixedMachine(EngineMachine):
    """The same with windows of 6 tokens in two of three layers, and the next batch launched before results are in."""

    generator = "qwen3-mixed-window"
    slabs = 8 + 2 + 8 + 6
    most_blocks: ClassVar = {"generator/0": 40, "generator/1": 80, VERIFIER: 60}
    launch_ahead = True


class KnowingDrafter:
    """Proposes what will be drawn, but for some wrong tokens, and sometimes nothing or too much."""

    def __init__(self, engine: Engine, alone: Alone) -> None:
        self.table = engine.schedulers[GENERATOR].table
        self.alone = alone
        self.calls = 0

    def propose(self, branches: Sequence[RunningRequest], most: Sequence[int]) -> list[list[int]]:
        drafts: list[list[int]] = []
        for branch, count in zip(branches, most, strict=True):
            self.calls += 1
            work, tokens = branch.work, self.table.tokens[branch.row, : self.table.lengths[branch.row]].tolist()
            sampling = work.samplings[branch.indices[self.calls % 3 == 0 and -1]]
            text, *_ = self.alone.step(tuple(tokens[: branch.start]), sampling, work.max_tokens, work.head)
            draft = [*text[len(tokens) - branch.start :], 5, 6, 7]
            if self.calls % 2 == 0:
                draft[self.calls // 2 % 2] = self.calls % 40
            drafts.append(draft[: count + 2] if self.calls % 7 else [])
        return drafts

    def learn(self, finished: Sequence[Generated]) -> None:
        assert all(not one.sequence.released for one in finished)


class ChangingLength:
    """Drafts of every length up to 3, and none."""

    def __init__(self) -> None:
        self.steps = 0

    def choose(self, branches: int) -> int:
        self.steps += 1
        return (3, 2, 3, 1, 0)[self.steps % 5]

    def record(self, branches: int, length: int, tokens: int, seconds: float) -> None:
        assert branches > 0
        assert branches <= tokens <= branches * (1 + length)
        assert seconds >= 0


class DraftedMachine(EngineMachine):
    """The same with drafts of up to three tokens that are often right."""

    draft_tokens = 3


class DraftModelMachine(EngineMachine):
    """The same with a draft model, which is the generator itself."""

    draft_tokens = 3
    draft = "talker"


class DraftModelMixedMachine(MixedMachine):
    """The same with a draft model of windows of 6 tokens in two of three layers, and with steps launched ahead."""

    draft_tokens = 3
    draft = "qwen3-mixed-window"


class DraftedMixedMachine(MixedMachine):
    """The same with windows of 6 tokens in two of three layers, which a draft goes beyond."""

    launch_ahead = False
    draft_tokens = 3


class DraftedAheadMachine(LaunchAheadMachine):
    """The same where a step is launched ahead between those with drafts."""

    draft_tokens = 3


class RecurrentMachine(EngineMachine):
    """The same with a generator of three recurrent layers and one of attention."""

    generator = "qwen3_next"
    most_blocks: ClassVar = {GENERATOR: 80, "generator/states": 14, VERIFIER: 60}

    @classmethod
    def fit(cls, models: dict[str, Model]) -> None:
        """Make slabs that hold a state each, and as many as what one owner holds needs, and a few."""
        cls.slab_bytes = models[GENERATOR].config.state_bytes
        each = {role: BLOCK * model.config.kv_bytes_per_token(4) for role, model in models.items()}
        of_blocks = sum(-(-cls.most_blocks[role] // (cls.slab_bytes // size)) for role, size in each.items())
        cls.slabs = cls.most_blocks["generator/states"] + of_blocks + 3


FAST = {
    EngineMachine: 16,
    LaunchAheadMachine: 16,
    WindowedMachine: 30,
    MixedMachine: 16,
    RecurrentMachine: 8,
    DraftedMachine: 3,
    DraftedAheadMachine: 3,
    DraftedMixedMachine: 4,
    DraftModelMachine: 8,
    DraftModelMixedMachine: 2,
}
"""Examples of each in the fast run."""


@pytest.mark.parametrize(
    ("machine", "examples"), [*FAST.items(), *(pytest.param(each, 2000, marks=pytest.mark.slow) for each in FAST)]
)
def test_whatever_happens_in_whatever_order_results_are_as_if_alone(
    machine: type[EngineMachine],
    examples: int,
    load_model: Callable[[str], Model],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    for name, strictest in (("_MAX_LAG", 1), ("_WORTHWHILE", 0)):
        monkeypatch.setattr(batches, name, strictest)
    if recurrent := issubclass(machine, RecurrentMachine):
        checkpoint = Checkpoint(write_checkpoint(tmp_path, machine.generator))
        model = load_generator(checkpoint, torch.float32, "cpu")
    else:
        model = load_model(machine.generator)
    EngineMachine.models = {GENERATOR: replace(model, other_heads=HEADS), VERIFIER: load_model("classifier")}
    if recurrent:
        machine.fit(EngineMachine.models)
    EngineMachine.alone = Alone(EngineMachine.models)
    if machine.draft:
        EngineMachine.models[DRAFT] = load_model(machine.draft)
    EngineMachine.operations = EngineMachine.preemptions = EngineMachine.evictions = EngineMachine.throttled = 0
    EngineMachine.drafted = EngineMachine.accepted = 0
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=80,
            phases=[Phase.generate],
            suppress_health_check=tuple(HealthCheck),
        ),
    )
    assert EngineMachine.operations >= OPERATIONS * examples
    assert EngineMachine.preemptions >= 2 * examples
    assert EngineMachine.evictions >= 2 * examples
    assert EngineMachine.throttled >= 2 * examples
    if machine.draft_tokens:
        assert EngineMachine.accepted >= examples // 4
        if not machine.draft:  # which draws what the generator does
            assert EngineMachine.drafted >= EngineMachine.accepted + examples
    EngineMachine.alone.engine.check_drained()
