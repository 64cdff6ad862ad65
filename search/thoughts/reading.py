"""Tells thought from answer while a path is sampled, step by step.

    before ──opening mark──▶ inside ──closing mark──▶ before ──text──▶ answer

A thought is opened by the prompt, or by the model before anything else. An opening mark in a thought needs a closing
one of its own; as the very first thing in a thought it only says again what is known. Behind the answer's first word
marks are text, as far as they open something or are quoted: a second closing mark ends what had gone on behind the
first, which is the answer's all the same, and is no text. Where marks are tokens, only the tokens count: the same
characters spelled out are text.

Channels have headers, which models write wrongly now and then:

    <|start|>assistant<|channel|>analysis<|message|>  thought  <|end|>
    └────────────────── header ────────────────────┘
    <|start|>assistant<|channel|>final<|message|>  answer

A header's words are never said, whatever they are: a recipient, a type, a channel named twice. It begins at one of its
tokens, or behind the end of a message, and ends at `<|message|>`. The last channel that it names says where the path
is: `final` is the answer, any other is thought, and one without a channel changes nothing within a thought. A header
that has not ended after `MAX_HEADER_CHARACTERS`, or by the end of its message or path, lacks its end: the text behind
the channel's name is said.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np

from espalier.engine.guidance.matcher import Matcher
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


@dataclass(slots=True)
class StepReading:
    """A step without its marks, as far as it is read.

    Attributes:
        text: its text.
        thought_chars: how many of its first characters are thought.
        position: where its path is behind it.
    """

    text: str
    thought_chars: int
    position: Position

    def say(self, text: str) -> None:
        """Add text at the present position, and move behind it."""
        self.text += text
        position = self.position
        if position.inside:
            self.thought_chars = len(self.text)
        if text.strip() and position.phase is not Phase.ANSWER:
            inside, answer = position._replace(blank=False), position._replace(phase=Phase.ANSWER)
            self.position = inside if position.inside else answer


class ThoughtReader:
    """Reads steps of one model whose marks are tags, or channels without headers.

    Attributes:
        openings: tokens that open a thought in place of an answer's first word; empty where that is no token.
        state: of `closes`, at the beginning of a thought.
    """

    state: Any = (OPENED, b"")

    def __init__(self, marks: ThoughtMarks, tokenizer: TextTokenizer) -> None:
        self._label = marks.label
        self._tokenizer = tokenizer
        kinds = [(mark, kind) for pair in marks.pairs for mark, kind in zip(pair, _KINDS, strict=True)]
        self._of_token = {mark.token_id: (kind, mark.text) for mark, kind in kinds if mark.token_id is not None}
        texts = {mark.text: kind for mark, kind in kinds if mark.token_id is None}
        self._of_text, self._texts = None, texts
        if texts:
            self._of_text = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))
        self.openings = tuple(token for token, (kind, _) in self._of_token.items() if kind == "opening")
        self._closing_texts = tuple(text.encode() for text, kind in texts.items() if kind == "closing")

    def closes(self, token_id: int, state: Any) -> tuple[bool, Any]:
        """Return whether a thought ends with a token, its answer's header included, and the state behind it."""
        position = self.read([token_id], state[0]).position
        longest = 2 * max(map(len, self._closing_texts), default=0) + 64
        last = (state[1] + self._tokenizer.decode_bytes([token_id]))[-longest:]
        return not position.inside or any(text in last for text in self._closing_texts), (position, last)

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
        """Read the end of a path: text that was held back, as it might have been part of a mark."""
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


MAX_HEADER_CHARACTERS = 128
"""Characters of the longest header: names of functions have 64 at most."""
_NAME = re.compile(r"\s*(analysis|commentary|final|\w*)")
_ROLE = re.compile(r"\s*assistant\b|\s*assistant(?=[A-Z])")
_ADDRESS = re.compile(r"(?:\s*to=\S+)?(?:\s*(?:code|json)\b)?")
_FINAL = "final"
_FUNCTION = re.compile(r"to=functions\.([\w.-]+)")
CALL = "<|channel|>commentary to=functions.{}<|message|>"
"""The address of a call, however a model has written it."""


def make_reader(
    marks: ThoughtMarks, tokenizer: TextTokenizer, ends: Collection[int] = (), calls: bool = False
) -> ThoughtReader:
    """The reader of a checkpoint's paths; `ends` are tokens that end one, `calls` as of `ChannelReader`."""
    return ChannelReader(marks, tokenizer, ends, calls) if marks.message else ThoughtReader(marks, tokenizer)


