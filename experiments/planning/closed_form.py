"""The KV blocks that a search is expected to hold, in closed form: round by round, for one model.

A round of beam search ends with N kept paths and N·M children in memory, each a sequence with a block table:

    prompt      its full blocks, once
    ancestors   the full blocks of the steps above the kept paths, once for each ancestor with a kept descendant
    kept paths  N, each with the blocks of its last step, the partial block included
    children    N·M, each with a copy of its parent's partial block, and new blocks

How many ancestors are left follows from pruning. If the N kept paths are any N of the N·M children with the same
probability, k paths have on average N·(1 - C(NM-M, k) / C(NM, k)) different parents, and so on upwards. Scores of
siblings that resemble each other make the ancestors fewer, so this is an upper estimate for a good verifier; with M = 1
nothing is pruned and all N chains stay apart.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.algorithms import ALGORITHMS, algorithm_of
from espalier.search.algorithms.base import Growth
from espalier.search.request import SearchRequest


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The tree of a search.

    Attributes:
        request: the search; there is a closed form if its algorithm declares how its paths grow.
        rounds: steps of a path.
        merged_share: share of the sampled children that are merged into an equal sibling, at least 0 and below 1.
    """

    request: SearchRequest
    rounds: int
    merged_share: float = 0.0

    @property
    def growth(self) -> Growth | None:
        """Growth of the paths; None without a closed form."""
        return algorithm_of(self.request).growth

    @property
    def is_independent(self) -> bool:
        """True if each path is sampled to its end by itself."""
        return self.growth is Growth.INDEPENDENT

    @property
    def ends(self) -> range:
        """Rounds after which memory is held, from 1; independent paths are sampled to their end in the first."""
        return range(1, 2 if self.is_independent else self.rounds + 1)

    @property
    def kept(self) -> float:
        """Different paths kept after a round."""
        if self.is_independent:
            return self.request.candidates
        return max(1.0, self.request.beam_width * (1 - self.merged_share))

    @property
    def children(self) -> float:
        """Different children at the end of a round."""
        return self.kept if self.is_independent else max(1.0, self.request.candidates * (1 - self.merged_share))

    def ancestors(self, rounds: int) -> list[float]:
        """Expected number of different nodes above the kept paths, for each depth from 1 to `rounds` - 1."""
        if self.growth is Growth.SUBTREES:
            return [self.kept] * max(0, rounds - 1)
        width, expansion = self.request.beam_width, self.request.expansion
        scale = self.kept / width
        counts = _surviving(width, expansion, max(0, rounds - 1))
        return [max(1.0, count * scale) for count in reversed(counts)]


@dataclass(frozen=True, slots=True)
class PathLengths:
    """Tokens of one model.

    Attributes:
        prompt_tokens: tokens before the first step.
        step_tokens: tokens of a step.
        pending_tokens: tokens at the end of a new child that have no KV yet: 1 for the generator, whose last sampled
            token is computed only when the child is expanded.
        varying: whether steps only have this length on average; then a path's end lies anywhere in its last block.
    """

    prompt_tokens: float
    step_tokens: float
    pending_tokens: int = 0
    varying: bool = False

    def at(self, depth: int) -> float:
        """Tokens of a path of `depth` steps."""
        return self.prompt_tokens + depth * self.step_tokens


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """Blocks of one model that a search holds at the end of a round; a block is of all layers.

    Where layers have windows of their own, these are the blocks that would take as many bytes.

    Attributes:
        physical: each block once.
        logical: as many as there would be if every sequence had its own.
    """

    physical: float
    logical: float


def blocks_by_round(
    tree: TreeShape, lengths: PathLengths, block_size: int, window_shares: Mapping[int | None, float] | None = None
) -> list[HeldBlocks]:
    """Expected blocks of one model at the end of each round; one entry for algorithms of independent paths.

    Args:
        tree: of the search.
        lengths: tokens of the model.
        block_size: tokens of a block.
        window_shares: by window, the share of a token's KV in layers with it; without, no layer has one.

    Raises:
        InvalidRequestError: the algorithm has no closed form.
    """
    if tree.growth is None:
        names = ", ".join(name for name, its in ALGORITHMS.items() if its.growth)
        what = f"{tree.request.algorithm} has no closed form; {names} have one"
        raise InvalidRequestError([Violation("algorithm", what)])
    sizes = {window: _Rounding(block_size, lengths.varying, window) for window in window_shares or (None,)}
    found: list[HeldBlocks] = []
    for number in tree.ends:
        held = {window: _round(tree, lengths, size, number) for window, size in sizes.items()}
        shares = window_shares or dict.fromkeys(held, 1.0)
        physical = sum(share * held[window].physical for window, share in shares.items())
        found.append(HeldBlocks(physical, sum(share * held[window].logical for window, share in shares.items())))
    return found


