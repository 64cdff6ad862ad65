"""Messages of `espalier.v1` to and from the dataclasses of `search`: pure, in both directions.

Fields keep their names, so most of a message converts by listing them. `tests` holds that no field and no enum value is
missing on either side.
"""

from typing import Any

from google.protobuf.duration_pb2 import Duration

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.request import Limits, SearchRequest, validate
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
    Usage,
)
from espalier.search.service.wire_enums import (
    AGGREGATION,
    ALGORITHM,
    STOP_REASON,
    VOTE,
    WireEnum,
    termination_from_wire,
    termination_to_wire,
)
from espalier.v1 import search_pb2 as pb

MAX_PRIORITY = 100

_ENUMS: dict[str, WireEnum[Any]] = {"algorithm": ALGORITHM, "vote": VOTE, "aggregation": AGGREGATION}
_PLAIN = (
    "beam_width",
    "expansion",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "max_steps",
    "max_step_tokens",
    "max_tokens",
    "seed",
    "lookahead_steps",
    "simulations",
    "exploration",
    "rebase_temperature",
    "iterations",
    "confidence",
    "generator_budget",
    "verifier_budget",
    "merge_duplicates",
)
_COUNTS = (
    "generator_tokens",
    "generator_tree_tokens",
    "generator_saved_tokens",
    "generated_tokens",
    "verifier_tokens",
    "verifier_tree_tokens",
    "verifier_saved_tokens",
    "nodes",
    "pruned",
    "duplicates",
    "peak_kv_bytes",
    "generator_peak_kv_bytes",
    "verifier_peak_kv_bytes",
    "logical_blocks",
    "physical_blocks",
)


# ---- the request


def request_to_wire(
    request: SearchRequest, include_nodes: bool | None = None, priority: int | None = None
) -> pb.SolveProblemRequest:
    """The message for `request`, and for what a caller asks for beside it.

    Raises:
        InvalidRequestError: values that no message can hold, such as a number over 32 bits; lists all of them.
    """
    message = pb.SolveProblemRequest()
    violations: list[Violation] = []

    def put(field: str, value: Any) -> None:
        if value is None:
            return
        try:
            setattr(message, field, _ENUMS[field].to_wire(value) if field in _ENUMS else value)
        except (KeyError, TypeError, ValueError):
            violations.append(Violation(field, "cannot be sent: wrong type, unknown, or out of range"))

    for field in ("problem", *_PLAIN, *_ENUMS):
        put(field, getattr(request, field))
    if request.time_limit is not None:
        try:
            message.time_limit.CopyFrom(_duration(request.time_limit))
        except (TypeError, ValueError, OverflowError):
            violations.append(Violation("time_limit", "cannot be sent: wrong type or out of range"))
    if priority is not None:
        message.priority = priority
    if include_nodes is not None:
        message.include_nodes = include_nodes
    if violations:
        raise InvalidRequestError(violations)
    return message


def request_from_wire(message: pb.SolveProblemRequest) -> tuple[SearchRequest, list[Violation]]:
    """The request in `message`, defaults where it says nothing, and what in it has no meaning here."""
    values: dict[str, Any] = {"problem": message.problem}
    violations: list[Violation] = []
    for field in _PLAIN:
        if message.HasField(field):
            values[field] = getattr(message, field)
    if message.HasField("time_limit"):
        values["time_limit"] = message.time_limit.ToNanoseconds() / 1e9
    for field, enum in _ENUMS.items():
        number = getattr(message, field)
        if number == 0:
            continue
        if (member := enum.from_wire(number)) is not None:
            values[field] = member
        else:
            words = ", ".join(enum.words)
            violations.append(Violation(field, f"must be one of {words}, is the unknown value {number}"))
    return SearchRequest(**values), violations


def checked_request(message: pb.SolveProblemRequest, limits: Limits) -> SearchRequest:
    """The request in `message`.

    Raises:
        InvalidRequestError: listing everything that is wrong with it, under `limits`.
    """
    request, violations = request_from_wire(message)
    if abs(message.priority) > MAX_PRIORITY:
        rule = f"must be between {-MAX_PRIORITY} and {MAX_PRIORITY}, is {message.priority}"
        violations.append(Violation("priority", rule))
    try:
        validate(request, limits)
    except InvalidRequestError as error:
        violations = violations + error.violations
    if violations:
        raise InvalidRequestError(violations)
    return request


# ---- the result


def result_to_wire(result: SearchResult, include_nodes: bool) -> pb.SearchResult:
    """The message for `result`, with the search tree where asked for."""
    return pb.SearchResult(
        search_id=result.search_id,
        answer=result.answer,
        score=result.score,
        stop_reason=STOP_REASON.to_wire(result.stop_reason),
        best=None if result.best is None else _candidate_to_wire(result.best),
        candidates=map(_candidate_to_wire, result.candidates),
        nodes=map(_node_to_wire, result.nodes) if include_nodes else (),
        usage=_usage_to_wire(result.usage),
        configuration=request_to_wire(result.configuration),
        digests=result.digests,
        grader=result.grader,
    )


