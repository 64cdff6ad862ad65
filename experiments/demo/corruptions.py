"""Solutions that go wrong on purpose, for teaching the verifier what its generator seldom shows."""

import random
from collections.abc import Callable, Sequence

from espalier.experiments.demo.equations import slip_number, slip_result
from espalier.experiments.demo.oracle import label_steps
from espalier.experiments.demo.problems import Problem, boxed, equation

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
    operands = list(problem.operands)
    slip_at = rng.randrange(len(operands) + 1)
    if rng.random() < STRUCTURE_SHARE:
        at = rng.randrange(len(operands))
        operands = operands[:at] + operands[at + 1 :] if rng.random() < 0.5 else operands[: at + 1] + operands[at:]
        slip_at = -1
    value = problem.start
    steps: list[str] = []
    for index, operand in enumerate(operands):
        if index == slip_at:
            writers, weights = zip(*_WRITERS, strict=True)
            (write,) = rng.choices(writers, weights)
            step, value = write(rng, value, operand, [other for other in problem.operands if other != operand])
        else:
            result = value + operand
            if result < 0:
                return steps
            step, value = equation(value, operand), result
        steps.append(step)
    answer = slip_number(rng, value) if slip_at == len(operands) else value
    return [*steps, boxed(answer)]


def judged_solution(rng: random.Random, problem: Problem) -> tuple[list[str], list[bool]]:
    """Returns steps, right or with a slip, and their labels."""
    while True:
        steps = problem.steps if rng.random() < RIGHT_SHARE else slipped_steps(rng, problem)
        if steps:
            return steps, label_steps(problem.start, problem.operands, steps)
