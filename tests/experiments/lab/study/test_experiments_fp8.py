"""FP8 as a CPU emulates it, and the figures that are published of it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from espalier.experiments.lab.__main__ import app
from espalier.experiments.lab.study.fp8 import inputs_rounded, rank_correlation, rounded
from espalier.kernels import layers

ROOT = Path(__file__).parents[4]


def test_each_row_is_rounded_by_a_scale_of_its_own():
    torch.manual_seed(1)
    x = torch.randn(4, 64) * torch.tensor([[1e-3], [1.0], [50.0], [0.0]])
    found = rounded(x)
    assert torch.equal(found, torch.stack([rounded(row[None])[0] for row in x]))
    largest = x.abs().amax(dim=1)
    torch.testing.assert_close(found.abs().amax(dim=1), largest, rtol=1e-6, atol=0)
    error = (found - x).abs()[:3] / largest[:3, None]
    assert 0 < error.max() <= 16 / 448, "half a step of three bits in the binade of the largest"
    assert torch.equal(rounded(found), found)


def test_ranks_correlate_with_ties():
    one = np.array([0.1, 0.4, 0.4, 0.9])
    assert rank_correlation(one, one**3) == pytest.approx(1)
    assert rank_correlation(one, -one) == pytest.approx(-1)
    assert rank_correlation(one, np.array([0.4, 0.1, 0.9, 0.4])) == pytest.approx(0.0, abs=0.2)


def test_inputs_are_rounded_within_it_alone():
    x, weight = torch.randn(2, 8), torch.randn(3, 8)
    with inputs_rounded():
        inside = layers.F.linear(x, weight)
        assert torch.equal(layers.F.silu(x), torch.nn.functional.silu(x))
    assert torch.equal(inside, rounded(x) @ weight.T)
    assert not torch.equal(inside, layers.F.linear(x, weight))


def test_the_page_has_the_published_figures():
    page = (ROOT / "experiments/lab/study/README.md").read_text(encoding="utf-8")
    accuracy, difference, ranks = json.loads((ROOT / "experiments/results/fp8.json").read_text())["rows"]
    told = page.partition("## FP8")[2].partition("## ")[0]
    numbers = set(re.findall(r"[−+]?\d+(?:[.,]\d+)*", told))
    published = [f"{accuracy['W8A16']:.1f}", f"{accuracy['unrounded']:.1f}"]
    published += [f"{difference['low']:+.1f}".replace("-", "−"), f"{difference['high']:+.1f}"]
    published += [f"{ranks['W8A16']:.3f}", f"{ranks['W8A8']:.3f}"]
    assert set(published) <= numbers
    assert min(ranks["W8A16"], ranks["W8A8"]) >= 0.99
    assert abs(difference["W8A16"]) <= 1


def test_it_runs_on_a_few_problems(tmp_path: Path):
    arguments = ["study", "fp8", "--limit", "4", "--scored", "2", "-N", "2", "--json", str(tmp_path / "fp8.json")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    _, _, ranks = json.loads((tmp_path / "fp8.json").read_text())["rows"]
    assert 0.5 < ranks["W8A8"] <= 1
