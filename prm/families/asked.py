"""Families that ask any chat model about each step, and read its answer's probabilities: `yes-no` and `judge`.

The chat template's user turn is the problem, and the assistant's the steps, each with the blank line after it, as a
generator writes them. The assistant's turn is then closed, the user asks, and the score is read at the last token
before the answer. From the end of the assistant's turn on, all tokens are probe tokens: they are fed on a fork of the
path and not kept, so no later step sees a question. Of several questions each is asked on a fork of its own.

Nothing in a checkpoint says that it is to be asked, so these families are chosen by the flag only, or by `--verifier
self`, which asks the generator itself on the same weights.

`yes-no` asks whether the solution is right so far; the score is the softmax over the logits of `Yes` and `No`. Source:
P(True) of Kadavath et al., Language Models (Mostly) Know What They Know (arXiv:2207.05221), asked of a partial
solution; the wording is Espalier's.

`judge` grades each step's solution by several criteria, on scales of letters and digits. A question names one criterion
and asks for a grade of a scale; what is read is not the likeliest grade but the expectation over all of the scale, so
that a score is as fine as the model's probabilities, not as its grades. The score is the mean over C criteria and K
repeats. A repeat words the question in another way, and every second one asks for a digit instead of a letter; nothing
is sampled.

Both scales have the worst grade first. Asked for `A` as the best letter, two small models went on giving the later
letters to what they found better, and ranked solutions the wrong way round; see `prm/README.md`.

A `prm` object in `config.json` sets them, such as `{"letters": 20, "criteria": ["Every calculation is right."],
"repeats": 2}`. Each question is fed on a fork of its own: C·K times 50 to 65 tokens a score.

Source: scoring by the expectation over score tokens, times criteria, times repeats is the LLM-as-a-verifier of
arXiv:2607.05391; G-Eval (arXiv:2303.16634) weighs scores by their probabilities too. There a repeat is sampled; the
wording and the second scale are Espalier's.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase, digits
from typing import Annotated, Generic, NamedTuple, Self, TypeVar

import numpy as np
import torch
from annotated_types import Ge, Le, Len
from pydantic import ConfigDict, StringConstraints

from espalier.engine.errors import CheckpointError
from espalier.engine.models.chat.template import render_with_system
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.prm.base import FamilyInfo, PrmFamily, Sampled, ScoreInput, StepPath, stripped_step
from espalier.prm.heads import (
    ScoringHead,
    load_scoring_model,
    read_settings,
    require_causal_lm,
    require_one_token,
    stacked_head,
    take_token_rows,
)

_SOLUTION = "the steps of the solution"  # a placeholder that locates the template's own text
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


class Question(NamedTuple):
    """The question, and its two answers."""

    questions: tuple[str, ...] = (
        "Is this solution right so far, its last step included? Answer with one word: Yes or No.",
    )
    answers: tuple[str, ...] = ("Yes", "No")


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


Settings = TypeVar("Settings", bound=Question | JudgeSettings)


class ProbedFamily(PrmFamily):
    """A family that reads a solution so far at the end of probe tokens; see the module.

    Attributes:
        probe_ids: probe tokens after each step.
    """

    probe_ids: tuple[int, ...]

    def read(self, path: StepPath) -> ScoreInput:
        """The step with its blank line, the probe tokens, and the place of the answer."""
        return self._probed(self.model.tokenizer.encode(stripped_step(path.steps[-1]) + "\n\n"))

    def full_path(self, path: StepPath) -> ScoreInput:
        """The answer so far, encoded at once."""
        answer = "".join(stripped_step(step) + "\n\n" for step in path.steps)
        return self._probed([*self.prompt_ids(path.problem), *self.model.tokenizer.encode(answer)], full_path=True)

    def _probed(self, ids: list[int], full_path: bool = False) -> ScoreInput:
        fed = (*ids, *self.probe_ids)
        return ScoreInput(fed, (len(fed) - 1,), len(self.probe_ids), full_path)


class AskedFamily(ProbedFamily, Generic[Settings]):
    """A family that asks questions; see the module.

    Attributes:
        settings: what it asks.
        probes: the tokens of each question, from the end of the assistant's turn on.
    """

    settings: Settings
    costly = True

    @classmethod
    @abstractmethod
    def settings_of(cls, checkpoint: Checkpoint) -> Settings:
        """The settings that a checkpoint's configuration means.

        Raises:
            CheckpointError: they mean nothing.
        """

    @staticmethod
    @abstractmethod
    def output(logits: torch.Tensor) -> torch.Tensor:
        """The values that `evidence` takes, from the logits of the answers."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str) -> Self:
        """Load a causal language model with the rows of its head that answer.

        Raises:
            CheckpointError: it is no generator, has no chat template, or no single token for an answer.
        """
        require_causal_lm(checkpoint, cls.info.name, "asks a language model")
        settings, tokenizer = cls.settings_of(checkpoint), TextTokenizer(checkpoint)
        ids = _answer_ids(checkpoint, tokenizer, settings.answers)
        head = ScoringHead(cls.output, token_ids=ids)
        return cls(load_scoring_model(checkpoint, tokenizer, dtype, device, head), settings)

    @classmethod
    def require_askable(cls, checkpoint: Checkpoint) -> None:
        """Check, without reading weights, that a generator can be asked about its own steps; raises as `load`."""
        _answer_ids(checkpoint, TextTokenizer(checkpoint), cls.settings_of(checkpoint).answers)

    @classmethod
    def of_generator(cls, checkpoint: Checkpoint, generator: Model) -> Self:
        """The family on the weights of a generator that is loaded already; raises as `load`.

        Args:
            checkpoint: the generator's.
            generator: its model.
        """
        settings = cls.settings_of(checkpoint)
        ids = _answer_ids(checkpoint, generator.tokenizer, settings.answers)
        head = stacked_head([take_token_rows(checkpoint, generator.decoder, ids)], cls.output)
        return cls(Model(generator.decoder, head, generator.tokenizer, (), checkpoint.digest()), settings)

    def __init__(self, model: Model, settings: Settings) -> None:
        """Find the text that the chat template puts before the steps and after them.

        Raises:
            CheckpointError: there is no chat template, or it does not render a chat of three turns.
        """
        self.model = model
        self.settings = settings
        probes: list[tuple[int, ...]] = []
        for question in settings.questions:
            before, after = self._around("2", question)
            if not before or question not in after:
                raise CheckpointError(
                    f"the chat template of this model leaves out a turn of three; {self.info.name} needs them"
                )
            probes.append(tuple(model.tokenizer.encode(after)))
        self.probes = tuple(probes)
        self.probe_ids, self.other_probes = probes[0], self.probes[1:]
        self.max_probe_tokens = max(map(len, probes))
        self.max_special_tokens = 1 + self.max_probe_tokens

    def prompt_ids(self, problem: str) -> list[int]:
        """The problem's turn, and the opening of the assistant's."""
        return self.model.tokenizer.encode(self._around(problem, self.settings.questions[0])[0])

    def follows(self, system_prompt: str) -> bool:
        """Return whether the questions may follow a generator's own path, whose prompt has this system prompt.

        They may if the chat template's text of all turns is that prompt, the solution and a question as it is fed.
        """
        switches = {"enable_thinking": False, "thinking": False}
        problem = {"role": "user", "content": "2"}
        try:
            prompt = render_with_system(self.model.tokenizer.render_chat, system_prompt, [problem], **switches)
            for question in self.settings.questions:
                turns = {"role": "assistant", "content": _SOLUTION}, {"role": "user", "content": question}
                chat = render_with_system(
                    self.model.tokenizer.render_chat, system_prompt, [problem, *turns], **switches
                )
                if chat != f"{prompt}{_SOLUTION}{self._around('2', question)[1]}":
                    return False
        except CheckpointError:
            return False
        return True

    def _around(self, problem: str, question: str) -> tuple[str, str]:
        """The chat before the assistant's turn and after it, up to the place of the model's answer."""
        turns = (("user", problem), ("assistant", _SOLUTION), ("user", question))
        messages = [{"role": role, "content": content} for role, content in turns]
        before, _, after = self.model.tokenizer.render_chat(messages, enable_thinking=False).rpartition(_SOLUTION)
        return before, after


