r"""Finding the answer in a solution's text, and telling whether two answers are spelled alike.

An answer is what a text says it is, in the words of the benchmarks and of the models trained for them: `\boxed{}`
(MATH), `#### ` (GSM8K), "the answer is", "Answer:". A number that merely stands last is no answer.
"""

import re
from collections.abc import Iterator
from fractions import Fraction

_BOXED = "\\boxed"
_BRACE = re.compile(r"(?<!\\)[{}]")
# Text may be long and repeat itself without end, so nothing is tried twice: what is repeated is not given back (`++`).
_HASHES = re.compile(
    r"^####\s*+[*\\$]*+(-?[\\$]*+(?=[.,/]*+\d)[\d.,/]++[^\S\n]*+\\?%?)(?:[*$.]|[^\S\n])*+$", re.MULTILINE
)
_SAID = re.compile(
    r"(?:^(?:\#++\s*+|\*\*)(?:final\s++)?answer[:*]*+\s*\n|"
    r"\b(?:answer|(?:correct|right|best)\s++(?:option|choice))\b[*_]*+(?:,\s*+(?:therefore|thus|hence|then),)?"
    r"(?:\s++(?:to|for)\s++(?:the|this|that|our)\s++[^.:\n]{1,60}?)?"
    r"(?:\s++(?:is|will\s++be|would\s++be|must\s++be)\b|\s*+[:=]))[\s:*_]*+"
    r"(?:(?:indeed|therefore|thus|hence|then|simply|clearly|just|exactly)\b[\s,:]*+)?",
    re.IGNORECASE | re.MULTILINE,
)
_MATHS = (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("$", "$"))
_ANOTHER = re.compile(r"\s*(?:,|and\b|or\b)\s*(?:\$|\\[(\[]|-?\d)")
_PRICE = re.compile(r"\d[\d.,]*\s+[A-Za-z]{2,}")
_SENTENCE = re.compile(r".*?(?=\.(?:\s|\*|\"|$)|\*\*(?:\W|$)|$)", re.MULTILINE)
_REASON = re.compile(r"[,;]?(?<!\s)\s++\(?(?:because|since|which|where|so)\b.*|;\s.*", re.IGNORECASE)
_STATES_NOTHING = re.compile(
    r"(?:not|no|the|a|an|that|what|this|in|to|by|at|of|as|if|it|we|i|you|they|there|one|given|found|obtained|equal|also|"
    r"always|still|now|only|very|too)\s+[^\W\d_]|(?:not|unknown|unclear|wrong|right|correct|incorrect|true that|given|"
    r"found|obtained|shown|below|above|as follows|yet)\b",
    re.IGNORECASE,
)
_MOST_WORDS = 3
_LONGEST = 1000
"""Characters after "the answer is" of which an answer must be made."""

_CHOICE = re.compile(
    r"(?:\\(?:text|textbf|textrm|textsf|mathrm|mathbf|mathsf|mbox|bf)\s*\{\s*)*"
    r"(?:\(\s*([A-J])\s*\)|([A-J])\)?)[\s.:}]*"
)
_CHOSEN = re.compile(
    r"(?:(?:option|choice)\s+)?(?:\(([A-J])\)|([A-J])(?:[).:]|$))(?!\s*(?:(?:,|and|or|&)\s*\(?[A-J]\b|[-+*/^=]))"
)
_LISTED = re.compile(r"[(\[]|\\\{")
_THOUSANDS = re.compile(r"(?<![\d,])\d{1,3}(?:,\d{3})+(?![\d,])")
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:/\d+)?")
_DRESS = (("**", "**"), ("__", "__"), ("`", "`"), ('"', '"'), *_MATHS)


