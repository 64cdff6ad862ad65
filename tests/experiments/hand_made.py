"""A small search tree written by hand."""

from typing import Any

from espalier.search.request import AlgorithmName, SearchRequest
from espalier.search.result import Candidate, NodeRecord, ScoredStep, SearchResult, StopReason, Usage

LONG = "step by step " * 20


def node(
    node_id: int, parent_id: int | None, depth: int, text: str, score: float | None, end: str = "", times: int = 1
) -> NodeRecord:
    return NodeRecord(node_id, parent_id, (node_id,) * depth, text, score, end, times, len(text.split()))


ROOT = node(0, None, 0, "", None)
NODES = (
    ROOT,
    node(1, 0, 1, "47+25=72\n\n", 0.9125, times=3),
    node(2, 0, 1, "47+25=73\n\n", 0.2, "pruned"),
    node(3, 0, 1, "47+25=72\n\n", None, "duplicate"),
    node(4, 1, 2, "72-24=48\n\n\\boxed{48}", 0.8, "eos"),
    node(5, 1, 2, LONG, 0.95, "length"),
    node(6, 1, 2, "", None, "eos"),
    *(node(10 + i, 1, 2, f"72-24={40 + i}\n\n", 0.1 - i / 100, "pruned") for i in range(6)),
)
BEST = Candidate(4, "48", 0.8, 1, (ScoredStep("47+25=72\n\n", 0.9125), ScoredStep("72-24=48\n\n\\boxed{48}", 0.8)))


def result(**changes: Any) -> SearchResult:
    fields = {
        "search_id": "abc",
        "answer": "48",
        "score": 0.8,
        "stop_reason": StopReason.FINISHED,
        "best": BEST,
        "candidates": (BEST,),
        "nodes": NODES,
        "usage": Usage(301, 300, 250, 204, 64, 63, 50, 12, 7, 1, 3 * 2**20, 2**21, 2**20, 16, 10, 0.25, 0.1, 1.5),
        "configuration": SearchRequest("What is 47+25-24?", AlgorithmName.BEAM),
        "digests": {"generator": "d1", "verifier": "d2"},
        "grader": "exact-match",
    }
    return SearchResult(**{**fields, **changes})
