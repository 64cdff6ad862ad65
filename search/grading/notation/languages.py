"""Words of several languages that introduce an answer, explain it, or follow its number; they stand in `words.toml`."""

import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

_TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))


class Language(NamedTuple):
    """Words of one language; `words.toml` says what each list is."""

    answer: str
    verbs: str = ""
    then: str = ""
    reasons: str = ""
    nothing: str = ""
    not_right: str = ""
    endings: str = ""
    of_what: str = ""
    spaced: bool = True
    verb_last: bool = False


LANGUAGES = {name: Language(**words) for name, words in _TABLE["languages"].items()}
UNITS = {name.lower(): symbol for symbol, names in _TABLE["units"].items() for name in names.split()}
"""Units by their names in lower case."""
MEASURES: dict[str, str] = _TABLE["measures"]
"""Symbols of units, each with a number and the unit that it is this many of."""
WORDS = {what: frozenset(words.split()) for what, words in _TABLE["words"].items()}
"""Words of English beside a number; `words.toml` says what each set is."""
PEOPLE = frozenset(_TABLE["people"].split())
"""Nouns, in the singular, that name people."""
PHRASES: dict[str, str] = _TABLE["phrases"]
"""Phrases of the same meaning by one of them, or by a formula."""
NUMBERS = {word: value for value, word in enumerate(_TABLE["numbers"]["units"].split())}
NUMBERS |= {word: 10 * value for value, word in enumerate(_TABLE["numbers"]["tens"].split(), start=2)}
"""English numbers below a hundred."""
PARTS = {word: value for value, words in enumerate(_TABLE["numbers"]["parts"].split(", "), 2) for word in words.split()}
"""English names of parts, in the singular, with how many make a whole."""
FUNCTIONS = {name: command for command, names in _TABLE["functions"].items() for name in (command, *names.split())}
"""Functions' LaTeX commands, without backslash, by their names."""
SIGNS: dict[str, str] = _TABLE["signs"]
"""Signs that stand for a LaTeX command, by that without backslash."""
ASCII_SIGNS: dict[str, str] = _TABLE["ascii_signs"]
"""Signs that mean the same as one of ASCII, or as the degree's, by that."""
SCALES = {name.lower(): int(power) for power, names in _TABLE["scales"].items() for name in names.split()}
"""Words behind a number, in lower case, by which power of ten it is multiplied."""


def listed(phrases: str) -> list[str]:
    """The phrases of a list, the longest first, so that none hides a longer one."""
    return sorted((phrase.strip() for phrase in phrases.split(", ")), key=len, reverse=True) if phrases else []


def any_of(phrases: str) -> str:
    """A pattern of the phrases of a list; a blank in one is any blank."""
    return "|".join(re.escape(phrase).replace(r"\ ", r"\s+") for phrase in listed(phrases))


OPTIONS = any_of(f"option, choice, {_TABLE['options']}")
ARTICLES = any_of(_TABLE["articles"])
AND_OR = any_of(f"and, or, {_TABLE['and_or']}")
AND_OR_UNSPACED = any_of(_TABLE["and_or_unspaced"])
AND_OR_LETTERS = any_of(_TABLE["and_or_letters"])
"""Patterns of words beside an answer; `words.toml` says what each list is."""
PERCENT = tuple(word.lower() for word in listed(f"percent, per cent, pct, {_TABLE['percent']}"))
