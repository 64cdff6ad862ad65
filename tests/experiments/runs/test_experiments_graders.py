"""Graders besides math-verify."""

import sys

import pytest

from espalier.engine.errors import EspalierError
from espalier.experiments.runs.graders import holds, is_close, is_same_choice, is_same_text, make_grader

GAME = "value(answer) == 24 and sorted(numbers(answer)) == [1, 2, 3, 4]"


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("B", "(B)", True),
        ("B", "b.", True),
        ("(B)", "\\text{B}", True),
        ("B", "B: because", True),
        ("B", "C", False),
        ("B", "Because", False),
        ("B", "", False),
        ("7", "7", False),
    ],
)
def test_a_choice_is_a_letter(gold: str, answer: str, same: bool):
    assert is_same_choice(gold, answer) is same


@pytest.mark.parametrize(
    ("gold", "answer", "tolerance", "close"),
    [
        ("100", "101", 0.01, True),
        ("100", "101.1", 0.01, False),
        ("0.5", "50\\%", 0.0, True),
        ("1,234", "1234.0", 0.0, True),
        ("-2", "2", 0.1, False),
        ("1/3", "0.3333", 0.001, True),
        ("3", "three", 1.0, False),
        ("0", "0.001", 0.5, False),
    ],
)
def test_numbers_may_differ_by_a_share_of_the_gold_one(gold: str, answer: str, tolerance: float, close: bool):
    assert is_close(gold, answer, tolerance) is close


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("(1+2+3)*4", True),
        ("4*3*2*1", True),
        ("4×3×2÷1", True),
        ("4*3*2", False),
        ("24", False),
        ("(1+2", False),
        ("__import__('os')", False),
    ],
)
def test_an_expression_is_true_or_not_of_the_answer(answer: str, right: bool):
    assert holds(GAME, answer) is right


@pytest.mark.parametrize("gold", ["open('x')", "answer.__class__", "1 +", "unknown == 1"])
def test_a_gold_answer_that_is_no_expression_is_an_error_and_reaches_nothing(gold: str):
    with pytest.raises(ValueError, match="no expression of an answer"):
        holds(gold, "1")


def test_texts_are_equal_but_for_blanks():
    assert is_same_text(" a b ", "a b")
    assert not is_same_text("a b", "ab")


@pytest.mark.parametrize(
    ("name", "gold", "answer", "right"),
    [
        ("exact", "x", "x", True),
        ("numeric:0.1", "10", "10.5", True),
        ("choice", "A", "(a)", True),
        ("expression", GAME, "1*2*3*4", True),
        ("operator:contains", "a long gold", "long", True),
        ("operator:eq", "1", "2", False),
    ],
)
def test_a_grader_runs_its_check_in_a_process_of_its_own(name: str, gold: str, answer: str, right: bool):
    with make_grader(name) as grader:
        assert grader.grade(gold, answer).correct is right
        assert grader.name == name


def test_a_function_of_a_module_in_the_current_folder_is_found_there_and_in_the_child(tmp_path, monkeypatch):
    (tmp_path / "my_rules.py").write_text("def longer(gold, answer):\n    return len(answer) > len(gold)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    with make_grader("my_rules:longer") as grader:
        assert grader.grade("12", "123").correct
        assert not grader.grade("12", "1").correct
    monkeypatch.delitem(sys.modules, "my_rules")


def test_a_module_that_fails_when_it_is_imported_is_named_with_the_line(tmp_path, monkeypatch):
    (tmp_path / "broken_rules.py").write_text("import math\n\nmath.sqrt(-1)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(EspalierError, match=r"importing broken_rules failed, .*broken_rules\.py:3: ValueError: math"):
        make_grader("broken_rules:f")


def test_a_check_that_fails_says_why_and_the_next_is_graded():
    with make_grader("expression") as grader:
        assert grader.grade("1 +", "2").error.startswith("grading failed: ValueError: the gold answer is no expression")
        assert grader.grade("int(answer) == 2", "2").correct


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("spelling", "none of math-verify, exact"),
        ("numeric:-1", "must be a number from 0 on"),
        ("numeric:x", "'x'"),
        ("no_such_module:f", "No module named"),
        ("operator:nothing", "nothing"),
        ("math:pi", "no function"),
    ],
)
def test_a_grader_that_is_none_is_named(name: str, said: str):
    with pytest.raises(EspalierError, match=said):
        make_grader(name)
