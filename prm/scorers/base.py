"""The interface of scorers that read a step's score from its generation, and their use in one search."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from espalier.engine.engine import Engine
from espalier.engine.errors import ScoreMismatchError
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Done, Generated, Score, Scored
from espalier.prm.full_rescore import tolerance_of


class StepScorer(ABC):
    """Scores a step from what the engine gives with its tokens: it has no KV and computes no token.

    Attributes:
        name: how `--verifier` or results call it.
        head: the head of the generator's model that it reads, at the state that a step's last token is drawn from;
            empty for none.
        digest: of the weights that scores depend on besides the generator's; empty for none.
        full_rescore: whether every score is also read from the whole path and compared.
    """

    name: str
    head: str = ""
    digest: str = ""
    full_rescore: bool = False

    @property
    def identity(self) -> str:
        """Identifies its scores among those of other scorers on the same weights; recorded in results."""
        return self.name

    @abstractmethod
    def score(self, done: Generated | Scored) -> float:
        """The score in [0, 1] of a step just generated, or of one whose head was read again in a check."""


@dataclass(frozen=True, slots=True)
class _Check:
    """A step to be scored again: the path's tokens but the last, the number of its steps, and the score it got."""

    token_ids: tuple[int, ...]
    num_steps: int
    score: float


class StepScoring:
    """Scores the steps of one search; with the full-rescore check it reads each score again from the whole path.

    Attributes:
        pending: checks that are not done yet.
    """

    def __init__(self, scorer: StepScorer, engine: Engine, owner: Hashable) -> None:
        self.pending = 0
        self._scorer = scorer
        self._engine = engine
        self._owner = owner
        self._waiting: deque[_Check] = deque()
        self._running: tuple[_Check, Score] | None = None

    @property
    def head(self) -> str:
        """The head that generation has to read."""
        return self._scorer.head

    def score(self, done: Generated, num_steps: int) -> float:
        """The score of the last of a path's steps; queues its check."""
        score = self._scorer.score(done)
        if self._scorer.full_rescore:
            ids = self._engine.token_ids(done.sequence)[:-1]
            self._waiting.append(_Check(tuple(ids), num_steps, score))
            self.pending += 1
            self._start_check()
        return score

    def take(self, done: Done) -> None:
        """Process the finished work of a check.

        Raises:
            ScoreMismatchError: the score differs.
        """
        assert isinstance(done, Scored)
        assert self._running is not None
        check, work = self._running
        self._running = None
        self._engine.release(work.sequence)
        again = self._scorer.score(done)
        tolerance = tolerance_of(self._engine.model(GENERATOR))
        if not abs(again - check.score) <= tolerance:  # also true for NaN
            raise ScoreMismatchError(self._scorer.name, check.num_steps, check.score, again, tolerance)
        self.pending -= 1
        self._start_check()

    def close(self) -> None:
        """Release the check's sequence, whose work must have been cancelled, and forget the checks that wait."""
        if self._running is not None:
            self._engine.release(self._running[1].sequence)
        self._running = None
        self._waiting.clear()
        self.pending = 0

    def _start_check(self) -> None:
        """Check one score at a time, so that a check holds the memory of one path only."""
        if self._running is None and self._waiting:
            check = self._waiting.popleft()
            sequence = self._engine.open(GENERATOR, [], owner=self._owner)  # nothing comes from the prefix cache
            last = len(check.token_ids) - 1
            work = Score(self._owner, sequence, check.token_ids, (last,), head=self._scorer.head)
            self._running = check, work
            self._engine.submit(work)
