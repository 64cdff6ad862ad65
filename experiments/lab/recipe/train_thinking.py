"""Stage `thinking`: teach the generator to think between marks before it answers."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import Qwen2ForCausalLM

from espalier.experiments.demo.problems import (
    DELIMITER,
    MAX_OPERATIONS,
    MIN_OPERATIONS,
    TRAINING_OPERANDS,
    Problem,
    boxed,
    make_problem,
)
from espalier.experiments.lab.recipe.batches import IGNORED, Batch, Row, RowMaker, collate
from espalier.experiments.lab.recipe.networks import export_generator, load_exported_generator, load_exported_tokenizer
from espalier.experiments.lab.recipe.problems import training_difficulty as difficulty_of
from espalier.experiments.lab.recipe.thoughts import (
    CLOSE,
    DOUBTS,
    OPEN,
    Piece,
    Thought,
    draw_thought,
    value_after,
)
from espalier.experiments.lab.recipe.tokenizer import chat_prompt
from espalier.experiments.lab.recipe.training import Schedule, fit, load_weights
from espalier.search.thoughts.plans import CLOSING_SENTENCE

FOLDER = "thinking_generator"
"""Of the exported checkpoint, in a pair's folder."""
MAX_LENGTH = 2048
"""Tokens of the thinking generator's context."""


BOX = "\\boxed{"

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- set content = message['content'] %}"
    "{%- if message['role'] == 'assistant' %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}"
    "{%- endif %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- else %}{{- '<think>\\n' }}{%- endif %}"
    "{%- endif %}"
)
"""Opens the thought, or an empty one where `enable_thinking` is false; old thoughts of a chat are left out."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One training of the thinking generator.

    Attributes:
        schedule: for how long, and how fast it learns.
        off: share of the rows that answer at once behind an empty thought.
        cut: share of those whose thought the host closes before its end; of half of them it opens the box, too.
        drills: share of rows of right equations.
        beginnings: share of the batches with beginnings of thoughts alone, where there is most to learn.
        boxes: boxes of a beginning.
        cut_beginnings: share of the beginnings that the host closes.
        seed: begins the name of every batch's seed.
    """

    schedule: Schedule
    off: float
    cut: float
    drills: float
    beginnings: float
    boxes: int
    seed: str
    cut_beginnings: float = 0.0


PHASES = {
    "generator-thinking": Phase(
        Schedule(steps=450, tokens=5120, trunk_lr=0.006, other_lr=6e-4, decay_share=0.8, warmup=30, trunk=3),
        off=0.1, cut=0.25, drills=0.2, beginnings=0.5, boxes=1, seed="thinking",
    ),
    "generator-doubting": Phase(
        Schedule(steps=250, tokens=5120, trunk_lr=0.008, other_lr=8e-4, decay_share=0.9, warmup=10, trunk=3),
        off=0.1, cut=0.35, drills=0.1, beginnings=0.6, boxes=4, seed="doubting",
    ),
    "generator-answering": Phase(
        Schedule(steps=250, tokens=5120, trunk_lr=0.006, other_lr=6e-4, decay_share=0.9, warmup=10, trunk=3),
        off=0.1, cut=0.5, drills=0.05, beginnings=0.75, boxes=6, seed="answering", cut_beginnings=0.8,
    ),
}  # fmt: skip
"""By the names of their checkpoints, in order: it learns to think, to keep what it found, and to say it at once."""


def thinking_tokenizer(pair: Path) -> Tokenizer:
    """Returns the pair's tokenizer with the marks, and doubts, as tokens of their own, which are no special ones."""
    tokenizer = load_exported_tokenizer(pair)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in (OPEN, CLOSE, *DOUBTS)])
    return tokenizer


class ThinkingRows:
    """Turns problems into rows with thoughts."""

    def __init__(self, maker: RowMaker, phase: Phase) -> None:
        self.maker, self.phase = maker, phase
        self.opening = maker.encode(f"{OPEN}\n")
        self.forced = maker.encode(f"{CLOSING_SENTENCE}{CLOSE}{DELIMITER}")
        self.empty = maker.encode(f"{OPEN}{DELIMITER}{CLOSE}{DELIMITER}")

    def beginning(self, rng: random.Random, problem: Problem) -> Row:
        """Draws the beginning of a thought, to one of its first boxes."""
        row = _Row(self.maker, problem)
        row.given(self.opening)
        thought = draw_thought(rng, problem)
        ends = row.learned(thought.pieces[: thought.boxes[: self.phase.boxes][-1]])
        if not self.phase.cut_beginnings or rng.random() >= self.phase.cut_beginnings:
            return Row(row.ids, [*row.labels[1:], IGNORED])
        self._close(rng, row, problem, thought, ends)
        return row.ended()

    def row(self, rng: random.Random, problem: Problem) -> Row:
        """Draws a row about a problem."""
        row, kind = _Row(self.maker, problem), rng.random()
        if kind < self.phase.off:
            row.given(self.empty)
            row.learned([Piece(boxed(problem.values[-1]))])
            return row.ended()
        row.given(self.opening)
        thought = draw_thought(rng, problem)
        ends = row.learned(thought.pieces)
        if kind < self.phase.off + self.phase.cut:
            self._close(rng, row, problem, thought, ends)
        else:
            row.learned([Piece(f"{CLOSE}{DELIMITER}"), Piece(boxed(problem.values[-1]))])
        return row.ended()

    def _close(self, rng: random.Random, row: "_Row", problem: Problem, thought: Thought, ends: list[int]) -> None:
        """Ends a thought, whose pieces end at `ends`, anywhere, as the host does; then comes what it has come to."""
        start = row.start + len(self.opening)
        length = rng.randint(start + 1, len(row.ids))
        del row.ids[length:], row.labels[length:]
        row.given(self.forced)
        answer = boxed(value_after(problem, thought, sum(end <= length for end in ends)))
        if rng.random() < 0.5:
            row.given(self.maker.encode(BOX))
            answer = answer.removeprefix(BOX)
        row.learned([Piece(answer)])


