"""The answer of a search in which no path ended with one: the last probe of each path votes with its certainty."""

import math
from collections.abc import Sequence

from espalier.search.grading.answers import exact_match_key
from espalier.search.request import Vote
from espalier.search.result import Candidate, ProbedAnswer
from espalier.search.tree import Node, Termination
from espalier.search.voting.vote import select

_NOT_COUNTED = (Termination.PRUNED, Termination.DUPLICATE)


def probed_answer(nodes: Sequence[Node]) -> ProbedAnswer | None:
    """Return the answer that the probes of a tree's paths give; None before the first one.

    Paths that the search dropped for others have no vote. Answers are counted by exact match.

    Args:
        nodes: all nodes of the tree, the root first.
    """
    parents = {node.parent for node in nodes}
    leaves = [n for n in nodes if n not in parents and n.termination not in _NOT_COUNTED and not n.rollout]
    votes: list[Candidate] = []
    for leaf in sorted(leaves, key=lambda node: node.path):
        probes = ((node, node.probe) for node in reversed(leaf.lineage()) if node.probe and node.probe.answer)
        if last := next(probes, None):
            node, probe = last
            votes.append(Candidate(node.node_id, probe.answer, probe.certainty, leaf.multiplicity, ()))
    best = select(votes, Vote.WEIGHTED).best
    if best is None:
        return None
    key = exact_match_key(best.answer)
    weights = [(vote.multiplicity * (vote.score or 0.0), exact_match_key(vote.answer) == key) for vote in votes]
    whole = math.fsum(weight for weight, _ in weights)
    share = math.fsum(weight for weight, its in weights if its) / whole if whole else 0.0
    return ProbedAnswer(best.answer, share, best.node_id)
