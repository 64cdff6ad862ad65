"""Compilation of functions before their first call, in several processes at once.

numba compiles in one thread of a process at a time, and what a model needs takes some fifteen seconds. So the largest
functions are taken apart: their parts are compiled on their own, by this process and by others, which meet in the
folder that compiled functions are kept in. A function whose parts lie there is then made from what these were compiled
to.
"""

import fcntl
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TextIO

import numba

from espalier.kernels.compilation.compiler import is_compiled, kept_in
from espalier.kernels.compilation.worker import Worker

_MAX_PROCESSES = 4
"""With more it would not end sooner: the largest function takes as long as the rest shared out among so many."""


class Compilation(NamedTuple):
    """A function of a `Compiler`, for arguments of certain types.

    Attributes:
        function: the function.
        types: numba's types of its arguments.
        parts: functions of a `Compiler` that it calls, which are compiled before it.
    """

    function: Any
    types: tuple[Any, ...]
    parts: tuple["Compilation", ...] = ()

    @property
    def key(self) -> tuple[int, tuple[Any, ...]]:
        """The same for the same function and types."""
        return id(self.function), self.types

    @property
    def done(self) -> bool:
        """True if it is compiled, here or in the folder where it is kept."""
        return is_compiled(self.function, self.types)

    def run(self) -> None:
        """Compile, or load what was compiled before."""
        self.function.compile(self.types)


def compilation(function: Any, *arguments: Any, parts: Sequence[Compilation] = ()) -> Compilation:
    """The compilation of a function for arguments such as these."""
    return Compilation(function, tuple(numba.typeof(argument) for argument in arguments), tuple(parts))


def compile_ahead(wanted: Sequence[Compilation], cores: int) -> None:
    """Make all of `wanted` ready to be called; says on standard error how far it is, if there is anything to compile.

    Where compiled functions are not kept, or with one core, this process compiles all.

    Args:
        wanted: what takes longest first.
        cores: how many this process may use.
    """
    missing = [one for one in wanted if not one.done]
    if missing:
        place = kept_in(missing[0].function)
        with Progress(sys.stderr, once=place is not None) as progress, _locked(place):
            queue = _Queue(missing, progress)
            with _workers(min(cores, _MAX_PROCESSES, queue.total) - 1 if place else 0, queue):
                while one := queue.take():
                    one.run()
                    queue.complete(one)
    for one in wanted:
        one.run()


class Progress:
    """The line that says how far compilation is: rewritten in its place on a terminal, else at beginning and end."""

    def __init__(self, stream: TextIO | None, once: bool) -> None:
        """Write to `stream`, if there is one; `once` says whether what is compiled will be kept."""
        self._stream = stream
        self._what = "CPU kernels, once for this machine" if once else "CPU kernels, which cannot be kept"
        self._start = time.monotonic()
        self._shown = False

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, failed: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if self._shown and not failed:
            self._write(f"compiled {self._what}: {time.monotonic() - self._start:.1f} s", last=True)

    def show(self, done: int, total: int) -> None:
        """Say that `done` of `total` functions are compiled."""
        if total and (self._in_place or not done):
            self._shown = True
            self._write(f"compiling {self._what}: {done} of {total}", last=not self._in_place)

    @property
    def _in_place(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def _write(self, text: str, last: bool) -> None:
        if self._stream is not None:
            self._stream.write(f"\r{text:<72}" if self._in_place else text)
            self._stream.write("\n" if last else "")


@contextmanager
def _locked(place: Path | None) -> Iterator[None]:
    """Keep other processes, which may have been started at the same time, from compiling for this folder meanwhile."""
    lock = None
    if place:
        with suppress(OSError):  # such as on a file system without locks
            lock = (place / "lock").open("w")
            fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if lock:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)  # a process forked meanwhile has this file open, too
            lock.close()


class _Queue:
    """Queue of compilations, for whoever is free; nothing before its parts.

    Attributes:
        total: how many functions there were at first, parts included.
    """

    def __init__(self, wanted: Sequence[Compilation], progress: Progress) -> None:
        every = {one.key: one for whole in wanted for one in (*whole.parts, whole)}
        self._waiting = [one for one in every.values() if not one.done]
        self._incomplete = {one.key for one in self._waiting}
        self._compiling: set[int] = set()
        self._changed = threading.Condition()
        self._progress = progress
        self.total = len(self._waiting)
        progress.show(0, self.total)

    def take(self) -> Compilation | None:
        """The first that can be compiled now, once there is one; None when all is complete."""
        with self._changed:
            while self._incomplete:
                for one in self._waiting:
                    # one function for two sets of types: its index would keep only what is written last
                    alone = id(one.function) not in self._compiling
                    if alone and not any(part.key in self._incomplete for part in one.parts):
                        self._waiting.remove(one)
                        self._compiling.add(id(one.function))
                        return one
                self._changed.wait()
            return None

    def complete(self, one: Compilation) -> None:
        """Report one that was taken as compiled."""
        with self._changed:
            self._incomplete.discard(one.key)
            self._compiling.discard(id(one.function))
            self._changed.notify_all()
            self._progress.show(self.total - len(self._incomplete), self.total)

    def give_back(self, one: Compilation) -> None:
        """Leave one that was taken to others."""
        with self._changed:
            self._waiting.insert(0, one)
            self._compiling.discard(id(one.function))
            self._changed.notify_all()

    def end(self) -> None:
        """Let nobody wait any longer."""
        with self._changed:
            self._incomplete.clear()
            self._changed.notify_all()


@contextmanager
def _workers(count: int, queue: _Queue) -> Iterator[None]:
    """Have `count` processes, or as many as can be started, take their share while the block runs."""
    workers: list[Worker] = []
    threads: list[threading.Thread] = []
    try:
        with suppress(OSError):  # no process can be started: this one does all
            for _ in range(count):
                workers.append(Worker())
                threads.append(threading.Thread(target=_serve, args=(workers[-1], queue), daemon=True))
                threads[-1].start()
        yield
    finally:
        queue.end()
        for worker in workers:
            worker.stop()
        for thread in threads:
            thread.join()


def _serve(worker: Worker, queue: _Queue) -> None:
    """Give a process one function after the other; what it fails at is left to this process, which then says why."""
    while one := queue.take():
        if not worker.compile(one.function, one.types):
            queue.give_back(one)
            return
        queue.complete(one)
