"""Workers as processes of this machine, each behind a socket pair.

Every worker has a thread here that starts its process, listens to it until it ends, and starts the next. Messages are
pickled: both ends are processes of one user, and nothing leaves the machine.
"""

import itertools
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from espalier.engine.errors import FatalError
from espalier.experiments.executors import process_worker
from espalier.experiments.executors.devices import Place, places_of
from espalier.experiments.executors.process_worker import Channel, CheckReply, CheckRequest
from espalier.experiments.executors.transport import Loaded, Lost, NoAnswerError, Order, Question, Report, Stepped
from espalier.search.run.settings import RuntimeSettings

log = logging.getLogger("espalier.executors")

_Reports: TypeAlias = "SimpleQueue[tuple[int, Report, _Process | None]]"
"""Reports with the number of the worker and its process."""
_COMMAND = f"from {process_worker.__name__} import main; main()"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0
"""Seconds before a worker is started again: twice as many each time, until it has lasted."""
_LASTED_SECONDS = 60.0
"""Seconds after loading from which on a worker has lasted."""
_TAKE_SECONDS = 10.0
"""Seconds in which a process must take a message, for it takes each at once unless it hangs."""
_END_SECONDS = 8.0
"""Seconds that a process has to end after its socket, some more than it takes by itself."""


class ProcessTransport:
    """A `Transport` to processes that it starts on this machine."""

    def __init__(self, runtime: RuntimeSettings, workers: int) -> None:
        """Start so many workers, which load at the same time.

        Raises:
            EspalierError: there are more workers than devices.
        """
        self.workers = workers
        self._reports: _Reports = SimpleQueue()
        self._ready: list[_Process | None] = [None] * workers  # those whose `Loaded` was the last that `poll` told
        self._closing = threading.Event()
        places = enumerate(places_of(runtime, workers))
        self._keepers = [_Keeper(number, place, self._reports, self._closing) for number, place in places]
        for keeper in self._keepers:
            keeper.start()

    @property
    def process_ids(self) -> list[int]:
        """Ids of the workers' processes that run now."""
        return [process.pid for keeper in self._keepers if (process := keeper.process)]

    def send(self, worker: int, order: Order) -> None:
        """Send an order to a worker that is ready."""
        if process := self._ready[worker]:
            with suppress(OSError):  # it has ended, which `poll` tells
                process.send(order)

    def check(self, worker: int, request: Question, seconds: float) -> Any:
        """Have a worker resolve a request."""
        if (process := self._keepers[worker].process) is None:
            raise NoAnswerError(f"worker {worker} has ended")
        return process.check(request, seconds)

    def restart(self, worker: int) -> None:
        """End a worker that hangs."""
        if process := self._ready[worker]:
            process.kill()

    def poll(self, seconds: float) -> list[tuple[int, Report]]:
        """Return what workers have reported."""
        found: list[tuple[int, Report]] = []
        with suppress(Empty):
            while True:
                number, report, process = self._reports.get(timeout=0 if found else seconds)
                if not isinstance(report, Stepped):
                    self._ready[number] = process if isinstance(report, Loaded) else None
                found.append((number, report))
        return found

    def close(self) -> None:
        """End all workers."""
        self._closing.set()
        for keeper in self._keepers:
            if process := keeper.process:
                process.hang_up()
        for keeper in self._keepers:
            keeper.join()


class _Keeper(threading.Thread):
    """Keeps one worker running; `process` is the one that does."""

    def __init__(self, number: int, place: Place, reports: _Reports, closing: threading.Event) -> None:
        super().__init__(name=f"espalier-worker-{number}", daemon=True)
        self._number = number
        self._place = place
        self._reports = reports
        self._closing = closing
        self.process: _Process | None = None

    def run(self) -> None:
        # The processes inherit it: a terminal sends Ctrl-C to them too, but it is this process that ends them.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        pause = _FIRST_PAUSE
        while not self._closing.is_set():
            lasted = self._run_one()
            pause = _FIRST_PAUSE if lasted else pause
            self._closing.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _run_one(self) -> bool:
        """Start a process and listen until it ends; returns whether it has lasted."""
        try:
            self.process = process = _Process(self._number, self._place)
        except OSError as error:
            self._report(Lost(FatalError(f"worker {self._number} could not be started: {error}")))
            return False
        if self._closing.is_set():  # `close` may have looked for it too early
            process.hang_up()
        loaded, why = float("inf"), None
        while report := process.receive():
            if isinstance(report, Lost):
                why = report.error  # it ends now
                continue
            if isinstance(report, Loaded):
                loaded = time.monotonic()
            self._report(report)
        ended = process.end()
        self.process = None
        self._report(Lost(why or FatalError(f"worker {self._number} {ended}")))
        return time.monotonic() - loaded > _LASTED_SECONDS

    def _report(self, report: Report) -> None:
        self._reports.put((self._number, report, self.process))


class _Process:
    """One process of a worker, and this end of the socket to it."""

    def __init__(self, number: int, place: Place) -> None:
        """Start it.

        Raises:
            OSError: that is not possible now.
        """
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-c", _COMMAND, str(theirs.fileno()), str(number)],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **place.environment},
                stdin=subprocess.DEVNULL,
                stdout=2,  # what it prints must not mix with results
            )
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_TAKE_SECONDS), 0))
        self._channel = Channel(os.dup(self._socket.fileno()))
        self._numbers = itertools.count()
        self._answers: dict[int, Future[Any]] = {}
        with suppress(OSError):
            self.send(place.runtime)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def send(self, message: object) -> None:
        """Send a message; a process that does not take it in time is killed.

        Raises:
            OSError: the process has ended.
        """
        try:
            self._channel.send(message)
        except BlockingIOError:
            log.warning("process %d of a worker took no message for %g s, and is killed", self.pid, _TAKE_SECONDS)
            self.kill()
            raise

    def kill(self) -> None:
        """End the process at once; `receive` comes to its end."""
        self._popen.kill()

    def check(self, request: Question, seconds: float) -> Any:
        """See `Transport.check`."""
        number, answer = next(self._numbers), Future[Any]()
        self._answers[number] = answer
        try:
            self.send(CheckRequest(number, request))
            return answer.result(seconds)
        except (TimeoutError, OSError) as error:  # in this order: the first is one of the second
            what = f"did not answer within {seconds:g} s" if isinstance(error, TimeoutError) else "has ended"
            raise NoAnswerError(f"the worker of process {self.pid} {what}") from None
        finally:
            del self._answers[number]

    def receive(self) -> Report | None:
        """The next report; None at the end. Answers go to whoever has asked."""
        while isinstance(message := self._channel.receive(), CheckReply):
            if answer := self._answers.get(message.number):
                answer.set_exception(message.error) if message.error else answer.set_result(message.resolved)
        return message

    def hang_up(self) -> None:
        """Bring the socket to its end, and with it the process and `receive`."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def end(self) -> str:
        """Wait for the process, and kill it if it does not end; returns how it ended, for messages."""
        self.hang_up()
        try:
            code = self._popen.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            code = self._popen.wait()
        self._channel.close()
        self._socket.close()
        for answer in list(self._answers.values()):
            if not answer.done():
                answer.set_exception(OSError("the process has ended"))
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
