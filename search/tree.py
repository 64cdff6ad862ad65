"""The search tree: one node per step, functions on nodes, and which of them have changed."""

import math
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from annotated_types import Ge

from espalier.search.common_fields import Aggregation
from espalier.search.rules import Probe as Probe

Count = Annotated[int, Ge(0)]


class Termination(StrEnum):
    """Why a path ended at a node. Only `eos` and `boxed` are complete answers; only complete answers vote.

    A path is `unclosed` where the model ended it within its thought; it ends with `error` where what guides it fails.
    """

    EOS = "eos"
    BOXED = "boxed"
    UNCLOSED = "unclosed"
    LENGTH = "length"
    BUDGET = "budget"
    DEGENERATE = "degenerate"
    DUPLICATE = "duplicate"
    PRUNED = "pruned"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class HostText:
    """Text that the host wrote behind a step, and its tokens."""

    text: str = ""
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node of the search tree at the end of the search, for display and traces.

    `path` holds the child indices from the root, `tokens` the number of tokens sampled for the node. `termination` is
    a `Termination`, empty for an inner node. `log_probability` is the sum over its tokens under the generator at
    temperature 1; None if the server does not report it. The first `thought_chars` characters of its text are thought.
    `appended` is what the host wrote behind it, `probe` the answer that was read there; None for a step that was not
    probed.
    """

    node_id: int
    parent_id: int | None
    path: tuple[int, ...]
    text: str
    score: float | None
    termination: str
    multiplicity: Count
    tokens: Count
    log_probability: float | None = None
    thought_chars: Count = 0
    appended: str = ""
    probe: Probe | None = None

    @property
    def depth(self) -> int:
        """Steps from the root."""
        return len(self.path)


def path_to(nodes: Mapping[int, NodeRecord], node_id: int | None) -> list[NodeRecord]:
    """The path's nodes, of `nodes` by id, from the first step to one, without the root; empty for None."""
    path: list[NodeRecord] = []
    node = None if node_id is None else nodes.get(node_id)
    while node is not None and node.parent_id is not None:
        path.append(node)
        node = nodes.get(node.parent_id)
    return path[::-1]


