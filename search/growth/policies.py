"""The contract of path policies: what shapes how the paths of a search grow, beside its algorithm; and `Merging`.

The tree asks the policies of its search one after the other, in the order of `tree.make_policies`:

    holds ──▶ shape ──▶ (the engine samples) ──▶ sampled ──▶ grown ──▶ merges ──▶ holds_score ──▶ settled
    and once all steps of a round are settled: round_ended

A search that asks for none of them has an empty list. A policy keeps its own state, and is asked on one thread.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from espalier.engine.engine import Engine
from espalier.engine.guidance.grammar import Grammar
from espalier.engine.guidance.matcher import Matcher
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.work import NO_MARKS, Done, Generated, PathStreams, StepMarks
from espalier.prm.limits import UNLIMITED
from espalier.prm.scorer import Scorer, ScoreStatus
from espalier.search.result import Candidate
from espalier.search.run.executor import ResolvedRequest
from espalier.search.run.running import UsageMeter
from espalier.search.tree import Node, Termination


@dataclass(slots=True, eq=False)
class Branch:
    """A node that may still grow, with its sequence.

    Attributes:
        node: the node.
        to_end: whether it is a step of an independent path.
        streams: the randomness of its children.
        sequence: of the generator; None once it is released or a child has taken it over.
        matcher: binds what is sampled behind it, as its own tokens left it; None for a matcher at its beginning.
        scored: whether its score is known, or that it has none.
        alone: whether its parent has no other child.
        expected: children that are being sampled.
        held: its next children, while a policy holds them back.
        passed: policies that have let its score pass.
    """

    node: Node
    to_end: bool
    streams: PathStreams
    sequence: KVSequence | None = None
    matcher: Matcher | None = None
    scored: bool = False
    alone: bool = False
    expected: int = 0
    held: "Expansion | None" = None
    passed: int = 0


@dataclass(slots=True, eq=False)
class Expansion:
    """Children of one node that are to be sampled; the tag of the engine's work.

    Attributes:
        branch: the node.
        children: how many.
        to_end: as in `Expand`.
        greedy: as in `Expand`.
        continues: whether they are the next step of independent paths, and not what the algorithm asked for.
        first_child: index of the first of them, once they are sampled.
        passed: policies that have let it pass.
    """

    branch: Branch
    children: int
    to_end: bool = False
    greedy: bool = False
    continues: bool = False
    first_child: int = 0
    passed: int = 0


@dataclass(slots=True)
class Draft:
    """Sampling of the next step of a path.

    Attributes:
        room: tokens that its path may still have.
        max_tokens: tokens of the step.
        overrun: tokens by which a full step may go on, see `step_rule.OVERRUN`.
        marks: end the step.
        banned: tokens that are not drawn.
        matcher: binds its text; None for any text.
    """

    room: int
    max_tokens: int
    overrun: int
    marks: StepMarks = NO_MARKS
    banned: tuple[int, ...] = ()
    matcher: Matcher | None = None


class InjectedText(NamedTuple):
    """Text that the host writes behind a step.

    Attributes:
        text: the text, without marks.
        token_ids: its tokens, with marks.
        replaces: how many of the step's last tokens it takes the place of.
    """

    text: str
    token_ids: tuple[int, ...]
    replaces: int = 0


class Grower(Protocol):
    """Methods of the tree that a policy may call."""

    def resume(self, expansion: Expansion) -> None:
        """Go on with children that the policy held back."""

    def write(self, branch: Branch, injected: InjectedText) -> None:
        """Write text behind a node, so that its path is open; the path ends where it has no room."""

    def score(self, branch: Branch) -> None:
        """Have a node scored whose score the policy held back, unless a later policy holds it, too."""

    def settle(self, branch: Branch) -> None:
        """Count a node as finished."""


class PathPolicy:
    """Shapes the paths of one search. Each method does nothing as it stands.

    Attributes:
        tree: the tree, once the policy is in its list.
        warnings: what the result will warn of, whole sentences.
    """

    tree: Grower
    warnings: tuple[str, ...] = ()

    def begin_round(self, paths: int) -> bool:
        """Begin a round of so many paths; returns False to stop the search instead, for want of tokens."""
        return True

    def holds(self, expansion: Expansion) -> bool:
        """Return whether children are to wait; the policy calls `tree.resume` once they need not.

        It may wait for work of its own that the engine does, see `take`, or for anything else: `call_outside` of the
        `PolicyContext` has it done on another thread. Other paths and other searches go on meanwhile.
        """
        return False

    def shape(self, expansion: Expansion, draft: Draft) -> None:
        """Change how a step is sampled."""

    def sampled(self, branch: Branch, done: Generated) -> None:
        """Take note of a step that was sampled, before it is known whether its path ends."""

    def grown(self, branch: Branch, done: Generated) -> InjectedText | None:
        """Return text to write behind a new step.

        The policy may also set the node's termination, here or later, until its round is told. A step that is cut off
        before it is scored gets no score.
        """

    def merges(self, branch: Branch) -> bool:
        """Return whether a new step is merged into a sibling, which stands for both from now on."""
        return False

    def holds_score(self, branch: Branch) -> bool:
        """Return whether a node's score has to wait; the policy calls `tree.score` once it need not."""
        return False

    def verifier_left(self, node: Node) -> int:
        """Verifier tokens that a node's step may use; for the root, how many are left behind the problem."""
        return UNLIMITED

    def why_unscored(self, node: Node, status: ScoreStatus | None) -> Termination | None:
        """Return why a path ends of which a step has no score; None if it is for no reason of this policy.

        Args:
            node: its last step.
            status: what the step's score was reported with; None if it is an earlier step that has none.
        """

    def settled(self, branch: Branch, candidate: Candidate | None) -> None:
        """Take note of a node that is finished; `candidate` is None if it is no complete path."""

    def round_ended(self, nodes: Sequence[Node]) -> None:
        """Compare a round's nodes, all finished and in path order; paths that the policy ends are `PRUNED`."""

    def take(self, done: Done) -> bool:
        """Process finished engine work that the policy has submitted; False for work of others."""
        return False

    def after_work(self) -> None:
        """Called after each piece of engine work that the tree has processed, and each result of `call_outside`."""

    def sequences(self) -> list[KVSequence]:
        """The generator's sequences that the policy holds."""
        return []

    def close(self) -> None:
        """Release what it holds; the owner's work must have been cancelled."""


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """Context in which the policies of a search are made.

    Attributes:
        owner: of engine work.
        resolved: the request.
        engine: runs the models.
        scorer: of steps; None for a search without scores.
        meter: of what is spent.
        matchers: by grammar, at their beginning.
        call_outside: runs a function on another thread, and then another one with its result on the search's own.
    """

    owner: str
    resolved: ResolvedRequest
    engine: Engine
    scorer: Scorer | None
    meter: UsageMeter
    matchers: Mapping[Grammar, Matcher]
    call_outside: Callable[[Callable[[], Any], Callable[[Any], None]], None]


