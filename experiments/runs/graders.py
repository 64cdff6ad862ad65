"""Graders of answers: math-verify, or another rule that a run names."""

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import cast

from espalier.engine.errors import EspalierError, nearest
from espalier.engine.own_code import load_code
from espalier.search.grading.math_verify import DEFAULT_MEMORY_BYTES, Grader
from espalier.search.grading.notation.numerals import number_in

Check = Callable[[str, str], bool]
"""Return true if an answer, the second text, is right by the gold answer, the first."""

DEFAULT = "math-verify"
_NUMERIC_TOLERANCE = 1e-6
_CHOICE = re.compile(r"^\W*(?:\\text\w*\{)?\W*([A-Za-z])(?:\W.*)?$", re.DOTALL)
_INTEGER = re.compile(r"\d+")


def make_grader(name: str = DEFAULT, memory_bytes: int = DEFAULT_MEMORY_BYTES) -> Grader:
    """A grader by its name; what it checks runs in child processes with limits of time and memory.

    - `math-verify`: equal values, formulas and sets; see `grading.equality`.
    - `exact`: the same text, but for blanks around it.
    - `choice`: the same letter, as in `(B)`, `B.` or `B: because`.
    - `numeric` or `numeric:TOLERANCE`: numbers that differ by no more than a share of the gold one (default 1e-6).
    - `expression`: the gold answer is a Python expression that is true of the text `answer`, as
      `value(answer) == 24 and sorted(numbers(answer)) == [1, 2, 3, 4]`; see `holds`.
    - `MODULE:FUNCTION`: a function of yours that takes the gold answer and the answer, and returns whether it is right.
      The module may lie in the current folder, as with `python -m`.

    Raises:
        EspalierError: there is no such grader.
    """
    if name == DEFAULT:
        return Grader(memory_bytes=memory_bytes)
    return Grader(memory_bytes=memory_bytes, check=_check(name), rule=name)


def _check(name: str) -> Check:
    kind, _, argument = name.partition(":")
    if name in _CHECKS:
        return _CHECKS[name]
    if kind == "numeric":
        with suppress(ValueError):
            if 0 <= (tolerance := float(argument)) < float("inf"):
                return partial(is_close, tolerance=tolerance)
        raise EspalierError(f"--grader numeric: the tolerance must be a number from 0 on, is {argument!r}")
    if not (kind and argument):
        known = f"{DEFAULT}, {', '.join(_CHECKS)}, numeric:TOLERANCE, MODULE:FUNCTION"
        raise EspalierError(f"--grader: {name!r} is none of {known}{nearest(name, (DEFAULT, *_CHECKS))}")
    try:
        check = load_code(name)
    except EspalierError as error:
        raise EspalierError(f"--grader {name}: {error}") from error
    if not callable(check):
        raise EspalierError(f"--grader {name}: it is no function")
    return cast(Check, check)


def is_same_text(gold: str, answer: str) -> bool:
    """Return true if both are the same, but for blanks around them."""
    return gold.strip() == answer.strip()


def is_same_choice(gold: str, answer: str) -> bool:
    """Return true if both begin with the same letter of a choice."""
    letters = [found[1].upper() if (found := _CHOICE.match(text)) else None for text in (gold, answer)]
    return letters[0] is not None and letters[0] == letters[1]


def is_close(gold: str, answer: str, tolerance: float = _NUMERIC_TOLERANCE) -> bool:
    """Return true if both are numbers that differ by at most `tolerance` times the gold one; 50% is 0.5."""
    one, other = _number(gold), _number(answer)
    return one is not None and other is not None and abs(one - other) <= tolerance * abs(one)


def _number(text: str) -> float | None:
    bare = text.strip().strip("$").replace("\\%", "%").replace("\\$", "").strip()
    found = number_in(bare.removesuffix("%"))
    return None if found is None else float(found) / (100 if bare.endswith("%") else 1)


def holds(gold: str, answer: str) -> bool:
    """Return true if the Python expression `gold` is true of `answer`.

    It may use arithmetic, comparisons, `and`, `or`, `not`, lists, and the functions `value` (of an arithmetic
    expression in a text), `numbers` (the whole numbers in a text), `abs`, `float`, `int`, `len`, `max`, `min`,
    `round`, `set`, `sorted`, `sum`; by simpleeval, which reaches nothing else.

    Raises:
        ValueError: the gold answer is no such expression.
    """
    from simpleeval import EvalWithCompoundTypes, FeatureNotAvailable, InvalidExpression

    functions = {f.__name__: f for f in (abs, float, int, len, max, min, round, set, sorted, sum)}
    functions |= {"value": _value, "numbers": _numbers}
    evaluator = EvalWithCompoundTypes(functions=functions, names={"answer": answer})
    try:
        return bool(evaluator.eval(gold))
    except (InvalidExpression, FeatureNotAvailable, SyntaxError) as error:
        raise ValueError(f"the gold answer is no expression of an answer: {error}") from error
    except (ArithmeticError, TypeError, ValueError):  # of this answer
        return False


def _value(text: str) -> float:
    """The value of an arithmetic expression.

    Raises:
        ValueError: the text is none.
    """
    from simpleeval import SimpleEval

    try:
        return SimpleEval(functions={}, names={}).eval(text.replace("×", "*").replace("÷", "/").replace("^", "**"))
    except Exception as error:  # whatever somebody's text holds
        raise ValueError(f"{text!r} has no value") from error


def _numbers(text: str) -> list[int]:
    return [int(found) for found in _INTEGER.findall(text)]


_CHECKS: dict[str, Check] = {
    "exact": is_same_text,
    "choice": is_same_choice,
    "numeric": is_close,
    "expression": holds,
}
