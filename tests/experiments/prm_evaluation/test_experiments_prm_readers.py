import json
from pathlib import Path

import pytest

from espalier.experiments.prm_evaluation.solutions import Format, read_solutions
from espalier.experiments.runs.benchmark_files import BenchmarkError

PROCESS = {
    "id": "gsm8k-0",
    "generator": "Qwen2-7B-Instruct",
    "problem": "How many?",
    "steps": ["a", "b", "c"],
    "final_answer_correct": False,
    "label": 1,
}
PRM = {
    "idx": "p_0",
    "original_question": "Q",
    "modified_question": "Q2",
    "original_process": ["1. a"],
    "modified_process": ["1. a", "2. b", "3. c"],
    "modified_steps": [2],
    "error_steps": [3, 2],
    "reason": "because",
    "classification": "circular",
}


TRL = {"prompt": "How many?", "completions": ["a", "b"], "labels": [True, False]}


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def test_processbench_is_recognized_and_its_files_are_subsets(tmp_path):
    write(tmp_path / "gsm8k.jsonl", PROCESS)
    right = PROCESS | {"id": "math-0", "label": -1}
    (tmp_path / "math.json").write_text(json.dumps([right], indent=1))
    form, (one, other) = read_solutions(tmp_path)
    assert form is Format.PROCESSBENCH
    assert (one.subset, one.label, one.wrong, one.generator) == ("gsm8k", 1, (1,), "Qwen2-7B-Instruct")
    assert (other.subset, other.label, other.wrong) == ("math", -1, ())


def test_prmbench_counts_steps_from_one_and_takes_the_modified_ones(tmp_path):
    form, (one,) = read_solutions(write(tmp_path / "p.jsonl", PRM, PRM))  # a repeated one counts once
    assert form is Format.PRMBENCH
    assert (one.unique_id, one.problem, one.wrong, one.label) == ("circular_p_0", "Q2", (1, 2), 1)
    assert one.steps == ("1. a", "2. b", "3. c")


@pytest.mark.parametrize(
    ("labels", "label"), [([True, True], -1), ([True, False], 1), ([False, True], 0), ([1, 0], 1), ([False, False], 0)]
)
def test_trls_first_false_is_the_first_wrong_step(labels: list, label: int, tmp_path: Path):
    form, (one, other) = read_solutions(write(tmp_path / "t.jsonl", TRL, TRL | {"labels": labels, "id": "x"}))
    assert (form, one.label, one.unique_id) == (Format.TRL, 1, "t.jsonl:1")
    assert (other.problem, other.steps, other.label, other.unique_id) == ("How many?", ("a", "b"), label, "x")


@pytest.mark.parametrize("mark", ["ки", "<|step|>", "\u2717"])
@pytest.mark.parametrize(("signs", "label"), [("+++", -1), ("+-+", 1), ("--+", 0), ("++-", 2)])
def test_math_shepherds_marks_say_which_step_is_wrong(mark: str, signs: str, label: int, tmp_path: Path):
    text = "Is 3 + 4 7, or - 7? Step 1: 3 + 4 = 7 {}\nStep 2: руки\n- 8 {}\nStep 3: The answer is: 7 {}"
    record = {"input": text.format(*[mark] * 3), "label": text.format(*signs), "task": "GSM8K"}
    form, (one,) = read_solutions(write(tmp_path / "s.jsonl", record))
    assert (form, one.label, one.problem) == (Format.MATH_SHEPHERD, label, "Is 3 + 4 7, or - 7?")
    assert one.steps == ("Step 1: 3 + 4 = 7", "Step 2: руки\n- 8", "Step 3: The answer is: 7")


def rated(*ratings: int | None, chosen: int | None = None, human: object = None) -> dict:
    completions = [{"text": f"c{i}", "rating": rating, "flagged": None} for i, rating in enumerate(ratings)]
    return {"completions": completions, "chosen_completion": chosen, "human_completion": human}


@pytest.mark.parametrize(
    ("steps", "texts", "label"),
    [
        ([rated(1, chosen=0), rated(-1)], ("c0", "c0"), 1),
        ([rated(1, chosen=0), rated(0, chosen=0), rated(1)], ("c0", "c0", "c0"), -1),  # neutral is right
        ([rated(-1, 1, 0, chosen=2), rated(-1, 1, chosen=1)], ("c2", "c1"), -1),
        ([rated(-1, -1, human={"text": "h", "rating": None}), rated(1, chosen=0)], ("h", "c0"), -1),
        ([rated(-1, human="h"), rated(0, -1, 1)], ("h", "c1"), 1),
        ([rated(1, 0), rated(-1)], ("c0",), -1),  # it ends where nothing was chosen
        ([rated(-1, chosen=0), rated(1, chosen=0)], ("c0", "c0"), 0),
        ([rated(1, chosen=0), {"completions": None}], ("c0",), -1),
    ],
)
def test_prm800ks_solution_is_what_was_chosen(steps: list, texts: tuple[str, ...], label: int, tmp_path: Path):
    record = {"question": {"problem": "Q"}, "label": {"steps": steps, "finish_reason": "solution"}}
    form, (one,) = read_solutions(write(tmp_path / "p.jsonl", record))
    assert (form, one.problem, one.steps, one.label) == (Format.PRM800K, "Q", texts, label)


SHEPHERD = {"input": "Q Step 1: a ки\nStep 2: b ки", "label": "Q Step 1: a +\nStep 2: b -"}
OF_800K = {"question": {"problem": "Q"}, "label": {"steps": [rated(1, chosen=0)]}}


