"""Benchmarks are read from files; copies of the public ones are looked for beside the checkout."""

import json
from pathlib import Path

import pytest

from espalier.experiments.benchmarks import BenchmarkError, Problem, load_benchmark
from espalier.search.answers import extract_answer
from espalier.search.equality import is_right
from espalier.search.grading import Grader

COPIES = Path(__file__).resolve().parents[3] / "shared" / "benchmarks"
MATH = {"problem": "1+1?", "solution": "2", "answer": "2", "subject": "Algebra", "level": 3, "unique_id": "a/1.json"}


@pytest.fixture
def write(tmp_path):
    """Writes records, or lines as they are, to a benchmark file; returns its name."""

    def write(*records: object, name: str = "some.jsonl") -> str:
        lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records]
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(tmp_path / name)

    return write


def copy(name: str) -> Path:
    path = COPIES / name
    if not path.is_file():
        pytest.skip(f"no copy of {name} beside the checkout")
    return path


def test_math_record(write):
    assert load_benchmark(write(MATH)) == [Problem("a/1.json", "1+1?", "2", 3)]


def test_math_record_without_level_and_id_is_named_by_file_and_line(write):
    (problem,) = load_benchmark(write("", {"problem": "1+1?", "answer": "2"}))
    assert problem == Problem("some/2", "1+1?", "2", None)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("He has 1,000 + 234 = <<1000+234=1234>>1,234 coins.\n#### 1,234", "1234"),
        ("It is 5.\n#### 5", "5"),
        ("It costs 1,234,567.\n####   -1,234,567  ", "-1234567"),
        ("Half: #### of it\n#### 0.5", "0.5"),
    ],
)
def test_gsm8k_gold_is_what_follows_the_last_hashes_without_commas(write, answer, gold):
    (problem,) = load_benchmark(write({"question": "How many?", "answer": answer}))
    assert problem == Problem("some/1", "How many?", gold, None)


@pytest.mark.parametrize(("answer", "gold"), [(27.0, "27"), (0.5, "0.5"), (-3.0, "-3"), (12, "12")])
def test_amc_answers_are_numbers_written_as_a_solver_would(write, answer, gold):
    (problem,) = load_benchmark(write({"id": 0, "problem": "How far?", "answer": answer, "url": "https://x.org"}))
    assert (problem.problem, problem.answer) == ("How far?", gold)


def test_amc_record_that_repeats_its_problem_as_a_question_is_not_taken_for_gsm8k(write):
    (problem,) = load_benchmark(write({"id": 0, "problem": "How far?", "question": "How far?", "answer": 27.0}))
    assert (problem.problem, problem.answer) == ("How far?", "27")


def test_limit_takes_the_first_and_reads_no_further(write):
    name = write(*({**MATH, "unique_id": str(i)} for i in range(3)), "not json")
    assert [p.unique_id for p in load_benchmark(name, 2)] == ["0", "1"]
    with pytest.raises(BenchmarkError):
        load_benchmark(name, 4)


def test_repeated_ids_are_refused(write):
    with pytest.raises(BenchmarkError, match=r"some\.jsonl.*unique_id"):
        load_benchmark(write(MATH, {**MATH, "problem": "2+2?"}))


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        '{"problem": "cut short',
        "[1, 2]",
        "7",
        '"problem"',
        "null",
        '{"problem": "no answer"}',
        '{"answer": "no problem"}',
        '{"question": "no hashes", "answer": "5"}',
        '{"problem": null, "answer": "5"}',
        '{"problem": 5, "answer": "5"}',
        '{"problem": "no gold", "answer": null}',
    ],
)
def test_bad_line_is_named_with_file_and_line(write, line):
    with pytest.raises(BenchmarkError, match=r"some\.jsonl:3: "):
        load_benchmark(write(MATH, "", line))


def test_line_separators_inside_a_text_do_not_end_the_record(write):
    text = "first\u2028second\x0bthird\x85fourth"
    assert load_benchmark(write({**MATH, "problem": text}))[0].problem == text


