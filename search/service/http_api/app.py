"""The HTTP applications: the routes of the HTTP port with the page, and the one of the metrics port."""

import asyncio
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict
from hashlib import sha256

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from espalier.engine.roles import GENERATOR
from espalier.search.service.access.callers import Callers
from espalier.search.service.access.calls import REQUEST_ID, Call
from espalier.search.service.http_api.calls import CallMiddleware
from espalier.search.service.http_api.openai.endpoints import OpenAiEndpoints
from espalier.search.service.http_api.openai.tokens import TokenEndpoints
from espalier.search.service.http_api.openapi import openapi_document
from espalier.search.service.http_api.reload import ReloadEndpoint
from espalier.search.service.http_api.scores import ScoreEndpoints
from espalier.search.service.http_api.searches import SearchEndpoints
from espalier.search.service.http_api.status import HttpError, json_response
from espalier.search.service.kserve.endpoints import InferenceEndpoints
from espalier.search.service.model_names import ModelNames
from espalier.search.service.observability.gauges import CONTENT_TYPE
from espalier.search.service.page.files import CONTENT_SECURITY_POLICY, PageFile, fits_examples, page_files
from espalier.search.service.session import Session
from espalier.search.service.settings import ServerSettings

_KSERVE = "/v2"
_GAUGES = "/gauges"
_HEALTH = ("/healthz", "/readyz", "/health", f"{_KSERVE}/health/live", f"{_KSERVE}/health/ready")
"""Paths that need no login and are not logged: load balancers call them all the time."""
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
Render = Callable[[str], tuple[bytes, str]]
"""`Metrics.render` of a server."""


