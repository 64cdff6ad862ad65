"""Workers as processes of this machine, each on a device of its own: both ends of the socket pair between.

Every worker has a thread here that starts its process, listens to it until it ends, and starts the next. Messages are
pickled: both ends are processes of one user, and nothing leaves the machine. A process, in which `main` is called, ends
with its executor, for whatever reason that does: the socket between them is then at its end.
"""

import itertools
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import Any

from espalier.engine.errors import EspalierError, FatalError
from espalier.experiments.executors.worker import (
    Loaded,
    Lost,
    NoAnswerError,
    Order,
    PrepareReload,
    Question,
    Report,
    Stepped,
    Worker,
)
from espalier.kernels.cpu.threads import usable_cores
from espalier.search.completion import Tokenization
from espalier.search.run.executor import Resolved
from espalier.search.run.settings import RuntimeSettings, default_cpu_kv_memory

log = logging.getLogger("espalier.executors")

_COMMAND = f"from {__name__} import main; main()"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 60.0
"""Seconds before a worker is started again: twice as many each time, until it has lasted."""
_LASTED_SECONDS = 60.0
"""Seconds after loading from which on a worker has lasted."""
_TAKE_SECONDS = 10.0
"""Seconds in which a process must take a message, for it takes each at once unless it hangs."""
_END_SECONDS = 8.0
"""Seconds that a process has to end after its socket, some more than it takes by itself."""
_LAST_SECONDS = 5.0
"""Seconds to finish a step and to end the processes that compare answers, once the executor has gone."""


@dataclass(frozen=True, slots=True)
class Place:
    """Placement of one worker: what it loads, and what its environment has besides that of its executor."""

    runtime: RuntimeSettings
    environment: Mapping[str, str] = field(default_factory=dict)


def places_of(runtime: RuntimeSettings, workers: int) -> list[Place]:
    """Return the places of workers on this machine.

    Raises:
        EspalierError: there are more workers than GPUs, or than cores on a CPU.
    """
    gpus = [] if runtime.device.startswith("cpu") else visible_gpus()
    return assign(runtime, workers, usable_cores(), gpus)


def visible_gpus() -> list[str]:
    """Return the GPUs that torch sees, each by its name for CUDA_VISIBLE_DEVICES."""
    import torch

    count = torch.cuda.device_count()
    names = [name.strip() for name in os.environ.get(_VISIBLE, "").split(",") if name.strip()]
    return names[:count] or [str(index) for index in range(count)]


def assign(runtime: RuntimeSettings, workers: int, cores: int, gpus: Sequence[str]) -> list[Place]:
    """Return the places of workers on a machine with so many cores, and these GPUs; without any, on its CPU.

    Raises:
        EspalierError: there are more workers than GPUs, or than cores on a CPU.
    """
    on_gpus = bool(gpus) or runtime.device.startswith("cuda")
    kind, devices = ("GPU", len(gpus)) if on_gpus else ("core", cores)
    if workers > devices:
        raise EspalierError(
            f"--workers {workers}: each needs a {kind} of its own, and there {'is' if devices == 1 else 'are'} "
            f"{devices}; lower --workers{', or choose --device cpu' if on_gpus else ''}"
        )
    if on_gpus:
        return [Place(replace(runtime, device="cuda"), {_VISIBLE: name}) for name in gpus[:workers]]
    memory = default_cpu_kv_memory(workers) if runtime.kv_memory is None else runtime.kv_memory
    threads = runtime.threads or cores // workers
    return [Place(replace(runtime, device="cpu", threads=threads, kv_memory=memory))] * workers


