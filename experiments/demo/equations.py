"""Single equations: drawn for drills, and the ways in which one goes wrong."""

import random
from collections.abc import Callable

from espalier.experiments.demo.problems import max_value

Slip = Callable[[random.Random, int, int], int]
"""From a left operand and a signed operand to a result, usually wrong."""


def draw_equation(rng: random.Random, max_operand: int) -> tuple[int, int]:
    """Returns a left operand and a signed operand whose sum is within bounds."""
    bound = max_value(max_operand)
    max_left = bound if max_operand > 100 or rng.random() < 0.5 else 200
    while True:
        left = rng.randint(1, max_left)
        operand = rng.randint(2, max_operand) * rng.choice((1, -1))
        if 0 <= left + operand <= bound:
            return left, operand


def _neighbour(rng: random.Random, left: int, operand: int) -> int:
    """Off by one in some decimal place: a carry forgotten or made up."""
    return left + operand + rng.choice((1, -1)) * 10 ** rng.randrange(max(3, len(str(left))))


def _digit(rng: random.Random, left: int, operand: int) -> int:
    """One digit replaced."""
    digits = list(str(left + operand))
    place = rng.randrange(len(digits))
    digits[place] = rng.choice([d for d in "0123456789" if d != digits[place]])
    return int("".join(digits))


def _two_digits(rng: random.Random, left: int, operand: int) -> int:
    """Two slips at once."""
    return _digit(rng, _digit(rng, left, operand), 0)


def _no_carries(_: random.Random, left: int, operand: int) -> int:
    """Every decimal place on its own, carries and borrows lost."""
    sign = 1 if operand > 0 else -1
    places = [(left // p % 10 + sign * (abs(operand) // p % 10)) % 10 * p for p in (1, 10, 100, 1000, 10_000)]
    return sum(places)


def _other_operation(_: random.Random, left: int, operand: int) -> int:
    """Subtracted instead of added, or the reverse."""
    return left - operand


def _copied(_: random.Random, left: int, __: int) -> int:
    """The left operand copied as the result."""
    return left


_SLIPS: tuple[tuple[Slip, float], ...] = (
    (_neighbour, 0.45),
    (_digit, 0.25),
    (_two_digits, 0.08),
    (_no_carries, 0.1),
    (_other_operation, 0.07),
    (_copied, 0.05),
)


def slip_result(rng: random.Random, left: int, operand: int) -> int:
    """Returns a wrong, non-negative result for `left + operand`."""
    slips, weights = zip(*_SLIPS, strict=True)
    while True:
        (slip,) = rng.choices(slips, weights)
        result = slip(rng, left, operand)
        if result >= 0 and result != left + operand:
            return result


def slip_number(rng: random.Random, number: int) -> int:
    """Returns a different positive number with one digit misread."""
    while True:
        wrong = _digit(rng, number, 0)
        if wrong > 0:
            return wrong
