"""Finding the answer in a solution's text, and telling whether two answers are spelled alike."""

import re
from fractions import Fraction

_BOXED = "\\boxed"
_HASHES = re.compile(r"^####\s*(-?[\d.,/]+)\s*$", re.MULTILINE)
_SAID = re.compile(r"(?:final\s+)?answer\s+is\s*:?\s*(.+?)(?:\.\s|\.?$)", re.IGNORECASE | re.MULTILINE)
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:/\d+)?")


def extract_answer(text: str) -> str:
    r"""The answer a solution gives; empty when it gives none.

    Looks for the last `\boxed{}` with balanced braces, then GSM8K's `#### `, then "the answer is".
    """
    if (boxed := last_boxed(text)) is not None:
        return boxed
    for pattern in (_HASHES, _SAID):
        if found := pattern.findall(text):
            return found[-1].strip().strip("$").strip()
    return ""


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete `\boxed{...}`, nested braces kept; None when there is none."""
    start = text.rfind(_BOXED)
    while start >= 0:
        opening = start + len(_BOXED)
        if text[opening : opening + 1] == "{" and (closing := _closing_brace(text, opening)) is not None:
            return text[opening + 1 : closing].strip()
        start = text.rfind(_BOXED, 0, start)
    return None


def canonical(answer: str) -> str:
    """A spelling under which equal answers usually meet: spacing, dollars, thousands commas and plain numbers.

    It groups votes inside a search, where speed matters; whether an answer is right is the grader's to say.
    """
    text = (
        answer.strip()
        .strip("$")
        .rstrip(".")
        .replace("\\!", "")
        .replace("\\dfrac", "\\frac")
        .replace("\\tfrac", "\\frac")
    )
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", re.sub(r"\s+", "", text))
    if _NUMBER.fullmatch(text):
        try:
            return str(Fraction(text))
        except (ValueError, ZeroDivisionError):
            return text
    return text


def _closing_brace(text: str, opening: int) -> int | None:
    depth = 0
    for i in range(opening, len(text)):
        if text[i] == "{" and text[i - 1] != "\\":
            depth += 1
        elif text[i] == "}" and text[i - 1] != "\\":
            depth -= 1
            if depth == 0:
                return i
    return None
