"""Searches that end without an answer: why, and which option would help."""

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum

from espalier.search.request import SearchRequest
from espalier.search.result import NodeRecord, SearchResult, StopReason


class Unanswered(StrEnum):
    """Why a search ended without an answer; where its paths ended in several ways, how most of them did."""

    MAX_TOKENS = "max-tokens"
    CONTEXT = "context"
    MAX_STEPS = "max-steps"
    MAX_STEP_TOKENS = "max-step-tokens"
    BUDGET = "budget"
    TIME_LIMIT = "time-limit"
    VERIFIER = "verifier"
    REPETITION = "repetition"
    NO_FINAL_ANSWER = "no-final-answer"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"

    @property
    def text(self) -> str:
        """The reason in words, behind a number of searches."""
        return _TEXTS[self]

    @property
    def advice(self) -> str:
        """What would help; empty if nothing is known to."""
        return _ADVICE.get(self, "")


_TEXTS = {
    Unanswered.MAX_TOKENS: "cut by --max-tokens",
    Unanswered.CONTEXT: "cut at the end of the generator's context",
    Unanswered.MAX_STEPS: "cut by --max-steps",
    Unanswered.MAX_STEP_TOKENS: "cut by --max-step-tokens",
    Unanswered.BUDGET: "cut by --generator-budget or --verifier-budget",
    Unanswered.TIME_LIMIT: "cut by --time-limit",
    Unanswered.VERIFIER: "cut where the verifier could not read on",
    Unanswered.REPETITION: "lost in repetition",
    Unanswered.NO_FINAL_ANSWER: "complete without a final answer",
    Unanswered.CANCELLED: "cancelled",
    Unanswered.UNKNOWN: "without a recorded reason",
}
_ADVICE = {
    Unanswered.MAX_TOKENS: "raise --max-tokens",
    Unanswered.CONTEXT: "take a generator with a longer context",
    Unanswered.MAX_STEPS: "raise --max-steps",
    Unanswered.MAX_STEP_TOKENS: "raise --max-step-tokens",
    Unanswered.BUDGET: "raise the budget",
    Unanswered.TIME_LIMIT: "raise --time-limit",
    Unanswered.VERIFIER: "take a verifier with a longer context",
    Unanswered.REPETITION: "raise --temperature",
    Unanswered.NO_FINAL_ANSWER: "ask for \\boxed{} with --system-prompt",
}
_STOPPED = {
    StopReason.BUDGET: Unanswered.BUDGET,
    StopReason.DEADLINE: Unanswered.TIME_LIMIT,
    StopReason.CANCELLED: Unanswered.CANCELLED,
}
_ENDED = {"budget": Unanswered.BUDGET, "degenerate": Unanswered.REPETITION}
"""Reasons by a node's termination, apart from `length`, which has several."""
_MAX_LISTED = 6


def why_unanswered(result: SearchResult, max_tokens: int | None) -> Unanswered | None:
    """Why a search has no answer; None if it has one.

    Args:
        result: the search's result, with its nodes.
        max_tokens: limit on a path's tokens before the prompt was known, which may have left less of the context.
    """
    if result.answer:
        return None
    if result.stop_reason in _STOPPED:
        return _STOPPED[result.stop_reason]
    if result.candidates:
        return Unanswered.NO_FINAL_ANSWER
    tokens: dict[tuple[int, ...], int] = {(): 0}
    counts: Counter[Unanswered] = Counter()
    for node in sorted(result.nodes, key=lambda node: node.path):
        if node.path:
            tokens[node.path] = tokens.get(node.path[:-1], 0) + node.tokens
        if reason := _reason(node, tokens[node.path], result.configuration, max_tokens):
            counts[reason] += node.multiplicity
    return counts.most_common(1)[0][0] if counts else Unanswered.UNKNOWN


def _reason(node: NodeRecord, tokens: int, request: SearchRequest, max_tokens: int | None) -> Unanswered | None:
    """Why a path of so many tokens ended at `node`; None if it did not end there, or was not kept."""
    if node.termination != "length":
        return _ENDED.get(node.termination)
    if request.max_tokens is not None and tokens >= request.max_tokens:
        return Unanswered.CONTEXT if request.max_tokens < (max_tokens or 0) else Unanswered.MAX_TOKENS
    if node.depth >= request.max_steps:
        return Unanswered.MAX_STEPS
    return Unanswered.MAX_STEP_TOKENS if node.tokens >= request.max_step_tokens else Unanswered.VERIFIER


def unanswered_in(runs: Sequence[tuple[str, Mapping[str, int], int]]) -> str:
    """One sentence as `unanswered_text` over several runs: their names, counts and numbers of searches."""
    without = [(name, counts, searches) for name, counts, searches in runs if counts]
    total = sum((Counter(counts) for _, counts, _ in without), Counter[str]())
    text = unanswered_text(total, sum(searches for *_, searches in without))
    return f"{text} ({listed([name for name, *_ in without])})" if text else ""


def listed(names: Sequence[str]) -> str:
    """The names with commas between them; of many, the first and the number of the others."""
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def unanswered_text(counts: Mapping[str, int], searches: int) -> str:
    """One sentence on how many of `searches` ended without an answer, by reason, and what would help; empty if none."""
    total = sum(counts.values())
    if not total:
        return ""
    reasons = sorted(map(Unanswered, counts), key=lambda reason: -counts[reason])
    why = ", ".join(f"{counts[reason]} {reason.text}" for reason in reasons)
    advice = ", ".join(reason.advice for reason in reasons if reason.advice)
    return f"{total} of {searches} searches ended without an answer: {why}" + (f"; {advice}" if advice else "")
