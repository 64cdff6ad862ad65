"""Ends of steps: after which tokens one may end, and whether it has, by its delimiter and its markers."""

import re
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from espalier.engine.models.tokenizer import TextTokenizer
from espalier.engine.work import Generate

_WINDOW = 32
"""Last tokens of a step that are looked at for a marker, with what stands before and behind it."""
_WORD = re.compile(rb"\w*", re.ASCII)


class StepEnds:
    """Finds the ends of steps in the tokens of one model."""

    def __init__(self, tokenizer: TextTokenizer, ids: int) -> None:
        """Look at a model's tokens, those of ids below `ids`."""
        self._tokenizer = tokenizer
        self._ids = ids
        self._of_byte: dict[int, np.ndarray] = {}
        self._after_word: np.ndarray | None = None
        self._of_rules: dict[frozenset[tuple[str, tuple[str, ...]]], np.ndarray] = {}

    def may_end(self, rules: frozenset[tuple[str, tuple[str, ...]]]) -> np.ndarray:
        """Return which tokens can end a step under one of some delimiters and markers, bool `[ids]`."""
        if (found := self._of_rules.get(rules)) is None:
            found = np.zeros(self._ids, dtype=bool)
            for delimiter, markers in rules:
                if delimiter:
                    found |= self._with_byte(delimiter.encode()[-1])
                if markers:
                    found |= self._beyond_words()
            self._of_rules = {rules: found}  # batches have the same rules again and again
        return found

    def ended(self, work: Generate, token_ids: np.ndarray) -> bool:
        """Return whether a step has ended with the last of its tokens.

        A step of nothing but blanks is no step: a delimiter counts once there is content before it.
        """
        if work.delimiter and self._with_byte(work.delimiter.encode()[-1])[token_ids[-1]]:
            return work.delimiter in self._tokenizer.decode(token_ids.tolist()).lstrip()[1:]
        if work.markers and self._beyond_words()[token_ids[-1]]:
            return bool(_begun_by(work.markers).search(self._tokenizer.decode(token_ids[-_WINDOW:].tolist()).lstrip()))
        return False

    def _with_byte(self, byte: int) -> np.ndarray:
        if byte not in self._of_byte:
            self._of_byte[byte] = self._where(lambda token: byte in token)
        return self._of_byte[byte]

    def _beyond_words(self) -> np.ndarray:
        """Tokens of more than letters and digits: a word is over with one of these."""
        if self._after_word is None:
            self._after_word = self._where(lambda token: not _WORD.fullmatch(token))
        return self._after_word

    def _where(self, holds: Callable[[bytes], bool]) -> np.ndarray:
        found = np.zeros(self._ids, dtype=bool)
        table = self._tokenizer.token_bytes
        found[: len(table)] = [holds(token) for token in table]
        return found


@lru_cache(16)
def _begun_by(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Matches where a sentence after another begins with one of `markers`, with the character after it."""
    return re.compile(rf"(?:[.!?…:]['\")\]]?\s+|\n\s*)(?:{'|'.join(map(re.escape, markers))})\W")
