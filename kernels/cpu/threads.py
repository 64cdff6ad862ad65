"""Several threads in one compiled function: worker threads, and the sharing of work among them.

Such a function is compiled with `nogil`, and every thread calls it with the same arguments. Its work is cut into phases
and each phase into items. A free thread fetches the next item, and no thread enters a phase before all items of the
phase before are done:

    for item in phase_items(counters, phase, count):
        ...

A helper that comes late, or never, delays no other thread, and a slow one takes fewer items. (A fork and join of
numba's own threads costs about 10 us on two cores, and milliseconds while another process holds one of them; this costs
a fraction of a microsecond a phase, and a decoder's step has dozens.)
"""

import atexit
import math
import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from espalier.kernels.compilation.compiler import inner
from espalier.kernels.cpu.simd import INDEX, INT, IS_X86, Builder, call_llvm, constant, instructions

_LINE = 8
"""Elements of a cache line; each counter that several threads write has a line of its own."""
_WORTH_HELP = 400e-6
"""Least seconds of work that helpers are called for; a call costs some 80 us, for threads take turns in Python."""
_SPINS = 2000
"""Reads of a counter before the core is offered to other threads, about 50 us."""


_Call = tuple[Callable[..., None], np.ndarray, tuple[Any, ...]]
"""A function, counters, which live as long as it may run, and its other arguments."""


class _Helpers:
    """Worker threads; each waits at a queue of its own for functions to call."""

    def __init__(self) -> None:
        self.wanted = usable_cores() - 1
        self._pid = os.getpid()
        self._workers: list[tuple[threading.Thread, queue.SimpleQueue[_Call | None]]] = []
        self._lock = threading.Lock()

    def call(self, *call: *_Call) -> None:
        """Have `wanted` helpers make a call as soon as they are free."""
        with self._lock:
            if self._pid != os.getpid():  # forked: the threads stayed behind
                self._pid, self._workers = os.getpid(), []
            while len(self._workers) < self.wanted:
                calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
                thread = threading.Thread(target=_help, args=(calls,), name="espalier-worker", daemon=True)
                thread.start()
                self._workers.append((thread, calls))
        for _, calls in self._workers[: self.wanted]:
            calls.put(call)

    def stop(self) -> None:
        """End the threads; a thread that outlived the interpreter would abort the process."""
        with self._lock:
            if self._pid == os.getpid():
                for _, calls in self._workers:
                    calls.put(None)
                for thread, _ in self._workers:
                    thread.join(timeout=1)
            self._workers = []


def _help(calls: "queue.SimpleQueue[_Call | None]") -> None:
    while True:
        call = calls.get()
        while call and not calls.empty():  # earlier calls have ended without this helper
            call = calls.get()
        if call is None:
            return
        _run(*call)
        del call  # or a finished call's arrays would live until the next one


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use: those it is bound to, or fewer where a container limits their time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        allowed, period = quota.read_text(encoding="ascii").split()
        return max(1, min(cores, int(allowed) // int(period)))
    except (OSError, ValueError):  # no such file, or "max"
        return cores


_helpers = _Helpers()
atexit.register(_helpers.stop)


def set_threads(count: int) -> None:
    """Let compiled functions of this process run on `count` threads, at least one."""
    _helpers.wanted = count - 1


def num_threads() -> int:
    """Threads that compiled functions of this process run on."""
    return _helpers.wanted + 1


def parallel_run(function: Callable[..., None], phases: int, *args: Any, seconds: float = math.inf) -> None:
    """Call `function(counters, *args)` on this thread and the helpers; returns when all its work is done.

    Args:
        function: compiled with `nogil`; every call goes through `phases` phases as the module's docstring shows. Its
            `counters` are an address: numba's generators never give back an array that they hold.
        phases: number of phases.
        args: arrays and numbers.
        seconds: about how long the work takes on one thread; helpers are not called for less than they cost.
    """
    counters = np.zeros((phases, 2 * _LINE), dtype=np.int64)
    if _helpers.wanted and seconds > _WORTH_HELP:
        _helpers.call(function, counters, args)
    _run(function, counters, args)


def _run(function: Callable[..., None], counters: np.ndarray, args: tuple[Any, ...]) -> None:
    function(counters.ctypes.data, *args)


_CLAIMED, _DONE = 0, _LINE
"""Columns of `counters`: how many items of a phase were fetched, and how many are done."""


def _element(builder: Builder, args: list[Any]) -> Any:
    """A pointer to the counter in a phase's row and a column."""
    row = builder.mul(args[1], constant(INDEX, 2 * _LINE))
    return builder.gep(builder.inttoptr(args[0], INDEX.as_pointer()), [builder.add(row, args[2])])


@instructions(types.int64)
def _add_one(builder: Builder, args: list[Any]) -> Any:
    """`_add_one(counters, phase, column)` atomically adds one to a counter and returns what it was."""
    return builder.atomic_rmw("add", _element(builder, args), constant(INDEX, 1), "acq_rel")


@instructions(types.int64)
def _read(builder: Builder, args: list[Any]) -> Any:
    """`_read(counters, phase, column)` is a counter as other threads last left it."""
    return builder.load_atomic(_element(builder, args), "acquire", 8)


@instructions()
def _pause(builder: Builder, _: list[Any]) -> None:
    """Tell the processor that this is a spin loop, where it can be told."""
    if IS_X86:
        call_llvm(builder, "llvm.x86.sse2.pause", ir.VoidType())


@instructions()
def _yield(builder: Builder, _: list[Any]) -> None:
    """Offer the core to another thread."""
    call_llvm(builder, "sched_yield", INT)


@inner
def phase_items(counters: int, phase: int, count: int) -> Iterator[int]:
    """Items of a phase with `count` of them, each of which one thread gets; ends when all of them are done."""
    item = _add_one(counters, phase, _CLAIMED)
    while item < count:
        yield item
        _add_one(counters, phase, _DONE)
        item = _add_one(counters, phase, _CLAIMED)
    spins = 0
    while _read(counters, phase, _DONE) < count:
        spins += 1
        if spins < _SPINS:
            _pause()
        else:
            _yield()
