"""Progress on standard error: a bar on a terminal, else a line every so often, so that a log shows what goes on.

Also loads models, with a bar over the bytes of their weights; imports torch only then, so that a server can handle
signals before that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich import progress as bars
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from espalier.experiments.executors.settings import ExecutorName, ExecutorSettings, check_executor
from espalier.search.run.settings import RuntimeSettings

if TYPE_CHECKING:
    from espalier.search.run.executor import Executor
    from espalier.search.run.orchestrator import Orchestrator

_SHOWN_FROM = 256 * 2**20
"""Bytes of weights below which no progress bar is shown."""
_EVERY_SECONDS = 20.0
"""Between two lines where there is no terminal."""


@contextmanager
def share_progress(total: int, done: int, at_once: int = 1) -> Iterator[Callable[[int, int], None]]:
    """Show progress towards `total` problems, of which `done` are done; `at_once` of them are under way together.

    Yields a callback for each new problem, which takes how many of its solutions are right, and how many there are.
    """
    right = seen = 0
    with count_progress("problems", total, done, at_once) as advance:

        def advance_share(more_right: int, more: int) -> None:
            nonlocal right, seen
            right, seen = right + more_right, seen + more
            advance(f"{100 * right / seen:.1f}% right" if seen else "")

        yield advance_share


@contextmanager
def count_progress(what: str, total: int, done: int = 0, at_once: int = 1) -> Iterator[Callable[..., None]]:
    """Show progress towards `total` of `what`, of which `done` are done; `at_once` of them are under way together.

    Yields a callback for each new one, which takes what else is to be shown.
    """
    console = Console(stderr=True)
    count, said, start = done, "", time.monotonic()

    def told(*parts: str) -> str:
        seconds = seconds_left(time.monotonic() - start, count - done, total - count, at_once)
        left = "" if seconds is None else f"about {_clock(seconds)} left"
        return ", ".join(filter(None, (*parts, left)))

    def line() -> str:
        return told(f"{count} of {total} {what}", said, f"{_clock(time.monotonic() - start)} passed")

    columns = BarColumn(), bars.MofNCompleteColumn(), bars.TimeElapsedColumn(), TextColumn("{task.description}")
    with (
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
        lines(line, console),
    ):
        task = progress.add_task("", total=total, completed=done)

        def advance(text: str = "") -> None:
            nonlocal count, said
            count, said = count + 1, text
            progress.update(task, advance=1, description=told(text))

        yield advance


def seconds_left(passed: float, finished: int, waiting: int, at_once: int) -> float | None:
    """Seconds until all is finished, at the pace of the `passed` seconds; None where nothing tells it.

    Of what is under way together, half is taken to be done: where many begin at once, the first to finish would be
    taken for all that was done, and the rest for as slow.

    Args:
        passed: seconds since the beginning.
        finished: how many were finished in them.
        waiting: how many are not finished yet, those under way among them.
        at_once: how many are under way together, while there are as many.
    """
    if not finished or not waiting:
        return None
    half_done = (min(at_once, waiting) - 1) / 2
    return passed / (finished + half_done) * (waiting - half_done)


@contextmanager
def lines(line: Callable[[], str], console: Console) -> Iterator[None]:
    """Print a line every so often while the block runs, unless there is a terminal.

    On a thread of its own, as nothing may be finished for minutes.
    """
    if console.is_terminal:
        yield
        return
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(_EVERY_SECONDS):
            console.print(line(), soft_wrap=True, markup=False, highlight=False)

    thread = threading.Thread(target=run, name="espalier-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


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
    columns = (
        BarColumn(),
        bars.DownloadColumn(binary_units=True),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
    )
    progress = Progress(TextColumn("loading weights"), *columns, console=console, transient=True)
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