def make_app(
    session: Session,
    names: ModelNames,
    callers: Callers,
    settings: ServerSettings,
    render_metrics: Render,
    render_gauges: Callable[[], bytes],
) -> ASGIApp:
    """Return the application of the HTTP port.

    Args:
        session: runs the searches, and is told of each call that is over.
        names: of the models.
        callers: tells who calls.
        settings: limits.
        render_metrics: makes the metrics' text.
        render_gauges: makes the gauges' text, at once.
    """
    openai, tokens = OpenAiEndpoints(session, names), TokenEndpoints(session, names)
    searches, scores = SearchEndpoints(session), ScoreEndpoints(session, names)
    inference = InferenceEndpoints(session, names)

    async def healthz(request: Request) -> Response:
        return json_response({"alive": True})

    async def readyz(request: Request) -> Response:
        if session.ready:
            return json_response({"ready": True})
        return json_response({"ready": False}, 503, {"retry-after": "5"})

    async def server_info(request: Request) -> Response:
        """Tell what is served, which searches run, and what is held now."""
        info = await session.info()
        offered = {"searches": names.searches, "default_search": names.default_search, "notice": names.notice}
        examples = fits_examples(info.model_names.get(GENERATOR, ""))
        return json_response({**asdict(info), **offered, "examples": examples})

    async def openapi(request: Request) -> Response:
        return json_response(document)

    routes = [
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/health", readyz),  # by the name that clients of vLLM wait for
        Route("/v1/models", openai.list_models),
        Route("/v1/models/{model:path}", openai.retrieve_model),
        Route("/v1/chat/completions", openai.create_chat_completion, methods=["POST"]),
        Route("/v1/completions", openai.create_completion, methods=["POST"]),
        Route("/v1/responses", openai.create_response, methods=["POST"]),
        Route("/v1/score", scores.score, methods=["POST"]),
        Route("/score", scores.score, methods=["POST"]),
        Route("/classify", scores.classify, methods=["POST"]),
        Route("/pooling", scores.pooling, methods=["POST"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokens.info),
        Route("/openapi.json", openapi),
        Route("/v1/searches", searches.create_search, methods=["POST"]),
        Route("/v1/server", server_info),
        Route("/v1/reload", ReloadEndpoint(session).reload, methods=["POST"]),
        *_inference_routes(inference),
        _metrics_route(render_metrics),
    ]
    document = openapi_document(routes)
    page = page_files(asks_token=settings.callers is not None)
    own = [_page_route(path, file) for path, file in page.items()]
    app = _guarded(routes, callers, settings, session.call_ended, own, {*_HEALTH, *page})
    return _with_gauges(app, render_gauges)


def _inference_routes(its: InferenceEndpoints) -> list[Route]:
    """The routes of the KServe protocol; each model's with its version and without."""
    models = [f"{_KSERVE}/models/{{model:path}}{version}" for version in ("/versions/{version}", "")]
    return [
        Route(_KSERVE, its.server_metadata),
        Route(f"{_KSERVE}/health/live", its.live),
        Route(f"{_KSERVE}/health/ready", its.ready),
        *(Route(f"{model}/ready", its.model_ready) for model in models),
        *(Route(f"{model}/infer", its.infer, methods=["POST"]) for model in models),
        *(Route(f"{model}/generate", its.generate, methods=["POST"]) for model in models),
        *(Route(f"{model}/generate_stream", its.generate_stream, methods=["POST"]) for model in models),
        *(Route(model, its.model_metadata) for model in models),
    ]


def make_metrics_app(settings: ServerSettings, render_metrics: Render, render_gauges: Callable[[], bytes]) -> ASGIApp:
    """Return the application of the metrics port: without logins, and calls are not written down.

    Args:
        settings: of that port.
        render_metrics: makes the metrics' text.
        render_gauges: makes the gauges' text, at once.
    """
    app = _guarded([_metrics_route(render_metrics)], Callers(None), settings, lambda call: None)
    return _with_gauges(app, render_gauges)


def _guarded(
    routes: Sequence[Route],
    callers: Callers,
    settings: ServerSettings,
    on_call_end: Callable[[Call], None],
    unnamed: Sequence[Route] = (),
    open_paths: Container[str] = (),
) -> ASGIApp:
    """An application whose calls pass `CallMiddleware`; it knows the names of `routes` alone."""

    def name_of(scope: Scope) -> str:
        method = scope["method"] if scope["method"] in _METHODS else "other"
        found = (route.path_format for route in routes if route.matches(scope)[0] is not Match.NONE)
        return f"{method} {next(found, 'unknown path')}"

    calls = Middleware(
        CallMiddleware,
        callers=callers,
        settings=settings,
        is_open=lambda scope: scope["path"] in open_paths,
        name_of=name_of,
        on_end=on_call_end,
        errors_as_text=lambda scope: f"{scope['path']}/".startswith(f"{_KSERVE}/"),
    )
    origins = [settings.cors_origin] if settings.cors_origin else []
    cross_origin = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=[REQUEST_ID, "retry-after"],
    )
    app = Starlette(
        routes=[*routes, *unnamed],
        middleware=[cross_origin, calls] if origins else [calls],
        exception_handlers={HTTPException: _refuse},
    )
    app.router.redirect_slashes = False
    return app


def _metrics_route(render: Render) -> Route:
    rendering = asyncio.Lock()

    async def metrics(request: Request) -> Response:
        async with rendering:  # one thread at most, as searches need the others
            text, media_type = await asyncio.to_thread(render, request.headers.get("accept", ""))
        return Response(text, headers={"content-type": media_type})

    return Route("/metrics", metrics)


def _with_gauges(app: ASGIApp, render: Callable[[], bytes]) -> ASGIApp:
    """`app` with gauges ahead of all that calls pass, as gateways ask many times a second: it takes half the time."""
    about = {"content-type": CONTENT_TYPE, "cache-control": "no-store", "x-content-type-options": "nosniff"}
    headers = [(name.encode(), value.encode()) for name, value in about.items()]

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != _GAUGES or scope["method"] != "GET":
            await app(scope, receive, send)
            return
        text = render()
        length = (b"content-length", str(len(text)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, length]})
        await send({"type": "http.response.body", "body": text})

    return serve


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
