"""Messages of `espalier.v1` to and from the dataclasses of `search`: pure, in both directions.

Fields have the same names on both sides and convert by their types, so that a new one needs no line here; `_RENAMED`
has those of other names. Words of an enum have its name before them on the wire: `beam` is `ALGORITHM_BEAM`. `tests`
holds that no field and no word is missing on either side.
"""

import re
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from enum import StrEnum
from functools import cache, partial
from typing import Any, NamedTuple

from google.protobuf.duration_pb2 import Duration

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.request import Aggregation, AlgorithmName, SearchRequest, Vote, validate
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
from espalier.v1 import search_pb2 as pb

MAX_PRIORITY = 100

_DATACLASSES: dict[str, type] = {
    kind.DESCRIPTOR.full_name: dataclass
    for kind, dataclass in {
        pb.SolveProblemRequest: SearchRequest,
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
    "espalier.v1.StopReason": StopReason,
}
"""Enums whose words are members here. Terminations are plain words: the search may add one before the wire has it."""
_RENAMED = {
    "queue_duration": "queue_seconds",
    "first_step_duration": "first_step_seconds",
    "search_duration": "seconds",
}


class _WireField(NamedTuple):
    """How one field of a message is written and read.

    Attributes:
        name: on the wire.
        attribute: the same of the dataclass.
        write: from a value to what the message takes; None leaves the field out.
        read: back.
        has_presence: whether the message tells a field that is left out from one with the type's zero.
        word: whether it is an enum's.
        absent: the value where the message leaves the field out and the dataclass has no default.
    """

    name: str
    attribute: str
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]
    has_presence: bool
    word: bool
    absent: Any


# ---- the request


def request_to_wire(
    request: SearchRequest, include_nodes: bool | None = None, priority: int | None = None
) -> pb.SolveProblemRequest:
    """The message for `request`, and for what a caller asks for beside it.

    Raises:
        InvalidRequestError: values that no message can hold, such as a number over 32 bits; lists all of them.
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
    """The request in `message`, defaults where it says nothing, and what in it has no meaning here."""
    violations: list[Violation] = []
    return _from_message(message, violations), violations


def checked_request(message: pb.SolveProblemRequest) -> SearchRequest:
    """The request in `message`.

    Raises:
        InvalidRequestError: listing everything that is wrong with it.
    """
    request, violations = request_from_wire(message)
    if abs(message.priority) > MAX_PRIORITY:
        rule = f"must be between {-MAX_PRIORITY} and {MAX_PRIORITY}, is {message.priority}"
        violations.append(Violation("priority", rule))
    try:
        validate(request)
    except InvalidRequestError as error:
        violations = violations + error.violations
    if violations:
        raise InvalidRequestError(violations)
    return request


# ---- the result


def result_to_wire(result: SearchResult, include_nodes: bool) -> pb.SearchResult:
    """The message for `result`, with the search tree where asked for."""
    return _to_message(result if include_nodes else replace(result, nodes=()), pb.SearchResult)


def result_from_wire(message: pb.SearchResult) -> SearchResult:
    """The result in `message`.

    Raises:
        ValueError: it holds an enum value this version does not know.
    """
    return _from_message(message)


def fit_result(message: pb.SearchResult, limit: int) -> pb.SearchResult:
    """`message`, cut until it takes at most `limit` bytes where that can be done, and saying what it left out.

    The tree goes first, then candidates from the last on; the answer, its path and the usage stay.
    """
    if message.ByteSize() <= limit:
        return message
    cut = pb.SearchResult()
    cut.CopyFrom(message)
    cut.omitted_nodes = len(cut.nodes)
    del cut.nodes[:]
    while cut.candidates and cut.ByteSize() > limit:
        # By halves: measuring a message costs as much as writing it.
        left = len(cut.candidates) // 2
        cut.omitted_candidates += len(cut.candidates) - left
        del cut.candidates[left:]
    return cut


# ---- events

_EVENTS = {"started": pb.SearchStarted, "step": pb.StepDone, "candidate": pb.CandidateDone}
"""Messages of events by their field of the stream's; the result is the fourth."""


