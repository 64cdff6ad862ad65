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

import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.prm.base import FamilyInfo, PrmFamily, ScoreInput, StepPath, stripped_step
from espalier.prm.heads import load_scoring_model, probability_of

_PROMPTS = ("raw", "chat")
_SCORES = ("p1",)
_TRL = {"prompt": "raw", "step_separator": "\n", "score": "p1"}

INFO = FamilyInfo(
    name="token-classifier",
    models="made by TRL's PRMTrainer; espalier's demo-verifier",
    architectures=("*ForTokenClassification",),
    head="`score`",
    layout="the problem as it is, a newline after a step; or as config.json's `prm` object says",
    score_positions="last token of the separator",
    score="softmax, label 1",
    source="TRL's documentation of PRMTrainer",
)
PURE_INFO = FamilyInfo(
    name="pure",
    models="jinachris/PURE-PRM-7B",
    architectures=("*ForTokenClassification",),
    head="`score`",
    layout="the problem as it is, a newline after a step",
    score_positions="last token of the separator",
    score="softmax, label 1: (1 + (p1 − p0)) / 2 of what PURE reads",
    source="arXiv:2504.15275, github.com/CJReinforce/PURE and the model card of jinachris/PURE-PRM-7B",
)


class TokenClassifier(PrmFamily):
    """The token-classifier family; see the module."""

    def __init__(self, info: FamilyInfo, model: Model, separator: str, chat_prompt: bool) -> None:
        self.info = info
        self.model = model
        self._separator = separator
        self._separator_ids = model.tokenizer.encode(separator)
        self._chat_prompt = chat_prompt

    @property
    def identity(self) -> str:
        """The name and the layout, which config.json can change."""
        return f"{self.name} {'chat' if self._chat_prompt else 'raw'} {self._separator!r}"

    def prompt_ids(self, problem: str) -> list[int]:
        """The problem, through the chat template, or after the tokenizer's bos token if it has one."""
        tokenizer = self.model.tokenizer
        if self._chat_prompt:
            return tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": problem}]))
        bos = tokenizer.special_token("bos_token")
        return tokenizer.encode((bos or "") + problem)

    def read(self, path: StepPath) -> ScoreInput:
        """The step's ids and the separator's, whose last token is read."""
        ids = self.model.tokenizer.encode(self._text(path.steps[-1])) + self._separator_ids
        return ScoreInput(tuple(ids), (len(ids) - 1,))

    def _text(self, step: str) -> str:
        return stripped_step(step)


class Pure(TokenClassifier):
    """The PURE family; see the module."""

    def _text(self, step: str) -> str:
        return stripped_step(step).rstrip()


def detect(checkpoint: Checkpoint) -> str | None:
    """Detected by its architecture; an optional `prm` object in config.json defines the layout."""
    if "prm" in checkpoint.config:
        return "its architecture and the prm object of its config.json"
    return "its architecture, in TRL's layout (--verifier-family pure strips spaces from the ends of steps)"


def load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> TokenClassifier:
    """Load a `*ForTokenClassification` checkpoint.

    Raises:
        CheckpointError: the number of labels is not 2, or its `prm` object has an unknown value.
    """
    settings = _TRL | checkpoint.files.object("prm")
    if settings["prompt"] not in _PROMPTS or settings["score"] not in _SCORES:
        raise CheckpointError(f"{checkpoint.folder}: prm.prompt must be one of {_PROMPTS}, prm.score one of {_SCORES}")
    if not isinstance(settings["step_separator"], str):
        raise CheckpointError(f"{checkpoint.folder}: prm.step_separator in config.json must be text")
    model = _load_model(checkpoint, dtype, device)
    return TokenClassifier(INFO, model, settings["step_separator"], settings["prompt"] == "chat")


def load_pure(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> TokenClassifier:
    """Load a PURE checkpoint.

    Raises:
        CheckpointError: the number of labels is not 2.
    """
    return Pure(PURE_INFO, _load_model(checkpoint, dtype, device), _TRL["step_separator"], chat_prompt=False)


def _load_model(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> Model:
    head = {"layers": ("score",), "labels": 2}
    return load_scoring_model(checkpoint, TextTokenizer(checkpoint), dtype, device, probability_of(1), **head)
