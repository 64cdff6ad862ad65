"""A server in a process of its own, by the command that a user would give."""

import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from espalier.engine.errors import EspalierError
from espalier.search.service.access.callers import CallerEntry, add_caller

_START_SECONDS = 300.0
_ADDRESSES = re.compile(r" on (\S+)(?: and (\S+))?$")


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A running server: its gRPC address, the URL of its HTTP port if it has one, and its process id."""

    address: str
    url: str | None
    pid: int

    def resident_bytes(self) -> int:
        """Memory that the process occupies, in bytes."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def cpu_seconds(self) -> float:
        """Processor time that the process has used so far, in seconds."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def logins(count: int) -> Iterator[tuple[Path, list[str]]]:
    """Write a callers file for `--callers`; yields it and the tokens of its callers."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "callers.toml"
        yield file, [add_caller(file, f"caller{number}", CallerEntry()) for number in range(count)]


@contextmanager
def serving(*options: str, module: str = "espalier.experiments.cli.main") -> Iterator[ServerProcess]:
    """Run `espalier serve` on a free port until the end, or `serve` of another module that has it.

    Raises:
        EspalierError: it ended before it was ready, or while it served.
    """
    command = [sys.executable, "-m", module, "serve", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        assert process.stdout
        output = process.stdout

        def read() -> None:
            for line in output:
                lines.put(line)
            lines.put("")

        threading.Thread(target=read, daemon=True).start()
        try:
            if not (line := lines.get(timeout=_START_SECONDS)):
                raise EspalierError(f"the server has ended before it was ready, with exit code {process.wait()}")
            if not (found := _ADDRESSES.search(line.strip())):
                raise EspalierError(f"the server says {line.strip()!r} where it should say its address")
            yield ServerProcess(found[1], found[2], process.pid)
            if process.poll() is not None:
                raise EspalierError(f"the server has ended, with exit code {process.returncode}")
        except queue.Empty:
            raise EspalierError(f"the server was not ready within {_START_SECONDS:g} seconds") from None
        finally:
            process.terminate()
