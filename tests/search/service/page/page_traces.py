"""Traces that the page is shown: recorded ones, and large ones that are made up."""

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def trace(name: str) -> dict[str, Any]:
    """A recorded trace."""
    return json.loads((HERE / f"{name}.json").read_text())


def wide_trace(rounds: int, children: int) -> dict[str, Any]:
    """A trace of a search that keeps one of many children in each round."""
    recorded = trace("beam")
    nodes: list[dict[str, Any]] = recorded["nodes"][:1]
    done = []
    parent = nodes[0]
    for number in range(rounds):
        told = []
        for child in range(children):
            kept = child == children // 2
            last = kept and number == rounds - 1
            node = {
                "node_id": len(nodes),
                "parent_id": parent["node_id"],
                "path": [*parent["path"], child],
                "text": f"Step {number} says {child} in a sentence that is longer than its column\n\n",
                "score": child / children,
                "termination": "eos" if last else "" if kept else "pruned",
                "multiplicity": 1,
                "tokens": 12,
            }
            nodes.append(node)
            termination = "eos" if last else ""
            told.append({"path": node["path"], "termination": termination, "multiplicity": 1, "draws": [child]})
        parent = nodes[-children + children // 2]
        moment = {"seconds": number + 1.0, "nodes": len(nodes), "blocks": {"generator": number, "verifier": 2}}
        done.append({"asked": [], "told": told, "kept": [parent["path"]], "moments": [moment]})
    best = {"node_id": parent["node_id"], "answer": "7", "score": 0.5, "multiplicity": 1}
    return recorded | {"nodes": nodes, "rounds": done, "best": parent["node_id"], "candidates": [best], "answer": "7"}
