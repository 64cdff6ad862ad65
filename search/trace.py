"""Traces: the search tree and every decision of the algorithm as JSON, which can be replayed without a model.

A trace is one JSON object; this is version 2.

    schema          "espalier.trace"
    version         2; readers must reject other numbers
    search_id       id of the search
    configuration   the request with every default filled in
    digests         SHA-256 digest of each model's files, by role
    stop_reason     finished, budget, deadline, cancelled or failed
    answer, score   the selected answer and its score; empty and null without one
    grader          how the vote compared answers, with its version
    usage           the cost; see `Usage`
    best            node_id of the last node of the selected path, null without one
    candidates      complete paths that vote: node_id of their last node, answer, score, multiplicity
    nodes           every node at the end of the search, the root first: node_id, parent_id, path, text, score,
                    termination, multiplicity, tokens, log_probability, thought_chars, appended, probe; see
                    `NodeRecord` and `Probe`
    rounds          exchanges between search and algorithm, in order:
        asked       expansions: path of the node, children, to_end, greedy; see `Expand`
        told        nodes at that time: path, termination ("" if it may be expanded), multiplicity, draws
        kept        paths of the nodes that the algorithm kept
        moments     seconds since the start, number of nodes, and KV blocks held by role, at the end of the round and,
                    where paths are sampled to their ends, before; see `MemorySample`

A path is the list of child indices from the root, whose own path is []. It does not depend on the order of computation.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from espalier.engine.errors import EspalierError, rule_of
from espalier.engine.models.text_files import shown
from espalier.search.algorithms import make_algorithm
from espalier.search.request import SearchRequest, with_own_code
from espalier.search.result import Candidate, ExpandRecord, SearchResult, TellRecord
from espalier.search.schema import from_values
from espalier.search.tree import Node, Termination

SCHEMA, VERSION = "espalier.trace", 2
MAX_BYTES = 2**29
"""Of a file that is read."""


class TraceError(EspalierError):
    """A trace cannot be read, or replaying it gives other decisions."""


def trace_of(result: SearchResult) -> dict[str, Any]:
    """Return the trace of a search that ran in this process, as JSON-serializable values."""
    whole = asdict(result)
    return {
        "schema": SCHEMA,
        "version": VERSION,
        **{name: whole[name] for name in OF_RESULT},
        "best": result.best.node_id if result.best else None,
        "candidates": [{name: one[name] for name in OF_CANDIDATES} for one in whole["candidates"]],
        "nodes": whole["nodes"],
        "rounds": whole["rounds"],
    }


def write_trace(result: SearchResult, file: Path) -> None:
    """Write the trace of `result` to `file` as JSON; all of it or nothing.

    Raises:
        TraceError: it cannot be written.
    """
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(trace_of(result), indent=1) + "\n", encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise TraceError(f"cannot write the trace {file}: {error.strerror}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def read_trace(file: Path) -> dict[str, Any]:
    """Read the trace in `file`.

    Raises:
        TraceError: the file is not a trace, has another version, lacks a part, or holds a value that means nothing.
    """
    try:
        if (size := file.stat().st_size) > MAX_BYTES:
            raise TraceError(f"{file} has {size:,} bytes; traces of up to {MAX_BYTES:,} are read")
        text = file.read_text(encoding="utf-8-sig")
        trace = json.loads(text, parse_constant=_refuse)
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise TraceError(f"cannot read a trace from {file}: {why}") from error
    if not isinstance(trace, dict) or trace.get("schema") != SCHEMA:
        raise TraceError(f"{file} is no trace: its schema is not {SCHEMA!r}")
    if trace.get("version") != VERSION:
        raise TraceError(
            f"{file} is a trace of version {trace.get('version')}; this Espalier reads version {VERSION}: record the "
            "search again with espalier solve --trace"
        )
    if wrong := wrong_field(text):
        raise TraceError(f"{file} is a damaged trace: {wrong}")
    return trace


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def replay(trace: dict[str, Any], algorithm: str = "") -> int:
    """Pass the recorded inputs of a trace to its algorithm and check that it makes the same decisions.

    Args:
        trace: from `read_trace`.
        algorithm: the trace's MODULE:CLASS, for a search of the user's own; no code is loaded because a file names it.

    Returns:
        The number of rounds.

    Raises:
        TraceError: a decision differs, or the trace is inconsistent.
    """
    try:
        recorded = trace["configuration"]["algorithm"]
        if algorithm and algorithm != recorded:
            raise TraceError(f"--algorithm {algorithm}: the trace records {recorded}")
        if ":" in recorded and not algorithm:
            raise TraceError(
                f"the trace records {recorded}, which is no built-in search; load it by --algorithm {recorded}"
            )
        if algorithm:
            trace = {**trace, "configuration": with_own_code(trace["configuration"])}
        return _Replay(trace).run()
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError, EspalierError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"the trace contradicts itself: {error!r}") from error


class _Replay:
    """A search without an engine: its nodes come from a trace."""

    def __init__(self, trace: dict[str, Any]) -> None:
        self._trace = trace
        self._root = Node(0, None, ())
        self._nodes = dict(self._grown(trace["nodes"]))
        self._algorithm = make_algorithm(from_values(SearchRequest, trace["configuration"]), self._root)

    def _grown(self, records: list[dict[str, Any]]) -> Iterator[tuple[tuple[int, ...], Node]]:
        """Create all nodes by path, without terminations, which are set when `tell` passes the node."""
        by_id = {0: self._root}
        yield (), self._root
        for record in records[1:]:
            node = Node(record["node_id"], by_id[record["parent_id"]], tuple(record["path"]))
            node.text, node.score, node.num_tokens = record["text"], record["score"], record["tokens"]
            node.thought_chars = record.get("thought_chars", 0)
            by_id[node.node_id] = node
            yield node.path, node

    def run(self) -> int:
        rounds = self._trace["rounds"]
        for number, recorded in enumerate(rounds):
            asked = [asdict(ExpandRecord.of(expand)) for expand in self._algorithm.ask()]
            self._compare(number, "asks for", asked, recorded["asked"])
            for expand in recorded["asked"]:
                self._nodes[tuple(expand["path"])].num_children += expand["children"]
            self._algorithm.tell([self._told(TellRecord(**told)) for told in recorded["told"]])
            kept = [node.path for node in self._algorithm.kept()]
            self._compare(number, "keeps", kept, recorded["kept"])
        if self._trace["stop_reason"] == "finished" and not self._algorithm.finished():
            raise TraceError(f"after round {len(rounds)} the algorithm goes on, and the trace says it finished")
        return len(rounds)

    def _told(self, told: TellRecord) -> Node:
        node = self._nodes[tuple(told.path)]
        node.termination = Termination(told.termination) if told.termination else None
        node.multiplicity, node.draws = told.multiplicity, tuple(told.draws)
        return node

    @staticmethod
    def _compare(number: int, verb: str, ours: list[Any], recorded: list[Any]) -> None:
        if (ours := json.loads(json.dumps(ours))) != json.loads(json.dumps(recorded)):
            raise TraceError(f"in round {number + 1} the algorithm {verb} {ours} where the trace has {recorded}")


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
    from pydantic import ConfigDict, TypeAdapter  # slow to import

    types, of_candidate = (get_type_hints(kind, include_extras=True) for kind in (SearchResult, Candidate))
    candidate: Any = make_dataclass("TracedCandidate", [(name, of_candidate[name]) for name in OF_CANDIDATES])
    types |= {"configuration": dict[str, Any], "best": int | None, "candidates": tuple[candidate, ...]}
    trace = make_dataclass("Trace", [(name, types[name]) for name in PARTS])
    trace.__pydantic_config__ = ConfigDict(allow_inf_nan=False)
    return TypeAdapter(trace)


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
        known[node.node_id] = node.path
    if len(set(known.values())) < len(known):
        yield "nodes: two of them have one path"


def _in_selection(trace: Any) -> Iterator[str]:
    named = {f"candidates.{place}.node_id": candidate.node_id for place, candidate in enumerate(trace.candidates)}
    known = {None, *(node.node_id for node in trace.nodes)}
    for place, node_id in ({"best": trace.best} | named).items():
        if node_id not in known:
            yield f"{place}: there is no node {node_id}"


def _in_rounds(trace: Any) -> Iterator[str]:
    known = {node.path for node in trace.nodes}
    for place, one in enumerate(trace.rounds):
        named = (*(each.path for each in (*one.asked, *one.told)), *one.kept)
        if missing := [path for path in named if path not in known]:
            yield f"rounds.{place}: there is no node of path {list(missing[0])}"
        if not all(moment.nodes <= len(trace.nodes) for moment in one.moments):
            yield f"rounds.{place}.moments: nodes must be at most {len(trace.nodes)}"
