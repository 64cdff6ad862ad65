"""The methods of `inference.GRPCInferenceService`."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from espalier.engine.errors import EspalierError, Violation
from espalier.kserve import inference_pb2 as pb
from espalier.kserve.inference_pb2_grpc import GRPCInferenceServiceServicer
from espalier.search.result import SearchResult
from espalier.search.service.access.calls import Call, recorded
from espalier.search.service.errors import UnknownModelError, failure_of
from espalier.search.service.grpc_api.servicer import CALL
from espalier.search.service.kserve import inference
from espalier.search.service.kserve.inference import InferRequest, InputTensor, Value
from espalier.search.service.model_names import ModelNames
from espalier.search.service.session import SearchCall, Session

_IN_FLIGHT = 64
"""Requests of one stream that are worked on at a time; further ones are read when these have ended."""


class InferenceServicer(GRPCInferenceServiceServicer):
    """Translates between messages and the session; `grpc_api.servicer.CallInterceptor` maps errors."""

    def __init__(self, session: Session, names: ModelNames) -> None:
        self._session = session
        self._names = names

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Any) -> pb.ServerLiveResponse:  # noqa: N802 (the protocol's)
        """Tell that the process lives."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Any) -> pb.ServerReadyResponse:  # noqa: N802 (the protocol's)
        """Tell whether searches are accepted."""
        return pb.ServerReadyResponse(ready=self._session.ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Any) -> pb.ModelReadyResponse:  # noqa: N802 (the protocol's)
        """Tell whether a model exists and searches are accepted."""
        try:
            inference.model_metadata(self._names, request.name, request.version)
        except UnknownModelError:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=self._session.ready)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Any) -> pb.ServerMetadataResponse:  # noqa: N802 (the protocol's)
        """Tell what serves."""
        return pb.ServerMetadataResponse(**inference.SERVER)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Any) -> pb.ModelMetadataResponse:  # noqa: N802 (the protocol's)
        """Describe the tensors of a model."""
        return pb.ModelMetadataResponse(**inference.model_metadata(self._names, request.name, request.version))

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Any) -> pb.ModelInferResponse:  # noqa: N802 (the protocol's)
        """Run one search."""
        asked, result = await self._run(request, CALL.get(), stream=False)
        return _response(asked, asked.tensors(result), inference.told(result))

    async def ModelStreamInfer(self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: Any) -> None:  # noqa: N802 (the protocol's)
        """Run searches as they come; each is a call of its own, for its limits and in the log."""
        whole, writing, room = CALL.get(), asyncio.Lock(), asyncio.Semaphore(_IN_FLIGHT)

        async def write(message: pb.ModelStreamInferResponse) -> None:
            async with writing:
                await context.write(message)

        async def serve(request: pb.ModelInferRequest) -> None:
            call = Call("ModelInfer", uuid.uuid4().hex, whole.traceparent, whole.connection, whole.caller)
            with recorded(call, self._session.call_ended):
                try:
                    asked, result = await self._run(request, call, stream=True)
                    for response in _responses(asked, result):
                        await write(pb.ModelStreamInferResponse(infer_response=response))
                except Exception as error:
                    if context.cancelled() or context.done():
                        call.code = "CANCELLED"
                        return
                    failure = failure_of(error)
                    call.fail(failure.code, failure.reason)
                    text, named = f"{failure.code}: {failure.text}", pb.ModelInferResponse(id=request.id)
                    await write(pb.ModelStreamInferResponse(error_message=text, infer_response=named))
                finally:
                    room.release()

        unreadable: EspalierError | None = None
        async with asyncio.TaskGroup() as tasks:
            try:
                async for request in request_iterator:
                    await room.acquire()
                    tasks.create_task(serve(request))
            except EspalierError as error:  # raised within the group, it would cancel what came before
                unreadable = error
        if unreadable:
            raise unreadable

    async def _run(self, request: pb.ModelInferRequest, call: Call, stream: bool) -> tuple[InferRequest, SearchResult]:
        assert call.caller is not None
        most = self._session.max_priority(call.caller)

        def read() -> tuple[InferRequest, SearchCall]:
            asked = _read(request, stream)
            return asked, asked.read(self._names, most)

        asked, search = await self._session.read(call, request.ByteSize(), read)
        return asked, (await self._session.finish(search, call)).result


def _read(request: pb.ModelInferRequest, stream: bool) -> InferRequest:
    asked = InferRequest(request.model_name, request.model_version, id=request.id, stream=stream)
    asked.parameters = {
        name: _value(value, f"parameters.{name[:80]}", asked.found) for name, value in request.parameters.items()
    }
    asked.inputs = _inputs(request, asked.found)
    asked.outputs = [(output.name, sorted(output.parameters)) for output in request.outputs]
    return asked


def _value(parameter: pb.InferParameter, place: str, found: list[Violation]) -> Value | None:
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None:
        found.append(Violation(place, "has no value"))
        return None
    return getattr(parameter, kind)


def _inputs(request: pb.ModelInferRequest, found: list[Violation]) -> list[InputTensor]:
    """The inputs: all elements are in `raw_input_contents`, or all are with their tensors."""
    raw = request.raw_input_contents
    if raw and (len(raw) != len(request.inputs) or any(each.HasField("contents") for each in request.inputs)):
        found.append(Violation("raw_input_contents", "must have all inputs, or none"))
        raw = []
    tensors: list[InputTensor] = []
    for index, each in enumerate(request.inputs):
        elements = list(each.contents.bytes_contents)
        if raw:
            elements = inference.binary_elements(raw[index], f"raw_input_contents[{index}]", found)
        tensors.append(InputTensor(each.name, each.datatype, list(each.shape), elements, sorted(each.parameters)))
    return tensors


def _responses(asked: InferRequest, result: SearchResult) -> list[pb.ModelInferResponse]:
    """The responses of a stream to one request; the last one says so."""
    parts = [*asked.parts(result), *([{}] if asked.empty_last else [])]
    last = len(parts) - 1
    return [
        _response(asked, part, inference.told(result) | {inference.FINAL: i == last}) for i, part in enumerate(parts)
    ]


def _response(
    asked: InferRequest, tensors: Mapping[str, str | float | None], parameters: Mapping[str, Value]
) -> pb.ModelInferResponse:
    response = pb.ModelInferResponse(model_name=asked.model, model_version=inference.VERSION, id=asked.id)
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}.get(type(value), "double_param")
        setattr(response.parameters[name], kind, value)
    for name, element in tensors.items():
        response.outputs.add(name=name, datatype=inference.OUTPUTS[name], shape=asked.shape)
        response.raw_output_contents.append(inference.binary(element))
    return response
