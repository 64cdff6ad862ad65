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
        (b'{"id": "2", "id": "3"}', "an object names 'id' twice"),
        (b'{"id": "\\ud800"}', "its 'id' holds \\ud800, a lone surrogate"),
        (b'{"label": ' + b"9" * 5000 + b"}", "JSON that cannot be read: an integer of 5000 digits"),
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
