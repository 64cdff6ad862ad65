"""Requests for inference to searches, and results to output tensors; the same for gRPC and HTTP."""

import math
import secrets
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.engine.errors import InvalidRequestError, Violation, nearest
from espalier.search.request import MAX_PRIORITY, SearchRequest
from espalier.search.result import SearchResult
from espalier.search.schema import from_values
from espalier.search.service.errors import UnknownModelError
from espalier.search.service.http_api.openai.parameters import SEED_BITS, BodyCall, in_body
from espalier.search.service.model_names import ModelNames
from espalier.search.service.session import SearchCall
from espalier.search.service.shown import shown

VERSION = "1"
"""The one version of every model."""
PLATFORM = "espalier"
EXTENSIONS = ("binary_tensor_data", "generate", "parameters", "schedule_policy")
"""Parts of the protocol beside its core that are offered."""
TEXT_INPUT, TEXT_OUTPUT = "text_input", "text_output"
BYTES, FP32 = "BYTES", "FP32"
OUTPUTS = {TEXT_OUTPUT: BYTES, "answer": BYTES, "score": FP32}
"""Types of the output tensors by their names."""
ENABLE_EMPTY_LAST = "triton_enable_empty_final_response"
FINAL = "triton_final_response"
_ALIASES = {"budget": "beam_width"}
_SET_ELSEWHERE = {"problem": TEXT_INPUT}
_NO_SEQUENCES = ("sequence_id", "sequence_start", "sequence_end")
_MAX_DIMENSIONS = 8
_LENGTH = struct.Struct("<I")
_FLOAT = struct.Struct("<f")

Value = bool | int | float | str
"""Of a parameter."""


