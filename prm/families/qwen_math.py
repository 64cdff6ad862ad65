"""Qwen2.5-Math-PRM (7B, 72B) and Qwen2.5-Math-7B-PRM800K: class `Qwen2ForProcessRewardModel`.

Layout: ChatML with a fixed system message, the problem as the user's turn, and the assistant's turn as every step
followed by the single token `<extra_0>` with nothing between. A step's score is read at its `<extra_0>`: a two-layer
head with ReLU, softmax over two classes in float32, class 1. The closing `<|im_end|>` is never fed, so ids only ever
grow.
Source: the model card of Qwen/Qwen2.5-Math-PRM-7B.
"""

import torch
import torch.nn.functional as F

from espalier.engine.checkpoint import Checkpoint
from espalier.engine.errors import CheckpointError
from espalier.engine.model import Head, Model, load_trunk
from espalier.engine.tokenizer import TextTokenizer
from espalier.kernels.linear import Linear
from espalier.prm.base import stripped_step

_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
_TAG = "<extra_0>"


class QwenMathPrm:
    """See the module; satisfies `PrmFamily`."""

    name = "qwen2.5-math-prm"

    def __init__(self, model: Model, tag_id: int) -> None:
        self.model = model
        self._tag_id = tag_id

    def prompt_ids(self, problem: str) -> list[int]:
        """System message, the problem, and the opening of the assistant's turn."""
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": problem}]
        return self.model.tokenizer.encode(self.model.tokenizer.render_chat(messages))

    def step_ids(self, step: str) -> tuple[list[int], int]:
        """The step's ids and the tag, read at the tag."""
        # A step that itself holds the tag must not add a second read position: spell it so that it is plain text.
        ids = self.model.tokenizer.encode(stripped_step(step).replace(_TAG, "<extra 0>"))
        return [*ids, self._tag_id], len(ids)


def load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> QwenMathPrm:
    """Load a `Qwen2ForProcessRewardModel` checkpoint.

    Raises:
        CheckpointError: when a head tensor or the tag token is missing.
    """
    decoder = load_trunk(checkpoint, dtype, device)
    labels, hidden = (checkpoint.shape("score.2.bias") or (2,))[0], decoder.config.hidden_size
    if labels != 2:
        raise CheckpointError(f"{checkpoint.folder} has {labels} labels; a process reward model of this family has 2")
    shapes = {
        "score.0.weight": (hidden, hidden),
        "score.0.bias": (hidden,),
        "score.2.weight": (labels, hidden),
        "score.2.bias": (labels,),
    }
    inner, inner_bias, outer, outer_bias = (
        checkpoint.take(name, dtype, device, shape) for name, shape in shapes.items()
    )
    checkpoint.ignore("lm_head.weight")
    checkpoint.require_all_taken()
    tokenizer = TextTokenizer(checkpoint)
    tag_id = tokenizer.token_id(_TAG)
    if tag_id is None:
        raise CheckpointError(f"the tokenizer of {checkpoint.folder} has no token {_TAG}, where scores are read")
    head = _head(Linear(inner, inner_bias), Linear(outer, outer_bias))
    return QwenMathPrm(Model(decoder, head, tokenizer, (), checkpoint.digest()), tag_id)


def _head(inner: Linear, outer: Linear) -> Head:
    def head(hidden: torch.Tensor) -> torch.Tensor:
        return torch.softmax(outer(F.relu(inner(hidden))).float(), dim=-1)[:, 1:]

    return head
