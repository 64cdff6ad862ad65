"""Ends of steps: after which tokens one may end, and whether it has, by its delimiter and its markers."""

import re
from collections.abc import Callable
from functools import cached_property, lru_cache

import numpy as np

from espalier.engine.models.tokenizer import TextTokenizer
from espalier.engine.work import Generate, StepMarks

Rule = tuple[str, tuple[str, ...], StepMarks]
"""Delimiter, markers and marks of some work."""
_WINDOW = 32
"""Last tokens of a step that are looked at for a marker, with what stands before and behind it."""
_IN_LETTER = re.compile(rb"(?:[\xc2-\xf4]|[\xe0-\xf4][\x80-\xbf]|[\xf0-\xf4][\x80-\xbf]{2})\Z")
"""The end of bytes that begin a letter of UTF-8 and do not finish it."""
_WORD = re.compile(rb"\w*", re.ASCII)


class StepEnds:
    """Finds the ends of steps in the tokens of one model."""

    def __init__(self, tokenizer: TextTokenizer, ids: int) -> None:
        """Look at a model's tokens, those of ids below `ids`."""
        self._tokenizer = tokenizer
        self._ids = ids
        self._of_byte: dict[int, np.ndarray] = {}
        self._of_rules: dict[frozenset[Rule], np.ndarray] = {}

    def may_end(self, rules: frozenset[Rule]) -> np.ndarray:
        """Return which tokens can end a step under one of some rules, bool `[ids]`."""
        if (found := self._of_rules.get(rules)) is None:
            found = np.zeros(self._ids, dtype=bool)
            for delimiter, markers, marks in rules:
                found[list(marks.end_ids)] = True
                if marks.end_text:
                    found |= self._with_byte(marks.end_text.encode()[-1])
                if delimiter:
                    found |= self._with_byte(delimiter.encode()[-1])
                if markers:
                    found |= self._beyond_words
            self._of_rules = {rules: found}  # batches have the same rules again and again
        return found

    def ended(self, work: Generate, token_ids: np.ndarray) -> bool:
        """Return whether a step has ended with the last of its tokens.

        A step of nothing but blanks is no step: a delimiter counts once there is content before it.
        """
        delimiter = work.delimiter.encode()
        if delimiter and self._with_byte(delimiter[-1])[token_ids[-1]]:
            # A long step is decoded as a whole only where it seems to end.
            last = token_ids[-max(_WINDOW, len(delimiter) + 1) :]
            text = self._tokenizer.decode(last.tolist())
            if work.delimiter in text and len(last) < len(token_ids):
                text = self._tokenizer.decode(token_ids.tolist())
            return work.delimiter in text.lstrip()[1:]
        if work.markers and self._beyond_words[token_ids[-1]]:
            return bool(_begun_by(work.markers).search(self._last(token_ids).lstrip()))
        return False

    def marked(self, marks: StepMarks, token_ids: np.ndarray) -> bool:
        """Return whether the last of a step's tokens is or completes a mark."""
        if token_ids[-1] in marks.end_ids:
            return True
        text = marks.end_text
        return bool(text and self._with_byte(text.encode()[-1])[token_ids[-1]]) and text in self._last(token_ids)

    def cuts(self, marks: StepMarks, token_ids: np.ndarray) -> bool:
        """Return whether a step that ended here would cut a letter of several bytes or an unbroken text."""
        if _IN_LETTER.search(self._tokenizer.decode_bytes(token_ids[-_WINDOW:].tolist())):
            return True
        text = self._last(token_ids)
        return any(text.endswith(part[:length]) for part in marks.unbroken for length in range(1, len(part)))

    def _last(self, token_ids: np.ndarray) -> str:
        return self._tokenizer.decode(token_ids[-_WINDOW:].tolist())

    def _with_byte(self, byte: int) -> np.ndarray:
        if byte not in self._of_byte:
            self._of_byte[byte] = self._where(lambda token: byte in token)
        return self._of_byte[byte]

    @cached_property
    def _beyond_words(self) -> np.ndarray:
        """Tokens of more than letters and digits: a word is over with one of these."""
        return self._where(lambda token: not _WORD.fullmatch(token))

    def _where(self, holds: Callable[[bytes], bool]) -> np.ndarray:
        found = np.zeros(self._ids, dtype=bool)
        table = self._tokenizer.token_bytes
        found[: len(table)] = [holds(token) for token in table]
        return found


@lru_cache(16)
def _begun_by(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Matches where a sentence after another begins with one of `markers`, with the character after it."""
    return re.compile(rf"(?:[.!?…:]['\")\]]?\s+|\n\s*)(?:{'|'.join(map(re.escape, markers))})\W")
