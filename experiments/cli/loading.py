"""Loading models for a person who watches: a bar over the bytes of their weights, on standard error.

torch is imported once something is loaded, and not before: a server must be able to take a signal by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from espalier.search.run.load import RuntimeSettings, load_orchestrator

if TYPE_CHECKING:
    from espalier.search.run.orchestrator import Orchestrator

_SHOWN_FROM = 256 * 2**20
"""Bytes; less is loaded before a bar could be read."""


def load_with_progress(settings: RuntimeSettings) -> Orchestrator:
    """`load_orchestrator`, showing how far it is."""
    with bytes_progress(Console(stderr=True)) as on_bytes:
        return load_orchestrator(settings, on_bytes)


@contextmanager
def bytes_progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """Yields what to call with the bytes that are done and all of them.

    Shows nothing when `console` is no terminal, or there is little to load.
    """
    columns = (
        TextColumn("loading weights"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=console, transient=True)
    task = progress.add_task("", total=None)

    def on_bytes(done: int, total: int) -> None:
        if total >= _SHOWN_FROM and console.is_terminal:
            progress.start()  # nothing when it has begun
            progress.update(task, completed=done, total=total)

    try:
        yield on_bytes
    finally:
        if progress.live.is_started:
            progress.stop()
