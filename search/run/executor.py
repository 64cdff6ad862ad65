"""The Executor protocol: searches run by an orchestrator in this process, or by workers in other ones."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from espalier.prm.limits import PathLimits
from espalier.search.request import DEFAULT_OPTIONS, SearchRequest, SubmitOptions, Vote
from espalier.search.result import Candidate, Event, SearchResult
from espalier.search.server_info import Occupancy
from espalier.search.voting.vote import VoteResult


@dataclass(frozen=True, slots=True)
class Rejected:
    """The only event of a search that a worker did not accept; `error` is what `submit` would have raised."""

    search_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A valid request with all that follows from it for the models that will run it; picklable.

    Attributes:
        request: the request with every default filled in.
        generator_limits: bounds on the generator's tokens.
        verifier_limits: bounds on the verifier's tokens; None if the search opens no verifier sequences.
        blocks: maximum KV blocks that the search may hold, by role.
        generator_prompt: the generator's prompt, as token ids.
        verifier_prompt: the verifier's prompt; empty without `verifier_limits`.
        warnings: what the result will warn of, whole sentences.
    """

    request: SearchRequest
    generator_limits: PathLimits
    verifier_limits: PathLimits | None
    blocks: Mapping[str, int] = field(default_factory=dict)
    generator_prompt: tuple[int, ...] = ()
    verifier_prompt: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()


def request_of(checked: SearchRequest | ResolvedRequest) -> SearchRequest:
    """The request itself, with defaults filled in if it is resolved."""
    return checked if isinstance(checked, SearchRequest) else checked.request


class Executor(Protocol):
    """Runs searches; the `Orchestrator`, for one. All methods but `check` are called on one thread."""

    @property
    def busy(self) -> bool:
        """True if any search is waiting or running."""
        ...

    @property
    def kv_memory_bytes(self) -> int:
        """Size of the KV pool, in bytes; of one worker's where there are several."""
        ...

    @property
    def max_running(self) -> int:
        """Searches that run at once where memory allows; of all workers where there are several."""
        ...

    @property
    def model_names(self) -> Mapping[str, str]:
        """Names of the models by role, for people; see `load.model_names`."""
        ...

    def occupancy(self) -> Occupancy:
        """Return what is held now."""
        ...

    def describe_models(self) -> dict[str, str]:
        """Return what results depend on besides the request."""
        ...

    def effective(self, request: SearchRequest) -> SearchRequest:
        """Return the request with every default filled in."""
        ...

    def check(self, request: SearchRequest) -> SearchRequest | ResolvedRequest:
        """Resolve a request, for `submit`; may be called on any thread.

        Workers are asked, for seconds at most: without their answer, only invalid fields are found, and the request is
        returned as it is.

        Raises:
            InvalidRequestError: lists every invalid field.
            RequestTooLargeError: the search can never fit.
        """
        ...

    def submit(
        self,
        request: SearchRequest | ResolvedRequest,
        on_event: Callable[[Event | Rejected], None] | None = None,
        options: SubmitOptions = DEFAULT_OPTIONS,
    ) -> str:
        """Queue a search and return its id; `on_event` is called from `step`.

        Args:
            request: what `check` returned, or a request, which is checked now.
            on_event: called with each event.
            options: priority and other options of the submission.

        Raises:
            InvalidRequestError, RequestTooLargeError: see `check`. What only a worker finds is reported later, by
                `Rejected` and a failed result.
        """
        ...

    def cancel(self, search_id: str) -> None:
        """Stop a search at the next `step`, which still finishes it. Unknown and finished ids are ignored."""
        ...

    def drop(self, search_ids: Iterable[str]) -> None:
        """Cancel searches immediately; `step` does not return them."""
        ...

    def step(self) -> list[SearchResult]:
        """Work on the searches for a moment, and return those that finished.

        Raises:
            FatalError: no search can continue.
        """
        ...

    def vote(self, candidates: Sequence[Candidate], vote: Vote) -> VoteResult:
        """Select one of a finished search's candidates as its own vote would; returns once the vote is counted."""
        ...

    def close(self) -> None:
        """Cancel all searches and release everything."""
        ...
