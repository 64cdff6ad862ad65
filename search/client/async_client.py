"""The asyncio client of the gRPC service."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self, TypeVar, Unpack, overload

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from espalier.engine.errors import EspalierError, MisuseError
from espalier.search.client import errors
from espalier.search.client.connection import Connection, Tls
from espalier.search.client.score_session import AsyncScoreSession
from espalier.search.request import SearchFields, SearchRequest, make_request, several
from espalier.search.result import Event, SearchResult
from espalier.search.rollout import RolloutRequest, RolloutResult
from espalier.search.schema import from_values
from espalier.search.scores import ScoreRequest, ScoreResult, ScoreSessionRequest, make_score_request
from espalier.search.server_info import Reloaded, ServerInfo
from espalier.search.service.access.calls import REQUEST_ID, request_id_of
from espalier.search.service.grpc_api import convert
from espalier.v1 import search_pb2 as pb
from espalier.v1.search_pb2_grpc import SearchServiceStub

log = logging.getLogger("espalier.client")

T = TypeVar("T")
_SERVICE = pb.DESCRIPTOR.services_by_name["SearchService"].full_name

TIMEOUT = 600.0
"""Seconds to wait for a result where the caller does not say: twice what a server lets a search run."""
INFO_TIMEOUT = 30.0
HEALTH_TIMEOUT = 5.0
_NOTICED = 1.0
"""Seconds from which a wait for the next attempt is logged as INFO, not DEBUG."""
CONCURRENCY = 16
"""Searches of `solve_many` in progress where the caller does not say: half of the least that a server runs."""
OnProgress = Callable[[int, int, SearchResult | EspalierError], None]
"""Called with the number of finished searches, the number of all, and the outcome of the one that just finished."""


class ManyArguments(SearchFields, total=False):
    """Keyword arguments of `solve_many`, but `return_errors`."""

    concurrency: int
    timeout: float | None
    include_nodes: bool
    priority: int
    on_progress: OnProgress | None


class AsyncSearchClient:
    """Sends searches to one server; see `SearchClient` for the one that blocks.

    Create it in a coroutine, and use it on the same event loop. A cancelled task ends its search on the server. Leave
    an iteration early with `contextlib.aclosing`, else its search ends only when the garbage is collected.

    Attributes:
        endpoint: HOST:PORT of the server.
        retry: when failed calls are tried again.

    Example:
        async with AsyncSearchClient("127.0.0.1:50051") as client:
            print((await client.solve("What is 6 * 7?", beam_width=4, expansion=4)).answer)
    """

    def __init__(
        self,
        endpoint: str,
        *,
        token: str | None = None,
        tls: Tls | bool = False,
        insecure_token: bool = False,
        retry: errors.RetryPolicy = errors.DEFAULT_RETRIES,
    ) -> None:
        """Create a client; it connects on the first call.

        Args:
            endpoint: the server, HOST:PORT.
            token: login, as `espalier token` prints it; None for none, or for one by certificate.
            tls: which certificates to trust and to show. True trusts those that the system trusts; False does without
                encryption.
            insecure_token: send `token` to another machine even without encryption.
            retry: when to try a failed call again; `NO_RETRIES` for never.

        Raises:
            ConnectionSettingsError: an argument cannot be used, or `token` would be readable on its way.
        """
        connection = Connection(endpoint, token, Tls() if tls is True else tls or None, insecure_token)
        self.endpoint = endpoint
        self.retry = retry
        self._login = connection.login
        self._process = os.getpid()
        self._closing = asyncio.Event()
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            raise MisuseError("an AsyncSearchClient is created in a coroutine; elsewhere use SearchClient") from None
        if connection.tls is None:
            self._channel = grpc.aio.insecure_channel(endpoint, connection.options)
        else:
            self._channel = grpc.aio.secure_channel(endpoint, connection.tls.credentials(), connection.options)
        self._stub: Any = SearchServiceStub(self._channel)  # pyright: ignore[reportArgumentType] - takes both kinds
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def require_usable(self) -> None:
        """Raise if no call is possible.

        Raises:
            MisuseError: the client is closed, or this process is a fork of the one that created it.
        """
        if self._closing.is_set():
            raise MisuseError("the client is closed; create a new one")
        if os.getpid() != self._process:  # gRPC's threads do not survive a fork: a call would wait for ever
            raise MisuseError("the client was created before this process was forked; create one in each process")

    async def close(self) -> None:
        """Cancel the searches in progress and close the connection; closing twice is allowed."""
        self._closing.set()
        await self._channel.close()

    async def solve(
        self,
        request: SearchRequest | str,
        timeout: float | None = TIMEOUT,
        include_nodes: bool = False,
        priority: int = 0,
        *,
        request_id: str | None = None,
        **fields: Unpack[SearchFields],
    ) -> SearchResult:
        """Run one search and wait for its result.

        Args:
            request: the problem and how to search it, or the problem's text.
            timeout: seconds to wait for the result in all, retries included, after which the server cancels the
                search; None waits without limit.
            include_nodes: whether the result includes the search tree.
            priority: in [-100, 100]; the server runs searches of a larger priority first.
            request_id: the caller's id of the call, for the server's log; None makes one.
            **fields: fields of `SearchRequest`, such as `algorithm="dvts", beam_width=4, seed=7`.

        Raises:
            InvalidRequestError: a field breaks a rule or a limit of the server; lists every such field.
            ServiceError: the call failed for any other reason.
        """
        message = _solve_message(request, fields, include_nodes, priority)
        return await _only(self._responses(self._stub.SolveProblem, message, _result_of, timeout, request_id))

    def solve_stream(
        self,
        request: SearchRequest | str,
        timeout: float | None = TIMEOUT,
        include_nodes: bool = False,
        priority: int = 0,
        *,
        request_id: str | None = None,
        **fields: Unpack[SearchFields],
    ) -> AsyncGenerator[Event, None]:
        """Run one search and yield its events as they arrive: `Started` first, `Finished` last.

        Closing the iterator cancels the search. It is tried again only as long as it has yielded nothing. Takes the
        arguments of `solve`, and raises its errors, those of the server during iteration.
        """
        message = pb.SolveProblemStreamRequest(request=_solve_message(request, fields, include_nodes, priority))
        method = self._stub.SolveProblemStream
        return self._responses(method, message, convert.event_from_wire, timeout, request_id)

    @overload
    async def solve_many(
        self,
        requests: Iterable[SearchRequest | str],
        *,
        return_errors: Literal[False] = ...,
        **arguments: Unpack[ManyArguments],
    ) -> list[SearchResult]: ...

    @overload
    async def solve_many(
        self, requests: Iterable[SearchRequest | str], *, return_errors: bool, **arguments: Unpack[ManyArguments]
    ) -> list[SearchResult | EspalierError]: ...

    async def solve_many(
        self,
        requests: Iterable[SearchRequest | str],
        *,
        concurrency: int = CONCURRENCY,
        timeout: float | None = TIMEOUT,
        include_nodes: bool = False,
        priority: int = 0,
        return_errors: bool = False,
        on_progress: OnProgress | None = None,
        **fields: Unpack[SearchFields],
    ) -> Any:
        """Run many searches, several at a time.

        Args:
            requests: requests, or problems' texts.
            concurrency: searches in progress at once.
            timeout: of each search, from its own start; see `solve`.
            include_nodes: see `solve`.
            priority: see `solve`.
            return_errors: whether a failed search has its error in the place of its result, and the others go on.
                Else the first error cancels the others and is raised.
            on_progress: called when a search finishes, by `SearchClient` on the thread that waits.
            **fields: fields of `SearchRequest`, applied to all.

        Returns:
            The results, in the order of `requests`.

        Raises:
            MisuseError: `concurrency` is below 1.
            TypeError: `requests` is a single problem, or holds what is none.
            InvalidRequestError, ServiceError: see `solve`. Nothing has started if a request cannot even be sent.
        """
        if concurrency < 1:
            raise MisuseError(f"concurrency must be at least 1, is {concurrency}")
        messages = [_solve_message(request, fields, include_nodes, priority) for request in several(requests)]
        slots = asyncio.Semaphore(concurrency)
        done = 0

        async def one(message: pb.SolveProblemRequest) -> SearchResult | EspalierError:
            nonlocal done
            async with slots:
                try:
                    outcome = await _only(self._responses(self._stub.SolveProblem, message, _result_of, timeout))
                except EspalierError as error:
                    if not return_errors:
                        raise
                    outcome = error
            done += 1
            if on_progress:
                on_progress(done, len(messages), outcome)
            return outcome

        searches = [asyncio.create_task(one(message)) for message in messages]
        try:
            return await asyncio.gather(*searches)
        finally:
            for search in searches:
                search.cancel()
            await asyncio.gather(*searches, return_exceptions=True)

    async def score(
        self,
        request: ScoreRequest | str,
        steps: Iterable[str] | Iterable[Iterable[str]] = (),
        timeout: float | None = TIMEOUT,
        priority: int = 0,
        *,
        request_id: str | None = None,
    ) -> ScoreResult:
        """Score the steps of given solutions.

        Args:
            request: the problem, the solutions and how to score them, or the problem's text.
            steps: the steps of one solution or of several, unless `request` has them.
            timeout: as of `solve`.
            priority: as of `solve`.
            request_id: as of `solve`.

        Raises:
            InvalidRequestError: a field breaks a rule or a limit of the server, or it has no verifier that scores
                given texts; lists every such field.
            ServiceError: the call failed for any other reason.
        """
        request = make_score_request(request, steps)
        message = convert.request_to_wire(request, pb.ScoreSolutionRequest, priority=priority)
        read = partial(convert.from_wire, configuration=request)
        return await _only(self._responses(self._stub.ScoreSolution, message, read, timeout, request_id))

    async def rollout(
        self,
        request: RolloutRequest | str,
        timeout: float | None = TIMEOUT,
        priority: int = 0,
        *,
        request_id: str | None = None,
        **fields: Any,
    ) -> RolloutResult:
        """Sample solutions of a problem as one tree of steps, with tokens, log-probabilities and values.

        Args:
            request: the problem and what to sample, or the problem's text.
            timeout: as of `solve`.
            priority: as of `solve`.
            request_id: as of `solve`.
            **fields: fields of `RolloutRequest`, such as `solutions=32, golds=("73",)`, for a problem's text.

        Raises:
            InvalidRequestError: a field breaks a rule or a limit of the server; lists every such field.
            ServiceError: the call failed for any other reason.
        """
        if isinstance(request, str):
            golds = tuple(fields.pop("golds", ()))
            request = replace(from_values(RolloutRequest, {"problem": request, **fields}), golds=golds)
        message = convert.request_to_wire(request, pb.RolloutRequest, priority=priority)
        responses = self._responses(self._stub.Rollout, message, lambda response: response, timeout, request_id)
        return convert.rollout_from_wire([each async for each in responses], request)

    def score_session(
        self,
        request: ScoreSessionRequest | str,
        timeout: float | None = TIMEOUT,
        priority: int = 0,
        *,
        request_id: str | None = None,
        **fields: Any,
    ) -> AsyncScoreSession:
        """Return a session, to which steps come one after another; it is open within `async with`.

        Args:
            request: the problem and the session's limits, or the problem's text.
            timeout: seconds for the whole session, after which the server ends it; None for no limit.
            priority: as of `solve`.
            request_id: as of `solve`.
            **fields: fields of `ScoreSessionRequest`, such as `max_nodes=1024`, for a problem's text.

        Raises:
            InvalidRequestError: a field is unknown, or its value cannot be sent; the server checks the rest.
        """
        if isinstance(request, str):
            request = from_values(ScoreSessionRequest, {"problem": request, **fields})
        opening = convert.request_to_wire(request, pb.ScoreSession, priority=priority)
        used, message = _request_id_to_send(request_id), pb.ScoreStepsRequest(open=opening)
        return AsyncScoreSession(partial(self._open_session, message, timeout, used), request, self.endpoint, used)

    async def _open_session(self, message: pb.ScoreStepsRequest, timeout: float | None, request_id: str) -> Any:
        """Start the call of a session, and wait until the server says that it is open."""
        attempts = errors.Attempts(self.retry, timeout)

        def begin(message: pb.ScoreStepsRequest, **options: Any) -> Any:
            return self._stub.ScoreSteps(**options)

        while True:
            call = self._start(begin, message, attempts, request_id)
            try:
                with suppress(asyncio.InvalidStateError):  # it was refused before it was read
                    await call.write(message)
                if convert.SESSION_OPEN not in (*await call.initial_metadata(),):
                    await call.read()  # raises what the server has refused it for
                return call
            except grpc.RpcError as error:
                failed = errors.typed_error(error, self.endpoint, request_id)
            except BaseException:
                call.cancel()
                self._require_own_end(request_id)
                raise
            await self._wait_after(attempts, failed)

    async def server_info(self, timeout: float | None = INFO_TIMEOUT) -> ServerInfo:
        """Return what the server serves, and what it holds now; raises `ServiceError` as `solve` does."""
        message = pb.GetServerInfoRequest()
        return await _only(self._responses(self._stub.GetServerInfo, message, convert.info_from_wire, timeout))

    async def reload(self, path: str, timeout: float | None = TIMEOUT) -> Reloaded:
        """Have the server's generator go on with other weights; searches meanwhile go on.

        Args:
            path: of the checkpoint, below the server's `--reload-folder`.
            timeout: as of `solve`. The server goes on when it ends.

        Raises:
            InvalidRequestError: there is no such checkpoint, or it differs from the generator in more than its weights.
            ServiceError: the call failed for any other reason.
        """
        return await _only(self._responses(self._stub.Reload, pb.ReloadRequest(path=path), convert.from_wire, timeout))

    async def health(self, timeout: float | None = HEALTH_TIMEOUT) -> bool:
        """Return whether the server accepts searches: it does not while it loads or drains. Asks once.

        Raises:
            ServiceError: it cannot be reached.
        """
        message = health_pb2.HealthCheckRequest(service=_SERVICE)
        answers = self._responses(self._health.Check, message, lambda each: each, timeout, policy=errors.NO_RETRIES)
        return (await _only(answers)).status == health_pb2.HealthCheckResponse.SERVING

    async def _responses(
        self,
        method: Any,
        message: Any,
        read: Callable[[Any], T | None],
        timeout: float | None,
        request_id: str | None = None,
        policy: errors.RetryPolicy | None = None,
    ) -> AsyncGenerator[T, None]:
        """The responses of a call, but those that `read` makes nothing of; tries again while there was none."""
        request_id = _request_id_to_send(request_id)
        attempts = errors.Attempts(policy or self.retry, timeout)
        begun = False
        while True:
            call = self._start(method, message, attempts, request_id)
            try:
                async for response in _each_response(call):
                    if (value := read(response)) is not None:
                        begun = True
                        yield value
                return
            except (grpc.RpcError, ValueError) as error:
                failed = errors.typed_error(error, self.endpoint, request_id)
            except asyncio.CancelledError:
                self._require_own_end(request_id)
                raise
            finally:
                call.cancel()
            if begun:
                raise failed
            await self._wait_after(attempts, failed)

    def _start(self, method: Callable[..., Any], message: Any, attempts: errors.Attempts, request_id: str) -> Any:
        self.require_usable()
        if asyncio.get_running_loop() is not self._loop:
            raise MisuseError("the client was created on another event loop; create one on each")
        metadata = (*self._login, (REQUEST_ID, request_id))
        return method(message, timeout=attempts.left(), metadata=metadata)

    def _require_own_end(self, request_id: str) -> None:
        """Raise unless it is this task that was cancelled: gRPC raises the same when a closed client ends a call.

        Raises:
            ServiceError: CANCELLED.
        """
        task = asyncio.current_task()
        if self._closing.is_set() and task is not None and not task.cancelling():
            raise errors.cancelled(request_id) from None

    async def _wait_after(self, attempts: errors.Attempts, error: EspalierError) -> None:
        """Wait for the next attempt of a call that failed.

        Raises:
            EspalierError: `error`, if there is no next attempt.
            ServiceError: CANCELLED, as soon as the client is closed.
        """
        delay = attempts.delay_after(error)
        level = logging.INFO if delay >= _NOTICED else logging.DEBUG
        log.log(level, "%s; attempt %d of %d in %.1f s", error, attempts.failed + 1, self.retry.attempts, delay)
        try:
            async with asyncio.timeout(delay):
                await self._closing.wait()
        except TimeoutError:
            return
        raise errors.cancelled()


async def _only(values: AsyncIterator[T]) -> T:
    (value,) = [each async for each in values]
    return value


async def _each_response(call: Any) -> AsyncIterator[Any]:
    if isinstance(call, grpc.aio.UnaryUnaryCall):
        yield await call
        return
    async for response in call:
        yield response


def _solve_message(
    request: SearchRequest | str, fields: SearchFields, include_nodes: bool, priority: int
) -> pb.SolveProblemRequest:
    """The message of a search.

    Raises:
        TypeError: `request` is neither a text nor a request.
        InvalidRequestError: a field is unknown, or its value cannot be sent; the server checks the rest.
    """
    if fields or not isinstance(request, SearchRequest):  # a whole one is checked by the server, with its limits
        request = make_request(request, fields)
    return convert.request_to_wire(request, include_nodes=include_nodes, priority=priority)


def _result_of(response: pb.SolveProblemResponse) -> SearchResult:
    return convert.from_wire(response.result)


def _request_id_to_send(given: str | None) -> str:
    """The id of a call: the caller's, or a new one.

    Raises:
        ConnectionSettingsError: the caller's is not printable ASCII without spaces, of at most 128 characters.
    """
    used = request_id_of(given)
    if given is not None and used != given:
        rule = "a request id must be printable ASCII without spaces, at most 128 characters"
        raise errors.ConnectionSettingsError(rule)
    return used