@dataclass(frozen=True, slots=True)
class InputTensor:
    """An input tensor.

    Attributes:
        name: its name.
        datatype: the type of its elements.
        shape: its dimensions.
        elements: texts, or their UTF-8.
        parameters: further names that it has.
    """

    name: str
    datatype: str
    shape: Sequence[Any]
    elements: Sequence[Any]
    parameters: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """An output tensor of one element.

    Attributes:
        name: its name.
        datatype: `BYTES` or `FP32`.
        shape: its dimensions, as the input has them.
        element: a text, or a number; None for one that there is not.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    element: str | float | None

    @property
    def raw(self) -> bytes:
        """The element as binary data; a number that there is not is NaN."""
        if isinstance(self.element, str):
            return binary_text(self.element)
        return _FLOAT.pack(math.nan if self.element is None else self.element)


@dataclass(frozen=True, slots=True)
class InferCall(BodyCall):
    """A request for inference.

    Attributes:
        id: the caller's name for it.
        shape: dimensions of the tensors.
        outputs: names of the outputs that are wanted.
        in_parts: whether a stream has a response for each step of the text.
        empty_last: whether a stream has a last response without outputs.
    """

    id: str = ""
    shape: tuple[int, ...] = (1,)
    outputs: tuple[str, ...] = tuple(OUTPUTS)
    in_parts: bool = False
    empty_last: bool = False

    def tensors(self, result: SearchResult) -> list[OutputTensor]:
        """The outputs of a search."""
        return self._wanted({TEXT_OUTPUT: "".join(shown(result).steps), **_rest(result)})

    def parts(self, result: SearchResult) -> list[list[OutputTensor]]:
        """The outputs of each response of a stream: steps of the text, the last one with everything else."""
        if not self.in_parts:
            return [self.tensors(result)]
        *before, last = shown(result).steps or ("",)
        parts = [{TEXT_OUTPUT: step} for step in before] if TEXT_OUTPUT in self.outputs else []
        return [self._wanted(values) for values in (*parts, {TEXT_OUTPUT: last, **_rest(result)})]

    def _wanted(self, values: Mapping[str, str | float | None]) -> list[OutputTensor]:
        return [OutputTensor(name, OUTPUTS[name], self.shape, values[name]) for name in self.outputs if name in values]


def _rest(result: SearchResult) -> dict[str, str | float | None]:
    return {"answer": result.answer, "score": result.score}


def told(result: SearchResult) -> dict[str, Value]:
    """Parameters of a response: how a search ended, and what it took."""
    usage = result.usage
    warned = {"warnings": "\n".join(result.warnings)} if result.warnings else {}
    return {
        "search_id": result.search_id,
        "stop_reason": str(result.stop_reason),
        "finish_reason": shown(result).finish_reason,
        "seed": result.configuration.seed,
        "generated_tokens": usage.generated_tokens,
        "verifier_tokens": usage.verifier_tokens,
        **warned,
    }


def search_fields(names: ModelNames, model: str, version: str) -> dict[str, Any]:
    """Return the fields of a search that a model's name says.

    Raises:
        UnknownModelError: there is no such model, or no such version.
    """
    fields = names.search_fields(model)
    if names.is_plain(model):
        raise UnknownModelError(f"{model} samples without a search, which POST /v1/completions offers")
    if version not in ("", VERSION):
        raise UnknownModelError(f"{model} has version {VERSION} alone, not {version[:80]!r}")
    return fields


def require_model(names: ModelNames, model: str, version: str) -> None:
    """Check that there is such a model, and that its search runs.

    Raises:
        UnknownModelError: it is not so.
    """
    search_fields(names, model, version)
    names.require_running(model)


def read_call(
    names: ModelNames,
    max_priority: int,
    model: str,
    version: str,
    parameters: Mapping[str, Any],
    inputs: Sequence[InputTensor],
    *,
    call_id: str = "",
    outputs: Iterable[tuple[str, Sequence[str]]] = (),
    stream: bool = False,
    found: Iterable[Violation] = (),
) -> InferCall:
    """Read a request.

    Args:
        names: the models that there are.
        max_priority: the highest priority of the caller; the protocol's 1.
        model: the model's name.
        version: its version; empty for any.
        parameters: of the request.
        inputs: its tensors.
        call_id: the caller's name for it.
        outputs: names of the wanted outputs, with their parameters; all outputs if there is none.
        stream: whether responses are streamed.
        found: what the transport found wrong.

    Raises:
        UnknownModelError: see `search_fields`.
        InvalidRequestError: lists everything that is wrong.
    """
    values = search_fields(names, model, version)
    places = dict.fromkeys(values, "model_name") | {"problem": TEXT_INPUT}
    wrong = list(found)
    rest = dict(parameters)
    in_parts, empty_last = _flag(rest, "stream", stream, wrong), _flag(rest, ENABLE_EMPTY_LAST, False, wrong)
    if in_parts and not stream:
        wrong.append(Violation("parameters.stream", "needs a stream: ModelStreamInfer or /generate_stream"))
    priority = _priority(rest, max_priority, wrong)
    timeout = _timeout(rest, wrong)
    for name in _NO_SEQUENCES:
        if rest.pop(name, None):
            wrong.append(Violation(f"parameters.{name}", "sequences are not offered: each request is a search"))
    for name, value in rest.items():
        field = _ALIASES.get(name, name)
        if field in _SET_ELSEWHERE:
            wrong.append(Violation(f"parameters.{name}", f"set by `{_SET_ELSEWHERE[field]}`; remove it"))
        else:
            values[field], places[field] = value, f"parameters.{name[:80]}"
    if timeout is not None:
        own = values.get("time_limit")
        if not isinstance(own, int | float) or own > timeout:
            values["time_limit"], places["time_limit"] = timeout, "parameters.timeout"
    problem, shape = _text(inputs, wrong)
    try:
        request = from_values(SearchRequest, {"seed": secrets.randbits(SEED_BITS), **values, "problem": problem})
    except InvalidRequestError as error:
        raise InvalidRequestError([*wrong, *in_body(error.violations, places)]) from None
    wanted = tuple(_outputs(outputs, wrong)) or tuple(OUTPUTS)
    search = SearchCall(request, priority, violations=wrong)
    return InferCall(
        model,
        search,
        {"priority": "parameters.priority", **places},
        id=call_id,
        shape=shape,
        outputs=wanted,
        in_parts=in_parts,
        empty_last=empty_last,
    )


def _flag(parameters: dict[str, Any], name: str, default: bool, wrong: list[Violation]) -> bool:
    value = parameters.pop(name, default)
    if not isinstance(value, bool):
        wrong.append(Violation(f"parameters.{name}", "must be true or false"))
        return default
    return value


def _priority(parameters: dict[str, Any], most: int, wrong: list[Violation]) -> int:
    """The call's priority, larger is sooner; the protocol's 1 is the caller's highest, 2 the next, 0 the default."""
    value, last = parameters.pop("priority", 0), most + 1 + MAX_PRIORITY
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= last:
        what = f"must be a whole number between 0, the default, and {last}; 1 is the soonest"
        wrong.append(Violation("parameters.priority", what))
        return 0
    return most + 1 - value if value else 0


