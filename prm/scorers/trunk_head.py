"""Trunk heads: a step's score by a small network on the generator's own hidden states.

A folder in Hugging Face layout: `config.json` with

    {"architectures": ["TrunkHeadForStepScores"], "model_type": "trunk-head",
     "trunk": {"name": "Qwen/Qwen2.5-1.5B-Instruct", "digest": "…"}, "hidden_size": 1536}

and a weight file with linear layers `score.0`, `score.1`, … (weight and bias), a ReLU between them, the inner ones as
wide as the hidden state; the last one gives the logit of "this step is right". The logit is read at the state that the
step's last token, the end of its blank line or of the text, is drawn from: decoding computes that state in any case, so
a score costs one row of a small product, and no token, no KV and no second model. With `"layer": 12` the head reads the
state that enters that layer, under the last norm. With `weights` and an `offset`, as `prm.path_evidence` has them, the
score is put together from evidence of the path: the head's probabilities of its steps, their last, mean and least, and
the mean log-probability of its tokens as they were sampled. `espalier learn-verifier` makes such folders. Source of the
idea: Cobbe et al. (arXiv:2110.14168), whose verifier is the generator's trunk with a head.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.engine.work import Generated
from espalier.prm.base import Sampled
from espalier.prm.full_rescore import Read
from espalier.prm.heads import learned_head
from espalier.prm.path_evidence import Combination, PathEvidence, combination_of, sigmoid
from espalier.prm.scorer import ScoredSearch, ScorerNeeds, ScoreSession, StepNode
from espalier.prm.scorers.tokens import TokenScorer, TokenSession

ARCHITECTURE = "TrunkHeadForStepScores"
NAME = "trunk-head"


class TrunkHead(TokenScorer):
    """The trunk-head scorer; see the module."""

    name = NAME
    head = NAME

    def __init__(self, digest: str, full_rescore: bool = False, combination: Combination | None = None) -> None:
        """Create a scorer; with `full_rescore`, every score is also read from the whole path and compared.

        With a `combination`, a score is made of the path's evidence, else of the head's logit for the step alone.
        """
        self.digests = {VERIFIER: digest}
        self.combination = combination
        self.needs = ScorerNeeds(
            reads="tokens",
            merges="tokens" if combination else "text",
            rescored=GENERATOR if full_rescore else "",
        )

    def score(self, done: Generated) -> float:
        """The probability that the head's logit stands for."""
        assert done.values is not None
        return self.rescored_as(done.values)

    def rescored_as(self, values: np.ndarray) -> float:
        """See `TokenScorer`."""
        return sigmoid(float(values.flat[0]))

    def begin(self, search: ScoredSearch) -> ScoreSession:
        """See `Scorer`."""
        return _EvidenceSession(self, search, self.combination) if self.combination else super().begin(search)


class _EvidenceSession(TokenSession):
    """The scores of one search by a trunk head that reads evidence of paths."""

    def __init__(self, scorer: TrunkHead, search: ScoredSearch, combination: Combination) -> None:
        super().__init__(scorer, search)
        self._combination = combination
        self._evidence: dict[StepNode, PathEvidence] = {}

    def _scored(self, node: StepNode, done: Generated) -> tuple[float, Read]:
        above = node.parent
        while above is not None and above not in self._evidence:  # a step without text has none
            above = above.parent
        before = self._evidence[above] if above is not None else None
        sampled = Sampled(done.log_probability, len(done.token_ids))

        def evidence(values: np.ndarray) -> PathEvidence:
            step = PathEvidence.of_step(sampled, sampled, self._scorer.rescored_as(values))
            return before.and_then(step) if before else step

        assert done.values is not None
        its = self._evidence[node] = evidence(done.values)
        score = self._combination.score(its.features())
        return score, lambda values: self._combination.score(evidence(values).features())


def is_trunk_head(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is a head on another model's trunk."""
    return checkpoint.architecture == ARCHITECTURE


def trunk_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Name and digest of the generator that a head was trained for.

    Raises:
        CheckpointError: `config.json` does not say.
    """
    trunk = checkpoint.config.get("trunk")
    if not isinstance(trunk, dict) or not isinstance(trunk.get("digest"), str):
        raise CheckpointError(f"config.json of {checkpoint.folder} lacks the digest of its trunk: trunk.digest")
    return {"name": str(trunk.get("name", "")), "digest": trunk["digest"]}


def require_trunk(folder: Checkpoint, digest: str, role: str) -> None:
    """Raise CheckpointError unless a head was learned on the hidden states of the model that plays `role`."""
    trunk, learn = trunk_of(folder), "learn-verifier --trunk" if role == VERIFIER else "learn-verifier"
    if trunk["digest"] != digest:
        raise CheckpointError(
            f"{folder.folder} is a head on the hidden states of {trunk['name'] or 'another model'} (digest "
            f"{trunk['digest'][:12]}…), and --{role} has the digest {digest[:12]}…. Scores need the same weights, "
            f"tokenizer and quantisation: give that {role}, or learn a head for this one with espalier {learn}"
        )


def add_trunk_head(checkpoint: Checkpoint, generator: Model, full_rescore: bool = False) -> tuple[Model, TrunkHead]:
    """The generator with the head of a checkpoint, and the scorer that reads it.

    Raises:
        CheckpointError: the head was trained for another generator, or its tensors are not those of such a head.
    """
    require_trunk(checkpoint, generator.digest, "generator")
    combination = combination_of(checkpoint) if "weights" in checkpoint.config else None
    head = learned_head(checkpoint, generator.decoder, NAME)
    scorer = TrunkHead(checkpoint.digest(), full_rescore, combination)
    heads, wide = {**generator.other_heads, NAME: head}, generator.wide_heads | {NAME}
    return replace(generator, other_heads=heads, wide_heads=wide), scorer
