"""Value models of Value-Guided Search, of the class `Qwen2ForClassifier`: the value of a thought after any token.

Layout: the prompt of DeepSeek-R1's distilled models with an open thought, then the path's text as it is. Nothing stands
between steps, and a score is read at a step's last token, so steps may be blocks of tokens (`--step-rule tokens:4096`).
The head is `score.0` → ReLU → `score.2`, without biases. With three labels (wrong, right, unfinished) the score is the
softmax probability of the second, with one label the sigmoid.

VGS-AI/DeepSeek-VM-1.5B comes without tokenizer files: put those of deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B beside it.
Source: arXiv:2505.17373 and its code, github.com/kaiwenw/value-guided-search. There the generator's own token ids are
read, marks of the thought among them; here the text of each step, which has no marks, is encoded by itself.
"""

from typing import Self

import torch

from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.prm.base import FamilyInfo, PrmFamily, ScoreInput, StepPath
from espalier.prm.heads import ScoringHead, load_scoring_model, probability_of, require_token

_MARKS = _BEGIN, _USER, _ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
_INSTRUCTION = " Please think step-by-step and put your final answer within \\boxed{}."


class ValueGuided(PrmFamily):
    """The family of value models; see the module."""

    info = FamilyInfo("value-guided", ("Qwen2ForClassifier",), score="softmax, label 1 of 3; sigmoid of one label")
    detect = staticmethod(lambda _: "its architecture")

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> Self:
        """Load a value model with three labels or one.

        Raises:
            CheckpointError: the head has another number of labels, or the tokenizer lacks a mark of the prompt.
        """
        tokenizer = TextTokenizer(checkpoint)
        for mark in _MARKS:
            require_token(checkpoint, tokenizer, mark, "which begins a turn of the prompt")
        one = checkpoint.shape("score.2.weight") == (1, checkpoint.decoder_config.hidden_size)
        output, labels = (torch.sigmoid, 1) if one else (probability_of(1), 3)
        head = ScoringHead(output, ("score.0", "score.2"), labels, bias=False)
        return cls(load_scoring_model(checkpoint, tokenizer, dtype, device, head))

    def prompt_ids(self, problem: str) -> list[int]:
        """The problem with the instruction, and the opening of the thought."""
        return self.model.tokenizer.encode(f"{_BEGIN}{_USER}{problem}{_INSTRUCTION}{_ASSISTANT}<think>\n")

    def read(self, path: StepPath) -> ScoreInput:
        """The step's text, read at its last token."""
        ids = self.model.tokenizer.encode(path.steps[-1])
        return ScoreInput(tuple(ids), (len(ids) - 1,))
