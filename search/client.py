"""A Python client of the gRPC service: takes `SearchRequest`, returns `SearchResult`, raises typed errors."""

from collections.abc import Generator
from types import TracebackType
from typing import Any, Self

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from espalier.engine.errors import EspalierError, InvalidRequestError, Violation
from espalier.search.request import SearchRequest
from espalier.search.result import Event, SearchResult
from espalier.search.service.convert import event_from_wire, request_to_wire, result_from_wire
from espalier.v1 import search_pb2 as pb
from espalier.v1.search_pb2_grpc import SearchServiceStub

_OPTIONS = [
    # Results with whole trees can exceed gRPC's default limit of 4 MiB.
    ("grpc.max_receive_message_length", 64 * 2**20),
    # HTTP proxies from the environment often do not support HTTP/2, and would also apply to localhost.
    ("grpc.enable_http_proxy", 0),
    # A server whose machine disappeared is noticed, and routers between keep the connection of a long search.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]
TIMEOUT = 600.0
"""Seconds to wait for a result where the caller does not say: twice what a server lets a search run."""


class ServiceError(EspalierError):
    """The server refused the call, failed, or could not be reached; the message says which and what to do.

    Attributes:
        code: name of the gRPC status code, such as `UNAVAILABLE`.
        retry_seconds: delay after which the server suggests a retry; None without a suggestion.
    """

    def __init__(self, code: str, text: str, retry_seconds: float | None = None) -> None:
        self.code = code
        self.retry_seconds = retry_seconds
        super().__init__(text)


class SearchClient:
    """Sends searches to one server. Thread-safe; call `close`, or use it as a context manager.

    Example:
        with SearchClient("127.0.0.1:50051") as client:
            print(client.solve(SearchRequest("What is 6 * 7?")).answer)
    """

    def __init__(self, endpoint: str) -> None:
        """Create a client for the server at `endpoint`, HOST:PORT; it connects on the first call."""
        self.endpoint = endpoint
        self._channel = grpc.insecure_channel(endpoint, options=_OPTIONS)
        self._stub: Any = SearchServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; running searches are cancelled."""
        self._channel.close()

    def solve(
        self, request: SearchRequest, timeout: float | None = TIMEOUT, include_nodes: bool = False, priority: int = 0
    ) -> SearchResult:
        """Run one search and wait for its result.

        Args:
            request: the problem and how to search it.
            timeout: seconds to wait for the result, after which the server cancels the search; None waits without
                limit.
            include_nodes: whether the result includes the search tree.
            priority: in [-100, 100]; the server runs searches of a larger priority first.

        Raises:
            InvalidRequestError: a field breaks a rule or a limit of the server; lists every such field.
            ServiceError: the call failed for any other reason.
        """
        message = request_to_wire(request, include_nodes, priority)
        call = self._stub.SolveProblem.future(message, timeout=timeout)
        try:
            return result_from_wire(call.result().result)
        except (grpc.RpcError, grpc.FutureCancelledError, ValueError) as error:
            raise self._typed(error, call) from None
        finally:
            call.cancel()  # stops the search on an interrupt; no effect on a finished call

    def solve_stream(
        self, request: SearchRequest, timeout: float | None = TIMEOUT, include_nodes: bool = False
    ) -> Generator[Event, None, None]:
        """Run one search and yield its events as they arrive: `Started` first, `Finished` last.

        Closing the generator cancels the search. Takes the arguments of `solve`, without `priority`; with
        `include_nodes`, `StepDone` events also tell how the tree has changed. Raises the errors of `solve` during
        iteration.
        """
        message = pb.SolveProblemStreamRequest(request=request_to_wire(request, include_nodes))
        call = self._stub.SolveProblemStream(message, timeout=timeout)
        try:
            for response in call:
                event = event_from_wire(response)
                if event is not None:
                    yield event
        except (grpc.RpcError, ValueError) as error:
            raise self._typed(error, call) from None
        finally:
            call.cancel()

    def _typed(self, error: BaseException, call: Any) -> EspalierError:
        """Convert an exception of a call to a typed error."""
        if isinstance(error, ValueError):
            return ServiceError("UNKNOWN", f"the server at {self.endpoint} speaks a newer espalier.v1: {error}")
        if isinstance(error, grpc.FutureCancelledError):
            return ServiceError("CANCELLED", "the search was cancelled")
        violations, retry_seconds, from_server = _details(call)
        if violations:
            return InvalidRequestError(violations)
        code: grpc.StatusCode = call.code()
        return ServiceError(code.name, self._text(code, call.details() or "", from_server), retry_seconds)

    def _text(self, code: grpc.StatusCode, details: str, from_server: bool) -> str:
        match code:
            case grpc.StatusCode.UNAVAILABLE if not from_server:
                # gRPC's message when nothing listens on the port; without it, an established connection broke.
                if "failed to connect" in details:
                    return f"no server at {self.endpoint}; start one with: espalier serve"
                if "resolving" in details or "DNS" in details or "name resol" in details.lower():
                    return f"cannot reach the server at {self.endpoint}: no address is known for that name"
                return f"lost the connection to the server at {self.endpoint}"
            case grpc.StatusCode.DEADLINE_EXCEEDED if not from_server:
                return f"no result from {self.endpoint} within the timeout; allow more time or ask for a smaller search"
            case grpc.StatusCode.CANCELLED:
                return "the search was cancelled"
            case grpc.StatusCode.UNIMPLEMENTED:
                return f"the server at {self.endpoint} does not offer espalier.v1; is it an Espalier server?"
        return details or f"the call failed with {code.name}"


def _details(call: Any) -> tuple[list[Violation], float | None, bool]:
    """Read a failed call's status: its violations, its retry delay in seconds, and whether the server set details."""
    try:
        status = rpc_status.from_call(call)
    except ValueError:  # details that contradict the status do not come from our server
        status = None
    if status is None:
        return [], None, False
    violations: list[Violation] = []
    retry_seconds = None
    for packed in status.details:
        bad_request, retry_info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if packed.Unpack(bad_request):
            violations += [Violation(v.field, v.description) for v in bad_request.field_violations]
        elif packed.Unpack(retry_info):
            retry_seconds = retry_info.retry_delay.ToNanoseconds() / 1e9
    return violations, retry_seconds, True
