"""Qwen2.5-Math-PRM (7B, 72B) and Qwen2.5-Math-7B-PRM800K: class `Qwen2ForProcessRewardModel`.

Layout: ChatML with a fixed system message, the problem as the user's turn, and the steps in the assistant's turn, each
followed by the single token `<extra_0>` without separators. A step's score is read at its `<extra_0>`: a two-layer head
with ReLU, softmax over two classes in float32, class 1. The closing `<|im_end|>` is never fed, so a step only appends
tokens.

The model card's example, ProcessBench's gsm8k-0, gives 1.0, 0.1904, 0.9766, 1.0 in bfloat16.
Source: the usage on the model card of Qwen/Qwen2.5-Math-PRM-7B. Differences: newlines around a step are stripped (the
card's steps have none), and an `<extra_0>` within a text is encoded as plain text.
"""

import torch

from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_trunk
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.prm.base import FamilyInfo, PrmFamily, ScoreInput, StepPath, stripped_step, without_special_tokens
from espalier.prm.families.detect import rope_theta
from espalier.prm.heads import probability_of, require_published_ids, require_token, stacked_head, take_layers

_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
_TAG = "<extra_0>"

INFO = FamilyInfo(
    name="qwen2.5-math-prm",
    models="Qwen/Qwen2.5-Math-PRM-7B, -72B, Qwen/Qwen2.5-Math-7B-PRM800K",
    architectures=("Qwen2ForProcessRewardModel",),
    head="`score.0` → ReLU → `score.2`",
    layout="chat template with a fixed system message, `<extra_0>` after a step",
    score_positions="`<extra_0>`",
    score="softmax, label 1",
    source="arXiv:2501.07301 and the model card of Qwen/Qwen2.5-Math-PRM-7B",
)


class QwenMathPrm(PrmFamily):
    """The Qwen2.5-Math-PRM family; see the module."""

    info = INFO
    max_special_tokens = 0  # the allowance for every family covers the tag

    def __init__(self, model: Model, tag_id: int) -> None:
        self.model = model
        self._tag_id = tag_id

    def prompt_ids(self, problem: str) -> list[int]:
        """System message, the problem, and the opening of the assistant's turn."""
        return self.model.tokenizer.encode(self._prompt(problem))

    def read(self, path: StepPath) -> ScoreInput:
        """The step's ids and the tag, where the score is read."""
        ids = self.model.tokenizer.encode(self._step(path.steps[-1]))
        return ScoreInput((*ids, self._tag_id), (len(ids),))

    def full_path(self, path: StepPath) -> ScoreInput:
        """The text as on the model card, encoded at once."""
        text = self._prompt(path.problem) + "".join(self._step(step) + _TAG for step in path.steps)
        ids = self.model.tokenizer.encode(text)
        return ScoreInput(tuple(ids), (len(ids) - 1,), full_path=True)

    def _prompt(self, problem: str) -> str:
        user = {"role": "user", "content": without_special_tokens(problem, (_TAG,))}
        return self.model.tokenizer.render_chat([{"role": "system", "content": _SYSTEM}, user])

    @staticmethod
    def _step(step: str) -> str:
        return without_special_tokens(stripped_step(step), (_TAG,))


def detect(checkpoint: Checkpoint) -> str | None:
    """Detected by its architecture; the other family of that architecture has a larger rotary base."""
    if rope_theta(checkpoint) >= 1e6:
        return None
    return "its architecture, with a rotary base of less than 1,000,000"


def load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> QwenMathPrm:
    """Load a `Qwen2ForProcessRewardModel` checkpoint.

    Raises:
        CheckpointError: a tensor of the head or the tag token is missing.
    """
    tokenizer = TextTokenizer(checkpoint)
    tag_id = require_token(checkpoint, tokenizer, _TAG, "where scores are read")
    require_published_ids(checkpoint, tokenizer, 152064, {_TAG: 151651})
    decoder = load_trunk(checkpoint, dtype, device)
    layers = take_layers(checkpoint, ("score.0", "score.2"), decoder, labels=2)
    checkpoint.ignore("lm_head.weight")
    checkpoint.require_all_taken()
    head = stacked_head(layers, probability_of(1))
    return QwenMathPrm(Model(decoder, head, tokenizer, (), checkpoint.digest()), tag_id)
