"""A process that compiles functions for another one, which finds them in the folder they are kept in."""

import os
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from typing import Any


class Worker:
    """Such a process, as the other one sees it; it ends with that one at the latest."""

    def __init__(self) -> None:
        """Start the process.

        Raises:
            OSError: none can be started.
        """
        self._connection, its = Pipe()
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(its.fileno())],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # a script may have changed its path
                pass_fds=[its.fileno()],
                process_group=0,  # Ctrl+C is for the other one
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def compile(self, function: Any, types: tuple[Any, ...]) -> bool:
        """Compile a function of a module for arguments of `types`; returns whether that succeeded."""
        python = function.py_func
        try:
            self._connection.send((python.__module__, python.__qualname__, types))
            return self._connection.recv()
        except Exception:  # that it has ended, or that types cannot be pickled: whoever waits must hear of it
            return False

    def stop(self) -> None:
        """End the process, in the middle of its work if need be: files that it keeps are replaced as a whole."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


def main(descriptor: int) -> None:
    """Compile what comes through a connection until it ends."""
    with Connection(descriptor) as connection, suppress(EOFError):
        while True:
            module, name, types = connection.recv()
            getattr(import_module(module), name).compile(types)
            connection.send(True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
