"""Which nodes of a growing tree have changed since they were last reported."""

from collections.abc import Iterable, Sequence

from espalier.search.result import NodeRecord
from espalier.search.tree import Node


class ChangedNodes:
    """Compares a tree's nodes with what was last reported of them.

    A round changes no nodes but its own and those that were kept before it, so no others are looked at.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        """Watch a tree; `nodes` are all of its nodes in order of creation, and grow with it."""
        self._nodes = nodes
        self._seen = 0
        self._reported: dict[Node, NodeRecord | None] = {}  # those that may still change, in order of creation

    def take(self) -> tuple[NodeRecord, ...]:
        """Return the nodes that are new or have changed since the last call, in order of creation."""
        self._reported |= dict.fromkeys(self._nodes[self._seen :])
        self._seen = len(self._nodes)
        now = {node: node.record() for node in self._reported}
        changed = tuple(record for node, record in now.items() if record != self._reported[node])
        self._reported |= now
        return changed

    def end_round(self, kept: Iterable[Node]) -> None:
        """Watch none of the nodes so far but `kept`."""
        kept = set(kept)
        self._reported = {node: record for node, record in self._reported.items() if node in kept}
