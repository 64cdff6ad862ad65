"""Drafts of a small model with the generator's tokens, which draws by the generator's own streams."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from espalier.engine.errors import NumericalError, PoolExhaustedError
from espalier.engine.execution.runner import ModelRunner
from espalier.engine.execution.sampling import key_after
from espalier.engine.memory.sequences import KVSequence, SequenceTable
from espalier.engine.scheduling.requests import RunningRequest
from espalier.engine.scheduling.scheduler import Scheduler
from espalier.engine.work import Done, Generate, Generated

log = logging.getLogger("espalier.engine.speculation")


class ModelDrafter:
    """Proposes what a draft model draws with the number that the branch's own draw at that place will use.

    It has a sequence of its own beside each of the generator's that it has drafted for, forked and released with it.
    Their KV is in the same pool, and is given up before anybody else's: it is never reserved, and none is taken while
    owners wait for memory.
    """

    def __init__(
        self,
        target: SequenceTable,
        scheduler: Scheduler,
        runner: ModelRunner,
        max_tokens: int,
        scarce: Callable[[], bool],
    ) -> None:
        """Draft for the branches of `target`.

        Args:
            target: the generator's sequences.
            scheduler: the draft model's; it has no other work.
            runner: the draft model's.
            max_tokens: computed in one step at most.
            scarce: whether memory is so scarce that nothing is to be drafted.
        """
        self._target = target
        self._scheduler = scheduler
        self._runner = runner
        self._max_tokens = max_tokens
        self._scarce = scarce
        self._config = runner.model.config
        self._followers: dict[KVSequence, KVSequence] = {}  # by the generator's
        target.followed_by(self)

    def propose(self, branches: Sequence[RunningRequest], most: Sequence[int]) -> list[list[int]]:
        """See `Drafter`."""
        drafts: list[list[int]] = [[] for _ in branches]
        if self._scarce():
            return drafts
        for place, (branch, count) in enumerate(zip(branches, most, strict=True)):
            if (follower := self._follow(branch)) is None:
                continue
            length = int(self._target.lengths[branch.row])
            sampling = branch.work.samplings[branch.indices[0]]
            key = key_after(sampling.key, length - branch.start)
            banned = tuple(token for token in sampling.banned if token < self._config.vocab_size)
            samplings = (replace(sampling, key=key, banned=banned),)
            room = min(count, self._config.max_positions - length)
            self._scheduler.submit(Generate(follower.owner, follower, samplings, room, "", in_place=True, tag=place))
        for done in self._run():
            assert isinstance(done, Generated)
            drafts[done.work.tag] = done.token_ids
        return drafts

    def learn(self, finished: Sequence[Generated]) -> None:
        """See `Drafter`; there is nothing to learn."""

    def forked(self, sequence: KVSequence, child: KVSequence) -> None:
        """See `Follower`."""
        if follower := self._followers.get(sequence):
            self._followers[child] = self._scheduler.table.fork(follower)

    def released(self, sequence: KVSequence) -> None:
        """See `Follower`."""
        if follower := self._followers.pop(sequence, None):
            self._scheduler.table.release(follower)

    def give_up(self) -> bool:
        """Free all KV of the draft model's sequences; False if there is none."""
        held = [each for each in self._followers.values() if self._scheduler.table.num_blocks[each.row]]
        self._scheduler.table.drop_kv_of(held)
        return bool(held)

    def _follow(self, branch: RunningRequest) -> KVSequence | None:
        """The draft model's sequence with a branch's tokens; None if it cannot have them all and one more."""
        tokens, table = self._target.tokens[branch.row, : self._target.lengths[branch.row]], self._scheduler.table
        if len(tokens) >= self._config.max_positions or int(tokens.max()) >= self._config.vocab_size:
            return None
        if (follower := self._followers.get(branch.sequence)) is None:
            salt, owner = self._target.seed_of(branch.sequence), branch.work.owner
            follower = table.open(self._scheduler.role, tokens.tolist(), salt, owner)
            self._followers[branch.sequence] = follower
            return follower
        length = int(table.lengths[follower.row])
        both = min(length, len(tokens))
        differs = np.flatnonzero(table.tokens[follower.row, :both] != tokens[:both])
        same = max(1, int(differs[0]) if len(differs) else both)  # of one prompt
        if same < length:
            if not table.sees_back_to(follower.row, same - 1):
                table.drop_kv_of([follower])
            table.truncate(follower.row, same)
        table.append(follower, tokens[same:].tolist())
        return follower

    def _run(self) -> list[Done]:
        """Draw all that is submitted; less, where blocks run out or what is drawn from is not a number."""
        scheduler, done = self._scheduler, list[Done]()
        try:
            while scheduler.busy and (plan := scheduler.schedule(self._max_tokens)):
                wait = self._runner.launch(scheduler.table, plan)
                scheduler.launched(plan)
                done += scheduler.update(plan, wait())
        except (PoolExhaustedError, NumericalError) as error:
            log.debug("drafts are cut short: %s", error)
            scheduler.drop_all_kv()
        except BaseException:
            scheduler.drop_all_kv()
            raise
        finally:
            for owner in scheduler.owners():
                scheduler.cancel(owner)
        return done
