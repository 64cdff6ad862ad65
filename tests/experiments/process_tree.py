"""Which processes another one has started, and whether they are still there."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path


def descendants(pid: int) -> dict[int, str]:
    """Each process below `pid`, with its start time: an id may be used again."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        if fields := _stat(int(folder.name)):
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found: dict[int, str] = {}
    left = [pid]
    while left:
        for child in children.get(left.pop(), []):
            if fields := _stat(child):
                found[child] = fields[19]
                left.append(child)
    return found


def alive(processes: dict[int, str]) -> list[int]:
    """Those of `processes` that have not ended."""
    return [
        pid for pid, started in processes.items()
        if (fields := _stat(pid)) and fields[19] == started and fields[0] != "Z"
    ]  # fmt: skip


def stop(pid: int) -> None:
    """Stop a process, and wait until each of its threads has stopped: until then one of them may still answer."""
    os.kill(pid, signal.SIGSTOP)
    stats = [path / "stat" for path in (Path("/proc") / str(pid) / "task").iterdir()]
    wait_until(lambda: all(path.read_text().rpartition(")")[2].split()[0] == "T" for path in stats), 60.0)


def wait_until(true: Callable[[], object], seconds: float) -> None:
    """Wait until a condition holds, and fail if it does not in time."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third one on: state, parent, ..."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
