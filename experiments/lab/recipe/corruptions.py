"""Equations and solutions that go wrong on purpose, for teaching the verifier what its generator seldom shows."""

import random
from collections.abc import Callable, Sequence

from espalier.experiments.demo.problems import Problem, boxed, equation, lettered, max_value
from espalier.experiments.lab.recipe.oracle import label_steps

Write = Callable[[random.Random, int, int, Sequence[int]], tuple[str, int]]
"""From the running value, a signed operand and the problem's other operands to a wrong step and the value after it."""


def _wrong_result(rng: random.Random, value: int, operand: int, _: Sequence[int]) -> tuple[str, int]:
    result = slip_result(rng, value, operand)
    return equation(value, operand, result), result


def _wrong_operand(rng: random.Random, value: int, operand: int, others: Sequence[int]) -> tuple[str, int]:
    """Operand misread or taken from another sentence, calculated rightly from there."""
    sign = 1 if operand > 0 else -1
    misread = rng.choice(others) if others and rng.random() < 0.6 else sign * slip_number(rng, abs(operand))
    if value + misread < 0:
        return _wrong_result(rng, value, operand, others)
    return equation(value, misread), value + misread


def _wrong_left(rng: random.Random, value: int, operand: int, others: Sequence[int]) -> tuple[str, int]:
    """Running value copied wrongly, calculated rightly from there."""
    miscopied = slip_number(rng, value) if value else 1
    if miscopied + operand < 0:
        return _wrong_result(rng, value, operand, others)
    return equation(miscopied, operand), miscopied + operand


def _wrong_operation(rng: random.Random, value: int, operand: int, others: Sequence[int]) -> tuple[str, int]:
    if value - operand < 0:
        return _wrong_result(rng, value, operand, others)
    return equation(value, -operand), value - operand


_WRITERS: tuple[tuple[Write, float], ...] = (
    (_wrong_result, 0.6),
    (_wrong_operand, 0.22),
    (_wrong_left, 0.1),
    (_wrong_operation, 0.08),
)
RIGHT_SHARE = 0.25
"""Share of solutions left as they are."""
STRUCTURE_SHARE = 0.1
"""Share of wrong solutions that skip or repeat a sentence instead of slipping in one."""


def slipped_steps(rng: random.Random, problem: Problem) -> list[str]:
    """Returns a solution's steps with one step gone wrong, the rest carried on from there."""
    places = list(enumerate(problem.operands))
    slip_at = rng.randrange(len(places) + 1)
    if rng.random() < STRUCTURE_SHARE:
        at = rng.randrange(len(places))
        places = places[:at] + places[at + 1 :] if rng.random() < 0.5 else places[: at + 1] + places[at:]
        slip_at = -1
    by_place = rng.random() < 0.5  # else letters go on one by one whatever was skipped or repeated
    value = problem.start
    steps: list[str] = []
    for index, (place, operand) in enumerate(places):
        if index == slip_at:
            writers, weights = zip(*_WRITERS, strict=True)
            (write,) = rng.choices(writers, weights)
            step, value = write(rng, value, operand, [other for other in problem.operands if other != operand])
        else:
            result = value + operand
            if result < 0:
                return steps
            step, value = equation(value, operand), result
        steps.append(lettered(place if by_place else index, step))
    answer = slip_number(rng, value) if slip_at == len(places) else value
    return [*steps, boxed(answer)]


def judged_solution(rng: random.Random, problem: Problem) -> tuple[list[str], list[bool]]:
    """Returns steps, right or with a slip, and their labels."""
    while True:
        steps = problem.steps if rng.random() < RIGHT_SHARE else slipped_steps(rng, problem)
        if steps:
            return steps, label_steps(problem.start, problem.operands, steps)


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
