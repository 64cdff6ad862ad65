"""Drafts on paper: the tokens of a pass by the share that is accepted, and what they gain by the size of the batch."""

from typing import Any

from espalier.engine.speculation.lengths import LENGTHS
from espalier.experiments.planning.known_models import ModelShape
from espalier.experiments.planning.roofline import Card, decode_seconds

MODEL_ACCEPTANCE = 0.91
"""Share of a draft model's tokens that are what the path draws, behind tokens that are: measured at 3,264 positions of
Qwen2.5-Coder-1.5B, for which the one of 0.5B drafts, at temperature 0.7; at 0 it is 0.92."""
TREE_ACCEPTANCE = 0.24
"""The same of the tree's, where it proposes nothing, too: `bench drafts` got 1.32 tokens a step of that model."""
MIN_GAIN = 1.05
"""Drafts pay from so many times the tokens a second on, as `MeasuredLength` has it."""
_MAX_ROWS = 4096


def tokens_of_a_pass(acceptance: float, length: int) -> float:
    """Tokens that a path gets of a step with a draft of `length` tokens, each accepted with the same probability."""
    return sum(acceptance**i for i in range(length + 1))


def pass_seconds(
    target: ModelShape, draft: ModelShape | None, card: Card, rows: int, context: int, length: int
) -> float:
    """Seconds in which `rows` paths of `context` tokens draft `length` tokens each and verify them.

    Args:
        target: the generator.
        draft: the model that drafts, a token of all paths at a time; None for drafts that take no time.
        card: the GPU.
        rows: paths, which share nothing.
        context: tokens of each.
        length: tokens of a draft; 0 for a step without.
    """
    drafting = length * decode_seconds(draft, card, rows, context, 0) if draft else 0.0
    return drafting + decode_seconds(target, card, rows, context, 0, 1 + length)


def draft_rows(
    target: ModelShape, draft: ModelShape | None, card: Card, context: int, acceptance: float, most: int
) -> dict[str, Any]:
    """Gains of drafts by the size of the batch.

    Args:
        target: see `pass_seconds`, as for all other arguments.
        draft: None for drafts from the tree.
        card: the GPU.
        context: tokens of a path.
        acceptance: the share of drafted tokens that is accepted.
        most: tokens of a draft at most.

    Returns:
        `acceptance`; `pays_up_to`, the largest batch that gains `MIN_GAIN`, 0 for none and None for every one up to
        4,096; and `batches` of 1, 2, 4 and so on paths up to the first that gains less, each with the draft that gives
        the most tokens a second.
    """
    lengths = [length for length in LENGTHS if length < most] + [most]

    def best(rows: int) -> dict[str, Any]:
        without = 1 / pass_seconds(target, None, card, rows, context, 0)
        rates = {
            length: tokens_of_a_pass(acceptance, length) / pass_seconds(target, draft, card, rows, context, length)
            for length in lengths
        }
        length = max(rates, key=lambda each: rates[each])
        if rates[length] < MIN_GAIN * without:
            length = 0
        return {
            "rows": rows,
            "draft_tokens": length,
            "tokens_of_a_pass": tokens_of_a_pass(acceptance, length),
            "milliseconds_without": 1e3 / without,
            "milliseconds": 1e3 * tokens_of_a_pass(acceptance, length) / rates[length],
            "gain": rates[length] / without,
        }

    batches = [best(1)]
    while batches[-1]["draft_tokens"] and batches[-1]["rows"] < _MAX_ROWS:
        batches.append(best(2 * batches[-1]["rows"]))
    pays, not_any_more = batches[-1]["rows"] // 2, batches[-1]["rows"]
    while not_any_more - pays > 1:
        middle = (pays + not_any_more) // 2
        pays, not_any_more = (middle, not_any_more) if best(middle)["draft_tokens"] else (pays, middle)
    return {
        "acceptance": acceptance,
        "pays_up_to": None if batches[-1]["draft_tokens"] else pays,
        "batches": batches,
    }
