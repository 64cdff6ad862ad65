"""What is right beside a gold answer, and what votes together; the pairs are in `answer_pairs.jsonl`."""

import itertools
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.search.grading import equality, formulas
from espalier.search.grading.answers import canonical, exact_match_key, extract_answer
from espalier.search.grading.equality import is_right, is_same_value
from espalier.search.grading.reading import read

LINES = (Path(__file__).parent / "answer_pairs.jsonl").read_text(encoding="utf-8").split("\n")
PAIRS = [json.loads(line) for line in LINES if line]
TOPICS = sorted({pair["topic"] for pair in PAIRS})


def answer_of(pair: dict) -> str:
    """An answer as it is, or what a solution's text says."""
    return pair["answer"] if "answer" in pair else extract_answer(pair["text"])


def verdict(pair: dict) -> bool:
    answer = answer_of(pair)
    return bool(answer) and is_right(pair["gold"], answer)


def test_the_pairs_are_many_and_no_two_are_alike():
    assert len({(p["gold"], p.get("answer"), p.get("text")) for p in PAIRS}) == len(PAIRS) >= 200
    assert sum(not pair["right"] for pair in PAIRS) >= 100


@pytest.mark.parametrize("topic", TOPICS)
def test_verdicts_are_those_wanted_but_for_the_known(topic: str):
    wrong = [pair for pair in PAIRS if pair["topic"] == topic and verdict(pair) != pair["right"]]
    assert wrong == [pair for pair in PAIRS if pair["topic"] == topic and pair.get("known")]


@pytest.mark.parametrize(("passed", "heading"), [(True, "passed for right"), (False, "passed for wrong")])
def test_the_verdicts_known_to_be_wrong_are_those_that_the_docs_name(passed: bool, heading: str):
    _, _, section = (equality.__doc__ or "").partition(heading + ":\n\n")
    named = re.findall(r"^- gold `(.*)`: `(.*)`$", section.partition("\n\n")[0], re.MULTILINE)
    known = [pair for pair in PAIRS if pair.get("known") and pair["right"] != passed]
    assert sorted(named) == sorted((pair["gold"], pair.get("answer", pair.get("text"))) for pair in known)
    assert named


VALUES = [
    "5", r"5\%", "0.05", "5.0", "5 dollars", "x=5", "y=5", "5%", "1/20", "0.5", r"\frac{1}{2}", "50%",
    "1/3", "0.333333", "0.333334", "(1,2)", "[1,2]", "1,2", "2,1", "(2,1)", r"\{1,2\}", r"\{2,1\}",
    r"\sqrt{8}", r"2\sqrt{2}", "2.828427", "x+1", "1+x", "1+X", "(C)", "(C) 5", "C", "Evelyn",
    r"\text{evelyn}", "x>5", r"(5,\infty)", "5<x", "1e-9", "2^{-60}", "2^{-61}", "3R^2", "3r^2", "10 cm",
    "10 m", "10", "5m", "3,5", "e^2", r"\mathrm{e}^{2}", "0." + "3" * 500, "YES", "yes", "CAT", "cat", "none",
    r"\emptyset", r"\langle 1,2\rangle", r"\begin{pmatrix}1\\2\end{pmatrix}", "<1,2>", "(1,2)", "1:20", "12:05",
    "6:120", "1.234,5", "2469/2", r"(-\infty,+\infty)", r"\mathbb{R}", "all reals", "i^2", "-1",
]  # fmt: skip


def test_in_a_vote_equality_is_an_equivalence():
    equal = {one: {other for other in VALUES if is_same_value(one, other)} for one in VALUES}
    for one, others in equal.items():
        assert one in others
        assert all(equal[other] == others for other in others), one


