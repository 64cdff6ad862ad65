"""Formulas as sympy's expressions, which math-verify compares, and its parser latex2sympy parses."""

import re
from functools import lru_cache
from math import prod
from typing import Any

from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy
from math_verify import verify
from math_verify.parser import should_treat_as_complex
from mpmath import mp
from sympy import Abs, Basic, Float, I, MatrixBase, Pow, Rational, UnevaluatedExpr, exp, factorial, preorder_traversal

from espalier.search.grading.reading import Reading

_READINGS = 256
"""Parsed formulas cached in a child process: a vote compares each with many, and parsing costs as much as comparing."""
_MAX_DIGITS = 20_000
"""Decimal digits before or behind the point up to which sympy may compute a constant."""
_BITS_OF_A_DIGIT = 3.33
_MAX_POWER = 1000
"""Exponent, or number with a factorial, up to which a constant need not be estimated first."""
_PRECISION = 60
_SURE = 1e-15
"""Relative difference from which two estimates differ for certain; they are good to some 30 digits."""
_MAX_LOGARITHM = 2**50
"""Natural logarithm of a number that is taken for infinite; one with its negative is taken for 0."""
_SMALL_ROOT = 1e-3
"""Exponent below which a number that is taken for infinite may be none after all."""


def differ(one: Any, other: Any) -> bool:
    """Return whether two constants differ for certain, if either would cost much to compute; False if unknown.

    Args:
        one: a real constant of sympy, not evaluated.
        other: another one.
    """
    if not (may_cost(one) or may_cost(other)):
        return False
    with mp.workdps(_PRECISION):
        first, second = _estimate(one), _estimate(other)
        apart = abs(first - second)
        # A product or power without a 0 in it is none, even if it is too small for an estimate.
        nonzero = apart == 0 and 0 in (one, other) and one.has(0) != other.has(0)
        certain = nonzero or mp.isinf(apart) or apart > _SURE * max(abs(first), abs(second))
        return bool(certain) and (_is_costly(one) or _is_costly(other))


def may_cost(constant: Any) -> bool:
    """Return whether a constant has a power or a factorial that may be huge."""
    for part in preorder_traversal(constant):
        if isinstance(part, Pow | exp | factorial):
            number: Any = part.args[-1]
            if not number.is_Rational or abs(number.p) > _MAX_POWER:
                return True
    return False


def _is_costly(constant: Any) -> bool:
    """Return whether a constant has a part with too many digits to be computed, though perhaps none itself."""
    most = _MAX_DIGITS * _BITS_OF_A_DIGIT
    return any(not part.is_Rational and abs(mp.mag(_estimate(part))) > most for part in preorder_traversal(constant))


@lru_cache(_READINGS)
def _estimate(constant: Any) -> Any:
    """Estimate a constant in 60 digits of mpmath, from those that it is made of.

    Infinite, or 0, if it has more digits than can be estimated; nan if it is not known, as where terms cancel out.
    """
    if constant.is_Rational:
        return mp.mpf(constant.p) / constant.q
    parts = [_estimate(part) for part in constant.args]
    if any(map(mp.isnan, parts)):
        return mp.nan
    try:
        if constant.is_Add:
            total = sum(parts)
            return total if mp.isinf(total) or abs(total) > _SURE * max(map(abs, parts)) else mp.nan
        if constant.is_Mul:
            return prod(parts)
        if isinstance(constant, Pow | exp):
            return _power(*(parts if constant.is_Pow else (mp.e, *parts)))
        if isinstance(constant, factorial) and parts[0] >= 0:
            return _exponential(mp.loggamma(parts[0] + 1))
        if isinstance(constant, Abs | UnevaluatedExpr):
            return abs(parts[0]) if isinstance(constant, Abs) else parts[0]
        value = mp.nan if any(map(_is_costly, constant.args)) else constant.evalf(_PRECISION)
        return mp.mpf(str(value))
    except (ArithmeticError, TypeError, ValueError):
        return mp.nan


