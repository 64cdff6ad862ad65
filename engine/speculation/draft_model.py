"""Drafts of a small model with the generator's tokens, which draws by the generator's own streams."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from espalier.engine.errors import NumericalError, PoolExhaustedError
from espalier.engine.execution.runner import ModelRunner
from espalier.engine.execution.sampling import key_after
from espalier.engine.memory.sequences import KVSequence, SequenceTable
from espalier.engine.scheduling.running_samples import RunningRequest
from espalier.engine.scheduling.scheduler import Scheduler
from espalier.engine.work import Generate, Generated

log = logging.getLogger("espalier.engine.speculation")

SURE = 0.7
"""On a real pair of 0.5 and 1.5 billion parameters the generator accepts 99% of the tokens that the draft model draws
with a probability above 0.9, and two thirds of the others; by its measured times 0.6 to 0.9 are about as good."""


@dataclass(eq=False)
class ModelDrafter:
    """Proposes what a draft model draws with the number that the branch's own draw at that place will use.

    It has a sequence of its own beside each of the generator's that it has drafted for, forked and released with it.
    Their KV is in the same pool, and is given up before anybody else's: it is never reserved, and none is taken while
    owners wait for memory.

    Attributes:
        target: the generator's sequences.
        scheduler: the draft model's; it has no other work.
        runner: the draft model's.
        max_tokens: computed in one step at most.
        scarce: whether memory is so scarce that nothing is to be drafted.
        sure: a draft ends with the token that makes it less probable than this, as what follows is seldom accepted.
    """

    target: SequenceTable
    scheduler: Scheduler
    runner: ModelRunner
    max_tokens: int
    scarce: Callable[[], bool]
    sure: float = SURE

    def __post_init__(self) -> None:
        self.target.drafts = self.scheduler.table
        self._config = self.runner.model.config

    def propose(self, branches: Sequence[RunningRequest], most: Sequence[int]) -> list[list[int]]:
        """See `Drafter`."""
        drafts: list[list[int]] = [[] for _ in branches]
        if self.scarce():
            return drafts
        followers = {place: its for place, branch in enumerate(branches) if (its := self._follow(branch))}
        lengths = [int(self.target.lengths[branch.row]) for branch in branches]
        room = [min(wanted, self._config.max_positions - its) for wanted, its in zip(most, lengths, strict=True)]
        sure = math.log(self.sure) if self.sure else -math.inf
        going = dict.fromkeys(followers, 0.0)  # log-probabilities of the drafts, by place
        while going:
            for place in going:
                drawn = lengths[place] - branches[place].start + len(drafts[place])
                self._submit(place, followers[place], branches[place], drawn)
            on = dict[int, float]()
            for done in self._run():
                drafts[place := done.work.tag] += done.token_ids
                if (known := going[place] + done.log_probability) >= sure and len(drafts[place]) < room[place]:
                    on[place] = known
            going = on
        return drafts

    def learn(self, finished: Sequence[Generated]) -> None:
        """See `Drafter`; there is nothing to learn."""

    def give_up(self) -> bool:
        """Free all KV of the draft model's sequences; False if there is none."""
        held = [each for each in self.target.followers.values() if self.scheduler.table.num_blocks[each.row]]
        self.scheduler.table.drop_kv_of(held)
        return bool(held)

    def _follow(self, branch: RunningRequest) -> KVSequence | None:
        """The draft model's sequence with a branch's tokens; None if it cannot have them all and one more."""
        tokens, table = self.target.tokens[branch.row, : self.target.lengths[branch.row]], self.scheduler.table
        if len(tokens) >= self._config.max_positions or int(tokens.max()) >= self._config.vocab_size:
            return None
        if (follower := self.target.followers.get(branch.sequence)) is None:
            salt, owner = self.target.prefixes.seeds[branch.sequence.row], branch.work.owner
            follower = table.open(self.scheduler.role, tokens.tolist(), salt, owner)
            self.target.followers[branch.sequence] = follower
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

    def _submit(self, place: int, follower: KVSequence, branch: RunningRequest, drawn: int) -> None:
        """Ask for the next token of a draft, the one behind `drawn` of the branch's step."""
        sampling, known = branch.work.samplings[branch.indices[0]], self._config.vocab_size
        banned = tuple(token for token in sampling.banned if token < known)
        penalties = sampling.penalties
        if any(token >= known for token, _ in penalties.bias):
            penalties = replace(penalties, bias=tuple(each for each in penalties.bias if each[0] < known))
        key = key_after(sampling.key, drawn)
        samplings = (replace(sampling, key=key, banned=banned, penalties=penalties),)
        self.scheduler.submit(Generate(follower.owner, follower, samplings, 1, "", in_place=True, tag=place))

    def _run(self) -> list[Generated]:
        """Draw all that is submitted; less, where blocks run out or what is drawn from is not a number."""
        scheduler, done = self.scheduler, list[Generated]()
        try:
            while scheduler.busy and (plan := scheduler.schedule(self.max_tokens)):
                wait = self.runner.launch(scheduler.table, plan)
                scheduler.launched(plan)
                done += (each for each in scheduler.update(plan, wait()) if isinstance(each, Generated))
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
