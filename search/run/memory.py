"""The most KV memory a search can come to hold, worked out before it starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from espalier.search.request import SearchRequest, SubmitOptions


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bounds on what a search holds of one model at one of its widest moments. Each algorithm states its own.

    Attributes:
        paths: sequences that may be as long as a path, and are only sure to share the prompt.
        steps: sequences that add one step to one of these.
        partial_blocks: blocks besides: partly filled ones that inner nodes of a path hold while others go on from them.
    """

    paths: int
    steps: int = 0
    partial_blocks: int = 0


@dataclass(frozen=True, slots=True)
class RationaleLimits:
    """Bounds on the rationales of one path.

    Attributes:
        text_tokens: most tokens of all that a rationale follows, the prompt included.
        chains: rationales of a path.
        tokens: most tokens of one, with what leads to its verdict.
    """

    text_tokens: int
    chains: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PathLimits:
    """Bounds on one model's tokens within a search; the orchestrator holds every path to them.

    Attributes:
        prompt_tokens: tokens before the first step.
        path_tokens: most tokens of one path after the prompt.
        step_tokens: most tokens of one step.
        tail_tokens: most tokens that are fed after a step and given up again.
        rationales: how a path is scored by rationales of its whole text, which `path_tokens` count too; None where the
            tokens of its steps are read.
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
    """Bounds on the verifier's tokens for what the generator may write.

    The verifier tokenises each step anew and adds a mark, which some families make of `max_special_tokens` more. In the
    generator's vocabulary that is about as many tokens as were sampled; in another one, allow twice as many. A step
    that still does not fit is cut off the search.
    """
    percent, extra = (125, 4 + max_special_tokens) if same_vocabulary else (200, 8 + max_special_tokens)
    path = generator.path_tokens * percent // 100 + extra * max_steps
    step = generator.step_tokens * percent // 100 + extra
    return PathLimits(prompt_tokens, min(path, context - prompt_tokens), step, max_probe_tokens)


def worst_case_blocks(estimates: Sequence[MemoryEstimate], limits: PathLimits, block_size: int) -> int:
    """Blocks of one model that a search can hold, at the widest of the moments that `estimates` describe.

    Every sequence may hold one more block than its tokens fill, its own copy of a partial tail; and so may the fork of
    it that is fed what is not kept.
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
    """`limits` of what a path's steps take as tokens, made those of a verifier that writes about the whole path.

    Args:
        limits: from `verifier_limits`.
        context: most tokens of a path's text.
        closing_tokens: those of it that follow the steps.
        rationale: of which `text_tokens` are not known yet, and `chains` rationales are each written and read once.
    """
    text = min(limits.prompt_tokens + limits.path_tokens + closing_tokens, context)
    path = text + 2 * rationale.chains * rationale.tokens
    return replace(limits, path_tokens=path, step_tokens=path, rationales=replace(rationale, text_tokens=text))


def _rationale_blocks(limits: RationaleLimits, block_size: int) -> int:
    """Blocks of one path that is being scored: its text, which may be known to no prefix cache, and its rationales.

    A rationale, and then what is kept of it before its verdict, is written after a copy of the text's partial tail.
    """
    rationale = _blocks(limits.tokens, block_size) + 1
    return _blocks(limits.text_tokens, block_size) + limits.chains * rationale


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A validated request with its defaults filled in, and the bounds that its search is held to.

    Attributes:
        search_id: the search's name.
        request: with every default filled in.
        options: what its caller said of it besides.
        generator_limits: bounds on the generator's tokens.
        verifier_limits: the same of the verifier's; None where the search reads no scores.
        blocks: the most KV blocks of each role that the search may come to hold.
    """

    search_id: str
    request: SearchRequest
    options: SubmitOptions
    generator_limits: PathLimits
    verifier_limits: PathLimits | None
    blocks: Mapping[str, int] = field(default_factory=dict)
