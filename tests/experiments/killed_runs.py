"""Commands in processes of their own that are killed, and what their folders hold apart from times."""

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TIMES = {"seconds", "search_seconds", "problems_per_minute", "wall_seconds", "queue_seconds", "first_step_seconds"}
HALF_A_TREE, TREE_WITHOUT_SAMPLE, HALF_A_SAMPLE, SAMPLE, HALF_A_FILE = MOMENTS = (
    "half a tree", "a tree without its sample", "half a sample", "a sample", "half a file",
)  # fmt: skip
"""Moments within the writing of a result, at which a process started with one of them kills itself."""


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_times(each) for name, each in value.items() if name not in _TIMES}
    return [without_times(each) for each in value] if isinstance(value, list) else value


def results(out: Path) -> dict[str, Any]:
    """All that a folder holds, by file, without times, commands, and the order of lines."""
    return {str(path.relative_to(out)): _contents(path) for path in sorted(out.rglob("*")) if path.is_file()}


def _contents(path: Path) -> Any:
    if path.suffix == ".jsonl":
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        assert all(line.endswith("\n") for line in lines)
        return sorted(json.dumps(without_times(json.loads(line))) for line in lines)
    if path.suffix == ".json":
        found = json.loads(path.read_text(encoding="utf-8"))
        return {k: v for k, v in without_times(found).items() if k != "commands"} if isinstance(found, dict) else (
            without_times(found)
        )  # fmt: skip
    if path.suffix == ".csv":
        with path.open(newline="") as stream:
            return without_times(list(csv.DictReader(stream)))
    return path.read_bytes()


def started(arguments: tuple[object, ...], moment: str = "", **options: Any) -> "subprocess.Popen[bytes]":
    """Start the command line with options of `Popen`; it kills itself at one of `MOMENTS` if that is given."""
    command = [sys.executable, __file__, moment, *map(str, arguments)]
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": os.environ, **options}
    return subprocess.Popen(command, **options)


def finish(arguments: tuple[object, ...]) -> float:
    """Run the command to its end; returns its seconds."""
    start = time.monotonic()
    with started(arguments) as process:
        assert process.wait(timeout=300) == 0
    return time.monotonic() - start


def kill_at(arguments: tuple[object, ...], moment: str) -> None:
    """Run the command up to that moment."""
    with started(arguments, moment) as process:
        assert process.wait(timeout=300) == -signal.SIGKILL, f"ended before {moment}"


def kill_at_random(
    command: tuple[object, ...], out: Path, seconds: float, kills: int, seed: int, check: Callable[[Path], None]
) -> None:
    """Kill the command so often, each time at a random moment within `seconds`; start it again until it is done.

    A command that ends before is checked, and another folder begun.
    """
    moments, done = random.Random(seed), 0
    while kills:
        with started((*command, "--out", out / str(done))) as process:
            try:
                assert process.wait(timeout=moments.uniform(0, seconds)) == 0
            except subprocess.TimeoutExpired:
                process.kill()
                kills -= 1
            else:
                check(out / str(done))
                done += 1
    finish((*command, "--out", out / str(done)))
    check(out / str(done))


class _Killer:
    """A stream of lines that writes its second line, or half of it, and then kills the process."""

    def __init__(self, stream: Any, half: bool) -> None:
        self._stream, self._half, self._lines = stream, half, 0

    def write(self, line: bytes) -> int:
        self._lines += 1
        self._stream.write(line[: len(line) // 2] if self._half and self._lines > 1 else line)
        if self._lines > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return len(line)

    def __enter__(self) -> "_Killer":
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()


def _kill_at(moment: str) -> None:
    from espalier.experiments.runs.folder import RunFolder

    if moment == HALF_A_FILE:
        Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        return
    name = "open_trees" if "tree" in moment else "open_samples"
    opened = getattr(RunFolder, name)
    setattr(RunFolder, name, lambda *given: _Killer(opened(*given), moment.startswith("half")))


if __name__ == "__main__":
    from espalier.experiments.cli.main import main

    _, asked, *arguments = sys.argv
    if asked:
        _kill_at(asked)
    sys.argv = ["espalier", *arguments]
    main()
