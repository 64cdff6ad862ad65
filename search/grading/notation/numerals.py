r"""Parses numbers as written in answers: 1,234.5, 2 1/2, `\frac{3}{4}`, 6 \times 10^{23}, 0.\overline{3}.

And times of day, dates and ratios, all of which may be written with colons or words between two numbers.
"""

import math
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

from espalier.search.grading.notation import languages

_VALUES = languages.NUMBERS
_DENOMINATORS = languages.PARTS
_SIGNS = ("negative", "minus", "minu")  # the last: as if it were a plural


def number_in_words(words: str) -> Fraction | None:
    """The number that words in lower case and the singular denote; None if they are no number, or digits alone."""
    tokens = re.split(r"[\s-]+", words)
    if tokens[0] in _SIGNS:
        value = number_in_words(" ".join(tokens[1:])) if len(tokens) > 1 else None
        return None if value is None else -value
    if tokens[-1] not in _DENOMINATORS:
        return None if all(map(str.isdigit, tokens)) else _whole(tokens)
    part = Fraction(1, _DENOMINATORS[tokens[-1]])
    if len(tokens) == 1:
        return part
    if "and" in tokens:  # two and a half, two and three quarters; the article is gone
        last = len(tokens) - tokens[::-1].index("and")
        whole, times = _whole(tokens[: last - 1]), _whole(tokens[last:-1] or ["one"])
        return None if whole is None or times is None else whole + times * part
    times = _whole(tokens[:-1])
    return None if times is None else times * part


def _whole(tokens: list[str]) -> Fraction | None:
    """The integer that tokens denote; each smaller one adds to what stands before it."""
    total, group, least = 0, 0, 10**15
    for place, token in enumerate(tokens):
        if token == "and" and 0 < place < len(tokens) - 1 and (group or total):
            continue
        power = languages.SCALES.get(token, 0)
        if place == 0 and power:  # a hundred
            group = 1
        if power > 2 and group and 10**power < least:
            total, group, least = total + group * 10**power, 0, 10**power
        elif power == 2 and 0 < group < 100:
            group *= 100
        elif (value := _VALUES.get(token, int(token) if token.isdigit() and len(tokens) < 3 else None)) is not None:
            if group and (value == 0 or group % (100 if value > 9 else 10) or value > 99):
                return None
            if group and value < 10 and group % 100 == 10:  # ten one
                return None
            group += value
        else:
            return None
    return Fraction(total + group) if tokens else None


_DIGITS = r"(?:[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
_SCIENTIFIC = re.compile(
    rf"({_DIGITS})(?:[eE]\s*(?:\{{)?([+-]?\d{{1,3}})\}}?|\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{{?\s*([+-]?\s*\d{{1,3}})\s*\}}?)"
)
_ROUNDED = re.compile(r"-?\s*(\d*)\.(\d+)")
_LONG_DECIMAL = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})++|[0-9]++)?(?:\.[0-9]*+)?(?<=[0-9.])")
_GROUPED = re.compile(r"[1-9]\d{0,2}(?:(?:\.\d{3})+,\d+|(?:\.\d{3}){2,}|(?:'\d{3})+(?:[.,]\d+)?)|\d+,0\d+")
"""Numbers of other countries that nothing else can be: 1.234,5 and 1.234.567 and 1'234 and 0,05."""
_PERHAPS_SEVERAL = re.compile(
    r"[1-9]\d{0,2}(?: \d{3})+(?:[.,]\d+)?|\d*,\d+|[1-9]\d?(?:,\d\d)+,\d{3}(?:\.\d+)?"  # the last: in lakhs
)
MAX_DIGITS = 100_000
"""Most digits of a number that is compared as one; a longer one is a text."""
_MAX_STR_DIGITS = 4000
_SIGNIFICANT = 6
"""Significant digits from which a decimal may stand for a number that it truncates or rounds."""


