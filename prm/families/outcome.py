"""Outcome reward models: one score for a complete answer, such as Skywork-Reward and Qwen2.5-Math-RM.

Layout: the problem as the user's turn and the whole answer as the assistant's, through the chat template. The score is
read at the last token that is not config.json's `pad_token_id`, like transformers' `*ForSequenceClassification`; a
template may end in that token. It is the sigmoid of the logit, which keeps the order and lies in [0, 1] for weighted
votes. Steps have no score, so searches that use step scores are refused.

The model card of Qwen/Qwen2.5-Math-RM-72B gives a system message, which its chat template also adds by default.
Source: the model cards of Skywork/Skywork-Reward-Llama-3.1-8B-v0.2 and Qwen/Qwen2.5-Math-RM-72B; transformers 5.23,
`modeling_layers.GenericForSequenceClassification`. (Older versions read the token before the first `pad_token_id`,
which is a different one if a template has it between turns.)
"""

from typing import Self

import torch

from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.prm.base import FamilyInfo, PrmFamily, ScoreInput, StepPath, stripped_step
from espalier.prm.heads import load_value_model


class OutcomeModel(PrmFamily):
    """The outcome-model family; see the module."""

    info = FamilyInfo(
        "outcome",
        ("*ForSequenceClassification", "Qwen2ForRewardModel"),
        score="sigmoid of the logit, of whole answers only",
        whole_answers=True,
    )
    detect = staticmethod(lambda _: "its architecture")

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> Self:
        """Load a reward model with one label.

        Raises:
            CheckpointError: the number of labels is not 1, or there is no chat template.
        """
        model = load_value_model(checkpoint, TextTokenizer(checkpoint), dtype, device)
        return cls(model, checkpoint.config.get("pad_token_id"))

    def __init__(self, model: Model, pad_id: int | None) -> None:
        self.model = model
        self._pad_id = pad_id
        self.max_special_tokens = len(model.tokenizer.encode(self._chat("", "a"))) - len(self.prompt_ids(""))

    def prompt_ids(self, problem: str) -> list[int]:
        """The problem's turn and the opening of the assistant's turn."""
        return self.chat_ids(problem)

    def read(self, path: StepPath) -> ScoreInput:
        """The whole answer up to its last token that is not padding, where the score is read."""
        answer = "\n\n".join(stripped_step(step) for step in path.steps)
        ids = self.model.tokenizer.encode(self._chat(path.problem, answer))
        end = max((i for i, token in enumerate(ids) if token != self._pad_id), default=0)
        return ScoreInput(tuple(ids[: end + 1]), (end,), full_path=True)

    def _chat(self, problem: str, answer: str) -> str:
        messages = [{"role": "user", "content": problem}, {"role": "assistant", "content": answer}]
        return self.model.tokenizer.render_chat(messages, False)