class ProcessTransport:
    """A `Transport` to processes that it starts on this machine; each is kept running by a thread."""

    def __init__(self, runtime: RuntimeSettings, workers: int) -> None:
        """Start so many workers, which load at the same time.

        Raises:
            EspalierError: there are more workers than devices.
        """
        self.workers = workers
        # Reports with the number of the worker and its process.
        self._reports: SimpleQueue[tuple[int, Report, _Process | None]] = SimpleQueue()
        self._processes: list[_Process | None] = [None] * workers  # those that run
        self._ready: list[_Process | None] = [None] * workers  # those whose `Loaded` was the last that `poll` told
        self._closing = Event()
        self._keepers = [
            Thread(target=self._keep, args=each, name=f"espalier-worker-{each[0]}", daemon=True)
            for each in enumerate(places_of(runtime, workers))
        ]
        for keeper in self._keepers:
            keeper.start()

    @property
    def process_ids(self) -> list[int]:
        """Ids of the workers' processes that run now."""
        return [process.pid for process in self._processes if process]

    def send(self, worker: int, order: Order) -> None:
        """Send an order to a worker that is ready."""
        if process := self._ready[worker]:
            with suppress(OSError):  # it has ended, which `poll` tells
                process.send(order)

    def check(self, worker: int, request: Question, seconds: float) -> Any:
        """Have a worker resolve a request."""
        if (process := self._processes[worker]) is None:
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
        for process in filter(None, self._processes):
            process.hang_up()
        for keeper in self._keepers:
            keeper.join()

    def _keep(self, number: int, place: Place) -> None:
        """Keep one worker running."""
        # The processes inherit it: a terminal sends Ctrl-C to them too, but it is this process that ends them.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        pause = _FIRST_PAUSE
        while not self._closing.is_set():
            pause = _FIRST_PAUSE if self._run_one(number, place) else pause
            self._closing.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _run_one(self, number: int, place: Place) -> bool:
        """Start a process and listen until it ends; returns whether it has lasted."""
        try:
            self._processes[number] = process = _Process(number, place)
        except OSError as error:
            self._reports.put((number, Lost(FatalError(f"worker {number} could not be started: {error}")), None))
            return False
        if self._closing.is_set():  # `close` may have looked for it too early
            process.hang_up()
        loaded, lost = float("inf"), None
        while report := process.receive():
            if isinstance(report, Lost):
                lost = report  # it ends now
                continue
            loaded = time.monotonic() if isinstance(report, Loaded) else loaded
            self._reports.put((number, report, process))
        ended = process.end()
        self._processes[number] = None
        self._reports.put((number, lost or Lost(FatalError(f"worker {number} {ended}")), None))
        return time.monotonic() - loaded > _LASTED_SECONDS


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
        self.pid = self._popen.pid
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_TAKE_SECONDS), 0))
        self._channel = Channel(os.dup(self._socket.fileno()))
        self._numbers = itertools.count()
        self._answers: dict[int, Future[Any]] = {}
        with suppress(OSError):
            self.send(place.runtime)

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


# ---- the process of a worker


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """A request to check, and the number that the answer will carry."""

    number: int
    request: Question


@dataclass(frozen=True, slots=True)
class CheckReply:
    """The request as it was resolved, or the digest of what was prepared, or the error that was raised for it."""

    number: int
    resolved: Resolved | Tokenization | str | None = None
    error: Exception | None = None


class Channel:
    """One end of the socket. Messages may be sent on several threads."""

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)
        self._lock = Lock()

    def send(self, message: object) -> None:
        """Send a message.

        Raises:
            OSError: the other end has gone, which `receive` tells too; BlockingIOError if it does not take it in time.
        """
        with self._lock:
            self._connection.send(message)

    def receive(self) -> Any:
        """The next message; None at the end."""
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            return None

    def close(self) -> None:
        """Close this end."""
        with self._lock:
            self._connection.close()


def main() -> None:
    """Load what the executor names, and run its searches until it has gone; exits with 1 if that fails before.

    Arguments of the process: the file descriptor of the socket, and the worker's number.
    """
    for kind in (signal.SIGINT, signal.SIGTERM):  # the executor gets them too, and lets searches end first
        signal.signal(kind, lambda *_: None)  # unlike SIG_IGN, this is not inherited by processes that this one starts
    logging.basicConfig(format=f"%(asctime)s %(levelname)s worker {sys.argv[2]}: %(message)s")
    channel = Channel(int(sys.argv[1]))
    worker = Worker(channel.receive(), partial(_send, channel))
    Thread(target=_listen, args=(channel, worker), name="espalier-orders", daemon=True).start()
    stopped = worker.run()
    logging.shutdown()
    os._exit(0 if stopped else 1)  # not a normal exit, which waits for threads


def _listen(channel: Channel, worker: Worker) -> None:
    """Pass on orders and check requests; end this process at the end of the socket."""
    try:
        while message := channel.receive():
            match message:
                case CheckRequest(_, PrepareReload()):  # takes as long as loading does
                    Thread(target=_answer, args=(channel, worker, message), daemon=True).start()
                case CheckRequest():
                    _answer(channel, worker, message)
                case order:
                    worker.tell(order)
        if worker.loaded:
            worker.stop()
            time.sleep(_LAST_SECONDS)
    except Exception:
        log.exception("a message could not be read")
    finally:
        os._exit(1)


def _answer(channel: Channel, worker: Worker, asked: CheckRequest) -> None:
    try:
        answer = CheckReply(asked.number, worker.check(asked.request))
    except EspalierError as error:
        answer = CheckReply(asked.number, error=error)
    _send(channel, answer)


def _send(channel: Channel, message: Report | CheckReply) -> None:
    with suppress(OSError):
        channel.send(message)