class Merging(PathPolicy):
    """Merges single steps of one parent with the same text into one node, with a multiplicity."""

    def __init__(self, position: Callable[[Node], Hashable], meter: UsageMeter) -> None:
        """Merge steps whose `position`, in a thought or not, is the same too."""
        self._position = position
        self._meter = meter
        self._first: dict[Hashable, Branch] = {}

    def begin_round(self, paths: int) -> bool:
        """See `PathPolicy`; steps of one round are merged with one another only."""
        self._first.clear()
        return True

    def merges(self, branch: Branch) -> bool:
        """See `PathPolicy`. The same text can be complete in one sample and cut off in another: both stay."""
        node = branch.node
        alike = node.parent, node.text, node.termination, self._position(node), node.written
        if (kept := self._first.setdefault(alike, branch)) is branch:
            return False
        if node.path < kept.node.path:
            _swap_samples(branch, kept)
        kept.node.draws = tuple(sorted((*kept.node.draws, *node.draws)))
        kept.node.multiplicity += node.multiplicity
        node.termination = Termination.DUPLICATE
        self._meter.duplicates += 1
        return True


def _swap_samples(one: Branch, other: Branch) -> None:
    """Swap what was sampled, so that descendants do not depend on which of two siblings finished first."""
    one.sequence, other.sequence = other.sequence, one.sequence
    one.streams, other.streams = other.streams, one.streams
    one.matcher, other.matcher = other.matcher, one.matcher
    a, b = one.node, other.node
    a.path, b.path = b.path, a.path
    a.num_tokens, b.num_tokens = b.num_tokens, a.num_tokens
    a.own_tokens, b.own_tokens = b.own_tokens, a.own_tokens
    a.log_probability, b.log_probability = b.log_probability, a.log_probability
    a.log_probabilities, b.log_probabilities = b.log_probabilities, a.log_probabilities
    if a.score is not None:  # it is of the tokens; other scores are of the text, which is the same
        a.score, b.score = b.score, a.score
