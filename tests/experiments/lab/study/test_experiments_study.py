"""`python -m espalier.experiments.lab study memory-and-time`."""

import csv
import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixed_steps import problem_of, write_pair
from typer.testing import CliRunner

from espalier.experiments.lab.__main__ import app
from espalier.experiments.lab.study.figures import FIGURES

Study = Callable[..., Any]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Runs the command on two problems of a tiny pair."""
    root = tmp_path_factory.mktemp("study")
    generator, verifier = write_pair(root, 3, 6, (1, 2, 8), (1, 1, 8))
    problems = root / "problems.jsonl"
    lines = ({"problem": problem_of(tokens), "answer": "1"} for tokens in (20, 30))
    problems.write_text("\n".join(map(json.dumps, lines)))

    def run(*flags: str) -> Any:
        fixed = ["--generator", str(generator), "--verifier", str(verifier), "--benchmark", str(problems)]
        limits = ["--device", "cpu", "--kv-memory", "16M", "--max-steps", "4", "--system-prompt", ""]
        return CliRunner().invoke(app, ["study", "memory-and-time", *fixed, *limits, *flags], env={"COLUMNS": "200"})

    return run


@pytest.fixture(scope="module")
def finished(study: Study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study of two by two cells."""
    out = tmp_path_factory.mktemp("out") / "study"
    done = study("-N", "1,3", "-M", "1,2", "--no-merge-duplicates", "--out", str(out))
    assert done.exit_code == 0, (done.output, done.exception)
    return out


def test_a_study_writes_a_table_figures_and_a_page(finished: Path):
    rows = list(csv.DictReader((finished / "cells.csv").open()))
    assert [(row["N"], row["M"]) for row in rows] == [("1", "1"), ("1", "2"), ("3", "1"), ("3", "2")]
    for row in rows:
        assert float(row["closed form / measured"]) == pytest.approx(1, abs=0.35)
        assert int(row["searches in 1 GiB"]) >= int(row["in 1 GiB without sharing"]) > 0
        assert float(row["tokens/s at once"]) > 0
    page = (finished / "README.md").read_text()
    for name in FIGURES:
        assert (finished / name).read_text().rstrip().endswith("</svg>")
        assert f"({name})" in page
    assert "N=3" in page
    assert "With M=1 nothing is pruned" in page


def test_a_cells_phases_add_up_to_its_seconds_and_blocks_are_shared(finished: Path):
    for file in (finished / "cells").iterdir():
        cell = json.loads(file.read_text())
        alone = cell["isolated"]
        assert sum(alone["phases"].values()) == pytest.approx(alone["seconds"], rel=0.01)
        assert alone["physical_blocks"] < alone["logical_blocks"]
        assert alone["peak_step_bytes"] >= alone["peak_kv_bytes"] > 0
        pairs = zip(alone["life_logical_blocks"], alone["life_physical_blocks"], strict=True)
        assert all(logical >= physical for logical, physical in pairs)


def test_a_study_measures_only_what_is_missing(study: Study, finished: Path):
    cells = {file: file.stat().st_mtime_ns for file in (finished / "cells").iterdir()}
    lost = finished / "cells" / "beam-N3-M1.json"
    lost.unlink()
    again = study("-N", "1,3", "-M", "1,2", "--no-merge-duplicates", "--out", str(finished))
    assert again.exit_code == 0, again.output
    fresh = {file for file, time in cells.items() if file.stat().st_mtime_ns != time}
    assert fresh == {lost}


def test_another_configuration_is_refused_with_what_differs(study: Study, finished: Path):
    refused = study("-N", "1", "-M", "1", "--temperature", "0.5", "--out", str(finished))
    assert "temperature is" in str(refused.exception)
    assert "name another --out" in str(refused.exception)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("-a", "beem"), "is 'beem'; did you mean 'beam'?"),
        (("-N", "0"), "beam_width: must be between 1 and 256, is 0"),
        (("-N", "256", "-M", "64"), "beam_width * expansion must be at most"),
        (("-N", "128", "-M", "8"), "a search may need"),
    ],
)
def test_wrong_input_is_refused_before_anything_runs(study: Study, tmp_path: Path, flags: tuple[str, ...], said: str):
    refused = study(*flags, "--out", str(tmp_path / "study"))
    assert refused.exit_code != 0
    assert said in f"{refused.output}{refused.exception}"
    assert not list(tmp_path.glob("study/cells/*"))


def test_independent_paths_and_preemptions_are_measured_too(study: Study, tmp_path: Path):
    done = study("-a", "majority,beam", "-N", "2", "-M", "2", "--reserved-share", "0", "--out", str(tmp_path))
    assert done.exit_code == 0, (done.output, done.exception)
    assert {file.name for file in (tmp_path / "cells").iterdir()} == {"majority-N2-M2.json", "beam-N2-M2.json"}


def test_a_folder_that_another_process_writes_to_is_refused_before_a_model_is_loaded(study, tmp_path, monkeypatch):
    monkeypatch.setattr("espalier.search.run.load.load_orchestrator", lambda *_: pytest.fail("loaded a model"))
    with (tmp_path / ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        refused = study("--out", str(tmp_path))
    assert f"{tmp_path} is in use by another process" in str(refused.exception)
