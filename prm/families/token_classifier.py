"""Token classifiers with two labels: those of TRL's PRMTrainer, and PURE.

Layout: the prompt, then each step's ids followed by the separator's ids. A step's score is the probability of label 1
at the separator's last token. A `prm` object in `config.json` may say how the checkpoint was trained:

    prompt           `raw` (the problem as it is, TRL's default) or `chat` (through the chat template)
    step_separator   text after each step; TRL's default is one newline
    score            `p1`, the probability of label 1

PURE has the same layout: a solution is split at its blank lines, and the end of each step, including trailing spaces,
is replaced by one newline, at which the score is read. PURE's own score is p1 - p0, from -1 to 1; since p0 = 1 - p1,
the score here, p1, is (1 + PURE's) / 2: the order and the minimum of a path are the same, and what PURE calls right is
above 0.5. (For best-of-N and training, the authors weight the steps' rewards so that their sum is close to the minimum,
which is `--aggregation min`.)
Source: TRL's documentation of PRMTrainer and how its `tokenize_row` joins prompt, steps and separators; for PURE the
model card of jinachris/PURE-PRM-7B, its evaluation, and the trainer of github.com/CJReinforce/PURE, which strips the
blank line of each step of a sample and inserts the token of `prm_step_separator`, a newline.
"""

from dataclasses import dataclass
from typing import Literal, Self

import torch

from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.prm.base import FamilyInfo, PrmFamily, ScoreInput, StepPath, stripped_step
from espalier.prm.heads import ScoringHead, load_scoring_model, probability_of, read_settings


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout that a checkpoint was trained with, by default TRL's; see the module."""

    prompt: Literal["raw", "chat"] = "raw"
    step_separator: str = "\n"
    score: Literal["p1"] = "p1"


def _detected(checkpoint: Checkpoint) -> str:
    """Detected by its architecture; an optional `prm` object in config.json defines the layout."""
    if "prm" in checkpoint.config:
        return "its architecture and the prm object of its config.json"
    return "its architecture, in TRL's layout (--verifier-family pure strips spaces from the ends of steps)"


class TokenClassifier(PrmFamily):
    """The token-classifier family; see the module."""

    info = FamilyInfo("token-classifier", ("*ForTokenClassification",), score="softmax, label 1")

    detect = staticmethod(_detected)

    @staticmethod
    def layout_of(checkpoint: Checkpoint) -> Layout:
        """The layout that a checkpoint was trained with.

        Raises:
            CheckpointError: its `prm` object has an unknown value.
        """
        return read_settings(checkpoint, Layout, "prompt, raw or chat, step_separator, a text, and score, p1")

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> Self:
        """Load a `*ForTokenClassification` checkpoint.

        Raises:
            CheckpointError: the number of labels is not 2, or its `prm` object has an unknown value.
        """
        layout, tokenizer = cls.layout_of(checkpoint), TextTokenizer(checkpoint)
        head = ScoringHead(probability_of(1), ("score",), labels=2)
        return cls(load_scoring_model(checkpoint, tokenizer, dtype, device, head), layout)

    def __init__(self, model: Model, layout: Layout) -> None:
        self.model = model
        self._layout = layout
        self._separator_ids = model.tokenizer.encode(layout.step_separator)

    @property
    def identity(self) -> str:
        """The name and the layout, which config.json can change."""
        return f"{self.name} {self._layout.prompt} {self._layout.step_separator!r}"

    def prompt_ids(self, problem: str) -> list[int]:
        """The problem, through the chat template, or after the tokenizer's bos token if it has one."""
        if self._layout.prompt == "chat":
            return self.chat_ids(problem)
        return self.model.tokenizer.encode((self.model.tokenizer.special_token("bos_token") or "") + problem)

    def read(self, path: StepPath) -> ScoreInput:
        """The step's ids and the separator's, whose last token is read."""
        ids = self.model.tokenizer.encode(self._text(path.steps[-1])) + self._separator_ids
        return ScoreInput(tuple(ids), (len(ids) - 1,))

    def _text(self, step: str) -> str:
        return stripped_step(step)


class Pure(TokenClassifier):
    """The PURE family; see the module."""

    info = FamilyInfo(
        "pure", ("*ForTokenClassification",), score="softmax, label 1: (1 + (p1 − p0)) / 2 of what PURE reads"
    )
    detect = None

    @staticmethod
    def layout_of(checkpoint: Checkpoint) -> Layout:
        """The layout is PURE's own."""
        return Layout()

    def _text(self, step: str) -> str:
        return stripped_step(step).rstrip()
