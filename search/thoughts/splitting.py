"""Tokens of plain sampling, told apart into thought and answer as they come, for conversations that are streamed."""

from espalier.engine.models.tokenizer import TextTokenizer
from espalier.search.thoughts.marks import ThoughtMarks
from espalier.search.thoughts.reading import OPENED, Phase, Position, ThoughtReader


class ThoughtSplitter:
    """Takes the tokens of one choice until its answer begins.

    Attributes:
        tokens: how many of them belong to the thought, marks included.
        answering: whether the answer has begun; all further tokens are its own.
    """

    def __init__(self, marks: ThoughtMarks, tokenizer: TextTokenizer, opened: bool) -> None:
        """Begin behind a prompt, which may have opened the thought."""
        self.tokens = 0
        self.answering = False
        self._reader = ThoughtReader(marks, tokenizer)
        self._tokenizer = tokenizer
        self._position = OPENED if opened else Position()
        self._header, self._direct_header = (tokenizer.encode(text) for text in (marks.header, marks.direct_header))
        self._text_marks = [mark.text for mark in (marks.opening, marks.closing) if mark.token_id is None]
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
        return text if self.answering or self._has_thought else self._blank

    def take_thought(self) -> str:
        """The part of the thought that is new since the last call."""
        start, self._taken = self._taken, len(self.thought)
        return self.thought[start:]

    @property
    def _has_thought(self) -> bool:
        return self._position.inside or self._position.closed

    @property
    def _expected_header(self) -> list[int]:
        """The tokens that would begin the answer here; none within a thought, and where nothing begins answers."""
        if self._position.inside:
            return []
        return self._header if self._position.closed else self._direct_header

    def _is_part(self) -> bool:
        """True while the pending tokens may be part of a header, a character or a mark of text, read as a whole."""
        header = self._expected_header
        if header[: len(self._pending)] == self._pending:
            return len(self._pending) < len(header)
        try:
            text = self._tokenizer.decode_bytes(self._pending).decode()
        except UnicodeDecodeError as error:
            return error.reason == "unexpected end of data"
        return any(text.endswith(mark[:length]) for mark in self._text_marks for length in range(1, len(mark)))

    def _read(self) -> str:
        """Read the pending tokens; returns what of them is the answer's."""
        pending, self._pending = self._pending, []
        if pending == self._expected_header:
            self.answering = True
            return ""
        inside = self._position.inside
        reading = self._reader.read(pending, self._position)
        self._position = reading.position
        if inside or reading.position.inside:
            self.tokens += len(pending)
        self._thought += reading.text[: reading.thought_chars]
        text = reading.text[reading.thought_chars :]
        if reading.position.phase is Phase.ANSWER:
            self.answering = True
            return text.lstrip() if self._has_thought else self._blank + text
        self._blank += text
        return ""
