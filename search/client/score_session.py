"""Sessions of scores over gRPC: steps go to the server one after another, and their scores come back."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Self

import grpc.aio

from espalier.engine.errors import EspalierError, MisuseError
from espalier.search.client.errors import cancelled, typed_error
from espalier.search.result import Finished
from espalier.search.scores import ROOT, NodeScore, OpenNodes, ScoreResult, ScoreSessionRequest, SessionTurn, unscored
from espalier.search.service.grpc_api.convert import event_from_wire, to_wire


class AsyncScoreSession:
    """A session of scores on a server; an asynchronous context manager, which opens and closes it.

    Each step continues a node, 0 for the problem, and gets a node of its own. Its limits are those of
    `ScoreSessionRequest`. Several tasks may use it at a time. Leaving it by an exception ends it on the server at once.

    Attributes:
        result: what the session has cost; None until it has ended.
    """

    def __init__(
        self, open_call: Callable[[], Awaitable[Any]], request: ScoreSessionRequest, endpoint: str, request_id: str
    ) -> None:
        """Create a session; see `AsyncSearchClient.score_session`.

        Args:
            open_call: starts the gRPC call, and waits until the session is open.
            request: what is scored.
            endpoint: the server, for messages.
            request_id: id of the call.
        """
        self.result: ScoreResult | None = None
        self._open_call = open_call
        self._request = request
        self._endpoint = endpoint
        self._request_id = request_id
        self._nodes = OpenNodes()
        self._waiting: dict[int, asyncio.Future[NodeScore]] = {}
        self._writing = asyncio.Lock()  # gRPC takes one message at a time
        self._failed: EspalierError | None = None
        self._call: Any = None
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.close()
        else:
            await self.cancel()

    async def open(self) -> None:
        """Wait until the server has a place for the session; tried again as other calls are.

        Raises:
            InvalidRequestError, ServiceError: see `AsyncSearchClient.score`.
        """
        self._call = await self._open_call()
        self._reading = asyncio.create_task(self._read())

    async def score(self, text: str, parent: int = ROOT) -> NodeScore:
        """Score one step that continues `parent`, by default the problem; see `score_many`."""
        return (await self.score_many([(parent, text)]))[0]

    async def score_many(self, steps: Iterable[tuple[int, str]]) -> list[NodeScore]:
        """Score steps, computed together.

        Args:
            steps: the node that each step continues, 0 for the problem, and the step's text.

        Returns:
            For each step its node and its score, or the reason why it has none.

        Raises:
            InvalidRequestError: a node is unknown or was released, or a text is empty.
            MisuseError: the session is not open.
            ServiceError: it failed.
        """
        turn, loop = self._nodes.turn(steps), asyncio.get_running_loop()
        scores = {step.node: loop.create_future() for step in turn.steps}
        self._waiting |= scores
        try:
            await self._send(turn)
            return list(await asyncio.gather(*scores.values()))
        finally:
            for node in scores:
                self._waiting.pop(node, None)

    async def release(self, *nodes: int) -> None:
        """Release nodes that no further step continues; steps below them stay."""
        await self._send(self._nodes.turn(release=nodes))

    async def close(self) -> ScoreResult:
        """End the session once all its steps are scored, and return what it has cost; closing twice is allowed.

        Raises:
            ServiceError: it failed.
        """
        if self._reading is None:
            raise MisuseError("the session was never opened; use it as a context manager")
        if not self._reading.done():
            async with self._writing:
                await self._call.done_writing()
        await self._reading
        if self.result is None:
            raise self._failed or cancelled(self._request_id)
        return self.result

    async def cancel(self) -> None:
        """End the session at once."""
        if self._reading:
            self._call.cancel()
            await self._reading

    async def _send(self, turn: SessionTurn) -> None:
        if self._reading is None:
            raise MisuseError("the session is not open; use it as a context manager")
        if not self._reading.done():
            async with self._writing:
                try:
                    await self._call.write(to_wire(turn))
                    return
                except (grpc.RpcError, asyncio.InvalidStateError):  # it has ended, which the reader tells
                    pass
        await self._reading
        self._end_waiting()  # steps are told so by their scores
        if self.result and not turn.steps:
            raise MisuseError(f"the session has ended: {self.result.stop_reason}; open a new one")
        if self._failed and not turn.steps:
            raise self._failed

    async def _read(self) -> None:
        """Hand out scores until the call ends."""
        try:
            async for message in self._call:
                event = event_from_wire(message, configuration=self._request)
                if isinstance(event, Finished):
                    self.result = event.result
                elif event is not None:
                    for score in event.scores:
                        self._hand_out(score)
        except (grpc.RpcError, ValueError) as error:
            self._failed = typed_error(error, self._endpoint, self._request_id)
        except asyncio.CancelledError:  # of the call: by `cancel`, or as the client was closed
            self._failed = cancelled(self._request_id)
        finally:
            self._call.cancel()
            self._end_waiting()

    def _hand_out(self, score: NodeScore) -> None:
        future = self._waiting.get(score.node)
        if future and not future.done():
            future.set_result(score)

    def _end_waiting(self) -> None:
        for node, future in self._waiting.items():
            if self.result:
                self._hand_out(unscored(node, self.result.stop_reason))
            elif not future.done():
                future.set_exception(self._failed or cancelled(self._request_id))
