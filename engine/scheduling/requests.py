"""Work inside the scheduler: what waits for its tokens to be computed, and what is being sampled."""

from dataclasses import dataclass, field

import numpy as np

from espalier.engine.memory.sequences import Sequence
from espalier.engine.work import Generate, Sampling, Score, Work


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """Work whose sequence still has tokens to compute; `values` gathers what has been read so far."""

    work: Work
    base: int  # position of a Score's first token
    computed_tokens: int = 0
    values: list[np.ndarray] = field(default_factory=list)

    @property
    def row(self) -> int:
        """Its sequence's row of the table."""
        return self.work.sequence.row

    def known_tokens(self, length: int) -> int:
        """Tokens of the sequence that need not be computed where their KV is at hand: those before what is read."""
        read_at = self.work.read_at if isinstance(self.work, Score) else ()
        return self.base + read_at[0] if read_at else length

    def count_computed(self, tokens: int) -> None:
        """Charge `tokens` to it."""
        self.computed_tokens += tokens


@dataclass(slots=True, eq=False)
class RunningRequest:
    """One child that is being sampled, token by token."""

    work: Generate
    indices: list[int]  # samplings that drew the same tokens so far
    sequence: Sequence
    start: int  # its length before the first sampled token
    shared: int = 0  # sampled tokens that were computed before it parted from another branch
    extra_tokens: int = 0  # computed for it besides: of its parent on its behalf, and again after its KV was dropped

    @property
    def row(self) -> int:
        """Its sequence's row of the table."""
        return self.sequence.row

    def known_tokens(self, length: int) -> int:
        """Tokens of the sequence that need not be computed where their KV is at hand."""
        return length

    def count_computed(self, tokens: int) -> None:
        """Charge `tokens` to it."""
        self.extra_tokens += tokens


class DecodeRows:
    """Running branches as arrays, rebuilt only when they change.

    Attributes:
        branches: whose they are.
        branch_of: int64 `[draws]`; each branch has a draw for each of its samplings, side by side.
        firsts: int64 `[branches]`, the first draw of each.
        rows: int64 `[branches]`, of each one's sequence.
        starts: int64 `[branches]`, that sequence's length before the first sampled token.
        limits: int64 `[branches]`, the length that it stops at.
        apart: bool `[draws]`, draws that must part from the others of their branch, alike or not.
    """

    def __init__(self, branches: list[RunningRequest]) -> None:
        self.branches = branches
        self.find_rows()
        self.starts = np.array([b.start for b in branches])
        self.limits = np.array([b.start + b.work.max_tokens for b in branches])
        counts = np.array([len(b.indices) for b in branches])
        self.branch_of = np.repeat(np.arange(len(branches)), counts)
        self.firsts = counts.cumsum() - counts
        self.apart = np.array([not b.work.merge_equal and len(b.indices) > 1 for b in branches])[self.branch_of]

    @property
    def samplings(self) -> list[Sampling]:
        """Of every draw."""
        return [b.work.samplings[i] for b in self.branches for i in b.indices]

    def find_rows(self) -> None:
        """Find `rows` anew: a branch gets a sequence of its own once it has a token of its own."""
        self.rows = np.array([b.row for b in self.branches])
