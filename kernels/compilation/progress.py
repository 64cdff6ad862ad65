"""The line that says how far compilation is: rewritten in its place on a terminal, else at its beginning and end."""

import time
from types import TracebackType
from typing import TextIO


class Progress:
    """Such a line, on one stream."""

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
