"""Converts `espalier.v1` messages to and from the dataclasses of `search`, without side effects.

Fields have the same names on both sides and are converted by type, so new fields need no code here; `_RENAMED` lists
the exceptions. Enum values carry their enum's name on the wire: `beam` is `ALGORITHM_BEAM`. Tests check that no field
or enum value is missing on either side.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING
from enum import StrEnum
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message_factory import GetMessageClass

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search import conversation, request, result, rollout, scores, server_info, tree
from espalier.search.common_fields import read_bias
from espalier.search.result import CandidateDone, Event, Finished, Started, StepDone
from espalier.search.schema import MAX_ITEMS, mapping_text
from espalier.search.scores import StepsScored
from espalier.v1 import search_pb2 as pb

SESSION_OPEN = ("espalier-session", "open")
"""Initial metadata that tell a client that its session has left the queue; a refused call has none."""
_MODULES = (conversation, request, result, rollout, scores, server_info, tree)
_DECLARED: dict[str, Any] = {name: kind for module in _MODULES for name, kind in vars(module).items()}
_MESSAGES: dict[type, Any] = {
    **{_DECLARED[name]: getattr(pb, name) for name in pb.DESCRIPTOR.message_types_by_name if name in _DECLARED},
    Started: pb.SearchStarted,
    result.NodeRecord: pb.SearchNode,
    request.SearchRequest: pb.SolveProblemRequest,
    scores.ScoreRequest: pb.ScoreSolutionRequest,
    scores.ScoreResult: pb.ScoreSolutionResponse,
    scores.ScoreSessionRequest: pb.ScoreSession,
    scores.SessionTurn: pb.ScoreStepsRequest,
    server_info.Reloaded: pb.ReloadResponse,
    server_info.ServerInfo: pb.GetServerInfoResponse,
}
"""Dataclasses with their messages, most of which have their name."""
_DATACLASSES: dict[str, type] = {message.DESCRIPTOR.name: kind for kind, message in _MESSAGES.items()}
EVENT_NAMES = {
    Started: "started",
    StepDone: "step",
    CandidateDone: "candidate",
    StepsScored: "scored",
    Finished: "result",
}
"""Events with their field in the response of a stream; that of `Finished` is its result's."""
_ENUMS: dict[str, type[StrEnum]] = {
    **{name: _DECLARED[name] for name in ("Aggregation", "Vote", "EarlyStop", "ChatRole", "StopReason", "Labels")},
    "Algorithm": request.AlgorithmName,
}
"""Enums that both sides have. Terminations are strings on the wire, so that new ones do not break old clients."""
_PIECE_BYTES = 128 * 1024
"""Size from which the steps of a tree of rollouts are sent in several messages."""
_RENAMED = {
    "queue_duration": "queue_seconds",
    "first_step_duration": "first_step_seconds",
    "duration": "seconds",
    "search_duration": "seconds",
}


_PLAIN: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "Solution": (lambda steps: pb.Solution(steps=steps), lambda message: tuple(message.steps)),
    "StepScore": (
        lambda score: pb.StepScore(score=score),
        lambda message: message.score if message.HasField("score") else None,
    ),
}
"""Messages around plain values, which protobuf can list only so: how they are written and read."""


def _as_is(value: Any) -> Any:
    return value


class _WireField(NamedTuple):
    """Conversion of one field of a message.

    Attributes:
        wire: descriptor of the message's field.
        attribute: name in the dataclass.
        required: whether the dataclass has no default.
        write: converts a value for the message; None leaves the field out.
        read: converts a message's value back.
    """

    wire: Any
    attribute: str
    required: bool
    write: Callable[[Any], Any] = _as_is
    read: Callable[[Any], Any] = _as_is


# ---- the request


def request_to_wire(asked: Any, kind: Any = pb.SolveProblemRequest, **options: Any) -> Any:
    """Convert a request to a message of its kind, with the options of the call, such as `priority`.

    Raises:
        InvalidRequestError: lists all values that the message cannot represent, such as integers over 32 bits.
    """
    message = kind(**options)
    violations: list[Violation] = []
    for field in _wire_fields(message.DESCRIPTOR, type(asked)):
        try:
            message.MergeFrom(_to_message(asked, kind, (field,)))
        except (KeyError, TypeError, ValueError, OverflowError):
            violations.append(Violation(field.wire.name, "cannot be sent: wrong type, unknown, or out of range"))
    if violations:
        raise InvalidRequestError(violations)
    return message


