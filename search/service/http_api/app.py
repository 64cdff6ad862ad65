"""The HTTP applications: the routes of the HTTP port, its page and `/openapi.json`, and those of the metrics port.

And what every call passes: authentication, limits, errors, access log.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Container, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from functools import partial
from hashlib import sha256
from typing import Any
from urllib.parse import SplitResult, urlsplit

from pydantic import BaseModel, StrictStr
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from espalier import __version__
from espalier.engine.roles import GENERATOR
from espalier.search.request import SearchRequest
from espalier.search.result import Event, Finished
from espalier.search.schema import declared, from_values
from espalier.search.service.access.callers import Callers
from espalier.search.service.access.calls import REQUEST_ID, Call, recorded, request_id_of
from espalier.search.service.grpc_api.convert import EVENT_NAMES
from espalier.search.service.http_api.answers import (
    ErrorShape,
    HttpError,
    ServerSentEvent,
    answer,
    answer_of,
    error_as_text,
    json_response,
    to_json,
)
from espalier.search.service.http_api.anthropic.messages import message_error
from espalier.search.service.http_api.body import Body, ClientGoneError, Endpoints, reads, validated
from espalier.search.service.http_api.listener import CERTIFICATE_NAME
from espalier.search.service.http_api.openai.endpoints import OpenAiEndpoints, ScoreEndpoints
from espalier.search.service.kserve.endpoints import InferenceEndpoints
from espalier.search.service.model_names import ModelNames
from espalier.search.service.observability.metrics import Metrics
from espalier.search.service.page.files import CONTENT_SECURITY_POLICY, PageFile, fits_examples, page_files
from espalier.search.service.session import SearchCall, Session
from espalier.search.service.settings import ServerSettings, is_loopback

KSERVE = "/v2"
"""The path below which the KServe protocol is."""
_ERROR_SHAPES: dict[str, ErrorShape] = {KSERVE: error_as_text, "/v1/messages": message_error}
"""Shapes of errors by the paths below which they are told."""
_GAUGES = "/gauges"
_HEALTH = ("/healthz", "/readyz", "/health", f"{KSERVE}/health/live", f"{KSERVE}/health/ready")
"""Paths that need no login and are not logged: load balancers call them all the time."""
_TYPES: dict[type, str] = {int: "integer", float: "number", bool: "boolean", str: "string"}
_OF_GAUGES = {
    "content-type": "text/plain; version=0.0.4; charset=utf-8",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
}


def make_app(session: Session, names: ModelNames, callers: Callers, metrics: Metrics) -> ASGIApp:
    """Return the application of the HTTP port.

    Args:
        session: runs the searches, and is told of each call that is over.
        names: of the models.
        callers: tells who calls.
        metrics: of the server.
    """
    own, openai = OwnEndpoints(session, names), OpenAiEndpoints(session, names)
    scores, kserve = ScoreEndpoints(session, names), InferenceEndpoints(session, names)

    async def openapi(request: Request) -> Response:
        return json_response(document)

    models = [f"{KSERVE}/models/{{model:path}}{version}" for version in ("/versions/{version}", "")]
    routes = [
        Route("/healthz", own.alive),
        Route("/readyz", own.ready),
        Route("/health", own.ready),  # by the name that clients of vLLM wait for
        Route("/v1/models", openai.list_models),
        Route("/v1/models/{model:path}", openai.retrieve_model),
        Route("/v1/chat/completions", openai.create_chat_completion, methods=["POST"]),
        Route("/v1/completions", openai.create_completion, methods=["POST"]),
        Route("/v1/responses", openai.create_response, methods=["POST"]),
        Route("/v1/messages", openai.create_message, methods=["POST"]),
        Route("/v1/messages/count_tokens", openai.count_tokens, methods=["POST"]),
        Route("/v1/score", scores.score, methods=["POST"]),
        Route("/score", scores.score, methods=["POST"]),
        Route("/classify", scores.classify, methods=["POST"]),
        Route("/pooling", scores.pooling, methods=["POST"]),
        Route("/tokenize", openai.tokenize, methods=["POST"]),
        Route("/detokenize", openai.detokenize, methods=["POST"]),
        Route("/tokenizer_info", openai.tokenizer_info),
        Route("/openapi.json", openapi),
        Route("/v1/searches", own.create_search, methods=["POST"]),
        Route("/v1/server", own.server_info),
        Route("/v1/reload", own.reload, methods=["POST"]),
        Route(KSERVE, kserve.server_metadata),
        Route(f"{KSERVE}/health/live", kserve.live),
        Route(f"{KSERVE}/health/ready", kserve.ready),
        *(Route(f"{model}/ready", kserve.model_ready) for model in models),  # with a version and without
        *(Route(f"{model}/infer", kserve.infer, methods=["POST"]) for model in models),
        *(Route(f"{model}/generate", kserve.generate, methods=["POST"]) for model in models),
        *(Route(f"{model}/generate_stream", kserve.generate_stream, methods=["POST"]) for model in models),
        *(Route(model, kserve.model_metadata) for model in models),
        _metrics_route(metrics),
    ]
    document = openapi_document(routes)
    page = page_files(asks_token=session.settings.callers is not None)
    files = [_page_route(path, file) for path, file in page.items()]
    calls = Middleware(CallMiddleware, callers, session.settings, routes, {*_HEALTH, *page}, session.call_ended)
    return _guarded([*routes, *files], calls, session.settings, metrics)


def make_metrics_app(settings: ServerSettings, metrics: Metrics) -> ASGIApp:
    """Return the application of the metrics port: without logins, and calls are not written down."""
    routes = [_metrics_route(metrics)]
    calls = Middleware(CallMiddleware, Callers(None), settings, routes, (), lambda call: None)
    return _guarded(routes, calls, settings, metrics)


def _guarded(routes: Sequence[Route], calls: Middleware, settings: ServerSettings, metrics: Metrics) -> ASGIApp:
    """An application behind `CallMiddleware`, but for gauges, which gateways ask many times a second."""
    cross_origin = Middleware(
        CORSMiddleware,
        allow_origins=[settings.cors_origin or ""],
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=[REQUEST_ID, "retry-after"],
    )
    app = Starlette(
        routes=routes,
        middleware=[cross_origin, calls] if settings.cors_origin else [calls],
        exception_handlers={HTTPException: _refuse},
    )
    app.router.redirect_slashes = False

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == _GAUGES and scope["method"] == "GET":
            await Response(metrics.held.gauges(), headers=_OF_GAUGES)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return serve


def _metrics_route(metrics: Metrics) -> Route:
    rendering = asyncio.Lock()

    async def render(request: Request) -> Response:
        async with rendering:  # one thread at most, as searches need the others
            text, media_type = await asyncio.to_thread(metrics.render, request.headers.get("accept", ""))
        return Response(text, headers={"content-type": media_type})

    return Route("/metrics", render)


def _page_route(path: str, file: PageFile) -> Route:
    """The route of one of the page's files."""
    tag = f'"{sha256(file.content).hexdigest()}"'
    headers = {
        "content-type": file.media_type,
        "content-security-policy": CONTENT_SECURITY_POLICY,
        "etag": tag,
        "cache-control": "no-cache",  # asked for each time, and sent where it has changed
    }

    async def send_file(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers)

    return Route(path, send_file)


