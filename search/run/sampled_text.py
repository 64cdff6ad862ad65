"""The text of one choice as it is sampled: decoded token by token, and cut where a stop text ends it.

The thought of a conversation's answer is no part of the text: it is kept apart, and stop texts in it end nothing.
"""

import codecs
from collections.abc import Sequence

from espalier.engine.models.tokenizer import TextTokenizer
from espalier.search.thoughts.splitting import ThoughtSplitter


class SampledText:
    """A growing text.

    Attributes:
        text: all that is decoded, without what comes from a stop text on unless that is to be kept.
        num_tokens: tokens up to the one that completed a stop text.
        stopped_by: the stop text that was found; None for none.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        stop: Sequence[str],
        include_stop: bool,
        splitter: ThoughtSplitter | None = None,
    ) -> None:
        """Begin an empty text that ends where one of `stop` appears; `splitter` takes its tokens."""
        self.text = ""
        self.num_tokens = 0
        self.stopped_by: str | None = None
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = stop
        self._include_stop = include_stop
        self._longest = max(map(len, stop), default=0)
        self._emitted = 0
        self._splitter = splitter

    @property
    def thought(self) -> str:
        """The thought before the text; empty without one."""
        return self._splitter.thought if self._splitter else ""

    @property
    def thought_tokens(self) -> int:
        """Tokens of the thought."""
        return self._splitter.tokens if self._splitter else 0

    def add(self, token_ids: Sequence[int]) -> None:
        """Take new tokens; those after a stop text are dropped."""
        for token_id in token_ids:
            if self.stopped_by is not None:
                return
            self.num_tokens += 1
            if self._splitter:
                self._extend(self._splitter.add(token_id))
            else:
                self._extend(self._decoder.decode(self._tokenizer.decode_bytes([token_id])))

    def end(self) -> None:
        """Take no more tokens; bytes that are no whole character become the replacement character."""
        if self.stopped_by is None:
            if self._splitter:
                self._extend(self._splitter.end())
            self._extend(self._decoder.decode(b"", True))

    def take_thought(self) -> str:
        """The thought since the last call."""
        return self._splitter.take_thought() if self._splitter else ""

    def take(self, ended: bool) -> str:
        """The text since the last call; before the end without what may be the beginning of a stop text."""
        end = len(self.text)
        if not ended and self.stopped_by is None:
            tail = self.text[max(self._emitted, end - self._longest + 1) :] if self._stop else ""
            held = (len(tail) - at for at in range(len(tail)) if any(s.startswith(tail[at:]) for s in self._stop))
            end -= next(held, 0)
        start, self._emitted = self._emitted, end
        return self.text[start:end]

    def _extend(self, piece: str) -> None:
        before = len(self.text)
        self.text += piece
        if not self._stop or not piece:
            return
        since = max(0, before - self._longest + 1)
        found = [(at, stop) for stop in self._stop if (at := self.text.find(stop, since)) >= 0]
        if found:
            at, self.stopped_by = min(found, key=lambda each: (each[0], len(each[1])))
            self.text = self.text[: at + len(self.stopped_by) * self._include_stop]
