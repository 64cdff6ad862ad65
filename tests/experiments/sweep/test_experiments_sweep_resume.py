"""Sweeps that are killed give what an undisturbed one gives; and what the command says before it runs."""

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

_TIMES = {"seconds", "search_seconds", "problems_per_minute", "wall_seconds", "queue_seconds", "first_step_seconds"}
_MAIN = "from espalier.experiments.cli.main import main; main()"
SMALL = ("sweep", "-a", "beam,best-of-n", "-N", "1,2", "-M", "2", "--limit", "3", "--threads", "1")


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_times(each) for name, each in value.items() if name not in _TIMES}
    return [without_times(each) for each in value] if isinstance(value, list) else value


def results(out: Path) -> dict[str, Any]:
    """Samples by cell, and the tables, without times."""
    cells = {
        path.parent.name: sorted(
            json.dumps(without_times(json.loads(line)), sort_keys=True) for line in path.read_text().splitlines()
        )
        for path in out.glob("*/samples.jsonl")
    }
    with (out / "sweep.csv").open(newline="") as stream:
        rows = without_times(list(csv.DictReader(stream)))
    return {"samples": cells, "cells": without_times(json.loads((out / "cells.json").read_text())), "rows": rows}


def started(out: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", _MAIN, *SMALL, "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)


def test_a_killed_sweep_goes_on_to_the_same_results(espalier, tmp_path):
    assert espalier(*SMALL, "--out", tmp_path / "whole").code == 0
    with started(tmp_path / "killed") as process:
        end = time.monotonic() + 60
        while not any(path.stat().st_size for path in tmp_path.glob("killed/*/samples.jsonl")):
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert espalier(*SMALL, "--out", tmp_path / "killed").code == 0
    assert results(tmp_path / "killed") == results(tmp_path / "whole")


@pytest.mark.slow
def test_a_sweep_killed_at_ten_random_moments_goes_on_to_the_same_results(espalier, tmp_path):
    assert espalier(*SMALL, "--out", tmp_path / "whole").code == 0
    moments = random.Random(18)
    for _ in range(10):
        with started(tmp_path / "killed") as process:
            time.sleep(moments.uniform(0.5, 6))
            process.kill()
    assert espalier(*SMALL, "--out", tmp_path / "killed").code == 0
    assert results(tmp_path / "killed") == results(tmp_path / "whole")


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