class _Row:
    """A row in the making: a prompt, and what is given and learned behind it."""

    def __init__(self, maker: RowMaker, problem: Problem) -> None:
        self.maker = maker
        self.ids = maker.encode(chat_prompt(problem.text))
        self.labels = [IGNORED] * len(self.ids)
        self.start = len(self.ids)

    def given(self, tokens: list[int]) -> None:
        """Adds tokens that are not learned."""
        self.ids += tokens
        self.labels += [IGNORED] * len(tokens)

    def learned(self, pieces: Sequence[Piece]) -> list[int]:
        """Adds text that is learned where it is right; returns where each piece ends."""
        ends: list[int] = []
        for piece in pieces:
            tokens = self.maker.encode(piece.text)
            self.ids += tokens
            self.labels += tokens if piece.right else [IGNORED] * len(tokens)
            ends.append(len(self.ids))
        return ends

    def ended(self) -> Row:
        """The row, which ends its turn."""
        return Row([*self.ids, self.maker.end], [*self.labels[1:], self.maker.end, IGNORED])


def thinking_batch(rows: ThinkingRows, rng: random.Random, tokens: int) -> Batch:
    """Returns about `tokens` tokens: problems of one length."""
    operations = max(rng.randint(MIN_OPERATIONS, MAX_OPERATIONS) for _ in range(2))
    make = rows.beginning if rng.random() >= 1 - rows.phase.beginnings else rows.row
    drills = rows.phase.drills

    def draw() -> Row:
        return make(rng, make_problem(rng, difficulty_of(rng, operations))).cut(MAX_LENGTH)

    drawn = [draw()]
    while (len(drawn) / (1 - drills) + 1) * max(len(row.ids) for row in drawn) < tokens:
        drawn.append(draw())
    length = max(len(row.ids) for row in drawn)
    for _ in range(round(len(drawn) * drills / (1 - drills))):
        drawn.append(rows.maker.drill(rng, length, TRAINING_OPERANDS))
    return collate(drawn, rows.maker.pad)


def load_thinking_generator(work_dir: Path, pair: Path, tokenizer: Tokenizer) -> Qwen2ForCausalLM:
    """Returns the thinking generator as its training left it."""
    model = _begin(pair, tokenizer)
    load_weights(work_dir / f"{list(PHASES)[-1]}.pt", model)
    return model.eval()


def train_thinking(work_dir: Path, pair: Path, seed: int, steps: int | None = None) -> None:
    """Trains the thinking generator, from the pair's generator, or goes on with it; `steps` of each phase if given."""
    tokenizer = thinking_tokenizer(pair)
    model = _begin(pair, tokenizer)
    for name, phase in PHASES.items():
        rows, plan = ThinkingRows(RowMaker(tokenizer), phase), phase.schedule
        plan = plan if steps is None else replace(plan, steps=steps)

        def batch(step: int, rows: ThinkingRows = rows, tokens: int = plan.tokens) -> Batch:
            return thinking_batch(rows, random.Random(f"{rows.phase.seed}-{seed}-{step}"), tokens)

        fit(name, model, batch, plan, work_dir / f"{name}.pt")


def export_thinking_generator(model: Qwen2ForCausalLM, tokenizer: Tokenizer, pair: Path) -> None:
    """Writes the thinking generator beside the pair, with the temperature that published thinking models ask for."""
    export_generator(model, tokenizer, pair / FOLDER, CHAT_TEMPLATE, temperature=0.6)


def _begin(pair: Path, tokenizer: Tokenizer) -> Qwen2ForCausalLM:
    """The pair's generator, with embeddings for the marks and a longer context."""
    model = load_exported_generator(pair)
    torch.manual_seed(0)
    model.resize_token_embeddings(tokenizer.get_vocab_size(), mean_resizing=False)
    model.config.max_position_embeddings = MAX_LENGTH
    return model
