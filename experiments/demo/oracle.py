"""The oracle: exact labels of a solution's steps, from the numbers of the problem and nothing else."""

import re
from collections.abc import Sequence

from espalier.experiments.demo.problems import DELIMITER

_EQUATION = re.compile(r"(\d+)([+-])(\d+)=(\d+)")
_BOXED = re.compile(r"\\boxed\{(\d+)\}")


def parse_equation(step: str) -> tuple[int, int, int] | None:
    """Returns left operand, signed right operand and result of `a+b=c` or `a-b=c`, or None for any other text."""
    match = _EQUATION.fullmatch(step.strip())
    if match is None:
        return None
    left, sign, right, result = match.groups()
    return int(left), int(right) if sign == "+" else -int(right), int(result)


def parse_answer(step: str) -> str | None:
    r"""Returns the digits inside `\boxed{...}`, or None for any other text."""
    match = _BOXED.fullmatch(step.strip())
    return match.group(1) if match else None


def numbers_of(solution: str) -> tuple[int, tuple[int, ...]]:
    """Returns start and signed operands of a reference solution.

    Raises:
        ValueError: The text is not a reference solution of this task.
    """
    equations = [parse_equation(step) for step in solution.split(DELIMITER)[:-1]]
    parsed = [parts for parts in equations if parts is not None]
    if not parsed or len(parsed) != len(equations):
        raise ValueError(f"not a running-quantity solution: {solution!r}")
    return parsed[0][0], tuple(operand for _, operand, _ in parsed)


def label_steps(start: int, operands: Sequence[int], steps: Sequence[str]) -> list[bool]:
    """Labels each step: right if it and all before it are right.

    Step k must continue the running value, apply the k-th operand and have the right result; the step after the last
    operand must give the final value as the answer. Nothing that follows the answer is right.
    """
    labels: list[bool] = []
    value, right = start, True
    for index, step in enumerate(steps):
        if index < len(operands):
            right = right and parse_equation(step) == (value, operands[index], value + operands[index])
            value += operands[index]
        else:
            right = right and index == len(operands) and parse_answer(step) == str(value)
        labels.append(right)
    return labels
