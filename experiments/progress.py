"""A progress bar over samples, on standard error so that `--json` stays clean."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from espalier.experiments.sample import Sample


@contextmanager
def sample_progress(total: int, done: int) -> Iterator[Callable[[Sample], None]]:
    """Show progress towards `total` samples, `done` of them there before; yields what to call with each new one."""
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    right = seen = 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total, completed=done)

        def on_sample(sample: Sample) -> None:
            nonlocal right, seen
            right, seen = right + sample.correct, seen + 1
            progress.update(task, advance=1, description=f"{100 * right / seen:.1f}% right")

        yield on_sample
