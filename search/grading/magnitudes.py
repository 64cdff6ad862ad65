"""Comparison of huge constants without computing their digits: towers of powers and factorials would take forever."""

from typing import Any, NamedTuple

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
    import mpmath

    if not (may_cost(one) or may_cost(other)):
        return False
    with mpmath.mp.workdps(_PRECISION):
        first, second = _estimate(one), _estimate(other)
        if first is None or second is None or not (first.costly or second.costly):
            return False
        if first.beyond and second.beyond:
            return bool(abs(first.value) > 1) != bool(abs(second.value) > 1)
        largest = max(abs(first.value), abs(second.value))
        return bool(abs(first.value - second.value) > _SURE * largest)


def may_cost(constant: Any) -> bool:
    """Return whether a constant has a power or a factorial that may be huge."""
    import sympy

    for part in sympy.preorder_traversal(constant):
        if isinstance(part, sympy.Pow | sympy.exp | sympy.factorial):
            number: Any = part.args[-1]
            if not number.is_Rational or abs(number.p) > _MAX_POWER:
                return True
    return False


def _is_extreme(estimate: _Estimate) -> bool:
    return estimate.beyond or abs(_exponent(estimate.value)) > _MAX_DIGITS * _BITS_OF_A_DIGIT


def _exponent(value: Any) -> int:
    """The binary exponent of a number of mpmath."""
    from mpmath import mp

    return mp.mag(value) if value else 0


def _estimate(constant: Any) -> _Estimate | None:
    """Estimate a constant from those that it is made of; None if that is not known, as where terms cancel out."""
    import mpmath

    if constant.is_Rational:
        return _Estimate(mpmath.mpf(constant.p) / constant.q)
    if constant.is_Float or constant.is_NumberSymbol:
        return _Estimate(mpmath.mpf(str(constant.evalf(_PRECISION))))
    parts = [_estimate(part) for part in constant.args]
    known = [part for part in parts if part is not None]
    if not parts or len(known) < len(parts):
        return None
    try:
        found = _combined(constant, known)
    except (ArithmeticError, TypeError, ValueError):
        return None
    return found and found._replace(costly=_is_extreme(found) or any(part.costly for part in known))


def _combined(constant: Any, parts: list[_Estimate]) -> _Estimate | None:
    import sympy
    from mpmath import mp

    if constant.is_Add:
        return _sum(parts)
    if constant.is_Mul:
        return _limited(mp.fprod(part.value for part in parts), parts)
    if constant.is_Pow:
        return _power(*parts)
    if isinstance(constant, sympy.exp):
        return _power(_Estimate(mp.e), parts[0])
    if isinstance(constant, sympy.factorial) and parts[0].value >= 0:
        return _exponential(mp.loggamma(parts[0].value + 1), beyond=parts[0].beyond)
    if isinstance(constant, sympy.Abs | sympy.UnevaluatedExpr):
        return parts[0]
    if any(part.costly for part in parts):
        return None
    value = constant.evalf(_PRECISION)
    return _Estimate(mp.mpf(str(value))) if value.is_Float else None


def _sum(parts: list[_Estimate]) -> _Estimate | None:
    from mpmath import mp

    huge = [part for part in parts if part.beyond and abs(part.value) > 1]
    if huge:
        return huge[0] if len(huge) == 1 else None
    largest = max(abs(part.value) for part in parts)
    total = mp.fsum(part.value for part in parts)
    return _Estimate(total) if abs(total) > _SURE * largest else None


def _power(base: _Estimate, exponent: _Estimate) -> _Estimate | None:
    from mpmath import mp

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
    from mpmath import mp

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
