"""What is raised while a command runs ends what it belongs to: one problem, or the command with one line."""

import errno
import json
import resource
from pathlib import Path

import pytest
import torch

from espalier.kernels.cpu.decoder import CpuLayers
from espalier.search.algorithms.independent import IndependentPaths

SOLVE = ("solve", "Tom has 38 coins. (a) He finds 47 more. (b) He loses 25. How many coins does he have now?")
EVAL = ("eval", "--algorithm", "majority", "-N", 2, "--limit", 2, "--answer-equivalence", "exact-match")
SWEEP = ("sweep", "-N", 1, "-M", 2, "--limit", 2)


@pytest.mark.parametrize("command", [SOLVE, EVAL, SWEEP])
def test_a_device_that_fails_ends_a_command_with_one_line(espalier, command, monkeypatch, tmp_path):
    forward, calls = CpuLayers.forward, []

    def breaks(self: CpuLayers, *batch: object) -> torch.Tensor:
        calls.append(self)
        if len(calls) > 20:
            raise RuntimeError("CUDA error: device lost\nand so on")
        return forward(self, *batch)  # type: ignore[arg-type]

    monkeypatch.setattr(CpuLayers, "forward", breaks)
    out = ("--out", tmp_path / "run") if command[0] == "sweep" else ()
    ran = espalier(*command, *out)
    assert ran.code == 1
    (line,) = [line for line in ran.err.splitlines() if line.strip()]
    assert line.startswith("error: the ")
    assert line.endswith("could not be run on cpu: CUDA error: device lost")


def test_one_problem_that_meets_a_fault_does_not_end_an_evaluation(espalier, monkeypatch, tmp_path):
    tell, told = IndependentPaths.tell, []

    def breaks(self: IndependentPaths, children: object) -> None:
        told.append(self)
        if len(told) == 2:
            raise RuntimeError("a bug")
        tell(self, children)  # type: ignore[arg-type]

    monkeypatch.setattr(IndependentPaths, "tell", breaks)
    ran = espalier("eval", "--algorithm", "majority", "-N", 2, "--limit", 3, "--out", tmp_path / "run")
    assert ran.code == 3
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    errors = sorted(sample["error"] for sample in samples)
    assert errors[:2] == ["", ""]
    assert errors[2].startswith("internal error, id=")


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_full_does_not_hide_the_answer(espalier, monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "write_text", full)
    ran = espalier(*SOLVE, "--trace", tmp_path / "t.json")
    assert ran.code == 2
    assert "answer  60" in ran.out
    assert ran.err.endswith(f"error: cannot write the trace {tmp_path / 't.json'}: No space left on device\n")


def test_a_system_that_refuses_is_one_line_too(espalier, monkeypatch, tmp_path):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    ran = espalier(*SOLVE, "--plot", tmp_path / "t.svg")
    assert ran.code == 1
    assert "answer  60" in ran.out
    assert ran.err.splitlines()[-1] == f"error: [Errno 28] No space left on device: '{tmp_path / 't.svg'}'"
    assert not (tmp_path / "t.svg").exists()


def test_an_evaluation_on_a_full_disk_keeps_what_it_has_and_goes_on_behind_it(espalier, tmp_path):
    out = tmp_path / "run"
    command = (*EVAL[:-4], "--limit", 6, "--answer-equivalence", "exact-match", "--out", out)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2500, before[1]))
    try:
        ran = espalier(*command)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ran.code == 2
    assert f"error: cannot write {out / 'samples.jsonl'}: File too large; what came before is kept" in ran.err
    held = (out / "samples.jsonl").read_text().splitlines()[:-1]
    assert 0 < len(held) < 6
    assert espalier(*command).code == 0
    lines = (out / "samples.jsonl").read_text().splitlines()
    assert lines[: len(held)] == held
    assert len({json.loads(line)["unique_id"] for line in lines}) == len(lines) == 6
