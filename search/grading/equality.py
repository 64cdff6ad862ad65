r"""Compares two answers: numbers, words, units and lists directly, formulas by math-verify.

Plain numbers, words, units and list types are compared without math-verify, and list members one by one. By itself,
math-verify reads the letters of a word as variables, ignores units, subscripts and case, and rounds to six decimals.

In grading, an answer is right if it has the gold answer's value, where

- a name before `=`, a unit and a counted noun may be omitted or added, but must not contradict: 10 cm is not 10 m,
  x = 5 is not y = 5, 18 apples are not 18 eggs. The base of a number may be omitted but not added;
- quantities may have other units of the same kind, with which they are converted: 5 ft is 60 in, 72 km/h is 20 m/s,
  an angle of 90 degrees is \frac{\pi}{2};
- a percentage equals its hundredth part or, above 1, the number before the sign: 20% is 0.2 and 20, 1% is 0.01 and
  not 1, 0.5% is not 0.5;
- a decimal with six or more digits equals the number that it truncates or rounds;
- (C) 5 equals both C and 5;
- 5m is a product, and five metres beside a number or a quantity; 3,5 and 12,34,567 are lists, and numbers beside a
  number, whether in the gold answer or in the answer;
- 3:30 is a time of either half of the day, and 15:30 is 3:30 PM; 1:10 is a time, and a ratio beside a number;
- the members of a list or set may come in any order, those of a tuple, vector or interval may not; a tuple may lack
  its parentheses, and have the names of its unknowns: (1,2) is y=2, x=1.

In a vote, only the exact value counts, without these exceptions, so that equality is an equivalence relation: 5% is
0.05 and not 5. For names and units see `voting.vote.select`; counted nouns are ignored.

Of the pairs in the tests, exactly these verdicts are known to be wrong. Wrong, and passed for right:

- gold `4 m`: `4`

Right, and passed for wrong:

- gold `\frac{1}{2}x`: `1/2x`
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple, TypeVar

from sympy import And, Intersection, Or, Rational, SymmetricDifference, Union, pi
from sympy import Set as NumberSet
from sympy.core.relational import Relational

from espalier.search.grading import formulas
from espalier.search.grading.notation import languages
from espalier.search.grading.notation.numerals import is_decimal, rounds_to, same_time, time_of
from espalier.search.grading.notation.units import MONEY, ratio, units_agree
from espalier.search.grading.reading import (
    Reading,
    as_foreign_number,
    as_measure,
    as_ratio,
    read,
    without_blanks,
)

T = TypeVar("T")
_MAX_MEMBERS = 64
_DIGITS = 60
_MORE_DIGITS = 10
_SLACK = 1.01
_UNEQUAL = re.compile(r"[<>]|\\(?:le|ge|ne)(?![A-Za-z])")
_VARIABLE = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])")
_CAPITALS = re.compile(r"[A-Z]{2,}")
_ANGLE = re.compile(r"\\angle\s*\{?\s*([A-Z]{3})\s*\}?")
_GROUPED = re.compile(r"\d[ ,.']\d+[,. ]\d")
_EQUALS = re.compile(r"(?<![\\<>!])=")
_SETS = re.compile(r"^[\[(].*[\])]$|\\(?:cup|cap|setminus|mathbb|emptyset)(?![A-Za-z])")


class Members(NamedTuple):
    """A list, tuple, set or interval: its delimiters, empty for a bare list, and its members."""

    opening: str
    closing: str
    members: list[str]

    @property
    def ordered(self) -> bool:
        """True if the order of the members matters."""
        return self.opening not in ("", "\\{")

    @property
    def is_point(self) -> bool:
        """True for a tuple, an open interval, or a vector."""
        return (self.opening, self.closing) in (("(", ")"), ("\\langle", "\\rangle"))


def is_right(gold: str, answer: str) -> bool:
    """Return whether `answer` is right given the gold answer. Runs in a child process.

    Raises:
        MemoryError: raised by math-verify. sympy may also catch it itself and continue, at worst with "not equal".
    """
    one, other = _meant(read(gold), read(answer))
    if one.program or other.program:
        return one.whole == other.whole
    if one.label and other.label and not one.label & other.label:
        return False
    if without_blanks(one.whole) == without_blanks(other.whole):
        return bool(one.whole)
    if one.choice and other.choice:
        return one.choice == other.choice
    if one.choice or other.choice:
        chosen, plain = (one, other) if one.choice else (other, one)
        same_name = plain.name in ("", chosen.choice)
        return same_name and chosen.value != chosen.whole and _right_value(read(chosen.value), plain)
    if (time := time_of(one.whole)) and (beside := time_of(other.whole)):
        return same_time(time, beside)
    is_equation = any(a.name and not b.name and _EQUALS.search(b.value) for a, b in ((one, other), (other, one)))
    others = one.name and other.name and one.name != other.name and _VARIABLE.search(f"{one.value} {other.value}")
    if is_equation or others:  # the left side is part of the value, not a name
        return _formulas_equal(Reading(one.whole, one.whole), Reading(other.whole, other.whole))
    if (scale := _scale(one, other)) is not None:
        return _marks_agree(one, replace(other, unit=one.unit)) and _same_scaled(one, other, scale)
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
    one, other = (members_of(whole.value) or Members("", "", [whole.whole]) for whole in (read(gold), read(answer)))
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
    number, beside = as_foreign_number(gold), as_foreign_number(answer)
    sure = number and beside and (_GROUPED.search(gold.value) or _GROUPED.search(answer.value))
    if beside and (gold.number is not None or sure):
        answer = beside
    if number and answer.number is not None:
        gold = number
    if gold.number is not None and (terms := as_ratio(answer, gold)):
        return gold, terms
    if answer.number is not None and (terms := as_ratio(gold, answer)):
        return terms, answer
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
        # An amount of money may lack what it is paid for: $3 is $3 per hour, but 3 m is not 3 m/s.
        return gold.unit == answer.unit or (gold.unit[0] in MONEY and units_agree(gold.unit, answer.unit))
    one, other = gold.nouns or {gold.unit} - {""}, answer.nouns or {answer.unit} - {""}
    people = any(a & {"people", "person"} and b & languages.PEOPLE for a, b in ((one, other), (other, one)))
    return not one or not other or bool(one & other) or people


def _scale(gold: Reading, answer: Reading) -> Any:
    """The size of the answer's unit in the gold answer's; None if no conversion is needed, or none exists.

    An angle with pi and without unit is one in radians.
    """
    if gold.percent or answer.percent or gold.unit == answer.unit:
        return None
    one, other = ("rad" if not reading.unit and "\\pi" in reading.value else reading.unit for reading in (gold, answer))
    if {one, other} == {"°", "rad"}:
        return pi / 180 if one == "rad" else Rational(180) / pi
    return ratio(one, other) and ratio(other, one) if one and other else None


def _same_scaled(gold: Reading, answer: Reading, scale: Any) -> bool:
    """Return whether an answer is a quantity's value in other units."""
    if gold.number is not None and answer.number is not None and isinstance(scale, Fraction):
        return gold.number == answer.number * scale
    first, second = formulas.expression_of(gold), formulas.expression_of(answer)
    return formulas.is_constant(first) and formulas.is_constant(second) and bool((first - second * scale).equals(0))


