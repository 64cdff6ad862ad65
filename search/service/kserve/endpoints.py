"""`/v2`: the protocol over HTTP with JSON and binary tensors, and its extension that generates text."""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, Field, StrictStr
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.result import Event, Finished, SearchResult
from espalier.search.schema import unknown_names
from espalier.search.service.http_api.answers import (
    HttpError,
    ServerSentEvent,
    answer,
    error_as_text,
    json_response,
    to_json,
)
from espalier.search.service.http_api.body import Endpoints, parse_object, reads, validated
from espalier.search.service.kserve import inference
from espalier.search.service.kserve.inference import BYTES, OUTPUTS, TEXT_INPUT, InferRequest, InputTensor
from espalier.search.service.session import SearchCall

JSON_LENGTH = "inference-header-content-length"
"""Header with the bytes of JSON before the binary tensors."""


class _Input(BaseModel, extra="allow"):
    name: StrictStr
    datatype: StrictStr
    shape: Annotated[list[Any], Field(max_length=8)]
    data: Any = None
    parameters: dict[str, Any] | None = None


class _Output(BaseModel, extra="allow"):
    name: StrictStr
    parameters: dict[str, Any] | None = None


class InferBody(BaseModel, extra="allow"):
    """Tensors, as the protocol has them."""

    id: StrictStr | None = None
    inputs: Annotated[list[_Input], Field(min_length=1, max_length=8)]
    outputs: Annotated[list[_Output], Field(max_length=8)] | None = None
    parameters: dict[str, Any] | None = None


class GenerateBody(BaseModel, extra="allow"):
    """A text, and how to search; as the generate extension has them."""

    id: StrictStr | None = None
    text_input: StrictStr
    parameters: dict[str, Any] | None = None


_Read = Callable[[InferRequest, bytes, Request], None]
"""Reads a body into a request."""


class InferenceEndpoints(Endpoints):
    """`/v2`, `/v2/health`, `/v2/models/MODEL` and below."""

    async def live(self, request: Request) -> Response:
        """Tell that the process lives."""
        return json_response({"live": True})

    async def server_metadata(self, request: Request) -> Response:
        """Tell what serves."""
        return json_response(inference.SERVER)

    async def model_ready(self, request: Request) -> Response:
        """Tell whether a model's searches are accepted."""
        inference.model_metadata(self._names, *_named(request))
        return await self.ready(request)

    async def model_metadata(self, request: Request) -> Response:
        """Describe the tensors of a model."""
        return json_response(inference.model_metadata(self._names, *_named(request)))

    @reads(InferBody)
    async def infer(self, request: Request) -> Response:
        """Search the problem of an input tensor."""
        asked, result = await self._result(request, _read_infer)
        return _infer_response(asked, result)

    @reads(GenerateBody)
    async def generate(self, request: Request) -> Response:
        """Search a problem given as text."""
        asked, result = await self._result(request, _read_generate)
        return json_response({**_head(asked, result), **asked.tensors(result)})

    @reads(GenerateBody)
    async def generate_stream(self, request: Request) -> ASGIApp | Response:
        """Search a problem given as text; the answer's steps come as server-sent events."""
        asked, search = await self._read(request, _read_generate, stream=True)

        async def parts(event: Event) -> list[ServerSentEvent]:
            result = event.result if isinstance(event, Finished) else None
            return [(to_json({**_head(asked, result), **part}), None) for part in asked.parts(result)] if result else []

        call = request.state.call
        return await answer(call, self._session.search(search, call), None, parts, error_as_text, None)

    async def _result(self, request: Request, read: _Read) -> tuple[InferRequest, SearchResult]:
        asked, search = await self._read(request, read)
        return asked, (await self._session.finish(search, request.state.call)).result

    async def _read(self, request: Request, read: _Read, stream: bool = False) -> tuple[InferRequest, SearchCall]:
        most = self._session.max_priority(request.state.call.caller)
        asked = InferRequest(*_named(request), stream=stream)

        def reading(raw: bytes) -> SearchCall:
            read(asked, raw, request)
            return asked.read(self._names, most)

        return asked, await self._read_body(request, reading)


