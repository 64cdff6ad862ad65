"""Reads times of day, dates and ratios, all of which may be written with colons or words between two numbers."""

import math
import re
from fractions import Fraction
from typing import NamedTuple

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
