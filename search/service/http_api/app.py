"""The HTTP applications: the routes of the HTTP port, its page and `/openapi.json`, and those of the metrics port."""

import asyncio
import inspect
from collections.abc import Callable, Container, Sequence
from enum import StrEnum
from hashlib import sha256
from typing import Any

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from espalier import __version__
from espalier.search.request import SearchRequest
from espalier.search.schema import declared
from espalier.search.service.access.callers import Callers
from espalier.search.service.access.calls import REQUEST_ID, Call
from espalier.search.service.http_api.answers import HttpError, json_response
from espalier.search.service.http_api.calls import KSERVE, CallMiddleware
from espalier.search.service.http_api.endpoints import OwnEndpoints
from espalier.search.service.http_api.openai.endpoints import OpenAiEndpoints
from espalier.search.service.http_api.scores import ScoreEndpoints
from espalier.search.service.kserve.endpoints import InferenceEndpoints
from espalier.search.service.model_names import ModelNames
from espalier.search.service.observability.metrics import Metrics
from espalier.search.service.page.files import CONTENT_SECURITY_POLICY, PageFile, page_files
from espalier.search.service.session import Session
from espalier.search.service.settings import ServerSettings

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
    return _guarded(routes, callers, session.settings, metrics, session.call_ended, files, {*_HEALTH, *page})


def make_metrics_app(settings: ServerSettings, metrics: Metrics) -> ASGIApp:
    """Return the application of the metrics port: without logins, and calls are not written down."""
    return _guarded([_metrics_route(metrics)], Callers(None), settings, metrics, lambda call: None)


def _guarded(
    routes: Sequence[Route],
    callers: Callers,
    settings: ServerSettings,
    metrics: Metrics,
    on_call_end: Callable[[Call], None],
    unnamed: Sequence[Route] = (),
    open_paths: Container[str] = (),
) -> ASGIApp:
    """An application behind `CallMiddleware`, but for gauges, which gateways ask many times a second."""
    calls = Middleware(
        CallMiddleware,
        callers=callers,
        settings=settings,
        routes=routes,
        open_paths=open_paths,
        on_end=on_call_end,
    )
    cross_origin = Middleware(
        CORSMiddleware,
        allow_origins=[settings.cors_origin or ""],
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=[REQUEST_ID, "retry-after"],
    )
    app = Starlette(
        routes=[*routes, *unnamed],
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
