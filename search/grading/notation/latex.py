r"""Normalizes the text of an answer: Unicode, LaTeX styling and markdown become plain LaTeX in ASCII.

What stands around an answer and is no part of it is stripped: markdown, HTML, quotes, punctuation, emoji.
"""

import re
import unicodedata
from collections.abc import Callable
from functools import partial

from espalier.search.grading.notation import languages
from espalier.search.grading.notation.units import symbol, upright_unit

_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_FORMULA_IN_FONT = re.compile(r"\\text(?=\{\s*-?\s*\\(?:frac|sqrt)(?![A-Za-z]))")
_WITHIN = r"(?:[^{}]++|\{(?:[^{}]++|\{(?:[^{}]++|\{[^{}]*+\})*+\})*+\})*+"
_FORMULA_ALONE = re.compile(rf"(?<![\^_}}A-Za-z]){_FORMULA_IN_FONT.pattern}\{{({_WITHIN})\}}")
"""A formula in a font that needs no braces there; behind a command they are its argument's."""
_QUOTIENT = re.compile(r"\\frac\{\s*\\text\{([^{}]*)\}\s*\}\{\s*\\text\{([^{}]*)\}\s*(\^\{?\d\}?)?\s*\}")
_TWO_LETTERS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2}|[^\W\d_A-Za-z]")
_POINTS = re.compile("[A-Z]{2,3}")
_UNIT_BEFORE = re.compile(r"\\text\{[^{}]*\}(?:\^\{?-?\d\}?)?(?:\s|/|\\cdot)*$")
_MEASURED = re.compile(r"(?:[\d})\]°]|\\(?:pi|infty))\s*$")
_UNIT_AFTER = re.compile(r"(?:\^\{?-?\d\}?)?\s*(?:$|[,;.)\]}/&]|\\text|\\cdot\s*\\text|\\\\)")
_APPLIED = re.compile(r"\s*[\^(\\{_A-Za-z0-9|]")


def function(name: str) -> str:
    r"""The LaTeX command of a function by one of its names: `\tan ` for tg."""
    return f"\\{languages.FUNCTIONS[name]} "


def until_same(change: Callable[[str], str], text: str) -> str:
    """Apply a change to a text until it makes none."""
    while (changed := change(text)) != text:
        text = changed
    return text


def upright(text: str) -> str:
    r"""Unwrap what is no word: `\text{e}^2` becomes `e^2`, `\text{arctan} 2` becomes `\arctan 2`.

    Units after a number keep their `\text`: `5\text{m}` is five metres, and 5m a product.
    """
    if "\\text" not in text:
        return text
    text = _QUOTIENT.sub(_unit_quotient, text)
    text = until_same(partial(_TEXT.sub, _unwrapped), text)  # what was nested comes out from the inside
    return _FORMULA_IN_FONT.sub("", _FORMULA_ALONE.sub(r"\1", text))


def _unit_quotient(found: re.Match[str]) -> str:
    above, below = found[1].strip(), found[2].strip()
    return f"\\text{{{above}/{below}{found[3] or ''}}}" if symbol(above) and symbol(below) else found[0]


def _unwrapped(found: re.Match[str]) -> str:
    inside = found[1].strip()
    before, after = found.string[: found.start()], found.string[found.end() :]
    if unit := _unit(found[1], before, after):
        return f"\\text{{{unit}}}"
    space = " " if before[-1:].isalpha() else ""
    if inside in languages.FUNCTIONS and _APPLIED.match(after):
        return space + function(inside)
    if inside.isascii() and (len(inside) == 1 or (_POINTS.fullmatch(inside) and not symbol(inside))):
        return space + inside
    return found[0] if _TWO_LETTERS.search(inside) or not inside else space + found[1]


def _unit(inside: str, before: str, after: str) -> str:
    """The unit of measure that stands between `before` and `after`; empty if it is none, or measures nothing there."""
    measured = _MEASURED.search(before) or _UNIT_BEFORE.search(before)
    if not measured or not _UNIT_AFTER.match(after):
        return ""
    return inside if before.endswith("°") and inside in ("C", "F") else upright_unit(inside)


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


