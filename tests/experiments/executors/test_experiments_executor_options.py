"""The options that choose an executor, and a driver that is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 90.0
SMALL = ("eval", "--limit", "12", "-N", "2", "-M", "2", "--threads", "1", "--kv-memory", "64M", "--in-flight", "2")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--workers", 2), ("workers", "--executor processes or --executor ray")),
        (("--ray-address", "auto"), ("ray-address", "--executor ray")),
        (("--gpus-per-worker", 1), ("gpus-per-worker", "--executor ray")),
        (("--executor", "ray", "--device", "cuda:1"), ("device", "must be cuda")),
        (("--executor", "processes", "--device", "cuda:1"), ("device", "must be cuda", "--executor processes")),
        (("--executor", "processes", "--ray-address", "auto"), ("ray-address", "--executor ray")),
        (("--executor", "processes", "--workers", 4096), ("--workers 4096", "of its own")),
        (("--executor", "processes", "--threads", 10**6), ("threads", "at most")),
        (("--executor", "ray", "--workers", 0), ("workers", "1")),
        (("--executor", "slurm"), ("slurm", "local")),
    ],
)
def test_options_that_do_not_fit_are_usage_errors(espalier, options, words):
    ran = espalier("eval", *options)
    assert ran.code == 2
    for word in words:
        assert word in ran.err


def test_a_missing_ray_says_what_to_install(espalier, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    ran = espalier("eval", "--executor", "ray")
    assert ran.code == 2
    assert "pip install 'espalier-search[ray]'" in ran.err


def test_what_is_no_address_is_said_at_once(espalier):
    pytest.importorskip("ray")
    ran = espalier("eval", "--executor", "ray", "--ray-address", "127.0.0.1:1")
    assert ran.code == 2
    assert "--ray-address 127.0.0.1:1" in ran.err


def start(folder: Path, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", "from espalier.experiments.cli.main import main; main()", *SMALL, *options]
    return subprocess.Popen(
        [*command, "--out", str(folder)], text=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def samples(folder: Path) -> dict[str, Any]:
    """The samples in a run folder, without times."""
    path = folder / "samples.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    times = {"seconds", "queue_seconds", "first_step_seconds"}
    for record in found:
        record.pop("wall_seconds")
        record["usage"] = {name: value for name, value in record["usage"].items() if name not in times}
    assert len({record["unique_id"] for record in found}) == len(found)
    return {record["unique_id"]: record for record in found}


@pytest.mark.slow
def test_a_killed_driver_goes_on_from_its_folder(tmp_path):
    pytest.importorskip("ray")
    local, folder = tmp_path / "local", tmp_path / "ray"
    assert start(local).wait(PATIENCE) == 0
    driver = start(folder, "--executor", "ray")
    end = time.monotonic() + PATIENCE
    while not len(samples(folder)) >= 3 and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait(PATIENCE)
    before = samples(folder)
    assert len(before) >= 3
    assert start(folder, "--executor", "ray").wait(PATIENCE) == 0
    assert samples(folder) == samples(local)
    assert before.items() <= samples(folder).items()
