"""What operators and load balancers ask a server: whether it is well, what it holds, what it has counted."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import Response

from espalier.search.service.http_api.body import json_response
from espalier.search.service.session import Session


class OperatingEndpoints:
    """`GET /healthz`, `/readyz`, `/v1/server` and `/metrics`."""

    def __init__(self, session: Session, render_metrics: Callable[[str], tuple[bytes, str]]) -> None:
        """Create the endpoints.

        Args:
            session: what is asked about.
            render_metrics: see `Metrics.render`.
        """
        self._session = session
        self._render_metrics = render_metrics
        self._rendering = asyncio.Lock()

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

    async def metrics(self, request: Request) -> Response:
        """Tell what was counted, for Prometheus."""
        async with self._rendering:  # one thread at most, as searches need the others
            text, media_type = await asyncio.to_thread(self._render_metrics, request.headers.get("accept", ""))
        return Response(text, headers={"content-type": media_type})
