"""The full-rescore check: every score once more from the whole text, in a sequence of its own that shares nothing."""

from collections.abc import Hashable

import torch

from espalier.engine.engine import Engine
from espalier.engine.errors import ScoreMismatchError
from espalier.engine.scheduling.role_policy import VERIFIER
from espalier.engine.work import Score, Scored
from espalier.prm.base import PrmFamily, StepPath

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Allowed where products and sums take another order in a batch of another shape: in float32 that moves a score by some
1e-6, and scores of one 7B model in bfloat16 are reported up to 0.04 apart between two runs."""


class Check:
    """One score being computed anew from the whole text.

    Attributes:
        work: what was submitted; its sequence is the check's own.
    """

    def __init__(self, engine: Engine, family: PrmFamily, owner: Hashable, path: StepPath, score: float) -> None:
        """Submit the whole of `path`, to be compared with `score`."""
        self._family = family
        self._path = path
        self._score = score
        whole = family.whole(path)
        # Opened empty, so that nothing is taken from the prefix cache.
        sequence = engine.open(VERIFIER, [], owner=owner)
        self.work = Score(owner, sequence, whole.token_ids, whole.score_positions, whole.targets)
        engine.submit(self.work)
        decoder = family.model.decoder
        # Where no row depends on the rest of its batch or on how its context came to be, both have equal bits.
        self._tolerance = family.rounding + (0.0 if decoder.backend.rows_are_independent else _TOLERANCE[decoder.dtype])

    def compare(self, done: Scored) -> None:
        """Raise ScoreMismatchError unless both scores are the same."""
        whole = self._family.score(done.values, None)
        if not abs(whole - self._score) <= self._tolerance:  # NaN is a difference too
            raise ScoreMismatchError(self._family.name, len(self._path.steps), self._score, whole, self._tolerance)
