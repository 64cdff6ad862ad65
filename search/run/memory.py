"""Upper bounds on the KV memory of a search, computed before it starts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Upper bounds on what a search holds of one model at one of its peaks. Each algorithm provides its own.

    Attributes:
        paths: sequences up to the length of a whole path; only the prompt is sure to be shared among them.
        steps: sequences that extend one of those paths by one step.
        partial_blocks: additional partly filled blocks, held by inner nodes of paths that are being extended.
    """

    paths: int
    steps: int = 0
    partial_blocks: int = 0


@dataclass(frozen=True, slots=True)
class RationaleLimits:
    """Upper bounds on the rationales of one path.

    Attributes:
        text_tokens: maximum tokens before a rationale, including the prompt.
        chains: rationales per path.
        tokens: maximum tokens of one rationale, including the lead-in to its verdict.
    """

    text_tokens: int
    chains: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PathLimits:
    """Upper bounds on one model's tokens in a search; the orchestrator enforces them on every path.

    Attributes:
        prompt_tokens: tokens before the first step.
        path_tokens: maximum tokens of one path after the prompt.
        step_tokens: maximum tokens of one step.
        max_probe_tokens: maximum tokens fed after a step only to read its score, and not kept.
        rationales: bounds on a path's rationales, whose text `path_tokens` includes; None unless the verifier is
            generative.
    """

    prompt_tokens: int
    path_tokens: int
    step_tokens: int
    max_probe_tokens: int = 0
    rationales: "RationaleLimits | None" = None


def verifier_limits(
    generator: PathLimits,
    prompt_tokens: int,
    context: int,
    max_steps: int,
    same_vocabulary: bool,
    max_special_tokens: int = 0,
    max_probe_tokens: int = 0,
) -> PathLimits:
    """Bounds on the verifier's tokens, given those on the generator's.

    The verifier tokenizes each step itself and adds special tokens, up to `max_special_tokens`. With the generator's
    vocabulary, expect about as many tokens as were sampled; with another one, up to twice as many. A path with a step
    beyond these bounds ends there.
    """
    percent, extra = (125, 4 + max_special_tokens) if same_vocabulary else (200, 8 + max_special_tokens)
    path = generator.path_tokens * percent // 100 + extra * max_steps
    step = generator.step_tokens * percent // 100 + extra
    return PathLimits(prompt_tokens, min(path, context - prompt_tokens), step, max_probe_tokens)


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


def with_rationales(limits: PathLimits, context: int, closing_tokens: int, rationale: RationaleLimits) -> PathLimits:
    """Turn `limits` on a path's step tokens into those of a generative verifier.

    Args:
        limits: from `verifier_limits`.
        context: maximum tokens of a path's text.
        closing_tokens: tokens of that text after the steps.
        rationale: bounds per rationale, without `text_tokens`; `chains` rationales are each written and read once.
    """
    text = min(limits.prompt_tokens + limits.path_tokens + closing_tokens, context)
    path = text + 2 * rationale.chains * rationale.tokens
    return replace(limits, path_tokens=path, step_tokens=path, rationales=replace(rationale, text_tokens=text))


def _rationale_blocks(limits: RationaleLimits, block_size: int) -> int:
    """Blocks of one path while it is scored: its text, which may not be in the prefix cache, and its rationales.

    A rationale, and then the part of it that its verdict reads, is written after a copy of the text's partial block.
    """
    rationale = _blocks(limits.tokens, block_size) + 1
    return _blocks(limits.text_tokens, block_size) + limits.chains * rationale


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
