"""Training batches: token rows with a label at every position that is learned from.

For the generator a label is the next token's id; for the verifier it is 0 or 1 at a step's delimiter. Batch `i` is a
function of the seed and `i` alone, so training resumes exactly where it stopped.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from espalier.experiments.demo.problems import (
    DELIMITER,
    MAX_OPERATIONS,
    MIN_OPERATIONS,
    TRAINING_OPERANDS,
    Problem,
    equation,
    make_problem,
)
from espalier.experiments.lab.recipe.corruptions import draw_equation, slip_result
from espalier.experiments.lab.recipe.problems import training_difficulty
from espalier.experiments.lab.recipe.tokenizer import END, PAD, chat_prompt, delimiter_id, special_id

IGNORED = -100
"""Label of a position that is not learned from."""


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids and, at each position, the label read there or `IGNORED`."""

    ids: list[int]
    labels: list[int]

    def cut(self, length: int) -> "Row":
        """Returns the row's first `length` positions."""
        return Row(self.ids[:length], self.labels[:length])


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows padded on the right, which a causal model never looks at.

    Attributes:
        ids: int64 [rows, length].
        labels: int64 [rows, length], `IGNORED` where nothing is learned.
    """

    ids: Tensor
    labels: Tensor


def collate(rows: Sequence[Row], pad_id: int) -> Batch:
    """Pads rows to the longest one."""
    length = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), length), pad_id, dtype=torch.long)
    labels = torch.full((len(rows), length), IGNORED, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = torch.tensor(row.ids)
        labels[index, : len(row.ids)] = torch.tensor(row.labels)
    return Batch(ids, labels)


class RowMaker:
    """Turns problems, steps and equations into rows."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.delimiter = delimiter_id(tokenizer)
        self.end = special_id(tokenizer, END)
        self.pad = special_id(tokenizer, PAD)
        (self.equals,) = self.encode("=")

    def encode(self, text: str) -> list[int]:
        """Returns token ids; nothing is added."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def solution(self, problem: Problem, learn_results: bool = True) -> Row:
        """Returns a language model's row: prompt, reference solution, end of turn; solution tokens are learned.

        Without `learn_results`, all of the solution but the digits behind each `=`.
        """
        prompt = self.encode(chat_prompt(problem.text))
        ids = [*prompt, *self.encode(DELIMITER.join(problem.steps)), self.end]
        labels = [IGNORED] * (len(prompt) - 1) + ids[len(prompt) :] + [IGNORED]
        if not learn_results:
            in_result = False
            for index in range(len(prompt), len(ids) - 1):
                in_result = (in_result or ids[index] == self.equals) and labels[index] != self.delimiter
                if in_result:
                    labels[index] = IGNORED
        return Row(ids, labels)

    def drill(self, rng: random.Random, length: int, operand_caps: Sequence[int]) -> Row:
        """Returns right equations filling `length` tokens; their results are learned."""
        row = Row([], [])
        while len(row.ids) < length:
            left, operand = draw_equation(rng, rng.choice(operand_caps))
            asked, result = equation(left, operand).split("=")
            ids = [*self.encode(asked + "="), *self.encode(result), self.delimiter]
            learned = len(result) + 1
            row.ids.extend(ids)
            row.labels.extend([IGNORED] * (len(ids) - learned - 1) + ids[-learned:] + [IGNORED])
        return row.cut(length)

    def judged_drill(self, rng: random.Random, length: int, operand_caps: Sequence[int]) -> Row:
        """Returns equations filling `length` tokens, half of them wrong, each judged by itself.

        The delimiter carries the equation's label. Every digit of the result carries one too, whether the result is
        right so far: that tells which digit slipped, and is learned much sooner.
        """
        row = Row([], [])
        while len(row.ids) < length:
            left, operand = draw_equation(rng, rng.choice(operand_caps))
            right = str(left + operand)
            result = right if rng.random() < 0.5 else str(slip_result(rng, left, operand))
            asked = self.encode(equation(left, operand).split("=")[0] + "=")
            row.ids.extend([*asked, *self.encode(result), self.delimiter])
            row.labels.extend([IGNORED] * len(asked))
            row.labels.extend(int(right.startswith(result[: end + 1])) for end in range(len(result)))
            row.labels.append(int(result == right))
        return row.cut(length)

    def judged_steps(self, problem: str, steps: Sequence[str], right: Sequence[bool], reference: Sequence[str]) -> Row:
        """Returns the verifier's row: prompt, then each step and a delimiter that carries the step's label.

        Every token of a step has a label too, whether all is right so far by the steps of the `reference` solution:
        that tells where a step goes wrong. Tokens beyond the reference are wrong.
        """
        ids = self.encode(chat_prompt(problem))
        labels = [IGNORED] * len(ids)
        so_far = True
        for index, (step, label) in enumerate(zip(steps, right, strict=True)):
            tokens = self.encode(step)
            ids += [*tokens, self.delimiter]
            expected = self.encode(reference[index]) if index < len(reference) else []
            labels += [int(so_far and tokens[:end] == expected[:end]) for end in range(1, len(tokens) + 1)]
            labels.append(int(label))
            so_far = label
        return Row(ids, labels)


@dataclass(frozen=True, slots=True)
class Curriculum:
    """Problems that a language model is shown as training proceeds; `progress` runs from 0 to 1.

    Attributes:
        warm_share: first share of the training, of short problems and small numbers.
        warm_drills: share of drills among the rows of that time.
        drills: share of drills among the rows after it.
        warm_operations: longest problem of that time.
        warm_operands: operand sizes of its first half.
        operands: operand sizes after it.
        prefer_long: whether longer problems are drawn more often.
        results: share of the solutions that teach the results of their equations too.
    """

    warm_share: float = 0.25
    warm_drills: float = 0.65
    drills: float = 0.45
    warm_operations: int = 4
    warm_operands: tuple[int, ...] = (50, 100)
    operands: tuple[int, ...] = TRAINING_OPERANDS
    prefer_long: bool = False
    results: float = 1.0

    def drill_share(self, progress: float) -> float:
        """Share of a batch's rows that are drills."""
        return self.warm_drills if progress < self.warm_share else self.drills

    def operand_caps(self, progress: float) -> tuple[int, ...]:
        """Operand sizes drawn from."""
        return self.warm_operands if progress < self.warm_share / 2 else self.operands

    def max_operations(self, progress: float) -> int:
        """Longest problem shown."""
        return self.warm_operations if progress < self.warm_share else MAX_OPERATIONS

    def draw_operations(self, rng: random.Random, progress: float) -> int:
        """Draws a batch's number of operations."""
        longest = self.max_operations(progress)
        drawn = rng.randint(MIN_OPERATIONS, longest)
        return max(drawn, rng.randint(MIN_OPERATIONS, longest)) if self.prefer_long else drawn