def event_to_wire(event: Event, include_nodes: bool) -> pb.SolveProblemStreamResponse:
    """The stream message for `event`."""
    if isinstance(event, Finished):
        return pb.SolveProblemStreamResponse(result=result_to_wire(event.result, include_nodes))
    (name,) = [name for name, kind in _EVENTS.items() if _DATACLASSES[kind.DESCRIPTOR.full_name] is type(event)]
    return pb.SolveProblemStreamResponse(**{name: _to_message(event, _EVENTS[name])})


def fit_event(message: pb.SolveProblemStreamResponse, limit: int) -> pb.SolveProblemStreamResponse | None:
    """`message`, cut until it takes at most `limit` bytes; None where that cannot be done.

    A step report gives up the texts of its nodes, then the nodes, then the steps of its best path; a candidate its
    steps. The result lists what is left out.
    """
    if message.ByteSize() <= limit:
        return message
    cut = pb.SolveProblemStreamResponse()
    cut.CopyFrom(message)
    if cut.HasField("step"):
        for node in cut.step.kept:
            node.ClearField("text")
        if cut.ByteSize() > limit:
            del cut.step.kept[:]
        if cut.ByteSize() > limit and cut.step.HasField("best"):
            del cut.step.best.steps[:]
    elif cut.HasField("candidate"):
        del cut.candidate.candidate.steps[:]
    return cut if cut.ByteSize() <= limit else None


def event_from_wire(message: pb.SolveProblemStreamResponse) -> Event | None:
    """The event in `message`; None for a kind of event this version does not know.

    Raises:
        ValueError: it holds an enum value this version does not know.
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
    """What a message of `kind` holds of a dataclass; what cannot be written is added to `violations`, else raised."""
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
    """The dataclass of a message; unknown words are added to `violations`, else raised as ValueError."""
    kind = _DATACLASSES[message.DESCRIPTOR.full_name]
    without_default = {f.name for f in fields(kind) if f.default is MISSING}
    values: dict[str, Any] = {}
    for field in _wire_fields(message.DESCRIPTOR, kind):
        if field.attribute not in kind.__dataclass_fields__:
            continue  # a property
        item = getattr(message, field.name)
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
    """The fields of a message, by its descriptor, that a dataclass has too."""
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
        write, read = partial(_to_message, kind=kind._concrete_class), _from_message
        if _is_repeated(field):
            write, read = partial(_each, write), partial(_each, read)
    attribute = _RENAMED.get(field.name) or field.name
    return _WireField(field.name, attribute, write, read, field.has_presence, enum is not None, absent)


def _is_repeated(field: Any) -> bool:
    """`label` is deprecated by the protobuf that has `is_repeated`."""
    return field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED


def _as_is(value: Any) -> Any:
    return value


def _each(convert: Callable[[Any], Any], values: Any) -> tuple[Any, ...]:
    return tuple(convert(value) for value in values)


def _number(enum: Any, word: str) -> int | None:
    """An enum's number on the wire; of a word that the wire does not have, 0 where that is allowed, else KeyError."""
    if enum.full_name in _ENUMS:
        return _numbers(enum)[_ENUMS[enum.full_name](word)]
    return _numbers(enum).get(word, 0) if word else None


def _word(enum: Any, number: int) -> str:
    """What `_number` made a number of; `unspecified` for an unknown one where any word is allowed."""
    words = {number: word for word, number in _numbers(enum).items()}
    if (kind := _ENUMS.get(enum.full_name)) is None:
        return words.get(number, "unspecified")
    if number not in words or words[number] not in list(kind):
        raise ValueError(f"must be one of {', '.join(kind)}, is the unknown value {number}")
    return kind(words[number])


@cache
def _numbers(enum: Any) -> dict[str, int]:
    """The numbers of an enum by word: `STOP_REASON_FINISHED` is `finished` of StopReason."""
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
