"""Monte Carlo tree search with the verifier's scores as values."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from annotated_types import Interval

from espalier.engine.errors import Violation
from espalier.search.algorithms.base import SAMPLING, Expand, MemoryEstimate, SearchAlgorithm, path_score, viable
from espalier.search.common_fields import CommonFields
from espalier.search.schema import option
from espalier.search.tree import Node

MAX_TREE_NODES = 4096
"""Limit on the nodes created: simulations times M."""


@dataclass(slots=True)
class _Place:
    """Search statistics of a node.

    Attributes:
        prior: its share of its parent's samples.
        visits: number of values backed up through it, including its own.
        total: sum of those values.
        children: in path order; empty if not expanded.
        barren: whether no descendant is open or complete.
    """

    node: Node
    prior: float = 1.0
    visits: int = 0
    total: float = 0.0
    children: list["_Place"] = field(default_factory=list)
    barren: bool = False


class MonteCarloSearch(SearchAlgorithm):
    """PUCT tree search over steps (Silver et al., 2017): sampled steps are actions, verifier scores are values.

    A simulation descends from the root to the child with the largest

        Q + c * P * sqrt(visits of the parent) / (1 + visits of the child)

    where Q is the mean of the values backed up through the child and P its prior: a child drawn m times out of M
    samples has the prior m / M. At an open leaf, the simulation samples M children and backs up each child's path
    score, once per sample, to all its ancestors; a child that was cut off has the value 0. At a complete path, it
    samples nothing and backs up the path's score again. Ties go to the lower path.

    The search ends when all simulations are used or no leaf is open. If no path is complete by then, one path is
    sampled to its end from the open leaf reached by the most visited children.
    """

    uses = ("expansion", "vote", *SAMPLING)

    @dataclass(frozen=True)
    class Parameters:
        """Parameters of `mcts`."""

        simulations: int = option(32, "number of simulations", Interval(ge=1, le=1024))
        exploration: float = option(1.25, "PUCT exploration constant", Interval(ge=0, le=100))

    def __init__(self, request: CommonFields, root: Node) -> None:
        its = self.parameters(request)
        self._expansion = request.expansion
        self._exploration: float = its.exploration
        self._aggregation = request.aggregation
        self._root = _Place(root)
        self._left: int = its.simulations
        self._open: dict[Node, _Place] = {root: self._root}
        self._complete: list[Node] = []
        self._walk: list[_Place] = []  # from the root to the leaf being expanded
        self._next: Expand | None = None
        self._simulate()

    @classmethod
    def memory(cls, request: CommonFields) -> tuple[MemoryEstimate, ...]:
        """Every node of the tree as one step; or, at the end, the one path sampled to completion."""
        return (MemoryEstimate(paths=0, steps=cls.sampled(request)[1]), MemoryEstimate(paths=2))

    @classmethod
    def sampled(cls, request: CommonFields) -> tuple[int, int]:
        """M children in each simulation, and the path that ends the search."""
        return 1, cls.parameters(request).simulations * request.expansion

    @classmethod
    def violations(cls, request: CommonFields) -> list[Violation]:
        """A tree of more than `MAX_TREE_NODES`."""
        if (nodes := cls.sampled(request)[1]) <= MAX_TREE_NODES:
            return []
        too_large = f"simulations * expansion must be at most {MAX_TREE_NODES}, is {nodes}"
        return [Violation("simulations", too_large)]

    def ask(self) -> Sequence[Expand]:
        """M children of one leaf, or the path that ends the search."""
        assert self._next is not None
        return [self._next]

    def tell(self, nodes: Sequence[Node]) -> None:
        """Add the children to the tree, back up their values, and descend to the next leaf."""
        assert self._next is not None
        self._complete += [node for node in nodes if node.complete]
        if self._next.to_end:
            self._next = None
            return
        leaf = self._walk[-1]
        del self._open[leaf.node]
        for node in sorted(nodes, key=lambda node: node.path):
            value = path_score(node, self._aggregation) if viable(node) else 0.0
            child = _Place(node, node.multiplicity / self._expansion, barren=not viable(node))
            leaf.children.append(child)
            self._back_up([*self._walk, child], value, node.multiplicity)
            if node.open:
                self._open[node] = child
        for place in reversed(self._walk):
            place.barren = all(child.barren for child in place.children)
        self._simulate()

    def finished(self) -> bool:
        """True if there is no leaf left to expand."""
        return self._next is None

    def kept(self) -> Sequence[Node]:
        """Every open leaf while simulations remain, and the complete paths."""
        if self._next is None or self._next.to_end:
            return [*([self._next.node] if self._next else []), *self._complete]
        return [*self._open, *self._complete]

    def _simulate(self) -> None:
        """Run simulations until one reaches an open leaf."""
        self._next = None
        while self._left and self._open:
            self._left -= 1
            self._walk = self._descend(self._worth)
            leaf = self._walk[-1]
            if leaf.node.open:
                self._next = Expand(leaf.node, self._expansion)
                return
            self._back_up(self._walk, path_score(leaf.node, self._aggregation), 1)
        if self._open and not self._complete:
            leaf = self._descend(lambda _, child: child.visits)[-1]
            self._next = Expand(leaf.node, 1, to_end=True)

    def _descend(self, worth: Callable[[_Place, _Place], float]) -> list[_Place]:
        walk = [self._root]
        while walk[-1].children:
            parent = walk[-1]
            fertile = [child for child in parent.children if not child.barren]
            walk.append(max(fertile, key=lambda child: worth(parent, child)))
        return walk

    def _worth(self, parent: _Place, child: _Place) -> float:
        explore = self._exploration * child.prior * math.sqrt(parent.visits) / (1 + child.visits)
        return child.total / child.visits + explore

    @staticmethod
    def _back_up(walk: list[_Place], value: float, times: int) -> None:
        for place in walk:
            place.visits += times
            place.total += times * value
