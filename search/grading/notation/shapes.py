r"""Reads what LaTeX sets one below the other: column vectors and systems, as lists in one line."""

import re

_ROWS = re.compile(
    r"(\\\{|[(\[]|)\s*\\begin\s*\{(\w+)\*?\}\s*(?:\{[lcr|\s]*\}|\[[lcr]\])?(.*)\\end\s*\{\2\*?\}\s*(\\\}|[)\]]|)\s*"
    r"(\^\s*(?:T|\{\s*(?:T|\\top|\\intercal|\\text\{T\})\s*\}|\\top|\\intercal))?\.?"
)
_TRANSPOSED = re.compile(r"[(\[](.*)[)\]]\s*\^\s*(?:T|\{\s*(?:T|\\top|\\intercal|\\text\{T\})\s*\}|\\top|\\intercal)")
_MATRICES = ("pmatrix", "bmatrix")
_BARE_MATRICES = ("matrix", "smallmatrix", "array")
"""Matrices whose brackets stand around them."""
_SYSTEMS = ["cases", "rcases", "dcases", "array", "aligned", "align", "gathered", "split", "alignedat"]
_NAMED = re.compile(r"[^=&]{1,40}(?<!&)=\s*(?=[(\[]?\s*\\begin)")
_ANGLES = re.compile(r"<([^<>]*,[^<>]*)>")
_RELATION = re.compile(r"=|[<>]|\\(?:le|ge|ne|in)(?![A-Za-z])")
_ALIGNED = re.compile(r"&\s*(?==|[<>]|\\(?:le|ge|ne|in)(?![A-Za-z]))|(?<=[=<>])\s*&")
_CONJUNCTION = re.compile(r"\s*(?:\\text\{\s*and\s*\}|and)?\s*[.,;]?\s*(?:\\text\{\s*and\s*\})?\s*$")


def in_one_line(text: str) -> str:
    r"""A column vector, or one in angle brackets, as `\langle 1, 2\rangle`; a system as `x=1, y=2`."""
    if "\\\\" in text and "\\begin" not in text:
        return _system(re.split(r"\\\\", text)) or text
    if "\\begin" in text and (named := _NAMED.match(text)):
        return named[0] + in_one_line(text[named.end() :])
    if text.startswith("<") and (angles := _ANGLES.fullmatch(text)):
        return f"\\langle {angles[1]}\\rangle"
    if text.endswith(("T", "}", "p", "l")) and "^" in text and (row := _TRANSPOSED.fullmatch(text)):
        return f"\\langle {row[1]}\\rangle" if "\\begin" not in text and "," in row[1] else _rows(text)
    return _rows(text) if "\\begin" in text else text


def _rows(text: str) -> str:
    found = _ROWS.fullmatch(text)
    if not found or "\\begin" in found[3]:
        return text
    opening, name, inside, closing, transposed = found.groups()
    rows = [row.strip() for row in re.split(r"\\\\", inside)]
    rows = rows if rows[-1] else rows[:-1]
    if name in _MATRICES or (name in _BARE_MATRICES and opening in ("(", "[") and closing in (")", "]")):
        members = rows[0].split("&") if transposed and len(rows) == 1 else [] if transposed else rows
        alone = len(members) > 1 and not any(sign in member for member in members for sign in "&,")
        return f"\\langle {', '.join(map(str.strip, members))}\\rangle" if alone else text
    if name not in _SYSTEMS or transposed or closing:
        return text
    return _system(rows) or text


def _system(rows: list[str]) -> str:
    """Equations or inequalities as a list; empty if one is none, as the cases of a function."""
    rows = [_CONJUNCTION.sub("", _ALIGNED.sub("", row)).strip() for row in rows]
    return ", ".join(rows) if all(_RELATION.search(row) and "&" not in row for row in rows) else ""
