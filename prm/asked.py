"""Families that ask a chat model about each step: the layout of their questions, and the rows of its head that answer.

The chat template's user turn is the problem, and the assistant's the steps, each with the blank line after it, as a
generator writes them. The assistant's turn is then closed, the user asks, and the score is read at the last token
before the answer. From the end of the assistant's turn on, all tokens are probe tokens: they are fed on a fork of the
path and not kept, so no later step sees a question. Of several questions each is asked on a fork of its own.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, Self, TypeVar

import torch

from espalier.engine.errors import CheckpointError
from espalier.engine.models.chat.arrangement import render_with_system
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.prm.base import PrmFamily, ScoreInput, StepPath, stripped_step
from espalier.prm.heads import load_scoring_model, require_one_token, stacked_head, take_token_rows

_SOLUTION = "the steps of the solution"  # a placeholder that locates the template's own text


class Asking(Protocol):
    """Settings of a family that asks."""

    @property
    def questions(self) -> tuple[str, ...]:
        """The questions."""
        ...

    @property
    def answers(self) -> Sequence[str]:
        """The answers whose logits are read, a token each."""
        ...


Settings = TypeVar("Settings", bound=Asking)


class AskedFamily(PrmFamily, Generic[Settings]):
    """A family that asks questions; see the module. `info` must be set before it is created.

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
        if not checkpoint.architecture.endswith("ForCausalLM"):
            raise CheckpointError(
                f"{checkpoint.folder} is a {checkpoint.architecture or 'model without architecture'}; {cls.info.name} "
                "asks a language model and needs a *ForCausalLM"
            )
        settings, tokenizer = cls.settings_of(checkpoint), TextTokenizer(checkpoint)
        ids = answer_ids(checkpoint, tokenizer, settings.answers)
        return cls(load_scoring_model(checkpoint, tokenizer, dtype, device, cls.output, token_ids=ids), settings)

    @classmethod
    def require_askable(cls, checkpoint: Checkpoint) -> None:
        """Check, without reading weights, that a generator can be asked about its own steps; raises as `load`."""
        answer_ids(checkpoint, TextTokenizer(checkpoint), cls.settings_of(checkpoint).answers)

    @classmethod
    def of_generator(cls, checkpoint: Checkpoint, generator: Model) -> Self:
        """The family on the weights of a generator that is loaded already; raises as `load`.

        Args:
            checkpoint: the generator's.
            generator: its model.
        """
        settings = cls.settings_of(checkpoint)
        ids = answer_ids(checkpoint, generator.tokenizer, settings.answers)
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
        self._probe_ids, self.other_probes = probes[0], self.probes[1:]
        self.max_probe_tokens = max(map(len, probes))
        self.max_special_tokens = 1 + self.max_probe_tokens

    def prompt_ids(self, problem: str) -> list[int]:
        """The problem's turn, and the opening of the assistant's."""
        return self.model.tokenizer.encode(self._around(problem, self.settings.questions[0])[0])

    def read(self, path: StepPath) -> ScoreInput:
        """The step with its blank line, the first question as a probe, and the place of the answer."""
        ids = self.model.tokenizer.encode(stripped_step(path.steps[-1]) + "\n\n")
        end = len(ids) + len(self._probe_ids) - 1
        return ScoreInput((*ids, *self._probe_ids), (end,), num_probe_tokens=len(self._probe_ids))

    def full_path(self, path: StepPath) -> ScoreInput:
        """The answer so far, encoded at once."""
        answer = "".join(stripped_step(step) + "\n\n" for step in path.steps)
        ids = [*self.prompt_ids(path.problem), *self.model.tokenizer.encode(answer), *self._probe_ids]
        return ScoreInput(tuple(ids), (len(ids) - 1,), num_probe_tokens=len(self._probe_ids), full_path=True)

    def follows(self, system_prompt: str) -> bool:
        """Return whether the questions may follow a generator's own path, whose prompt has this system prompt.

        They may if the chat template's text of all turns is that prompt, the solution and a question as it is fed.
        """
        switches = {"enable_thinking": False, "thinking": False}
        problem = {"role": "user", "content": "2"}
        try:
            prompt = render_with_system(self.model.tokenizer, system_prompt, [problem], **switches)
            for question in self.settings.questions:
                turns = {"role": "assistant", "content": _SOLUTION}, {"role": "user", "content": question}
                chat = render_with_system(self.model.tokenizer, system_prompt, [problem, *turns], **switches)
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


def answer_ids(checkpoint: Checkpoint, tokenizer: TextTokenizer, answers: Sequence[str]) -> list[int]:
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
