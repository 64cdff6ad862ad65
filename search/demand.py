"""The most KV memory a search can come to hold, worked out before it starts."""

from dataclasses import dataclass

from espalier.search.request import AlgorithmName, SearchRequest


@dataclass(frozen=True, slots=True)
class PathLimits:
    """Bounds on one model's tokens within a search; the orchestrator holds every path to them.

    Attributes:
        prompt_tokens: tokens before the first step.
        path_tokens: most tokens of one path after the prompt.
        step_tokens: most tokens of one step.
    """

    prompt_tokens: int
    path_tokens: int
    step_tokens: int


def verifier_limits(
    generator: PathLimits, prompt_tokens: int, context: int, max_steps: int, same_vocabulary: bool
) -> PathLimits:
    """Bounds on the verifier's tokens for what the generator may write.

    The verifier tokenises each step anew and adds a mark. In the generator's vocabulary that is about as many tokens as
    were sampled; in another one, allow twice as many. A step that still does not fit is cut off the search.
    """
    percent, marks = (125, 4) if same_vocabulary else (200, 8)
    path = generator.path_tokens * percent // 100 + marks * max_steps
    step = generator.step_tokens * percent // 100 + marks
    return PathLimits(prompt_tokens, min(path, context - prompt_tokens), step)


def worst_case_blocks(request: SearchRequest, limits: PathLimits, block_size: int) -> int:
    """Blocks of one model that a search can hold at its widest moment.

    That moment is the end of a beam's step: N kept paths at full length, sharing only the prompt, and N*M children with
    one step each. Every sequence may hold one more block than its tokens fill, its own copy of a partial tail. Where
    independent paths part, the step they share keeps a tail of its own until all of them have taken their next.
    """
    prompt = _blocks(limits.prompt_tokens, block_size)
    path = _blocks(limits.path_tokens, block_size) + 1
    if request.algorithm is not AlgorithmName.BEAM:
        return prompt + request.candidates * path + request.candidates - 1
    step = _blocks(min(limits.step_tokens, limits.path_tokens), block_size) + 1
    return prompt + request.beam_width * path + request.candidates * step


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)
