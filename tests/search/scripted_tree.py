"""A search tree written down in advance, and the loop that feeds it to an algorithm; no engine."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from espalier.search.algorithms.base import Expand, SearchAlgorithm
from espalier.search.node import Node, Termination

Path = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One node of the script: its score, how it ended, and its text."""

    score: float | None = None
    end: Termination | None = None
    text: str = "step\n\n"


EOS, BOXED, LENGTH = Termination.EOS, Termination.BOXED, Termination.LENGTH


@dataclass
class Outcome:
    """What an algorithm did with a scripted tree."""

    asked: list[list[tuple[Path, int]]]
    kept: list[list[Path]]
    nodes: dict[Path, Node]

    @property
    def final(self) -> list[Path]:
        return self.kept[-1]


def drive(
    make: Callable[[Node], SearchAlgorithm], script: Mapping[Path, Step], shuffle: random.Random | None = None
) -> Outcome:
    """Run an algorithm to its end; siblings are told in order of path, or shuffled."""
    root = Node(0, None, ())
    algorithm = make(root)
    outcome = Outcome([], [], {})
    while not algorithm.finished():
        expands = list(algorithm.ask())
        outcome.asked.append([(expand.node.path, expand.children) for expand in expands])
        grown = [node for expand in expands for node in _grow(expand, script, outcome.nodes)]
        if shuffle:
            shuffle.shuffle(grown)
        algorithm.tell(grown)
        outcome.kept.append([node.path for node in algorithm.kept()])
    return outcome


def _grow(expand: Expand, script: Mapping[Path, Step], nodes: dict[Path, Node]) -> list[Node]:
    grown = []
    for _ in range(expand.children):
        node = _child(expand.node, script, nodes)
        while expand.to_end and node.termination is None:
            node = _child(node, script, nodes)
        grown.append(node)
    return grown


def _child(parent: Node, script: Mapping[Path, Step], nodes: dict[Path, Node]) -> Node:
    path = (*parent.path, parent.num_children)
    parent.num_children += 1
    step = script[path]
    node = Node(len(nodes) + 1, parent, path, text=step.text, score=step.score, termination=step.end)
    nodes[path] = node
    return node
