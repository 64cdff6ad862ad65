"""Stage `thinking`: teach the generator to think between marks before it answers."""

import random
from dataclasses import dataclass
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
from espalier.experiments.demo.problems import training_difficulty as difficulty_of
from espalier.experiments.demo.recipe.batches import IGNORED, Batch, Row, RowMaker, collate
from espalier.experiments.demo.recipe.networks import export_generator, load_exported_generator, load_exported_tokenizer
from espalier.experiments.demo.recipe.thoughts import (
    CLOSE,
    DOUBTS,
    OPEN,
    Piece,
    draw_thought,
    value_after,
)
from espalier.experiments.demo.recipe.tokenizer import chat_prompt
from espalier.experiments.demo.recipe.training import Progress, Schedule, fit, load_weights
from espalier.search.thoughts.budget import CLOSING_SENTENCE

FOLDER = "thinking_generator"
"""Of the exported checkpoint, in a pair's folder."""
PHASE = "generator-thinking"
SCHEDULE = Schedule(steps=450, tokens=5120, trunk_lr=0.006, other_lr=6e-4, decay_share=0.8, warmup=30, trunk=3)
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
class Shares:
    """Shares of the rows of each kind; the others think until they have had enough.

    Attributes:
        off: answer at once behind an empty thought.
        cut: are closed by the host within the thought, and answer; of half of them it opens the box too.
        drills: are right equations.
    """

    off: float = 0.1
    cut: float = 0.25
    drills: float = 0.2


SHARES = Shares()
WHOLE = 0.5
"""Share of the batches that have whole thoughts; the others have their beginnings, where there is most to learn."""


def thinking_tokenizer(pair: Path) -> Tokenizer:
    """Returns the pair's tokenizer with the marks, and doubts, as tokens of their own, which are no special ones."""
    tokenizer = load_exported_tokenizer(pair)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in (OPEN, CLOSE, *DOUBTS)])
    return tokenizer


class ThinkingRows:
    """Turns problems into rows with thoughts."""

    def __init__(self, maker: RowMaker) -> None:
        self.maker = maker
        self.opening = maker.encode(f"{OPEN}\n")
        self.forced = maker.encode(f"{CLOSING_SENTENCE}{CLOSE}{DELIMITER}")
        self.empty = maker.encode(f"{OPEN}{DELIMITER}{CLOSE}{DELIMITER}")

    def first_pass(self, rng: random.Random, problem: Problem) -> Row:
        """Draws the beginning of a thought, to its first box."""
        given = [*self.maker.encode(chat_prompt(problem.text)), *self.opening]
        thought = draw_thought(rng, problem)
        row = Row(given, [IGNORED] * len(given))
        for piece in thought.pieces[: thought.boxes[0]]:
            tokens = self.maker.encode(piece.text)
            row.ids.extend(tokens)
            row.labels.extend(tokens if piece.right else [IGNORED] * len(tokens))
        return Row(row.ids, [*row.labels[1:], IGNORED])

    def row(self, rng: random.Random, problem: Problem) -> Row:
        """Draws a row about a problem."""
        kind = rng.random()
        ids = self.maker.encode(chat_prompt(problem.text))
        labels = [IGNORED] * len(ids)

        def given(tokens: list[int]) -> None:
            ids.extend(tokens)
            labels.extend([IGNORED] * len(tokens))

        def learned(pieces: list[Piece]) -> None:
            for piece in pieces:
                tokens = self.maker.encode(piece.text)
                ids.extend(tokens)
                labels.extend(tokens if piece.right else [IGNORED] * len(tokens))

        value, in_box = problem.values[-1], False
        if kind < SHARES.off:
            given(self.empty)
        else:
            given(self.opening)
            start, thought = len(ids), draw_thought(rng, problem)
            ends: list[int] = []
            for piece in thought.pieces:
                learned([piece])
                ends.append(len(ids))
            if kind < SHARES.off + SHARES.cut:
                length = rng.randint(start + 1, len(ids))
                del ids[length:], labels[length:]
                given(self.forced)
                value, in_box = value_after(problem, thought, sum(end <= length for end in ends)), rng.random() < 0.5
            else:
                learned([Piece(f"{CLOSE}{DELIMITER}")])
        answer = boxed(value)
        if in_box:
            given(self.maker.encode(BOX))
            answer = answer.removeprefix(BOX)
        learned([Piece(answer)])
        return Row([*ids, self.maker.end], [*labels[1:], self.maker.end, IGNORED])


def thinking_batch(rows: ThinkingRows, rng: random.Random, tokens: int) -> Batch:
    """Returns about `tokens` tokens: problems of one length."""
    operations = max(rng.randint(MIN_OPERATIONS, MAX_OPERATIONS) for _ in range(2))
    make = rows.row if rng.random() < WHOLE else rows.first_pass

    def draw() -> Row:
        return make(rng, make_problem(rng, difficulty_of(rng, operations))).cut(MAX_LENGTH)

    drawn = [draw()]
    while (len(drawn) / (1 - SHARES.drills) + 1) * max(len(row.ids) for row in drawn) < tokens:
        drawn.append(draw())
    length = max(len(row.ids) for row in drawn)
    for _ in range(round(len(drawn) * SHARES.drills / (1 - SHARES.drills))):
        drawn.append(rows.maker.drill(rng, length, TRAINING_OPERANDS))
    return collate(drawn, rows.maker.pad)


def load_thinking_generator(work_dir: Path, pair: Path, tokenizer: Tokenizer) -> Qwen2ForCausalLM:
    """Returns the thinking generator as its training left it."""
    model = _begin(pair, tokenizer)
    load_weights(work_dir / f"{PHASE}.pt", model)
    return model.eval()


def train_thinking(work_dir: Path, pair: Path, seed: int, plan: Schedule = SCHEDULE) -> Progress:
    """Trains the thinking generator, from the pair's generator, or goes on with it."""
    tokenizer = thinking_tokenizer(pair)
    rows = ThinkingRows(RowMaker(tokenizer))

    def batch(step: int) -> Batch:
        return thinking_batch(rows, random.Random(f"thinking-{seed}-{step}"), plan.tokens)

    return fit(PHASE, _begin(pair, tokenizer), batch, plan, work_dir / f"{PHASE}.pt")


def export_thinking_generator(model: Qwen2ForCausalLM, tokenizer: Tokenizer, pair: Path) -> None:
    """Writes the thinking generator beside the pair, with the sampling that published thinking models ask for."""
    export_generator(model, tokenizer, pair / FOLDER, CHAT_TEMPLATE, temperature=0.6, top_p=0.95, top_k=20)


def _begin(pair: Path, tokenizer: Tokenizer) -> Qwen2ForCausalLM:
    """The pair's generator, with embeddings for the marks and a longer context."""
    model = load_exported_generator(pair)
    torch.manual_seed(0)
    model.resize_token_embeddings(tokenizer.get_vocab_size(), mean_resizing=False)
    model.config.max_position_embeddings = MAX_LENGTH
    return model