def states_by_round(tree: TreeShape) -> list[float]:
    """Expected recurrent states of one model at the end of each round: one for each sequence, kept paths and children.

    One entry for algorithms of independent paths, whose sequences go on from the prompt's.
    """
    return [(1.0 if number == 1 else tree.kept) + tree.children for number in tree.ends]


# The blocks of a path, by the tokens at the ends of its steps; with a window those behind it are gone:
#
#     | prompt ... | step 1 ....... | step 2 ....... | last step of a kept path | child .... |
#     full[0]      full[1]          full[2]          above                      end
#     [ gone           passed(above) [ held by kept paths, shared by their children ]
def _round(tree: TreeShape, lengths: PathLengths, size: "_Rounding", number: int) -> HeldBlocks:
    parents = 1.0 if number == 1 else tree.kept
    above = lengths.at(number - 1)
    end = lengths.at(tree.rounds if tree.is_independent else number) - lengths.pending_tokens
    parent, child = size.held(0, above, above), size.held(0, end, end)
    new = child - size.held(0, above, end, whole=True) if end > above else 0.0
    ends = [0.0, *(lengths.at(depth) for depth in range(number))]
    # Of the prompt, then of each step.
    full = [size.held(begin, stop, above, whole=True) for begin, stop in pairwise(ends)]
    held = parent if number == 1 else full[0]
    if number > 1:
        held += sum(count * blocks for count, blocks in zip(tree.ancestors(number - 1), full[1:], strict=False))
        held += parents * size.held(ends[number - 1], above, above)
    return HeldBlocks(held + tree.children * new, parents * parent + tree.children * child)


@dataclass(frozen=True, slots=True)
class _Rounding:
    """Tokens to blocks; on average over where a path ends within a block if lengths vary."""

    block_size: int
    varying: bool
    window: int | None = None

    def held(self, begin: float, end: float, computed: float, whole: bool = False) -> float:
        """Blocks after the full ones of `begin` tokens, up to `end`, in the window of a path of `computed` tokens.

        Only `whole` ones, or the last one too if it is partial.
        """
        gone = 0.0 if self.window is None else self.blocks(max(0.0, computed - self.window), whole=True)
        return max(0.0, self.blocks(end, whole) - max(self.blocks(begin, whole=True), gone))

    def blocks(self, tokens: float, whole: bool) -> float:
        """Blocks of so many tokens: the `whole` ones, or all."""
        if self.varying:
            partial = (self.block_size - 1) / (2 * self.block_size)
            return max(0.0, tokens / self.block_size + (-partial if whole else partial))
        return float(tokens // self.block_size if whole else math.ceil(tokens / self.block_size))


@lru_cache(maxsize=256)
def _surviving(width: int, expansion: int, generations: int) -> Sequence[float]:
    """Expected number of different ancestors of the `width` kept paths, 1, 2, ... `generations` steps above them.

    The distribution over the number of lineages is exact; see `_parents_of`.
    """
    step = _parents_of(width, expansion)
    lineages = np.zeros(width + 1)
    lineages[width] = 1.0
    found = []
    for _ in range(generations):
        lineages = lineages @ step
        found.append(float(lineages @ np.arange(width + 1)))
    return tuple(found)


@lru_cache(maxsize=64)
def _parents_of(width: int, expansion: int) -> np.ndarray:
    """Probability that k of `width` times `expansion` children have j different parents, float64 `[k, j]`."""
    chances = np.zeros((width + 1, width + 1))
    chances[0, 0] = 1.0
    for drawn in range(width):  # one child after another: the next one's parent is new, or one of the j seen
        left = width * expansion - drawn
        for seen in range(drawn + 1):
            fresh = (width - seen) * expansion / left
            chances[drawn + 1, seen + 1] += chances[drawn, seen] * fresh
            chances[drawn + 1, seen] += chances[drawn, seen] * (1 - fresh)
    return chances
