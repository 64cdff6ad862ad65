"""Upper bounds on the KV memory of a search, computed before it starts."""

from collections.abc import Sequence

from espalier.prm.limits import PathLimits, RationaleLimits
from espalier.search.algorithms.base import MemoryEstimate


def worst_case_blocks(estimates: Sequence[MemoryEstimate], limits: PathLimits, block_size: int) -> int:
    """Maximum number of blocks of one model that a search holds, over the peaks that `estimates` describe.

    Every sequence may hold one block more than its tokens fill, its own copy of a partial block; so may its fork that
    is fed probe tokens.
    """
    prompt = _blocks(limits.prompt_tokens, block_size)
    if limits.rationales:
        scoring = _rationale_blocks(limits.rationales, block_size)
        return prompt + max(
            (estimate.paths + estimate.steps) * scoring + estimate.partial_blocks for estimate in estimates
        )
    probe = _blocks(limits.max_probe_tokens, block_size) + 1 if limits.max_probe_tokens else 0
    path = _blocks(limits.path_tokens, block_size) + 1 + probe
    step = _blocks(min(limits.step_tokens, limits.path_tokens), block_size) + 1 + probe
    return prompt + max(
        estimate.paths * path + estimate.steps * step + estimate.partial_blocks for estimate in estimates
    )


def _rationale_blocks(limits: RationaleLimits, block_size: int) -> int:
    """Blocks of one path while it is scored: its text, which may not be in the prefix cache, and its rationales.

    A rationale, and then the part of it that its verdict reads, is written after a copy of the text's partial block.
    """
    rationale = _blocks(limits.tokens, block_size) + 1
    return _blocks(limits.text_tokens, block_size) + limits.chains * rationale


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
