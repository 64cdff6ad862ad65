"""Loads models with a progress bar over the bytes of their weights, on standard error.

Imports torch only when loading starts, so that a server can handle signals before that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from espalier.experiments.cli.progress import lines
from espalier.experiments.executors.settings import ExecutorName, ExecutorSettings, check_executor
from espalier.search.run.settings import RuntimeSettings

if TYPE_CHECKING:
    from espalier.search.run.executor import Executor
    from espalier.search.run.orchestrator import Orchestrator

_SHOWN_FROM = 256 * 2**20
"""Bytes below which no progress bar is shown."""


def load_with_progress(settings: RuntimeSettings) -> Orchestrator:
    """Call `load_orchestrator` with a progress bar."""
    from espalier.search.run.load import load_orchestrator  # imports torch

    with bytes_progress(Console(stderr=True)) as on_bytes:
        return load_orchestrator(settings, on_bytes)


def load_executor(settings: RuntimeSettings, where: ExecutorSettings, longest_first: bool = False) -> Executor:
    """Load the models, with a progress bar in this process, or on workers.

    Args:
        settings: what to load; per worker.
        where: in this process or on workers.
        longest_first: see `WorkerExecutor`.

    Raises:
        InvalidRequestError: settings are invalid.
        EspalierError: a checkpoint cannot be loaded, or there is no such cluster, or it or this machine has too few
            devices.
    """
    check_executor(where, settings)
    if where.executor is ExecutorName.LOCAL:
        return load_with_progress(settings)
    from espalier.experiments.executors.worker_executor import WorkerExecutor

    if where.executor is ExecutorName.PROCESSES:
        from espalier.experiments.executors.process_transport import ProcessTransport

        transport = ProcessTransport(settings, where.workers)
    else:
        from espalier.experiments.executors.ray_transport import RayTransport

        transport = RayTransport(settings, where)
    return WorkerExecutor(transport, settings, longest_first)


@contextmanager
def bytes_progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback for the loaded and the total bytes.

    Shows nothing on a terminal if there is little to load; for what is no terminal see `lines`.
    """
    bar = BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()
    progress = Progress(TextColumn("loading weights"), *bar, console=console, transient=True)
    task = progress.add_task("", total=None)

    def on_bytes(done: int, total: int) -> None:
        progress.update(task, completed=done, total=total)
        if total >= _SHOWN_FROM and console.is_terminal:
            progress.start()  # no effect once started

    def line() -> str:
        done, total = progress.tasks[0].completed / 2**30, (progress.tasks[0].total or 0) / 2**30
        return f"loading: {done:.1f} of {total:.1f} GiB of weights" if total else "loading"

    try:
        with lines(line, console):
            yield on_bytes
    finally:
        if progress.live.is_started:
            progress.stop()
