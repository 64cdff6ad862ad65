"""GSM8K, MATH-500, AIME, AMC and OlympiadBench are read as they are published, and graded as their authors do."""

import csv
import json
from dataclasses import replace

import pytest

from espalier.experiments.runs.benchmarks import BenchmarkError, Problem, load_benchmark
from espalier.experiments.runs.evaluate import _grade, _submit, checker_of
from espalier.experiments.runs.graders import make_grader
from espalier.experiments.runs.record import refused_sample
from espalier.search.grading.math_verify import Grader

QUESTION = "Let $a$ and $b$ be positive. Find $a+b$."


@pytest.fixture
def load(tmp_path):
    """The one problem of a file that holds the record."""

    def load(record: dict) -> Problem:
        (tmp_path / "some.jsonl").write_text(json.dumps(record), encoding="utf-8")
        (problem,) = load_benchmark(str(tmp_path / "some.jsonl"))
        return problem

    return load


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        (
            {"question": QUESTION, "answer": "So <<1000+42=1042>>1,042 in all.\n#### 1,042"},
            Problem("some/1", QUESTION, "1042", None),
        ),
        (
            {"problem": QUESTION, "solution": "It is\n$\\boxed{1}$.", "answer": "\\frac{1}{2}", "subject": "Algebra",
             "level": 5, "unique_id": "test/algebra/1.json"},
            Problem("test/algebra/1.json", QUESTION, "\\frac{1}{2}", 5, subject="Algebra"),
        ),
        (  # MATH itself
            {"problem": QUESTION, "level": "Level 5", "type": "Algebra", "solution": "So\n$\\boxed{\\frac{1}{2}}$."},
            Problem("some/1", QUESTION, "\\frac{1}{2}", 5, subject="Algebra"),
        ),
        (
            {"ID": "2024-I-1", "Problem": QUESTION, "Solution": "First ...\nsecond ...\n$\\boxed{204}$", "Answer": 204},
            Problem("2024-I-1", QUESTION, "204", None),
        ),
        (
            {"id": 60, "problem": QUESTION, "solution": "First ...\nsecond.", "answer": "033",
             "url": "https://x.org", "year": "2024"},
            Problem("60", QUESTION, "033", None),
        ),
        (
            {"question": QUESTION, "answer": "336^\\circ"},
            Problem("some/1", QUESTION, "336^\\circ", None),
        ),
        (
            {"id": 0, "problem": QUESTION, "answer": 142.0, "url": "https://x.org"},
            Problem("0", QUESTION, "142", None),
        ),
    ],
    ids=["GSM8K", "MATH-500", "MATH", "AIME 2024", "AIME 2024 of another publisher", "AIME 2025", "AMC"],
)  # fmt: skip
def test_record_is_read_as_it_is_published(load, record, wanted):
    assert load(record) == wanted


# --- OlympiadBench ---------------------------------------------------------------------------------------------------

OLYMPIAD = {
    "id": 2231,
    "subfield": "Geometry",
    "context": None,
    "question": QUESTION,
    "solution": ["The largest is $C=\\frac{1}{2}$.\n\nFor all others ..."],
    "final_answer": ["$\\frac{1}{2}$"],
    "is_multiple_answer": False,
    "unit": None,
    "answer_type": "Numerical",
    "error": None,
}
ON_THE_HUB = {
    **{f"image_{number}": None for number in range(1, 10)},
    "modality": "Text-only",
    "difficulty": "Competition",
    "question_type": "Open-ended",
    "subject": "Math",
    "language": "English",
}


@pytest.mark.parametrize("more", [{}, ON_THE_HUB])
def test_olympiad_record_is_read(load, more):
    assert load(OLYMPIAD | more) == Problem("2231", QUESTION, "$\\frac{1}{2}$", None, subject="Geometry")


def test_context_precedes_the_question(load):
    assert load(OLYMPIAD | {"context": "A body falls."}).problem == f"A body falls.\n{QUESTION}"
    assert load({"question": QUESTION, "context": "A body falls.", "answer": "1"}).problem == QUESTION


@pytest.mark.parametrize(
    ("answers", "gold"),
    [(["$2,3$"], "$2,3$"), (["$2$", "$3$"], "2, 3"), (["$2$", "$2$"], "2, 2"), (["2", 3.0], "2, 3")],
)
def test_several_answers_are_one_and_all_must_be_given(load, grader, answers, gold):
    problem = load(OLYMPIAD | {"final_answer": answers, "is_multiple_answer": True})
    assert problem.golds == (gold,)
    assert grader.grade(problem.answer, "2").correct is False
    if gold != "2, 2":
        assert grader.grade(problem.answer, "3, 2").correct


