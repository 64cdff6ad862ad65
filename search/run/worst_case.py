"""Upper bounds on the KV blocks and recurrent states that a request holds, by which it is admitted."""

from collections.abc import Sequence

from espalier.engine.engine import Engine
from espalier.prm.limits import UNLIMITED, PathLimits
from espalier.search.algorithms.base import MemoryEstimate


def worst_case(engine: Engine, role: str, estimates: Sequence[MemoryEstimate], limits: PathLimits) -> dict[str, int]:
    """Maximum number of blocks of one model that a search holds, by KV group; see `worst_case_blocks`."""
    size, batch_tokens = engine.settings.block_size, engine.settings.max_batch_tokens
    return {
        pool.name: worst_case_states(estimates, limits)
        if pool.holds_states
        else worst_case_blocks(estimates, limits, size, pool.window, batch_tokens)
        for pool in engine.schedulers[role].pools
    }


def worst_case_states(estimates: Sequence[MemoryEstimate], limits: PathLimits) -> int:
    """Maximum number of recurrent states that a search holds: one for each sequence, whatever its length."""
    each = 1 + limits.probes if limits.max_probe_tokens else 1  # with those of the forks that are fed probe tokens
    if limits.rationales:  # of a path while it is scored: its text, its rationales, the parts that verdicts read
        each = 1 + 2 * limits.rationales.chains
    paths = max((its.paths + its.steps) * each + its.partial_blocks for its in estimates)
    return 1 + paths  # and the prompt's


def worst_case_blocks(
    estimates: Sequence[MemoryEstimate],
    limits: PathLimits,
    block_size: int,
    window: int | None = None,
    batch_tokens: int = 0,
) -> int:
    """Maximum number of blocks of one KV group that a search holds, over the peaks that `estimates` describe.

    Every sequence may hold one block more than its tokens fill, its own copy of a partial block; so may each fork of
    it that is fed probe tokens. With a `window` a sequence holds no more than that; while a step runs, what the step
    writes is held besides, of `batch_tokens` at most.
    """
    whole = _worst_case(estimates, limits, block_size, UNLIMITED, inner=1)
    if window is None:
        return whole
    in_window = (window - 1) // block_size + 2  # it begins inside one block, and ends inside another
    held = _worst_case(estimates, limits, block_size, in_window, inner=in_window)
    return min(whole, held + blocks_of(batch_tokens, block_size))


def _worst_case(estimates: Sequence[MemoryEstimate], limits: PathLimits, block_size: int, most: int, inner: int) -> int:
    """The same where a sequence holds `most` blocks, and an inner node of a path `inner` that others do not."""

    def held(tokens: int) -> int:
        return min(most, blocks_of(tokens, block_size))

    if limits.rationales:
        # Of a path while it is scored: its text, which may not be in the prefix cache, and its rationales. A rationale,
        # and then the part of it that its verdict reads, is written after a copy of the text's partial block.
        its = limits.rationales
        path = step = held(its.text_tokens) + its.chains * (held(its.tokens) + 1)
    else:
        probe = limits.probes * (held(limits.max_probe_tokens) + 1) if limits.max_probe_tokens else 0
        path = held(limits.path_tokens) + 1 + probe
        step = held(min(limits.step_tokens, limits.path_tokens)) + 1 + probe
    return held(limits.prompt_tokens) + max(
        estimate.paths * path + estimate.steps * step + estimate.partial_blocks * inner for estimate in estimates
    )


def blocks_of(tokens: int, block_size: int) -> int:
    """Blocks of so many tokens."""
    return -(-tokens // block_size)