def request_from_wire(message: Any) -> tuple[Any, list[Violation]]:
    """Convert a message to its request with defaults for absent fields; returns unknown enum values as violations."""
    violations: list[Violation] = []
    kind = _DATACLASSES[message.DESCRIPTOR.name]
    return kind(**_values(message, kind, violations)), violations


# ---- the result


def rollout_to_wire(tree: rollout.RolloutResult) -> Iterator[pb.RolloutResponse]:
    """Convert a tree to messages: its steps, as many as have about `_PIECE_BYTES`, and its end."""
    piece, size = pb.RolloutSteps(), 0
    for step in tree.steps:
        message = to_wire(step)
        if size and size + message.ByteSize() > _PIECE_BYTES:
            yield pb.RolloutResponse(steps=piece)
            piece, size = pb.RolloutSteps(), 0
        piece.steps.append(message)
        size += message.ByteSize()
    if size:
        yield pb.RolloutResponse(steps=piece)
    yield pb.RolloutResponse(result=to_wire(tree))


def rollout_from_wire(messages: Iterable[pb.RolloutResponse], asked: rollout.RolloutRequest) -> rollout.RolloutResult:
    """Convert messages to the tree of the request `asked`.

    Raises:
        ValueError: an enum value is unknown to this version.
    """
    steps, last = list[rollout.RolloutStep](), pb.RolloutResult()
    for message in messages:
        last = message.result
        for each in message.steps.steps:
            step = from_wire(each)
            step.token_ids, step.log_probabilities = list(step.token_ids), list(step.log_probabilities)
            step.continuation_answers = list(step.continuation_answers)
            steps.append(step)
    return from_wire(last, steps=tuple(steps), configuration=asked)


# ---- events


def event_to_wire(
    event: Event | StepsScored | Finished[scores.ScoreResult],
    omitted: Mapping[str, int] = MappingProxyType({}),
    kind: Any = pb.SolveProblemStreamResponse,
) -> Any:
    """Convert `event` to a stream's response of its kind, with the numbers of what it lacks."""
    message = to_wire(event.result if isinstance(event, Finished) else event)
    for counted, number in omitted.items():
        setattr(message, counted, number)
    return kind(**{EVENT_NAMES[type(event)]: message})


def event_from_wire(message: Any, **more: Any) -> Any:
    """Convert a stream's response to an event; None for an event type unknown to this version.

    Args:
        message: the response.
        **more: values of a result that are not in its message.

    Raises:
        ValueError: an enum value is unknown to this version.
    """
    if (name := message.WhichOneof("event")) is None:
        return None
    if name != EVENT_NAMES[Finished]:
        return from_wire(getattr(message, name))
    ended = from_wire(message.result, **more)
    return Finished(ended.search_id, ended)


# ---- the server


def info_to_wire(info: server_info.ServerInfo) -> pb.GetServerInfoResponse:
    """Convert what a server is and holds to a message."""
    held = info.occupancy
    message = to_wire(info)
    message.running_searches, message.waiting_searches = held.running, held.waiting
    for role, blocks in held.kv_blocks.items():
        message.kv_blocks[role].CopyFrom(to_wire(blocks))
    return message


def info_from_wire(message: pb.GetServerInfoResponse) -> server_info.ServerInfo:
    """Convert a message to what a server is and holds."""
    blocks = {role: from_wire(each) for role, each in message.kv_blocks.items()}
    held = server_info.Occupancy(message.running_searches, message.waiting_searches, blocks)
    return from_wire(message, occupancy=held)


# ---- any message


def to_wire(value: Any) -> Any:
    """Convert a dataclass that has a message, such as a result, to it."""
    return _to_message(value, _MESSAGES[type(value)])


def from_wire(message: Any, **more: Any) -> Any:
    """Convert a message to its dataclass.

    Args:
        message: the message.
        **more: values of fields that it does not have.

    Raises:
        ValueError: an enum value is unknown to this version.
    """
    kind = _DATACLASSES[message.DESCRIPTOR.name]
    return kind(**more, **_values(message, kind))


