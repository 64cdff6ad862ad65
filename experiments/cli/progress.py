"""Progress on standard error: a bar on a terminal, else a line every so often, so that a log shows what goes on."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

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

    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
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
