"""Upper bounds on the tokens of one model in a search."""

from dataclasses import dataclass

UNLIMITED = 2**62


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
    """Upper bounds on one model's tokens in a search, enforced on every path.

    Attributes:
        prompt_tokens: tokens before the first step.
        path_tokens: maximum tokens of one path after the prompt.
        step_tokens: maximum tokens of one step.
        max_probe_tokens: maximum tokens behind a step, on a fork that is dropped, to read its score or its answer.
        probes: forks of a step that get such tokens at the same time.
        rationales: bounds on a path's rationales, whose text `path_tokens` includes; None unless the verifier is
            generative.
    """

    prompt_tokens: int
    path_tokens: int
    step_tokens: int
    max_probe_tokens: int = 0
    probes: int = 1
    rationales: RationaleLimits | None = None


def verifier_limits(
    generator: PathLimits,
    prompt_tokens: int,
    context: int,
    max_steps: int,
    same_vocabulary: bool,
    max_special_tokens: int = 0,
    max_probe_tokens: int = 0,
    probes: int = 1,
) -> PathLimits:
    """Bounds on the verifier's tokens, given those on the generator's.

    The verifier tokenizes each step itself and adds special tokens, up to `max_special_tokens`. With the generator's
    vocabulary, expect about as many tokens as were sampled; with another one, up to twice as many. A path with a step
    beyond these bounds ends there.
    """
    percent, extra = (125, 4 + max_special_tokens) if same_vocabulary else (200, 8 + max_special_tokens)
    path = generator.path_tokens * percent // 100 + extra * max_steps
    step = generator.step_tokens * percent // 100 + extra
    return PathLimits(prompt_tokens, min(path, context - prompt_tokens), step, max_probe_tokens, probes)
