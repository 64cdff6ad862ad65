"""Token classifiers with two labels: as TRL's PRMTrainer makes them, and PURE.

Layout: prompt, then each step's ids followed by the separator's; the score of a step is read at the separator's last
token, as the probability of label 1. `config.json` may carry a `prm` object that says how the checkpoint was trained:

    prompt           `raw` (the problem as it is, TRL's default) or `chat` (through the chat template)
    step_separator   text after each step; TRL's default is one newline
    score            `p1`, the probability of label 1

PURE's layout is TRL's: a solution is split at its blank lines, and what ends a step is given up for a single newline,
whose token is read; spaces at a step's end go with it. It reads p1 - p0, from -1 to 1; as p0 = 1 - p1, the score here,
p1, is half of that and a half: the same order, the same minimum of a path, and what it calls right is above 0.5. (For
best-of-N and training the authors weigh the steps' rewards so that their sum is nearly the least; `--aggregation min`
is that.)
Source: TRL's documentation of PRMTrainer and how its `tokenize_row` joins prompt, steps and separators; for PURE the
model card of jinachris/PURE-PRM-7B, its evaluation, and the trainer of github.com/CJReinforce/PURE, which takes the
blank line off each step of a sample and puts the token of `prm_step_separator`, a newline, in its place.
"""

import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_trunk
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.prm.base import FamilyInfo, PrmFamily, ScoringInput, StepPath, stripped_step
from espalier.prm.heads import probability_of, stacked_head, take_layers

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
    """See the module."""

    def __init__(self, info: FamilyInfo, model: Model, separator: str, chat_prompt: bool) -> None:
        self.info = info
        self.model = model
        self._separator = separator
        self._separator_ids = model.tokenizer.encode(separator)
        self._chat_prompt = chat_prompt

    @property
    def identity(self) -> str:
        """The name and the layout, which config.json may change."""
        return f"{self.name} {'chat' if self._chat_prompt else 'raw'} {self._separator!r}"

    def prompt_ids(self, problem: str) -> list[int]:
        """The problem, through the chat template or after the tokenizer's bos token if it has one."""
        tokenizer = self.model.tokenizer
        if self._chat_prompt:
            return tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": problem}]))
        bos = tokenizer.special_token("bos_token")
        return tokenizer.encode((bos or "") + problem)

    def read(self, path: StepPath) -> ScoringInput:
        """The step's ids and the separator's, read at the last."""
        ids = self.model.tokenizer.encode(self._text(path.steps[-1])) + self._separator_ids
        return ScoringInput(tuple(ids), (len(ids) - 1,))

    def _text(self, step: str) -> str:
        return stripped_step(step)


class Pure(TokenClassifier):
    """See the module."""

    def _text(self, step: str) -> str:
        return stripped_step(step).rstrip()


def detect(checkpoint: Checkpoint) -> str | None:
    """Its own architecture; a `prm` object in the configuration says the rest."""
    if "prm" in checkpoint.config:
        return "its architecture and the prm object of its config.json"
    return "its architecture, in TRL's layout (--verifier-family pure takes spaces off the ends of steps)"


def load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> TokenClassifier:
    """Load a `*ForTokenClassification` checkpoint.

    Raises:
        CheckpointError: when it does not have two labels, or its `prm` object has an unknown value.
    """
    settings = _TRL | checkpoint.config.get("prm", {})
    if settings["prompt"] not in _PROMPTS or settings["score"] not in _SCORES:
        raise CheckpointError(f"{checkpoint.folder}: prm.prompt is one of {_PROMPTS}, prm.score one of {_SCORES}")
    model = _load_model(checkpoint, dtype, device)
    return TokenClassifier(INFO, model, settings["step_separator"], settings["prompt"] == "chat")


def load_pure(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> TokenClassifier:
    """Load a PURE checkpoint.

    Raises:
        CheckpointError: when it does not have two labels.
    """
    return Pure(PURE_INFO, _load_model(checkpoint, dtype, device), _TRL["step_separator"], chat_prompt=False)


def _load_model(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> Model:
    tokenizer = TextTokenizer(checkpoint)
    decoder = load_trunk(checkpoint, dtype, device)
    head = stacked_head(take_layers(checkpoint, ("score",), decoder, labels=2, bias=None), probability_of(1))
    checkpoint.require_all_taken()
    return Model(decoder, head, tokenizer, (), checkpoint.digest())