def number_in(text: str) -> Fraction | None:
    """The exact number that `text` denotes; None if it is not a number."""
    sign, bare = 1, text.strip()
    while bare[:1] in ("+", "-", "(") and bare:
        if bare[0] == "(":
            if not bare.endswith(")") or "," in bare:  # a pair, not a number
                return None
            bare = bare[1:-1].strip()
            continue
        sign, bare = (-sign if bare[0] == "-" else sign), bare[1:].lstrip()
        if bare[:1] in ("+", "-"):
            return None
    try:
        size = _size(bare)
    except (ValueError, ZeroDivisionError):
        return None
    return None if size is None else sign * size


def long_decimal(text: str) -> Fraction | None:
    """The exact number of a decimal of up to MAX_DIGITS characters; None for another text.

    Python converts no more than 4,300 digits from or to an int, as its method takes the square of their number; by
    way of Decimal 100,000 digits take some 0.1 s.
    """
    if len(text) > MAX_DIGITS or not _LONG_DECIMAL.fullmatch(text):
        return None
    return Fraction(Decimal(text.replace(",", "")))


def foreign_number(text: str) -> Fraction | None:
    """The number that `text` denotes in other countries, where it may also be a list: 3,5 and 10 000 and 12,34,567."""
    bare = text.removeprefix("-").lstrip()
    if scientific := _SCIENTIFIC.fullmatch(bare.replace(",", ".", 1)):
        return number_in(text.replace(",", ".", 1)) if "," in bare and scientific else None
    if not _PERHAPS_SEVERAL.fullmatch(bare):
        return None
    return _ungrouped(bare) * (-1 if text.startswith("-") else 1)


def number_text(number: Fraction) -> str:
    """The number in digits, as `str` gives it, but for any number of them."""
    if number.denominator == 1:
        return _digits(number.numerator)
    return f"{_digits(number.numerator)}/{_digits(number.denominator)}"


def is_decimal(text: str) -> bool:
    """Return whether `text` is a decimal with enough digits to stand for a number that it truncates or rounds."""
    found = _ROUNDED.fullmatch(text.strip())
    return bool(found) and len((found[1] + found[2]).lstrip("0")) >= _SIGNIFICANT


def rounds_to(exact: Fraction, text: str) -> bool:
    """Return whether `text` is such a decimal of `exact`, truncated or rounded."""
    if not is_decimal(text):
        return False
    last = Fraction(1, 10 ** len(text.strip().rpartition(".")[2]))
    shown = Fraction(Decimal(re.sub(r"\s", "", text)))
    rounded, cut = abs(shown - exact) <= last / 2, 0 <= abs(exact) - abs(shown) < last
    return rounded or (cut and shown * exact > 0)


def _size(text: str) -> Fraction | None:
    """The absolute value."""
    for form, size in _FORMS:
        if found := form.fullmatch(text):
            return size(found)
    number, _, scale = text.rpartition(" ")
    scaled = _size(number.rstrip()) if scale in languages.SCALES else None
    return None if scaled is None else scaled * 10 ** languages.SCALES[scale]


def _mixed(found: re.Match[str]) -> Fraction | None:
    part = _decimal(found[2]) / _decimal(found[3])
    return part if not found[1] else int(found[1]) + part if part > 0 else None


def _repeating(found: re.Match[str]) -> Fraction:
    whole, start, again = found.groups()
    shown = Fraction(int((whole + start) or "0"), 10 ** len(start))
    return shown + Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(start))


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", "").rstrip(".") if text != "." else "0")


def _power_of_ten(exponent: str) -> Fraction:
    return Fraction(10) ** int(exponent.replace(" ", ""))


def _ungrouped(text: str) -> Fraction:
    """The number of a decimal whose last mark is its point, unless it stands several times or groups three digits."""
    whole, point, decimals = re.split(r"([.,])(?=\d*$)", text) if re.search(r"[.,]\d*$", text) else (text, "", "")
    if len(decimals) == 3 and point in whole:  # the last of several groups
        whole, decimals = whole + decimals, ""
    return Fraction(re.sub(r"[ '.,]", "", whole) + "." + (decimals or "0"))


