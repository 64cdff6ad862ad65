"""Every published figure in one run, which can be interrupted: one JSON file and one page."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from espalier.engine.errors import EspalierError
from espalier.experiments.lab.bench.options import SearchAndLearnFolder, VllmPython
from espalier.experiments.lab.bench.report import cell
from espalier.experiments.runs.files import write_whole

_COMPARED = tuple(f"--only={name}" for name in ("best-of-n", "beam", "dvts", "rebase", "auto"))
PUBLISHED: dict[str, tuple[str, ...]] = {
    "host": ("host",),
    "gpu-kernels": ("gpu-kernels",),
    "long-path": ("long-path",),
    "engine": ("engine", "--repeats", "5", "--new-tokens", "24"),
    "search": ("search", "--repeats", "2", "--problems", "32", "--quantization", "int8"),
    "search-best-of-n": (
        "search", "--repeats", "2", "--problems", "32", "--algorithms", "best-of-n", "--peer-problems", "25",
        "--quantization", "int8",
    ),
    "search-accuracy": (
        "search", "--repeats", "1", "--problems", "300", "--peer-problems", "300", "--in-flight", "32",
        "--peers", "original", "--quantization", "int8",
    ),
    "search-floor": ("search-floor",),
    "prefix": ("prefix", "--repeats", "15"),
    "executors": ("executors",),
    "early-stop": ("early-stop",),
    "trunk-head": ("trunk-head",),
    "rollouts": ("rollouts",),
    "score-sessions": ("score-sessions",),
    "service": ("service",),
    "service-fairness": ("service-fairness",),
    "service-soak": ("service-soak",),
    "accuracy": ("accuracy", "--limit", "300"),
    **{
        f"algorithms-budget-{tokens}": (
            "algorithms", "--generator-budget", str(tokens), "--paths", "4,16", "--seeds", "1", *_COMPARED,
        )
        for tokens in (300, 600, 1200)
    },
    "algorithms": ("algorithms",),
}  # fmt: skip
"""Arguments of the benchmark behind each figure, by the name of its file; the shortest first."""
_WITH_VLLM = frozenset(("engine", "rollouts", "score-sessions", "search"))
_WITH_SAMPLES = frozenset(("accuracy", "algorithms"))


def run(folder: Path, names: Iterable[str], vllm_python: str | None, search_and_learn: Path | None = None) -> list[str]:
    """Run those benchmarks that have no figures in `folder` yet, each in a process of its own.

    Args:
        folder: gets `NAME.json` of each, `all.json` with all of them, and the page `all.md`.
        names: keys of `PUBLISHED`.
        vllm_python: see `bench engine --vllm-python`.
        search_and_learn: see `bench search --search-and-learn`.

    Returns:
        Those that failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in names:
        if not (target := folder / f"{name}.json").is_file():
            print(f"== {name}", flush=True)
            arguments = [*PUBLISHED[name], "--json", str(folder / f"{name}.part.json")]
            if vllm_python and PUBLISHED[name][0] in _WITH_VLLM:
                arguments += ["--vllm-python", vllm_python]
            if search_and_learn and PUBLISHED[name][0] == "search":
                arguments += ["--search-and-learn", str(search_and_learn)]
            if PUBLISHED[name][0] in _WITH_SAMPLES:
                arguments += ["--out", str(folder / "samples" / name)]
            command = [sys.executable, "-m", "espalier.experiments.lab", "bench", *arguments]
            # Kernels for GPUs are compiled, not interpreted; no other benchmark runs any on a CPU.
            if subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "0"}).returncode:
                failed.append(name)
                continue
            (folder / f"{name}.part.json").replace(target)
        _write_page(folder)
    return failed


def _write_page(folder: Path) -> None:
    """Put together what there is so far."""
    found = {
        name: json.loads(path.read_text(encoding="utf-8"))
        for name in PUBLISHED
        if (path := folder / f"{name}.json").is_file()
    }
    write_whole(folder / "all.json", found)
    write_whole(folder / "all.md", "\n\n".join(["# Figures", *map(_section, found, found.values())]) + "\n")


def _section(name: str, document: dict[str, Any]) -> str:
    rows, machine = document["rows"], document["machine"]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns), *([cell(row.get(column)) for column in columns] for row in rows)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    ratios = ", ".join(f"{what} {ratio:.2f}×" for what, ratio in document["ratios"].items())
    versions = ", ".join(f"{package} {version}" for package, version in machine["packages"].items())
    made = f"{machine['processor']}, {machine['threads']} threads, commit {machine['commit'] or 'unknown'}, {versions}"
    command = f"`python -m espalier.experiments.lab bench {' '.join(PUBLISHED[name])}`"
    return "\n\n".join(part for part in (f"## {document['title']}", command, table, ratios, made) if part)


def command(
    out: Annotated[Path, typer.Option(help="Folder for the figures; running the command again resumes.")] = Path(
        "runs/bench"
    ),
    only: Annotated[
        list[str] | None, typer.Option(help="Only these figures, by the names of their files; may be repeated.")
    ] = None,
    search_and_learn: SearchAndLearnFolder = None,
    vllm_python: VllmPython = None,
) -> None:
    """Every published figure that needs no GPU, one after the other: all.json and a page, all.md. It takes hours."""
    if unknown := set(only or ()) - PUBLISHED.keys():
        raise typer.BadParameter(f"{', '.join(unknown)}: must be of {', '.join(PUBLISHED)}", param_hint="--only")
    failed = run(out, only or PUBLISHED, vllm_python, search_and_learn)
    typer.echo(f"figures {out / 'all.json'}\npage    {out / 'all.md'}")
    if failed:
        raise EspalierError(f"no figures of {', '.join(failed)}; the same command tries them again")
