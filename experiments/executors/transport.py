"""Messages between an executor and its workers, and the protocol of the transport that carries them."""

from dataclasses import dataclass
from typing import Any, Protocol

from espalier.engine.errors import EspalierError
from espalier.search.request import SubmitOptions
from espalier.search.run.executor import AnyEvent, AnyRequest, Rejected, RequestDefaults, Resolved
from espalier.search.score_session import SessionTurn
from espalier.search.server_info import Occupancy
from espalier.search.tokenization import TokenizationRequest


@dataclass(frozen=True, slots=True)
class Run:
    """Order to run a search; one that the worker runs already is ignored.

    Attributes:
        search_id: the executor's id of the search, which the worker's events carry.
        request: what to search, resolved if a worker has been asked about it.
        options: options of the submission.
        progress: whether events other than `Finished` are wanted.
    """

    search_id: str
    request: AnyRequest | Resolved
    options: SubmitOptions
    progress: bool


@dataclass(frozen=True, slots=True)
class Cancel:
    """Order to stop a search, which ends with its best answer so far."""

    search_id: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Order to go on with a session of scores."""

    search_id: str
    turn: SessionTurn


@dataclass(frozen=True, slots=True)
class Reload:
    """Order to go on with the weights of a folder, once they are loaded; answered by a `Loaded` with its name."""

    folder: str


@dataclass(frozen=True, slots=True)
class PrepareReload:
    """Request to load the weights of a folder, beside those that go on, for `Reload`; None lets go of such."""

    folder: str | None


Question = AnyRequest | TokenizationRequest | PrepareReload
"""Asked of a worker, which answers whatever it runs meanwhile."""
Order = Run | Cancel | Tell | Reload


@dataclass(frozen=True, slots=True)
class Loaded:
    """The worker can search from now on, and runs nothing yet; or it goes on with the weights of `folder`.

    Version and models must be the same for all workers, for results not to depend on the worker.
    """

    version: str
    models: dict[str, str]
    kv_memory_bytes: int
    hardware: dict[str, Any]
    defaults: RequestDefaults
    held: Occupancy
    folder: str = ""


@dataclass(frozen=True, slots=True)
class Stepped:
    """Report after a step: what the worker holds, and the events of its searches since the last one, in order."""

    held: Occupancy
    events: tuple[AnyEvent | Rejected, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker ended or could not load; all that it ran is lost. It may come back, which `Loaded` tells."""

    error: Exception


Report = Loaded | Stepped | Lost


class NoAnswerError(EspalierError):
    """A worker did not answer in time, or has ended."""


class Transport(Protocol):
    """Workers that are being started, numbered from 0, and the way to them.

    All methods but `check` are called on one thread. A transport starts a lost worker again, as often as it can.

    Attributes:
        workers: number of workers, lost ones included.
    """

    workers: int

    def send(self, worker: int, order: Order) -> None:
        """Send an order to a worker that `poll` last told to be loaded; it is lost with the worker.

        A worker is given its orders one after another, as they were sent.
        """
        ...

    def check(self, worker: int, request: Question, seconds: float) -> Any:
        """Have a worker resolve a request, or prepare a reload; may be called on any thread.

        Raises:
            NoAnswerError: it did not answer within `seconds`.
            EspalierError: see `Executor.check`.
        """
        ...

    def restart(self, worker: int) -> None:
        """End a worker that hangs; `poll` tells that it is lost, and when it is back."""
        ...

    def poll(self, seconds: float) -> list[tuple[int, Report]]:
        """Return what workers have reported, in the order of each; waits for the first report, at most `seconds`."""
        ...

    def close(self) -> None:
        """End all workers."""
        ...
