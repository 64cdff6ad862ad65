"""Benchmarks are read from files; copies of the public ones are looked for beside the checkout."""

import json
from pathlib import Path

import pytest

from espalier.experiments.demo import benchmark_path
from espalier.experiments.runs.benchmark_files import BenchmarkError
from espalier.experiments.runs.benchmarks import Problem, load_benchmark
from espalier.search.grading.answers import extract_answer
from espalier.search.grading.equality import is_right
from espalier.search.grading.math_verify import Grader

COPIES = Path(__file__).resolve().parents[4] / "shared" / "benchmarks"
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
    assert load_benchmark(write(MATH)) == [Problem("a/1.json", "1+1?", "2", 3, subject="Algebra")]


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
    assert load_benchmark(str(tmp_path / "marked.jsonl")) == [Problem("a/1.json", "1+1?", "2", 3, subject="Algebra")]


@pytest.mark.parametrize("lines", [(), ("", "  ", "")])
def test_a_benchmark_without_problems_is_refused_by_name(write, lines):
    with pytest.raises(BenchmarkError, match=r"some\.jsonl holds no problems"):
        load_benchmark(write(*lines))


# --- other files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "problem", "gold"),
    [
        ({"question": "1+1?", "answer": "2"}, "1+1?", "2"),
        ({"prompt": "1+1?", "final_answer": "2"}, "1+1?", "2"),
        ({"Problem": "1+1?", "Answer": 2}, "1+1?", "2"),
        ({"Body": "Ann has 1 egg. ", "Question": "How many?", "Answer": 2.0}, "Ann has 1 egg. How many?", "2"),
        ({"Question": "1+1?", "Answer": 2}, "1+1?", "2"),
        ({"problem": "1+1?", "solution": "1+1 is\n\nso $\\boxed{\\frac{4}{2}}$."}, "1+1?", "\\frac{4}{2}"),
        ({"problem": "1+1?", "solution": "2", "level": "Level ?"}, "1+1?", "2"),
        ({"question": "1+1?", "solution": ["long"], "final_answer": ["$2$"]}, "1+1?", "$2$"),
        ({"problem": "How small?", "answer": 1e-07}, "How small?", "0.0000001"),
        ({"problem": "How large?", "answer": 1e22}, "How large?", "10000000000000000000000"),
        ({"problem": "Which?", "answer": "\\begin{pmatrix}\n1\n\\end{pmatrix}"}, "Which?",
         "\\begin{pmatrix}\n1\n\\end{pmatrix}"),
    ],
)  # fmt: skip
def test_fields_of_other_benchmarks_are_read(write, record, problem, gold):
    assert load_benchmark(write(record)) == [Problem("some/1", problem, gold, None)]


def test_several_answers_are_all_accepted_and_the_first_is_named(write):
    (problem,) = load_benchmark(write({"problem": "Which?", "answer": ["2", 3.0, "2"]}))
    assert problem.golds == ("2", "3")
    assert problem.answer == "2"


@pytest.mark.parametrize(("field", "value"), [("unique_id", "a/1"), ("id", 7), ("ID", "chal-1"), ("id", 0)])
def test_own_name_of_a_record_is_kept(write, field, value):
    (problem,) = load_benchmark(write({"problem": "1+1?", "answer": "2", field: value}))
    assert problem.unique_id == str(value)


