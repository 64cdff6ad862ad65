r"""Normalizes the text of an answer: Unicode, LaTeX styling and markdown become plain LaTeX in ASCII."""

import re
import unicodedata
from collections.abc import Callable

_SIGNS = {
    "π": "\\pi ",
    "θ": "\\theta ",
    "α": "\\alpha ",
    "β": "\\beta ",
    "γ": "\\gamma ",
    "λ": "\\lambda ",
    "μ": "\\mu ",
    "σ": "\\sigma ",
    "φ": "\\phi ",
    "ω": "\\omega ",
    "Ω": "\\Omega ",
    "Δ": "\\Delta ",
    "∞": "\\infty ",
    "∅": "\\emptyset ",
    "∪": "\\cup ",
    "∩": "\\cap ",
    "∈": "\\in ",
    "∠": "\\angle ",
    "±": "\\pm ",
    "×": "\\times ",
    "⋅": "\\cdot ",
    "·": "\\cdot ",
    "∙": "\\cdot ",
    "÷": "/",
    "≤": "\\le ",
    "⩽": "\\le ",
    "≥": "\\ge ",
    "⩾": "\\ge ",
    "≠": "\\ne ",
    "≈": "\\approx ",
    "≡": "\\equiv ",
    "ℝ": "\\mathbb{R}",
    "ℤ": "\\mathbb{Z}",
    "ℕ": "\\mathbb{N}",
    "ℚ": "\\mathbb{Q}",
    "ℂ": "\\mathbb{C}",
    "−": "-",
    "–": "-",
    "—": "-",
    "‐": "-",
    "‑": "-",
    "﹣": "-",
    "º": "°",
    "˚": "°",
    "’": "'",
    "‘": "'",
    "“": '"',
    "”": '"',
    "√": "\\sqrt ",
    "∛": "\\sqrt[3] ",
    "⁄": "/",
    "。": ".",
    "、": ",",
    "\u2061": "",
    "\u200b": "",
    "\ufeff": "",
}
_TABLE = str.maketrans(_SIGNS)
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ"
_LOWERED = "₀₁₂₃₄₅₆₇₈₉"
_PLAIN_DIGITS = str.maketrans(_RAISED + _LOWERED, "0123456789+-n0123456789")
_VULGAR = re.compile(r"\s*([¼½¾⅐-⅞])")
_ARGUMENT = r"(\{[^{}]*\}|[0-9A-Za-z])"

_MARKS = (
    (re.compile(rf"([{_RAISED}]+)"), lambda run: "^{" + run[1].translate(_PLAIN_DIGITS) + "}"),
    (re.compile(rf"([{_LOWERED}]+)"), lambda run: "_{" + run[1].translate(_PLAIN_DIGITS) + "}"),
    (_VULGAR, lambda found: "\\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKD", found[1]).split("⁄"))),
)
"""Replacements before NFKC, which would change their meaning: it turns ² into 2, and 3½ into 31⁄2."""

_Replacement = str | Callable[[re.Match[str]], str]
_RULES: tuple[tuple[re.Pattern[str], _Replacement], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # Size and spacing commands have no meaning. A backslash after another one ends a matrix row.
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?(?=[\s()\[\]{}|\\<>/]|$)", ""),
        (r"(?<=\d)\\[,;: ](?=\d{3}(?!\d))", ""),
        (r"(?<!\\)\\!\s*", ""),
        (r"(?<!\\)\\[,;:> ]|~|\\(?:quad|qquad|enspace|thinspace|displaystyle|textstyle|limits)(?![A-Za-z])", " "),
        (r"\{,\}", ","),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:mathrm|mathit|mathbf|mathsf|text[a-z]{2,6}|mbox|hbox|operatorname)\s*(?=\{)", r"\\text"),
        (r"\\text\s+\{", r"\\text{"),
        (r"\\text(?:dollar)(?![A-Za-z])|\\\$", "$"),
        (r"\\%", "%"),
        (r"\\(?:degrees?|textdegree)(?![A-Za-z])|\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])|\^\s*°", "°"),
        (r"\\leqs?lant(?![A-Za-z])|\\leq(?![A-Za-z])|<=|≦", r"\\le "),
        (r"\\geqs?lant(?![A-Za-z])|\\geq(?![A-Za-z])|>=|≧", r"\\ge "),
        (r"\\neq(?![A-Za-z])|(?<=\s)!=", r"\\ne "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:varnothing|O)(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\lbrace(?![A-Za-z])\s*", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\lbrack(?![A-Za-z])\s*", "["),
        (r"\\rbrack(?![A-Za-z])", "]"),
        # Words of plain text for LaTeX commands.
        (r"(?<![\\A-Za-z])(?:sqrt|square root of)(?![A-Za-z])\s*", r"\\sqrt "),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\sqrt(\[\d+\])?\s*([0-9]+(?:\.[0-9]+)?(?=\s|$|[-+*/)\]},])|[0-9A-Za-z])", r"\\sqrt\1{\2}"),
        (r"\\sqrt\s+\{", r"\\sqrt{"),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
        (r"(?<![\\A-Za-z])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty "),
        (r"\*\*", "^"),
        (r"(?<=\d)(?:st|nd|rd|th)(?![A-Za-z])", ""),
        (rf"\\frac\s*{_ARGUMENT}\s*{_ARGUMENT}", lambda f: f"\\frac{_braced(f[1])}{_braced(f[2])}"),
        (r"\s+", " "),
    )
)
_BRACES_WITHIN = re.compile(r"[{}]")
_DRESS = (("**", "**"), ("__", "__"), ("`", "`"), ('"', '"'), ("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("$", "$"))


def plain(text: str) -> str:
    r"""Convert `text` to ASCII where possible, without styling: `\dfrac12` and ½ become `\frac{1}{2}`.

    `\text{}` is kept, as it distinguishes words from variables; a degree is `°`; `\$` and `\%` lose their backslash.
    """
    if not text.isascii():
        for pattern, replace in _MARKS:
            text = pattern.sub(replace, text)
        text = unicodedata.normalize("NFKC", text.translate(_TABLE)).translate(_TABLE)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = text.strip()
    # TeX ignores braces around the whole; around a list in plain text they denote a set.
    if text.startswith("{") and text.endswith("}") and not _BRACES_WITHIN.search(text, 1, len(text) - 1):
        return f"\\{{{text[1:-1]}\\}}" if "," in text else text[1:-1].strip()
    return text


def undressed(answer: str) -> str:
    """Strip markdown, quotes, dollars and punctuation from `answer`."""
    before, text = None, answer
    while text != before:
        before, text = text, _without_stops(text.strip())
        for opening, closing in _DRESS:
            inside = text[len(opening) : len(text) - len(closing)]
            if text == opening + inside + closing and closing not in inside:
                text = inside
    return text


def _braced(argument: str) -> str:
    return argument if argument.startswith("{") else "{" + argument + "}"


def _without_stops(text: str) -> str:
    r"""Strip periods, commas and colons from the end of `text`, except after a backslash, as in `\;`."""
    end = len(text)
    while end and (text[end - 1] in ".,;:" or text[end - 1].isspace()):
        end -= 1
    return text[: end + 1] if text[:end].endswith("\\") else text[:end]
