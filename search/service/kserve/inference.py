"""Requests for inference to searches, and results to output tensors; the same for gRPC and HTTP."""

import math
import secrets
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from espalier import __version__
from espalier.engine.errors import InvalidRequestError, Violation, nearest
from espalier.search.request import MAX_PRIORITY, SearchRequest
from espalier.search.result import SearchResult
from espalier.search.service.errors import UnknownModelError
from espalier.search.service.http_api.openai.bodies import SEED_BITS, BodyFields
from espalier.search.service.model_names import ModelNames
from espalier.search.service.session import SearchCall
from espalier.search.service.shown import shown

VERSION = "1"
"""The one version of every model."""
PLATFORM = "espalier"
_EXTENSIONS = ("binary_tensor_data", "generate", "parameters", "schedule_policy")
"""Parts of the protocol beside its core that are offered."""
SERVER = {"name": PLATFORM, "version": __version__, "extensions": _EXTENSIONS}
"""Metadata of the server."""
TEXT_INPUT, TEXT_OUTPUT = "text_input", "text_output"
BYTES, FP32 = "BYTES", "FP32"
OUTPUTS = {TEXT_OUTPUT: BYTES, "answer": BYTES, "score": FP32}
"""Types of the output tensors by their names."""
ENABLE_EMPTY_LAST = "triton_enable_empty_final_response"
FINAL = "triton_final_response"
_ALIASES = {"budget": "beam_width"}
_NO_SEQUENCES = ("sequence_id", "sequence_start", "sequence_end")
_MAX_DIMENSIONS = 8
_LENGTH = struct.Struct("<I")
_FLOAT = struct.Struct("<f")

Value = bool | int | float | str
"""Of a parameter."""
Elements = dict[str, str | float | None]
"""The one element of each output tensor by its name; None for a number that there is not."""


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


@dataclass(slots=True)
class InferRequest:
    """A request for inference: as its transport has read it, and what `read` has made of it.

    Attributes:
        model: the model's name.
        version: its version; empty for any.
        parameters: of the request.
        inputs: its tensors.
        id: the caller's name for it.
        outputs: names of the wanted outputs, with their parameters; all outputs if there is none.
        binary: whether outputs are wanted as binary data, by name.
        stream: whether responses are streamed.
        found: what is wrong.
        shape: dimensions of the tensors.
        wanted: names of the outputs that are wanted.
        in_parts: whether a stream has a response for each step of the text.
        empty_last: whether a stream has a last response without outputs.
    """

    model: str
    version: str
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    inputs: list[InputTensor] = field(default_factory=list[InputTensor])
    id: str = ""
    outputs: list[tuple[str, Sequence[str]]] = field(default_factory=list[tuple[str, Sequence[str]]])
    binary: dict[str, bool] = field(default_factory=dict[str, bool])
    stream: bool = False
    found: list[Violation] = field(default_factory=list[Violation])
    shape: tuple[int, ...] = ()
    wanted: tuple[str, ...] = ()
    in_parts: bool = False
    empty_last: bool = False

    def read(self, names: ModelNames, max_priority: int) -> SearchCall:
        """Make a search of it.

        Args:
            names: the models that there are.
            max_priority: the highest priority of the caller; the protocol's 1.

        Raises:
            UnknownModelError: there is no such model, or no such version.
            InvalidRequestError: lists everything that is wrong.
        """
        named = _search_fields(names, self.model, self.version)
        its = BodyFields(self.parameters, {"seed": secrets.randbits(SEED_BITS), **named}, found=self.found)
        its.places = {"priority": "parameters.priority", **dict.fromkeys(named, "model_name")}
        rest = dict(self.parameters)
        self.in_parts = take_flag(rest, "stream", self.stream, its.found)
        self.empty_last = take_flag(rest, ENABLE_EMPTY_LAST, False, its.found)
        if self.in_parts and not self.stream:
            its.refuse("parameters.stream", "needs a stream: ModelStreamInfer or /generate_stream")
        last = max_priority + 1 + MAX_PRIORITY
        sooner = _count(rest, "priority", last, f"number between 0, the default, and {last}; 1 is the soonest", its)
        timeout = _count(rest, "timeout", 2**63 - 1, "number of microseconds, 0 for no limit", its) / 1e6
        for name in _NO_SEQUENCES:
            if rest.pop(name, None):
                its.refuse(f"parameters.{name}", "sequences are not offered: each request is a search")
        for name, value in rest.items():
            if name == "problem":
                its.refuse("parameters.problem", f"set by `{TEXT_INPUT}`; remove it")
            else:
                its.set(_ALIASES.get(name, name), value, f"parameters.{name[:80]}")
        if timeout:
            own = its.values.get("time_limit")
            if not isinstance(own, int | float) or own > timeout:
                its.set("time_limit", timeout, "parameters.timeout")
        problem, self.shape = _text(self.inputs, its)
        its.set("problem", problem, TEXT_INPUT)
        request = its.make(SearchRequest)
        self.wanted = tuple(_outputs(self.outputs, its)) or tuple(OUTPUTS)
        return SearchCall(request, max_priority + 1 - sooner if sooner else 0, violations=its.found, places=its.places)

    def tensors(self, result: SearchResult, text: str | None = None) -> Elements:
        """The outputs of a search, whose text is `text` if it is not the whole."""
        text = "".join(shown(result).steps) if text is None else text
        elements: Elements = {TEXT_OUTPUT: text, "answer": result.answer, "score": result.score}
        return {name: elements[name] for name in self.wanted}

    def parts(self, result: SearchResult) -> list[Elements]:
        """The outputs of each response of a stream: steps of the text, the last one with everything else."""
        if not self.in_parts:
            return [self.tensors(result)]
        *before, last = shown(result).steps or ("",)
        parts: list[Elements] = [{TEXT_OUTPUT: step} for step in before] if TEXT_OUTPUT in self.wanted else []
        return [*parts, self.tensors(result, last)]


