"""The thoughts that the thinking generator is taught: what they say, and which of their tokens are learned."""

import random
import re

import pytest

from espalier.experiments.demo import generator_path
from espalier.experiments.demo.problems import Difficulty, Problem, make_problem
from espalier.experiments.demo.recipe.batches import IGNORED, RowMaker
from espalier.experiments.demo.recipe.thoughts import MAX_PASSES, Piece, Thought, answer_pieces, columns, draw_thought
from espalier.experiments.demo.recipe.train_thinking import ThinkingRows, thinking_tokenizer

_EQUATION = re.compile(r"(\d+)([+-])(\d+)=(\d+)")
_COLUMN = re.compile(r"(\d)([+-])(\d)('?)=(?:(\d)\?)?(\d)('?)")


def _draw(seed: int) -> tuple[Problem, Thought]:
    rng = random.Random(seed)
    problem = make_problem(rng, Difficulty(4, 200))
    return problem, draw_thought(rng, problem)


def _text(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


@pytest.fixture(scope="module")
def rows() -> ThinkingRows:
    return ThinkingRows(RowMaker(thinking_tokenizer(generator_path().parent)))


@pytest.mark.parametrize("seed", range(200))
def test_columns_carry_to_the_next_and_end_with_the_result(seed: int):
    rng = random.Random(seed)
    left, operand = rng.randrange(1000), rng.randrange(1, 1000)
    operand = -operand if operand <= left and rng.random() < 0.5 else operand
    text, _, result = _text([*columns(rng, left, operand)]).partition(";")
    assert int(result) == left + operand
    carried, digits = "", ""
    for column in text.split(","):
        upper, sign, lower, given, taken_back, digit, carried_on = _COLUMN.fullmatch(column).groups()
        assert given == carried
        total = int(upper) + int(sign + "1") * (int(lower) + bool(carried))
        assert int(digit) == total % 10 != int(taken_back or -1)
        assert bool(carried_on) is not (0 <= total <= 9)
        carried, digits = carried_on, digit + digits
    assert int(("1" if carried else "") + digits) == left + operand


@pytest.mark.parametrize("seed", range(40))
def test_a_thought_lists_the_numbers_slips_and_does_it_again_by_columns(seed: int):
    problem, thought = _draw(seed)
    first, *passes = re.split(r"Wait, [a-z ]+\.\n", _text(thought.pieces))
    numbers, *lines = first.strip().splitlines()
    assert [int(n) for n in re.findall(r"[+-]?\d+", numbers)] == [problem.start, *problem.operands]
    assert len(lines) == len(problem.operands) + 1
    assert all(len(_EQUATION.findall(line)) == 1 for line in lines[:-1])
    assert 1 <= len(passes) < MAX_PASSES
    for text in passes:
        *lines, box = text.strip().splitlines()
        assert [int(line.rsplit(";", 1)[1]) for line in lines] == problem.values[1:]
        assert box == f"\\boxed{{{problem.answer}}}"


def test_thoughts_slip_take_back_and_are_right_in_the_end():
    drawn = [_draw(seed) for seed in range(200)]
    firsts = sum(str(thought.boxes[0][1]) == problem.answer for problem, thought in drawn)
    assert 40 < firsts < 120
    assert all(str(thought.boxes[-1][1]) == problem.answer for problem, thought in drawn)
    assert any("?" in _text(thought.pieces) for _, thought in drawn)
    lengths = [len(thought.boxes) for _, thought in drawn]
    assert lengths.count(2) > max(lengths.count(3), lengths.count(4)) > 0
    assert max(lengths) == MAX_PASSES


@pytest.mark.parametrize("seed", range(20))
def test_the_answer_is_the_last_box_or_the_solution_where_there_is_none_yet(seed: int):
    problem, thought = _draw(seed)
    assert _text(answer_pieces(problem, thought, len(thought.pieces))) == f"\\boxed{{{problem.answer}}}"
    first, value = thought.boxes[0]
    assert _text(answer_pieces(problem, thought, first)) == f"\\boxed{{{value}}}"
    assert _text(answer_pieces(problem, thought, first - 1)) == "\n\n".join(problem.steps)


@pytest.mark.parametrize("seed", range(60))
def test_a_row_learns_neither_its_prompt_nor_slips_nor_what_the_host_writes(rows: ThinkingRows, seed: int):
    rng = random.Random(seed)
    problem = make_problem(rng, Difficulty(4, 200))
    row = rows.row(rng, problem)
    assert len(row.ids) == len(row.labels)
    assert all(label in (IGNORED, following) for label, following in zip(row.labels, row.ids[1:], strict=False))
    decode = rows.maker.tokenizer.decode
    learned = decode([label for label in row.labels if label != IGNORED], skip_special_tokens=False)
    assert problem.text not in learned
    assert "Considering" not in learned
    assert learned.endswith("}<|im_end|>")
    thought = learned.split("</think>")[0] if "</think>" in learned else ""
    assert all(
        int(left) + int(sign + right) == int(result)
        for left, sign, right, result in _EQUATION.findall(thought)
        if len(left) > 1
    )
