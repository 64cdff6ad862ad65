"""Work inside the scheduler: what waits for its tokens to be computed, and what is being sampled."""

from dataclasses import dataclass, field

import numpy as np

from espalier.engine.guidance.matcher import MaskThread, Matcher
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.work import Generate, Sampling, Work


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """Work whose sequence still has tokens to compute.

    Attributes:
        work: as it was submitted.
        base: the sequence's length before it, so the position of a Score's first token.
        computed_tokens: tokens computed for it so far.
        values: what the head gave so far, float32 `[1, k]` for each read.
    """

    work: Work
    base: int
    computed_tokens: int = 0
    values: list[np.ndarray] = field(default_factory=list)

    @property
    def row(self) -> int:
        """Its sequence's row of the table."""
        return self.work.sequence.row


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A branch: one child that is being sampled, token by token.

    Attributes:
        work: the request that it is a child of.
        indices: the request's samplings that drew the same tokens so far.
        sequence: its tokens.
        start: length of the sequence before the first sampled token.
        shared: sampled tokens that were computed before it diverged from another branch.
        computed_tokens: tokens computed for it besides the sampled ones: its parent's pending ones, and those computed
            again after a preemption freed its KV.
        matcher: what it may draw next; None for anything.
        draft: tokens proposed for it, which the next step may verify.
        draft_matchers: what may be drawn behind each token of `draft`, where the branch is guided.
        drafted: tokens proposed for it that were verified, since it began.
        accepted: those of them that it drew and went on behind, so tokens that it has without a step of their own.
    """

    work: Generate
    indices: list[int]
    sequence: KVSequence
    start: int
    shared: int = 0
    computed_tokens: int = 0
    matcher: Matcher | None = None
    draft: list[int] = field(default_factory=list)
    draft_matchers: list[Matcher] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    @property
    def row(self) -> int:
        """Its sequence's row of the table."""
        return self.sequence.row


class DecodeRows:
    """Running branches as arrays, built anew only when the branches change.

    Attributes:
        branches: the branches, in the order of the arrays; one with a draft again for each token of that.
        indices: for each draw, the index of its sampling in the branch's request.
        branch_of: int64 `[draws]`, the branch of each draw; a branch has a draw for each of its samplings.
        firsts: int64 `[branches]`, the first draw of each branch.
        rows: int64 `[branches]`, the row of each branch's sequence.
        starts: int64 `[branches]`, the length of each sequence before its first sampled token.
        limits: int64 `[branches]`, the length at which each sequence stops.
        apart: bool `[draws]`, draws that become branches of their own even if they are equal.
        heads: the heads that some branch reads besides its draws.
        ends: the delimiters, markers and marks at which some branch stops.
        matchers: of the branches that are guided, by their number; of one with a draft, that behind each token of it.
    """

    def __init__(self, branches: list[RunningRequest]) -> None:
        self.branches = branches
        self.indices = [index for b in branches for index in b.indices]
        self.find_rows()
        self.starts = np.array([b.start for b in branches], dtype=np.int64)
        self.limits = np.array([b.start + b.work.max_tokens for b in branches], dtype=np.int64)
        counts = np.array([len(b.indices) for b in branches], dtype=np.int64)
        self.branch_of = np.repeat(np.arange(len(branches)), counts)
        self.firsts = counts.cumsum() - counts
        apart = [not b.work.merge_equal and len(b.indices) > 1 for b in branches]
        self.apart = np.array(apart, dtype=bool)[self.branch_of]
        self.heads = sorted({b.work.head for b in branches} - {""})
        self.ends = frozenset((b.work.delimiter, b.work.markers, b.work.marks) for b in branches)
        self.matchers = {i: b.matcher for i, b in enumerate(branches) if b.matcher is not None}

    @property
    def samplings(self) -> list[Sampling]:
        """The sampling of every draw."""
        return [b.work.samplings[i] for b in self.branches for i in b.indices]

    def allowed_tokens(self, vocabulary: int, masks: MaskThread) -> np.ndarray | None:
        """The tokens that each branch may draw, uint8 `[branches, ceil(vocabulary / 8)]`; None for any of all."""
        if not self.matchers:
            return None
        allowed = np.full((len(self.branches), (vocabulary + 7) // 8), 255, dtype=np.uint8)
        masks.fill(self.matchers, allowed)
        return allowed

    def find_rows(self) -> None:
        """Read `rows` again: a branch gets a sequence of its own once it has a token of its own."""
        self.rows = np.array([b.row for b in self.branches], dtype=np.int64)
