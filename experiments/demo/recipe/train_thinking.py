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
    equation,
    make_problem,
)
from espalier.experiments.demo.problems import training_difficulty as difficulty_of
from espalier.experiments.demo.recipe.batches import IGNORED, Batch, Row, RowMaker, collate
from espalier.experiments.demo.recipe.corruptions import draw_equation
from espalier.experiments.demo.recipe.networks import export_generator, load_exported_generator, load_exported_tokenizer
from espalier.experiments.demo.recipe.thoughts import (
    CLOSE,
    OPEN,
    Piece,
    answer_pieces,
    columns,
    draw_thought,
    solution_pieces,
)
from espalier.experiments.demo.recipe.tokenizer import chat_prompt
from espalier.experiments.demo.recipe.training import Progress, Schedule, fit, load_weights
from espalier.search.thoughts.budget import CLOSING_SENTENCE

FOLDER = "thinking_generator"
"""Of the exported checkpoint, in a pair's folder."""
PHASE = "generator-thinking"
SCHEDULE = Schedule(steps=700, tokens=5120, trunk_lr=0.006, other_lr=6e-4, decay_share=0.8, warmup=50, trunk=3)
MAX_LENGTH = 2048
"""Tokens of the thinking generator's context."""
TEACHES_RESULTS = 0.4
"""Share of the rows that teach the results of their equations; the others teach to read, write, compare and copy."""


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
        cut: are closed by the host within the thought, and answer.
        boxed: likewise, and the host has opened the answer's box.
    """

    off: float = 0.12
    cut: float = 0.16
    boxed: float = 0.12


SHARES = Shares()


def thinking_tokenizer(pair: Path) -> Tokenizer:
    """Returns the pair's tokenizer with the marks as tokens of their own, which are no special ones."""
    tokenizer = load_exported_tokenizer(pair)
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in (OPEN, CLOSE)])
    return tokenizer


class ThinkingRows:
    """Turns problems into rows with thoughts."""

    def __init__(self, maker: RowMaker) -> None:
        self.maker = maker
        self.opening = maker.encode(f"{OPEN}\n")
        self.closing = maker.encode(f"{CLOSE}{DELIMITER}")
        self.forced = maker.encode(f"{CLOSING_SENTENCE}{CLOSE}{DELIMITER}")
        self.empty = maker.encode(f"{OPEN}{DELIMITER}{CLOSE}{DELIMITER}")

    def row(self, rng: random.Random, problem: Problem) -> Row:
        """Draws a row about a problem."""
        kind, results = rng.random(), rng.random() < TEACHES_RESULTS
        prompt = self.maker.encode(chat_prompt(problem.text))
        ids, labels = [*prompt], [IGNORED] * len(prompt)

        def given(tokens: list[int]) -> None:
            ids.extend(tokens)
            labels.extend([IGNORED] * len(tokens))

        def learned(pieces: list[Piece]) -> None:
            for piece in pieces:
                tokens = self.maker.encode(piece.text)
                ids.extend(tokens)
                known = piece.right and (results or not piece.result)
                labels.extend(tokens if known else [IGNORED] * len(tokens))

        if kind < SHARES.off:
            given(self.empty)
            learned(solution_pieces(problem))
        else:
            given(self.opening)
            start, thought = len(ids), draw_thought(rng, problem)
            ends: list[int] = []
            for piece in thought.pieces:
                learned([piece])
                ends.append(len(ids))
            if kind < SHARES.off + SHARES.cut + SHARES.boxed:
                direct = kind >= SHARES.off + SHARES.cut
                first = ends[thought.values[0][0] - 1] if direct else start + 1
                length = rng.randint(min(first, len(ids)), len(ids))
                del ids[length:], labels[length:]
                whole = sum(end <= length for end in ends)
                given(self.forced)
                if direct:
                    given(self.maker.encode("\\boxed{"))
                    last = [value for pieces, value in thought.values if pieces <= whole][-1]
                    learned([Piece(boxed(last).removeprefix("\\boxed{"))])
                else:
                    learned(answer_pieces(problem, thought, whole))
            else:
                ids.extend(self.closing)
                labels.extend(self.closing)
                learned(answer_pieces(problem, thought, len(thought.pieces)))
        return Row([*ids, self.maker.end], [*labels[1:], self.maker.end, IGNORED])

    def drill(self, rng: random.Random, length: int) -> Row:
        """Draws equations by columns that fill so many tokens; all but their operands is learned."""
        ids: list[int] = []
        labels: list[int] = []
        while len(ids) < length:
            left, operand = draw_equation(rng, rng.choice(TRAINING_OPERANDS))
            asked = self.maker.encode(equation(left, operand).split("=")[0] + ":")
            ids += asked
            labels += [IGNORED] * len(asked)
            for piece in (*columns(rng, left, operand), Piece("\n")):
                tokens = self.maker.encode(piece.text)
                ids += tokens
                labels += tokens if piece.right else [IGNORED] * len(tokens)
        return Row(ids, [*labels[1:], IGNORED]).cut(length)


def thinking_batch(rows: ThinkingRows, rng: random.Random, tokens: int) -> Batch:
    """Returns about `tokens` tokens: problems of one length and a row of equations by columns."""
    operations = rng.randint(MIN_OPERATIONS, MAX_OPERATIONS)

    def draw() -> Row:
        return rows.row(rng, make_problem(rng, difficulty_of(rng, operations))).cut(MAX_LENGTH)

    drawn = [draw()]
    while (len(drawn) + 2) * max(len(row.ids) for row in drawn) < tokens:
        drawn.append(draw())
    drawn.append(rows.drill(rng, max(len(row.ids) for row in drawn)))
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
    """Writes the thinking generator beside the pair."""
    export_generator(model, tokenizer, pair / FOLDER, CHAT_TEMPLATE)


def _begin(pair: Path, tokenizer: Tokenizer) -> Qwen2ForCausalLM:
    """The pair's generator, with embeddings for the marks and a longer context."""
    model = load_exported_generator(pair)
    torch.manual_seed(0)
    model.resize_token_embeddings(tokenizer.get_vocab_size(), mean_resizing=False)
    model.config.max_position_embeddings = MAX_LENGTH
    return model
