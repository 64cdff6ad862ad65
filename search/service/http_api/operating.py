"""Endpoints for operators and load balancers: health, server information, metrics."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from espalier.search.service.http_api.body import json_response
from espalier.search.service.session import Session

Render = Callable[[str], tuple[bytes, str]]
"""`Metrics.render` of a server."""


class MetricsEndpoint:
    """`GET /metrics`."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._rendering = asyncio.Lock()

    async def metrics(self, request: Request) -> Response:
        """Tell what was counted, for Prometheus."""
        async with self._rendering:  # one thread at most, as searches need the others
            text, media_type = await asyncio.to_thread(self._render, request.headers.get("accept", ""))
        return Response(text, headers={"content-type": media_type})


class OperatingEndpoints:
    """`GET /healthz`, `/readyz` and `/v1/server`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def healthz(self, request: Request) -> Response:
        """Tell that the process lives."""
        return json_response({"alive": True})

    async def readyz(self, request: Request) -> Response:
        """Tell whether searches are accepted."""
        if self._session.ready:
            return json_response({"ready": True})
        return json_response({"ready": False}, 503, {"retry-after": "5"})

    async def server_info(self, request: Request) -> Response:
        """Tell what is served, and what is held now."""
        return json_response(asdict(await self._session.info()))
