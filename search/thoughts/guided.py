"""A matcher of an answer that lets the thought before it be free, where both are sampled in one go."""

from dataclasses import dataclass, replace

import numpy as np

from espalier.engine.guidance.matcher import Matcher
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.search.thoughts.channels import make_reader
from espalier.search.thoughts.marks import ThoughtMarks
from espalier.search.thoughts.reading import OPENED, Phase, Position, Reader

_FREE = 255


@dataclass(frozen=True, slots=True)
class ThoughtEnds:
    """The ends of a thought as tokens, and where they are none as text.

    Attributes:
        tokenizer: of the generator.
        openings: the tokens that open a thought in place of the answer's first word; empty where that is no token.
        closings: the tokens behind which the answer begins.
        texts: such marks that are text, in UTF-8.
        headers: reads the headers of channels, behind which the answer begins; None where channels have none.
        forbidden: tokens that are not drawn within a thought: those that would end the text.
    """

    tokenizer: TextTokenizer
    openings: tuple[int, ...]
    closings: frozenset[int] = frozenset()
    texts: tuple[bytes, ...] = ()
    headers: Reader | None = None
    forbidden: tuple[int, ...] = ()

    @classmethod
    def of(cls, marks: ThoughtMarks, tokenizer: TextTokenizer, forbidden: tuple[int, ...] = ()) -> "ThoughtEnds":
        """The ends of a checkpoint's thoughts; an answer's header belongs to them."""
        openings, closings = zip(*marks.pairs, strict=True)
        return cls(
            tokenizer,
            tuple(mark.token_id for mark in openings if mark.token_id is not None),
            frozenset(mark.token_id for mark in closings if mark.token_id is not None),
            tuple(mark.text.encode() for mark in closings if mark.token_id is None),
            make_reader(marks, tokenizer) if marks.message else None,
            forbidden,
        )


@dataclass(slots=True)
class AfterThought:
    """A `Matcher`: anything within a thought, what `answer` allows behind it, or at once where there is none.

    Attributes:
        answer: what binds the answer.
        ends: where a thought begins and ends.
        inside: whether the next token belongs to a thought.
        begun: whether anything has been written.
        last: the last bytes of the thought, where marks are text.
        position: where the path is among its channels.
    """

    answer: Matcher
    ends: ThoughtEnds
    inside: bool = False
    begun: bool = False
    last: bytes = b""
    position: Position = OPENED

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
        for opening in () if self.begun else self.ends.openings:
            bits[opening // 8] |= np.uint8(1 << opening % 8)

    def advance(self, token_id: int) -> None:
        """See `Matcher`."""
        if self.inside or (not self.begun and token_id in self.ends.openings):
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
        if self.ends.headers:
            self.position = self.ends.headers.read([token_id], self.position).position
            return self.position.phase is Phase.ANSWER and self.position.header is None
        if token_id in self.ends.closings:
            return True
        longest = 2 * max(map(len, self.ends.texts), default=0) + 64
        self.last = (self.last + self.ends.tokenizer.decode_bytes([token_id]))[-longest:]
        return any(text in self.last for text in self.ends.texts)
