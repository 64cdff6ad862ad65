"""Contexts of `multiprocessing` whose child processes do not run the program's main module again.

multiprocessing imports `__main__` into every process that it starts, so that its functions can be unpickled there. A
script without a guard would load its models twice, then fail; and what our children run is in modules of their own.
"""

import multiprocessing.spawn
import sys
from multiprocessing import get_context
from multiprocessing.context import BaseContext, SpawnContext, SpawnProcess
from types import FunctionType
from typing import Any

_OF_MAIN = "init_main"
"""Start of the names of what a child is told of the main module."""


class _SpawnModule:
    """The module `multiprocessing.spawn`, but for what it tells a child of the main module."""

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing.spawn, name)

    @staticmethod
    def get_preparation_data(name: str) -> dict[str, Any]:
        """The data that a child is started with."""
        told = multiprocessing.spawn.get_preparation_data(name)
        return {key: value for key, value in told.items() if not key.startswith(_OF_MAIN)}


def _without_main(launcher: Any) -> Any:
    """A class of multiprocessing that starts processes, with its own method for that, which sees `_SpawnModule`."""
    known = launcher._launch
    launch = FunctionType(known.__code__, {**known.__globals__, "spawn": _SpawnModule()}, known.__name__)
    return type(launcher.__name__, (launcher,), {"_launch": launch})


class _Spawned(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 (multiprocessing's name)
        from multiprocessing.popen_spawn_posix import Popen

        return _without_main(Popen)(process_obj)


class _Spawning(SpawnContext):
    Process = _Spawned


def context_without_main() -> BaseContext:
    """Return a context that spawns children which leave the main module alone, so that they cannot call its functions.

    It is a context of its own, and changes no other. On Windows it is the plain one.
    """
    return get_context("spawn") if sys.platform == "win32" else _Spawning()


def is_of_main(function: Any) -> bool:
    """Return true for a function of the main module, and for a `partial` that calls it or passes it on."""
    parts = (function, getattr(function, "func", None), *getattr(function, "args", ()))
    return any(getattr(part, "__module__", None) == "__main__" for part in parts)
