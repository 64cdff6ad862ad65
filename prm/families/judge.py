"""Any chat model as a judge: it grades each step's solution by several criteria, on scales of letters and digits.

The layout is that of `prm.asked`. A question names one criterion and asks for a grade of a scale; what is read is not
the likeliest grade but the expectation over all of the scale, so that a score is as fine as the model's probabilities,
not as its grades. The score is the mean over C criteria and K repeats. A repeat words the question in another way, and
every second one asks for a digit instead of a letter; nothing is sampled.

Both scales have the worst grade first. Asked for `A` as the best letter, two small models went on giving the later
letters to what they found better, and ranked solutions the wrong way round; see `prm/README.md`.

A `prm` object in `config.json` sets them, such as `{"letters": 20, "criteria": ["Every calculation is right."],
"repeats": 2}`. Each question is fed on a fork of its own: C·K times 50 to 65 tokens a score.

Source: scoring by the expectation over score tokens, times criteria, times repeats is the LLM-as-a-verifier of
arXiv:2607.05391; G-Eval (arXiv:2303.16634) weighs scores by their probabilities too. There a repeat is sampled; the
wording and the second scale are Espalier's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase, digits

import numpy as np
import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.prm.asked import AskedFamily, answer_ids, asked_generator, load_asked
from espalier.prm.base import FamilyInfo, Sampled

_CRITERIA = (
    "It reads the problem right: every number and condition that it uses is the problem's.",
    "Every calculation in it is right.",
    "Each step follows from those before it and leads towards the answer.",
)
_WORDINGS = (
    "Judge the solution so far, its last step included, by this: {criterion} Answer with one {kind} from {worst} to "
    "{best}, where {worst} means not at all and {best} means entirely.",
    "{criterion} How far is that true of the solution so far? {worst} is completely false, {best} is completely true. "
    "Answer with one {kind} from {worst} to {best}.",
    "Grade your confidence in this statement about the solution so far: {criterion} {worst} is none, {best} is full. "
    "Answer with one {kind} from {worst} to {best}.",
)

INFO = FamilyInfo(
    name="judge",
    models="any instruction-tuned *ForCausalLM with a chat template; the generator itself with `--verifier self`",
    architectures=("*ForCausalLM",),
    head="`lm_head` rows of the letters `A` … `T` and the digits",
    layout="that of `yes-no`; a question for each of three criteria, twice",
    score_positions="last token of the header after each question, which is not kept",
    score="expectation over the letters or the digits, mean of the questions",
    source="arXiv:2607.05391; the questions are Espalier's",
)


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """The questions of a judge.

    Attributes:
        letters: letters of the first scale, from `A`.
        criteria: statements that should be true of a solution.
        repeats: questions for each criterion.
    """

    letters: int = 20
    criteria: tuple[str, ...] = _CRITERIA
    repeats: int = 2

    @property
    def answers(self) -> str:
        """All grades: those of the scale of letters, the worst first, and of that of digits if it is asked for."""
        return ascii_uppercase[: self.letters] + (digits if self.repeats > 1 else "")

    def questions(self) -> tuple[str, ...]:
        """All questions; those of a criterion stand together."""
        letters = {"kind": "letter", "worst": "A", "best": ascii_uppercase[self.letters - 1]}
        both = letters, {"kind": "digit", "worst": "0", "best": "9"}
        return tuple(
            _WORDINGS[repeat % len(_WORDINGS)].format(criterion=criterion, **both[repeat % 2])
            for criterion in self.criteria
            for repeat in range(self.repeats)
        )

    def scales(self) -> tuple[slice, ...]:
        """The part of `answers` that is the scale of each question."""
        both = slice(self.letters), slice(self.letters, None)
        return tuple(both[repeat % 2] for _ in self.criteria for repeat in range(self.repeats))


class Judge(AskedFamily):
    """The judge family; see the module."""

    info = INFO

    def __init__(self, model: Model, settings: JudgeSettings) -> None:
        super().__init__(model, settings.questions())
        self._settings = settings
        self._scales = settings.scales()

    @property
    def identity(self) -> str:
        """The name, and the settings that are not the default."""
        return self.name if self._settings == JudgeSettings() else f"{self.name} {self._settings}"

    def evidence(self, values: np.ndarray, before: float | None, sampled: Sampled) -> float:
        """The mean of the questions' expected grades, from the logits of all grades, `[questions, answers]`."""
        return float(np.mean([_expected(row[scale]) for row, scale in zip(values, self._scales, strict=True)]))


def load(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> Judge:
    """Load a chat model; raises as `load_asked`, or CheckpointError where its `prm` object is wrong."""
    settings = _settings(checkpoint)
    return Judge(load_asked(checkpoint, dtype, device, settings.answers, _logits, INFO.name), settings)


def require_askable(checkpoint: Checkpoint) -> None:
    """Check, without reading weights, that a generator can judge its own steps; raises as `load`."""
    answer_ids(checkpoint, TextTokenizer(checkpoint), _settings(checkpoint).answers)


def of_generator(checkpoint: Checkpoint, generator: Model) -> Judge:
    """The family on the weights of a generator that is loaded already; raises as `asked_generator`."""
    settings = _settings(checkpoint)
    return Judge(asked_generator(checkpoint, generator, settings.answers, _logits), settings)


def _logits(logits: torch.Tensor) -> torch.Tensor:
    return logits


def _expected(logits: np.ndarray) -> float:
    """The expected grade in [0, 1], given the logits of a scale's grades, the worst first."""
    weights = np.exp(logits - logits.max())
    return float(weights @ np.linspace(0.0, 1.0, len(weights)) / weights.sum())


def _settings(checkpoint: Checkpoint) -> JudgeSettings:
    default = JudgeSettings()
    given = {"letters": default.letters, "criteria": default.criteria, "repeats": default.repeats}
    known = set(given)
    given |= checkpoint.files.object("prm")
    letters, criteria, repeats = given["letters"], given["criteria"], given["repeats"]
    texts = isinstance(criteria, Sequence) and not isinstance(criteria, str) and 1 <= len(criteria) <= 8
    wrong = set(given) != known or not texts or not all(isinstance(text, str) and text.strip() for text in criteria)
    counts = type(letters) is int and 2 <= letters <= 26 and type(repeats) is int and 1 <= repeats <= 6
    if wrong or not counts:
        raise CheckpointError(
            f"{checkpoint.folder}: the prm object of config.json has letters, from 2 to 26, repeats, from 1 to 6, and "
            "criteria, 1 to 8 texts"
        )
    return JudgeSettings(letters, tuple(criteria), repeats)