@pytest.mark.parametrize(
    ("good", "change", "message"),
    [
        (TRL, {"labels": [True]}, "labels: must be as many as the completions, 2, are 1"),
        (TRL, {"labels": [True, None]}, "labels: label 2 must be true or false, is null"),
        (TRL, {"labels": [True, 0.5]}, "labels: label 2 must be true or false, is 0.5"),
        (TRL, {"labels": "no"}, "labels: must be a list of true or false"),
        (TRL, {"completions": ["a", ""]}, "completions: step 2 must be a text"),
        (TRL, {"prompt": None}, "prompt: must be a text that is not blank"),
        (
            SHEPHERD,
            {"label": "Q Step 1: a +\nStep 2: c -"},
            "label: must be the input with + or - for each mark; is not",
        ),
        (
            SHEPHERD,
            {"label": "Q Step 1: a +\nStep 2: b ?"},
            "label: must be the input with + or - for each mark; is not",
        ),
        (SHEPHERD, {"label": SHEPHERD["label"] + " +"}, "label: must be the input with + or - for each mark; has more"),
        (SHEPHERD, {"input": "Q Step 1: a ки\nStep 2: b"}, "input: must have a mark, like 'ки', behind each step"),
        (
            SHEPHERD,
            {"input": "Q a ки", "label": "Q a +"},
            "input: must have 'Step 1:' between the problem and the first",
        ),
        (SHEPHERD, {"input": "Step 1: a ки", "label": "Step 1: a +"}, "input: must have a problem before 'Step 1:'"),
        (SHEPHERD, {"label": 3.5}, "label: must be a text that is not blank"),
        (OF_800K, {"question": "Q"}, "question: must be an object"),
        (OF_800K, {"question": {}}, "question.problem: must be a text that is not blank; question has no such field"),
        (OF_800K, {"label": {"steps": []}}, "label.steps: must be a list of steps"),
        (OF_800K, {"label": {"steps": [{}]}}, "label.steps: must have a completion in the first step"),
        (
            OF_800K,
            {"label": {"steps": [rated(1, chosen=1)]}},
            "label.steps[1].chosen_completion: must be a whole number",
        ),
        (OF_800K, {"label": {"steps": [rated(2, chosen=0)]}}, "label.steps[1].completions[0].rating: must be a whole"),
        (
            OF_800K,
            {"label": {"steps": [rated(None, chosen=0)]}},
            "label.steps[1].completions[0].rating: must be a whole",
        ),
        (OF_800K, {"label": {"steps": [rated(1, human=3)]}}, "label.steps[1].human_completion: must be an object"),
    ],
)
def test_broken_training_data_is_named_with_file_line_and_field(tmp_path: Path, good: dict, change: dict, message: str):
    file = write(tmp_path / "bad.jsonl", good, good | change)
    with pytest.raises(BenchmarkError) as caught:
        read_solutions(file)
    assert str(caught.value).startswith(f"{file}:2: {message}")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (PROCESS | {"id": "2", "label": 3}, "label: must be a whole number from -1 to 2, is 3"),
        (PROCESS | {"id": "2", "label": True}, "label: must be a whole number from -1 to 2, is true"),
        (PROCESS | {"id": "2", "steps": ["a", " "]}, "steps: step 2 must be a text"),
        (PROCESS | {"id": "2", "steps": []}, "steps: must be a list"),
        ({"id": "2", "steps": ["a"], "label": 0}, "problem: must be a text that is not blank; the record has no such"),
        (PROCESS, "id: 'gsm8k-0' is not unique"),
        ([1], "the record is not an object"),
    ],
)
def test_a_broken_record_is_named_with_file_line_and_field(tmp_path, record, message):
    file = write(tmp_path / "bad.jsonl", PROCESS, record)
    with pytest.raises(BenchmarkError) as caught:
        read_solutions(file)
    assert str(caught.value).startswith(f"{file}:2: {message}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"id": "2", "id": "3"}', "JSON that cannot be read: an object names 'id' twice"),
        (b'{"id": "\\ud800"}', "its 'id' holds '\\ud800', a lone surrogate"),
        (b'{"label": ' + b"9" * 5000 + b"}", "JSON that cannot be read: Exceeds the limit (4300 digits)"),
        (b"[" * 100_000, "JSON that cannot be read: maximum recursion depth"),
        ('{"id": "ß"}'.encode("latin-1"), "not text in UTF-8"),
    ],
)
def test_a_malformed_line_is_named_as_in_other_benchmarks(tmp_path, line, message):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(json.dumps(PROCESS).encode() + b"\n" + line)
    with pytest.raises(BenchmarkError) as caught:
        read_solutions(file)
    assert str(caught.value).startswith(f"{file}:2: {message}")
    with pytest.raises(BenchmarkError, match="neither `demo`"):
        read_solutions(Path("a" * 5000))


def test_broken_json_and_a_forced_format_are_named_too(tmp_path):
    file = tmp_path / "cut.jsonl"
    file.write_text(json.dumps(PROCESS) + "\n" + '{"id": ')
    with pytest.raises(BenchmarkError, match=r"cut\.jsonl:2: not JSON"):
        read_solutions(file)
    file.write_text("[" + json.dumps(PROCESS))
    with pytest.raises(BenchmarkError, match="record 1 of the array is not followed by a comma or bracket"):
        read_solutions(file)
    with pytest.raises(BenchmarkError, match=r":1: modified_process: must be a list of steps; the record has no such"):
        read_solutions(write(tmp_path / "p.jsonl", PROCESS), Format.PRMBENCH)
    with pytest.raises(BenchmarkError, match="error_steps"):
        read_solutions(write(tmp_path / "e.jsonl", PRM | {"error_steps": [4]}))
    with pytest.raises(BenchmarkError, match="neither `demo`"):
        read_solutions(tmp_path / "none")
