"""The full-rescore check: computes every score again from the whole path, in a sequence that shares no KV."""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from espalier.engine.engine import Engine
from espalier.engine.errors import ScoreMismatchError
from espalier.engine.work import Done, Score, Scored
from espalier.prm.base import ScoreInput

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Allowed absolute difference where results depend on the shape of the batch: in float32 scores differ by about 1e-6;
for one 7B model in bfloat16, differences up to 0.04 between two runs are reported."""

Read = Callable[[np.ndarray], float]
"""The score of a path that was computed as a whole, from the values read."""


@dataclass(slots=True)
class _Path:
    """A path that is yet to be compared; see `FullRescore.add`. `values` are those of the inputs that are computed."""

    inputs: Sequence[ScoreInput]
    score: float
    num_steps: int
    read: Read
    values: list[np.ndarray] = field(default_factory=list)


@dataclass(eq=False)
class FullRescore:
    """Computes the scores of one search again, one at a time, so that it holds the memory of one path only.

    Attributes:
        engine: computes the paths.
        owner: owner of the work.
        role: whose model reads them.
        name: the scorer's, for messages.
        rounding: difference between scores that their summation order may make.
        head: the model's head to read; empty for its own.
    """

    engine: Engine
    owner: Hashable
    role: str
    name: str
    rounding: float = 0.0
    head: str = ""
    _paths: deque[_Path] = field(default_factory=deque)  # the first one is being computed
    _running: Score | None = None

    @property
    def tolerance(self) -> float:
        """The difference allowed between scores that a model gives step by step and from the whole text.

        If rows do not depend on the rest of their batch or on how their context was computed, both are bit-identical.
        """
        decoder = self.engine.model(self.role).decoder
        return self.rounding + (0.0 if decoder.backend.rows_are_independent else _TOLERANCE[decoder.dtype])

    @property
    def pending(self) -> int:
        """Scores that are yet to be compared."""
        return len(self._paths)

    def add(self, inputs: Sequence[ScoreInput], score: float, num_steps: int, read: Read) -> None:
        """Queue a whole path of `num_steps` steps, whose last one got `score`.

        Args:
            inputs: the path; more than once where it is read by several probes.
            score: to be found again.
            num_steps: for messages.
            read: the score from the values of all inputs, one after the other.
        """
        self._paths.append(_Path(inputs, score, num_steps, read))
        if self._running is None:
            self._start()

    def owns(self, done: Done) -> bool:
        """Return whether work belongs to the check."""
        return done.work is self._running

    def take(self, done: Done) -> None:
        """Compare a score.

        Raises:
            ScoreMismatchError: the scores differ.
        """
        assert isinstance(done, Scored)
        path = self._paths[0]
        self._running = None
        self.engine.release(done.work.sequence)
        path.values.append(done.values)
        if len(path.values) == len(path.inputs):
            self._paths.popleft()
            again = path.read(np.concatenate(path.values))
            if not abs(again - path.score) <= self.tolerance:  # also true for NaN
                raise ScoreMismatchError(self.name, path.num_steps, path.score, again, self.tolerance)
        if self._paths:
            self._start()

    def close(self) -> None:
        """Release the sequence, whose work must have been cancelled, and forget the paths that wait."""
        if self._running is not None:
            self.engine.release(self._running.sequence)
        self._running = None
        self._paths.clear()

    def _start(self) -> None:
        path = self._paths[0].inputs[len(self._paths[0].values)]
        # Open it empty, so that nothing comes from the prefix cache.
        sequence = self.engine.open(self.role, [], owner=self.owner)
        self._running = Score(self.owner, sequence, path.token_ids, path.score_positions, path.targets, head=self.head)
        self.engine.submit(self._running)
