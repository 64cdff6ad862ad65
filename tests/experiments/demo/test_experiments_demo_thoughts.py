"""The thoughts that the thinking generator is taught: what they say, and which of their tokens are learned."""

import random
import re

import pytest

from espalier.experiments.demo import generator_path
from espalier.experiments.demo.problems import Difficulty, make_problem
from espalier.experiments.demo.recipe.batches import IGNORED, RowMaker
from espalier.experiments.demo.recipe.thoughts import MAX_CHECKS, WAIT, answer_pieces, draw_thought
from espalier.experiments.demo.recipe.train_thinking import ThinkingRows, thinking_tokenizer

_EQUATION = re.compile(r"(\d+)([+-])(\d+)=(\d+)")


def _draw(seed: int):
    rng = random.Random(seed)
    problem = make_problem(rng, Difficulty(4, 200))
    return problem, draw_thought(rng, problem)


def _text(pieces) -> str:
    return "".join(piece.text for piece in pieces)


@pytest.fixture(scope="module")
def rows() -> ThinkingRows:
    return ThinkingRows(RowMaker(thinking_tokenizer(generator_path().parent)))


@pytest.mark.parametrize("seed", range(40))
def test_a_check_ends_a_line_when_two_of_its_results_agree_and_a_thought_when_two_of_its_boxes_do(seed):
    problem, thought = _draw(seed)
    first, *checks = _text(thought.pieces).split(WAIT)
    assert all(len(_EQUATION.findall(line)) == 1 for line in first.splitlines()[:-2])
    for check in checks:
        *lines, box, blank = check.splitlines()
        assert len(lines) == len(problem.operands)
        assert box.startswith("\\boxed{")
        assert not blank
        for line in lines:
            *earlier, last = [result for *_, result in _EQUATION.findall(line)]
            assert last in earlier
            assert len(set(earlier)) == len(earlier)
            assert line.endswith(".")
    *earlier, last = [value for _, value in thought.boxes]
    assert last in earlier or len(checks) == MAX_CHECKS


def test_thoughts_slip_take_back_and_are_mostly_right_in_the_end():
    drawn = [_draw(seed) for seed in range(200)]
    firsts = sum(str(thought.boxes[0][1]) == problem.answer for problem, thought in drawn)
    lasts = sum(str(thought.boxes[-1][1]) == problem.answer for problem, thought in drawn)
    assert firsts < 120
    assert lasts > 170
    assert any("?" in _text(thought.pieces) for _, thought in drawn)


@pytest.mark.parametrize("seed", range(20))
def test_the_answer_copies_what_the_thought_holds_last(seed):
    problem, thought = _draw(seed)
    answer = answer_pieces(problem, thought, len(thought.pieces))
    assert _text(answer).endswith(f"\\boxed{{{thought.boxes[-1][1]}}}")
    assert not any(piece.result for piece in answer)
    assert _text(answer_pieces(problem, thought, 0)) == "\n\n".join(problem.steps)


@pytest.mark.parametrize("seed", range(60))
def test_a_row_learns_neither_its_prompt_nor_slips_nor_what_the_host_writes(rows, seed):
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
    assert all(int(left) + int(sign + right) == int(result) for left, sign, right, result in _EQUATION.findall(thought))