def told(result: SearchResult) -> dict[str, Value]:
    """Parameters of a response: how a search ended, and what it took."""
    usage = result.usage
    return {
        "search_id": result.search_id,
        "stop_reason": str(result.stop_reason),
        "finish_reason": shown(result).finish_reason,
        "seed": result.configuration.seed,
        "generated_tokens": usage.generated_tokens,
        "verifier_tokens": usage.verifier_tokens,
        **({"warnings": "\n".join(result.warnings)} if result.warnings else {}),
    }


def _search_fields(names: ModelNames, model: str, version: str) -> dict[str, Any]:
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


def model_metadata(names: ModelNames, model: str, version: str) -> dict[str, Any]:
    """Describe the tensors of a model.

    Raises:
        UnknownModelError: there is no such model, or its search does not run.
    """
    _search_fields(names, model, version)
    names.require_running(model)
    outputs = [{"name": name, "datatype": datatype, "shape": [1]} for name, datatype in OUTPUTS.items()]
    inputs = [{"name": TEXT_INPUT, "datatype": BYTES, "shape": [1]}]
    return {"name": model, "versions": [VERSION], "platform": PLATFORM, "inputs": inputs, "outputs": outputs}


def take_flag(
    parameters: dict[str, Any], name: str, default: bool, found: list[Violation], place: str = "parameters."
) -> bool:
    """Take a flag out of parameters, which stand at a place of the request; what is wrong goes to `found`."""
    value = parameters.pop(name, default)
    if isinstance(value, bool):
        return value
    found.append(Violation(f"{place}{name}", "must be true or false"))
    return default


def _count(parameters: dict[str, Any], name: str, most: int, what: str, its: BodyFields) -> int:
    """A whole number, such as a priority; the protocol's 0 is the default."""
    value = parameters.pop(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        its.refuse(f"parameters.{name}", f"must be a whole {what}")
        return 0
    return value


def _text(inputs: Sequence[InputTensor], its: BodyFields) -> tuple[str, tuple[int, ...]]:
    """The one element of the one input, and its shape."""
    if [tensor.name for tensor in inputs] != [TEXT_INPUT]:
        its.refuse("inputs", f"must be one tensor, {TEXT_INPUT}")
        raise InvalidRequestError(its.found)
    (tensor,) = inputs
    for name in tensor.parameters:
        its.refuse(f"{TEXT_INPUT}.parameters.{name[:80]}", "is not offered")
    shape = tuple(tensor.shape)
    whole = all(isinstance(size, int) and not isinstance(size, bool) for size in shape)
    if len(shape) > _MAX_DIMENSIONS or not whole or any(size != 1 for size in shape) or len(tensor.elements) != 1:
        its.refuse(TEXT_INPUT, "must have one element, as each request is a search: shape [1] or [1, 1]")
        return "-", (1,)
    if tensor.datatype != BYTES:
        its.refuse(f"{TEXT_INPUT}.datatype", f"must be {BYTES}, is {tensor.datatype[:80]!r}")
    element = tensor.elements[0]
    try:
        return element if isinstance(element, str) else bytes.decode(element), shape
    except (UnicodeDecodeError, TypeError):
        its.refuse(TEXT_INPUT, "must be a text in UTF-8")
        return "-", shape


def _outputs(wanted: Iterable[tuple[str, Sequence[str]]], its: BodyFields) -> Iterable[str]:
    seen = set[str]()
    for name, parameters in wanted:
        if name not in OUTPUTS or name in seen:
            known = f"is unknown; there are {', '.join(OUTPUTS)}{nearest(name, OUTPUTS)}"
            what = "is asked for twice" if name in seen else known
            its.refuse(f"outputs.{name[:80]}", what)
        seen.add(name)
        for parameter in parameters:
            its.refuse(f"outputs.{name[:80]}.parameters.{parameter[:80]}", "is not offered")
        if name in OUTPUTS:
            yield name


# ---- binary data


def binary(element: str | float | None) -> bytes:
    """An element as binary data: of BYTES its length in 4 bytes, little-endian, and its UTF-8; no number is NaN."""
    if isinstance(element, str):
        raw = element.encode(errors="replace")
        return _LENGTH.pack(len(raw)) + raw
    return _FLOAT.pack(math.nan if element is None else element)


def binary_elements(raw: bytes, place: str, found: list[Violation]) -> list[bytes]:
    """The elements of a BYTES tensor, of which one alone is of use: the first, and all that is behind it as one."""
    if not raw:
        return []
    start = _LENGTH.size
    end = start + int.from_bytes(raw[:start], "little")
    if end > len(raw):
        found.append(Violation(place, "the lengths in its binary data do not fit its bytes"))
        return [b"-"]
    return [raw[start:end], raw[end:]] if end < len(raw) else [raw[start:end]]
