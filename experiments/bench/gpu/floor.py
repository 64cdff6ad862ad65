"""Tables of the least time that a step, and a round of a search, can take on a GPU; see `planning.roofline`."""

from typing import Any

from espalier.experiments.planning.known_models import ModelShape
from espalier.experiments.planning.roofline import Card, decode_seconds, scoring_seconds


def step_rows(
    generator: ModelShape, verifier: ModelShape, card: Card, context: int, shared: int
) -> list[dict[str, Any]]:
    """The floor of a decode step of the generator, and of scoring as many steps of 50 tokens, for 1 to 256 rows."""
    found = []
    for rows in (1, 16, 64, 256):
        decode = decode_seconds(generator, card, rows, context, min(shared, context))
        score = scoring_seconds(verifier, card, 50 * rows, context)
        found.append(
            {
                "generator": generator.name,
                "rows": rows,
                "decode step, ms": 1e3 * decode,
                "tokens/s": rows / decode,
                "weights' share of it, %": 100 * generator.weight_bytes / card.bandwidth / decode,
                "verifier": verifier.name,
                "scored tokens/s": 50 * rows / score,
            }
        )
    return found


def search_rows(
    generator: ModelShape, verifier: ModelShape, card: Card, paths: int, prompt: int, steps: int, step_tokens: int
) -> list[dict[str, Any]]:
    """The floor of a search in which `paths` children are sampled and scored in each round: 1, 8 and 32 at a time.

    Args:
        generator: its sizes.
        verifier: its sizes.
        card: the GPU.
        paths: N times M.
        prompt: tokens of a problem.
        steps: rounds of a search.
        step_tokens: tokens of a step.
    """
    found = []
    for searches in (1, 8, 32):
        generating = scoring = 0.0
        for step in range(steps):
            shared = prompt + step * step_tokens
            rows = searches * paths
            # Children of a path see what their search has so far, once, and half of their own step on average.
            unique_per_row = step_tokens / 2 + shared / paths
            one = decode_seconds(generator, card, rows, round(unique_per_row), 0)
            generating += step_tokens * one
            scoring += scoring_seconds(verifier, card, rows * step_tokens, searches * shared)
        seconds = generating + scoring
        found.append(
            {
                "generator": generator.name,
                "searches": searches,
                "N x M": paths,
                "rounds/s": searches * steps / seconds,
                "searches/min": 60 * searches / seconds,
                "generator %": 100 * generating / seconds,
                "verifier %": 100 * scoring / seconds,
            }
        )
    return found
