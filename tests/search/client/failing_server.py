"""A server that fails as it is told to, and then answers; it notes what its calls carry."""

import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import grpc
from grpc_status import rpc_status
from scripted_orchestrator import result_of

from espalier.search.request import SearchRequest
from espalier.search.result import Started, StopReason
from espalier.search.service.errors import Failure
from espalier.search.service.grpc_api.convert import event_to_wire, to_wire
from espalier.search.service.grpc_api.servicer import status_of
from espalier.v1 import search_pb2 as pb
from espalier.v1.search_pb2_grpc import SearchServiceServicer, add_SearchServiceServicer_to_server

RESULT = result_of(SearchRequest("solve"), "s0", StopReason.FINISHED)


@dataclass
class FailingServer(SearchServiceServicer):
    """Fails with each of `failures` in turn, a stream after `events` events, and answers from then on.

    It reads the first message of a session before it refuses it, as Espalier's server does, unless `unread`: the
    client's write may fail then, and of a failed write gRPC tells no status.
    """

    failures: list[Failure]
    events: int = 0
    unread: bool = False
    address: str = ""
    metadata: list[dict[str, Any]] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    left: list[float | None] = field(default_factory=list)

    def SolveProblem(self, request: Any, context: Any) -> Any:  # noqa: N802 (the contract's)
        self._note(context)
        if self.failures:
            context.abort_with_status(_status(self.failures.pop(0)))
        return pb.SolveProblemResponse(result=to_wire(RESULT))

    def SolveProblemStream(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802 (the contract's)
        self._note(context)
        failure = self.failures.pop(0) if self.failures else None
        for _ in range(self.events if failure else 1):
            yield event_to_wire(Started("s0", SearchRequest("solve")))
        if failure:
            context.abort_with_status(_status(failure))
        yield pb.SolveProblemStreamResponse(result=to_wire(RESULT))

    def ScoreSteps(self, request_iterator: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802 (the contract's)
        self._note(context)
        if not self.unread:
            next(request_iterator)
        if self.failures:
            context.abort_with_status(_status(self.failures.pop(0)))
        context.send_initial_metadata((("espalier-session", "open"),))
        for message in request_iterator:
            scores = [pb.NodeScore(node=step.node, score=0.5) for step in message.steps]
            yield pb.ScoreStepsResponse(scored=pb.StepsScored(search_id="s0", scores=scores))
        yield pb.ScoreStepsResponse(result=pb.ScoreSolutionResponse(stop_reason=pb.STOP_REASON_FINISHED))

    def _note(self, context: Any) -> None:
        self.metadata.append(dict(context.invocation_metadata()))
        self.arrivals.append(time.monotonic())
        self.left.append(context.time_remaining())


def _status(failure: Failure) -> Any:
    return rpc_status.to_status(status_of(failure))


@contextmanager
def failing_server(failures: Sequence[Failure], events: int = 0, unread: bool = False) -> Iterator[FailingServer]:
    servicer = FailingServer(list(failures), events, unread)
    server = grpc.server(futures.ThreadPoolExecutor(4))
    add_SearchServiceServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield servicer
    finally:
        server.stop(None).wait()


def waits(server: FailingServer) -> list[float]:
    """Seconds between one arrival of a call and the next."""
    return [later - earlier for earlier, later in pairwise(server.arrivals)]