def result_from_wire(message: pb.SearchResult) -> SearchResult:
    """The result in `message`.

    Raises:
        ValueError: it holds an enum value this version does not know.
    """
    stop_reason = STOP_REASON.from_wire(message.stop_reason)
    if stop_reason is None:
        raise ValueError(f"unknown stop reason {message.stop_reason}")
    return SearchResult(
        search_id=message.search_id,
        answer=message.answer,
        score=_optional(message, "score"),
        stop_reason=stop_reason,
        best=_candidate_from_wire(message.best) if message.HasField("best") else None,
        candidates=tuple(map(_candidate_from_wire, message.candidates)),
        nodes=tuple(map(_node_from_wire, message.nodes)),
        usage=_usage_from_wire(message.usage),
        configuration=_configuration(message.configuration),
        digests=dict(message.digests),
        grader=message.grader,
    )


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


def event_to_wire(event: Event, include_nodes: bool) -> pb.SolveProblemStreamResponse:
    """The stream message for `event`."""
    match event:
        case Started(search_id, configuration):
            return pb.SolveProblemStreamResponse(
                started=pb.SearchStarted(search_id=search_id, configuration=request_to_wire(configuration))
            )
        case StepDone(search_id, depth, scored, kept, best):
            step = pb.StepDone(
                search_id=search_id,
                depth=depth,
                scored=scored,
                kept=map(_node_to_wire, kept),
                best=None if best is None else _candidate_to_wire(best),
            )
            return pb.SolveProblemStreamResponse(step=step)
        case CandidateDone(search_id, candidate):
            done = pb.CandidateDone(search_id=search_id, candidate=_candidate_to_wire(candidate))
            return pb.SolveProblemStreamResponse(candidate=done)
        case Finished(_, result):
            return pb.SolveProblemStreamResponse(result=result_to_wire(result, include_nodes))


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
        case "started":
            return Started(message.started.search_id, _configuration(message.started.configuration))
        case "step":
            step = message.step
            best = _candidate_from_wire(step.best) if step.HasField("best") else None
            return StepDone(step.search_id, step.depth, step.scored, tuple(map(_node_from_wire, step.kept)), best)
        case "candidate":
            return CandidateDone(message.candidate.search_id, _candidate_from_wire(message.candidate.candidate))
        case "result":
            return Finished(message.result.search_id, result_from_wire(message.result))
    return None


# ---- parts


def _candidate_to_wire(candidate: Candidate) -> pb.Candidate:
    return pb.Candidate(
        node_id=candidate.node_id,
        answer=candidate.answer,
        score=candidate.score,
        multiplicity=candidate.multiplicity,
        steps=[pb.ScoredStep(text=step.text, score=step.score) for step in candidate.steps],
    )


def _candidate_from_wire(message: pb.Candidate) -> Candidate:
    return Candidate(
        node_id=message.node_id,
        answer=message.answer,
        score=_optional(message, "score"),
        multiplicity=message.multiplicity,
        steps=tuple(ScoredStep(step.text, _optional(step, "score")) for step in message.steps),
    )


def _node_to_wire(node: NodeRecord) -> pb.SearchNode:
    return pb.SearchNode(
        node_id=node.node_id,
        parent_id=node.parent_id,
        depth=node.depth,
        text=node.text,
        score=node.score,
        termination=termination_to_wire(node.termination),
        multiplicity=node.multiplicity,
        path=node.path,
        tokens=node.tokens,
    )


def _node_from_wire(message: pb.SearchNode) -> NodeRecord:
    return NodeRecord(
        node_id=message.node_id,
        parent_id=_optional(message, "parent_id"),
        path=tuple(message.path),
        text=message.text,
        score=_optional(message, "score"),
        termination=termination_from_wire(message.termination) if message.HasField("termination") else "",
        multiplicity=message.multiplicity,
        tokens=message.tokens,
    )


def _usage_to_wire(usage: Usage) -> pb.Usage:
    return pb.Usage(
        **{field: getattr(usage, field) for field in _COUNTS},
        queue_duration=_duration(usage.queue_seconds),
        first_step_duration=_duration(usage.first_step_seconds),
        search_duration=_duration(usage.seconds),
    )


def _usage_from_wire(message: pb.Usage) -> Usage:
    return Usage(
        **{field: getattr(message, field) for field in _COUNTS},
        queue_seconds=message.queue_duration.ToNanoseconds() / 1e9,
        first_step_seconds=message.first_step_duration.ToNanoseconds() / 1e9,
        seconds=message.search_duration.ToNanoseconds() / 1e9,
    )


def _configuration(message: pb.SolveProblemRequest) -> SearchRequest:
    request, violations = request_from_wire(message)
    if violations:
        raise ValueError(f"unknown configuration: {InvalidRequestError(violations)}")
    return request


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None
