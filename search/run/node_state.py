"""What a search remembers of a node while it may still grow from it."""

from dataclasses import dataclass, field

from espalier.engine.memory.sequences import Sequence
from espalier.search.tree import Node


@dataclass(slots=True, eq=False)
class NodeState:
    """A node's sequences, and what waits for its score.

    `to_end` tells a step of an independent path from one that was asked for by itself. `verified` is False while the
    node's own verifier tokens are not computed; children are scored after it, so that they share its KV and no token is
    read twice. `expected` children are still being sampled.
    """

    to_end: bool
    generator: Sequence | None = None
    verifier: Sequence | None = None
    verified: bool = False
    expected: int = 0
    unscored_children: list[Node] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PendingExpansion:
    """What a piece of generator work is for: the number of its first child among its siblings, and how it was asked.

    `round_root` is the node that the round began from: what the round may spend on a path counts from there.
    """

    first_child: int
    to_end: bool
    greedy: bool
    round_root: Node