BASE_CURRICULUM = Curriculum()
"""Short problems and small numbers first, then all lengths and sizes."""
GENERATOR_CURRICULUM = Curriculum(warm_drills=0.5, drills=0.3)
"""The same with fewer drills."""
READING_CURRICULUM = Curriculum(warm_share=0.0, drills=0.03, prefer_long=True, results=0.16)
"""Reading and writing down, and little arithmetic: most solutions do not teach their results."""
LONG_CURRICULUM = Curriculum(warm_share=0.0, drills=0.35, prefer_long=True)
"""More of the same, longer problems first of all."""


def generator_batch(maker: RowMaker, rng: random.Random, tokens: int, progress: float, plan: Curriculum) -> Batch:
    """Returns about `tokens` tokens: problems of one length, and drills cut to the same length."""
    caps = plan.operand_caps(progress)
    operations = plan.draw_operations(rng, progress)

    def solution() -> Row:
        problem = make_problem(rng, training_difficulty(rng, operations, caps))
        return maker.solution(problem, learn_results=plan.results == 1 or rng.random() < plan.results)

    problems = [solution()]
    count = max(2, tokens // len(problems[0].ids))
    drills = round(count * plan.drill_share(progress))
    while len(problems) < count - drills:
        problems.append(solution())
    length = max(len(row.ids) for row in problems)
    rows = problems + [maker.drill(rng, length, caps) for _ in range(drills)]
    return collate(rows, maker.pad)
