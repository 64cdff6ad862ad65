"""Scorers of a step's own tokens: they read what sampling gives with them, compute no token and hold no KV.

Confidence is how sure the generator was of a step's tokens; it needs no trained verifier. `confidence` is the geometric
mean of their probabilities, exp of their mean log-probability under the untempered model. `lowest-confidence` is the
least such mean over groups of 16 neighbouring tokens, which a long sure step cannot hide a doubt in; a step of fewer
tokens is one group. Source: Fu et al., Deep Think with Confidence (arXiv:2508.15260), which takes means and lowest
groups of token confidences over whole answers, by the log-probability of the likeliest tokens; here it is that of the
token drawn, and of a step.
"""

import math
from abc import abstractmethod

import numpy as np

from espalier.engine.work import Generated
from espalier.prm.base import ScoreInput
from espalier.prm.full_rescore import Read
from espalier.prm.scorer import ScoredSearch, Scorer, ScorerNeeds, ScoreSession, StepNode

_GROUP = 16
"""Tokens of a group."""


class TokenScorer(Scorer):
    """A scorer of tokens.

    Attributes:
        head: head of the generator's model that it reads, at the state that a step's last token is drawn from; empty
            for none.
    """

    head: str = ""
    needs = ScorerNeeds(reads="tokens")

    @abstractmethod
    def score(self, done: Generated) -> float:
        """Return the score in [0, 1] of a step just sampled."""

    def rescored_as(self, values: np.ndarray) -> float:
        """Return the score of a step whose head was read again in a check."""
        raise NotImplementedError

    def begin(self, search: ScoredSearch) -> ScoreSession:
        """See `Scorer`."""
        return TokenSession(self, search)


class TokenSession(ScoreSession):
    """The scores of one search by a scorer of tokens."""

    def __init__(self, scorer: TokenScorer, search: ScoredSearch) -> None:
        super().__init__(scorer.rescore_check(search, head=scorer.head))
        self.head = scorer.head
        self._scorer = scorer
        self._engine = search.engine

    def score_sampled(self, node: StepNode, done: Generated) -> float:
        """See `ScoreSession`; queues its check."""
        score, read = self._scored(node, done)
        if self._check:
            ids = tuple(self._engine.token_ids(done.sequence)[:-1])
            self._check.add((ScoreInput(ids, (len(ids) - 1,)),), score, len(node.lineage()), read)
        return score

    def _scored(self, node: StepNode, done: Generated) -> tuple[float, Read]:
        """A step's score, and what makes it of the head's values."""
        return self._scorer.score(done), self._scorer.rescored_as


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