def _right_value(gold: Reading, answer: Reading) -> bool:
    if not (gold.percent or answer.percent):
        return _same_value(gold, answer, exact=False)
    if gold.percent and answer.percent:
        return _right_value(*(replace(reading, percent=False) for reading in (gold, answer)))
    percentage, other = (gold, answer) if gold.percent else (answer, gold)
    number = percentage.number
    if number is None or other.number is None or other.unit:
        return False
    return other.number == number / 100 or (other.number == number and number > 1)


def _same_value(one: Reading, other: Reading, exact: bool) -> bool:
    if one.number is not None and other.number is not None:
        if one.number == other.number or exact:
            return one.number == other.number
        return rounds_to(one.number, other.value) or rounds_to(other.number, one.value)
    if one.words or other.words:
        return one.words == other.words or _in_capitals(one, other) or _in_capitals(other, one)
    first, second = (members_of(side.value) if side.number is None else None for side in (one, other))
    for set_, beside in ((first, other), (second, one)) if not exact else ():
        if set_ and set_.opening == "\\{" and len(set_.members) == 1 and not beside.value.startswith("\\{"):
            return is_right(set_.members[0], beside.value)
    if (same := _same_sets(first, one, second, other)) is not None:
        return same
    if first and second:
        return _same_members(first, second, exact)
    if first or second:
        members, alone = (first, other) if first else (second, one)
        assert members
        if members.opening == "\\langle" and "matrix" in alone.value:
            column = " \\\\ ".join(members.members)
            vector = Reading("", f"\\begin{{pmatrix}}{column}\\end{{pmatrix}}")
            return _formulas_equal(vector, alone, exact)
        may_be = members.opening and (_UNEQUAL.search(alone.value) or _SETS.search(alone.value))
        if not may_be:
            return False
    return _formulas_equal(one, other, exact)


def _same_sets(first: Members | None, one: Reading, second: Members | None, other: Reading) -> bool | None:
    """Return whether two answers are the same set of numbers, if one is given by inequalities; None if none is.

    Of several, `x<2, x>3` is the union if no number is in all, and otherwise what is in all of them.
    """
    unequal = [bool(_UNEQUAL.search(reading.value)) for reading in (one, other)]
    if not any(unequal):
        return None
    sets = [_set_of(members, reading.value) for members, reading in ((first, one), (second, other))]
    if None in sets:
        return None
    letters = [{*_VARIABLE.findall(reading.value)} for reading in (one, other)]

    alike = not all(unequal) or letters[0] == letters[1]
    return alike and bool(sets[0] == sets[1] or SymmetricDifference(*sets).is_empty)