_SIGNS = {sign: f"\\{name} " for name, signs in languages.SIGNS.items() for sign in signs}
_SIGNS |= {sign: plain_sign for plain_sign, signs in languages.ASCII_SIGNS.items() for sign in signs}
_SIGNS |= {sign: f"\\mathbb{{{letter}}}" for sign, letter in zip("ℝℤℕℚℂ", "RZNQC", strict=True)}
_SIGNS |= {"∛": "\\sqrt[3] ", "🔟": "10"}
_TABLE = str.maketrans(_SIGNS)
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ"
_LOWERED = "₀₁₂₃₄₅₆₇₈₉"
_PLAIN_DIGITS = str.maketrans(_RAISED + _LOWERED, "0123456789+-n0123456789")
_OTHER_DIGIT = re.compile(r"(?![0-9])\d")
_MICRO = re.compile(r"[µμ](?=(?:[mgslLFAVWJN]|mol|Pa)(?![A-Za-z]))")
_VULGAR = re.compile(r"\s*([¼½¾⅐-⅞])")
_ARGUMENT = r"(\{[^{}]*\}|[0-9A-Za-z])"

_MARKS = (
    (re.compile(rf"([{_RAISED}]+)"), lambda run: "^{" + run[1].translate(_PLAIN_DIGITS) + "}"),
    (re.compile(rf"([{_LOWERED}]+)"), lambda run: "_{" + run[1].translate(_PLAIN_DIGITS) + "}"),
    (_MICRO, "micro"),
    (_VULGAR, lambda found: "\\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKD", found[1]).split("⁄"))),
)
"""Replacements before NFKC, which would change their meaning: it turns ² into 2, and 3½ into 31⁄2."""

_Replacement = str | Callable[[re.Match[str]], str]


def _rules(*rules: tuple[str, _Replacement]) -> tuple[tuple[re.Pattern[str], _Replacement], ...]:
    """Compile rules, each a pattern and its replacement."""
    return tuple((re.compile(pattern), replacement) for pattern, replacement in rules)


