r"""Thoughts of the thinking generator: solutions written down with slips, checked, taken back, and done again.

    <think>
    (a) 811-652=169
    (b) 169+727=896
    \boxed{896}

    Wait, check.
    (a) 811-652=169; 811-652=159? 811-652=159.
    (b) 159+727=886; 159+727=886.
    \boxed{886}

    Wait, check.
    …
    </think>

The first pass is a quick one. Each later one does every equation again until two results agree. A thought may end when
its last box says what an earlier one said, and often goes on all the same, as the thoughts of published models do. The
answer then writes the solution down once more, and copies the results.
"""

import random
from dataclasses import dataclass
from itertools import accumulate

from espalier.experiments.demo.problems import Problem, boxed, equation, lettered
from espalier.experiments.demo.recipe.corruptions import slip_result

OPEN, CLOSE = "<think>", "</think>"
WAIT = "Wait, check.\n"
MAX_CHECKS = 4
"""Passes after the first one, at most."""
QUICK_SLIPS, CHECK_SLIPS = 0.2, 0.3
"""Share of wrong results in a first pass, and among the results of the later ones."""
ENOUGH = 0.6
"""Chance that a thought which may end does."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of a thought or an answer.

    Attributes:
        text: the text, which begins and ends between two tokens.
        result: whether it is the result of an equation that has to be calculated.
        right: whether that result is right.
    """

    text: str
    result: bool = False
    right: bool = True


@dataclass(frozen=True, slots=True)
class Line:
    """The end of a line: what the thought holds true from here on.

    Attributes:
        pieces: number of pieces up to here.
        index: place of the line's operand.
        left: left operand.
        result: what it holds for the result.
    """

    pieces: int
    index: int
    left: int
    result: int


@dataclass(frozen=True, slots=True)
class Thought:
    """A thought in pieces, its lines, and its boxes: the number of pieces up to each and its value."""

    pieces: list[Piece]
    lines: list[Line]
    boxes: list[tuple[int, int]]


def draw_thought(rng: random.Random, problem: Problem) -> Thought:
    """Draws a thought about a problem, from behind the opening mark's line to before the closing mark."""
    thought = Thought([], [], [])
    _write_pass(rng, problem, thought, quick=True)
    for _ in range(MAX_CHECKS):
        *earlier, last = [value for _, value in thought.boxes]
        if last in earlier and rng.random() < ENOUGH:
            break
        thought.pieces.append(Piece(WAIT))
        _write_pass(rng, problem, thought, quick=False)
    return thought


def _write_pass(rng: random.Random, problem: Problem, thought: Thought, quick: bool) -> None:
    """Adds one pass over all operations, and its box."""
    pieces, value = thought.pieces, problem.start
    for index, operand in enumerate(problem.operands):
        rest = problem.operands[index + 1 :]
        asked = equation(value, operand).split("=")[0] + "="
        pieces.append(Piece(lettered(index, asked)))
        found: list[int] = []
        while True:
            found.append(_calculate(rng, value, operand, rest, QUICK_SLIPS if quick else CHECK_SLIPS))
            pieces.append(Piece(str(found[-1]), result=True, right=found[-1] == value + operand))
            if quick or found[-1] in found[:-1]:
                break
            pieces.append(Piece(f"{';' if len(found) == 1 else '?'} {asked}"))
        pieces.append(Piece("\n" if quick else ".\n"))
        thought.lines.append(Line(len(pieces), index, value, found[-1]))
        value = found[-1]
    pieces.append(Piece(f"{boxed(value)}\n\n"))
    thought.boxes.append((len(pieces), value))


def _calculate(rng: random.Random, left: int, operand: int, rest: tuple[int, ...], slips: float) -> int:
    """A result, wrong with a chance of `slips` where the solution can go on from there."""
    if rng.random() < slips:
        slip = slip_result(rng, left, operand)
        if min(accumulate(rest, initial=slip)) >= 0:
            return slip
    return left + operand


def answer_pieces(problem: Problem, thought: Thought, pieces: int) -> list[Piece]:
    """The solution as it stands after so many pieces of a thought.

    Its results are those of the last line with the same left operand; what no line has is calculated.
    """
    known = {(line.index, line.left): line.result for line in thought.lines if line.pieces <= pieces}
    answer, value = [], problem.start
    for index, operand in enumerate(problem.operands):
        asked = lettered(index, equation(value, operand).split("=")[0] + "=")
        left, value = value, known.get((index, value), value + operand)
        answer += [Piece(asked), Piece(str(value), result=(index, left) not in known), Piece("\n\n")]
    return [*answer, Piece(boxed(value))]