def _timeout(parameters: dict[str, Any], wrong: list[Violation]) -> float | None:
    """The time limit, in seconds, of a timeout in microseconds; 0 is none."""
    value = parameters.pop("timeout", 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        wrong.append(Violation("parameters.timeout", "must be a whole number of microseconds, 0 for no limit"))
        return None
    return value / 1e6 if value else None


def _text(inputs: Sequence[InputTensor], wrong: list[Violation]) -> tuple[str, tuple[int, ...]]:
    """The one element of the one input, and its shape."""
    if [tensor.name for tensor in inputs] != [TEXT_INPUT]:
        raise InvalidRequestError([*wrong, Violation("inputs", f"must be one tensor, {TEXT_INPUT}")])
    (tensor,) = inputs
    for name in tensor.parameters:
        wrong.append(Violation(f"{TEXT_INPUT}.parameters.{name[:80]}", "is not offered"))
    shape = tuple(tensor.shape)
    whole = all(isinstance(size, int) and not isinstance(size, bool) for size in shape)
    if len(shape) > _MAX_DIMENSIONS or not whole or any(size != 1 for size in shape) or len(tensor.elements) != 1:
        wrong.append(Violation(TEXT_INPUT, "must have one element, as each request is a search: shape [1] or [1, 1]"))
        return "-", (1,)
    if tensor.datatype != BYTES:
        wrong.append(Violation(f"{TEXT_INPUT}.datatype", f"must be {BYTES}, is {tensor.datatype[:80]!r}"))
    element = tensor.elements[0]
    try:
        return element if isinstance(element, str) else bytes.decode(element), shape
    except (UnicodeDecodeError, TypeError):
        wrong.append(Violation(TEXT_INPUT, "must be a text in UTF-8"))
        return "-", shape


def _outputs(wanted: Iterable[tuple[str, Sequence[str]]], wrong: list[Violation]) -> Iterable[str]:
    seen = set[str]()
    for name, parameters in wanted:
        if name not in OUTPUTS or name in seen:
            known = f"is unknown; there are {', '.join(OUTPUTS)}{nearest(name, OUTPUTS)}"
            what = "is asked for twice" if name in seen else known
            wrong.append(Violation(f"outputs.{name[:80]}", what))
        seen.add(name)
        for parameter in parameters:
            wrong.append(Violation(f"outputs.{name[:80]}.parameters.{parameter[:80]}", "is not offered"))
        if name in OUTPUTS:
            yield name


# ---- binary data


def binary_text(text: str) -> bytes:
    """One element of a BYTES tensor: its length in 4 bytes, little-endian, and its UTF-8."""
    raw = text.encode(errors="replace")
    return _LENGTH.pack(len(raw)) + raw


def binary_elements(raw: bytes) -> list[bytes]:
    """The elements of a BYTES tensor; the first ones of many.

    Raises:
        ValueError: the lengths do not fit the bytes.
    """
    elements, at = list[bytes](), 0
    while at < len(raw) and len(elements) < 2:  # one alone is of use
        if len(raw) - at < _LENGTH.size:
            raise ValueError
        (length,) = _LENGTH.unpack_from(raw, at)
        at += _LENGTH.size
        if length > len(raw) - at:
            raise ValueError
        elements.append(raw[at : at + length])
        at += length
    return elements
