"""Traces: the search tree and every decision of the algorithm as JSON, which can be replayed without a model.

A trace is one JSON object; this is version 2.

    schema          "espalier.trace"
    version         1; readers must reject other numbers
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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from espalier.engine.errors import EspalierError
from espalier.search.algorithms import make_algorithm
from espalier.search.request import SearchRequest, with_own_code
from espalier.search.result import ExpandRecord, SearchResult, TellRecord
from espalier.search.schema import from_values
from espalier.search.trace_schema import OF_CANDIDATES, OF_RESULT, PARTS, wrong_field
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
    if missing := [part for part in PARTS if part not in trace]:
        raise TraceError(f"{file} is a trace without {', '.join(missing)}")
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
