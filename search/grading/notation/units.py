"""Units of measure and money, as written in answers, and what they are of each other."""

import re
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import NamedTuple

from espalier.search.grading.notation import languages

_CASED = {symbol for symbol in languages.UNITS.values() if not symbol.islower() and len(symbol) > 1}
"""Symbols whose case tells them apart: mW is not MW."""
_LETTERS = {"m": "m", "g": "g", "s": "s", "h": "h", "L": "l", "N": "N", "J": "J", "W": "W", "V": "V", "K": "K"}
"""Units of one letter; other single letters are variables."""
_UPRIGHT = {"A": "ampere", "C": "coulomb"}
_UPRIGHT_AFTER_BLANK = {"d": "day", "l": "liter", "t": "ton"}
"""Letters that are units only where LaTeX sets them upright, with their names; some only after a blank."""
_PRODUCTS = {"nm": "nm", "ns": "ns"} | {letter: unit for letter, unit in _LETTERS.items() if unit != "K"}
"""Units that may be products of variables, and are where they follow a number without a blank, as in 5m."""
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_WORD = re.compile(r"([^\W\d_]+|[$€£¥₹₩₽¢°Ω])\.?(?:\^?\{?(-?\d)\}?)?")
_PREPOSITIONS = ("in", "of", "for", "to", "on", "at", "from", "with", "by", "after", "before", "left", "each", "every")
_PER = re.compile(r"\s+(?:per|an?)\s+|\s*/\s*")
MONEY = "$¢€¥₹₩₽"
"""Symbols of money."""


class Measure(NamedTuple):
    """A unit's dimension, as powers of base units, and its size in these."""

    dimension: frozenset[tuple[str, int]]
    size: Fraction


def symbol(word: str) -> str:
    """The unit that `word` names, in the singular or plural; empty for none."""
    if len(word) == 1 and word.isascii() and word.isalpha():
        return _LETTERS.get(word, "")
    if word in _CASED:
        return word
    word = word.lower()
    plural = word.endswith("s") and len(word) > 3
    return languages.UNITS.get(word) or (languages.UNITS.get(word[:-1], "") if plural else "")


def upright_unit(text: str) -> str:
    """The unit among what is set upright after a number; spelled out if its letter may be a variable, too."""
    word = text.strip()
    name = _UPRIGHT.get(word) or (_UPRIGHT_AFTER_BLANK.get(word) if text[:1].isspace() else "")
    return name or (text if word and all(map(_is_unit, re.split(r"[\s/]+", word))) else "")


def product_unit(letters: str) -> str:
    """The unit that `letters` denote, if they may also be a product of variables; empty for none."""
    return _PRODUCTS.get(letters, "")


def unit_of(words: str) -> str:
    """The unit at the start of the words after a number, such as `cm^2` or `kg m/s^2`; empty for none.

    A phrase ends at its preposition: in "18 eggs for 3 days", days are no unit.
    """
    above, *below = _PER.split(words.strip())
    powers = _powers(above)
    if not powers:
        return ""
    for part in below:
        powers.subtract(_powers(part))
    over = " ".join(_raised(name, power) for name, power in sorted(powers.items()) if power > 0)
    under = " ".join(_raised(name, -power) for name, power in sorted(powers.items()) if power < 0)
    return f"{over or 1}/{under}" if under else over


def units_agree(*units: str) -> bool:
    """Return whether no two `units` differ; an empty one, or one without its `/`, matches any that completes it."""
    parts = [unit.partition("/") for unit in units if unit]
    return len({above for above, _, _ in parts}) <= 1 and len({below for _, _, below in parts if below}) <= 1


@cache
def measure(unit: str) -> Measure:
    """The dimension and size of a unit of `unit_of`; a unit that no other defines is a base unit."""
    size, powers = Fraction(1), Counter[str]()
    for name, power in _parts(unit):
        number, _, base = languages.MEASURES.get(name, f"1 {name}").partition(" ")
        inner = measure(base) if base != name else Measure(frozenset({(name, 1)}), Fraction(1))
        size *= (Fraction(number) * inner.size) ** power
        for of, times in inner.dimension:
            powers[of] += times * power
    return Measure(frozenset((name, power) for name, power in powers.items() if power), size)


def ratio(one: str, other: str) -> Fraction | None:
    """The size of the unit `one` in the unit `other`; None if their dimensions differ."""
    first, second = measure(one), measure(other)
    return first.size / second.size if first.dimension == second.dimension else None


def _powers(words: str) -> Counter[str]:
    """The power of each unit at the start of some words, behind adjectives; empty for none."""
    powers, power, last = Counter[str](), 1, ""
    tokens = words.replace("*", " ").split()
    for place, token in enumerate(tokens):
        found = _WORD.fullmatch(token.rstrip(".,;:"))
        if not found or (found[1].lower() in _PREPOSITIONS and not (found[1] == "in" and len(tokens) == 1)):
            break
        if raised := _POWERS.get(found[1].lower()):
            if last:
                powers[last], last = powers[last] * raised, ""
            power = raised
            continue
        named = _named(found[1], int(found[2] or power))
        if named == {"°": 1} and place + 1 < len(tokens) and tokens[place + 1][:1].upper() in ("C", "F"):
            return Counter(["°" + tokens[place + 1][0].upper()])
        if not named and powers:
            break
        powers.update(named)
        last, power = next(iter(named), ""), 1 if named else power
    return powers


def _named(word: str, power: int) -> dict[str, int]:
    """The powers of the units that a word names; ms^-1 is metres per second, and no milliseconds."""
    if power < 0 and word not in ("s", "min"):
        for cut in range(1, len(word)):
            above, below = symbol(word[:cut]), symbol(word[cut:])
            if above and below and (word == "ms" or not symbol(word)):
                return {above: 1, below: power}
    return {name: times * power for name, times in _parts(symbol(word))}


def _parts(unit: str) -> Iterator[tuple[str, int]]:
    """The units that a unit of `unit_of` consists of, each with its power."""
    above, _, below = unit.partition("/")
    for sign, side in ((1, above), (-1, below)):
        for part in side.split():
            name, _, power = part.partition("^")
            if name != "1":
                yield name, sign * int(power or 1)


def _raised(name: str, power: int) -> str:
    return name if power == 1 else f"{name}^{power}"


def _is_unit(word: str) -> bool:
    return bool(symbol(re.split(r"[\^\d{-]", word, maxsplit=1)[0]))
