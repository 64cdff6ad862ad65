"""Sends the runs of a report to an experiment tracker: configuration and figures of each."""

from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from espalier.engine.errors import EspalierError
from espalier.experiments.report.tables import figures

if TYPE_CHECKING:
    from espalier.experiments.report.write import Report


class Tracker(StrEnum):
    """Supported experiment trackers; each is also the name of its module and of the extra that installs it."""

    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"
    WANDB = "wandb"


def check_installed(tracker: Tracker) -> None:
    """Import the tracker's library.

    Raises:
        EspalierError: it is not installed; the message names the extra.
    """
    try:
        import_module(tracker)
    except ImportError as error:
        how = f"pip install 'espalier-search[{tracker}]'"
        raise EspalierError(f"--log {tracker} needs a library that is not installed ({error}): {how}") from error


def log_report(tracker: Tracker, report: "Report", folder: Path) -> None:
    """Send every run of `report` to `tracker`; the report's files in `folder` too, except to TensorBoard.

    Raises:
        EspalierError: the tracker fails; see also `check_installed`.
    """
    send = {Tracker.TENSORBOARD: _to_tensorboard, Tracker.MLFLOW: _to_mlflow, Tracker.WANDB: _to_wandb}[tracker]
    files = sorted(file for file in folder.iterdir() if file.suffix in (".html", ".md", ".csv", ".png", ".svg"))
    try:
        send(report, folder, files)
    except Exception as error:  # each library has its own errors, for example of its server
        what = f"{type(error).__name__}: {error}"
        raise EspalierError(f"--log {tracker} failed: {what}; the report itself is in {folder}") from error


def _to_tensorboard(report: "Report", folder: Path, _: list[Path]) -> None:
    from torch.utils.tensorboard import SummaryWriter

    for run in report.runs:
        values = run.configuration.items()
        plain = {name: value if isinstance(value, int | float | str) else str(value) for name, value in values}
        with SummaryWriter(log_dir=str(folder / "tensorboard" / run.name)) as writer:
            writer.add_hparams(plain, figures(run), run_name=".")


def _to_mlflow(report: "Report", _: Path, files: list[Path]) -> None:
    import mlflow  # pyright: ignore[reportMissingImports]

    with mlflow.start_run(run_name=report.title):
        for run in report.runs:
            with mlflow.start_run(run_name=run.name, nested=True):
                mlflow.log_params(run.configuration)
                mlflow.log_metrics(figures(run))
        for file in files:
            mlflow.log_artifact(str(file))


def _to_wandb(report: "Report", _: Path, files: list[Path]) -> None:
    import wandb  # pyright: ignore[reportMissingImports]

    for run in report.runs:
        with wandb.init(name=run.name, group=report.title, config=run.configuration) as sent:
            sent.log(figures(run))
    with wandb.init(name="report", group=report.title, job_type="report") as sent:
        artifact = wandb.Artifact("report", type="report")
        for file in files:
            artifact.add_file(str(file))
        sent.log_artifact(artifact)
