"""Universal-PRM-7B (AURORA): scores a partial answer at an end token that is fed only for that.

Layout: chat template with a system message; the user's turn is the problem and the statement that there is no reference
answer; then the steps, each with the blank line after it. A step's score is the sigmoid of the head at an
end-of-sequence token after it. That token is a probe token: it is fed on a fork of the path and not kept, so it does
not precede later steps.

The head's tensors are loaded as `score`, or as `score.0` and `score.2`, with one label. The tensor names of the
published checkpoint are unverified, so the family is chosen by the flag only.
Source: the usage on the model card of infly/Universal-PRM-7B, one text per step, as here; arXiv:2502.11520. The card
gives a reference answer where one is known.
"""

from typing import Self

import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.prm.base import FamilyInfo
from espalier.prm.families.asked import ProbedFamily
from espalier.prm.heads import load_value_model, require_token

_SYSTEM = "You are a helpful assistant."
_NO_REFERENCE = "\n\n###\n\nThe reference answer is: There is no reference answer for this question."


class UniversalPrm(ProbedFamily):
    """The Universal-PRM family; see the module."""

    info = FamilyInfo("universal-prm", (), score="sigmoid")
    max_special_tokens = 1
    max_probe_tokens = 1

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> Self:
        """Load a trunk with a head of one label.

        Raises:
            CheckpointError: the head or the tokenizer's end token is missing.
        """
        tokenizer = TextTokenizer(checkpoint)
        if (end := tokenizer.special_token("eos_token")) is None:
            raise CheckpointError(
                f"tokenizer_config.json of {checkpoint.folder} names no eos_token, where scores are read"
            )
        end_id = require_token(checkpoint, tokenizer, end, "where scores are read")
        return cls(load_value_model(checkpoint, tokenizer, dtype, device), end_id)

    def __init__(self, model: Model, end_id: int) -> None:
        super().__init__(model)
        self.probe_ids = (end_id,)

    def prompt_ids(self, problem: str) -> list[int]:
        """System message, the problem without a reference answer, and the opening of the assistant's turn."""
        return self.chat_ids(problem + _NO_REFERENCE, _SYSTEM)
