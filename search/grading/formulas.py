"""Formulas as sympy's expressions, which math-verify parses and compares."""

import re
from functools import lru_cache
from typing import Any

from espalier.search.grading.magnitudes import may_cost
from espalier.search.grading.reading import Reading

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
    from sympy import I

    return expression.xreplace(dict.fromkeys(expression.free_symbols, I))


def expression_of(reading: Reading) -> Any:
    """The value of an answer as sympy's expression; None if it cannot be parsed."""
    from sympy import Rational

    if reading.number is not None:
        return Rational(reading.number.numerator, reading.number.denominator)
    return parsed(reading.value)


@lru_cache(_READINGS)
def parsed(formula: str) -> Any:
    """Parse a formula by math-verify, with decimals as exact fractions; None if it cannot be parsed, or is too long."""
    if len(formula) > MAX_FORMULA:
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


def is_constant(expression: Any) -> bool:
    """Return whether an expression is a number without letters."""
    return bool(getattr(expression, "is_number", False)) and not expression.free_symbols


def verified(gold: Any, answer: Any) -> bool:
    """Return whether math-verify takes an expression for the gold one; an error of its own is no."""
    from math_verify import verify

    try:
        return bool(verify(gold, answer, timeout_seconds=None, raise_on_error=True, allow_set_relation_comp=True))
    except MemoryError:
        raise
    except Exception:
        return False
