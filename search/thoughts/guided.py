"""A matcher of an answer that lets the thought before it be free, where both are sampled in one go."""

from dataclasses import dataclass, replace

import numpy as np

from espalier.engine.guidance.matcher import Matcher
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.search.thoughts.marks import ThoughtMarks

_FREE = 255


@dataclass(frozen=True, slots=True)
class ThoughtEnds:
    """The ends of a thought as tokens, and where they are none as text.

    Attributes:
        tokenizer: of the generator.
        opening: the token that opens a thought in place of the answer's first word; None where that is no token.
        closing: the tokens behind which the answer begins; empty where its mark is text.
        text: that text, in UTF-8.
        forbidden: tokens that are not drawn within a thought: those that would end the text.
    """

    tokenizer: TextTokenizer
    opening: int | None
    closing: tuple[int, ...] = ()
    text: bytes = b""
    forbidden: tuple[int, ...] = ()

    @classmethod
    def of(cls, marks: ThoughtMarks, tokenizer: TextTokenizer, forbidden: tuple[int, ...] = ()) -> "ThoughtEnds":
        """The ends of a checkpoint's thoughts; an answer's header belongs to them."""
        token = marks.closing.token_id
        closing = tuple(tokenizer.encode(marks.direct_header)) or (() if token is None else (token,))
        return cls(tokenizer, marks.opening.token_id, closing, marks.closing.text.encode(), forbidden)


@dataclass(slots=True)
class AfterThought:
    """A `Matcher`: anything within a thought, what `answer` allows behind it, or at once where there is none.

    Attributes:
        answer: what binds the answer.
        ends: where a thought begins and ends.
        inside: whether the next token belongs to a thought.
        begun: whether anything has been written.
        last: the last tokens of the thought; of a mark that is text, their bytes.
    """

    answer: Matcher
    ends: ThoughtEnds
    inside: bool = False
    begun: bool = False
    last: tuple[int, ...] | bytes = ()

    @property
    def error(self) -> str:
        """See `Matcher`."""
        return self.answer.error

    def allow(self, bits: np.ndarray) -> None:
        """See `Matcher`."""
        if self.inside:
            bits[:] = _FREE
            for token in self.ends.forbidden:
                bits[token // 8] &= ~np.uint8(1 << token % 8)
            return
        self.answer.allow(bits)
        if not self.begun and (opening := self.ends.opening) is not None:
            bits[opening // 8] |= np.uint8(1 << opening % 8)

    def advance(self, token_id: int) -> None:
        """See `Matcher`."""
        if self.inside or (not self.begun and token_id == self.ends.opening):
            self.inside = not self._closed_by(token_id)
        else:
            self.answer.advance(token_id)
        self.begun = True

    def give_up(self) -> None:
        """See `Matcher`."""
        self.answer.give_up()

    def copy(self) -> "AfterThought":
        """See `Matcher`."""
        return replace(self, answer=self.answer.copy())

    def _closed_by(self, token_id: int) -> bool:
        closing, text = self.ends.closing, self.ends.text
        if closing:
            self.last = (*self.last, token_id)[-len(closing) :]
            return self.last == closing
        self.last = (bytes(self.last) + self.ends.tokenizer.decode_bytes([token_id]))[-2 * len(text) - 64 :]
        return text in self.last
