"""Bodies of requests, read in bounded memory and time, JSON, and the base of the endpoints that read them."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from espalier.engine.errors import InvalidRequestError, Violation, nearest, rule_of
from espalier.search.schema import few
from espalier.search.service.http_api.answers import HttpError, json_response
from espalier.search.service.model_names import ModelNames
from espalier.search.service.session import Session

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

_SECONDS = 30.0
"""Time in which a body must have arrived."""
_DEPTH = 32
"""Deepest nesting of JSON that is read."""
_NO_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[^][{}"]++', re.DOTALL)
"""Strings, and what is neither a string nor a bracket; never tried twice, so the time is linear."""
_BRACKETS = {"[": 1, "{": 1, "]": -1, "}": -1}
_RULES = {
    "Input should": "must",
    "List should": "must",
    "Field required": "is missing",
    "Extra inputs are not permitted": "is unknown",
}
"""Pydantic's words, and those for a caller."""


class ClientGoneError(Exception):
    """The client closed the connection."""


class Body:
    """The body of one request."""

    def __init__(self, receive: Receive, headers: Headers, limit: int) -> None:
        """Create a body.

        Args:
            receive: where it comes from.
            headers: of the request.
            limit: most bytes that are kept.
        """
        self._receive = receive
        self._headers = headers
        self._limit = limit
        self._size = 0
        self._ended = False

    async def read(self) -> bytes:
        """Return the whole body.

        Raises:
            HttpError: it is too large, or did not arrive in time.
            ClientGoneError: the client is gone.
        """
        kept = bytearray()
        if self._announced <= self._limit:
            try:
                async with asyncio.timeout(_SECONDS):
                    while not self._ended and self._size <= self._limit:
                        kept += await self._next()
            except TimeoutError:
                raise HttpError(408, f"the body did not arrive within {_SECONDS:g} s") from None
        if max(self._announced, self._size) > self._limit:
            raise HttpError(413, f"the body is larger than {self._limit} bytes", code="request_too_large")
        return bytes(kept)

    async def discard(self) -> bool:
        """Read what is left and forget it; returns whether the body has ended.

        A client that is still sending may not see an answer before which the connection is closed. Gives up on a body
        far over the limit or late, and on one that the client holds back until it is asked for it.
        """
        if self._announced > 4 * self._limit or "expect" in self._headers:
            return self._ended
        try:
            async with asyncio.timeout(_SECONDS / 10):
                while not self._ended and self._size <= 4 * self._limit:
                    await self._next()
        except TimeoutError:
            pass
        return self._ended

    @property
    def _announced(self) -> int:
        length = self._headers.get("content-length", "")
        return int(length) if length.isascii() and length.isdigit() and len(length) < 20 else 0

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunk = message.get("body", b"")
        self._size += len(chunk)
        self._ended = not message.get("more_body", False)
        return chunk


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object as `parse_json` does.

    Raises:
        HttpError: it is none.
    """
    value = parse_json(raw)
    if not isinstance(value, dict):
        raise HttpError(400, "the body must be a JSON object")
    return value


def parse_json(raw: bytes) -> Any:
    """Parse JSON strictly: no duplicate keys, no NaN or infinity, no deep nesting.

    Raises:
        HttpError: it is not JSON of that kind.
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise HttpError(400, f"the body is not UTF-8: byte {error.start} is wrong") from None
    if text.count("[") + text.count("{") > _DEPTH:
        depth = max(accumulate(_BRACKETS[c] for c in _NO_BRACKETS.sub("", text)), default=0)
        if depth > _DEPTH:
            raise HttpError(400, f"the body nests JSON more than {_DEPTH} levels deep")
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except ValueError as error:
        raise HttpError(400, f"the body is not JSON: {error}") from None


def validated(kind: type[M], values: dict[str, Any]) -> M:
    """Return a body as a pydantic model.

    Raises:
        InvalidRequestError: lists what is wrong, at most a few of them.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        wrong = error.errors(include_url=False)
        raise InvalidRequestError(few([Violation(_place(each["loc"]), _rule(each)) for each in wrong])) from None


def _place(location: tuple[int | str, ...]) -> str:
    """A path of pydantic's as one writes it: `messages[0].role`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def _rule(error: Any) -> str:
    message = rule_of(error["msg"])
    for theirs, ours in _RULES.items():
        message = message.replace(theirs, ours)
    known = re.findall(r"'([^']+)'", str(error.get("ctx", {}).get("expected", "")))  # of a text out of a few
    return message + (nearest(error["input"], known) if known and isinstance(error["input"], str) else "")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{twice[:80]!r} is given twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


# ---- endpoints


def reads(body: type[BaseModel]) -> Callable[[T], T]:
    """Say of an endpoint that it reads such a body, for `/openapi.json`."""

    def mark(endpoint: Any) -> Any:
        endpoint.body = body
        return endpoint

    return mark


class Endpoints:
    """Endpoints of one kind."""

    def __init__(self, session: Session, names: ModelNames) -> None:
        """Create them; `session` does what is asked for, and `names` are the models'."""
        self._session = session
        self._names = names

    async def _read_json(self, request: Request, read: Callable[[dict[str, Any]], T]) -> T:
        """Return what `read` makes of the JSON object that is a request's body; see `Session.read`.

        Raises:
            HttpError: it is none, or is not said to be one.
            Exception: what `read` raises.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HttpError(415, f"send `content-type: application/json`, not {kind[:80]!r}")
        return await self._read_body(request, lambda raw: read(parse_object(raw)))

    async def _read_body(self, request: Request, read: Callable[[bytes], T]) -> T:
        """Return what `read` makes of a request's body, whatever it is said to be; see `Session.read`.

        Raises:
            HttpError: it is compressed.
            Exception: what `read` raises.
        """
        if request.headers.get("content-encoding", "identity") != "identity":
            raise HttpError(415, "compressed bodies are not read")
        raw: bytes = request.state.body
        return await self._session.read(request.state.call, len(raw), partial(read, raw))

    async def ready(self, request: Request) -> Response:
        """Tell whether searches are accepted."""
        if self._session.ready:
            return json_response({"ready": True})
        return json_response({"ready": False}, 503, {"retry-after": "5"})
