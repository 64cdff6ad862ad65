"""ASGI middleware of every HTTP call: authentication, limits, errors, access log."""

import asyncio
from collections.abc import Awaitable, Callable, Container, Sequence
from contextlib import suppress
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from espalier.search.service.access.callers import Callers
from espalier.search.service.access.calls import REQUEST_ID, Call, recorded, request_id_of
from espalier.search.service.http_api.answers import HttpError, answer_of
from espalier.search.service.http_api.body import Body, ClientGoneError
from espalier.search.service.http_api.listener import CERTIFICATE_NAME
from espalier.search.service.settings import ServerSettings, is_loopback

KSERVE = "/v2"
"""The path below which the KServe protocol is, which tells an error as a text alone."""
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class CallMiddleware:
    """Wraps the application.

    An endpoint finds `call` and `body` in the request's `state`; it is cancelled when its client goes away.
    """

    def __init__(
        self,
        app: ASGIApp,
        callers: Callers,
        settings: ServerSettings,
        routes: Sequence[Route],
        open_paths: Container[str],
        on_end: Callable[[Call], None],
    ) -> None:
        """Create a middleware.

        Args:
            app: what it wraps.
            callers: tells who calls.
            settings: limits, and which pages may call.
            routes: by whose paths the log calls what is called.
            open_paths: that need no login and are not logged.
            on_end: called with each call that is over.
        """
        self._app = app
        self._callers = callers
        self._settings = settings
        self._routes = routes
        self._open_paths = open_paths
        self._on_end = on_end
        # On loopback without logins, whoever reaches the port is trusted; so a web page must not, under a name of its
        # own that resolves to this machine (DNS rebinding).
        local = is_loopback(settings.host) and not callers.login_required
        self._hosts = {"localhost", "127.0.0.1", "::1", settings.host} if local else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call."""
        headers = Headers(scope=scope)
        address, port = scope.get("client") or ("", 0)
        request_id = request_id_of(headers.get(REQUEST_ID))
        call = Call(self._name_of(scope), request_id, headers.get("traceparent"), f"{address}:{port}")
        scope["state"]["call"] = call
        body = Body(receive, headers, self._settings.max_receive_bytes)
        begun = False

        async def respond(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = call.request_id
                headers["x-content-type-options"] = "nosniff"
                headers["referrer-policy"] = "no-referrer"
            await send(message)

        is_open = scope["path"] in self._open_paths
        with recorded(call, None if is_open else self._on_end):
            try:
                if not is_open:
                    self._require_known_origin(headers)
                    name = scope["state"].get(CERTIFICATE_NAME)
                    call.caller = self._callers.identify(headers.get("authorization"), address, name)
                scope["state"]["body"] = await body.read()
                await _while_connected(self._app(scope, _nothing_more, respond), receive)
            except ClientGoneError:
                call.code = "CANCELLED"
            except Exception as error:
                answer = answer_of(error, call, f"{scope['path']}/".startswith(f"{KSERVE}/"))
                if begun:
                    raise  # closes the connection: the client must not take what it has for the whole
                with suppress(ClientGoneError):
                    if not await body.discard():
                        answer.headers["connection"] = "close"
                    await answer(scope, _nothing_more, respond)

    def _name_of(self, scope: Scope) -> str:
        method = scope["method"] if scope["method"] in _METHODS else "other"
        found = (route.path_format for route in self._routes if route.matches(scope)[0] is not Match.NONE)
        return f"{method} {next(found, 'unknown path')}"

    def _require_known_origin(self, headers: Headers) -> None:
        host = headers.get("host", "")
        if self._hosts is not None and _split(f"//{host}").hostname not in self._hosts:
            raise HttpError(403, "this server is called by an address of this machine only, such as localhost")
        origin = headers.get("origin")
        if origin is not None and origin != self._settings.cors_origin and _split(origin).netloc != host:
            raise HttpError(403, "pages of other origins may not call; the server's --cors-origin can allow one")


async def _while_connected(work: Awaitable[None], receive: Receive) -> None:
    """Do `work`, and cancel it when the client goes away.

    Raises:
        ClientGoneError: the client went away.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
    if task.cancelled():
        raise ClientGoneError
    task.result()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _nothing_more() -> Message:
    """Wait for ever: the body is read, and `_while_connected` sees the client leave."""
    return await asyncio.get_running_loop().create_future()


def _split(url: str) -> SplitResult:
    """The parts of a URL; empty ones of what is none."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")
