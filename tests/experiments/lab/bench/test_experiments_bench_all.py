"""Every published figure in one run."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from espalier.experiments.lab.__main__ import app
from espalier.experiments.lab.bench import everything
from espalier.experiments.lab.bench.engine import prefix

SMALL = {
    "prefix": ("prefix", "--repeats", "1", "--children", "2", "--new-tokens", "1"),
    "broken": ("prefix", "--generator", "no-such-checkpoint"),
    "accuracy": ("accuracy", "--limit", "0"),
}


@pytest.mark.slow
def test_all_goes_on_where_it_stopped_and_names_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(everything, "PUBLISHED", SMALL)
    monkeypatch.setattr(prefix, "SHARED", (0, 40))
    arguments = ["all", "--out", str(tmp_path), "--vllm-python", "none"]
    ended = CliRunner().invoke(app, ["bench", *arguments])
    assert "no figures of broken, accuracy" in str(ended.exception)
    assert [path.name for path in sorted(tmp_path.glob("*.json"))] == ["all.json", "prefix.json"]
    first = (tmp_path / "prefix.json").read_bytes()
    everything.PUBLISHED["broken"] = SMALL["prefix"]
    assert CliRunner().invoke(app, ["bench", *arguments, "--only", "broken", "--only", "prefix"]).exit_code == 0
    assert (tmp_path / "prefix.json").read_bytes() == first, "it was not run again"
    document = json.loads((tmp_path / "all.json").read_text(encoding="utf-8"))
    assert list(document) == ["prefix", "broken"]
    page = (tmp_path / "all.md").read_text(encoding="utf-8")
    assert page.count("decode of 2 children") == 2
    assert f"| {document['prefix']['rows'][0]['shared tokens']} |" in page


def test_an_unknown_name_is_refused_with_those_there_are():
    ended = CliRunner().invoke(app, ["bench", "all", "--only", "nothing"], env={"COLUMNS": "300"})
    assert ended.exit_code == 2
    assert "must be of host, gpu-kernels" in ended.output


@pytest.mark.parametrize("name", everything.PUBLISHED)
def test_every_published_command_is_one(name: str):
    """Its options are known; that it runs is for the benchmark's own test."""
    ended = CliRunner().invoke(app, ["bench", *everything.PUBLISHED[name], "--help"])
    assert ended.exit_code == 0
