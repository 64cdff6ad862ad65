r"""Thoughts of the thinking generator: the numbers, a quick solution, and the same by columns, often more than once.

    <think>
    811;(a)-652;(b)+727.
    (a) 811-652=169
    (b) 169+727=896
    \boxed{896}

    Wait, by columns.
    (a)-652;811:1-2=9',1-5'=5',8-6'=1;159
    (b)+727.159:9+7=6',5+2'=9?8,1+7=8;886
    \boxed{886}

    Wait, once more.
    …
    </think>

    \boxed{886}

The quick pass slips as the generator slips without a thought. A later one writes each equation by columns, units first,
with a stroke where one is carried or borrowed, and a question mark behind a digit that is taken back: every token is
then easy to tell. So is what to read: an operand is said in the same words whenever it is said again, with a full stop
behind the last one. A thought often goes on though it is right, as the thoughts of published models do.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from espalier.experiments.demo.problems import DELIMITER, Problem, boxed, equation, lettered
from espalier.experiments.demo.recipe.corruptions import slip_result

OPEN, CLOSE = "<think>", "</think>"
BY_COLUMNS, ONCE_MORE = "Wait, by columns.\n", "Wait, once more.\n"
MAX_PASSES = 4
"""Passes of a thought at most, the quick one among them."""
QUICK_SLIPS, COLUMN_SLIPS = 0.2, 0.02
"""Share of wrong results in a quick pass, and of digits that are taken back in a later one."""
ENOUGH = 0.5
"""Chance that a thought ends behind a pass by columns."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of a thought or an answer.

    Attributes:
        text: the text, which begins and ends between two tokens.
        result: whether it is the result of an equation that has to be calculated at once.
        right: whether it is right.
    """

    text: str
    result: bool = False
    right: bool = True


@dataclass(frozen=True, slots=True)
class Thought:
    """A thought in pieces, and its boxes: the number of pieces up to each and its value."""

    pieces: list[Piece]
    boxes: list[tuple[int, int]]


def draw_thought(rng: random.Random, problem: Problem) -> Thought:
    """Draws a thought about a problem, from behind the opening mark's line to before the closing mark."""
    numbers = [f"{problem.start};", *(_operand(problem, index) for index in range(len(problem.operands)))]
    thought = Thought([Piece(f"{''.join(numbers)}\n")], [])
    _write_quickly(rng, problem, thought)
    for number in range(1, MAX_PASSES):
        thought.pieces.append(Piece(BY_COLUMNS if number == 1 else ONCE_MORE))
        _write_by_columns(rng, problem, thought)
        if rng.random() < ENOUGH:
            break
    return thought


def _operand(problem: Problem, index: int) -> str:
    """An operand as thoughts say it: `(a)+12;`, or `(a)+12.` for the last one."""
    letter, last = lettered(index, "").strip(), index + 1 == len(problem.operands)
    return f"{letter}{problem.operands[index]:+d}{'.' if last else ';'}"


def columns(rng: random.Random, left: int, operand: int) -> Iterator[Piece]:
    """Yields `left±operand` by columns: units first, strokes for what is carried, some digits taken back.

    The result, which must not be negative, follows behind a semicolon.
    """
    sign = 1 if operand > 0 else -1
    digits = max(len(str(left)), len(str(abs(operand))))
    carried = 0
    for place in range(digits):
        upper, lower = left // 10**place % 10, abs(operand) // 10**place % 10
        total = upper + sign * (lower + carried)
        yield Piece(f"{upper}{'+' if sign > 0 else '-'}{lower}{chr(39) * carried}=")
        if rng.random() < COLUMN_SLIPS:
            yield Piece(str((total + rng.choice((-1, 1))) % 10), right=False)
            yield Piece("?")
        carried = int(not 0 <= total <= 9)
        yield Piece(f"{total % 10}{chr(39) * carried}{',' if place + 1 < digits else ';'}")
    yield Piece(str(left + operand))


def _write_quickly(rng: random.Random, problem: Problem, thought: Thought) -> None:
    """Adds a solution with slips, and its box."""
    pieces, value = thought.pieces, problem.start
    for index, operand in enumerate(problem.operands):
        asked, left = equation(value, operand).split("=")[0], value
        value = _calculate(rng, left, operand, problem.operands[index + 1 :])
        right = value == left + operand
        pieces += [Piece(lettered(index, f"{asked}=")), Piece(str(value), result=True, right=right), Piece("\n")]
    _box(thought, value)


def _write_by_columns(rng: random.Random, problem: Problem, thought: Thought) -> None:
    """Adds the solution by columns, and its box."""
    for index, (left, operand) in enumerate(zip(problem.values, problem.operands, strict=False)):
        thought.pieces.append(Piece(f"{_operand(problem, index)}{left}:"))
        thought.pieces.extend([*columns(rng, left, operand), Piece("\n")])
    _box(thought, problem.values[-1])


def _box(thought: Thought, value: int) -> None:
    thought.pieces.append(Piece(f"{boxed(value)}\n\n"))
    thought.boxes.append((len(thought.pieces), value))


def _calculate(rng: random.Random, left: int, operand: int, rest: tuple[int, ...]) -> int:
    """A quick result, wrong now and then where the solution can go on from there."""
    if rng.random() < QUICK_SLIPS:
        slip = slip_result(rng, left, operand)
        if min(accumulate(rest, initial=slip)) >= 0:
            return slip
    return left + operand


def answer_pieces(problem: Problem, thought: Thought, pieces: int) -> list[Piece]:
    """The answer after so many pieces of a thought: its last box, or the solution where it has none yet."""
    boxes = [value for end, value in thought.boxes if end <= pieces]
    return [Piece(boxed(boxes[-1]))] if boxes else solution_pieces(problem)


def solution_pieces(problem: Problem) -> list[Piece]:
    """A problem's solution without a thought."""
    pieces: list[Piece] = []
    for step in problem.steps[:-1]:
        asked, result = step.split("=")
        pieces += [Piece(f"{asked}="), Piece(result, result=True), Piece(DELIMITER)]
    return [*pieces, Piece(problem.steps[-1])]
