"""A search tree as notebooks show it: a line for each step, without a style sheet or a script."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from html import escape

from espalier.search.tree import NodeRecord

_STEPS = 200
"""Steps that are shown: those of the selected path, and others from the root on."""
_LINE = 88
"""Characters of a step's text."""


def tree_html(nodes: Sequence[NodeRecord], selected: Collection[int], answers: Mapping[int, str]) -> str:
    """Return the tree, escaped, with its selected path bold; empty where there is none.

    Args:
        nodes: all of its nodes, the root too.
        selected: ids of the selected path's nodes.
        answers: of complete paths, by the id of their last node.
    """
    nodes = [node for node in nodes if node.termination != "duplicate"]
    first = sorted(nodes, key=lambda node: (node.node_id not in selected, node.node_id))[:_STEPS]
    shown = {node.node_id for node in first}
    children: dict[int | None, list[NodeRecord]] = {}
    for node in sorted(first, key=lambda node: node.path):
        children.setdefault(node.parent_id if node.parent_id in shown else None, []).append(node)
    lines = list[str]()
    for indent, node in _depth_first(children):
        line = escape(indent + _described(node, answers))
        lines.append(f"<b>{line}</b>" if node.node_id in selected else line)
    if not lines:
        return ""
    if left := len(nodes) - len(first):
        lines.append(f"… and {left} more steps")
    return f"<details open><summary>tree</summary><pre>{chr(10).join(lines)}</pre></details>"


def _depth_first(children: dict[int | None, list[NodeRecord]]) -> Iterator[tuple[str, NodeRecord]]:
    """Every node below the root with what is drawn before it; only where paths fork does a branch move right."""
    roots = children.get(None, [])
    waiting = [("", node) for node in reversed(roots)]
    while waiting:
        indent, node = waiting.pop()
        below = children.get(node.node_id, [])
        if node.depth:
            yield indent, node
        forks = len(below) > 1
        waiting += [(f"{indent.replace('└', ' ')}└ " if forks else indent, each) for each in reversed(below)]


def _described(node: NodeRecord, answers: Mapping[int, str]) -> str:
    text = " ".join(node.text.split())
    text = text if len(text) <= _LINE else text[: _LINE - 1] + "…"
    score = "     " if node.score is None else f"{node.score:.3f}"
    times = f" ×{node.multiplicity}" if node.multiplicity > 1 else ""
    answer = answers.get(node.node_id)
    end = f"  → {answer}" if answer else f"  ({node.termination})" if node.termination else ""
    return f"{score}  {text or '(end)'}{times}{end}"