def test_file_that_is_not_text_is_refused_by_name(tmp_path):
    (tmp_path / "picture.jsonl").write_bytes(b"\x89PNG\xff\xfe\x00")
    with pytest.raises(BenchmarkError, match=r"picture\.jsonl"):
        load_benchmark(str(tmp_path / "picture.jsonl"))


def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path):
    (tmp_path / "marked.jsonl").write_text(json.dumps(MATH) + "\n", encoding="utf-8-sig")
    assert load_benchmark(str(tmp_path / "marked.jsonl")) == [Problem("a/1.json", "1+1?", "2", 3)]


@pytest.mark.parametrize("lines", [(), ("", "  ", "")])
def test_a_benchmark_without_problems_is_refused_by_name(write, lines):
    with pytest.raises(BenchmarkError, match=r"some\.jsonl holds no problems"):
        load_benchmark(write(*lines))


def test_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(BenchmarkError, match=r"nowhere\.jsonl.*demo"):
        load_benchmark(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(BenchmarkError):
        load_benchmark(str(tmp_path))


def test_demo_benchmark_is_there_by_name():
    problems = load_benchmark("demo")
    assert len(problems) == 500
    assert {p.level for p in problems} == {1, 2, 3, 4, 5}
    assert len({p.problem for p in problems}) == 500
    assert all(p.answer.lstrip("-").isdigit() for p in problems)
    assert load_benchmark("demo", 7) == problems[:7]


def test_demo_solutions_box_the_gold_answer():
    path = Path(load_benchmark.__globals__["_demo_path"]())
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        assert extract_answer(record["solution"]) == record["answer"]


@pytest.mark.parametrize(("name", "count"), [("gsm8k_test", 1319), ("math500", 500), ("amc23", 40)])
def test_public_copies_are_read_whole(name, count):
    problems = load_benchmark(str(copy(f"{name}.jsonl")))
    assert len(problems) == count
    assert all(p.problem.strip() and p.answer.strip() for p in problems)


def test_gsm8k_golds_are_plain_numbers():
    problems = load_benchmark(str(copy("gsm8k_test.jsonl")))
    assert problems[0].answer == "18"
    assert not [p.answer for p in problems if not p.answer.lstrip("-").replace(".", "", 1).isdigit()]


def test_math500_solutions_are_graded_right_by_their_own_golds(grader: Grader):
    path = copy("math500.jsonl")
    golds = {p.unique_id: p.answer for p in load_benchmark(str(path))}
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    futures = {r["unique_id"]: grader.submit(golds[r["unique_id"]], extract_answer(r["solution"])) for r in records}
    assert len(futures) == 500
    assert [name for name, future in futures.items() if not grader.resolve(future).correct] == []


@pytest.mark.parametrize("name", ["gsm8k_test", "math500", "amc23"])
@pytest.mark.parametrize(
    "says", ["{}", "Thus \\boxed{{{}}}.", "<answer>{}</answer>", "The answer is ${}$.", "**Answer:** $${}$$"]
)
def test_golds_of_public_benchmarks_are_right_beside_themselves_however_said(name: str, says: str):
    golds = {p.answer for p in load_benchmark(str(copy(f"{name}.jsonl")))}
    said = {gold: gold if says == "{}" else extract_answer(says.format(gold)) for gold in golds}
    assert [gold for gold, answer in said.items() if not is_right(gold, answer)] == []


@pytest.mark.parametrize(
    "says", ["The answer is {} dollars.", "The answer is: ${}.00", "#### {} eggs", "\\boxed{{{}\\text{{ people}}}}"]
)
def test_gsm8k_golds_are_right_with_a_unit(says: str):
    golds = {p.answer for p in load_benchmark(str(copy("gsm8k_test.jsonl"))) if "." not in p.answer}
    assert [gold for gold in golds if not is_right(gold, extract_answer(says.format(gold)))] == []


def test_gsm8k_golds_are_extracted_from_their_own_answers():
    path = copy("gsm8k_test.jsonl")
    golds = [p.answer for p in load_benchmark(str(path))]
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    extracted = [extract_answer(record["answer"]).replace(",", "") for record in records]
    assert len(extracted) == 1319
    assert extracted == golds
