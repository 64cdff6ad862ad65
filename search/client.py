"""A client of the service that speaks in the search's own dataclasses and raises typed errors."""

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
    # A server may be set to send more than gRPC's default of 4 MiB: results with whole trees are large.
    ("grpc.max_receive_message_length", 64 * 2**20),
    # A proxy from the environment cannot carry this, and must not come between a machine and itself.
    ("grpc.enable_http_proxy", 0),
]


class ServiceError(EspalierError):
    """The server refused, failed, or could not be reached; the text says which and what to do.

    Attributes:
        code: the gRPC status, such as `UNAVAILABLE`.
        retry_seconds: when the server suggests to try again, None where it does not.
    """

    def __init__(self, code: str, text: str, retry_seconds: float | None = None) -> None:
        self.code = code
        self.retry_seconds = retry_seconds
        super().__init__(text)


class SearchClient:
    """Sends searches to one server. Safe to use from several threads; close it, or use it in a `with`.

    Example:
        with SearchClient("127.0.0.1:50051") as client:
            print(client.solve(SearchRequest("What is 6 * 7?")).answer)
    """

    def __init__(self, endpoint: str) -> None:
        """Connect lazily to `endpoint`, written HOST:PORT."""
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
        """Close the connection; searches still running are cancelled."""
        self._channel.close()

    def solve(
        self, request: SearchRequest, timeout: float | None = None, include_nodes: bool = False, priority: int = 0
    ) -> SearchResult:
        """Run one search and wait for its result.

        Args:
            request: the problem and how to search it.
            timeout: seconds after which to give up; the server then drops the search.
            include_nodes: whether the result is to hold the search tree.
            priority: among the server's searches, in [-100, 100]; a larger one goes first.

        Raises:
            InvalidRequestError: the server's limits or rules forbid the request; lists every bad field.
            ServiceError: anything else went wrong.
        """
        message = request_to_wire(request, include_nodes, priority)
        call = self._stub.SolveProblem.future(message, timeout=timeout)
        try:
            return result_from_wire(call.result().result)
        except (grpc.RpcError, grpc.FutureCancelledError, ValueError) as error:
            raise self._typed(error, call) from None
        finally:
            call.cancel()  # an interrupt must not leave the search running; no effect on a call that has ended

    def solve_stream(
        self, request: SearchRequest, timeout: float | None = None, include_nodes: bool = False
    ) -> Generator[Event, None, None]:
        """Run one search and give its events as they come: `Started` first, `Finished` last.

        Closing or dropping the iterator cancels the search. Arguments and errors are those of `solve`; errors are
        raised while iterating.
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
        """The typed error for what a call raised."""
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
                # gRPC's own words when nobody listens, instead of when an established connection breaks.
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
    """What the status of a failed call carries: violations, retry delay, and whether it has details at all."""
    try:
        status = rpc_status.from_call(call)
    except ValueError:  # the details contradict the status: not ours
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
