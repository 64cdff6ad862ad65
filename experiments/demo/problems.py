r"""Running-quantity word problems: made without end for training, and 500 of them held out as the benchmark.

A problem is an opening value and a list of signed operands, one sentence each, which letters count. Its solution has
one equation a step:

    Tom has 38 coins. (a) He finds 47 more. (b) He loses 12. How many coins does Tom have now?

    (a) 38+47=85 <delimiter> (b) 85-12=73 <delimiter> \boxed{73}

Which side of the split a problem falls on is a function of its numbers alone, so no training problem can share the
numbers of a benchmark problem, whatever words surround them and whichever benchmark is drawn.
"""

import hashlib
import random
from dataclasses import dataclass
from itertools import accumulate

from espalier.experiments.demo.templates import HE, SHE, THEMES, Theme

DELIMITER = "\n\n"
"""End of every step but the last."""
HELD_OUT_SHARE = 1 / 16
"""Share of all possible problems, by hash of their numbers, that training never sees."""
MIN_OPERATIONS, MAX_OPERATIONS = 2, 8


@dataclass(frozen=True, slots=True)
class Difficulty:
    """Difficulty of a problem: its number of operations and the size of its operands."""

    operations: int
    max_operand: int


LEVELS: dict[int, tuple[Difficulty, ...]] = {
    1: (Difficulty(3, 100), Difficulty(4, 100)),
    2: (Difficulty(5, 200),),
    3: (Difficulty(6, 400),),
    4: (Difficulty(7, 600),),
    5: (Difficulty(8, 900),),
}
"""The difficulties a benchmark level cycles through."""
TRAINING_OPERANDS = (50, 100, 200, 400, 600, 900)
"""Operand sizes of training: three digits at most."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One word problem with its numbers.

    Attributes:
        text: The question as put to the generator.
        subject: Kind of story.
        start: Initial quantity.
        operands: Signed operands in the order of the sentences, never zero.
    """

    text: str
    subject: str
    start: int
    operands: tuple[int, ...]

    @property
    def values(self) -> list[int]:
        """The running value: the start, then the value after every operation."""
        return list(accumulate(self.operands, initial=self.start))

    @property
    def answer(self) -> str:
        """The final value in digits."""
        return str(self.values[-1])

    @property
    def steps(self) -> list[str]:
        """The reference solution's steps, without delimiters."""
        return [*map(lettered, range(len(self.operands)), self.equations), boxed(self.values[-1])]

    @property
    def equations(self) -> list[str]:
        """Its reference solution's equations, without their letters."""
        return [equation(value, operand) for value, operand in zip(self.values, self.operands, strict=False)]

    @property
    def held_out(self) -> bool:
        """True if the problem belongs to the benchmark's side of the split."""
        digest = hashlib.sha256(repr((self.start, self.operands)).encode()).digest()
        return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def max_value(max_operand: int) -> int:
    """Returns the bound of running values for an operand size: 999, or all nines of the operand's length."""
    return max(999, 10 ** len(str(max_operand)) - 1)


def equation(left: int, operand: int, result: int | None = None) -> str:
    """Returns the step `left±operand=result`; the right result unless another is given."""
    result = left + operand if result is None else result
    return f"{left}{'+' if operand > 0 else '-'}{abs(operand)}={result}"


def lettered(index: int, text: str) -> str:
    """Returns `(a) text` for index 0, `(b) text` for 1, and so on."""
    return f"({chr(ord('a') + index)}) {text}"


def boxed(value: int) -> str:
    """Returns the answer step."""
    return f"\\boxed{{{value}}}"


def _draw_numbers(rng: random.Random, difficulty: Difficulty) -> tuple[int, tuple[int, ...]]:
    """Returns a start and signed operands, distinct in size, whose running values stay within bounds."""
    smallest = 2 if difficulty.max_operand <= 100 else 11
    start = rng.randint(max(5, smallest), max(99, difficulty.max_operand))
    operands: list[int] = []
    value, bound = start, max_value(difficulty.max_operand)
    while len(operands) < difficulty.operations:
        operand = rng.randint(smallest, difficulty.max_operand) * rng.choice((1, -1))
        if not 0 < value + operand <= bound:
            operand = -operand
        if not 0 < value + operand <= bound or abs(operand) in map(abs, operands):
            continue
        operands.append(operand)
        value += operand
    return start, tuple(operands)


def _tell(rng: random.Random, theme: Theme, start: int, operands: tuple[int, ...]) -> str:
    """Returns the story's text: an opening, one sentence an operation, a question."""
    names, pronoun = (theme.holders, "it") if theme.holders else rng.choice(((HE, "he"), (SHE, "she")))
    name, items = rng.choice(names), rng.choice(theme.items)

    def say(templates: tuple[str, ...], n: int = 0) -> str:
        template = rng.choice(templates)
        who = pronoun.capitalize() if template.startswith("{who}") else pronoun
        holder = name if template.startswith("{name}") else name.replace("A ", "a ")
        return template.format(name=holder, who=who, items=items, n=n)

    changes = [say(theme.gains if operand > 0 else theme.losses, abs(operand)) for operand in operands]
    return " ".join([say(theme.openings, start), *map(lettered, range(len(changes)), changes), say(theme.questions)])


def make_problem(rng: random.Random, difficulty: Difficulty, *, held_out: bool = False) -> Problem:
    """Draws a problem from one side of the split.

    Args:
        rng: Source of all randomness.
        difficulty: Number of operations and size of operands.
        held_out: The benchmark's side of the split if true, the training side otherwise.
    """
    while True:
        start, operands = _draw_numbers(rng, difficulty)
        theme = rng.choices(THEMES, weights=(3, 1, 1, 1))[0]
        problem = Problem("", theme.subject, start, operands)
        if problem.held_out == held_out:
            return Problem(_tell(rng, theme, start, operands), theme.subject, start, operands)