def _set_of(members: Members | None, value: str) -> Any:
    """The set of numbers of an interval, an inequality, or a bare list of inequalities; None for others."""
    if members is not None and not members.opening:
        if not all(_UNEQUAL.search(member) for member in members.members):
            return None
        sets = [_set_of(None, member) for member in members.members]
        if None in sets:
            return None
        common = Intersection(*sets)
        return Union(*sets) if common.is_empty else common
    found = formulas.parsed(value)
    if isinstance(found, Relational | And | Or) and len(found.free_symbols) == 1:
        try:
            return found.as_set()
        except (NotImplementedError, TypeError, ValueError):
            return None
    return found if isinstance(found, NumberSet) and not found.free_symbols else None


def _in_capitals(one: Reading, other: Reading) -> bool:
    """Return whether an answer that may be the names of points is a word's capitals: CAT beside cat."""
    return bool(_CAPITALS.fullmatch(one.value)) and one.value.lower() == other.words


def _same_members(one: Members, other: Members, exact: bool) -> bool:
    """Return whether two lists have one type and the same members; unless exact, a tuple may lack its parentheses."""
    if len(one.members) != len(other.members):
        return False

    def same(a: str, b: str) -> bool:
        return (read(a).mark == read(b).mark and is_same_value(a, b)) if exact else is_right(a, b)

    if one.ordered != other.ordered:
        bare = one if not one.ordered else other
        tuple_ = other if bare is one else one
        unbracketed = bare.opening == "" and (tuple_.is_point or (tuple_.opening == "[" and len(one.members) > 2))
        pairs = zip(*(by_name(side.members) if side is bare else side.members for side in (one, other)), strict=True)
        return unbracketed and not exact and all(same(*pair) for pair in pairs)
    if one.ordered:
        same_kind = one[:2] == other[:2] or (one.is_point and other.is_point)
        return same_kind and all(map(same, one.members, other.members))
    return len(one.members) <= _MAX_MEMBERS and _all_paired(one.members, other.members, same)


def _is_near(gold: str, answer: str, tolerance: float) -> bool:
    """Return whether `answer` is right, or both are real constants, apart by at most the tolerance and 1% of it.

    The 1% is of OlympiadBench's judge, so that decimals such as 0.3 for 0.2 are within 0.1 in spite of rounding.
    """
    if is_right(gold, answer):
        return True
    one, other = read(gold), read(answer)
    if one.percent or other.percent or not _marks_agree(one, other):
        return False
    values = [formulas.expression_of(reading) for reading in (one, other)]
    if not all(formulas.is_constant(value) and value.is_real for value in values):
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
    first, second = map(formulas.with_imaginary, (formulas.expression_of(one), formulas.expression_of(other)))
    if first is None or second is None:
        return False
    if formulas.is_constant(first) and formulas.is_constant(second):
        if formulas.differ(first, second):
            return False
        same = bool((first - second).doit().equals(0))
        return same or (not exact and (_rounds(first, other.value) or _rounds(second, one.value)))
    return formulas.verified(first, second) and (not exact or formulas.verified(second, first))


def _rounds(constant: Any, text: str) -> bool:
    """Return whether `text` is a decimal of the constant with six or more digits."""
    if not is_decimal(text) or len(text) > formulas.MAX_FORMULA:
        return False
    value = constant.evalf(max(_DIGITS, len(text) + _MORE_DIGITS))
    return bool(value.is_Float) and rounds_to(Fraction(Decimal(str(value))), text)


# ---- the members of lists, tuples, vectors, sets and intervals

_DELIMITERS = {"(": ")]", "[": ")]", "\\{": ("\\}",), "\\langle": ("\\rangle",)}
_DECIMAL_COMMA = re.compile(r"-?\d+,\d+|-?\d+")
_LETTER = re.compile(r"[A-Za-z]")


def members_of(value: str) -> Members | None:
    r"""The members of a list, split at commas; None if `value` is no list. Each `\pm` in a set gives two members."""
    opening = next((mark for mark in _DELIMITERS if value.startswith(mark)), "")
    closing = next((mark for mark in _DELIMITERS.get(opening, "") if value.endswith(mark)), "")
    members = _split(value[len(opening) : len(value) - len(closing)]) if closing else None
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
    """Split `text` at commas outside brackets, or at semicolons between decimal commas; None for unpaired brackets."""
    if ";" in text and all(map(_DECIMAL_COMMA.fullmatch, parts := [part.strip() for part in text.split(";")])):
        return parts
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


def by_name(members: list[str]) -> list[str]:
    """The members of a list in the order of their names, if each is a letter: of y=2, x=1 the x is first."""
    names = [read(member).name for member in members]
    if len(set(names)) < len(names) or not all(_LETTER.fullmatch(name) for name in names):
        return members
    return [member for _, member in sorted(zip(names, members, strict=True))]
