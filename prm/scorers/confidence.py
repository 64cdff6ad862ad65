"""Confidence: a step's score is how sure the generator was of its tokens. It needs no trained verifier.

`confidence` is the geometric mean of the probabilities of a step's tokens, exp of their mean log-probability under the
untempered model. `lowest-confidence` is the least such mean over groups of 16 neighbouring tokens, which a long sure
step cannot hide a doubt in; a step of fewer tokens is one group. Source: Fu et al., Deep Think with Confidence
(arXiv:2508.15260), which takes means and lowest groups of token confidences over whole answers, by the log-probability
of the likeliest tokens; here it is that of the token drawn, and of a step.
"""

import math

import numpy as np

from espalier.engine.work import Generated
from espalier.prm.scorers.tokens import TokenScorer

_GROUP = 16
"""Tokens of a group."""


class Confidence(TokenScorer):
    """The mean over a step; see the module."""

    name = "confidence"

    def score(self, done: Generated) -> float:
        """The geometric mean probability of the step's tokens."""
        return math.exp(done.log_probability / len(done.log_probabilities))


class LowestConfidence(TokenScorer):
    """The least mean over a group of a step's tokens; see the module."""

    name = "lowest-confidence"

    def score(self, done: Generated) -> float:
        """The least geometric mean probability of neighbouring tokens."""
        sums = np.concatenate(([0.0], np.cumsum(done.log_probabilities)))
        size = min(_GROUP, len(done.log_probabilities))
        return math.exp(float((sums[size:] - sums[:-size]).min()) / size)


SCORERS = {scorer.name: scorer for scorer in (Confidence(), LowestConfidence())}
"""The scorers of this module by their names."""
