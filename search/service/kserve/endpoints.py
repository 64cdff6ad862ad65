"""`/v2`: the protocol over HTTP with JSON and binary tensors, and its extension that generates text."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, Field, StrictStr
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from espalier import __version__
from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.result import Event, Finished, SearchResult
from espalier.search.schema import unknown_names
from espalier.search.service.http_api.body import parse_object, read_body, validated
from espalier.search.service.http_api.event_stream import ServerSentEvent, answer
from espalier.search.service.http_api.status import HttpError, json_response, to_json
from espalier.search.service.kserve.inference import (
    BYTES,
    EXTENSIONS,
    OUTPUTS,
    PLATFORM,
    TEXT_INPUT,
    VERSION,
    InferCall,
    InputTensor,
    OutputTensor,
    binary_elements,
    read_call,
    require_model,
    told,
)
from espalier.search.service.model_names import ModelNames
from espalier.search.service.session import Session, finished

JSON_LENGTH = "inference-header-content-length"
"""Header with the bytes of JSON before the binary tensors."""
_DEPTH = 8
"""Nesting of an input's data that is looked into."""


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


class InferenceEndpoints:
    """`/v2`, `/v2/health`, `/v2/models/MODEL` and below."""

    def __init__(self, session: Session, names: ModelNames) -> None:
        self._session = session
        self._names = names

    async def live(self, request: Request) -> Response:
        """Tell that the process lives."""
        return json_response({"live": True})

    async def ready(self, request: Request) -> Response:
        """Tell whether searches are accepted."""
        return self._readiness()

    async def server_metadata(self, request: Request) -> Response:
        """Tell what serves."""
        return json_response({"name": PLATFORM, "version": __version__, "extensions": EXTENSIONS})

    async def model_ready(self, request: Request) -> Response:
        """Tell whether a model's searches are accepted."""
        require_model(self._names, *_named(request))
        return self._readiness()

    async def model_metadata(self, request: Request) -> Response:
        """Describe the tensors of a model."""
        model, version = _named(request)
        require_model(self._names, model, version)
        outputs = [{"name": name, "datatype": datatype, "shape": [1]} for name, datatype in OUTPUTS.items()]
        inputs = [{"name": TEXT_INPUT, "datatype": BYTES, "shape": [1]}]
        head = {"name": model, "versions": [VERSION], "platform": PLATFORM}
        return json_response({**head, "inputs": inputs, "outputs": outputs})

    async def infer(self, request: Request) -> Response:
        """Search the problem of an input tensor."""
        length = _json_length(request)
        asked, binary = await self._read(request, partial(_read_infer, json_length=length))
        result = await self._result(request, asked)
        return _infer_response(asked, result, binary)

    async def generate(self, request: Request) -> Response:
        """Search a problem given as text."""
        asked = await self._read(request, _read_generate)
        result = await self._result(request, asked)
        return json_response(_generated(asked, asked.tensors(result), result))

    async def generate_stream(self, request: Request) -> ASGIApp | Response:
        """Search a problem given as text; the answer's steps come as server-sent events."""
        asked = await self._read(request, partial(_read_generate, stream=True))

        async def parts(event: Event) -> list[ServerSentEvent]:
            if not isinstance(event, Finished):
                return []
            told = [_generated(asked, part, event.result) for part in asked.parts(event.result)]
            return [(to_json(each), None) for each in told]

        async def whole(end: Finished[Any]) -> None:
            raise AssertionError("a stream")

        call = request.state.call
        return await answer(call, asked.run(self._session, call), True, whole, parts, errors_as_text=True)

    def _readiness(self) -> Response:
        ready = self._session.ready
        return json_response({"ready": ready}, 200 if ready else 503, {} if ready else {"retry-after": "5"})

    async def _read(self, request: Request, reading: Any) -> Any:
        call = request.state.call
        most = self._session.max_priority(call.caller)
        return await read_body(
            request, self._session, partial(reading, names=self._names, most=most, named=_named(request))
        )

    async def _result(self, request: Request, asked: InferCall) -> SearchResult:
        async with asked.run(self._session, request.state.call) as events:
            return (await finished(events)).result


def _named(request: Request) -> tuple[str, str]:
    """Name and version of the model in a path."""
    return request.path_params["model"], request.path_params.get("version", "")


