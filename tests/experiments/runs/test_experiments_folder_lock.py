"""Two processes never write to one output: the second is refused before it touches anything, and names the first."""

import errno
import fcntl
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from run_folders import run_of
from run_samples import CONFIGURATION, REQUEST

from espalier.engine.errors import EspalierError
from espalier.experiments.report.runs import load_runs
from espalier.experiments.runs.benchmarks import Problem
from espalier.experiments.runs.evaluate import Evaluation
from espalier.experiments.runs.files import file_lock, folder_lock
from espalier.experiments.runs.folder import RunFolder

# What a process of Espalier does, without its seconds of imports.
_HOLD = """
import fcntl, json, os, sys, time
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
json.dump({"process": os.getpid(), "host": os.uname().nodename, "command": "espalier eval --limit 9"}, lock)
lock.flush()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def hold() -> Iterator:
    """Starts processes that hold a lock file."""
    with ExitStack() as stack:

        def hold(path: Path) -> "subprocess.Popen[str]":
            path.parent.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-S", "-c", _HOLD, str(path)]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            return process

        yield hold


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_lock_leaves_nothing_behind(tmp_path):
    with folder_lock(tmp_path / "a" / "run"):
        assert (tmp_path / "a" / "run" / ".lock").is_file()
    assert not (tmp_path / "a" / "run").exists()  # it was made for the lock, and stayed empty
    (tmp_path / "kept").mkdir()
    with folder_lock(tmp_path / "kept"), file_lock(tmp_path / "kept" / "trees.jsonl"):
        assert sorted(contents(tmp_path / "kept")) == [".lock", ".trees.jsonl.lock"]
    assert contents(tmp_path / "kept") == {}


def test_what_holds_a_lock_may_take_it_again_and_keeps_it_to_the_end(tmp_path):
    def taken() -> str:
        with pytest.raises(EspalierError) as refused, folder_lock(tmp_path):
            pass
        return str(refused.value)

    with ThreadPoolExecutor(1) as other, folder_lock(tmp_path):
        with folder_lock(tmp_path / "." / ""):
            assert "is in use by process " in other.submit(taken).result()
        assert "is in use by process " in other.submit(taken).result()
    with folder_lock(tmp_path):
        pass


def test_a_process_that_is_killed_blocks_nobody(hold, tmp_path):
    process = hold(tmp_path / ".lock")
    with pytest.raises(
        EspalierError, match=rf"{tmp_path} is in use by process {process.pid} \(espalier eval --limit 9\)"
    ):
        RunFolder(tmp_path, CONFIGURATION)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / ".lock").is_file()
    RunFolder(tmp_path, CONFIGURATION)
    assert sorted(contents(tmp_path)) == ["config.json"]


def test_a_lock_without_a_signature_still_holds(tmp_path):
    with (tmp_path / ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(EspalierError, match="is in use by another process: wait for its end, or name another"):
            RunFolder(tmp_path, CONFIGURATION)


def test_an_evaluation_does_not_touch_the_samples_of_another_one(hold, make_orchestrator, grader, tmp_path):
    folder = RunFolder(tmp_path, CONFIGURATION)
    (tmp_path / "samples.jsonl").write_text('{"half a sam')
    before = contents(tmp_path)
    process = hold(tmp_path / ".lock")
    with pytest.raises(EspalierError, match=f"process {process.pid}"):
        Evaluation(make_orchestrator(), [Problem("p", "1+1?", "2", None)], grader, "x").run(REQUEST, folder)
    after = contents(tmp_path)
    del after[".lock"]
    assert after == before


@pytest.mark.parametrize("command", ["eval", "sweep", "eval-prm", "learn-verifier", "rollouts", "report"])
def test_every_command_that_writes_refuses_before_it_loads_a_model(hold, espalier, tmp_path, monkeypatch, command):
    for name in ("run.load.load_verifier_alone", "run.load.load_generator_alone"):
        monkeypatch.setattr(f"espalier.search.{name}", lambda *_, **__: pytest.fail("loaded a model"))
    monkeypatch.setattr("espalier.search.run.load.load_orchestrator", lambda *_: pytest.fail("loaded a model"))
    out = tmp_path / "trees.jsonl" if command == "rollouts" else tmp_path / "run"
    process = hold(tmp_path / ".trees.jsonl.lock" if command == "rollouts" else out / ".lock")
    runs = [run_of(tmp_path / "old", [True])] if command == "report" else []
    ran = espalier(command, *runs, "--out", out)
    assert ran.code == 2
    assert f"error: {out} is in use by process {process.pid} (espalier eval --limit 9)" in ran.err
    assert "name another --out" in ran.err


def test_a_report_reads_a_run_that_is_being_written(hold, tmp_path):
    run_of(tmp_path / "run", [True, False])
    hold(tmp_path / "run" / ".lock")
    assert len(load_runs([tmp_path / "run"])[0].samples) == 2


def test_a_file_system_without_locks_is_used_with_a_warning(tmp_path, monkeypatch, caplog):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with caplog.at_level(logging.WARNING), folder_lock(tmp_path):
        assert contents(tmp_path) == {}
    assert "is on a file system without locks: run no other command with this --out" in caplog.text


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EspalierError, match=r"cannot use .*file/run: Not a directory; name another --out"):
        RunFolder(tmp_path / "file" / "run", CONFIGURATION)
