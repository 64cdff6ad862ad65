r"""Finds the answer in `\boxed{}` and `\fbox{}`.

The last box counts, together with those beside it that belong to the same answer: separated by commas, conjunctions,
space or new lines alone, and by the names of unknowns, as in `x=\boxed{1}, y=\boxed{2}`. If only space separates them,
their contents must be numbers or have names: formulas may be two forms of one answer. Words between two boxes correct
the first.

A box without braces holds the number, letter or formula that follows. An empty box, and `\boxed` before a word, mention
the command and hold nothing. A last box that is not closed was cut off: its answer is not known, and the boxes before
it were no longer the answer, so there is none.
"""

import re
from typing import NamedTuple

from espalier.search.grading.notation import languages
from espalier.search.grading.reading import bare, read

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BRACE = re.compile(r"(?<!\\)[{}]")
_UNBRACED = re.compile(r"(?!-?\\(?:boxed|fbox))(?:\([^()\n]{1,80}\)|-?\\?[^\s${}\\]+(?:\{[^{}\n]{0,80}\}){0,2})")
"""Content of a box without braces: TeX would take one digit, models mean the whole number."""
_WORDS = f"{languages.AND_OR}|{languages.AND_OR_LETTERS}"
_CONJUNCTION = rf"(?:(?<![\w\\])(?:{_WORDS})(?!\w)|{languages.AND_OR_UNSPACED})"
_NAME = r"(?:\\[a-z]+|[A-Za-z])(?:_\{?\w+\}?|'|\([\w, ]{1,12}\))?"
_NAMED = re.compile(rf"(?<![A-Za-z\\+*/^)}}-])({_NAME})\s*&?\s*=\s*&?\s*(?:\$|\\[(\[,;! ])?\s*$")
_BESIDE = re.compile(
    rf"(?:[\s$,;&*、，；]|\\[()\[\],;:!> ]|\\\\|\\(?:q?quad|l?or|vee)(?![A-Za-z])|(?<=\n)[-•]\s|"
    rf"(?<![A-Za-z\\]){_NAME}\s*&?\s*=|{_CONJUNCTION}|\\(?:text|textrm|mathrm|mbox)\{{[\s,;]*(?:{_WORDS}|{languages.AND_OR_UNSPACED})?[\s,;]*\}})*+",
    re.IGNORECASE,
)
"""Text between two boxes that belong to one answer."""
_JOINT = re.compile(rf"[,;&、，；]|\\\\|\\q?quad|\\l?or(?![A-Za-z])|\\vee|{_CONJUNCTION}", re.IGNORECASE)
"""Text between boxes that makes them one answer whatever they hold; a mere space or new line does not."""
_MAX_BETWEEN = 80
_MAX_BOXES = 16
_MAX_UNBRACED = 1000
_MAX_NAME = 40


class Boxed(NamedTuple):
    """Content of the boxes of a text.

    Attributes:
        answer: content of the last box, with the boxes beside it; empty without one.
        last: where the last of all boxes starts; -1 without one.
        cut: where a last box starts that is not closed; -1 if there is none.
    """

    answer: str = ""
    last: int = -1
    cut: int = -1


class _Box(NamedTuple):
    name: str
    content: str


def boxed(text: str) -> Boxed:
    """Read the last box of a text, and those beside it."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return Boxed()
    closings, last = _closing_braces(text), boxes[-1].start()
    found: list[_Box] = []
    after = 0
    for box in reversed(boxes):
        braced = box.end() in closings
        if not braced and text.startswith("{", box.end()):
            if found:
                break
            return Boxed(last=last, cut=box.start())
        inside = text[box.end() + 1 : closings[box.end()]] if braced else _unbraced(text, box.end())
        end = closings[box.end()] + 1 if braced else box.end() + len(inside)
        content = bare(inside)
        if not content or (found and end > after):  # it encloses the box after it
            continue
        name = _NAMED.search(text, max(0, box.start() - _MAX_NAME), box.start())
        this = _Box(name[1] if name else "", content)
        if found and (len(found) == _MAX_BOXES or not _belong(this, found[-1], text[end:after])):
            break
        found.append(this)
        after = box.start()
    return Boxed(_joined(found[::-1]), last)


def content_before_brace(text: str) -> str | None:
    """The content of a box whose text begins behind its opening brace; None if the box is not closed."""
    depth = 1
    for brace in _BRACE.finditer(text):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return text[: brace.start()].strip()
    return None


def closes_all_braces(text: str) -> bool:
    """Return whether each brace has its other one."""
    return len(_BRACE.findall(text)) == 2 * len(_closing_braces(text))


def _belong(one: _Box, other: _Box, between: str) -> bool:
    """Return whether two boxes are parts of one answer, by what stands between them."""
    if len(between) > _MAX_BETWEEN or not _BESIDE.fullmatch(between):
        return False
    if _JOINT.search(between) or (one.name and other.name and one.name != other.name):
        return True
    return read(one.content).number is not None and read(other.content).number is not None


def _joined(boxes: list[_Box]) -> str:
    """The contents of boxes that are one answer, each once; with the names of several unknowns."""
    named = len(boxes) > 1 and all(box.name for box in boxes) and len({box.name for box in boxes}) > 1
    by_value: dict[str, str] = {}
    for box in boxes:
        content = f"{box.name}={box.content}" if named and "=" not in box.content else box.content
        by_value.setdefault((box.name if named else "") + read(box.content).key, content)
    return ", ".join(by_value.values())


def _unbraced(text: str, start: int) -> str:
    """The number, letter or formula after a box without braces; empty for a word."""
    found = _UNBRACED.match(text, start, start + _MAX_UNBRACED)
    return found[0] if found and (re.search(r"[\d\\(]", found[0]) or len(found[0]) == 1) else ""


def _closing_braces(text: str) -> dict[int, int]:
    """Map the index of each opening brace to that of its closing one; escaped and unmatched braces are left out."""
    open_ones: list[int] = []
    closings: dict[int, int] = {}
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            open_ones.append(brace.start())
        elif open_ones:
            closings[open_ones.pop()] = brace.start()
    return closings
