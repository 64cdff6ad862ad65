"""What a sweep says before it runs, and of what it could not run; see `test_experiments_kill` for killed ones."""

import json

import pytest

SMALL = ("sweep", "-a", "beam,best-of-n", "-N", "1,2", "-M", "2", "--limit", "3", "--threads", "1")


def test_dry_run_tells_the_cost_and_runs_nothing_then_uses_the_samples(espalier, tmp_path):
    command = (*SMALL, "--out", tmp_path / "out", "--dry-run", "--json")
    before = json.loads(espalier(*command).out)
    assert not (tmp_path / "out").exists()
    assert {row["basis"] for row in before} == {"longest paths"}
    assert {row["name"] for row in before} == {"beam-N1-M2", "beam-N2-M2", "best-of-n-N1", "best-of-n-N2"}
    first = ("sweep", "-a", "beam,best-of-n", "-N", 1, "-M", 2, "--limit", 2)
    assert espalier(*first, "--out", tmp_path / "out").code == 0
    after = {row["name"]: row for row in json.loads(espalier(*command).out)}
    small, large = after["beam-N1-M2"], after["beam-N2-M2"]
    assert (small["basis"], small["done"], small["searches"]) == ("its own samples", 2, 1)
    assert (large["basis"], large["done"], large["searches"]) == ("samples of beam-N1-M2", 0, 3)
    assert large["generated_tokens"] == pytest.approx(6 * small["generated_tokens"])
    assert 0 < large["peak_kv_bytes"] < next(r["peak_kv_bytes"] for r in before if r["name"] == "beam-N2-M2")
    assert large["minutes"] > 0


def test_refused_problems_are_told_by_the_exit_code(espalier, tmp_path):
    problems = tmp_path / "problems.jsonl"
    rows = [{"problem": "What is 2 + 3?", "answer": "5"}, {"problem": "What is 1" + " + 1" * 2000, "answer": "2001"}]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("-N", 1, "-M", 1, "--benchmark", problems, "--out", tmp_path / "out")
    assert espalier("sweep", *options).code == 3
    problems.write_text(json.dumps(rows[1]) + "\n")
    assert espalier("sweep", *options, "--out", tmp_path / "none").code == 1
