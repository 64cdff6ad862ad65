"""`POST /v1/reload`: other weights for the generator."""

from dataclasses import asdict

from pydantic import BaseModel, StrictStr
from starlette.requests import Request
from starlette.responses import Response

from espalier.search.service.http_api.body import read_json, validated
from espalier.search.service.http_api.status import json_response
from espalier.search.service.session import Session


class ReloadBody(BaseModel, extra="forbid"):
    """The body of `/v1/reload`."""

    path: StrictStr


class ReloadEndpoint:
    """`/v1/reload`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def reload(self, request: Request) -> Response:
        """Have the generator go on with the weights of a checkpoint below the folder of --reload-folder."""
        body = await read_json(request, self._session, lambda values: validated(ReloadBody, values))
        return json_response(asdict(await self._session.reload(request.state.call, body.path)))
