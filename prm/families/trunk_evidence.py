"""Verifiers that `learn-verifier --trunk` makes: what another language model, read once, shows of a path, put together.

The trunk reads a solution as `likelihood` does, and a small head on its hidden states, those after the last layer or
those that enter the `layer` that `config.json` names, says at each step's end whether the step is right. Evidence of a
path is then the head's score of the newest step, the mean and the least of its scores so far, the mean log-probability
of the path's tokens under the trunk, and that minus the generator's own, from sampling. The score is the sigmoid of a
weighted sum of these; the weights are part of the verifier. All of it is kept from step to step, so every token is read
once.

A folder in Hugging Face layout, given to `--verifier-family` beside the trunk as `--verifier`: `config.json` with

    {"architectures": ["TrunkEvidenceForStepScores"], "model_type": "trunk-evidence",
     "trunk": {"name": "Qwen/Qwen2.5-1.5B-Instruct", "digest": "…"}, "hidden_size": 1536,
     "weights": {"head": 0.2, "head_mean": 3.1, "head_min": 0.4, "likelihood": 1.8, "likelihood_ratio": 2.2},
     "offset": -1.3}

and a weight file with the head's linear layers, as `prm.scorers.trunk_head` describes them. Source: heads on a language
model's states are Cobbe et al.'s (arXiv:2110.14168); the evidence and its combination are Espalier's.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.chat.turns import system_prompt_of
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.decoder import Decoder
from espalier.engine.models.model import Head, Model, load_generator
from espalier.prm.base import FamilyInfo, Sampled, StepPath
from espalier.prm.families.likelihood import SolutionReader
from espalier.prm.heads import learned_head, log_probability_head
from espalier.prm.path_evidence import Combination, PathEvidence, combination_of
from espalier.prm.scorers.trunk_head import require_trunk

ARCHITECTURE = "TrunkEvidenceForStepScores"
NAME = "trunk-evidence"


class TrunkEvidence(SolutionReader):
    """The family of one learned verifier; see the module. Values are a token's log-probability and the head's logit.

    Attributes:
        learned: the folder of what was learned; of each subclass that `learned_in` makes.
    """

    info = FamilyInfo(NAME, ("*ForCausalLM",), score="sigmoid of weighted evidence", of_sampling=True)
    learned: ClassVar[Path]

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> Self:
        """Load a trunk with what was learned for it.

        Raises:
            CheckpointError: `learned` is no such folder, is incomplete, or was learned for another trunk.
        """
        learned, folder = cls.learned, Checkpoint(cls.learned)
        if folder.architecture != ARCHITECTURE:
            raise CheckpointError(
                f"--verifier-family {learned}: its config.json names {folder.architecture or 'no class'}, not "
                f"{ARCHITECTURE}; a folder there is one that learn-verifier --trunk made"
            )
        require_trunk(folder, checkpoint.digest(), "verifier")
        combination = combination_of(folder)
        model = load_generator(checkpoint, dtype, device)
        head = trunk_evidence_head(model.head, learned_head(folder, model.decoder, NAME), model.decoder)
        digest = hashlib.sha256((checkpoint.digest() + folder.digest()).encode()).hexdigest()
        model = replace(model, head=head, eos_token_ids=(), digest=digest, wide_heads=frozenset([""]))
        return cls(model, system_prompt_of(checkpoint), combination)

    def __init__(self, model: Model, system_prompt: str, combination: Combination) -> None:
        super().__init__(model, system_prompt)
        self._combination = combination

    def score(self, evidence: PathEvidence) -> float:
        """The combined score."""
        return self._combination.score(evidence.features())

    def full_evidence(self, path: StepPath, values: np.ndarray, sampled: Sequence[Sampled]) -> PathEvidence:
        """The evidence of all steps, whose ends are within the values."""
        ends = np.cumsum([len(self.step_ids(path, index)) for index in range(len(path.steps))])
        parts = zip(np.split(values, ends[:-1]), sampled, strict=True)
        return reduce(PathEvidence.and_then, (self.evidence(part, None, its) for part, its in parts))


def trunk_evidence_head(logits: Head, scores: Head, decoder: Decoder) -> Head:
    """A target token's log-probability, and what another head gives for the same token, float32 `[R, 1 + k]`.

    It reads the states of all of the decoder's `taps`, as `scores` may.
    """
    log_probability = log_probability_head(logits)

    def head(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.cat([log_probability(decoder.layers.last_states(hidden), targets), scores(hidden).float()], dim=-1)

    return head


def learned_in(folder: Path) -> type[TrunkEvidence]:
    """The family of what was learned for a trunk."""
    return type(NAME, (TrunkEvidence,), {"learned": folder})