class ChannelReader(ThoughtReader):
    """Reads steps of one model whose channels have headers."""

    state = OPENED

    def __init__(
        self, marks: ThoughtMarks, tokenizer: TextTokenizer, ends: Collection[int] = (), calls: bool = False
    ) -> None:
        """Read by the marks of channels with headers.

        Args:
            marks: of the channels.
            tokenizer: the checkpoint's.
            ends: tokens that end a path.
            calls: whether a channel that addresses a function is the answer's, with its address as `CALL` writes it.
        """
        super().__init__(marks, tokenizer)
        assert marks.message
        self._channel, self._end = marks.opening.token_id, marks.closing.token_id
        self._begins = {self._channel, marks.turn.token_id if marks.turn else None}
        self._message = marks.message.token_id
        self._structure = {*self._begins, self._message, self._end}
        self._ends = frozenset(ends)
        self._calls = calls

    def closes(self, token_id: int, state: Position) -> tuple[bool, Position]:
        """See `ThoughtReader`."""
        position = self.read([token_id], state).position
        return position.phase is Phase.ANSWER and position.header is None, position

    def read(self, token_ids: Sequence[int], position: Position) -> StepReading:
        """See `ThoughtReader`."""
        reading, body = StepReading("", 0, position), list[int]()
        for token in token_ids:
            if (header := reading.position.header) is not None:
                if not self._ends_header(token, header):
                    reading.position = reading.position._replace(header=(*header, token))
                    continue
                if token == self._message and (called := self._function(header)):
                    reading.position = self._named(reading.position, _FINAL)
                    reading.say(CALL.format(called))
                elif token == self._message:
                    reading.position = self._named(reading.position, self._words(header)[0])
                else:
                    self._without_end(reading, header)
            if token in self._structure:
                reading.say(self._tokenizer.decode(body))
                reading.position, body = self._behind(token, reading.position), []
            else:
                body.append(token)
        reading.say(self._tokenizer.decode(body))
        return reading

    def end(self, position: Position) -> StepReading:
        """See `ThoughtReader`: what is left of a header that did not end."""
        reading = StepReading("", 0, position)
        if position.header is not None:
            self._without_end(reading, position.header)
        return reading

    def _ends_header(self, token: int, header: Sequence[int]) -> bool:
        """Return whether a header is over with a token, which need not be one of its own."""
        if token in (self._message, self._end) or token in self._ends:
            return True
        if token in self._begins:  # a channel that is named twice, or what is said by a header without an end
            return len(_spoken(self._words(header)[1]).split()) > 1
        words = self._tokenizer.decode(list(header))
        return len(words) >= MAX_HEADER_CHARACTERS and (
            not words.endswith("\ufffd") or len(words) >= 2 * MAX_HEADER_CHARACTERS
        )

    def _behind(self, token: int, position: Position) -> Position:
        """The position behind a token of the structure outside of a header."""
        if token in self._begins:
            return position._replace(header=(token,))
        if token == self._end:
            return position._replace(header=()) if position.phase is Phase.ANSWER else Position(closed=True, header=())
        return position

    def _function(self, header: Sequence[int]) -> str:
        """The function that a header addresses, where calls are read; empty for none."""
        found = _FUNCTION.search(self._tokenizer.show(list(header))) if self._calls else None
        return found[1] if found else ""

    def _words(self, header: Sequence[int]) -> tuple[str | None, str]:
        """The last channel that a header names, None if it names none, and the words behind its name."""
        at = max((i for i, token in enumerate(header) if token == self._channel), default=-1)
        text = self._tokenizer.decode(list(header[at + 1 :]))
        if at < 0:
            begun = bool(header) and header[0] in self._begins
            return None, text[found.end() :] if begun and (found := _ROLE.match(text)) else text
        found = _NAME.match(text)
        assert found
        return found[1], text[found.end() :]

    def _named(self, position: Position, name: str | None) -> Position:
        """The position behind a header that names a channel."""
        inside = not name.startswith(_FINAL) if name is not None else position.inside
        if inside:
            return Position(Phase.INSIDE, 1, not position.inside or position.blank, closed=position.closed)
        return Position(Phase.ANSWER, closed=position.closed or position.inside)

    def _without_end(self, reading: StepReading, header: Sequence[int]) -> None:
        """Read a header that did not end, whose last words belong to its message."""
        name, rest = self._words(header)
        position = reading.position
        reading.position = position._replace(header=None) if name is None else self._named(position, name)
        reading.say(rest if name is None else _spoken(rest))


def _spoken(rest: str) -> str:
    """The part that is said of the words behind a channel's name, where their header did not end."""
    found = _ADDRESS.match(rest)
    return (rest[found.end() :] if found else rest).lstrip(" ")


_FREE = 255


@dataclass(slots=True)
class AfterThought:
    """A `Matcher`: anything within a thought, what `answer` allows behind it, or at once where there is none.

    Attributes:
        answer: what binds the answer.
        reader: knows where a thought begins and ends.
        forbidden: tokens that are not drawn within a thought: those that would end the text.
        inside: whether the next token belongs to a thought.
        begun: whether anything has been written.
        state: see `ThoughtReader.closes`.
    """

    answer: Matcher
    reader: ThoughtReader
    forbidden: tuple[int, ...] = ()
    inside: bool = False
    begun: bool = False
    state: Any = field(init=False)

    def __post_init__(self) -> None:
        self.state = self.reader.state

    @property
    def error(self) -> str:
        """See `Matcher`."""
        return self.answer.error

    @property
    def ended(self) -> bool:
        """See `Matcher`."""
        return self.begun and not self.inside and self.answer.ended

    def allow(self, bits: np.ndarray) -> None:
        """See `Matcher`."""
        if self.inside:
            bits[:] = _FREE
            for token in self.forbidden:
                bits[token // 8] &= ~np.uint8(1 << token % 8)
            return
        self.answer.allow(bits)
        for opening in () if self.begun else self.reader.openings:
            bits[opening // 8] |= np.uint8(1 << opening % 8)

    def advance(self, token_id: int) -> None:
        """See `Matcher`."""
        if self.inside or (not self.begun and token_id in self.reader.openings):
            closed, self.state = self.reader.closes(token_id, self.state)
            self.inside = not closed
        else:
            self.answer.advance(token_id)
        self.begun = True

    def give_up(self) -> None:
        """See `Matcher`."""
        self.answer.give_up()

    def copy(self) -> "AfterThought":
        """See `Matcher`."""
        copied = replace(self, answer=self.answer.copy())
        copied.state = self.state
        return copied
