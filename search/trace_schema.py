"""Types of a trace's fields, and checks that its parts fit together; see `trace`."""

import math
from collections.abc import Iterator
from dataclasses import make_dataclass
from functools import cache
from typing import Any, get_type_hints

from espalier.engine.errors import rule_of
from espalier.engine.models.text_files import shown
from espalier.search.result import Candidate, SearchResult
from espalier.search.tree import Termination

OF_RESULT = ("search_id", "configuration", "digests", "stop_reason", "answer", "score", "grader", "usage")
"""Fields of a result that a trace has as they are."""

OF_CANDIDATES = ("node_id", "answer", "score", "multiplicity")
"""Fields of a candidate that a trace has; its steps are nodes."""

PARTS = (*OF_RESULT, "best", "candidates", "nodes", "rounds")
"""The parts of a trace besides its schema and version."""


def wrong_field(text: str) -> str | None:
    """Return the first error of a trace, by the field's name; None for a valid one.

    Args:
        text: the trace, as JSON.
    """
    from pydantic import ValidationError

    try:
        trace = _adapter().validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {rule_of(first['msg']).lower()}, is {shown(first['input'])}"
    return next((wrong for part in (_in_nodes, _in_selection, _in_rounds) for wrong in part(trace)), None)


@cache
def _adapter() -> Any:
    """Validates the parts of a trace, most of which have the types of a result's fields."""
    from pydantic import TypeAdapter  # slow to import

    types, of_candidate = get_type_hints(SearchResult), get_type_hints(Candidate)
    candidate: Any = make_dataclass("TracedCandidate", [(name, of_candidate[name]) for name in OF_CANDIDATES])
    types |= {"configuration": dict[str, Any], "best": int | None, "candidates": tuple[candidate, ...]}
    return TypeAdapter(make_dataclass("Trace", [(name, types[name]) for name in PARTS]))


def _in_nodes(trace: Any) -> Iterator[str]:
    """Nodes that are no tree: the root is first, and every other one comes after its parent."""
    known: dict[int, tuple[int, ...]] = {}
    if not trace.nodes:
        yield "nodes: it has none, not even a root"
    for place, node in enumerate(trace.nodes):
        name = f"nodes.{place}"
        if node.node_id in known:
            yield f"{name}.node_id: {node.node_id} is another node's, too"
        if place == 0 and (node.parent_id is not None or node.path):
            yield f"{name}: the first node must be the root, without a parent and with an empty path"
        if place and (node.parent_id is None or known.get(node.parent_id) != node.path[:-1] or not node.path):
            yield f"{name}.parent_id: {node.parent_id} is no node before it at the path {list(node.path[:-1])}"
        if node.termination and node.termination not in list(Termination):
            yield f"{name}.termination: must be one of {', '.join(Termination)}, is {node.termination!r}"
        if min(node.tokens, node.multiplicity, node.thought_chars) < 0:
            yield f"{name}: tokens, multiplicity and thought_chars must be at least 0"
        if not all(math.isfinite(value) for value in (node.score, node.log_probability) if value is not None):
            yield f"{name}: score and log_probability must be finite"
        if node.probe and not (0 <= node.probe.certainty <= 1 and node.probe.tokens >= 0):
            yield f"{name}.probe: certainty must be from 0 to 1, and tokens at least 0"
        known[node.node_id] = node.path
    if len(set(known.values())) < len(known):
        yield "nodes: two of them have one path"


def _in_selection(trace: Any) -> Iterator[str]:
    known = {node.node_id for node in trace.nodes}
    if trace.best is not None and trace.best not in known:
        yield f"best: there is no node {trace.best}"
    for place, candidate in enumerate(trace.candidates):
        if candidate.node_id not in known:
            yield f"candidates.{place}.node_id: there is no node {candidate.node_id}"
    scores = (trace.score, *(candidate.score for candidate in trace.candidates))
    if not all(math.isfinite(score) for score in scores if score is not None):
        yield "score: scores of candidates must be finite"


def _in_rounds(trace: Any) -> Iterator[str]:
    known = {node.path for node in trace.nodes}
    for place, one in enumerate(trace.rounds):
        named = (*(each.path for each in (*one.asked, *one.told)), *one.kept)
        if missing := [path for path in named if path not in known]:
            yield f"rounds.{place}: there is no node of path {list(missing[0])}"
        if any(each.children < 1 for each in one.asked):
            yield f"rounds.{place}.asked: children must be at least 1"
        if not all(math.isfinite(moment.seconds) and moment.seconds >= 0 for moment in one.moments):
            yield f"rounds.{place}.moments: seconds must be at least 0"
        if not all(0 <= moment.nodes <= len(trace.nodes) for moment in one.moments):
            yield f"rounds.{place}.moments: nodes must be at most {len(trace.nodes)}"
