"""Any chat model as a verifier: after each step it is asked whether the solution is right so far, and P(yes) is read.

The layout is that of `prm.asked`; the score is the softmax over the logits of `Yes` and `No`.

Nothing in a checkpoint says that it is to be asked this, so the family is chosen by the flag only, or by `--verifier
self`, which asks the generator itself on the same weights. Source: P(True) of Kadavath et al., Language Models (Mostly)
Know What They Know (arXiv:2207.05221), asked of a partial solution; the wording is Espalier's.
"""

from typing import NamedTuple

import torch

from espalier.engine.models.checkpoint import Checkpoint
from espalier.prm.asked import AskedFamily
from espalier.prm.base import FamilyInfo

INFO = FamilyInfo(
    name="yes-no",
    architectures=("*ForCausalLM",),
    score="softmax, `Yes`",
)


class Question(NamedTuple):
    """The question, and its two answers."""

    questions: tuple[str, ...] = (
        "Is this solution right so far, its last step included? Answer with one word: Yes or No.",
    )
    answers: tuple[str, ...] = ("Yes", "No")


class YesNo(AskedFamily[Question]):
    """The yes-no family; see the module."""

    info = INFO

    @staticmethod
    def output(logits: torch.Tensor) -> torch.Tensor:
        """The probability of `Yes`."""
        return torch.softmax(logits, dim=-1)[:, :1]

    @classmethod
    def settings_of(cls, checkpoint: Checkpoint) -> Question:
        """The same question for every checkpoint."""
        return Question()
