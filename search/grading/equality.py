r"""Compares two answers: numbers, words, units and lists directly, formulas by math-verify.

Plain numbers, words, units and list types are compared without math-verify, and list members one by one. By itself,
math-verify reads the letters of a word as variables, ignores units, subscripts and case, and rounds to six decimals.

In grading, an answer is right if it has the gold answer's value, where

- a name before `=`, a unit and a counted noun may be omitted or added, but must not contradict: 10 cm is not 10 m,
  x = 5 is not y = 5, 18 apples are not 18 eggs. The base of a number may be omitted but not added;
- a percentage equals its hundredth part or, above 1, the number before the sign: 20% is 0.2 and 20, 0.5% is not 0.5;
- a decimal with six or more digits equals the number that it truncates or rounds;
- (C) 5 equals both C and 5;
- 5m is a product, and five metres beside a number or a quantity; 3,5 is a list, and a decimal beside a number;
- the members of a list or set may come in any order, those of a tuple or interval may not; a tuple may lack its
  parentheses.

In a vote, only the exact value counts, without these exceptions, so that equality is an equivalence relation: 5% is
0.05 and not 5. For names and units see `voting.vote.select`; counted nouns are ignored.

Of the pairs in the tests, exactly these verdicts are known to be wrong. Wrong, and passed for right:

- gold `4 m`: `4`

Right, and passed for wrong:

- gold `12\text{ students}`: `12 people`
- gold `1\text{ m}`: `100 cm`
- gold `18.50`: `18 dollars and 50 cents`
- gold `2.5`: `two and a half`
- gold `5`: `five`
- gold `(-\infty, 2) \cup (3, \infty)`: `x<2 or x>3`
- gold `\emptyset`: `no solution`
- gold `yes`: `Yes, because it is even`
- gold `all real numbers`: `(-\infty,\infty)`
- gold `all real numbers`: `\mathbb{R}`
- gold `90^\circ`: `\frac{\pi}{2}`
- gold `52_8`: `52_{\text{eight}}`
- gold `3:30 PM`: `15:30`
- gold `May 5`: `5 May`
- gold `1:2`: `\frac{1}{2}`
- gold `1:2`: `2:4`
- gold `\frac{1}{2}x`: `1/2x`
- gold `1:3`: `1 to 3`
- gold `(2+i)^2`: `3+4i`
- gold `72 km/h`: `20 m/s`
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeVar

from espalier.search.grading.magnitudes import differ
from espalier.search.grading.notation.numerals import is_decimal, rounds_to
from espalier.search.grading.notation.units import units_agree
from espalier.search.grading.reading import Reading, as_foreign_number, as_measure, read, without_blanks

T = TypeVar("T")
_READINGS = 256
"""Parsed formulas cached in a child process: a vote compares each with many, and parsing costs as much as comparing."""
_MAX_MEMBERS = 64
_DIGITS = 60
_MORE_DIGITS = 10
_MAX_FORMULA = 5000
"""Characters of a formula that is parsed, which takes about a second; a longer one equals only the same text."""
_SLACK = 1.01
_UNEQUAL = re.compile(r"[<>]|\\(?:le|ge|ne)(?![A-Za-z])")
_VARIABLE = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])")
_CAPITALS = re.compile(r"[A-Z]{2,}")
_ANGLE = re.compile(r"\\angle\s*\{?\s*([A-Z]{3})\s*\}?")
_EQUALS = re.compile(r"(?<![\\<>!])=")
_SETS = re.compile(r"^[\[(].*[\])]$|\\(?:cup|cap|setminus|mathbb|emptyset)(?![A-Za-z])")
_CAPITAL = re.compile(r"\\(?:begin|end|text|math[a-z]+)\s*\{[^{}]*\}|\\[A-Za-z]+|([A-Z])(?:_\{?(\w+)\}?)?(?!\()")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*°")
_LARGE_BINOMIAL = re.compile(r"\\binom\{(\d{5,9})\}\{(\d{1,9})\}")
_DELIMITERS = {"(": ")]", "[": ")]", "\\{": ("\\}",), "\\langle": ("\\rangle",)}


class Members(NamedTuple):
    """A list, tuple, set or interval: its delimiters, empty for a bare list, and its members."""

    opening: str
    closing: str
    members: list[str]

    @property
    def ordered(self) -> bool:
        """True if the order of the members matters."""
        return self.opening not in ("", "\\{")


def is_right(gold: str, answer: str) -> bool:
    """Return whether `answer` is right given the gold answer. Runs in a child process.

    Raises:
        MemoryError: raised by math-verify. sympy may also catch it itself and continue, at worst with "not equal".
    """
    one, other = _meant(read(gold), read(answer))
    if one.label and other.label and not one.label & other.label:
        return False
    if without_blanks(one.whole) == without_blanks(other.whole):
        return bool(one.whole)
    if one.choice and other.choice:
        return one.choice == other.choice
    if one.choice or other.choice:
        chosen, plain = (one, other) if one.choice else (other, one)
        return chosen.value != chosen.whole and _right_value(read(chosen.value), plain)
    for named, equation in ((one, other), (other, one)):
        if named.name and not equation.name and _EQUALS.search(equation.value):
            return _formulas_equal(_unnamed(one), _unnamed(other))
    if one.name and other.name and one.name != other.name and _VARIABLE.search(one.value + " " + other.value):
        return _formulas_equal(_unnamed(one), _unnamed(other))
    return _marks_agree(one, other) and _right_value(one, other)


def is_right_within(gold: str, answer: str, tolerances: Sequence[float]) -> bool:
    """Return whether `answer` is right, or its numbers are near enough to the gold answer's. Runs in a child process.

    Args:
        gold: the gold answer, one or a list or interval.
        answer: the answer.
        tolerances: how far a number may be off, absolutely: for each member of `gold` in order, or one for all.

    Raises:
        ValueError: there are several tolerances, but not as many as members.
        MemoryError: see `is_right`.
    """
    if is_right(gold, answer):
        return True
    one, other = (_members(whole.value) or Members("", "", [whole.whole]) for whole in (read(gold), read(answer)))
    if len(tolerances) not in (1, len(one.members)):
        raise ValueError(f"{len(tolerances)} tolerances for the {len(one.members)} members of {gold!r}")
    wanted = [(member, tolerances[place % len(tolerances)]) for place, member in enumerate(one.members)]
    if len(one.members) != len(other.members) or len(one.members) > _MAX_MEMBERS:
        return False
    if one.ordered or other.ordered:
        pairs = zip(wanted, other.members, strict=True)
        return one[:2] == other[:2] and all(_is_near(member, given, far) for (member, far), given in pairs)
    return _all_paired(wanted, other.members, lambda member, given: _is_near(member[0], given, member[1]))


def is_same_value(one: str, other: str) -> bool:
    """Return whether two answers have exactly the same value, ignoring names and units. Runs in a child process.

    Raises:
        MemoryError: see `is_right`.
    """
    a, b = read(one), read(other)
    if a.key == b.key:
        return True
    if a.choice or b.choice or (a.number is not None and b.number is not None):
        return False
    return not a.percent and not b.percent and _same_value(a, b, exact=True)


def _meant(gold: Reading, answer: Reading) -> tuple[Reading, Reading]:
    """The readings of two answers, where one of them has several, that the other is of.

    5m is five metres beside a number or a quantity, and a product beside others; 3,5 is a decimal beside a number.
    """
    has_variable = gold.number is None and not gold.unit and (gold.words or _VARIABLE.search(gold.value))
    if answer.unit and (measure := as_measure(gold)):
        gold = measure
    elif not has_variable and (measure := as_measure(answer)):
        answer = measure
    if gold.number is not None and (number := as_foreign_number(answer)):
        answer = number
    return gold, answer


def _marks_agree(gold: Reading, answer: Reading) -> bool:
    """Return whether the names, units and nouns of the two answers do not contradict each other."""
    if gold.name and answer.name and gold.name != answer.name:
        return False
    if answer.unit.startswith("_") and answer.unit != gold.unit:
        return False
    if gold.unit.startswith("_") and not answer.unit:
        return True
    if gold.unit and answer.unit:
        return units_agree(gold.unit, answer.unit)
    one, other = gold.nouns or {gold.unit} - {""}, answer.nouns or {answer.unit} - {""}
    return not one or not other or bool(one & other)


def _right_value(gold: Reading, answer: Reading) -> bool:
    if not (gold.percent or answer.percent):
        return _same_value(gold, answer, exact=False)
    if gold.percent and answer.percent:
        return _right_value(*(replace(reading, percent=False) for reading in (gold, answer)))
    percentage, other = (gold, answer) if gold.percent else (answer, gold)
    if percentage.number is None or other.number is None or other.unit:
        return False
    number = percentage.number
    return other.number == number / 100 or (other.number == number and number > 1)


def _unnamed(reading: Reading) -> Reading:
    """An equation whose left side is part of the value, not a name."""
    return Reading(reading.whole, reading.whole)


def _same_value(one: Reading, other: Reading, exact: bool) -> bool:
    if one.number is not None and other.number is not None:
        if one.number == other.number or exact:
            return one.number == other.number
        return rounds_to(one.number, other.value) or rounds_to(other.number, one.value)
    if one.words or other.words:
        return one.words == other.words
    first, second = _members(one.value), _members(other.value)
    for set_, beside in ((first, other), (second, one)):
        if (
            not exact
            and set_
            and set_.opening == "\\{"
            and len(set_.members) == 1
            and not beside.value.startswith("\\{")
        ):
            return is_right(set_.members[0], beside.value)
    if first and second:
        return _same_members(first, second, exact)
    if first or second:
        members, alone = (first, other) if first else (second, one)
        assert members
        may_be = members.opening and (_UNEQUAL.search(alone.value) or _SETS.search(alone.value))
        return bool(may_be) and _formulas_equal(one, other, exact)
    return _formulas_equal(one, other, exact)


def _same_members(one: Members, other: Members, exact: bool) -> bool:
    """Return whether two lists have one type and the same members; unless exact, a tuple may lack its parentheses."""
    if len(one.members) != len(other.members):
        return False
    same: Callable[[str, str], bool] = _is_same_member if exact else is_right
    if one.ordered != other.ordered:
        bare = one if not one.ordered else other
        tuple_ = other if bare is one else one
        brackets = tuple_.opening + tuple_.closing
        unbracketed = bare.opening == "" and (brackets == "()" or (brackets == "[]" and len(one.members) > 2))
        return unbracketed and not exact and all(map(same, one.members, other.members))
    if one.ordered:
        return one[:2] == other[:2] and all(map(same, one.members, other.members))
    return len(one.members) <= _MAX_MEMBERS and _all_paired(one.members, other.members, same)


def _is_same_member(one: str, other: str) -> bool:
    return read(one).mark == read(other).mark and is_same_value(one, other)


def _is_near(gold: str, answer: str, tolerance: float) -> bool:
    """Return whether `answer` is right, or both are real constants, apart by at most the tolerance and 1% of it.

    The 1% is of OlympiadBench's judge, so that decimals such as 0.3 for 0.2 are within 0.1 in spite of rounding.
    """
    if is_right(gold, answer):
        return True
    one, other = read(gold), read(answer)
    if one.percent or other.percent or not _marks_agree(one, other):
        return False
    values = [_expression(reading) for reading in (one, other)]
    if any(value is None or not _is_constant(value) or not value.is_real for value in values):
        return False
    return bool(abs((values[0] - values[1]).evalf(_DIGITS)) <= tolerance * _SLACK)


def _all_paired(one: Sequence[T], other: Sequence[str], fits: Callable[[T, str], bool]) -> bool:
    """Return whether each member can be given one of `other` that fits it, and none twice; by augmenting paths."""
    owners: dict[int, int] = {}

    @cache
    def fit(member: int, given: int) -> bool:
        return fits(one[member], other[given])

    def place(member: int, tried: set[int]) -> bool:
        for given in range(len(other)):
            if given not in tried and fit(member, given):
                tried.add(given)
                if given not in owners or place(owners[given], tried):
                    owners[given] = member
                    return True
        return False

    return all(place(member, set()) for member in range(len(one)))


def _members(value: str) -> Members | None:
    r"""The members of a list, split at commas; None if `value` is no list. Each `\pm` in a set gives two members."""
    opening = next((mark for mark in _DELIMITERS if value.startswith(mark)), "")
    closing = next((mark for mark in _DELIMITERS.get(opening, "") if value.endswith(mark)), "")
    inside = value[len(opening) : len(value) - len(closing)] if closing else ""
    members = _split(inside) if closing else None
    if members is None or (len(members) < 2 and opening != "\\{"):
        opening = closing = ""
        members = _split(value)
    if members is None or not all(members):
        return None
    if opening in ("", "\\{"):
        members = [two for member in members for two in _both_signs(member)]
        return Members(opening, closing, members) if len(members) > 1 or opening else None
    return Members(opening, closing, members)


def _split(text: str) -> list[str] | None:
    """Split `text` at commas outside brackets; None if brackets do not match."""
    depth, start, parts = 0, 0, list[str]()
    for place, sign in enumerate(text):
        if sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
            if depth < 0:
                return None
        elif sign in ",;" and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    return [*parts, text[start:].strip()] if depth == 0 else None


def _both_signs(member: str) -> list[str]:
    if member.count("\\pm") != 1:
        return [member]
    before, after = member.split("\\pm")
    return [f"{before}+{after}" if before.strip(" =") else before + after, f"{before}-{after}"]


def _formulas_equal(one: Reading, other: Reading, exact: bool = False) -> bool:
    """Return whether two formulas are equal by math-verify; constants are compared by sympy without rounding."""
    if _CAPITALS.fullmatch(one.value) and _CAPITALS.fullmatch(other.value):
        return one.value == other.value  # words such as point names, not products of variables
    if (angle := _ANGLE.fullmatch(one.value)) and (beside := _ANGLE.fullmatch(other.value)):
        return beside[1] in (angle[1], angle[1][::-1])
    if bool(_EQUALS.search(one.value)) != bool(_EQUALS.search(other.value)):
        return False
    for formula, beside in ((one.value, other.value), (other.value, one.value)):
        if _UNEQUAL.search(formula) and not (_UNEQUAL.search(beside) or _SETS.search(beside)):
            return False
    first, second = _expression(one), _expression(other)
    if first is None or second is None:
        return False
    if _is_constant(first) and _is_constant(second):
        if differ(first, second):
            return False
        same = bool((first - second).doit().equals(0))
        return same or (not exact and (_rounds(first, other.value) or _rounds(second, one.value)))
    return _verified(first, second) and (not exact or _verified(second, first))


def _expression(reading: Reading) -> Any:
    from sympy import Rational

    if reading.number is not None:
        return Rational(reading.number.numerator, reading.number.denominator)
    return _parsed(reading.value)


@lru_cache(_READINGS)
def _parsed(formula: str) -> Any:
    """Parse a formula by math-verify, with decimals as exact fractions; None if it cannot be parsed, or is too long."""
    if len(formula) > _MAX_FORMULA:
        return None
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from math_verify import parse
    from math_verify.parser import LatexExtractionConfig
    from sympy import Basic, Float, MatrixBase, Rational

    # Units have been removed already; removing them again would take a variable from `5m` and `3t`.
    normalization = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
    try:
        found = parse(
            f"${_parseable(formula)}$",
            [LatexExtractionConfig(normalization_config=normalization)],
            # No timeout of math-verify's own, which would silently count as wrong: the pool's timeout kills and
            # reports.
            parsing_timeout=None,  # pyright: ignore[reportArgumentType]
            raise_on_error=True,
        )
        expression = found[0] if found else None
        if not isinstance(expression, Basic | MatrixBase):
            return None
        return expression.xreplace({number: Rational(str(number)) for number in expression.atoms(Float)})
    except MemoryError:
        raise
    except Exception:
        return None


def _parseable(formula: str) -> str:
    radians = _DEGREES.sub(r"{\\frac{\1 \\pi}{180}}", formula)
    # math-verify would compute these at once.
    factorials = _LARGE_BINOMIAL.sub(_in_factorials, radians) if "\\binom" in radians else radians
    return _CAPITAL.sub(_small, factorials).replace("$", "")


def _in_factorials(binomial: re.Match[str]) -> str:
    above, below = int(binomial[1]), int(binomial[2])
    return rf"\frac{{{above}!}}{{{below}! \cdot {above - below}!}}" if below <= above else "0"


def _small(capital: re.Match[str]) -> str:
    """Replace a capital letter, which math-verify would lowercase, by a distinct variable; LaTeX commands are kept."""
    return f" y_{{77{ord(capital[1])}{capital[2] or ''}}}" if capital[1] else capital[0]


def _is_constant(expression: Any) -> bool:
    return bool(getattr(expression, "is_number", False)) and not expression.free_symbols


def _rounds(constant: Any, text: str) -> bool:
    """Return whether `text` is a decimal of the constant with six or more digits."""
    if not is_decimal(text) or len(text) > _MAX_FORMULA:
        return False
    value = constant.evalf(max(_DIGITS, len(text) + _MORE_DIGITS))
    return bool(value.is_Float) and rounds_to(Fraction(Decimal(str(value))), text)


def _verified(gold: Any, answer: Any) -> bool:
    from math_verify import verify

    try:
        return bool(verify(gold, answer, timeout_seconds=None, raise_on_error=True, allow_set_relation_comp=True))
    except MemoryError:
        raise
    except Exception:
        return False
