"""Tells thought from answer while a path is sampled, step by step.

    before ──opening mark──▶ inside ──closing mark──▶ before ──text──▶ answer

A thought is opened by the prompt, or by the model before anything else. An opening mark in a thought needs a closing
one of its own; as the very first thing in a thought it only says again what is known. Behind the answer's first word
marks are text, as far as they open something or are quoted: a second closing mark ends what had gone on behind the
first, which is the answer's all the same, and is no text. Where marks are tokens, only the tokens count: the same
characters spelled out are text.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol

from espalier.engine.models.tokenizer import TextTokenizer
from espalier.search.thoughts.marks import ThoughtMarks

_Kind = str
"""`text`, `opening` or `closing`."""
_KINDS = "opening", "closing"
_QUOTES = "`", "'", '"', "“", "‘", "«"


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
        header: tokens of a channel's header that has not ended; None outside of one.
        quoting: whether the last character of an answer begins a quotation.
    """

    phase: Phase = Phase.BEFORE
    depth: int = 0
    blank: bool = True
    label: str = ""
    closed: bool = False
    header: tuple[int, ...] | None = None
    quoting: bool = False

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


class Reader(Protocol):
    """Reads steps of one model."""

    def read(self, token_ids: Sequence[int], position: Position) -> StepReading:
        """Read the tokens of a step that begins at `position`."""
        ...

    def end(self, position: Position) -> StepReading:
        """Read the end of a path: text that was held back, as it might have been part of a mark."""
        ...


class ThoughtReader:
    """Reads steps of one model whose marks are tags, or channels without headers."""

    def __init__(self, marks: ThoughtMarks, tokenizer: TextTokenizer) -> None:
        self._label = marks.label
        self._tokenizer = tokenizer
        kinds = [(mark, kind) for pair in marks.pairs for mark, kind in zip(pair, _KINDS, strict=True)]
        self._of_token = {mark.token_id: (kind, mark.text) for mark, kind in kinds if mark.token_id is not None}
        texts = {mark.text: kind for mark, kind in kinds if mark.token_id is None}
        self._of_text, self._texts = None, texts
        if texts:
            self._of_text = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))

    def read(self, token_ids: Sequence[int], position: Position) -> StepReading:
        """Read the tokens of a step that begins at `position`."""
        text, thought_chars = "", 0
        for kind, piece, mark in self._pieces(token_ids):
            if position.phase is Phase.ANSWER:
                piece, position = _in_answer(kind, piece, position)
                text += piece
                continue
            if kind == "text":
                if position.label and piece:
                    piece, position = _after_label(piece, position)
                text += piece
                if piece.strip():
                    inside = position.inside
                    position = position._replace(blank=False) if inside else _begun(piece, position)
            elif kind == "opening":
                deeper = not (position.inside and position.blank)
                if position.inside and deeper:
                    text += mark
                depth, label = position.depth + deeper or 1, self._label
                position = position._replace(phase=Phase.INSIDE, depth=depth, blank=True, label=label)
            elif position.depth > 1:
                text += mark
                position = position._replace(depth=position.depth - 1)
            else:
                position = CLOSED
            if kind != "text" or position.inside:
                thought_chars = len(text)
        return StepReading(text, thought_chars, position)

    def end(self, position: Position) -> StepReading:
        """See `Reader`; nothing is held back."""
        return StepReading("", 0, position)

    def _pieces(self, token_ids: Sequence[int]) -> Iterator[tuple[_Kind, str, str]]:
        """The tokens as texts and marks: the kind of each, its text, which special tokens lack, and its mark's."""
        start = 0
        for place, token in enumerate(token_ids):
            if found := self._of_token.get(token):
                yield from self._split(self._tokenizer.decode(list(token_ids[start:place])))
                yield found[0], self._tokenizer.decode([token]), found[1]
                start = place + 1
        yield from self._split(self._tokenizer.decode(list(token_ids[start:])))

    def _split(self, text: str) -> Iterator[tuple[_Kind, str, str]]:
        start = 0
        for found in self._of_text.finditer(text) if self._of_text else ():
            yield "text", text[start : found.start()], ""
            yield self._texts[found[0]], found[0], found[0]
            start = found.end()
        yield "text", text[start:], ""


def _in_answer(kind: _Kind, piece: str, position: Position) -> tuple[str, Position]:
    """The part of a piece that is the answer's: not a mark that closes nothing, unless it is quoted.

    `depth` counts the opening marks of the answer, which are text, as their closing ones are.
    """
    if kind == "closing" and position.closed and not (position.depth or position.quoting):
        return "", position
    deeper = (kind == "opening") - (kind == "closing" and position.depth > 0)
    return piece, _begun(piece, position._replace(depth=position.depth + deeper))


def _begun(piece: str, position: Position) -> Position:
    """The position in an answer behind a piece of it."""
    quoting = piece.endswith(_QUOTES) if piece else position.quoting
    return position._replace(phase=Phase.ANSWER, quoting=quoting)


def _after_label(text: str, position: Position) -> tuple[str, Position]:
    """The text without what it has of a label, which steps may cut."""
    label = position.label
    if label.startswith(text):
        return "", position._replace(label=label[len(text) :])
    return text.removeprefix(label), position._replace(label="")
