"""Checkpoints that compute no numbers, at the command line."""

import json
import shutil

import pytest
import torch
from tiny_models import edit_tensors

from espalier.engine.models.hub import locate


@pytest.fixture
def without_numbers(tmp_path):
    """The bundled generator with a norm whose products overflow."""
    folder = shutil.copytree(locate("demo-generator"), tmp_path / "damaged")
    name = "model.norm.weight"
    edit_tensors(folder / "model.safetensors", {name: torch.full((256,), 3e38)})
    return folder


def test_solve_with_a_generator_that_computes_no_numbers_is_one_line(espalier, without_numbers):
    ran = espalier("solve", "1+1?", "-a", "greedy", "--generator", without_numbers)
    assert ran.code == 1
    assert "error: the generator's logits are not numbers" in " ".join(ran.err.split())


def test_eval_counts_what_cannot_be_computed_and_keeps_why(espalier, without_numbers, tmp_path):
    ran = espalier(
        "eval", "--algorithm", "majority", "--limit", 2, "--generator", without_numbers, "--out", tmp_path / "run"
    )
    assert ran.code == 1
    assert "2 could not be searched, such as demo/level-1/000" in " ".join(ran.out.split())
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert ["not numbers" in sample["error"] for sample in samples] == [True, True]