def _named(request: Request) -> tuple[str, str]:
    """Name and version of the model in a path."""
    return request.path_params["model"], request.path_params.get("version", "")


def _read_generate(asked: InferRequest, raw: bytes, _: Request) -> None:
    body = validated(GenerateBody, parse_object(raw))
    asked.found += _unknown(body, "is unknown; put it into `parameters`")
    asked.id, asked.inputs = body.id or "", [InputTensor(TEXT_INPUT, BYTES, [1], [body.text_input])]
    asked.parameters = {"stream": asked.stream, **(body.parameters or {})}


def _read_infer(asked: InferRequest, raw: bytes, request: Request) -> None:
    given = request.headers.get(JSON_LENGTH, str(len(raw)))
    if not (given.isascii() and given.isdigit() and len(given) < 20):
        raise HttpError(400, f"{JSON_LENGTH} must be a number of bytes")
    if (length := int(given)) > len(raw):
        raise HttpError(400, f"{JSON_LENGTH} is {length}, but the body has {len(raw)} bytes")
    head, tail = raw[:length], raw[length:]
    body, found = validated(InferBody, parse_object(head)), asked.found
    found += _unknown(body)
    parameters = asked.parameters = dict(body.parameters or {})
    binary_all = inference.take_flag(parameters, "binary_data_output", False, found)
    for each in body.inputs:
        found += _unknown(each, place=f"{each.name[:80]}.")
        own = dict(each.parameters or {})
        size = own.pop("binary_data_size", None)
        if size is None:
            elements = _flat(each.data)
        elif isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(tail) or each.data is not None:
            what = f"must be the input's bytes behind the JSON, of which {len(tail)} are left, and there is no `data`"
            raise InvalidRequestError([*found, Violation(f"{each.name[:80]}.parameters.binary_data_size", what)])
        else:
            elements, tail = inference.binary_elements(tail[:size], each.name[:80], found), tail[size:]
        asked.inputs.append(InputTensor(each.name, each.datatype, each.shape, elements, sorted(own)))
    if tail:
        found.append(Violation("inputs", f"leave {len(tail)} bytes behind the JSON unread; give binary_data_size"))
    asked.binary = dict.fromkeys(OUTPUTS, binary_all)
    for each in body.outputs or ():
        place = f"outputs.{each.name[:80]}."
        found += _unknown(each, place=place)
        own = dict(each.parameters or {})
        asked.binary[each.name] = inference.take_flag(own, "binary_data", binary_all, found, f"{place}parameters.")
        asked.outputs.append((each.name, sorted(own)))
    asked.id = body.id or ""


def _unknown(body: BaseModel, what: str = "is unknown", place: str = "") -> list[Violation]:
    return unknown_names(list(body.model_extra or ()), type(body).model_fields, what, place)


def _flat(data: Any) -> list[Any]:
    """The elements of an input's `data`, flat or nested by its dimensions."""
    while isinstance(data, list) and len(data) == 1:
        (data,) = data
    return [data] if isinstance(data, str) else []


def _infer_response(asked: InferRequest, result: SearchResult) -> Response:
    tail, outputs = b"", list[dict[str, Any]]()
    for name, element in asked.tensors(result).items():
        its: dict[str, Any] = {"name": name, "datatype": OUTPUTS[name], "shape": asked.shape}
        if asked.binary[name]:
            raw = inference.binary(element)
            its["parameters"] = {"binary_data_size": len(raw)}
            tail += raw
        else:
            its["data"] = [element]
        outputs.append(its)
    head = to_json({**_head(asked, result), "outputs": outputs})
    if not tail:
        return json_response(head)
    headers = {"cache-control": "no-store", JSON_LENGTH: str(len(head))}
    return Response(head + tail, 200, headers, "application/octet-stream")


def _head(asked: InferRequest, result: SearchResult) -> dict[str, Any]:
    return {
        **({"id": asked.id} if asked.id else {}),
        "model_name": asked.model,
        "model_version": inference.VERSION,
        "parameters": inference.told(result),
    }