async def _refuse(request: Request, error: Exception) -> Response:
    """Turn an error of the router or of the page into one that is answered as any other."""
    assert isinstance(error, HTTPException)
    texts = {404: "there is nothing at this path", 405: "this path does not offer that method"}
    text = texts.get(error.status_code, error.detail)
    code = "not_found" if error.status_code == 404 else None
    raise HttpError(error.status_code, text, code=code, headers=error.headers)


# ---- Espalier's own endpoints: searches with all their events, other weights, what is served


class ReloadBody(BaseModel, extra="forbid"):
    """The body of `/v1/reload`."""

    path: StrictStr


class OwnEndpoints(Endpoints):
    """`/healthz`, `/v1/searches`, `/v1/server` and `/v1/reload`."""

    async def alive(self, request: Request) -> Response:
        """Tell that the process lives."""
        return json_response({"alive": True})

    async def create_search(self, request: Request) -> Response | ASGIApp:
        """Run one search; the events come as they happen, or with `"stream": false` the result at the end."""
        call = request.state.call
        asked = await self._read_json(request, _read_search)

        async def whole(end: Finished) -> bytes | None:
            return await self._session.write(call, end, _result_json, len)

        async def parts(event: Event) -> list[ServerSentEvent]:
            data = await self._session.write(call, event, event_json, len)
            return [] if data is None else [(data, EVENT_NAMES[type(event)])]

        return await answer(call, self._session.search(asked, call), None if asked.progress else whole, parts)

    async def server_info(self, request: Request) -> Response:
        """Tell what is served, which searches run, and what is held now."""
        info, names = await self._session.info(), self._names
        offered = {"searches": names.searches, "default_search": names.default_search, "notice": names.notice}
        examples = fits_examples(info.model_names.get(GENERATOR, ""))
        return json_response({**asdict(info), **offered, "examples": examples})

    @reads(ReloadBody)
    async def reload(self, request: Request) -> Response:
        """Have the generator go on with the weights of a checkpoint below the folder of --reload-folder."""
        body = await self._read_json(request, partial(validated, ReloadBody))
        return json_response(asdict(await self._session.reload(request.state.call, body.path)))