def extract_answer(text: str) -> str:
    r"""The answer a solution gives; empty when it gives none.

    Looks for the last `\boxed{}` with balanced braces, then for GSM8K's last `#### ` with a number, then for the last
    "the answer is" or "Answer:" that something short follows. A choice comes as its letter alone, of A to J.
    """
    if (boxed := last_boxed(text)) is not None:
        return _undressed(boxed)
    if found := _HASHES.findall(text):
        return re.sub(r"[\s$]|\\(?=\$)", "", found[-1]).rstrip(".,")
    return next(_said(text), "")


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete `\boxed{...}`, nested braces kept; None when there is none."""
    start = text.rfind(_BOXED)
    closings = _closing_braces(text) if start >= 0 else {}
    while start >= 0:
        opening = start + len(_BOXED)
        if opening in closings:
            return text[opening + 1 : closings[opening]].strip()
        start = text.rfind(_BOXED, 0, start)
    return None


def canonical(answer: str) -> str:
    r"""A spelling under which equal answers usually meet: spacing, dollars, thousands commas, choices, plain numbers.

    It is cheap and groups votes inside a search; whether an answer is right is the grader's to say.
    """
    text = (
        answer.strip()
        .strip("$")
        .removeprefix("\\$")
        .rstrip(".")
        .replace("\\!", "")
        .replace("\\dfrac", "\\frac")
        .replace("\\tfrac", "\\frac")
    )
    if not _LISTED.search(text):
        text = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    # A blank between two digits parts them: 2 1/2 is not 21/2.
    text = re.sub(r"(?<!\d) | (?!\d)", "", re.sub(r"\s+", " ", text))
    if choice := _CHOICE.fullmatch(text):
        return choice[1] or choice[2]
    if is_number(text):
        try:
            return str(Fraction(text))
        except (ValueError, ZeroDivisionError):
            return text
    return text


def is_number(text: str) -> bool:
    """Whether `text` is a number or a fraction of two, in digits."""
    return _NUMBER.fullmatch(text) is not None


def _said(text: str) -> Iterator[str]:
    """What follows each "the answer is", from the last on, where it is an answer."""
    for marker in reversed(list(_SAID.finditer(text))):
        rest = text[marker.end() : marker.end() + _LONGEST]
        if said := _formula(rest) or _phrase(rest):
            yield said


def _formula(rest: str) -> str:
    """The formula that `rest` begins with; empty where it is none, says nothing, is a price, or one of several."""
    for opening, closing in _MATHS:
        if rest.startswith(opening) and (end := rest.find(closing, len(opening))) > 0:
            inside, several = rest[len(opening) : end].strip(), _ANOTHER.match(rest, end + len(closing))
            states = re.search(r"\w", inside) and not (several or _PRICE.match(inside) or "\n\n" in inside)
            return _undressed(inside) if states else ""
    return ""


def _phrase(rest: str) -> str:
    """The choice, number or few words that `rest` begins with; empty where it tells a story."""
    sentence = _SENTENCE.match(rest)
    said = _REASON.sub("", sentence[0].rstrip() if sentence else "").strip()
    if choice := _CHOSEN.match(said):
        return choice[1] or choice[2]
    said = _undressed(re.sub(r"\\?\$|\\[()\[\]]", "", said))
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", said)
    if _STATES_NOTHING.match(said) or len(words) > _MOST_WORDS or not re.search(r"\w", said):
        return ""
    return said


def _undressed(answer: str) -> str:
    """`answer` without what only sets it off: markdown, quotes, dollars, punctuation; a choice as its letter."""
    before, text = None, answer
    while text != before:
        before, text = text, _without_stops(text.strip())
        for opening, closing in _DRESS:
            inside = text[len(opening) : len(text) - len(closing)]
            if text == opening + inside + closing and closing not in inside:
                text = inside
    choice = _CHOICE.fullmatch(text)
    return (choice[1] or choice[2]) if choice else text


def _without_stops(text: str) -> str:
    r"""`text` without the points, commas and colons at its end, but for one behind a backslash, as in `\;`."""
    bare = text.rstrip(".,;:")
    return text[: len(bare) + 1] if bare.endswith("\\") else bare


def _closing_braces(text: str) -> dict[int, int]:
    """Where the brace opened at each index closes, for those that do; escaped braces do not count."""
    open_ones: list[int] = []
    closings: dict[int, int] = {}
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            open_ones.append(brace.start())
        elif open_ones:
            closings[open_ones.pop()] = brace.start()
    return closings
