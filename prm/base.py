"""The contract of a process-reward-model family."""

from typing import Protocol

from espalier.engine.model import Model


class PrmFamily(Protocol):
    """How one family of process reward models reads a problem and its steps.

    The ids of a path are `prompt_ids(problem)` followed by `step_ids(step)` of each step in turn, never re-tokenised,
    so the KV of a path's beginning serves all of its continuations. A step's score is read where its own ids say.

    Attributes:
        name: the family's name, as shown to users.
        model: decoder, tokenizer and the head that turns a hidden state into one score in [0, 1].
    """

    name: str
    model: Model

    def prompt_ids(self, problem: str) -> list[int]:
        """Token ids before the first step."""
        ...

    def step_ids(self, step: str) -> tuple[list[int], int]:
        """Token ids of one step, and the index among them at which its score is read.

        Args:
            step: the step's text, with or without its delimiter.
        """
        ...


def stripped_step(step: str) -> str:
    """A step's text without the newlines around it, which families put back in their own way."""
    return step.strip("\n")
