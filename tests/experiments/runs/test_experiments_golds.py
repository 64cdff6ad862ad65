"""Gold answers are found by the rules for answers; one that cannot be compared is reported where it is loaded."""

import json
import logging
from pathlib import Path

import pytest

from espalier.experiments.runs.benchmarks import BenchmarkError, load_benchmark
from espalier.search.grading.answers import extract_answer, extract_gold


@pytest.fixture
def write(tmp_path: Path):
    """Writes problems with these answers to a benchmark's file; returns its name."""

    def write(*answers: object, field: str = "answer") -> str:
        lines = [json.dumps({"problem": f"Problem {number}?", field: said}) for number, said in enumerate(answers)]
        (tmp_path / "some.jsonl").write_text("\n".join(lines), encoding="utf-8")
        return str(tmp_path / "some.jsonl")

    return write


SOLUTIONS = [
    ("Factoring gives $(2x-1)(x-2)=0$; the larger root is $\\boxed 2$.", "2"),  # hendrycks/math#23
    ("We add.\nThus $2+3=\\boxed 5$.", "5"),
    ("It factors.\nSo $x=\\boxed{1}$ or $x=\\boxed{-2}$.", "1, -2"),  # NeMo-Skills#41
    ("So $x=\\boxed{1}$\nand\n$y=\\boxed{2}$.", "x=1, y=2"),
    ("We get \\boxed{3}.\nNo: it is \\fbox{4}.", "4"),
    ("We add.\n#### $-1,234$", "-1234"),
    ("We add.\n#### (1,2)", "(1,2)"),
    ("We add.\n#### 5\nThis is right.", "5"),
    ("We add both.\nThe answer is 5.", "5"),
    ("加起来。\n答案是 $5$。", "5"),
    ("<think>\nIt is 4.\n</think>\n<answer>5</answer>", "5"),
    ("$\\boxed{\\text{(C)}}$", "C"),
]


@pytest.mark.parametrize("field", ["answer", "solution"])
@pytest.mark.parametrize(("text", "gold"), SOLUTIONS)
def test_a_gold_answer_is_found_in_a_solution_as_a_models_answer_is(write, text: str, gold: str, field: str):
    (problem,) = load_benchmark(write(text, field=field))
    assert problem.answer == gold
    assert extract_answer(text).replace("1,234", "1234") == gold


@pytest.mark.parametrize(
    "text", ["5", "1,234", "no solution", "Evelyn", "x=2 or x=3", "\\frac{1}{2}", "(0, 1]", "A", "value(answer) == 24"]
)
def test_what_states_no_answer_is_the_gold_answer_itself(text: str):
    assert extract_gold(f" {text}\n") == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("We get \\boxed{5}.\nBut rather \\boxed{6", "has a last box without an end"),
        ("One and one\nis 2.", "has several lines"),
        ("We add.\n#### ", "is empty"),
        ("So \\boxed{}.", "is empty"),
    ],
)
def test_a_solution_that_gives_no_answer_is_refused_with_its_line_and_field(write, text: str, said: str):
    with pytest.raises(BenchmarkError, match=rf"some\.jsonl:2: its answer {said}"):
        load_benchmark(write("5", text))


def test_golds_that_only_the_same_text_equals_are_reported_with_line_and_field(write):
    said: list[str] = []
    text = "Because the sum of all of these numbers is even and none of them is a prime"
    golds = ["5", "{1, 2", text, "\\frac{1}{2", "x+" * 300 + "1", "3" * 5000]
    assert [problem.answer for problem in load_benchmark(write(*golds), notify=said.append)] == golds
    (notice,) = said
    assert "4 of 6 problems" in notice
    assert "some.jsonl:2, answer: its braces do not match; " in notice
    assert "some.jsonl:3, answer: it is a text of 16 words; " in notice
    assert "some.jsonl:4, answer: its braces do not match; …" in notice


def test_without_anybody_to_notify_the_report_is_logged(write, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "espalier.benchmarks"):
        load_benchmark(write("{1, 2"))
    assert "some.jsonl:1, answer: its braces do not match" in caplog.text


def test_nothing_is_reported_of_the_demo():
    load_benchmark("demo", 50, notify=pytest.fail)