_OF_ASCII = {"lt": "<", "gt": ">", "lbrace": "\\{", "rbrace": "\\}", "lbrack": "[", "rbrack": "]"}
_FONT = r"\\(?:rm|bf|it|sf|tt|sl|sc|em)(?![A-Za-z])"
_COMMANDS = _rules(
    # Size, colour and spacing commands have no meaning. A backslash after another one ends a matrix row.
    (r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?(?=[\s()\[\]{}|\\<>/]|$)", ""),
    (r"(?<=\d)\\[,;: ](?=\d{3}(?!\d))", ""),
    (r"(?<!\\)\\!\s*", ""),
    (r"\\textcolor\s*(?:\[[^\]]*\])?\s*\{[^{}]*\}\s*\{([^{}]*)\}", r"\1"),
    (r"\\(?:text)?color\s*(?:\[[^\]]*\])?\s*\{[^{}]*\}", ""),
    (r"\\(?:tiny|small|large|Large|LARGE|huge|Huge|boldmath|hfill|notag|nonumber)(?![A-Za-z])", ""),
    (r"\\vec\s*\{?\s*([A-Za-z])\s*\}?(?![A-Za-z])", r"\1"),
    (r"(?<![\w)}\]])\+\s*(?=\\infty)", ""),
    (r"\\tag\*?\s*\{[^{}]*\}", ""),
    (r"(?<!\\)\\[,;:> ]|\\(?:quad|qquad|enspace|thinspace|displaystyle|textstyle|limits)(?![A-Za-z])", " "),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    # All fonts become \text, see `styles.upright`.
    (rf"\{{\s*{_FONT}\s*([^{{}}]*)\}}", r"\\text{\1}"),
    (rf"{_FONT}\s*(?:(?=\{{)|([^{{}}\\$,]+)$)", lambda font: "\\text" + (f"{{{font[1]}}}" if font[1] else "")),
    (_FONT, ""),
    (
        r"\\(?:math(?:rm|it|bf|sf|tt|normal|up|op)|text[a-z]{2,6}|[mh]box|operatorname\*?|emph|boldsymbol|bold|bm|pmb|"
        r"underline|uline)\s*(?=\{)",
        r"\\text",
    ),
    (r"\\(?:math(?:rm|it|bf|sf|tt)|boldsymbol|bm)(?:\s*([0-9])|\s+([A-Za-z]))", r"\\text{\1\2}"),
    (r"\\text\s+\{", r"\\text{"),
    (r"\\mu\s*\\text\{", r"\\text{micro"),
    (r"\\textdollar(?![A-Za-z])|\\\$", "$"),
    (r"\\%", "%"),
    (r"\\(?:degrees?|textdegree)(?![A-Za-z])|\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])", "°"),
    (r"\\([lg]eq(?:s?lant)?|neq)(?![A-Za-z])", lambda relation: f"\\{relation[1][:2]} "),
    (r"\\(?:varnothing|O)(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
    (r"\\(lt|gt|[lr]brac[ek])(?![A-Za-z])", lambda name: _OF_ASCII[name[1]]),
    # Ornaments around an answer.
    (r"^\s*(?:\\(?:therefore|implies|[Rr]ightarrow|Longrightarrow|to|(?:big)?star)(?![A-Za-z])\s*)+", ""),
    (r"(?<=\S)\s*(?:\\(?:checkmark|(?:black)?square|Box|qed|bigstar)(?![A-Za-z])(?:\{\})?\s*\.?)+\s*$", ""),
    (r"\\(lg|c?tg|cotg|arcc?tg)(?![A-Za-z])", lambda name: function(name[1])),
)
"""Rules for texts with a backslash."""
_WORDS = _rules(
    (r"(?<![\\A-Za-z])(?i:sqrt|square root of)(?![A-Za-z])\s*", r"\\sqrt "),
    (r"(?<![\\A-Za-z])[Pp]i(?![A-Za-z])", r"\\pi "),
    (
        r"(?<![\\A-Za-z])(?i:((?:negative|minus)\s+)|(?:positive|plus)\s+)?(?:(?i:infinity)|inf|oo)(?![A-Za-z])",
        lambda signed: "-\\infty " if signed[1] else "\\infty ",
    ),
    (r"(?<=\d)(?:st|nd|rd|th)(?![A-Za-z])", ""),
    (
        r"(?<![\\A-Za-z])(?<!\\text\{)"
        r"(?i:(arc(?:sin|cos|tan|c?tg)|sinh|cosh|tanh|sin|cos|tan|cot|csc|(?<![\d/])(?<!\d )sec|"
        r"c?tg|ln|lg|log|exp))(?=\s*[(^\\_]|\s+(?:\d|[A-Za-z](?![A-Za-z])))",
        lambda name: function(name[1].lower()),
    ),
)
"""Rules for texts with letters, which may be words of plain text for LaTeX commands."""
_REST = _rules(
    ("~", " "),
    (r"\{([.,])\}", r"\1"),
    (r"\^\s*°", "°"),
    ("<=", r"\\le "),
    (">=", r"\\ge "),
    (r"(?<=\s)!=", r"\\ne "),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\\sqrt(\[\d+\])?\s*([0-9]+(?:\.[0-9]+)?(?=\s|$|[-+*/)\]},])|[0-9A-Za-z])", r"\\sqrt\1{\2}"),
    (r"\\sqrt\s+\{", r"\\sqrt{"),
    (r"\*\*", "^"),
    (rf"\\frac\s*{_ARGUMENT}\s*{_ARGUMENT}", lambda f: f"\\frac{_braced(f[1])}{_braced(f[2])}"),
    (r"\s+", " "),
)
_LETTERS = re.compile("[A-Za-z]{2}")
_BRACES_WITHIN = re.compile(r"[{}]")


def plain(text: str) -> str:
    r"""Convert `text` to ASCII where possible, without styling: `\dfrac12` and ½ become `\frac{1}{2}`.

    `\text{}` is kept, as it distinguishes words from variables; a degree is `°`; `\$` and `\%` lose their backslash.
    """
    if not text.isascii():
        text = unicodedata.normalize("NFKC", visible(_applied(_MARKS, text)).translate(_TABLE)).translate(_TABLE)
        text = _OTHER_DIGIT.sub(lambda digit: str(unicodedata.digit(digit[0])), text)
    if "\\" in text:
        text = _applied(_COMMANDS, text)
    if _LETTERS.search(text):
        text = _applied(_WORDS, text)
    text = _applied(_REST, text).strip()
    # TeX ignores braces around the whole; around a list in plain text they denote a set.
    if text.startswith("{") and text.endswith("}") and not _BRACES_WITHIN.search(text, 1, len(text) - 1):
        inside = text[1:-1].strip()
        return f"\\{{{text[1:-1]}\\}}" if "," in text else inside or "\\emptyset"
    return text


