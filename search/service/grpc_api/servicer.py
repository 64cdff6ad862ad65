"""The methods of `SearchService`."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.result import Event, Finished
from espalier.search.score_session import SessionTurn
from espalier.search.service.grpc_api.convert import (
    SESSION_OPEN,
    event_to_wire,
    info_to_wire,
    reloaded_to_wire,
    request_from_wire,
    rollout_to_wire,
    scores_to_wire,
    session_event_to_wire,
    turn_from_wire,
)
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
        async with await self._search(request, progress=False) as events:
            end = await finished(events)
        message = await self._message(end, request.include_nodes)
        return pb.SolveProblemResponse(result=message and message.result)

    async def SolveProblemStream(self, request: pb.SolveProblemStreamRequest, context: Any) -> None:  # noqa: N802 (the contract's)
        """Run one search and write its events as they arrive."""
        nodes = request.request.include_nodes
        async with await self._search(request.request, progress=True) as search:
            async for events in search:
                for event in events:
                    if (message := await self._message(event, nodes)) is not None:
                        await context.write(message)

    async def ScoreSolution(self, request: pb.ScoreSolutionRequest, context: Any) -> pb.ScoreSolutionResponse:  # noqa: N802 (the contract's)
        """Score the steps of given solutions."""
        call = CALL.get()
        asked, violations = await self._session.read(call, request.ByteSize(), partial(request_from_wire, request))
        async with self._session.search(SearchCall(asked, request.priority, violations=violations), call) as events:
            end = await finished(events)
        return scores_to_wire(end.result)

    async def ScoreSteps(self, request_iterator: AsyncIterator[pb.ScoreStepsRequest], context: Any) -> None:  # noqa: N802 (the contract's)
        """Score steps that come one after another."""
        call = CALL.get()
        opening = await anext(aiter(request_iterator), pb.ScoreStepsRequest())
        if not opening.HasField("open"):
            raise InvalidRequestError([Violation("open", "is required in the first message")])
        asked, violations = await self._session.read(call, opening.ByteSize(), partial(request_from_wire, opening.open))
        turns = _turns(opening, request_iterator)
        asked = SearchCall(asked, opening.open.priority, True, True, violations, turns)
        async with self._session.search(asked, call) as session:
            await context.send_initial_metadata((SESSION_OPEN,))
            async for events in session:
                for event in events:
                    await context.write(session_event_to_wire(event))

    async def Rollout(self, request: pb.RolloutRequest, context: Any) -> None:  # noqa: N802 (the contract's)
        """Sample solutions of a problem as a tree, and write it in pieces."""
        call = CALL.get()
        asked, violations = await self._session.read(call, request.ByteSize(), partial(request_from_wire, request))
        async with self._session.search(SearchCall(asked, request.priority, violations=violations), call) as events:
            end = await finished(events)
            for message in rollout_to_wire(end.result):
                await context.write(message)

    async def Reload(self, request: pb.ReloadRequest, context: Any) -> pb.ReloadResponse:  # noqa: N802 (the contract's)
        """Have the generator go on with other weights."""
        return reloaded_to_wire(await self._session.reload(CALL.get(), request.path))

    async def GetServerInfo(  # noqa: N802 (the contract's name)
        self, request: pb.GetServerInfoRequest, context: Any
    ) -> pb.GetServerInfoResponse:
        """Tell what is served, and what is held now."""
        return info_to_wire(await self._session.info())

    async def _search(self, message: pb.SolveProblemRequest, progress: bool) -> Any:
        call = CALL.get()
        request, violations = await self._session.read(call, message.ByteSize(), partial(request_from_wire, message))
        nodes = progress and message.include_nodes
        return self._session.search(SearchCall(request, message.priority, progress, nodes, violations), call)

    async def _message(self, event: Event, include_nodes: bool) -> pb.SolveProblemStreamResponse | None:
        """Convert an event to a message within the size limit; None for progress that cannot be cut enough."""
        if isinstance(event, Finished) and not include_nodes:
            event = replace(event, result=replace(event.result, nodes=()))
        return await self._session.write(CALL.get(), event, event_to_wire, pb.SolveProblemStreamResponse.ByteSize)


async def _turns(
    opening: pb.ScoreStepsRequest, messages: AsyncIterator[pb.ScoreStepsRequest]
) -> AsyncIterator[SessionTurn]:
    """Messages to a session, the steps of its first one included."""
    yield turn_from_wire(opening)
    async for message in messages:
        if message.HasField("open"):
            raise InvalidRequestError([Violation("open", "is for the first message only")])
        yield turn_from_wire(message)
    # The messages of a call that was cancelled or ran out of time end, too; that it was is told a moment later.
    await asyncio.sleep(_CANCELLATION_SECONDS)
