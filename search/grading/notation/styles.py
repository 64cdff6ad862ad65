r"""Reads what LaTeX sets in another font: letters and names of functions as plain ones, words and units as text."""

import re

from espalier.search.grading.notation.units import symbol, upright_unit

_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_FORMULA_GROUP = re.compile(r"\\text(?=\{\s*-?\s*\\(?:frac|sqrt)(?![A-Za-z]))")
_QUOTIENT = re.compile(r"\\frac\{\s*\\text\{([^{}]*)\}\s*\}\{\s*\\text\{([^{}]*)\}\s*(\^\{?\d\}?)?\s*\}")
_TWO_LETTERS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2}|[^\W\d_A-Za-z]")
_POINTS = re.compile("[A-Z]{2,3}")
_LETTER = re.compile(r"[A-Za-z]|\\[A-Za-z]+")
_UNIT_BEFORE = re.compile(r"\\text\{[^{}]*\}(?:\^\{?-?\d\}?)?(?:\s|/|\\cdot)*$")
_MEASURED = re.compile(r"(?:[\d})\]°]|\\(?:pi|infty))\s*$")
_UNIT_AFTER = re.compile(r"(?:\^\{?-?\d\}?)?\s*(?:$|[,;.)\]}/&]|\\text|\\cdot\s*\\text|\\\\)")
_APPLIED = re.compile(r"\s*[\^(\\{_A-Za-z0-9|]")
_ENDS_IN_COMMAND = re.compile(r"\\[A-Za-z]+$")

_NAMES = """sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan arccot arcsec arccsc ln log exp max min
gcd lcm det dim ker deg arg"""
_OTHER_NAMES = {
    "sin": "sen",
    "tan": "tg",
    "cot": "ctg cotg ctan",
    "csc": "cosec",
    "arcsin": "arcsen asin",
    "arccos": "acos",
    "arctan": "arctg atan",
    "arccot": "arcctg",
    "sinh": "sh",
    "cosh": "ch",
    "log": "lg",  # to base 10, as math-verify reads \log
}
_FUNCTIONS = {name: name for name in _NAMES.split()}
_FUNCTIONS |= {name: function for function, names in _OTHER_NAMES.items() for name in names.split()}


def function(name: str) -> str:
    r"""The LaTeX command of a function by one of its names: `\tan ` for tg."""
    return f"\\{_FUNCTIONS[name]} "


def upright(text: str) -> str:
    r"""Unwrap what is no word: `\text{e}^2` becomes `e^2`, `\text{arctan} 2` becomes `\arctan 2`.

    Units after a number keep their `\text`: `5\text{m}` is five metres, and 5m a product.
    """
    if "\\text" not in text:
        return text
    text = _QUOTIENT.sub(_unit_quotient, text)
    before = None
    while text != before and "\\text{" in text:  # what was nested comes out from the inside
        before, text = text, _TEXT.sub(_unwrapped, text)
    for found in reversed(list(_FORMULA_GROUP.finditer(text))):
        text = text[: found.start()] + _without_braces(text[found.end() :], text[: found.start()])
    return text


def _without_braces(text: str, before: str) -> str:
    """Drop the braces around the formula at the start of `text`, unless TeX needs them after what is `before` it."""
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign == "{") - (sign == "}")
        if depth == 0:
            needed = before.endswith(("^", "_", "}")) or _ENDS_IN_COMMAND.search(before)
            return text if needed else text[1:place] + text[place + 1 :]
    return text


def _unit_quotient(found: re.Match[str]) -> str:
    above, below = found[1].strip(), found[2].strip()
    return f"\\text{{{above}/{below}{found[3] or ''}}}" if symbol(above) and symbol(below) else found[0]


def _unwrapped(found: re.Match[str]) -> str:
    inside = found[1].strip()
    before, after = found.string[: found.start()], found.string[found.end() :]
    if unit := _unit(found[1], before, after):
        return f"\\text{{{unit}}}"
    space = " " if _ENDS_IN_COMMAND.search(before) else ""
    if inside in _FUNCTIONS and _APPLIED.match(after):
        return space + function(inside)
    if _LETTER.fullmatch(inside) or (_POINTS.fullmatch(inside) and not symbol(inside)):
        return space + inside
    return found[0] if _TWO_LETTERS.search(inside) or not inside else space + found[1]


def _unit(inside: str, before: str, after: str) -> str:
    """The unit of measure that stands between `before` and `after`; empty if it is none, or measures nothing there."""
    measured = _MEASURED.search(before) or _UNIT_BEFORE.search(before)
    if not measured or not _UNIT_AFTER.match(after):
        return ""
    return inside if before.endswith("°") and inside in ("C", "F") else upright_unit(inside)