def _applied(rules: tuple[tuple[re.Pattern[str], _Replacement], ...], text: str) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


def _braced(argument: str) -> str:
    return argument if argument.startswith("{") else "{" + argument + "}"


# ---- what stands around an answer

_INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u20e3\ufe00-\ufe0f\ufeff"
    "\U0001f3fb-\U0001f3ff\U000e0000-\U000e0fff]"
)
"""Marks of direction and joining, variation selectors, skin tones, and the frame of a keycap digit."""
_MEANINGFUL = re.compile(
    "[°△\u2654-\u266f\u2680-\u2685"  # degrees, triangles, chessmen, suits, notes, dice
    "✗✘✕✖❌❎➕➖➗\U0001f51f]"  # crosses deny an answer; signs and the keycap of ten
)
_ORNAMENTS = ("So", "Sk", "Cn", "Co")
"""Categories of Unicode: symbols, modifiers, and what is newer than Python's tables, as the latest emoji are."""
_BEFORE = "∴⇒→⟹➔∎"
_AFTER = "∎√→"
_BLANKS = " \t\n\r\u00a0\u3000"
_STOPS = ".,;:"
_FOREIGN_STOPS = _STOPS + "。．｡，､、；：！？।॥۔؟،؛・"
_DRESS = (
    *(("**", "**"), ("__", "__"), ("*", "*"), ("_", "_"), ("`", "`"), ('"', '"'), ("==", "==")),
    *(("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("$", "$")),
)
_FOREIGN_DRESS = (
    *(("“", "”"), ("‘", "’"), ("„", "“"), ("«", "»"), ("‹", "›"), ("「", "」"), ("『", "』")),
    *(("【", "】"), ("〖", "〗"), ("《", "》"), ("〈", "〉")),
)
_HTML = r"</?(?:b|i|u|p|em|strong|mark|big|small|code|span|div|font|center|h[1-6]|br|hr)(?:\s[^<>]*)?/?>"
_HTML_TAG = re.compile(_HTML, re.IGNORECASE)


def undressed(answer: str) -> str:
    """Strip markdown, HTML tags, quotes, dollars, punctuation and ornaments from both ends of `answer`."""
    if answer.isascii():
        return until_same(
            lambda text: _without_marks(_without_tags(_without_stops(text.strip(), _STOPS)), _DRESS), answer
        )
    return until_same(_undressed_foreign, visible(answer))


def _undressed_foreign(text: str) -> str:
    bare = _without_tags(_without_stops(text.strip(), _FOREIGN_STOPS))
    return _without_marks(_without_ornaments(_without_marks(bare, _DRESS)), _FOREIGN_DRESS)


def visible(text: str) -> str:
    """Remove characters that show nothing by themselves: 5️⃣ becomes 5."""
    return _INVISIBLE.sub("", text)


def _without_marks(text: str, marks: tuple[tuple[str, str], ...]) -> str:
    """Strip pairs of marks around the whole."""
    for opening, closing in marks:
        if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing):
            inside = text[len(opening) : len(text) - len(closing)]
            if closing not in (inside.replace("\\$", "") if closing == "$" else inside) and not inside.endswith("\\"):
                text = inside
    return text


def _without_tags(text: str) -> str:
    while text.endswith(">") and (tag := _HTML_TAG.fullmatch(text, text.rfind("<"))):
        text = text[: tag.start()].rstrip()
    while text.startswith("<") and (tag := _HTML_TAG.match(text)):
        text = text[tag.end() :].lstrip()
    return text


def _without_ornaments(text: str) -> str:
    """Strip check marks, emoji and the like, unless nothing else is left."""
    ornaments = "".join(filter(_is_ornament, {*text})) + _BLANKS
    return text.rstrip(_AFTER + ornaments).lstrip(_BEFORE + ornaments) or text


def _is_ornament(sign: str) -> bool:
    """Return whether a character only decorates: a symbol without meaning that stands for no text, as ℃ does."""
    if sign.isascii() or unicodedata.category(sign) not in _ORNAMENTS:
        return False
    return not unicodedata.decomposition(sign) and not _MEANINGFUL.match(sign)


def _without_stops(text: str, stops: str) -> str:
    r"""Strip punctuation from the end of `text`, except after a backslash, as in `\;`."""
    bare = text.rstrip(stops + _BLANKS)
    return text[: len(bare) + 1] if bare.endswith("\\") else bare