def _power(base: Any, exponent: Any) -> Any:
    if base < 0:
        small = mp.isint(exponent) and abs(exponent) < _MAX_LOGARITHM
        return mp.power(base, int(exponent)) if small else mp.nan
    slope = mp.log(base)
    rounded = abs(exponent) > 1 / _SURE**2 and abs(slope) < _SURE  # a base near 1
    vague = mp.isinf(slope) and abs(exponent) < _SMALL_ROOT
    return mp.nan if rounded or vague else _exponential(slope * exponent)


def _exponential(logarithm: Any) -> Any:
    """The number with this natural logarithm."""
    if abs(logarithm) > _MAX_LOGARITHM:
        return mp.inf if logarithm > 0 else mp.zero
    return mp.exp(logarithm)


MAX_FORMULA = 5000
"""Characters of a formula that is parsed, which takes about a second; a longer one equals only the same text."""
_CAPITAL = re.compile(r"\\(?:begin|end|text|math[a-z]+)\s*\{[^{}]*\}|\\[A-Za-z]+|([A-Z])(?:_\{?(\w+)\}?)?(?!\()")
_LARGE_BINOMIAL = re.compile(r"\\binom\{(\d{5,9})\}\{(\d{1,9})\}")


def with_imaginary(expression: Any) -> Any:
    """A formula whose only letter is i, as a complex number."""
    if {str(letter) for letter in getattr(expression, "free_symbols", ())} != {"i"} or may_cost(expression):
        return expression

    return expression.xreplace(dict.fromkeys(expression.free_symbols, I))


def expression_of(reading: Reading) -> Any:
    """The value of an answer as sympy's expression; None if it cannot be parsed."""
    if reading.number is not None:
        return Rational(reading.number.numerator, reading.number.denominator)
    return parsed(reading.value)


@lru_cache(_READINGS)
def parsed(formula: str) -> Any:
    """Parse a formula, with decimals as exact fractions and degrees in radians; None if it is none, or too long."""
    if len(formula) > MAX_FORMULA:
        return None

    # math-verify's `parse` is this behind a search for formulas in a text.
    try:
        expression = latex2sympy(
            _parseable(formula),
            is_real=not should_treat_as_complex(formula),
            convert_degrees=True,
            normalization_config=NormalizationConfig(malformed_operators=True, nits=True, boxed="none"),
        )
        if not isinstance(expression, Basic | MatrixBase):
            return None
        return expression.xreplace({number: Rational(str(number)) for number in expression.atoms(Float)})
    except MemoryError:
        raise
    except Exception:
        return None


def _parseable(formula: str) -> str:
    # They would be computed at once.
    factorials = _LARGE_BINOMIAL.sub(_in_factorials, formula) if "\\binom" in formula else formula
    return _CAPITAL.sub(_small, factorials).replace("°", "^{\\circ}").replace("$", "")


def _in_factorials(binomial: re.Match[str]) -> str:
    above, below = int(binomial[1]), int(binomial[2])
    return rf"\frac{{{above}!}}{{{below}! \cdot {above - below}!}}" if below <= above else "0"


def _small(capital: re.Match[str]) -> str:
    """Replace a capital letter by a variable of its own; it would be made small, I imaginary, and T a transposition."""
    return f" y_{{77{ord(capital[1])}{capital[2] or ''}}}" if capital[1] else capital[0]


def is_constant(expression: Any) -> bool:
    """Return whether an expression is a number without letters."""
    return bool(getattr(expression, "is_number", False)) and not expression.free_symbols


def verified(gold: Any, answer: Any) -> bool:
    """Return whether math-verify takes an expression for the gold one; an error of its own is no."""
    try:
        return bool(verify(gold, answer, timeout_seconds=None, raise_on_error=True, allow_set_relation_comp=True))
    except MemoryError:
        raise
    except Exception:
        return False
