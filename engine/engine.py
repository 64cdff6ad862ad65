"""The engine: two models, one KV pool, one batch at a time."""

import logging
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from espalier.engine.batches import Batches, FairSharing, GeneratorFirst
from espalier.engine.errors import MisuseError, name_tokens
from espalier.engine.execution.runner import ModelRunner
from espalier.engine.interrupts import interrupts_held
from espalier.engine.memory.model_memory import make_kv_pool, make_table
from espalier.engine.memory.sequences import KVSequence, SequenceTable
from espalier.engine.models.config import DecoderConfig
from espalier.engine.models.model import Model
from espalier.engine.roles import DRAFT, GENERATOR
from espalier.engine.scheduling.admission import Admission, Preemption
from espalier.engine.scheduling.scheduler import LaunchAheadScheduler, Scheduler
from espalier.engine.speculation.draft_model import ModelDrafter
from espalier.engine.speculation.lengths import MeasuredLength
from espalier.engine.speculation.speculation import Speculation, SuffixDrafter
from espalier.engine.stats import RoleStats, StepRecord
from espalier.engine.work import Done, Generated, Work

log = logging.getLogger("espalier.engine")
_WITHOUT_EMBEDDING = (
    "the %s has an embedding for %d tokens and none for %s of its tokenizer; texts with one are refused"
)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Sizes and options of an engine.

    Attributes:
        kv_memory_bytes: size of the KV pool both models share.
        block_size: tokens per KV block.
        slab_bytes: size of a slab; None takes a 128th of the KV pool, at least one block of either model.
        max_batch_tokens: tokens computed in one step at most; longer prompts are prefilled in chunks.
        prefix_cache: keep the KV of prompts seen before and use it again, instead of computing it again; results are
            identical.
        reserved_share: the share of a search's worst case that is reserved when it starts. With 1 blocks never run out,
            but for searches of whole paths that are larger than the pool; with less, more searches run at once, and
            when blocks run out the last searches are preempted: their KV is freed, and computed again once there is
            room.
        launch_ahead: whether the next batch, of either model, is launched before the results of the last one are waited
            for, so that a GPU computes while the host takes results in. Results then come one step late, and are the
            same; a branch that stops has computed a token too many by then, which is dropped. On a CPU nothing is
            gained; on an H200 searches are 1.2 to 1.4 times as fast.
        draft_tokens: tokens that are drafted for a branch of the generator in one step at most, which its next step
            computes and draws all at once; 0 drafts none. Results are the same.
    """

    kv_memory_bytes: int = 2**30
    block_size: int = 16
    slab_bytes: int | None = None
    max_batch_tokens: int = 2048
    prefix_cache: bool = True
    reserved_share: float = 1.0
    launch_ahead: bool = False
    draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Footprint:
    """Blocks that some sequences hold.

    Attributes:
        logical_blocks: blocks if every sequence had its own.
        blocks_by_role: blocks as they are, shared ones counted once, by role.
        bytes_by_role: bytes of these blocks, by role.
    """

    logical_blocks: int
    blocks_by_role: Mapping[str, int]
    bytes_by_role: Mapping[str, int]

    @property
    def physical_blocks(self) -> int:
        """Blocks of both roles as they are."""
        return sum(self.blocks_by_role.values())

    @property
    def physical_bytes(self) -> int:
        """Bytes of both roles."""
        return sum(self.bytes_by_role.values())


class Engine:
    """Runs the work of many owners on a generator and, where there is one, a verifier.

    Attributes:
        settings: sizes and options.
        kv_pool: the memory that all models share.
        schedulers: the waiting and running work of each model, by role.
        admission: what is reserved of the pool.
        sharing: whose work goes before others'.
        on_step: called after each batch with its `StepRecord`; None for nobody. An exception that it raises leaves
            `step`, so it must not raise.
    """

    def __init__(
        self,
        models: Mapping[str, Model],
        settings: EngineSettings | None = None,
        role_policy: GeneratorFirst | None = None,
    ) -> None:
        """Make an engine for `models`, by role: `generator`, `verifier`, or both; with a generator also `draft`."""
        self.settings = settings or EngineSettings()
        self.on_step: Callable[[StepRecord], None] | None = None
        self.kv_pool = make_kv_pool(
            models.values(), self.settings.kv_memory_bytes, self.settings.block_size, self.settings.slab_bytes
        )
        self._launch_ahead = self.settings.launch_ahead and _can_launch_ahead(models)
        self.schedulers = {role: self._make_scheduler(role, model) for role, model in models.items()}
        self._runners = {role: self._make_runner(role, model) for role, model in models.items()}
        # KV of drafts is never reserved: it is given up before anybody waits.
        others = [scheduler for role, scheduler in self.schedulers.items() if role != DRAFT]
        pools = {pool.name: pool for scheduler in others for pool in scheduler.pools}
        self.admission = Admission(self.kv_pool, pools, self.settings.reserved_share)
        device = self.kv_pool.bytes.device
        self.sharing = FairSharing({role: model.weight_bytes for role, model in models.items()}, device.type)
        self._preemption = Preemption(self.kv_pool, self.schedulers, self.admission)
        self._batches = Batches(
            self.schedulers,
            self._runners,
            role_policy or GeneratorFirst.on(device.type),
            self.sharing,
            self._preemption,
            self.settings.max_batch_tokens,
            lambda: self.on_step,
        )
        self._draft_model: ModelDrafter | None = None
        if self.settings.draft_tokens and GENERATOR in models:
            self._begin_speculation(self.schedulers[GENERATOR], models[GENERATOR].config)

    def _make_scheduler(self, role: str, model: Model) -> Scheduler:
        settings, drafts = self.settings, role == DRAFT
        further = settings.draft_tokens if drafts else 0  # it goes back by what is not accepted
        table = make_table(role, model, self.kv_pool, settings.block_size, settings.prefix_cache, further)
        if beyond := model.without_embedding:
            log.warning(_WITHOUT_EMBEDDING, role, model.config.vocab_size, name_tokens(beyond))
        if drafts:
            return Scheduler(role, model, table)
        return (LaunchAheadScheduler if self._launch_ahead else Scheduler)(role, model, table, self._make_room)

    def _make_runner(self, role: str, model: Model) -> ModelRunner:
        return ModelRunner(role, model, [pool.layout for pool in self.schedulers[role].pools], self.kv_pool)

    @property
    def busy(self) -> bool:
        """True if any work waits or runs, or has results that `step` has not returned yet."""
        working = any(scheduler.busy for scheduler in self.schedulers.values())
        return working or bool(self._batches.collected or self._batches.failures)

    @property
    def models(self) -> dict[str, Model]:
        """The models, by role."""
        return {role: runner.model for role, runner in self._runners.items()}

    def set_threads(self, count: int | None) -> None:
        """Run operations on `count` CPU threads; None keeps their number. This holds for all engines of the process."""
        for runner in self._runners.values():
            runner.model.decoder.backend.set_threads(count)

    def model(self, role: str) -> Model:
        """The model of a role."""
        return self._runners[role].model

    def open(self, role: str, token_ids: list[int], salt: bytes = b"", owner: Hashable = None) -> KVSequence:
        """A new sequence of `role`'s model; its tokens are computed with the first work on it.

        Full blocks of a prompt that was computed before, under the same `salt`, are taken from the prefix cache. All
        work on the sequence and its forks belongs to `owner`.

        Raises:
            NoEmbeddingError: when the model has no embedding for one of the tokens.
            MisuseError: for a role that the engine has no model of, negative ids, or more tokens than the model's
                context.
        """
        if role not in self.schedulers:
            raise MisuseError(f"the engine has no {role}")
        return self.schedulers[role].open(token_ids, salt, owner)

    def fork(self, sequence: KVSequence, count: int) -> list[KVSequence]:
        """Fork `count` sequences that share every block; a partial last block is copied on the first write.

        Raises:
            MisuseError: when `sequence` was released or belongs to another engine, or `count` is negative.
        """
        if count < 0:
            raise MisuseError(f"{count} forks cannot be made")
        table = self._settled_table(sequence)
        return [table.fork(sequence) for _ in range(count)]

    def length(self, sequence: KVSequence) -> int:
        """Number of tokens a sequence has, computed or not.

        Raises:
            MisuseError: when the sequence was released or belongs to another engine.
        """
        return int(self._settled_table(sequence).lengths[sequence.row])

    def token_ids(self, sequence: KVSequence) -> list[int]:
        """The tokens of a sequence, computed or not.

        Raises:
            MisuseError: when the sequence was released or belongs to another engine.
        """
        return self._settled_table(sequence).token_ids(sequence)

    def append(self, sequence: KVSequence, token_ids: Sequence[int], instead_of: int = 0) -> None:
        """Write tokens at the end of a sequence; they are computed with the next work on it or on a fork.

        Args:
            sequence: no work may wait or run on it.
            token_ids: the tokens.
            instead_of: how many of its last tokens they take the place of.

        Raises:
            NoEmbeddingError: when the model has no embedding for one of the tokens.
            MisuseError: when the sequence was released, belongs to another engine, has work, or would go beyond the
                model's context.
        """
        self._scheduler(sequence).append(sequence, token_ids, instead_of)

    def release(self, sequence: KVSequence) -> None:
        """Release a sequence; blocks that no other sequence shares become free.

        Once its tokens are computed it may be released while children are sampled from it: they have their own.

        Raises:
            MisuseError: when it was released before or belongs to another engine, or work waits or runs on it.
        """
        self._scheduler(sequence).release(sequence)

    def submit(self, work: Work) -> None:
        """Queue work for the model that its sequence belongs to.

        Raises:
            NoEmbeddingError: when the model has no embedding for one of its tokens or targets.
            MisuseError: for work that could not be run: without tokens to sample or read from; with reads that do not
                ascend or lie outside its tokens, or more or fewer targets than reads; or on a sequence that was
                released, belongs to another engine, has work already, or would go beyond the model's context.
        """
        self._scheduler(work.sequence).submit(work)

    def cancel(self, owner: Hashable) -> None:
        """Drop all work of `owner`; the sequences it holds stay, for it to release."""
        self._batches.settle()
        for done in self._batches.forget(owner):
            if isinstance(done, Generated) and not done.work.in_place:
                self.release(done.sequence)
        for scheduler in self.schedulers.values():
            scheduler.cancel(owner)
        self._preemption.forget(owner)

    def abandon(self, owner: Hashable) -> None:
        """Drop all work of `owner` and release all its sequences; for callers that lost track of their handles."""
        self.cancel(owner)
        for scheduler in self.schedulers.values():
            for sequence in scheduler.table.of_owner(owner):
                scheduler.table.release(sequence)

    def step(self) -> list[Done]:
        """Run one batch on one model and return the work that it finished; empty when there is none.

        With `launch_ahead` the batch is only launched, and the finished work is that of the batch before.

        Raises:
            NumericalError: when a model's results for some owners are not numbers. Nothing else is lost: cancel these
                owners and call again.
            StepError: likewise, when the engine's own code fails in a step with work of these owners.
            PoolExhaustedError: when nobody's work finds blocks and no owner can give any up. Cancel the owner that it
                names, or release sequences, and call again. Never while all owners with work were admitted, and hold
                no more than they said.
            DeviceError: when a model cannot be run; what the device's memory holds is not certain any more.
            KeyboardInterrupt: after the batch, whose finished work the next step returns.
        """
        batches = self._batches
        if not batches.failures:
            with interrupts_held():
                batches.run(self._launch_ahead)
        if batches.failures:
            raise batches.failures.pop(0)
        collected, batches.collected = batches.collected, []
        return collected

    def replace_model(self, role: str, model: Model) -> None:
        """Go on with other weights of a role's model, from the next step on.

        Steps in flight end by the old ones. Sequences keep their tokens, and no KV of the old weights is left, live or
        cached: it is computed again by the new ones, so that a step never mixes both. Drafts need no word of it, as
        they are verified.

        Args:
            role: of a model that no other role shares weights with.
            model: of the same configuration, with the tokenizer of the old one.

        Raises:
            MisuseError: it is none. The old model stays, as it does where the new one cannot be made ready.
        """
        old = self._runners[role].model
        if model.config != old.config or model.tokenizer is not old.tokenizer:
            raise MisuseError(f"the {role}'s weights can be replaced by others of the same configuration alone")
        self._batches.settle()
        runner = self._make_runner(role, model)
        self._runners[role].close()
        self._runners[role] = runner
        # Hashes of prefixes keep the digest of the first weights: blocks of others are all gone.
        self.schedulers[role].replace_model(model)

    def footprint(self, sequences: Sequence[KVSequence]) -> Footprint:
        """The blocks that `sequences` hold together.

        Raises:
            MisuseError: when one of them was released or belongs to another engine.
        """
        logical = 0
        counts: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for role, scheduler in self.schedulers.items():
            its = [sequence for sequence in sequences if sequence.role == role]
            for group, pool in enumerate(scheduler.pools if its else ()):
                blocks = np.concatenate([self._table(sequence).block_table(sequence, group) for sequence in its])
                distinct = len(np.unique(blocks))
                logical += len(blocks)
                counts[role] = counts.get(role, 0) + distinct
                sizes[role] = sizes.get(role, 0) + distinct * pool.layout.block_bytes
        return Footprint(logical, counts, sizes)

    def close(self) -> None:
        """Wait for batches in flight, and give the KV pool and all that was made for it back to the device.

        Nothing of this engine can be used afterwards. Its models can, by another engine.
        """
        self._batches.settle()
        for runner in self._runners.values():
            runner.close()
        self.kv_pool.close()

    def stats(self) -> dict[str, RoleStats]:
        """Counters by role."""
        return {role: scheduler.table.stats() for role, scheduler in self.schedulers.items()}

    def check_integrity(self) -> None:
        """Raise AssertionError unless slabs, blocks, reference counts and block tables agree."""
        self.kv_pool.check_integrity()
        for scheduler in self.schedulers.values():
            for group, pool in enumerate(scheduler.pools):
                pool.check_integrity(scheduler.table.live_block_tables(group))

    def check_drained(self) -> None:
        """Raise AssertionError unless the engine is idle, consistent and holds no block, sequence or reservation."""
        self.check_integrity()
        assert not self.busy, "the engine still has work"
        for role, scheduler in self.schedulers.items():
            live = scheduler.table.live_sequences
            assert live == 0, f"{role}: {live} sequences were not released"
            for pool in scheduler.pools:
                assert pool.live_blocks == 0, f"{pool.name}: {pool.live_blocks} blocks are still live"
                reserved = self.admission.reserved_blocks.get(pool.name, 0)
                assert reserved == 0, f"{pool.name}: a reservation was not released"

    def suspend(self, owner: Hashable) -> None:
        """Give up all KV of `owner`'s sequences, and suspend its work until `resume_owner`, whatever room there is."""
        self._batches.settle()
        self._preemption.suspend(owner)

    def resume_owner(self, owner: Hashable) -> None:
        """Let the work of `owner`, suspended by `suspend`, go on as soon as there is room to compute its KV again."""
        self._preemption.resume_owner(owner)

    def _begin_speculation(self, scheduler: Scheduler, config: DecoderConfig) -> None:
        """Draft tokens for the generator's branches from now on."""
        if scheduler.table.states is not None:
            log.info("no tokens are drafted: the recurrent state of the generator cannot go back")
            return
        lengths = MeasuredLength(self.settings.draft_tokens)
        drafter = SuffixDrafter(scheduler.table)
        if DRAFT in self.schedulers:
            most, scarce = self.settings.max_batch_tokens, lambda: bool(self._preemption.preempted)
            its = self.schedulers[DRAFT], self._runners[DRAFT]
            drafter = self._draft_model = ModelDrafter(scheduler.table, *its, most, scarce)
        scheduler.speculation = Speculation(scheduler.table, drafter, lengths, config.max_positions, config.vocab_size)

    def _scheduler(self, sequence: KVSequence) -> Scheduler:
        if (scheduler := self.schedulers.get(sequence.role)) is None:
            raise MisuseError(f"a {sequence.role} sequence belongs to another engine")
        return scheduler

    def _table(self, sequence: KVSequence) -> SequenceTable:
        """The table of a live sequence of this engine."""
        table = self._scheduler(sequence).table
        table.require_live(sequence)
        return table

    def _settled_table(self, sequence: KVSequence) -> SequenceTable:
        """The table of a live sequence of this engine, in which no token of the sequence stands for a draw."""
        table = self._table(sequence)
        if self._scheduler(sequence).works_on(sequence):
            self._batches.settle()
        return table

    def _make_room(self, requesters: Collection[Hashable]) -> bool:
        self._batches.settle()
        if self._draft_model and self._draft_model.give_up():
            return True
        return self._preemption.make_room(requesters)


def _can_launch_ahead(models: Mapping[str, Model]) -> bool:
    """Return whether no model has a recurrent state; logs those that have one."""
    recurrent = [role for role, model in models.items() if model.config.state_shapes]
    if recurrent:
        log.info("no step is launched ahead: the recurrent state of the %s cannot go back", " and the ".join(recurrent))
    return not recurrent
