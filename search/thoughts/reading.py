"""Tells thought from answer while a path is sampled, step by step.

    before ──opening mark──▶ inside ──closing mark──▶ before ──text──▶ answer

A thought is opened by the prompt, or by the model before anything else. An opening mark in a thought needs a closing
one of its own; as the very first thing in a thought it only says again what is known. Behind the answer's first word
marks are text. Where marks are tokens, only the tokens count: the same characters spelled out are text.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from espalier.engine.models.tokenizer import TextTokenizer
from espalier.search.thoughts.marks import Mark, ThoughtMarks

_Kind = str
"""`text`, `opening` or `closing`."""


class Phase(Enum):
    """The part of a path that its next token belongs to."""

    BEFORE = auto()
    INSIDE = auto()
    ANSWER = auto()


class Position(NamedTuple):
    """Position of a path: in its thought or its answer.

    Attributes:
        phase: the part that it is in.
        depth: thoughts that are open, one in the other.
        blank: whether its thought has said nothing yet.
        label: what is left of a label that is no part of the thought.
        closed: whether a thought has been closed before.
    """

    phase: Phase = Phase.BEFORE
    depth: int = 0
    blank: bool = True
    label: str = ""
    closed: bool = False

    @property
    def inside(self) -> bool:
        """True in a thought."""
        return self.phase is Phase.INSIDE


CLOSED = Position(closed=True)
"""Behind a thought."""
OPENED = Position(Phase.INSIDE, depth=1)
"""Behind a prompt that opens the thought."""
IN_ANSWER = Position(Phase.ANSWER)
"""On paths of models that do not think."""


@dataclass(frozen=True, slots=True)
class StepReading:
    """A step without its marks.

    Attributes:
        text: its text.
        thought_chars: how many of its first characters are thought.
        position: where its path is behind it.
    """

    text: str
    thought_chars: int
    position: Position


class ThoughtReader:
    """Reads steps of one model."""

    def __init__(self, marks: ThoughtMarks, tokenizer: TextTokenizer) -> None:
        self._marks = marks
        self._tokenizer = tokenizer
        self._of_token = {mark.token_id: kind for mark, kind in self._kinds() if mark.token_id is not None}
        texts = [(re.escape(mark.text), kind) for mark, kind in self._kinds() if mark.token_id is None]
        self._of_text = re.compile("|".join(f"(?P<{kind}>{text})" for text, kind in texts)) if texts else None

    def read(self, token_ids: Sequence[int], position: Position) -> StepReading:
        """Read the tokens of a step that begins at `position`."""
        text, thought_chars = "", 0
        for kind, piece in self._pieces(token_ids):
            if position.phase is Phase.ANSWER:
                text += piece
                continue
            if kind == "text":
                if position.label and piece:
                    piece, position = _after_label(piece, position)
                text += piece
                if piece.strip():
                    inside = position.inside
                    position = position._replace(blank=False) if inside else position._replace(phase=Phase.ANSWER)
            elif kind == "opening":
                deeper = not (position.inside and position.blank)
                if position.inside and deeper:
                    text += self._marks.opening.text
                depth, label = position.depth + deeper or 1, self._marks.label
                position = position._replace(phase=Phase.INSIDE, depth=depth, blank=True, label=label)
            elif position.depth > 1:
                text += self._marks.closing.text
                position = position._replace(depth=position.depth - 1)
            else:
                position = CLOSED
            if kind != "text" or position.inside:
                thought_chars = len(text)
        return StepReading(text, thought_chars, position)

    def _kinds(self) -> tuple[tuple[Mark, _Kind], tuple[Mark, _Kind]]:
        return (self._marks.opening, "opening"), (self._marks.closing, "closing")

    def _pieces(self, token_ids: Sequence[int]) -> Iterator[tuple[_Kind, str]]:
        """The tokens as texts and marks; a mark's piece is its text where it has one."""
        start = 0
        for place, token in enumerate(token_ids):
            if kind := self._of_token.get(token):
                yield from self._split(self._tokenizer.decode(list(token_ids[start:place])))
                yield kind, self._tokenizer.decode([token])
                start = place + 1
        yield from self._split(self._tokenizer.decode(list(token_ids[start:])))

    def _split(self, text: str) -> Iterator[tuple[_Kind, str]]:
        start = 0
        for found in self._of_text.finditer(text) if self._of_text else ():
            yield "text", text[start : found.start()]
            yield found.lastgroup or "", found[0]
            start = found.end()
        yield "text", text[start:]


def _after_label(text: str, position: Position) -> tuple[str, Position]:
    """The text without what it has of a label, which steps may cut."""
    label = position.label
    if label.startswith(text):
        return "", position._replace(label=label[len(text) :])
    return text.removeprefix(label), position._replace(label="")