@dataclass(slots=True, eq=False)
class Node:
    """One step of one path.

    Attributes:
        node_id: order of creation within the search, 0 for the root. Depends on timing: use `path` where order matters.
        parent: the parent node; None for the root, which holds no text.
        path: child indices from the root; does not depend on timing.
        text: the step's text as the model wrote it, including its delimiter; marks of thoughts are left out.
        thought_chars: how many of its first characters are thought.
        written: what the host wrote behind it.
        probe: the answer that was read at its end; None if it was not probed.
        num_tokens: tokens sampled for the step.
        own_tokens: how many of its last tokens are not shared with a sibling of a lower path.
        score: the verifier's score of this step in [0, 1], None without one.
        verifier_tokens: tokens of the step in the verifier's tokenization, the problem's for the root; 0 if the
            verifier did not read it.
        log_probability: sum of the log-probabilities of its tokens under the generator.
        log_probabilities: those of its tokens, kept for votes by confidence only.
        multiplicity: number of sampled siblings with the same text and termination, including this one; beam search
            limits it to the places it gives the node. For independent paths, how many have sampled the same tokens so
            far.
        num_children: children requested so far.
        draws: indices of the parent's samples that this node stands for, ascending; several after merging. Empty if not
            tracked.
        tokens_before: what `path_tokens` says of its parent, which changes no more once it has children.
        charged_before: the same of `charged_tokens`.
        rollout: whether it was sampled for lookahead only; such a node and its descendants never become answers.
    """

    node_id: int
    parent: "Node | None"
    path: tuple[int, ...]
    text: str = ""
    num_tokens: int = 0
    own_tokens: int = 0
    score: float | None = None
    verifier_tokens: int = 0
    log_probability: float = 0.0
    termination: Termination | None = None
    multiplicity: int = 1
    num_children: int = field(default=0)
    draws: tuple[int, ...] = ()
    rollout: bool = False
    thought_chars: int = 0
    written: HostText = HostText()
    log_probabilities: tuple[float, ...] = ()
    probe: Probe | None = None
    tokens_before: int = field(init=False, default=0)
    charged_before: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.parent is not None:
            self.tokens_before, self.charged_before = self.parent.path_tokens(), self.parent.charged_tokens()

    @property
    def depth(self) -> int:
        """Depth in steps; 0 for the root."""
        return len(self.path)

    @property
    def complete(self) -> bool:
        """True if the path ends with an answer."""
        return self.termination in (Termination.EOS, Termination.BOXED)

    @property
    def open(self) -> bool:
        """True if the path may be expanded."""
        return self.termination is None

    def lineage(self, most: int | None = None) -> list["Node"]:
        """The path's nodes from the first step to this one, without the root; with `most`, only so many of the last."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None and (most is None or len(nodes) < most):
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def step_scores(self) -> list[float]:
        """Scores of the path's steps; steps without a score are skipped."""
        return [node.score for node in self.lineage() if node.score is not None]

    def path_text(self) -> str:
        """The text of the whole path."""
        return "".join(node.text for node in self.lineage())

    def answer_text(self) -> str:
        """The text of the whole path without its thought."""
        return "".join(node.text[node.thought_chars :] for node in self.lineage())

    def path_tokens(self) -> int:
        """Tokens of the path, sampled and appended."""
        return self.tokens_before + self.num_tokens + self.written.tokens

    def charged_tokens(self) -> int:
        """Tokens that the path takes of a budget: sampled, and those of its probes."""
        return self.charged_before + self.num_tokens + (self.probe.tokens if self.probe else 0)

    def probes(self) -> list[Probe]:
        """The path's probes, the last one first."""
        return [node.probe for node in reversed(self.lineage()) if node.probe is not None]

    def record(self) -> NodeRecord:
        """Return the node as plain data."""
        return NodeRecord(
            node_id=self.node_id,
            parent_id=None if self.parent is None else self.parent.node_id,
            path=self.path,
            text=self.text,
            score=self.score,
            termination=str(self.termination or ""),
            multiplicity=self.multiplicity,
            tokens=self.num_tokens,
            log_probability=round(self.log_probability, 6),
            thought_chars=self.thought_chars,
            appended=self.written.text,
            probe=self.probe,
        )


def computed_once(nodes: Sequence[Node]) -> int:
    """Count the generator tokens of a tree below the prompt, counting shared prefixes of siblings once.

    The KV of a node's last token, and of what is appended to it, is computed only when the node has children. The first
    of `nodes` is the root.
    """
    parents = {node.parent for node in nodes}
    return sum(node.own_tokens + node.written.tokens if node in parents else node.own_tokens - 1 for node in nodes[1:])


def aggregate(step_scores: list[float], how: Aggregation) -> float | None:
    """Combine step scores into the path's score; None for a path without scored steps.

    The product is computed in log space to avoid underflow on long paths.
    """
    if not step_scores:
        return None
    match how:
        case Aggregation.LAST:
            return step_scores[-1]
        case Aggregation.MIN:
            return min(step_scores)
        case Aggregation.MEAN:
            return math.fsum(step_scores) / len(step_scores)
        case Aggregation.PROD:
            return math.exp(math.fsum(map(math.log, step_scores))) if min(step_scores) > 0 else 0.0


def prune(standing: Iterable[Node], kept: Collection[Node], sampled_from: Container[Node]) -> None:
    """Mark leaves that are no longer kept as pruned.

    Args:
        standing: nodes kept until now or passed to `tell` in this round.
        kept: nodes that the algorithm keeps.
        sampled_from: nodes with children, not counting rollouts; they are not leaves.
    """
    for node in set(standing).difference(kept):
        if (node.open or node.complete) and node not in sampled_from:
            node.termination = Termination.PRUNED


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