def test_without_is_multiple_answer_any_of_several_is_right(load):
    assert load(OLYMPIAD | {"final_answer": ["$2$", "$3$"]}).golds == ("$2$", "$3$")


@pytest.mark.parametrize(
    ("fields", "tolerances"),
    [
        ({"error": "1e-1"}, (0.1,)),
        ({"error": 0.5}, (0.5,)),
        ({"error": "0.1,0.02", "final_answer": ["1, 2"], "is_multiple_answer": True}, (0.1, 0.02)),
        ({"error": "0.1,"}, (0.1, 1e-8)),
        ({"error": ""}, ()),
        ({"error": "0.1", "answer_type": "Tuple"}, ()),
    ],
)
def test_error_is_the_tolerance_but_of_a_tuple(load, fields, tolerances):
    assert load(OLYMPIAD | fields).tolerances == tolerances


def test_error_of_another_benchmark_is_nothing_to_grade_by(load):
    assert load({"problem": "1?", "answer": "1", "error": "none so far"}).tolerances == ()


def test_unit_is_not_graded(load, grader):
    problem = load(OLYMPIAD | {"final_answer": ["5.2"], "unit": "km", "answer_type": "Numerical"})
    assert problem.answer == "5.2"
    assert grader.grade(problem.answer, "5.2").correct
    assert grader.grade(problem.answer, "5.2 \\text{ km}").correct


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"final_answer": None, "answer_type": None},
            "its final_answer is empty, as of a proof, which cannot be graded",
        ),
        ({"final_answer": [], "solution": ["short proof"]}, "its final_answer is empty, as of a proof"),
        ({"answer_type": "Need_human_evaluate"}, "its answer_type is Need_human_evaluate: it cannot be graded"),
        ({"image_1": {"bytes": "..."}}, "it has images, and a search reads text alone"),
        ({"question": "See <image_1>."}, "it has images"),
        ({"context": "In <img_3362>,"}, "it has images"),
        ({"error": "about 5"}, "its error is 'about 5', not a tolerance such as 0.1"),
        ({"error": "-1"}, "its error is '-1', not a tolerance"),
        ({"error": "inf"}, "its error is 'inf', not a tolerance"),
        (
            {"is_multiple_answer": "yes", "final_answer": ["1", "2"]},
            "its is_multiple_answer is text, not true or false",
        ),
    ],
)
def test_what_cannot_be_graded_is_refused_with_its_place(load, fields, said):
    with pytest.raises(BenchmarkError, match=r"some\.jsonl:1: ") as refused:
        load(OLYMPIAD | fields)
    assert said in str(refused.value)


def test_lists_that_a_table_holds_as_texts_are_refused(tmp_path):
    with (tmp_path / "some.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, OLYMPIAD)
        writer.writeheader()
        writer.writerow(OLYMPIAD)
    with pytest.raises(BenchmarkError, match=r"some\.csv:2: its final_answer is a list written as a text; take JSON"):
        load_benchmark(str(tmp_path / "some.csv"))


def test_parquet_keeps_what_json_says(tmp_path, load):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    record = OLYMPIAD | {"final_answer": ["$2$", "$3$"], "is_multiple_answer": True, "error": "1e-1,1e-2"}
    parquet.write_table(arrow.Table.from_pylist([record]), tmp_path / "some.parquet")
    (problem,) = load_benchmark(str(tmp_path / "some.parquet"))
    assert problem == load(record)
    assert problem.tolerances == (0.1, 0.01)


def test_evaluation_grades_within_the_tolerance_unless_another_rule_is_named(grader):
    exact = Problem("a", "1+1?", "5.2", None)
    within = replace(exact, tolerances=(0.1,))

    def is_solved(problem: Problem, grader: Grader) -> bool:
        return _grade(_submit(problem, "5.3", grader), grader).correct

    assert not is_solved(exact, grader)
    assert is_solved(within, grader)
    assert [checker_of(problem, grader)("5.3") for problem in (exact, within)] == [False, True]
    third = checker_of(Problem("b", "1/3?", "\\frac{1}{3}", None), grader)
    assert [third(answer) for answer in ("1/3", "0.333333", "0.3", "3", "")] == [True, True, False, False, False]
    with make_grader("exact") as by_text:
        assert not is_solved(within, by_text)


def test_problem_with_another_tolerance_is_another_problem():
    exact = Problem("a", "1+1?", "5.2", None)
    before = refused_sample(exact, "too long")
    assert before.is_of(exact)
    assert not before.is_of(replace(exact, tolerances=(0.1,)))
