"""The full-rescore check: computes every score again from the whole text, in a sequence that shares no KV."""

from collections.abc import Hashable

import torch

from espalier.engine.engine import Engine
from espalier.engine.errors import ScoreMismatchError
from espalier.engine.models.model import Model
from espalier.engine.roles import VERIFIER
from espalier.engine.work import Score, Scored
from espalier.prm.base import PrmFamily, StepPath

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Allowed absolute difference where results depend on the shape of the batch: in float32 scores differ by about 1e-6;
for one 7B model in bfloat16, differences up to 0.04 between two runs are reported."""


def tolerance_of(model: Model) -> float:
    """The difference allowed between scores that a model gives step by step and from the whole text.

    If rows do not depend on the rest of their batch or on how their context was computed, both are bit-identical.
    """
    decoder = model.decoder
    return 0.0 if decoder.backend.rows_are_independent else _TOLERANCE[decoder.dtype]


class Check:
    """Computes one score again from the whole text.

    Attributes:
        work: the submitted work; its sequence belongs to the check.
    """

    def __init__(self, engine: Engine, family: PrmFamily, owner: Hashable, path: StepPath, score: float) -> None:
        """Submit the whole `path` for comparison with `score`."""
        self._family = family
        self._path = path
        self._score = score
        whole = family.whole(path)
        # Open it empty, so that nothing comes from the prefix cache.
        sequence = engine.open(VERIFIER, [], owner=owner)
        self.work = Score(owner, sequence, whole.token_ids, whole.score_positions, whole.targets)
        engine.submit(self.work)
        self._tolerance = family.rounding + tolerance_of(family.model)

    def compare(self, done: Scored) -> None:
        """Raise ScoreMismatchError if the scores differ."""
        whole = self._family.score(done.values, None)
        if not abs(whole - self._score) <= self._tolerance:  # also true for NaN
            raise ScoreMismatchError(self._family.name, len(self._path.steps), self._score, whole, self._tolerance)
