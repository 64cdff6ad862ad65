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

from dataclasses import dataclass
from string import ascii_uppercase, digits
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Le, Len
from pydantic import ConfigDict, StringConstraints

from espalier.engine.models.checkpoint import Checkpoint
from espalier.prm.asked import AskedFamily
from espalier.prm.base import FamilyInfo, Sampled
from espalier.prm.families.settings import read_settings

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
    architectures=("*ForCausalLM",),
    score="expectation over the letters or the digits, mean of the questions",
)


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """The questions of a judge.

    Attributes:
        letters: letters of the first scale, from `A`.
        criteria: statements that should be true of a solution.
        repeats: questions for each criterion.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    letters: Annotated[int, Ge(2), Le(26)] = 20
    criteria: Annotated[tuple[Annotated[str, StringConstraints(pattern=r"\S")], ...], Len(1, 8)] = _CRITERIA
    repeats: Annotated[int, Ge(1), Le(6)] = 2

    @property
    def answers(self) -> str:
        """All grades: those of the scale of letters, the worst first, and of that of digits if it is asked for."""
        return ascii_uppercase[: self.letters] + (digits if self.repeats > 1 else "")

    @property
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


class Judge(AskedFamily[JudgeSettings]):
    """The judge family; see the module."""

    info = INFO

    @property
    def identity(self) -> str:
        """The name, and the settings that are not the default."""
        return self.name if self.settings == JudgeSettings() else f"{self.name} {self.settings}"

    @classmethod
    def settings_of(cls, checkpoint: Checkpoint) -> JudgeSettings:
        """The default, with what the `prm` object of `config.json` sets."""
        rule = "letters, from 2 to 26, repeats, from 1 to 6, and criteria, 1 to 8 texts"
        return read_settings(checkpoint, JudgeSettings, rule)

    @staticmethod
    def output(logits: torch.Tensor) -> torch.Tensor:
        """The logits of all grades."""
        return logits

    def evidence(self, values: np.ndarray, before: float | None, sampled: Sampled) -> float:
        """The mean of the questions' expected grades, from the logits of all grades, `[questions, answers]`."""
        of_questions = zip(values, self.settings.scales(), strict=True)
        return float(np.mean([_expected(row[scale]) for row, scale in of_questions]))


def _expected(logits: np.ndarray) -> float:
    """The expected grade in [0, 1], given the logits of a scale's grades, the worst first."""
    weights = np.exp(logits - logits.max())
    return float(weights @ np.linspace(0.0, 1.0, len(weights)) / weights.sum())
