import sys

import pytest
from run_folders import line, run_of, write_run
from typer.testing import CliRunner

from espalier.engine.errors import EspalierError
from espalier.experiments.cli.main import app
from espalier.experiments.report.loggers import Tracker, log_report
from espalier.experiments.report.runs import load_runs
from espalier.experiments.report.tables import figures
from espalier.experiments.report.write import write_report


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    run_of(folder / "runs" / "a", [True, False])
    run_of(folder / "runs" / "b", [True, True], beam_width=8)
    return write_report(load_runs([folder / "runs"]), folder / "out", resamples=100), folder / "out"


def test_figures_are_numbers_without_what_has_no_value(tmp_path):
    lines = [line("p0", right, epoch=epoch, wall_seconds=0) for epoch, right in enumerate([True, False])]
    found = figures(load_runs([write_run(tmp_path / "a", lines)])[0])
    assert found["accuracy"] == 0.5
    assert found["pass_at_2"] == 1
    assert "wall_seconds" not in found
    assert all(isinstance(value, int | float) for value in found.values())


@pytest.mark.parametrize("tracker", list(Tracker))
def test_a_missing_library_is_named_before_any_work(tracker, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, str(tracker), None)
    run_of(tmp_path / "a", [True])
    result = CliRunner().invoke(app, ["report", str(tmp_path / "a"), "--out", str(tmp_path / "out"), "--log", tracker])
    assert isinstance(result.exception, EspalierError)
    assert f"pip install 'espalier-search[{tracker}]'" in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_an_error_of_the_tracker_leaves_the_report_and_says_so(report, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "no-such-scheme://server")
    with pytest.raises(EspalierError, match=r"--log mlflow failed: .*the report itself is in"):
        log_report(Tracker.MLFLOW, *report)


def test_tensorboard_holds_the_figures_of_every_run(report):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import (  # pyright: ignore[reportMissingImports]
        EventAccumulator,
    )

    log_report(Tracker.TENSORBOARD, *report)
    found = {}
    for name in "ab":
        events = EventAccumulator(str(report[1] / "tensorboard" / name)).Reload()
        found[name] = events.Scalars("accuracy")[0].value
    assert found == {"a": 0.5, "b": 1.0}


def test_mlflow_holds_the_runs_and_the_files(report, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    log_report(Tracker.MLFLOW, *report)
    client = mlflow.MlflowClient()
    runs = {run.info.run_name: run for run in client.search_runs(["0"])}
    assert runs["b"].data.metrics["accuracy"] == 1.0
    assert runs["b"].data.params["beam_width"] == "8"
    assert {"report.html", "table.csv"} <= {
        file.path for file in client.list_artifacts(runs["2 runs on demo"].info.run_id)
    }


def test_wandb_holds_the_runs(report, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    log_report(Tracker.WANDB, *report)
    assert len(list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))) == 3  # two runs, and the report's files
