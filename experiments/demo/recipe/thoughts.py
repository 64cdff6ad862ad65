r"""Thoughts of the thinking generator: a worked solution, some of whose results are taken back, and checks of its end.

    <think>
    (a) 811-652=159 <delimiter> (b) 159+727=876?886 <delimiter> \boxed{886} <delimiter>
    Hmm, once more. <delimiter> (b) 159+727=886 <delimiter> \boxed{886} <delimiter> </think> <delimiter>

    \boxed{886}

A question mark takes a result back. The last line is checked several times more, though it is right, as thoughts of
published models go on. Without a thought the generator says the answer at once.
"""

import random
from dataclasses import dataclass, field

from espalier.experiments.demo.problems import DELIMITER, Problem, boxed, equation, lettered
from espalier.experiments.demo.recipe.corruptions import slip_result

OPEN, CLOSE = "<think>", "</think>"
DOUBTS = ("Wait", "Hmm", "So", "Now", "Well"), ("check.", "again.", "once more.", "is it so?", "is that right?")
"""Beginnings and ends of what stands before a check; with fewer, a thought would seem to go in circles."""
MAX_CHECKS = 24
"""Checks of the last line, at most."""
SLIPS = 0.1
"""Share of the results that are wrong at first, and of boxes that a check has to correct."""
ENOUGH = (0.07, 0.25)
"""Chance that a thought ends behind a box: of the most and of the least thorough thoughts."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text of a thought or an answer.

    Attributes:
        text: the text, which begins and ends between two tokens.
        right: whether it is right, and so to be learned.
    """

    text: str
    right: bool = True


@dataclass(slots=True)
class Thought:
    """A thought in pieces, and how far its pieces have come.

    Attributes:
        pieces: its text.
        lines: the number of pieces up to the end of each line of the solution.
        boxes: the number of pieces up to the end of each box, and the value in it.
    """

    pieces: list[Piece] = field(default_factory=list[Piece])
    lines: list[int] = field(default_factory=list[int])
    boxes: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


def draw_thought(rng: random.Random, problem: Problem) -> Thought:
    """Draws a thought about a problem, from behind the opening mark's line to before the closing mark."""
    thought = Thought()
    last = len(problem.operands) - 1
    for index in range(last + 1):
        thought.pieces += _line(rng, problem, index)
        thought.lines.append(len(thought.pieces))
    enough = rng.uniform(*ENOUGH)
    for number in range(MAX_CHECKS + 1):
        value, right = problem.values[-1], rng.random() >= SLIPS
        if not right:
            value = slip_result(rng, problem.values[last], problem.operands[last])
        thought.pieces.append(Piece(f"{boxed(value)}{DELIMITER}", right=right))
        thought.boxes.append((len(thought.pieces), value))
        if right and rng.random() < enough:
            break
        if number < MAX_CHECKS:
            thought.pieces += [Piece(f"{', '.join(map(rng.choice, DOUBTS))}{DELIMITER}"), *_line(rng, problem, last)]
    return thought


def _line(rng: random.Random, problem: Problem, index: int) -> list[Piece]:
    left, operand = problem.values[index], problem.operands[index]
    line = [Piece(lettered(index, equation(left, operand).split("=")[0] + "="))]
    if rng.random() < SLIPS:
        line += [Piece(str(slip_result(rng, left, operand)), right=False), Piece("?")]
    return [*line, Piece(str(left + operand)), Piece(DELIMITER)]


def value_after(problem: Problem, thought: Thought, pieces: int) -> int:
    """The value that so many pieces of a thought have come to."""
    boxes = [value for end, value in thought.boxes if end <= pieces]
    return boxes[-1] if boxes else problem.values[sum(end <= pieces for end in thought.lines)]
