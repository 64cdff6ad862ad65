"""The text of one choice as it is sampled: decoded token by token, and cut where a stop text ends it.

The thought of a conversation's answer is no part of the text: it is kept apart, and stop texts in it end nothing.
"""

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from espalier.engine.models.tokenizer import TextTokenizer
from espalier.search.conversation import ToolCall
from espalier.search.thoughts.marks import ThoughtMarks
from espalier.search.thoughts.reading import OPENED, Phase, Position, StepReading, make_reader

if TYPE_CHECKING:
    from espalier.search.tools.reading import CallReader


class SampledText:
    """A growing text.

    Attributes:
        text: all that is decoded, without what comes from a stop text on unless that is to be kept.
        num_tokens: tokens up to the one that completed a stop text.
        stopped_by: the stop text that was found; None for none.
        thought_tokens: how many of them belong to a thought before the text, marks included.
    """

    def __init__(
        self, tokenizer: TextTokenizer, stop: Sequence[str], include_stop: bool, calls: "CallReader | None" = None
    ) -> None:
        """Begin an empty text that ends where one of `stop` appears, outside of the `calls` of tools in it."""
        self.text = ""
        self.num_tokens = self.thought_tokens = 0
        self.stopped_by: str | None = None
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = stop
        self._include_stop = include_stop
        self._longest = max(map(len, stop), default=0)
        self._emitted = self._emitted_thought = self._emitted_calls = 0
        self._calls = calls
        self._thought = ""

    @property
    def thought(self) -> str:
        """The thought before the text as far as it is known, without blank space around it; empty without one."""
        return self._thought.strip()

    def add(self, token_ids: Sequence[int]) -> None:
        """Take new tokens; those after a stop text are dropped."""
        for token_id in token_ids:
            if self.stopped_by is not None:
                return
            self.num_tokens += 1
            self._extend(self._decoded(token_id))

    def end(self, cut: bool = False) -> None:
        """Take no more tokens; bytes that are no whole character become the replacement character.

        Args:
            cut: whether a limit ended the text, not the model.
        """
        if self.stopped_by is None:
            self._extend(self._rest())
            if self._calls:
                self._find_stop(self._calls.end(cut))

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools that are whole so far."""
        return tuple(self._calls.calls) if self._calls else ()

    def take_calls(self) -> tuple[ToolCall, ...]:
        """The calls since the last call of this method."""
        start, self._emitted_calls = self._emitted_calls, len(self.calls)
        return self.calls[start:]

    def take_thought(self) -> str:
        """The thought since the last call."""
        start, self._emitted_thought = self._emitted_thought, len(self.thought)
        return self.thought[start:]

    def take(self, ended: bool) -> str:
        """The text since the last call; before the end without what may be the beginning of a stop text."""
        end = len(self.text)
        if not ended and self.stopped_by is None:
            tail = self.text[max(self._emitted, end - self._longest + 1) :] if self._stop else ""
            held = (len(tail) - at for at in range(len(tail)) if any(s.startswith(tail[at:]) for s in self._stop))
            end -= next(held, 0)
        start, self._emitted = self._emitted, end
        return self.text[start:end]

    def _decoded(self, token_id: int) -> str:
        """The text that a new token brings."""
        return self._decoder.decode(self._tokenizer.decode_bytes([token_id]))

    def _rest(self) -> str:
        """The text that was held back, at the end."""
        return self._decoder.decode(b"", True)

    def _extend(self, piece: str) -> None:
        self._find_stop(self._calls.feed(piece) if self._calls else piece)

    def _find_stop(self, piece: str) -> None:
        before = len(self.text)
        self.text += piece
        if not self._stop or not piece:
            return
        since = max(0, before - self._longest + 1)
        found = [(at, stop) for stop in self._stop if (at := self.text.find(stop, since)) >= 0]
        if found:
            at, self.stopped_by = min(found, key=lambda each: (each[0], len(each[1])))
            self.text = self.text[: at + len(self.stopped_by) * self._include_stop]


class SampledAnswer(SampledText):
    """The answer of a model that may think before it."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        stop: Sequence[str],
        include_stop: bool,
        marks: ThoughtMarks,
        opened: bool,
        calls: "CallReader | None" = None,
    ) -> None:
        """Begin behind a prompt, which may have opened the thought; `calls` reads those of tools in the answer."""
        super().__init__(tokenizer, stop, include_stop, calls)
        self._answering = False
        self._reader = make_reader(marks, tokenizer, calls=calls is not None)
        self._position = OPENED if opened else Position(header=None if marks.message is None else ())
        self._text_marks = [mark.text for pair in marks.pairs for mark in pair if mark.token_id is None]
        self._blank = ""
        self._pending: list[int] = []

    def _decoded(self, token_id: int) -> str:
        self._pending.append(token_id)
        return "" if self._is_part() else self._read()

    def _rest(self) -> str:
        text = self._read() if self._pending else ""
        text += self._take(self._reader.end(self._position))
        return text if self._answering or self._has_thought else self._blank

    @property
    def _has_thought(self) -> bool:
        return self._position.inside or self._position.closed

    def _is_part(self) -> bool:
        """True while the pending tokens may be part of a character or a mark of text, read as a whole."""
        try:
            text = self._tokenizer.decode_bytes(self._pending).decode()
        except UnicodeDecodeError as error:
            return error.reason == "unexpected end of data"
        return any(text.endswith(mark[:length]) for mark in self._text_marks for length in range(1, len(mark)))

    def _read(self) -> str:
        """Read the pending tokens; returns what of them is the answer's."""
        pending, self._pending = self._pending, []
        inside = self._position.inside
        text = self._take(self._reader.read(pending, self._position))
        if inside or self._position.inside:
            self.thought_tokens += len(pending)
        return text

    def _take(self, reading: StepReading) -> str:
        self._position = reading.position
        self._thought += reading.text[: reading.thought_chars]
        text = reading.text[reading.thought_chars :]
        if self._answering:
            return text
        if reading.position.phase is Phase.ANSWER:
            self._answering = True
            return text.lstrip() if self._has_thought else self._blank + text
        self._blank += text
        return ""