def _to_message(value: Any, kind: type[Any], only: tuple[_WireField, ...] = ()) -> Any:
    """Convert a dataclass to a message; raises where a value cannot be written."""
    items = ((field, getattr(value, field.attribute)) for field in only or _wire_fields(kind.DESCRIPTOR, type(value)))
    return kind(**{field.wire.name: field.write(item) for field, item in items if item is not None})


def _values(message: Any, kind: Any, violations: list[Violation] | None = None) -> dict[str, Any]:
    """The values of a dataclass's fields; unknown enum values go to `violations`, or raise ValueError without it."""
    values: dict[str, Any] = {}
    for field in _wire_fields(message.DESCRIPTOR, kind):
        if field.attribute not in kind.__dataclass_fields__:
            continue  # a property
        name, is_enum = field.wire.name, field.wire.enum_type is not None
        item = getattr(message, name)
        if violations is not None and _is_repeated(field.wire) and len(item) > MAX_ITEMS:
            violations.append(Violation(name, f"must be at most {MAX_ITEMS} items, is {len(item)}"))
            item = ()
        absent = field.wire.has_presence and not message.HasField(name)
        if not field.required and (absent or (is_enum and item == 0)):  # an enum without presence is absent if 0
            continue
        try:
            values[field.attribute] = ("" if is_enum else None) if absent else field.read(item)
        except ValueError as error:
            if violations is None:
                raise
            violations.append(Violation(name, str(error)))
    return values


@cache
def _wire_fields(message: Any, kind: type) -> tuple[_WireField, ...]:
    """The message fields, by descriptor, that the dataclass also has."""
    named = ((_RENAMED.get(field.name) or field.name, field) for field in message.fields)
    return tuple(_wire_field(field, attribute, kind) for attribute, field in named if hasattr(kind, attribute))


def _wire_field(field: Any, attribute: str, kind: Any) -> _WireField:
    declared = kind.__dataclass_fields__.get(attribute)
    required = declared is not None and declared.default is MISSING and declared.default_factory is MISSING
    wire, enum, message = _WireField(field, attribute, required), field.enum_type, field.message_type
    if enum is not None:
        return wire._replace(write=partial(_number, enum), read=partial(_word, enum))
    if message is None:
        return wire._replace(read=tuple) if _is_repeated(field) else wire
    if message is Duration.DESCRIPTOR:
        return wire._replace(write=duration, read=lambda given: given.ToNanoseconds() / 1e9)
    if field.name == "logit_bias":
        return wire._replace(
            write=lambda text: dict(read_bias(text)), read=lambda bias: mapping_text(dict(sorted(bias.items())))
        )
    if message.GetOptions().map_entry:
        return wire._replace(read=dict)
    write, read = _PLAIN.get(message.name) or (partial(_to_message, kind=GetMessageClass(message)), from_wire)
    if _is_repeated(field):
        return wire._replace(write=partial(_each, write), read=partial(_each, read))
    return wire._replace(write=write, read=read)


def _is_repeated(field: Any) -> bool:
    """`label` is deprecated in protobuf versions that have `is_repeated`."""
    return field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED


def _each(convert: Callable[[Any], Any], values: Any) -> tuple[Any, ...]:
    return tuple(convert(value) for value in values)


def _number(enum: Any, word: str) -> int | None:
    """The wire number of an enum value; 0 for an unknown value of an open enum, else raises KeyError."""
    if enum.name in _ENUMS:
        return _numbers(enum)[_ENUMS[enum.name](word)]
    return _numbers(enum).get(word, 0) if word else None


def _word(enum: Any, number: int) -> str:
    """The enum value of a wire number; `unspecified` for an unknown number of an open enum."""
    words = {number: word for word, number in _numbers(enum).items()}
    if (kind := _ENUMS.get(enum.name)) is None:
        return words.get(number, "unspecified")
    if number not in words or words[number] not in list(kind):
        raise ValueError(f"must be one of {', '.join(kind)}, is the unknown value {number}")
    return kind(words[number])


@cache
def _numbers(enum: Any) -> dict[str, int]:
    """Wire numbers by enum value: `STOP_REASON_FINISHED` is `finished` of StopReason."""
    prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.name).upper() + "_"
    return {v.name.removeprefix(prefix).lower().replace("_", "-"): v.number for v in enum.values}


def duration(seconds: float) -> Duration:
    """Return a time as a message."""
    written = Duration()
    written.FromNanoseconds(round(seconds * 1e9))
    return written
