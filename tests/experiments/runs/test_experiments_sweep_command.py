"""`espalier sweep`: its dry run, exit codes and report; see `test_experiments_kill` for sweeps that are killed."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from killed_runs import started

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
    assert espalier("sweep", *options, "--report", "--out", tmp_path / "none").code == 1
    assert (tmp_path / "none" / "report" / "report.html").is_file()


def test_an_interrupted_sweep_says_so_keeps_its_samples_and_resumes(espalier, tmp_path):
    command = ("sweep", "-a", "majority", "-N", "4,8", "--limit", 40, "--in-flight", 2, "--out", tmp_path / "out")
    with started(command, stderr=subprocess.PIPE, start_new_session=True) as process:
        end = time.monotonic() + 150
        while process.poll() is None and time.monotonic() < end and _samples(tmp_path / "out") < 3:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
        said = process.communicate(timeout=150)[1].decode()
    assert process.returncode == 130, said
    assert "interrupted: what was finished is in" in said
    assert "Traceback" not in said
    kept = _samples(tmp_path / "out")
    assert 3 <= kept < 80
    rows = json.loads(espalier(*command, "--dry-run", "--json").out)
    assert sum(row["searches"] for row in rows) == 80 - kept


def test_no_name_of_a_cell_is_cut_in_a_narrow_terminal(espalier, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    command = ("sweep", "-a", "best-of-n", "-N", "1,2", "--temperature", "0.55,0.65", "--max-step-tokens", "24,32")
    command = (*command, "--limit", 1, "--out", tmp_path / "out")
    planned, found = espalier(*command, "--dry-run").out, espalier(*command).out
    assert "N2-temperature0.65-max-step-tokens32" in planned
    assert "…" not in planned + found
    assert re.search(r"2.*0\.65.*32.*1.*100\.0", found)


def _samples(out: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in out.glob("*/samples.jsonl"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--temperature", "hot"), "--temperature"),
        (("-N", "0"), "-N"),
        (("--share-work", "--isolated"), "--share-work"),
        (("--limit", 0), "--limit"),
        (("--benchmark", "nowhere.jsonl"), "nowhere.jsonl"),
    ],
)
def test_a_wrong_option_ends_a_sweep_before_anything_is_written(espalier, tmp_path, options, said):
    ran = espalier("sweep", *options, "--out", tmp_path / "out")
    assert ran.code == 2
    assert said in ran.err
    assert not (tmp_path / "out").exists()


def test_a_sweep_writes_its_report(espalier, tmp_path):
    command = ("sweep", "-a", "beam,best-of-n", "-N", "1,2", "-M", 2, "--limit", 2)
    ran = espalier(*command, "--out", tmp_path / "out", "--share-work", "--report")
    assert ran.code == 0
    page = (tmp_path / "out" / "report" / "report.html").read_text()
    assert str(tmp_path / "out" / "report" / "report.html") in ran.out
    for name in ("beam-N1-M2", "beam-N2-M2", "best-of-n-N1", "best-of-n-N2"):
        assert name in page
    with (tmp_path / "out" / "report" / "table.csv").open(newline="") as stream:
        figures = {row["run"]: (row["wall_seconds"] > "0", row["peak_kv_mib"] > "0") for row in csv.DictReader(stream)}
    assert figures.pop("best-of-n-N1") == (False, False), "a derived cell has neither"
    assert set(figures.values()) == {(True, True)}
    with (tmp_path / "out" / "report" / "differences.csv").open(newline="") as stream:
        assert len(list(csv.DictReader(stream))) == 6
    again = espalier(*command, "--out", tmp_path / "out", "--early-stop", "off", "--json")
    assert len(json.loads(again.out)) == 4


def test_a_report_without_scipy_is_refused_before_anything_runs(espalier, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    ran = espalier("sweep", "-N", 1, "-M", 1, "--limit", 1, "--report", "--out", tmp_path / "out")
    assert ran.code == 2
    assert "scipy" in ran.err
    assert not (tmp_path / "out").exists()
