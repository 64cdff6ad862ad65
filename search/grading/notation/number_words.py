"""Reads numbers in English words: twenty-one, two and a half, two thirds."""

import re
from fractions import Fraction

_SMALL = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_MORE = "seventeen eighteen nineteen"
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_VALUES = {word: value for value, word in enumerate(f"{_SMALL} {_MORE}".split())}
_VALUES |= {word: 10 * value for value, word in enumerate(_TENS.split(), start=2)}
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_PARTS = "half third quarter fifth sixth seventh eighth ninth tenth eleventh twelfth"
_DENOMINATORS = {word: value for value, word in enumerate(_PARTS.split(), start=2)} | {"halve": 2, "fourth": 4}
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
        if place == 0 and (token in _SCALES or token == "hundred"):  # a hundred
            group = 1
        if token in _SCALES and group and _SCALES[token] < least:
            total, group, least = total + group * _SCALES[token], 0, _SCALES[token]
        elif token == "hundred" and 0 < group < 100:
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