_FORMS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Fraction | None]], ...] = (
    (re.compile(_DIGITS), lambda found: _decimal(found[0])),
    (_GROUPED, lambda found: _ungrouped(found[0])),
    (re.compile(rf"(?:(\d+)\s+(?:and\s+)?)?({_DIGITS})\s*/\s*({_DIGITS})"), _mixed),
    (re.compile(rf"(\d+)?\s*\\frac\{{\s*(-?\s*{_DIGITS})\s*\}}\{{\s*(-?\s*{_DIGITS})\s*\}}"), _mixed),
    (_SCIENTIFIC, lambda found: _decimal(found[1]) * _power_of_ten(found[2] or found[3])),
    (re.compile(r"10\s*\^\s*\{?\s*([+-]?\s*\d{1,3})\s*\}?"), lambda found: _power_of_ten(found[1])),
    (re.compile(r"(\d*)\.(\d*)\\(?:overline|bar)\{?(\d+)\}?"), _repeating),
)
"""Ways to write a number, each with how its size is read."""


def _digits(number: int) -> str:
    return str(number) if number.bit_length() < 3 * _MAX_STR_DIGITS else format(Decimal(number), "f")


# ---- times, dates and ratios

_TIME = re.compile(
    r"(?:at\s+)?(\d{1,2})(?::(\d\d))?(?::(\d\d))?\s*(?:(o'?\s?clock)\s*)?"
    r"(?:(am|pm|a\.m\.?|p\.m\.?)|(?:in|at)\s+(?:the\s+)?(morning|afternoon|evening|night))?(?:\s*(?:sharp|hours|h))?"
)
_HALVES = {"morning": "am", "afternoon": "pm", "evening": "pm", "night": "pm"}
_NAMED = {"noon": "12:00 pm", "midday": "12:00 pm", "midnight": "12:00 am"}
_TERM = r"(\d{1,9}(?:\.\d{1,9})?)"
_RATIO = re.compile(rf"{_TERM}(?:\s*:\s*{_TERM})+|{_TERM}\s+to\s+{_TERM}")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_MONTH = (
    "jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|"
    "nov(?:ember)?|dec(?:ember)?"
)
_DAY = r"(\d{1,2})(?:st|nd|rd|th)?"
_DATE = re.compile(rf"(?:the\s+)?(?:({_MONTH})\.?\s+{_DAY}|{_DAY}\s+(?:of\s+)?({_MONTH})\.?)(?:,?\s+(\d{{4}}))?")


class Time(NamedTuple):
    """A time of day; `half` is am, pm, or empty where the hour alone does not tell."""

    hour: int
    minute: int
    second: int
    half: str


def time_of(text: str) -> Time | None:
    """The time that `text` says; None for another text, and for a number without minutes or half of the day."""
    said = " ".join(text.lower().split())
    found = _TIME.fullmatch(_NAMED.get(said.removeprefix("12 "), said))
    if not found or not (found[2] or found[4] or found[5] or found[6]):
        return None
    hour, minute, second = int(found[1]), int(found[2] or 0), int(found[3] or 0)
    half = _HALVES.get(found[6], (found[5] or "").replace(".", ""))
    if hour > 23 + (minute == second == 0) or minute > 59 or second > 59 or (half and not 1 <= hour <= 12):
        return None
    if hour == 0 or hour > 12:
        half = "pm" if 12 < hour < 24 else "am"
    return Time(hour % 12, minute, second, half)


def same_time(one: Time, other: Time) -> bool:
    """Return whether two times are the same, where the half of the day is given by both."""
    return one[:3] == other[:3] and (not one.half or not other.half or one.half == other.half)


def ratio_in(text: str) -> list[Fraction] | None:
    """The terms of a ratio such as 3:2, 1 : 2 : 3 or "3 to 2", reduced; None for another text."""
    if not _RATIO.fullmatch(text) or re.search(r"(?<![\d.])0\d", text):
        return None
    terms = [Fraction(term) for term in _NUMBER.findall(text)]
    if not all(terms):
        return None
    unit = Fraction(math.gcd(*(term.numerator for term in terms)), math.lcm(*(term.denominator for term in terms)))
    return [term / unit for term in terms]


def date_in(words: str) -> str:
    """A date in one form, whether its day or month comes first; empty for another text."""
    found = _DATE.fullmatch(words)
    if not found:
        return ""
    month, day = (found[1], found[2]) if found[1] else (found[4], found[3])
    return f"{month[:3]} {int(day)}" + (f" {found[5]}" if found[5] else "")
