r"""Thoughts of the thinking generator: a solution whose results are guessed first, then found by columns, and checked.

    <think>
    (a) 811-652=169?1-2=9',1-5'=5',8-6'=1;159
    (b) 159+727=886?9+7=6',5+2'=9?8,1+7=8;886:9+7=6',5+2'=8,1+7=8;886
    \boxed{886}

    Wait, check.
    (b) 159+727:9+7=6',5+2'=8,1+7=8;886
    \boxed{886}

    </think>

    \boxed{886}

A guess slips as the generator slips without a thought. By columns, units first, with a stroke where one is carried or
borrowed, every token is easy to tell; a question mark takes a guess or a digit back, and some columns are written
twice. The last line is then checked several times more, though it is right, as thoughts of published models go on. All
that a line says is read from nearby but for its operand, which is read from the problem as without a thought.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from espalier.experiments.demo.problems import DELIMITER, Problem, boxed, equation, lettered
from espalier.experiments.demo.recipe.corruptions import slip_result

OPEN, CLOSE = "<think>", "</think>"
CHECK = "Wait, check.\n"
MAX_CHECKS = 10
"""Checks of the last line, at most."""
GUESS_SLIPS, COLUMN_SLIPS = 0.3, 0.02
"""Share of wrong results among guesses, and of digits by columns that are taken back."""
TWICE = 0.3
"""Share of the lines whose columns are written twice."""
ENOUGH = 0.25
"""Chance that a thought ends behind a box."""


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
    """A thought in pieces: the number of pieces up to the end of each line, and the value held there.

    Attributes:
        pieces: its text.
        values: the running value after each line.
        boxes: the value of each box.
    """

    pieces: list[Piece]
    values: list[tuple[int, int]]
    boxes: list[tuple[int, int]]


def draw_thought(rng: random.Random, problem: Problem) -> Thought:
    """Draws a thought about a problem, from behind the opening mark's line to before the closing mark."""
    thought = Thought([], [], [])
    pieces, last = thought.pieces, len(problem.operands) - 1
    for index, (left, operand) in enumerate(zip(problem.values, problem.operands, strict=False)):
        asked = equation(left, operand).split("=")[0]
        guess = left + operand if rng.random() >= GUESS_SLIPS else slip_result(rng, left, operand)
        pieces += [Piece(lettered(index, f"{asked}=")), Piece(str(guess), result=True, right=guess == left + operand)]
        pieces += [Piece("?"), *columns(rng, left, operand)]
        if rng.random() < TWICE:
            pieces += [Piece(":"), *columns(rng, left, operand)]
        _end_line(thought, left + operand)
    for number in range(MAX_CHECKS + 1):
        if number:
            pieces += [Piece(CHECK), Piece(lettered(last, f"{asked}:")), *columns(rng, left, operand)]
            _end_line(thought, left + operand)
        pieces.append(Piece(f"{boxed(left + operand)}\n\n"))
        thought.boxes.append((len(pieces), left + operand))
        if rng.random() < ENOUGH:
            break
    return thought


def _end_line(thought: Thought, value: int) -> None:
    thought.pieces.append(Piece("\n"))
    thought.values.append((len(thought.pieces), value))


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
