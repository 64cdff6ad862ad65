"""What `eval` and `sweep` say of files and of the folders they keep, on the demo pair."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from espalier.engine.models.hub import locate
from espalier.experiments.runs import evaluate
from espalier.experiments.runs.benchmarks import load_benchmark
from espalier.experiments.runs.files import append
from espalier.experiments.runs.provenance import git_state, hardware
from espalier.experiments.verifier_training import tree_file

EVAL = ("eval", "-N", 2, "-M", 2, "--limit", 2)


def test_field_map_names_the_fields_of_a_file(espalier, tmp_path):
    file, out = tmp_path / "tasks.json", tmp_path / "run"
    file.write_text(json.dumps([{"Task": "What is 12+3?", "Gold": [15, "15.0"], "Nr": "a-1"}]))
    arguments = ("eval", "-a", "greedy", "--benchmark", file, "--out", out)
    refused = espalier(*arguments)
    assert refused.code == 2
    assert "tasks.json:1 (record 1): no problem: the record has Task, Gold, Nr; wanted: problem, " in refused.err
    ran = espalier(*arguments, "--field-map", "problem=Task,answer=Gold,id=Nr")
    assert ran.code == 0
    (sample,) = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert (sample["unique_id"], sample["gold"]) == ("a-1", "15 or 15.0")
    swept = espalier(
        "sweep", "-N", 1, "-M", 1, "--benchmark", file, "--out", tmp_path / "sweep",
        "--field-map", "problem=Task,answer=Gold",
    )  # fmt: skip
    assert swept.code == 0


@pytest.mark.parametrize("text", ["", "problem", "problem=", "=Task", "task=problem", "problem=A,problem=B"])
def test_field_map_that_is_none_says_how_to_write_one(espalier, text):
    ran = espalier("eval", "--field-map", text)
    assert ran.code == 2
    assert "problem=NAME" in ran.err
    assert "--field-map" in ran.err


def test_config_says_what_ran_with_which_models_and_versions(espalier, tmp_path):
    out = tmp_path / "run"
    assert espalier(*EVAL, "--out", out).code == 0
    assert espalier(*EVAL, "--out", out, "--in-flight", 1).code == 0
    config = json.loads((out / "config.json").read_text())
    assert None not in config.values()
    assert (config["beam_width"], config["temperature"], config["max_tokens"]) == (2, 1.0, 1024)
    assert len(config["generator"]) == len(config["verifier"]) == 64
    first, second = config["commands"]
    assert first["command"] == f"espalier eval -N 2 -M 2 --limit 2 --out {out}"
    assert second["command"].endswith("--in-flight 1")
    assert first["benchmark"] == "demo"
    for role in ("generator", "verifier"):
        folder = str(locate(f"demo-{role}").resolve())
        assert first["models"][role] == {"name": f"demo-{role}", "folder": folder, "quantization": "none"}
    assert set(first["versions"]) == {"python", "espalier", "torch", "transformers", "numba"}
    assert first["versions"]["torch"] == version("torch")
    assert isinstance(first["kv_memory_bytes"], int)
    assert first["hardware"] == hardware()
    assert first.get("git") == git_state()


def test_verifying_a_finished_run_says_that_nothing_was_verified(espalier, tmp_path):
    arguments = (*EVAL, "--out", tmp_path / "run", "--verify-incremental")
    assert "--verify-incremental" not in espalier(*arguments).err
    again = espalier(*arguments)
    assert again.code == 0
    assert "--verify-incremental verified nothing, of 2 searches: others are of an earlier command" in again.err
    more = espalier(*arguments, "--limit", 3, "--json")
    assert "--verify-incremental verified 1 of 3 searches" in more.err
    assert json.loads(more.out)["problems"] == 3
    unscored = espalier("eval", "-a", "chain", "--limit", 1, "--verify-incremental")
    assert "verified nothing, of 1 searches: this search reads no scores" in unscored.err


def test_verifying_a_finished_sweep_says_that_nothing_was_verified(espalier, tmp_path):
    arguments = ("sweep", "-N", 1, "-M", 1, "--limit", 1, "--out", tmp_path / "sweep")
    assert espalier(*arguments).code == 0
    assert "verified nothing, of 1 searches" in espalier(*arguments, "--verify-incremental").err


def test_refusals_without_a_folder_name_no_file_and_say_why(espalier, tmp_path):
    arguments = ("eval", "--limit", 2, "-N", 64, "--kv-memory", "1M")
    alone, kept = espalier(*arguments), espalier(*arguments, "--out", tmp_path / "run")
    for ran in (alone, kept):
        assert "2 could not be searched, such as demo/" in ran.out
        assert "--kv-memory" in ran.out
    assert "samples.jsonl" not in alone.out
    assert str(tmp_path / "run" / "samples.jsonl") in kept.out.replace("\n", "").replace(" ", "")


def test_smaller_limit_says_that_the_folder_holds_more(espalier, tmp_path):
    assert espalier(*EVAL, "--out", tmp_path / "run").code == 0
    ran = espalier(*EVAL, "--limit", 1, "--out", tmp_path / "run")
    assert "2 problems, 1 of them from an earlier command in" in ran.out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["problems"] == 2


def test_interrupted_eval_says_so_keeps_its_samples_and_resumes(espalier, tmp_path):
    out = tmp_path / "run"
    arguments = ["eval", "-a", "majority", "-N", "4", "--limit", "40", "--in-flight", "2", "--out", str(out), "--json"]
    with subprocess.Popen(
        [Path(sys.executable).with_name("espalier"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline and _lines(out / "samples.jsonl") < 3:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, ""), stderr
    assert "Traceback" not in stderr
    kept = _lines(out / "samples.jsonl")
    assert 3 <= kept < 40

    found = {json.loads(line)["unique_id"] for line in (out / "samples.jsonl").read_text().splitlines()}
    asked = {problem.unique_id for problem in load_benchmark("demo", kept + 1)}  # what ended first need not be first
    summary = json.loads(espalier(*arguments[:6], kept + 1, *arguments[7:]).out)
    assert summary["problems"] == len(found | asked)
    assert "interrupted" in stderr


def test_an_interrupt_that_python_drops_ends_an_eval_all_the_same(espalier, monkeypatch, tmp_path):
    class Watched:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    dropped = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: dropped.append(unraisable.exc_type))
    watched = [Watched()]

    monkeypatch.setattr(evaluate, "append", lambda stream, sample: (append(stream, sample), watched.clear()))
    ran = espalier("eval", "-a", "greedy", "--limit", 8, "--in-flight", 1, "--out", tmp_path / "run")
    assert dropped == [KeyboardInterrupt]
    assert ran.code == 130
    assert "interrupted: what was finished is in" in ran.err
    assert 1 <= _lines(tmp_path / "run" / "samples.jsonl") < 8


@pytest.mark.parametrize("command", ["eval", "advise", "rollouts"])
def test_a_command_that_is_terminated_ends_as_an_interrupted_one_and_resumes(espalier, monkeypatch, tmp_path, command):
    def append_and_end(*given: Any, **how: Any) -> None:
        append(*given, **how)
        signal.raise_signal(signal.SIGTERM)

    out, before = tmp_path / "run", signal.getsignal(signal.SIGTERM)
    options = {"eval": ("-a", "majority", "-N", 2), "advise": ("--paths", 2, "-a", "majority"), "rollouts": ("-N", 2)}
    samples = {"eval": out / "samples.jsonl", "advise": out / "samples/samples.jsonl", "rollouts": out}[command]
    arguments = (command, *options[command], "--limit", 4, "--in-flight", 1, "--out", out)
    with monkeypatch.context() as patch:
        patch.setattr(tree_file if command == "rollouts" else evaluate, "append", append_and_end)
        ran = espalier(*arguments)
    assert (ran.code, ran.out) == (143, "")
    assert f"interrupted: what was finished is in {out}; the same command resumes" in ran.err
    assert "Traceback" not in ran.err
    assert signal.getsignal(signal.SIGTERM) == before
    kept = samples.read_text()
    assert kept.count("\n") < 4
    assert espalier(*arguments).code == 0
    assert samples.read_text().startswith(kept)
    assert _lines(samples) == 4


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.is_file() else 0
