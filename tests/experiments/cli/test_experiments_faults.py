"""What is raised while a command runs ends what it belongs to: one problem, or the command with one line."""

import json

import pytest
import torch

from espalier.engine.models.decoder import Decoder
from espalier.search.algorithms.independent import IndependentPaths

SOLVE = ("solve", "Tom has 38 coins. (a) He finds 47 more. (b) He loses 25. How many coins does he have now?")
EVAL = ("eval", "--algorithm", "majority", "-N", 2, "--limit", 2, "--answer-equivalence", "exact-match")
SWEEP = ("sweep", "-N", 1, "-M", 2, "--limit", 2)


@pytest.mark.parametrize("command", [SOLVE, EVAL, SWEEP])
def test_a_device_that_fails_ends_a_command_with_one_line(espalier, command, monkeypatch, tmp_path):
    forward, calls = Decoder.forward, []

    def breaks(self: Decoder, *batch: object) -> torch.Tensor:
        calls.append(self)
        if len(calls) > 20:
            raise RuntimeError("CUDA error: device lost\nand so on")
        return forward(self, *batch)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "forward", breaks)
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
