"""`eval`: which problems, how often, and the exit code."""

import json

import pytest

GREEDY = ("eval", "-a", "greedy")


def samples_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_problems_are_chosen_and_searched_several_times(espalier, tmp_path):
    out = tmp_path / "run"
    options = (
        "--levels",
        "2,4",
        "--shuffle",
        "--shuffle-seed",
        3,
        "--limit",
        3,
        "--epochs",
        2,
        "--trees",
        "--out",
        out,
    )
    ran = espalier("eval", "-N", 1, "-M", 2, *options)
    assert ran.code == 0
    found = samples_of(out)
    assert len(found) == 6
    assert {sample["level"] for sample in found} <= {2, 4}
    assert sorted(sample["epoch"] for sample in found) == [0, 0, 0, 1, 1, 1]
    assert "3 problems, 2 times each" in ran.out
    assert "tokens per search" in ran.out
    assert len((out / "trees.jsonl").read_text().splitlines()) == 6
    ran = espalier(*GREEDY, "--sample-ids", "demo/level-1/002,demo/level-3/000", "--json")
    assert json.loads(ran.out)["problems"] == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--sample-ids", "nobody"), "--sample-ids: the benchmark has no nobody"),
        (("--sample-ids", "a,,b"), "is not a list like a,b"),
        (("--levels", "nine"), "--levels"),
        (("--subjects", "art"), "--subjects: the benchmark has no art; it has collections, measures"),
        (("--epochs", 0), "--epochs"),
        (("--trees",), "needs a folder, --out"),
    ],
)
def test_a_wrong_choice_names_its_option_and_runs_nothing(espalier, options, said):
    ran = espalier(*GREEDY, *options)
    assert ran.code == 2
    assert said in " ".join(ran.err.split())


def test_exit_codes_tell_all_from_some_and_none(espalier, tmp_path):
    file = tmp_path / "tasks.jsonl"
    fits, never = {"problem": "1+1?", "answer": 2}, {"problem": "word " * 3000, "answer": 1}
    for records, code in (([fits], 0), ([fits, never], 3), ([never], 1)):
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        assert espalier(*GREEDY, "--benchmark", file).code == code
        swept = espalier("sweep", "-N", 1, "-M", 1, "--benchmark", file, "--out", tmp_path / f"sweep-{code}")
        assert swept.code == code


def test_another_grader_is_part_of_a_run(espalier, tmp_path):
    file, out = tmp_path / "tasks.jsonl", tmp_path / "run"
    file.write_text(json.dumps({"problem": "1+1?", "answer": "len(answer) > 0"}) + "\n")
    arguments = (*GREEDY, "--benchmark", file, "--out", out)
    ran = espalier(*arguments, "--grader", "expression")
    assert ran.code == 0, ran.err
    assert json.loads((out / "summary.json").read_text())["grader"] == "expression"
    assert json.loads((out / "config.json").read_text())["grader"] == "expression"
    again = espalier(*arguments)
    assert again.code == 2
    assert 'grader is "expression" there, not set now' in " ".join(again.err.split())
    assert espalier(*arguments, "--grader", "nothing").code == 2