def event_json(event: Event, omitted: dict[str, int]) -> bytes:
    """Return an event as JSON, with the numbers of what it lacks."""
    if isinstance(event, Finished):
        return b'{"search_id":%s,"result":%s}' % (to_json(event.search_id), _result_json(event, omitted))
    return to_json(asdict(event) | omitted)


def _result_json(event: Event, omitted: dict[str, int]) -> bytes:
    assert isinstance(event, Finished)
    values = event.result.to_dict()
    del values["rounds"]  # of use to the process that searched alone
    return to_json(values | omitted)


@dataclass(frozen=True, slots=True)
class _SearchBody(SearchRequest):
    """Fields of a search in a body, the priority of its call, and whether its events come; null for the default."""

    priority: int | None = None
    stream: bool | None = None


def _read_search(values: dict[str, Any]) -> SearchCall:
    body = from_values(_SearchBody, values)
    stream = body.stream is not False
    request = SearchRequest(**{field.name: getattr(body, field.name) for field in fields(SearchRequest)})
    return SearchCall(request, body.priority or 0, progress=stream, report_nodes=stream)


# ---- every call

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


@dataclass
class CallMiddleware:
    """Wraps the application: authentication, limits, errors, access log.

    An endpoint finds `call` and `body` in the request's `state`; it is cancelled when its client goes away.

    Attributes:
        app: what it wraps.
        callers: tells who calls.
        settings: limits, and which pages may call.
        routes: by whose paths the log calls what is called.
        open_paths: that need no login and are not logged.
        on_end: called with each call that is over.
    """

    app: ASGIApp
    callers: Callers
    settings: ServerSettings
    routes: Sequence[Route]
    open_paths: Container[str]
    on_end: Callable[[Call], None]

    def __post_init__(self) -> None:
        # On loopback without logins, whoever reaches the port is trusted; so a web page must not, under a name of its
        # own that resolves to this machine (DNS rebinding).
        local = is_loopback(self.settings.host) and not self.callers.login_required
        self._hosts = {"localhost", "127.0.0.1", "::1", self.settings.host} if local else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call."""
        headers = Headers(scope=scope)
        address, port = scope.get("client") or ("", 0)
        request_id = request_id_of(headers.get(REQUEST_ID))
        call = Call(self._name_of(scope), request_id, headers.get("traceparent"), f"{address}:{port}")
        scope["state"]["call"] = call
        body = Body(receive, headers, self.settings.max_receive_bytes)
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

        is_open = scope["path"] in self.open_paths
        with recorded(call, None if is_open else self.on_end):
            try:
                if not is_open:
                    self._require_known_origin(headers)
                    name = scope["state"].get(CERTIFICATE_NAME)
                    key = headers.get("x-api-key")  # as Anthropic's clients send it
                    login = headers.get("authorization") or (key and f"Bearer {key}")
                    call.caller = self.callers.identify(login, address, name)
                scope["state"]["body"] = await body.read()
                await _while_connected(self.app(scope, _nothing_more, respond), receive)
            except ClientGoneError:
                call.code = "CANCELLED"
            except Exception as error:
                path = f"{scope['path']}/"
                shape = next((shape for start, shape in _ERROR_SHAPES.items() if path.startswith(f"{start}/")), None)
                answer = answer_of(error, call, shape)
                if begun:
                    raise  # closes the connection: the client must not take what it has for the whole
                with suppress(ClientGoneError):
                    if not await body.discard():
                        answer.headers["connection"] = "close"
                    await answer(scope, _nothing_more, respond)

    def _name_of(self, scope: Scope) -> str:
        method = scope["method"] if scope["method"] in _METHODS else "other"
        found = (route.path_format for route in self.routes if route.matches(scope)[0] is not Match.NONE)
        return f"{method} {next(found, 'unknown path')}"

    def _require_known_origin(self, headers: Headers) -> None:
        host = headers.get("host", "")
        if self._hosts is not None and _split(f"//{host}").hostname not in self._hosts:
            raise HttpError(403, "this server is called by an address of this machine only, such as localhost")
        origin = headers.get("origin")
        if origin is not None and origin != self.settings.cors_origin and _split(origin).netloc != host:
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


# ---- /openapi.json


def openapi_document(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the document of `routes`; what an endpoint does is the first line of its docstring."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for route in routes:
        method = "post" if "POST" in (route.methods or ()) else "get"
        operation: dict[str, Any] = {
            "summary": (inspect.getdoc(route.endpoint) or route.path).partition("\n")[0],
            "responses": {"200": {"description": "The answer."}, "default": {"description": "An error object."}},
        }
        if body := _body_of(route, schemas):
            reference = {"$ref": f"#/components/schemas/{body}"}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
        paths[route.path.replace(":path", "")] = {method: operation}
    info = {"title": "Espalier", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _body_of(route: Route, schemas: dict[str, Any]) -> str:
    """The name of the body that an endpoint reads, whose schema goes to `schemas`; empty for none."""
    if route.path == "/v1/searches":
        schemas["SearchRequest"] = _search_schema()
        return "SearchRequest"
    body: type[BaseModel] | None = getattr(route.endpoint, "body", None)
    if body is None:
        return ""
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(schema.pop("$defs", {}))
    schemas[body.__name__] = schema
    return body.__name__


def _search_schema() -> dict[str, Any]:
    """The schema of a search, from the declarations of its fields."""
    properties: dict[str, Any] = {}
    for field in declared(SearchRequest):
        its: dict[str, Any] = {"type": _TYPES.get(field.kind, "array" if field.item else "string")}
        if isinstance(field.kind, type) and issubclass(field.kind, StrEnum):
            its["enum"] = list(field.kind)
        if field.bounds:
            bounds = {"minimum": field.bounds.ge, "exclusiveMinimum": field.bounds.gt, "maximum": field.bounds.le}
            its |= {name: bound for name, bound in bounds.items() if bound is not None}
        if field.option:
            its["description"] = field.option.help
        properties[field.name] = {"anyOf": [its, {"type": "null"}]} if field.optional else its
    return {"type": "object", "properties": properties, "required": ["problem"]}
