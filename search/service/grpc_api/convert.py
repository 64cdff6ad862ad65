"""Converts `espalier.v1` messages to and from the dataclasses of `search`, without side effects.

Fields have the same names on both sides and are converted by type, so new fields need no code here; `_RENAMED` lists
the exceptions. Enum values carry their enum's name on the wire: `beam` is `ALGORITHM_BEAM`. Tests check that no field
or enum value is missing on either side.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from enum import StrEnum
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message_factory import GetMessageClass

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.conversation import ChatMessage, ChatRole
from espalier.search.request import (
    Aggregation,
    AlgorithmName,
    EarlyStop,
    SearchRequest,
    Vote,
)
from espalier.search.result import (
    Candidate,
    CandidateDone,
    Event,
    Finished,
    NodeRecord,
    ScoredStep,
    SearchResult,
    Started,
    StepDone,
    StopReason,
    Usage,
)
from espalier.search.schema import MAX_ITEMS
from espalier.v1 import search_pb2 as pb

_DATACLASSES: dict[str, type] = {
    kind.DESCRIPTOR.full_name: dataclass
    for kind, dataclass in {
        pb.SolveProblemRequest: SearchRequest,
        pb.ChatMessage: ChatMessage,
        pb.SearchResult: SearchResult,
        pb.Usage: Usage,
        pb.Candidate: Candidate,
        pb.ScoredStep: ScoredStep,
        pb.SearchNode: NodeRecord,
        pb.SearchStarted: Started,
        pb.StepDone: StepDone,
        pb.CandidateDone: CandidateDone,
    }.items()
}
_ENUMS: dict[str, type[StrEnum]] = {
    "espalier.v1.Algorithm": AlgorithmName,
    "espalier.v1.Aggregation": Aggregation,
    "espalier.v1.Vote": Vote,
    "espalier.v1.EarlyStop": EarlyStop,
    "espalier.v1.ChatRole": ChatRole,
    "espalier.v1.StopReason": StopReason,
}
"""Enums that both sides have. Terminations are strings on the wire, so that new ones do not break old clients."""
_RENAMED = {
    "queue_duration": "queue_seconds",
    "first_step_duration": "first_step_seconds",
    "search_duration": "seconds",
}


class _WireField(NamedTuple):
    """Conversion of one field of a message.

    Attributes:
        name: name on the wire.
        attribute: name in the dataclass.
        write: converts a value for the message; None leaves the field out.
        read: converts a message's value back.
        repeated: whether the message may hold several.
        has_presence: whether the message distinguishes an absent field from a zero value.
        word: whether the field is an enum.
        absent: value for an absent field without a dataclass default.
    """

    name: str
    attribute: str
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]
    repeated: bool
    has_presence: bool
    word: bool
    absent: Any


# ---- the request


def request_to_wire(
    request: SearchRequest, include_nodes: bool | None = None, priority: int | None = None
) -> pb.SolveProblemRequest:
    """Convert `request` to a message, with the options of the call.

    Raises:
        InvalidRequestError: lists all values that the message cannot represent, such as integers over 32 bits.
    """
    beside: dict[str, Any] = {"include_nodes": include_nodes, "priority": priority}
    message = pb.SolveProblemRequest(**beside)
    violations: list[Violation] = []
    for name, value in _written(request, pb.SolveProblemRequest, violations).items():
        try:
            message.MergeFrom(pb.SolveProblemRequest(**{name: value}))
        except (TypeError, ValueError):
            violations.append(_cannot_be_sent(name))
    if violations:
        raise InvalidRequestError(violations)
    return message


def request_from_wire(message: pb.SolveProblemRequest) -> tuple[SearchRequest, list[Violation]]:
    """Convert a message to a request with defaults for absent fields; returns unknown enum values as violations."""
    violations: list[Violation] = []
    return _from_message(message, violations), violations


# ---- the result


def result_to_wire(result: SearchResult) -> pb.SearchResult:
    """Convert `result` to a message."""
    return _to_message(result, pb.SearchResult)


def result_from_wire(message: pb.SearchResult) -> SearchResult:
    """Convert a message to a result.

    Raises:
        ValueError: an enum value is unknown to this version.
    """
    return _from_message(message)


# ---- events

_EVENTS = {"started": pb.SearchStarted, "step": pb.StepDone, "candidate": pb.CandidateDone}
"""Event messages by their field in the stream response; the result is handled separately."""


def event_to_wire(event: Event, omitted: Mapping[str, int] = MappingProxyType({})) -> pb.SolveProblemStreamResponse:
    """Convert `event` to a stream response, with the numbers of what it lacks."""
    message: Any
    if isinstance(event, Finished):
        name, message = "result", result_to_wire(event.result)
    else:
        (name,) = [name for name, kind in _EVENTS.items() if _DATACLASSES[kind.DESCRIPTOR.full_name] is type(event)]
        message = _to_message(event, _EVENTS[name])
    for counted, number in omitted.items():
        setattr(message, counted, number)
    return pb.SolveProblemStreamResponse(**{name: message})


def event_from_wire(message: pb.SolveProblemStreamResponse) -> Event | None:
    """Convert a stream response to an event; None for an event type unknown to this version.

    Raises:
        ValueError: an enum value is unknown to this version.
    """
    match message.WhichOneof("event"):
        case None:
            return None
        case "result":
            return Finished(message.result.search_id, result_from_wire(message.result))
        case name:
            return _from_message(getattr(message, name))


# ---- any message


def _to_message(value: Any, kind: type[Any]) -> Any:
    return kind(**_written(value, kind))


def _written(value: Any, kind: type[Any], violations: list[Violation] | None = None) -> dict[str, Any]:
    """The message fields of a dataclass; values that cannot be written go to `violations`, or raise without it."""
    written: dict[str, Any] = {}
    for field in _wire_fields(kind.DESCRIPTOR, type(value)):
        item = getattr(value, field.attribute)
        try:
            item = None if item is None else field.write(item)
        except (KeyError, TypeError, ValueError, OverflowError):
            if violations is None:
                raise
            violations.append(_cannot_be_sent(field.name))
            continue
        if item is not None:
            written[field.name] = item
    return written


def _from_message(message: Any, violations: list[Violation] | None = None) -> Any:
    """Convert a message to its dataclass; unknown enum values go to `violations`, or raise ValueError without it."""
    kind = _DATACLASSES[message.DESCRIPTOR.full_name]
    without_default = {f.name for f in fields(kind) if f.default is MISSING}
    values: dict[str, Any] = {}
    for field in _wire_fields(message.DESCRIPTOR, kind):
        if field.attribute not in kind.__dataclass_fields__:
            continue  # a property
        item = getattr(message, field.name)
        if violations is not None and field.repeated and len(item) > MAX_ITEMS:
            violations.append(Violation(field.name, f"must be at most {MAX_ITEMS} items, is {len(item)}"))
            continue
        left_out = not message.HasField(field.name) if field.has_presence else field.word and item == 0
        if left_out and field.attribute not in without_default:
            continue
        try:
            values[field.attribute] = field.absent if left_out and field.has_presence else field.read(item)
        except ValueError as error:
            if violations is None:
                raise
            violations.append(Violation(field.name, str(error)))
    return kind(**values)


@cache
def _wire_fields(message: Any, kind: type) -> tuple[_WireField, ...]:
    """The message fields, by descriptor, that the dataclass also has."""
    fields = (_wire_field(field) for field in message.fields)
    return tuple(field for field in fields if hasattr(kind, field.attribute) or field.attribute in _names(kind))


def _names(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


def _wire_field(field: Any) -> _WireField:
    write, read = _as_is, _as_is
    absent = None
    if (enum := field.enum_type) is not None:
        write, read = partial(_number, enum), partial(_word, enum)
        absent = None if enum.full_name in _ENUMS else ""
    elif (kind := field.message_type) is None:
        read = tuple if _is_repeated(field) else _as_is
    elif kind.GetOptions().map_entry:
        read = dict
    elif kind.full_name == Duration.DESCRIPTOR.full_name:
        write, read = _duration, _seconds
    else:
        write, read = partial(_to_message, kind=GetMessageClass(kind)), _from_message
        if _is_repeated(field):
            write, read = partial(_each, write), partial(_each, read)
    attribute = _RENAMED.get(field.name) or field.name
    several = _is_repeated(field)
    return _WireField(field.name, attribute, write, read, several, field.has_presence, enum is not None, absent)


def _is_repeated(field: Any) -> bool:
    """`label` is deprecated in protobuf versions that have `is_repeated`."""
    return field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED


def _as_is(value: Any) -> Any:
    return value


def _each(convert: Callable[[Any], Any], values: Any) -> tuple[Any, ...]:
    return tuple(convert(value) for value in values)


def _number(enum: Any, word: str) -> int | None:
    """The wire number of an enum value; 0 for an unknown value of an open enum, else raises KeyError."""
    if enum.full_name in _ENUMS:
        return _numbers(enum)[_ENUMS[enum.full_name](word)]
    return _numbers(enum).get(word, 0) if word else None


def _word(enum: Any, number: int) -> str:
    """The enum value of a wire number; `unspecified` for an unknown number of an open enum."""
    words = {number: word for word, number in _numbers(enum).items()}
    if (kind := _ENUMS.get(enum.full_name)) is None:
        return words.get(number, "unspecified")
    if number not in words or words[number] not in list(kind):
        raise ValueError(f"must be one of {', '.join(kind)}, is the unknown value {number}")
    return kind(words[number])


@cache
def _numbers(enum: Any) -> dict[str, int]:
    """Wire numbers by enum value: `STOP_REASON_FINISHED` is `finished` of StopReason."""
    prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.name).upper() + "_"
    return {v.name.removeprefix(prefix).lower().replace("_", "-"): v.number for v in enum.values}


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def _seconds(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9


def _cannot_be_sent(field: str) -> Violation:
    return Violation(field, "cannot be sent: wrong type, unknown, or out of range")
