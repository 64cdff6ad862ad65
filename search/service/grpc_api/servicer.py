"""The methods of `SearchService`."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.result import Event, Finished
from espalier.search.scores import SessionTurn
from espalier.search.service.access.calls import Call
from espalier.search.service.grpc_api import convert
from espalier.search.service.grpc_api.interceptor import CALL
from espalier.search.service.session import SearchCall, Session, finished
from espalier.v1 import search_pb2 as pb
from espalier.v1.search_pb2_grpc import SearchServiceServicer

_CANCELLATION_SECONDS = 0.01
"""Seconds for which the end of a session's messages is not believed."""


class SolveServicer(SearchServiceServicer):
    """Translates between messages and the session; `interceptor.CallInterceptor` maps errors."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def SolveProblem(self, request: pb.SolveProblemRequest, context: Any) -> pb.SolveProblemResponse:  # noqa: N802 (the contract's)
        """Run one search and return its result."""
        message = await self._message(await self._session.finish(*await self._read(request)), request.include_nodes)
        return pb.SolveProblemResponse(result=message and message.result)

    async def SolveProblemStream(self, request: pb.SolveProblemStreamRequest, context: Any) -> None:  # noqa: N802 (the contract's)
        """Run one search and write its events as they arrive."""
        nodes = request.request.include_nodes
        async with self._session.search(*await self._read(request.request, True, nodes)) as search:
            async for events in search:
                for event in events:
                    if (message := await self._message(event, nodes)) is not None:
                        await context.write(message)

    async def ScoreSolution(self, request: pb.ScoreSolutionRequest, context: Any) -> pb.ScoreSolutionResponse:  # noqa: N802 (the contract's)
        """Score the steps of given solutions."""
        return convert.to_wire((await self._session.finish(*await self._read(request))).result)

    async def ScoreSteps(self, request_iterator: AsyncIterator[pb.ScoreStepsRequest], context: Any) -> None:  # noqa: N802 (the contract's)
        """Score steps that come one after another."""
        opening = await anext(aiter(request_iterator), pb.ScoreStepsRequest())
        if not opening.HasField("open"):
            raise InvalidRequestError([Violation("open", "is required in the first message")])
        turns = _turns(opening, request_iterator)
        async with self._session.search(*await self._read(opening.open, True, True, turns)) as session:
            await context.send_initial_metadata((convert.SESSION_OPEN,))
            async for events in session:
                for event in events:
                    await context.write(convert.event_to_wire(event, kind=pb.ScoreStepsResponse))

    async def Rollout(self, request: pb.RolloutRequest, context: Any) -> None:  # noqa: N802 (the contract's)
        """Sample solutions of a problem as a tree, and write it in pieces."""
        async with self._session.search(*await self._read(request)) as events:
            end = await finished(events)
            for message in convert.rollout_to_wire(end.result):
                await context.write(message)

    async def Reload(self, request: pb.ReloadRequest, context: Any) -> pb.ReloadResponse:  # noqa: N802 (the contract's)
        """Have the generator go on with other weights."""
        return convert.to_wire(await self._session.reload(CALL.get(), request.path))

    async def GetServerInfo(  # noqa: N802 (the contract's name)
        self, request: pb.GetServerInfoRequest, context: Any
    ) -> pb.GetServerInfoResponse:
        """Tell what is served, and what is held now."""
        return convert.info_to_wire(await self._session.info())

    async def _read(
        self, message: Any, progress: bool = False, nodes: bool = False, turns: AsyncIterator[SessionTurn] | None = None
    ) -> tuple[SearchCall, Call]:
        """The search that a message asks for, and the call that it came with; see `SearchCall`."""
        call = CALL.get()
        asked, violations = await self._session.read(
            call, message.ByteSize(), partial(convert.request_from_wire, message)
        )
        return SearchCall(asked, message.priority, progress, nodes, violations, turns), call

    async def _message(self, event: Event, include_nodes: bool) -> pb.SolveProblemStreamResponse | None:
        """Convert an event to a message within the size limit; None for progress that cannot be cut enough."""
        if isinstance(event, Finished) and not include_nodes:
            event = replace(event, result=replace(event.result, nodes=()))
        return await self._session.write(
            CALL.get(), event, convert.event_to_wire, pb.SolveProblemStreamResponse.ByteSize
        )


async def _turns(
    opening: pb.ScoreStepsRequest, messages: AsyncIterator[pb.ScoreStepsRequest]
) -> AsyncIterator[SessionTurn]:
    """Messages to a session, the steps of its first one included."""
    yield convert.from_wire(opening)
    async for message in messages:
        if message.HasField("open"):
            raise InvalidRequestError([Violation("open", "is for the first message only")])
        yield convert.from_wire(message)
    # The messages of a call that was cancelled or ran out of time end, too; that it was is told a moment later.
    await asyncio.sleep(_CANCELLATION_SECONDS)