def _json_length(request: Request) -> int | None:
    given = request.headers.get(JSON_LENGTH)
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) < 20):
        raise HttpError(400, f"{JSON_LENGTH} must be a number of bytes")
    return int(given)


def _read_generate(
    raw: bytes, *, names: ModelNames, most: int, named: tuple[str, str], stream: bool = False
) -> InferCall:
    body = validated(GenerateBody, parse_object(raw))
    found = _unknown(body, "is unknown; put it into `parameters`")
    tensor = InputTensor(TEXT_INPUT, BYTES, [1], [body.text_input])
    parameters = {"stream": stream, **(body.parameters or {})}
    return read_call(names, most, *named, parameters, [tensor], call_id=body.id or "", stream=stream, found=found)


def _read_infer(
    raw: bytes, *, names: ModelNames, most: int, named: tuple[str, str], json_length: int | None
) -> tuple[InferCall, dict[str, bool]]:
    """The call, and which outputs are wanted as binary data."""
    head, tail = (raw, b"") if json_length is None else (raw[:json_length], raw[json_length:])
    if json_length is not None and json_length > len(raw):
        raise HttpError(400, f"{JSON_LENGTH} is {json_length}, but the body has {len(raw)} bytes")
    body = validated(InferBody, parse_object(head))
    found = _unknown(body)
    parameters = dict(body.parameters or {})
    binary_all = _flag(parameters.pop("binary_data_output", False), "parameters.binary_data_output", found)
    inputs: list[InputTensor] = []
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
            elements, tail = _binary(each, tail[:size], found), tail[size:]
        inputs.append(InputTensor(each.name, each.datatype, each.shape, elements, sorted(own)))
    if tail:
        found.append(Violation("inputs", f"leave {len(tail)} bytes behind the JSON unread; give binary_data_size"))
    outputs, binary = list[tuple[str, list[str]]](), dict.fromkeys(OUTPUTS, binary_all)
    for each in body.outputs or ():
        found += _unknown(each, place=f"outputs.{each.name[:80]}.")
        own = dict(each.parameters or {})
        place = f"outputs.{each.name[:80]}.parameters.binary_data"
        binary[each.name] = _flag(own.pop("binary_data", binary_all), place, found)
        outputs.append((each.name, sorted(own)))
    call = read_call(names, most, *named, parameters, inputs, call_id=body.id or "", outputs=outputs, found=found)
    return call, binary


def _unknown(body: BaseModel, what: str = "is unknown", place: str = "") -> list[Violation]:
    return unknown_names(list(body.model_extra or ()), type(body).model_fields, what, place)


def _flag(value: Any, place: str, found: list[Violation]) -> bool:
    if not isinstance(value, bool):
        found.append(Violation(place, "must be true or false"))
    return value is True


def _binary(tensor: _Input, raw: bytes, found: list[Violation]) -> list[bytes]:
    try:
        return binary_elements(raw)
    except ValueError:
        found.append(Violation(tensor.name[:80], "the lengths in its binary data do not fit its bytes"))
        return [b"-"]


def _flat(data: Any) -> list[Any]:
    """The elements of an input's `data`, flat or nested by its dimensions."""
    for _ in range(_DEPTH):
        if not (isinstance(data, list) and len(data) == 1):
            break
        (data,) = data
    return [data] if isinstance(data, str) else []


def _infer_response(asked: InferCall, result: SearchResult, binary: Mapping[str, bool]) -> Response:
    tail, outputs = b"", list[dict[str, Any]]()
    for tensor in asked.tensors(result):
        its: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if binary[tensor.name]:
            its["parameters"] = {"binary_data_size": len(tensor.raw)}
            tail += tensor.raw
        else:
            its["data"] = [tensor.element]
        outputs.append(its)
    head = to_json({**_head(asked), "parameters": told(result), "outputs": outputs})
    if not any(binary[each["name"]] for each in outputs):
        return json_response(head)
    headers = {"cache-control": "no-store", JSON_LENGTH: str(len(head))}
    return Response(head + tail, 200, headers, "application/octet-stream")


def _generated(asked: InferCall, tensors: list[OutputTensor], result: SearchResult) -> dict[str, Any]:
    outputs = {tensor.name: tensor.element for tensor in tensors}
    return {**_head(asked), **outputs, "parameters": told(result)}


def _head(asked: InferCall) -> dict[str, Any]:
    named = {"id": asked.id} if asked.id else {}
    return {**named, "model_name": asked.model, "model_version": VERSION}
