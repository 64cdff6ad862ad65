"""Marking what a search gave up."""

from collections.abc import Collection, Container, Iterable

from espalier.search.node import Node, Termination


def prune(standing: Iterable[Node], kept: Collection[Node], sampled_from: Container[Node]) -> None:
    """Mark as pruned the nodes of `standing` that are not kept: leaves that might have grown or voted.

    Args:
        standing: nodes that were kept until now or told just now.
        kept: what the algorithm keeps.
        sampled_from: nodes that have children of their own, rollouts not counted; such a node is no leaf.
    """
    for node in set(standing).difference(kept):
        if (node.open or node.complete) and node not in sampled_from:
            node.termination = Termination.PRUNED
