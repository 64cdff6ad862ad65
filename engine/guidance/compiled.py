"""Compiles grammars for one model; with `trial`, the only code that calls llguidance."""

import hashlib
import json
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from espalier.engine.guidance.grammar import Grammar, GrammarError
from espalier.engine.guidance.matcher import MAX_SECONDS, Matcher
from espalier.engine.models.model import Model
from espalier.engine.models.tokenizer import TextTokenizer

LIMITS = {
    "max_items_in_row": 400,
    "step_max_items": 5_000,
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""Limits of one matcher, see llguidance's `LLParserLimits`: a step takes 20 ms at most of almost any grammar, and a
compiled grammar some 40 MB."""
_TRIAL = Path(__file__).with_name("trial.py")
_MAX_COMPILE_SECONDS = 2.0
_MAX_COMPILE_BYTES = 2**26
"""CPU time and memory that a grammar may take to be compiled, and to be held; large schemas take 25 MB."""
_WAITING = 20
"""A trial may wait so many times its CPU time for a busy processor."""
_MAX_TRIED = 1024
_MAX_PREPARED = 64
_MAX_PREPARED_BYTES = 2**29
_TOO_MUCH = -1
_MAX_REASON = 400
_NO_END = "needs an end-of-sequence token, and the generator has none"
_TOO_SLOW = f"the grammar takes more than {MAX_SECONDS:g} s for one token; make it simpler"


class GrammarCompiler:
    """Compiles grammars for the tokens of one model; may be used on any thread.

    Each matcher that it gives has caches of its own: how fast one caller's texts come says nothing to another.
    """

    def __init__(self, model: Model) -> None:
        """Compile for `model`; nothing is imported or made before the first grammar."""
        # Not the model itself, whose weights may be replaced.
        self._text, self._vocab_size, self._ends = model.tokenizer, model.config.vocab_size, model.eos_token_ids
        self._lock = threading.Lock()
        self._prepared = deque[tuple[Grammar, Matcher, int]]()  # with their bytes; those nobody asks for give way
        self._tried: OrderedDict[bytes, int] = OrderedDict()  # bytes of grammars by their digest, or `_TOO_MUCH`

    def compile(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning of a text; takes seconds at most, and is nothing for the engine's thread.

        Raises:
            GrammarError: it is none, says what is not supported, allows no text, or is too complex.
        """
        self._try(grammar)
        return self._compile(grammar)

    def prepare(self, grammar: Grammar, keep: bool = True) -> None:
        """Compile a grammar, and keep that for one who asks for what is `prepared`.

        Raises:
            GrammarError: see `compile`.
        """
        size = self._try(grammar)
        matcher = self._compile(grammar)
        with self._lock:
            if keep:
                self._prepared.append((grammar, matcher, size))
            while len(self._prepared) > _MAX_PREPARED or sum(each[2] for each in self._prepared) > _MAX_PREPARED_BYTES:
                self._prepared.popleft()

    def prepared(self, grammar: Grammar) -> Matcher | None:
        """A matcher that is prepared, for this caller alone; None without one."""
        with self._lock:
            for place, (its, matcher, _) in enumerate(self._prepared):
                if its == grammar:
                    del self._prepared[place]
                    return matcher
        return None

    def _try(self, grammar: Grammar) -> int:
        """The bytes that a grammar holds once it is compiled; a new one is tried in another process.

        Raises:
            GrammarError: it takes too much to compile.
        """
        name = hashlib.sha256(grammar.source.encode()).digest()
        with self._lock:
            size = self._tried.get(name)
        if size is None:
            size = _tried(grammar)
        with self._lock:
            self._tried[name] = size
            self._tried.move_to_end(name)
            while len(self._tried) > _MAX_TRIED:
                self._tried.popitem(last=False)
        if size == _TOO_MUCH:
            most = f"{_MAX_COMPILE_SECONDS:g} s or {_MAX_COMPILE_BYTES >> 20} MiB"
            raise GrammarError(f"takes more than {most} to compile; make it simpler")
        return size

    def _compile(self, grammar: Grammar) -> "_LibraryMatcher":
        from llguidance import LLMatcher, LLParserLimits

        with self._lock:  # one at a time, and one tokenizer for all
            tokenizer, ends = self._tokenizer
        library = LLMatcher(tokenizer, grammar.source, log_level=0, limits=LLParserLimits(**LIMITS))
        matcher = _LibraryMatcher(library, ends, _Failure())
        matcher.allow(np.empty((self._vocab_size + 7) // 8, dtype=np.uint8))  # finds out whether there is a first token
        if matcher.error:
            raise GrammarError(matcher.error)
        return matcher

    @cached_property
    def _tokenizer(self) -> tuple[Any, np.ndarray]:
        from llguidance import LLTokenizer, TokenizerWrapper

        vocabulary = self._vocab_size
        ends = [i for i in self._ends if i < vocabulary]
        if not ends:
            raise GrammarError(_NO_END)
        wrapped = TokenizerWrapper(_Vocabulary(self._text, vocabulary, ends[0]))
        bits = np.zeros(8 * ((vocabulary + 7) // 8), dtype=bool)
        bits[ends] = True
        return LLTokenizer(wrapped, vocabulary, ends), np.packbits(bits, bitorder="little")


def _tried(grammar: Grammar) -> int:
    """Compile a grammar in a process of its own, which the system ends if that takes too much; see `trial`.

    Returns:
        The bytes that it holds; 0 for one with an error, which is told when it is compiled here.

    Raises:
        GrammarError: the processors were busy with other things.
    """
    limits = {"seconds": _MAX_COMPILE_SECONDS, "memory": _MAX_COMPILE_BYTES, "limits": LIMITS}
    asked = json.dumps({"source": grammar.source, **limits}).encode()
    wait = _WAITING * (1 + _MAX_COMPILE_SECONDS)
    try:
        ended = subprocess.run([sys.executable, "-P", _TRIAL], input=asked, capture_output=True, timeout=wait)
    except subprocess.TimeoutExpired:
        raise GrammarError(f"was not compiled within {wait:g} s, as the server is busy; try again later") from None
    return _TOO_MUCH if ended.returncode < 0 else int(ended.stdout or 0)


class _Vocabulary:
    """The tokenizer as the library asks for it: special tokens have no text, so no text of a grammar has them."""

    def __init__(self, tokenizer: TextTokenizer, vocabulary: int, end: int) -> None:
        table = tokenizer.token_bytes[:vocabulary]
        self.tokens = [*table, *[b""] * (vocabulary - len(table))]
        self.eos_token_id, self.bos_token_id, self.special_token_ids = end, None, []
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("texts alone")  # the wrapper then gives texts
        return self._tokenizer.encode(text)


class _Failure:
    """A failure of a compiled grammar as a whole, which all of its matchers have."""

    error = ""


class _LibraryMatcher:
    """A `Matcher` of llguidance's."""

    __slots__ = ("_ends", "_failure", "library")

    def __init__(self, library: Any, ends: np.ndarray, failure: _Failure) -> None:
        self.library, self._ends, self._failure = library, ends, failure

    @property
    def error(self) -> str:
        if self._failure.error or not self.library.is_error():
            return self._failure.error
        return _reason(self.library.get_error())

    @property
    def ended(self) -> bool:
        return bool(self.library.is_stopped())

    def allow(self, bits: np.ndarray) -> None:
        if not self._failure.error and not self.library.is_error():
            bits[:] = np.frombuffer(self.library.compute_bitmask(), dtype=np.uint8)[: len(bits)]
            return
        bits[:] = self._ends

    def advance(self, token_id: int) -> None:
        if self._failure.error:
            return
        start = time.thread_time()
        self.library.consume_token(token_id)
        if time.thread_time() - start > MAX_SECONDS:
            self.give_up()

    def give_up(self) -> None:
        self._failure.error = _TOO_SLOW

    def copy(self) -> "_LibraryMatcher":
        library = self.library if self._failure.error else self.library.deep_copy()
        return _LibraryMatcher(library, self._ends, self._failure)


def _reason(error: str) -> str:
    """The library's words for what is wrong, without its state."""
    own = takewhile(lambda line: not line.startswith(("<", "panic")), map(str.strip, error.splitlines()))
    said = " ".join(line for line in own if line.strip("^"))[:_MAX_REASON]
    return "allows no text" if "NoExtensionBias" in said else said or "cannot be compiled"
