"""Any chat model as a verifier: after each step it is asked whether the solution is right so far, and P(yes) is read.

The layout is that of `prm.asked`; the score is the softmax over the logits of `Yes` and `No`.

Nothing in a checkpoint says that it is to be asked this, so the family is chosen by the flag only, or by `--verifier
self`, which asks the generator itself on the same weights. Source: P(True) of Kadavath et al., Language Models (Mostly)
Know What They Know (arXiv:2207.05221), asked of a partial solution; the wording is Espalier's.
"""

import torch

from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.prm.asked import AskedFamily, answer_ids, asked_generator, load_asked
from espalier.prm.base import FamilyInfo
from espalier.prm.heads import probability_of

_QUESTION = "Is this solution right so far, its last step included? Answer with one word: Yes or No."
_ANSWERS = ("Yes", "No")

INFO = FamilyInfo(
    name="yes-no",
    models="any instruction-tuned *ForCausalLM with a chat template; the generator itself as `--verifier self`",
    architectures=("*ForCausalLM",),
    head="`lm_head` rows of `Yes`, `No`",
    layout="chat template, the steps as the assistant's turn, a blank line after each; then the user asks",
    score_positions="last token of the header after the question, which is not kept",
    score="softmax, `Yes`",
    source="P(True) of arXiv:2207.05221, asked of a partial solution",
)


class YesNo(AskedFamily):
    """The yes-no family; see the module."""

    info = INFO


def load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> YesNo:
    """Load a chat model; raises as `load_asked`."""
    model = load_asked(checkpoint, dtype, device, _ANSWERS, probability_of(0), INFO.name)
    return YesNo(model, (_QUESTION,))


def require_askable(checkpoint: Checkpoint) -> None:
    """Check, without reading weights, that a generator can be asked about its own steps; raises as `answer_ids`."""
    answer_ids(checkpoint, TextTokenizer(checkpoint), _ANSWERS)


def of_generator(checkpoint: Checkpoint, generator: Model) -> YesNo:
    """The family on the weights of a generator that is loaded already; raises as `asked_generator`."""
    return YesNo(asked_generator(checkpoint, generator, _ANSWERS, probability_of(0)), (_QUESTION,))
