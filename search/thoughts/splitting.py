"""Tokens of plain sampling, told apart into thought and answer as they come, for conversations that are streamed."""

from espalier.engine.models.tokenizer import TextTokenizer
from espalier.search.thoughts.channels import make_reader
from espalier.search.thoughts.marks import ThoughtMarks
from espalier.search.thoughts.reading import OPENED, Phase, Position, StepReading


class ThoughtSplitter:
    """Takes the tokens of one choice.

    Attributes:
        tokens: how many of them belong to the thought, marks included.
    """

    def __init__(self, marks: ThoughtMarks, tokenizer: TextTokenizer, opened: bool) -> None:
        """Begin behind a prompt, which may have opened the thought."""
        self.tokens = 0
        self._answering = False
        self._reader = make_reader(marks, tokenizer)
        self._tokenizer = tokenizer
        headed = marks.message is not None
        self._position = OPENED if opened else Position(header=() if headed else None)
        self._text_marks = [mark.text for pair in marks.pairs for mark in pair if mark.token_id is None]
        self._thought = self._blank = ""
        self._pending: list[int] = []
        self._taken = 0

    @property
    def thought(self) -> str:
        """The thought as far as it is known, without blank space around it."""
        return self._thought.strip()

    def add(self, token_id: int) -> str:
        """Take a token; returns the text of the answer that it brings, empty within the thought."""
        self._pending.append(token_id)
        return "" if self._is_part() else self._read()

    def end(self) -> str:
        """Take no more tokens; returns what was held back of the answer."""
        text = self._read() if self._pending else ""
        text += self._take(self._reader.end(self._position))
        return text if self._answering or self._has_thought else self._blank

    def take_thought(self) -> str:
        """The part of the thought that is new since the last call."""
        start, self._taken = self._taken, len(self.thought)
        return self.thought[start:]

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
            self.tokens += len(pending)
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