@pytest.mark.parametrize(
    "different",
    [
        ("5", r"5\%"), ("1/3", "0.333333"), ("0.333333", "0.333334"), ("(1,2)", "[1,2]", "1,2", "(2,1)", r"\{1,2,3\}"),
        (r"2\sqrt{2}", "2.828427", "2.82842712"), ("1e-9", "1e-10", "0"), ("2^{-60}", "2^{-61}", "0"), ("3R^2", "3r^2"),
        ("(C)", "(D)", "5"), ("52_8", "25_8"), ("no solution", "0", "yes"), ("1,-2", "1,2", "1"), ("5m", "5"),
        ("3,5", "3.5"), ("1/3", "0." + "3" * 500), ("10 000", "10000"), ("e^2", "x^2"),
        (r"\angle ABC", r"\angle ACB"), ("12:05", "12:5", "12:50"), ("ABC", "abc", "ACB"), ("no", "none", "0"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}", "<2,1>"), ("2:3", "3:2", "2/30"),
        ("1%", "1", "100"), ("0,5", "0,05", "5"), ("10,000", "10,00"),
    ],
)  # fmt: skip
def test_different_answers_never_vote_together(different: tuple[str, ...]):
    assert not [pair for pair in itertools.permutations(different, 2) if is_same_value(*pair)]


@pytest.mark.parametrize(
    "same",
    [
        ("18", "18 dollars", r"18\text{ dollars}", "$18", r"\$18.00", "18 eggs", "x = 18", "**18**", "= 18"),
        (r"5\%", "0.05", "5 percent", r"\frac{1}{20}"),
        (r"\frac{1}{2}", "½", "0.5", "1/2", r"\dfrac12"),
        ("Evelyn", r"\text{Evelyn}", "evelyn"),
    ],
)
def test_what_is_spelled_otherwise_votes_together_without_math_verify(same: tuple[str, ...]):
    assert len({canonical(answer) for answer in same}) == 1


def test_names_and_units_are_part_of_the_spelling_and_not_of_the_value():
    assert exact_match_key("18") == exact_match_key("18 eggs") == "18"
    assert len({exact_match_key(answer) for answer in ("18", "18 cm", "18 m", "x = 18", "y = 18")}) == 5


def test_golds_are_cleaned_as_answers_are():
    for gold in {pair["gold"]: pair for pair in PAIRS if pair["right"] and "answer" in pair}:
        if not gold.startswith(("x ", "\\begin")):
            for dressed in (f"${gold}$", f"\\boxed{{{gold}}}", f" {gold}. "):
                assert is_right(dressed, gold), dressed


def test_a_memory_error_inside_math_verify_is_no_verdict(monkeypatch: pytest.MonkeyPatch):
    from math_verify import grader

    def fail(*args: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr(grader, "sympy_expr_eq", fail)
    with pytest.raises(MemoryError):
        is_right("x+1", "x-1")
    monkeypatch.setattr(formulas, "latex2sympy", fail)
    with pytest.raises(MemoryError):
        is_right("x+1", "x + 2y + 77")


def test_an_error_inside_math_verify_leaves_only_what_is_spelled_alike_equal(monkeypatch: pytest.MonkeyPatch):
    from math_verify import grader

    def divide(*args: object, **options: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(grader, "sympy_expr_eq", divide)
    assert [is_right("x+1", answer) for answer in ("x + 1", "1+x")] == [True, False]


@given(st.text(r"12xXA.,=+-*/^_%$°√½(){}[]\\ :fractextboxed", max_size=300))
def test_any_text_is_read_and_right_beside_itself(text: str):
    reading = read.__wrapped__(text)
    assert read(f" {text} ") == reading or reading.whole != text
    assert is_right(text, text) == bool(reading.whole)


@pytest.mark.parametrize(
    "piece",
    [
        "a",
        "ab ",
        "A",
        "AB",
        "x+",
        "x=",
        "(",
        "{",
        r"\text{",
        r"\frac",
        r"\frac1",
        "½",
        "1,",
        "1 a ",
        "/a",
        "A)",
        "✅",
        "(a ",
        r"\text{m}/",
        r"\mathrm{",
        r"{\rm ",
        r"\color{",
        "<b>",
        "5千",
        "1 y ",
        "1 000 ",
        "sin(",
    ],
)
@pytest.mark.parametrize("end", ["", "!", "=5", "}", " a"])
def test_no_answer_takes_long_to_read(piece: str, end: str):
    """With a pattern that tries everything twice these would never end."""
    text = (piece * 400)[: 400 - len(end)] + end
    assert read.__wrapped__(text).whole
    assert read.__wrapped__(text * 1000).value == (text * 1000).strip()
