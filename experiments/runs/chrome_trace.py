"""A Chrome trace of an engine's steps, for Perfetto (ui.perfetto.dev) or chrome://tracing.

Format: "Trace Event Format", JSON Object Format; complete events `X`, counters `C`, metadata `M`; in microseconds.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

from espalier.engine.engine import Engine
from espalier.engine.errors import EspalierError
from espalier.engine.stats import StepRecord
from espalier.search.run.executor import Executor

_Args = dict[str, Any] | None
_PROCESS = 1
_HOST = 1
"""Track of what happens between steps: the search's own work, votes, and waiting."""


@contextmanager
def profiled(executor: Executor, path: Path | None) -> Iterator[None]:
    """Write a trace of all engine steps of `executor` to `path` meanwhile; None writes nothing.

    The file is complete after any exit from the block, an exception or Ctrl-C included.

    Raises:
        EspalierError: the file cannot be written, or the executor has no engine in this process.
    """
    if path is None:
        yield
        return
    from espalier.search.run.orchestrator import Orchestrator

    if not isinstance(executor, Orchestrator):
        raise EspalierError("--profile: needs --executor local; the engines of workers run in other processes")
    engine = executor.engine
    try:
        stream = path.open("w", encoding="utf-8")
    except OSError as error:
        raise EspalierError(f"--profile: cannot write {str(path)!r}: {error.strerror}") from error
    with stream:
        trace = ChromeTrace(engine, stream)
        engine.on_step = trace.add
        try:
            yield
        finally:
            engine.on_step = None
            trace.close()


class ChromeTrace:
    """Writes events as they come, so that a long run needs no memory for them."""

    def __init__(self, engine: Engine, stream: TextIO) -> None:
        self._engine = engine
        self._stream = stream
        self._start = self._last = perf_counter()
        self._tracks = {role: _HOST + 1 + place for place, role in enumerate(engine.schedulers)}
        self._separator = '{"displayTimeUnit": "ms", "traceEvents": [\n'  # before the next event
        process = f"espalier, KV pool {engine.kv_pool.num_bytes:,} bytes"
        self._write("M", "process_name", 0, None, {"name": process})
        for name, track in {"between steps": _HOST, **self._tracks}.items():
            self._write("M", "thread_name", track, None, {"name": name})

    def add(self, record: StepRecord) -> None:
        """Write a step: its phases, the time since the step before, and what the pool holds after it."""
        track = self._tracks[record.role]
        if record.schedule_start > self._last:
            self._slice("search", _HOST, self._last, record.schedule_start)
        self._last = max(self._last, record.update_end)
        sizes = {name: getattr(record, name) for name in ("rows", "tokens", "draws", "reads", "copied_blocks")}
        held = {role: scheduler.pools for role, scheduler in self._engine.schedulers.items()}
        used = {role: sum(pool.live_bytes for pool in pools) for role, pools in held.items()}
        memory = {"live_blocks": sum(p.live_blocks for p in held[record.role]), "bytes": used[record.role]}
        phases = (
            ("scheduling", record.schedule_start, record.launch_start),
            ("launch", record.launch_start, record.launch_end),
            ("wait", record.wait_start, record.wait_end),
            ("update", record.wait_end, record.update_end),
        )
        ahead = self._engine.settings.launch_ahead  # then steps overlap, and whole ones would not nest
        if not ahead:
            self._slice(f"{record.role} step", track, record.schedule_start, record.update_end, sizes | memory)
        for name, begun, ended in phases:
            self._slice(name, track, begun, ended, sizes | memory if ahead and name == "launch" else None)
        for pool in (pool for pools in held.values() for pool in pools):
            blocks = {"live": pool.live_blocks, "cached": pool.cached_blocks, "free in its slabs": pool.free_blocks}
            self._write("C", f"{pool.name} blocks", track, record.update_end, blocks)
        self._write("C", "live KV bytes", track, record.update_end, used)

    def close(self) -> None:
        """End the file."""
        self._stream.write("\n]}\n")

    def _slice(self, name: str, track: int, begun: float, ended: float, args: _Args = None) -> None:
        self._write("X", name, track, begun, args, dur=round(1e6 * (ended - begun), 3))

    def _write(self, phase: str, name: str, track: int, at: float | None, args: _Args, **more: float) -> None:
        event: dict[str, Any] = {"ph": phase, "name": name, "pid": _PROCESS, "tid": track, **more}
        if at is not None:
            event["ts"] = round(1e6 * (at - self._start), 3)
        self._stream.write(self._separator + json.dumps(event | ({"args": args} if args else {})))
        self._separator = ",\n"
