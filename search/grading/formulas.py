"""Formulas as sympy's expressions, which math-verify parses and compares."""

import re
from functools import lru_cache
from typing import Any, NamedTuple

from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig
from mpmath import mp
from sympy import Abs, Basic, Float, I, MatrixBase, Pow, Rational, UnevaluatedExpr, exp, factorial, preorder_traversal

from espalier.search.grading.reading import Reading

_MAX_DIGITS = 20_000
"""Decimal digits before or behind the point up to which sympy may compute a constant."""
_BITS_OF_A_DIGIT = 3.33
_MAX_POWER = 1000
"""Exponent, or number with a factorial, up to which a constant need not be estimated first."""
_PRECISION = 60
_SURE = 1e-15
"""Relative difference from which two estimates differ for certain; they are good to some 30 digits."""
_MAX_EXPONENT = 2**50
"""Binary exponent from which a number is beyond: only that it is huge, or tiny, is known of it."""


class _Estimate(NamedTuple):
    """A value in 60 digits.

    Attributes:
        value: a number of mpmath; if `beyond`, only its sign, and whether it is huge or tiny, are right.
        beyond: whether it has more digits than can be estimated.
        costly: whether it has a part with too many digits to be computed, though perhaps none itself.
    """

    value: Any
    beyond: bool = False
    costly: bool = False


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
        if first is None or second is None or not (first.costly or second.costly):
            return False
        if first.beyond and second.beyond:
            return bool(abs(first.value) > 1) != bool(abs(second.value) > 1)
        return bool(abs(first.value - second.value) > _SURE * max(abs(first.value), abs(second.value)))


def may_cost(constant: Any) -> bool:
    """Return whether a constant has a power or a factorial that may be huge."""
    for part in preorder_traversal(constant):
        if isinstance(part, Pow | exp | factorial):
            number: Any = part.args[-1]
            if not number.is_Rational or abs(number.p) > _MAX_POWER:
                return True
    return False


def _exponent(value: Any) -> int:
    """The binary exponent of a number of mpmath."""
    return mp.mag(value) if value else 0


def _estimate(constant: Any) -> _Estimate | None:
    """Estimate a constant from those that it is made of; None if that is not known, as where terms cancel out."""
    if constant.is_Rational:
        return _Estimate(mp.mpf(constant.p) / constant.q)
    if constant.is_Float or constant.is_NumberSymbol:
        return _Estimate(mp.mpf(str(constant.evalf(_PRECISION))))
    parts = [_estimate(part) for part in constant.args]
    known = [part for part in parts if part is not None]
    if not parts or len(known) < len(parts):
        return None
    try:
        found = _combined(constant, known)
    except (ArithmeticError, TypeError, ValueError):
        return None
    if found is None:
        return None
    is_extreme = found.beyond or abs(_exponent(found.value)) > _MAX_DIGITS * _BITS_OF_A_DIGIT
    return found._replace(costly=is_extreme or any(part.costly for part in known))


def _combined(constant: Any, parts: list[_Estimate]) -> _Estimate | None:

    if constant.is_Add:
        return _sum(parts)
    if constant.is_Mul:
        return _limited(mp.fprod(part.value for part in parts), parts)
    if constant.is_Pow:
        return _power(*parts)
    if isinstance(constant, exp):
        return _power(_Estimate(mp.e), parts[0])
    if isinstance(constant, factorial) and parts[0].value >= 0:
        return _exponential(mp.loggamma(parts[0].value + 1), beyond=parts[0].beyond)
    if isinstance(constant, Abs | UnevaluatedExpr):
        return parts[0]
    if any(part.costly for part in parts):
        return None
    value = constant.evalf(_PRECISION)
    return _Estimate(mp.mpf(str(value))) if value.is_Float else None


def _sum(parts: list[_Estimate]) -> _Estimate | None:

    huge = [part for part in parts if part.beyond and abs(part.value) > 1]
    if huge:
        return huge[0] if len(huge) == 1 else None
    largest = max(abs(part.value) for part in parts)
    total = mp.fsum(part.value for part in parts)
    return _Estimate(total) if abs(total) > _SURE * largest else None


def _power(base: _Estimate, exponent: _Estimate) -> _Estimate | None:

    if base.beyond or (exponent.beyond and base.value <= 0) or base.value == 0:
        whole = not exponent.beyond and base.value > 0 and exponent.value != 0
        return _Estimate(base.value if exponent.value > 0 else 1 / base.value, beyond=True) if whole else None
    if base.value < 0:
        small = mp.isint(exponent.value) and abs(exponent.value) < _MAX_EXPONENT
        return _Estimate(mp.power(base.value, int(exponent.value))) if small else None
    logarithm = mp.log(base.value) * exponent.value
    if abs(exponent.value) > 1 / _SURE**2 and abs(logarithm) < _MAX_EXPONENT:  # of a base near 1, which was rounded
        return None
    return _exponential(logarithm, beyond=exponent.beyond)


def _exponential(logarithm: Any, beyond: bool) -> _Estimate | None:
    """The number with this natural logarithm."""
    if beyond and abs(logarithm) < 1:  # a power of 1, or of a tiny exponent
        return None
    if beyond or abs(logarithm) > _MAX_EXPONENT:
        return _Estimate(mp.ldexp(1, 2 * _MAX_EXPONENT if logarithm > 0 else -2 * _MAX_EXPONENT), beyond=True)
    return _Estimate(mp.exp(logarithm))


def _limited(value: Any, parts: list[_Estimate]) -> _Estimate | None:
    """The product of `parts`, which is beyond if one of them is; not known if two are, which may cancel out."""
    count = sum(part.beyond for part in parts)
    if count > 1 or (count and abs(_exponent(value)) < _MAX_EXPONENT):
        return None
    return _Estimate(value, beyond=bool(count))


_READINGS = 256
"""Parsed formulas cached in a child process: a vote compares each with many, and parsing costs as much as comparing."""
MAX_FORMULA = 5000
"""Characters of a formula that is parsed, which takes about a second; a longer one equals only the same text."""
_CAPITAL = re.compile(r"\\(?:begin|end|text|math[a-z]+)\s*\{[^{}]*\}|\\[A-Za-z]+|([A-Z])(?:_\{?(\w+)\}?)?(?!\()")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*°")
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
    """Parse a formula by math-verify, with decimals as exact fractions; None if it cannot be parsed, or is too long."""
    if len(formula) > MAX_FORMULA:
        return None

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
