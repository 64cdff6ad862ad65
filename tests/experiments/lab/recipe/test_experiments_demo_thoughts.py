"""The thoughts that the thinking generator is taught: what they say, and which of their tokens are learned."""

import random
import re

import pytest

from espalier.experiments.demo import generator_path
from espalier.experiments.demo.problems import Difficulty, Problem, make_problem
from espalier.experiments.lab.recipe.batches import IGNORED, Row, RowMaker
from espalier.experiments.lab.recipe.thoughts import DOUBTS, MAX_DOUBTS, Thought, draw_thought, value_after
from espalier.experiments.lab.recipe.train_thinking import PHASES, ThinkingRows, thinking_tokenizer

_LINE = re.compile(r"\(([a-z])\) (\d+)([+-])(\d+)=(?:(\d+)\?)?(\d+)")


def _draw(seed: int) -> tuple[Problem, Thought, list[str]]:
    rng = random.Random(seed)
    problem = make_problem(rng, Difficulty(4, 200))
    thought = draw_thought(rng, problem)
    return problem, thought, "".join(piece.text for piece in thought.pieces).rstrip().split("\n\n")


@pytest.fixture(scope="module", params=PHASES)
def rows(request: pytest.FixtureRequest) -> ThinkingRows:
    return ThinkingRows(RowMaker(thinking_tokenizer(generator_path().parent)), PHASES[request.param])


@pytest.mark.parametrize("seed", range(40))
def test_a_thought_solves_the_problem_and_doubts_its_answer_again_and_again(seed: int):
    problem, thought, paragraphs = _draw(seed)
    lines = [_LINE.fullmatch(paragraph) for paragraph in paragraphs[:4]]
    found = [(found[1], int(found[2]), int(found[3] + found[4]), int(found[6])) for found in lines if found]
    assert found == list(zip("abcd", problem.values, problem.operands, problem.values[1:], strict=False))
    assert set(paragraphs[4::2]) == {problem.steps[4]}
    assert set(paragraphs[5::2]) <= set(DOUBTS)
    assert len(thought.boxes) == len(paragraphs[4::2]) <= MAX_DOUBTS + 1


def test_thoughts_slip_and_take_it_back_and_some_are_much_longer_than_others():
    drawn = [_draw(seed)[1] for seed in range(400)]
    texts = ["".join(piece.text for piece in thought.pieces) for thought in drawn]
    assert 0.2 < sum("?" in text.split("\\boxed")[0] for text in texts) / len(texts) < 0.5
    boxes = sorted(len(thought.boxes) for thought in drawn)
    assert sum(boxes[-40:]) > 8 * sum(boxes[:40])


@pytest.mark.parametrize("seed", range(40))
def test_what_a_thought_has_come_to_is_its_last_result(seed: int):
    problem, thought, _ = _draw(seed)
    for pieces in range(len(thought.pieces) + 1):
        said = "".join(piece.text for piece in thought.pieces[:pieces])
        results = re.findall(r"=(?:\d+\?)?(\d+)\n\n", said)
        assert str(value_after(problem, thought, pieces)) == [str(problem.start), *results][-1]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kind", ["row", "beginning"])
def test_a_row_learns_neither_its_prompt_nor_slips_nor_what_the_host_writes(kind: str, rows: ThinkingRows, seed: int):
    rng = random.Random(seed)
    problem = make_problem(rng, Difficulty(4, 200))
    row: Row = getattr(rows, kind)(rng, problem)
    assert len(row.ids) == len(row.labels)
    assert all(label in (IGNORED, following) for label, following in zip(row.labels, row.ids[1:], strict=False))
    decode = rows.maker.tokenizer.decode
    learned = decode([label for label in row.labels if label != IGNORED], skip_special_tokens=False)
    assert problem.text not in learned
    assert "Considering" not in learned
    assert learned.endswith("}<|im_end|>") or (kind == "beginning" and learned.endswith("\n\n"))
    whole = "Considering" not in decode(row.ids)  # what is cut off may end within a number
    for _, left, sign, right, slip, result in _LINE.findall(learned if whole else ""):
        assert not slip
        assert int(left) + int(sign + right) == int(result)
