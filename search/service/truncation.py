"""Events cut to the size that may be sent, for every transport alike."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from espalier.search.result import CandidateDone, Event, Finished, StepDone

T = TypeVar("T")


def fitted(
    event: Event, encode: Callable[[Event, dict[str, int]], T], size: Callable[[T], int], limit: int
) -> T | None:
    """Encode an event within a size limit; None for progress that cannot be cut enough.

    A result loses its tree, then its last candidates, and is returned even if it is still too large. Progress, which
    the result repeats, loses its nodes and its steps.

    Args:
        event: what happened.
        encode: makes a message of an event and the numbers of what it lacks, by their fields `omitted_…`.
        size: of a message, in bytes.
        limit: largest size, in bytes.
    """
    message = None
    for smaller, omitted in _smaller(event):
        message = encode(smaller, omitted)
        if size(message) <= limit:
            return message
    return message if isinstance(event, Finished) else None


def _smaller(event: Event) -> Iterator[tuple[Event, dict[str, int]]]:
    """An event, and then with less and less, and how much of what is omitted."""
    yield event, {}
    match event:
        case Finished(result=result):
            whole, omitted = len(result.candidates), {"omitted_nodes": len(result.nodes)}
            result = replace(result, nodes=())
            yield replace(event, result=result), omitted
            while result.candidates:  # halved, because encoding takes as long as measuring
                result = replace(result, candidates=result.candidates[: len(result.candidates) // 2])
                yield replace(event, result=result), {**omitted, "omitted_candidates": whole - len(result.candidates)}
        case StepDone():
            best = event.best and replace(event.best, steps=())
            yield replace(event, kept=(), nodes=(), best=best), {"omitted_nodes": len(event.nodes)}
        case CandidateDone():
            yield replace(event, candidate=replace(event.candidate, steps=())), {}
        case _:
            pass
