"""Tells thought from answer on paths of channels with headers, which models write wrongly now and then.

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
from collections.abc import Collection, Sequence

from espalier.engine.models.tokenizer import TextTokenizer
from espalier.search.thoughts.marks import ThoughtMarks
from espalier.search.thoughts.reading import Phase, Position, Reader, StepReading, ThoughtReader

MAX_HEADER_CHARACTERS = 128
"""Characters of the longest header: names of functions have 64 at most."""
_NAME = re.compile(r"\s*(analysis|commentary|final|\w*)")
_ROLE = re.compile(r"\s*assistant\b|\s*assistant(?=[A-Z])")
_ADDRESS = re.compile(r"(?:\s*to=\S+)?(?:\s*(?:code|json)\b)?")
_FINAL = "final"


def make_reader(marks: ThoughtMarks, tokenizer: TextTokenizer, ends: Collection[int] = ()) -> Reader:
    """The reader of a checkpoint's paths; `ends` are tokens that end one."""
    return ChannelReader(marks, tokenizer, ends) if marks.message else ThoughtReader(marks, tokenizer)


class ChannelReader:
    """Reads steps of one model; see `ThoughtReader`."""

    def __init__(self, marks: ThoughtMarks, tokenizer: TextTokenizer, ends: Collection[int] = ()) -> None:
        """Read by the marks of channels with headers; `ends` are tokens that end a path."""
        assert marks.message
        self._tokenizer = tokenizer
        self._channel, self._end = marks.opening.token_id, marks.closing.token_id
        self._begins = {self._channel, marks.turn.token_id if marks.turn else None}
        self._message = marks.message.token_id
        self._structure = {*self._begins, self._message, self._end}
        self._ends = frozenset(ends)

    def read(self, token_ids: Sequence[int], position: Position) -> StepReading:
        """See `ThoughtReader`."""
        said, body = _Said(), list[int]()
        for token in token_ids:
            if position.header is not None:
                if not self._ends_header(token, position.header):
                    position = position._replace(header=(*position.header, token))
                    continue
                position = self._behind_header(token, position, said)
            if token in self._structure:
                position, body = self._behind(token, said.add(self._tokenizer.decode(body), position)), []
            else:
                body.append(token)
        position = said.add(self._tokenizer.decode(body), position)
        return StepReading(said.text, said.thought_chars, position)

    def end(self, position: Position) -> StepReading:
        """Read the end of a path: what is left of a header that did not end."""
        said = _Said()
        if position.header is not None:
            position = self._without_end(position, said)
        return StepReading(said.text, said.thought_chars, position)

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

    def _behind_header(self, token: int, position: Position, said: "_Said") -> Position:
        if token != self._message:
            return self._without_end(position, said)
        return self._named(position, self._words(position.header or ())[0])

    def _behind(self, token: int, position: Position) -> Position:
        """The position behind a token of the structure outside of a header."""
        if token in self._begins:
            return position._replace(header=(token,))
        if token == self._end:
            return position._replace(header=()) if position.phase is Phase.ANSWER else Position(closed=True, header=())
        return position

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

    def _without_end(self, position: Position, said: "_Said") -> Position:
        """The position behind a header that did not end, whose last words belong to its message."""
        assert position.header is not None
        name, rest = self._words(position.header)
        position = self._named(position, name) if name is not None else position._replace(header=None)
        return said.add(rest if name is None else _spoken(rest), position)


def _spoken(rest: str) -> str:
    """The part that is said of the words behind a channel's name, where their header did not end."""
    found = _ADDRESS.match(rest)
    return (rest[found.end() :] if found else rest).lstrip(" ")


class _Said:
    """The text of a step as far as it is read."""

    def __init__(self) -> None:
        self.text = ""
        self.thought_chars = 0

    def add(self, text: str, position: Position) -> Position:
        """Add text at a position; returns the position behind it."""
        self.text += text
        if position.inside:
            self.thought_chars = len(self.text)
        if not text.strip() or position.phase is Phase.ANSWER:
            return position
        return position._replace(blank=False) if position.inside else position._replace(phase=Phase.ANSWER)
