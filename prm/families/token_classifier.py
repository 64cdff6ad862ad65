"""Token classifiers with two labels, as TRL's PRMTrainer makes them.

Layout: prompt, then each step's ids followed by the separator's; the score of a step is read at the separator's last
token, as the probability of label 1. `config.json` may carry a `prm` object that says how the checkpoint was trained:

    prompt           `raw` (the problem as it is, TRL's default) or `chat` (through the chat template)
    step_separator   text after each step; TRL's default is one newline
    score            `p1`, the probability of label 1
"""

from typing import Any

import torch

from espalier.engine.checkpoint import Checkpoint
from espalier.engine.errors import CheckpointError
from espalier.engine.model import Head, Model, load_trunk
from espalier.engine.tokenizer import TextTokenizer
from espalier.kernels.linear import Linear
from espalier.prm.base import stripped_step

_PROMPTS = ("raw", "chat")
_SCORES = ("p1",)


class TokenClassifier:
    """See the module; satisfies `PrmFamily`."""

    name = "token-classifier"

    def __init__(self, model: Model, separator: str, chat_prompt: bool) -> None:
        self.model = model
        self._separator_ids = model.tokenizer.encode(separator)
        self._chat_prompt = chat_prompt

    def prompt_ids(self, problem: str) -> list[int]:
        """The problem, through the chat template or after the tokenizer's bos token if it has one."""
        tokenizer = self.model.tokenizer
        if self._chat_prompt:
            return tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": problem}]))
        bos = tokenizer.special_token("bos_token")
        return tokenizer.encode((bos or "") + problem)

    def step_ids(self, step: str) -> tuple[list[int], int]:
        """The step's ids and the separator's, read at the last."""
        ids = self.model.tokenizer.encode(stripped_step(step)) + self._separator_ids
        return ids, len(ids) - 1


def load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> TokenClassifier:
    """Load a `*ForTokenClassification` checkpoint.

    Raises:
        CheckpointError: when it does not have two labels, or its `prm` object has an unknown value.
    """
    settings = _settings(checkpoint)
    decoder = load_trunk(checkpoint, dtype, device)
    labels, hidden = (checkpoint.shape("score.weight") or (2,))[0], decoder.config.hidden_size
    if labels != 2:
        raise CheckpointError(f"{checkpoint.folder} has {labels} labels; a process reward model has 2")
    weight = checkpoint.take("score.weight", dtype, device, (labels, hidden))
    bias = checkpoint.take("score.bias", dtype, device, (labels,)) if "score.bias" in checkpoint else None
    checkpoint.require_all_taken()
    model = Model(decoder, _head(Linear(weight, bias)), TextTokenizer(checkpoint), (), checkpoint.digest())
    return TokenClassifier(model, settings["step_separator"], settings["prompt"] == "chat")


def _settings(checkpoint: Checkpoint) -> dict[str, Any]:
    settings = {"prompt": "raw", "step_separator": "\n", "score": "p1"} | checkpoint.config.get("prm", {})
    if settings["prompt"] not in _PROMPTS or settings["score"] not in _SCORES:
        raise CheckpointError(f"{checkpoint.folder}: prm.prompt is one of {_PROMPTS}, prm.score one of {_SCORES}")
    return settings


def _head(score: Linear) -> Head:
    def head(hidden: torch.Tensor) -> torch.Tensor:
        return torch.softmax(score(hidden).float(), dim=-1)[:, 1:]

    return head
