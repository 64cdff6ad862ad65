"""A worker in a process of its own, on the machine of its executor; `process_transport` calls `main` in it.

It ends with the executor, for whatever reason that does: the socket between them is then at its end.
"""

import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from espalier.engine.errors import EspalierError
from espalier.experiments.executors.transport import Cancel, PrepareReload, Question, Reload, Report, Run, Tell
from espalier.experiments.executors.worker import Worker
from espalier.search.run.executor import Resolved
from espalier.search.tokenization import Tokenization

_END_SECONDS = 5.0
"""Seconds to finish a step and to end the processes that compare answers, once the executor has gone."""

log = logging.getLogger("espalier.executors")


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
        self._lock = threading.Lock()

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
    threading.Thread(target=_listen, args=(channel, worker), name="espalier-orders", daemon=True).start()
    stopped = worker.run()
    logging.shutdown()
    os._exit(0 if stopped else 1)  # not a normal exit, which waits for threads


def _listen(channel: Channel, worker: Worker) -> None:
    """Pass on orders and check requests; end this process at the end of the socket."""
    try:
        while message := channel.receive():
            match message:
                case Run() | Cancel() | Tell() | Reload():
                    worker.tell(message)
                case CheckRequest(_, PrepareReload()):  # takes as long as loading does
                    threading.Thread(target=_answer, args=(channel, worker, message), daemon=True).start()
                case CheckRequest():
                    _answer(channel, worker, message)
        if worker.loaded:
            worker.stop()
            time.sleep(_END_SECONDS)
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
