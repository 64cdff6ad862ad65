"""Units of measure and money, as written in answers."""

import re

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
_POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cu": "3", "cubed": "3"}
_WORD = re.compile(r"([^\W\d_]+|[$€£¥₹₩₽¢°Ω])\.?(?:\^?\{?(\d)\}?)?")
_PREPOSITIONS = ("in", "of", "for", "to", "on", "at", "from", "with", "by", "after", "before", "left", "each", "every")


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
    return name or (text if symbol(word) else "")


def product_unit(letters: str) -> str:
    """The unit that `letters` denote, if they may also be a product of variables; empty for none."""
    return _PRODUCTS.get(letters, "")


def unit_of(words: str) -> str:
    """The unit at the start of the words after a number, such as `cm^2` or `mi/h`; empty for none.

    A phrase ends at its preposition: in "18 eggs for 3 days", days are no unit.
    """
    above, _, below = re.sub(r"\s+(?:per|an?)\s+|\s*/\s*", "/", words).partition("/")
    unit = _simple(above)
    return f"{unit}/{lower}" if unit and below and (lower := _simple(below)) else unit


def units_agree(*units: str) -> bool:
    """Return whether no two `units` differ; an empty one, or one without its `/`, matches any that completes it."""
    parts = [unit.partition("/") for unit in units if unit]
    return len({above for above, _, _ in parts}) <= 1 and len({below for _, _, below in parts if below}) <= 1


def _simple(words: str) -> str:
    power = ""
    for place, word in enumerate(tokens := words.split()):
        found = _WORD.fullmatch(word.rstrip(".,;:"))
        if not found or (found[1].lower() in _PREPOSITIONS and not (found[1] == "in" and len(tokens) == 1)):
            return ""
        if found[1].lower() in _POWERS:
            power = _POWERS[found[1].lower()]
        elif unit := symbol(found[1]):
            after = _POWERS.get(tokens[place + 1].lower(), "") if place + 1 < len(tokens) else ""
            exponent = found[2] or power or after
            if unit == "°" and place + 1 < len(tokens) and tokens[place + 1][:1].upper() in ("C", "F"):
                return "°" + tokens[place + 1][0].upper()
            return f"{unit}^{exponent}" if exponent not in ("", "1") else unit
    return ""
