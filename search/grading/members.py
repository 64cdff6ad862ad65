"""The members of lists, tuples, vectors, sets and intervals."""

import re
from typing import NamedTuple

from espalier.search.grading.reading import read

_DELIMITERS = {"(": ")]", "[": ")]", "\\{": ("\\}",), "\\langle": ("\\rangle",)}
_DECIMAL_COMMA = re.compile(r"-?\d+,\d+|-?\d+")
_LETTER = re.compile(r"[A-Za-z]")


class Members(NamedTuple):
    """A list, tuple, set or interval: its delimiters, empty for a bare list, and its members."""

    opening: str
    closing: str
    members: list[str]

    @property
    def ordered(self) -> bool:
        """True if the order of the members matters."""
        return self.opening not in ("", "\\{")

    @property
    def is_point(self) -> bool:
        """True for a tuple, an open interval, or a vector."""
        return (self.opening, self.closing) in (("(", ")"), ("\\langle", "\\rangle"))


def members_of(value: str) -> Members | None:
    r"""The members of a list, split at commas; None if `value` is no list. Each `\pm` in a set gives two members."""
    opening = next((mark for mark in _DELIMITERS if value.startswith(mark)), "")
    closing = next((mark for mark in _DELIMITERS.get(opening, "") if value.endswith(mark)), "")
    inside = value[len(opening) : len(value) - len(closing)] if closing else ""
    members = _split(inside) if closing else None
    if members is None or (len(members) < 2 and opening != "\\{"):
        opening = closing = ""
        members = _split(value)
    if members is None or not all(members):
        return None
    if opening in ("", "\\{"):
        members = [two for member in members for two in _both_signs(member)]
        return Members(opening, closing, members) if len(members) > 1 or opening else None
    return Members(opening, closing, members)


def _split(text: str) -> list[str] | None:
    """Split `text` at commas outside brackets, or at semicolons between decimal commas; None for unpaired brackets."""
    if ";" in text and all(map(_DECIMAL_COMMA.fullmatch, parts := [part.strip() for part in text.split(";")])):
        return parts
    depth, start, parts = 0, 0, list[str]()
    for place, sign in enumerate(text):
        if sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
            if depth < 0:
                return None
        elif sign in ",;" and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    return [*parts, text[start:].strip()] if depth == 0 else None


def _both_signs(member: str) -> list[str]:
    if member.count("\\pm") != 1:
        return [member]
    before, after = member.split("\\pm")
    return [f"{before}+{after}" if before.strip(" =") else before + after, f"{before}-{after}"]


def by_name(members: list[str]) -> list[str]:
    """The members of a list in the order of their names, if each is a letter: of y=2, x=1 the x is first."""
    names = [read(member).name for member in members]
    if len(set(names)) < len(names) or not all(_LETTER.fullmatch(name) for name in names):
        return members
    return [member for _, member in sorted(zip(names, members, strict=True))]