class YesNo(AskedFamily[Question]):
    """The yes-no family; see the module."""

    info = FamilyInfo("yes-no", ("*ForCausalLM",), score="softmax, `Yes`")

    @staticmethod
    def output(logits: torch.Tensor) -> torch.Tensor:
        """The probability of `Yes`."""
        return torch.softmax(logits, dim=-1)[:, :1]

    @classmethod
    def settings_of(cls, checkpoint: Checkpoint) -> Question:
        """The same question for every checkpoint."""
        return Question()


class Judge(AskedFamily[JudgeSettings]):
    """The judge family; see the module."""

    info = FamilyInfo(
        "judge", ("*ForCausalLM",), score="expectation over the letters or the digits, mean of the questions"
    )

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


def _answer_ids(checkpoint: Checkpoint, tokenizer: TextTokenizer, answers: Sequence[str]) -> list[int]:
    """The ids of the answers that a model may give.

    Raises:
        CheckpointError: it has no chat template, or no single token for an answer.
    """
    if tokenizer.chat_template is None:
        raise CheckpointError(
            f"{checkpoint.folder} has no chat template, so it cannot be asked whether a step is right; give "
            "--verifier a model of its own, or confidence"
        )
    why = "which the model answers with; give --verifier a model of its own, or confidence"
    return [require_one_token(checkpoint, tokenizer, text, why) for text in answers]
