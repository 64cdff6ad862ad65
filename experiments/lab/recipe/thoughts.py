r"""Thoughts of the thinking generator: a worked solution, some of whose results are taken back, and doubts about it.

    <think>
    (a) 811-652=159 <delimiter> (b) 159+727=876?886 <delimiter> \boxed{886} <delimiter>
    Hmm. <delimiter> \boxed{886} <delimiter> Still. <delimiter> \boxed{886} <delimiter> </think> <delimiter>

    \boxed{886}

A question mark takes a result back. The answer is then doubted many times, though it is right, as thoughts of
published models go on. Without a thought the generator says the answer at once.
"""

import random
from dataclasses import dataclass, field

from espalier.experiments.demo.problems import DELIMITER, Problem, boxed, equation, lettered
from espalier.experiments.lab.recipe.corruptions import slip_result

OPEN, CLOSE = "<think>", "</think>"
_WORDS = """Wait Hmm Check Again So Now Then Look Well But Still Sure Really Maybe Once Careful Slowly Right Yes No
Or And Back Twice More Hold Think"""
DOUBTS = tuple(f"{word}." for word in _WORDS.split())
"""Words before a box that is written again, a token each; with fewer, a thought would seem to go in circles."""
MAX_DOUBTS = 100
SLIPS = 0.1
"""Share of the results that are wrong at first."""
ENOUGH = (0.012, 0.07)
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
        boxes: likewise, of each box.
    """

    pieces: list[Piece] = field(default_factory=list[Piece])
    lines: list[int] = field(default_factory=list[int])
    boxes: list[int] = field(default_factory=list[int])


def draw_thought(rng: random.Random, problem: Problem) -> Thought:
    """Draws a thought about a problem, from behind the opening mark's line to before the closing mark."""
    thought = Thought()
    for index in range(len(problem.operands)):
        thought.pieces += _line(rng, problem, index)
        thought.lines.append(len(thought.pieces))
    enough = rng.uniform(*ENOUGH)
    box = Piece(f"{boxed(problem.values[-1])}{DELIMITER}")
    thought.pieces.append(box)
    thought.boxes.append(len(thought.pieces))
    while len(thought.boxes) <= MAX_DOUBTS and rng.random() >= enough:
        thought.pieces += [Piece(f"{rng.choice(DOUBTS)}{DELIMITER}"), box]
        thought.boxes.append(len(thought.pieces))
    return thought


def _line(rng: random.Random, problem: Problem, index: int) -> list[Piece]:
    left, operand = problem.values[index], problem.operands[index]
    line = [Piece(lettered(index, equation(left, operand).split("=")[0] + "="))]
    if rng.random() < SLIPS:
        line += [Piece(str(slip_result(rng, left, operand)), right=False), Piece("?")]
    return [*line, Piece(str(left + operand)), Piece(DELIMITER)]


def value_after(problem: Problem, thought: Thought, pieces: int) -> int:
    """The value that so many pieces of a thought have come to."""
    return problem.values[sum(end <= pieces for end in thought.lines)]