def test_array_of_records_is_read_like_lines(tmp_path):
    records = [MATH, {"question": "2+2?", "answer": "#### 4"}]
    for indent in (None, 2):
        (tmp_path / "some.json").write_text("\n" + json.dumps(records, indent=indent) + "\n")
        first, second = load_benchmark(str(tmp_path / "some.json"))
        assert first == Problem("a/1.json", "1+1?", "2", 3, subject="Algebra")
        assert second == Problem("some/2", "2+2?", "4", None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[\n  {"problem": "1?", "answer": "1"},\n  {"problem": "2?"}\n]', "some.json:3 (record 2): no answer"),
        ('[\n  {"problem": "1?", "answer": "1"}\n  {"problem": "2?"}\n]', "some.json:2: record 1"),
        ('[\n  {"problem": "1?", "answer": "1"},\n  {"problem":\n "2?', "some.json:4: not JSON"),
        ('[{"problem": "1?", "answer": "1"},]', "some.json:1: not JSON"),
        ('[{"problem": "1?", "answer": "1"}', "some.json:1: record 1"),
        ('[{"problem": "1?", "answer": "1"}] [', "text after the array"),
        ("[]", "holds no problems"),
        ("[[1]]", "some.json:1 (record 1): a list, not an object"),
        ('{\n  "problem": "1?",\n  "answer": "1"\n}', "some.json:1: not JSON"),
        ("problem,answer\n1?,1\n", "one JSON object per line, or one array of objects"),
        ("[" * 100_000, "some.json:1: "),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(tmp_path, text, said):
    (tmp_path / "some.json").write_text(text)
    with pytest.raises(BenchmarkError) as refused:
        load_benchmark(str(tmp_path / "some.json"))
    assert said in str(refused.value)
    assert "Error(" not in str(refused.value)


def test_array_is_read_no_further_than_its_limit(tmp_path):
    (tmp_path / "some.json").write_text('[{"problem": "1?", "answer": "1"}, not json')
    with pytest.raises(BenchmarkError):
        load_benchmark(str(tmp_path / "some.json"))
    (tmp_path / "some.json").write_text('[{"problem": "1?", "answer": "1"}, {"problem": 2}]')
    assert len(load_benchmark(str(tmp_path / "some.json"), 1)) == 1


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"text": "1+1?", "target": "2"}, "no problem: the record has text, target; wanted: "
         "problem, Body and Question, question, prompt; name it with --field-map problem=NAME"),
        ({"problem": "1+1?", "result": "2"}, "no answer: the record has problem, result; wanted: "
         "answer, final_answer, solution, reward_model.ground_truth; name it with --field-map answer=NAME"),
        ({}, "the record has no fields"),
        ({"prompt": [{"role": "user"}], "answer": "2"}, "its prompt is no conversation: the content"),
        ({"problem": " ", "answer": "2"}, "its problem is empty"),
        ({"problem": "1+1?", "answer": " "}, "its answer is empty"),
        ({"question": "1+1?", "answer": "It is 2.\n####"}, "its answer is empty"),
        ({"problem": "1+1?", "answer": "\\boxed{}"}, "its answer is empty"),
        ({"problem": "1+1?", "answer": []}, "its answer is an empty list"),
        ({"problem": "1+1?", "answer": ["2", ""]}, "its answer is empty"),
        ({"problem": "1+1?", "answer": True}, "its answer is true or false"),
        ({"problem": "1+1?", "answer": {"value": 2}}, "its answer is an object"),
        ({"problem": "1+1?", "answer": float("nan")}, "its answer is nan, not a number"),
        ({"question": "1+1?", "answer": "One and one\nis 2."}, "has several lines"),
        ({"problem": "1+1?", "answer": "2", "id": [1]}, "its id is a list"),
    ],
)  # fmt: skip
def test_record_that_is_not_understood_names_what_it_has_and_what_is_wanted(write, record, said):
    with pytest.raises(BenchmarkError, match=r"some\.jsonl:2: ") as refused:
        load_benchmark(write(MATH, record))
    assert said in str(refused.value)


def test_field_map_names_the_fields_of_a_file(write):
    name = write({"problem": "no", "Task": "1+1?", "Hint": "Add.", "gold": 2, "nr": 5, "hard": 3})
    fields = {"problem": "Hint+Task", "answer": "gold", "id": "nr", "level": "hard"}
    assert load_benchmark(name, field_map=fields) == [Problem("5", "Add. 1+1?", "2", 3)]


@pytest.mark.parametrize("what", ["problem", "answer", "id", "level"])
def test_field_that_the_map_names_must_be_there(write, what):
    with pytest.raises(BenchmarkError, match=rf"some\.jsonl:1: no {what}: .* wanted: Other"):
        load_benchmark(write(MATH), field_map={what: "Other"})


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
    path = benchmark_path()
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
