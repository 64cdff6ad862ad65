"""Evidence for a path, kept from step to step: scores of a head at steps' ends, and log-probabilities of its tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.prm.base import Sampled

FEATURES = ("head", "head_mean", "head_min", "likelihood", "likelihood_ratio")
"""Names of a path's evidence, in the order of `PathEvidence.features`."""


@dataclass(frozen=True, slots=True)
class PathEvidence:
    """The evidence for a path.

    Attributes:
        read: its tokens under the trunk.
        sampled: its tokens as the generator sampled them.
        last: the head's score of its newest step, in [0, 1].
        total: sum of the head's scores of its steps.
        lowest: the least of them.
        steps: number of its steps.
    """

    read: Sampled
    sampled: Sampled
    last: float
    total: float
    lowest: float
    steps: int = 1

    @classmethod
    def of_step(cls, read: Sampled, sampled: Sampled, score: float) -> "PathEvidence":
        """Of a path of one step."""
        return cls(read, sampled, score, score, score)

    def and_then(self, step: "PathEvidence") -> "PathEvidence":
        """This path and one step more."""
        return PathEvidence(
            self.read.and_then(step.read),
            self.sampled.and_then(step.sampled),
            step.last,
            self.total + step.total,
            min(self.lowest, step.lowest),
            self.steps + step.steps,
        )

    def features(self) -> tuple[float, ...]:
        """The values that `FEATURES` names."""
        likelihood = self.read.mean
        return self.last, self.total / self.steps, self.lowest, likelihood, likelihood - self.sampled.mean


@dataclass(frozen=True, slots=True)
class Combination:
    """Turns evidence into a score: the sigmoid of `weights`, one for each of `FEATURES`, times it, plus `offset`."""

    weights: tuple[float, ...]
    offset: float

    def score(self, features: Sequence[float]) -> float:
        """The score in [0, 1] of a path with these features."""
        return sigmoid(math.fsum(w * x for w, x in zip(self.weights, features, strict=True)) + self.offset)


def combination_of(folder: Checkpoint) -> Combination:
    """The weights and the offset in `config.json` of a learned verifier.

    Raises:
        CheckpointError: they are not there, or no numbers.
    """
    weights: dict[str, Any] = folder.files.object("weights")
    numbers = [weights.get(name) for name in FEATURES] + [folder.config.get("offset")]
    if set(weights) != set(FEATURES) or not all(type(number) in (int, float) for number in numbers):
        raise CheckpointError(
            f"config.json of {folder.folder} must have an offset and weights of {', '.join(FEATURES)}, all numbers"
        )
    return Combination(tuple(float(weights[name]) for name in FEATURES), float(folder.config["offset"]))


def sigmoid(logit: float) -> float:
    """The probability that a logit stands for."""
    return 1.0 / (1.0 + math.exp(-logit)) if logit >= 0 else 1.0 - 1.0 / (1.0 + math.exp(min(logit, 700.0)))
