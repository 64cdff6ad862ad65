"""The outcome of one problem of an evaluation, a line of `samples.jsonl`; why it may be without an answer, or cut."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

from espalier.experiments.runs.benchmarks import Problem
from espalier.search.grading.math_verify import Grade
from espalier.search.request import SearchRequest
from espalier.search.result import NodeRecord, SearchResult, StopReason, Usage

REFUSED = "refused"
"""Stop reason of a problem that was not searched."""
_NOT_DERIVED = (
    "peak_kv_bytes", "generator_peak_kv_bytes", "verifier_peak_kv_bytes", "logical_blocks", "physical_blocks",
    "queue_seconds", "first_step_seconds", "seconds",
)  # fmt: skip
"""Fields of the usage that are None in derived samples."""


class Unanswered(StrEnum):
    """The reason why a search ended without an answer; where its paths ended in several ways, that of most of them.

    Attributes:
        text: the reason in words, behind a number of searches.
        advice: the option or model that would help; empty if nothing is known to.
    """

    text: str
    advice: str

    def __new__(cls, value: str, text: str, advice: str = "") -> Self:
        """Create the reason of a value; see the attributes."""
        reason = str.__new__(cls, value)
        reason._value_, reason.text, reason.advice = value, text, advice
        return reason

    MAX_TOKENS = "max-tokens", "cut by --max-tokens", "raise --max-tokens"
    CONTEXT = "context", "cut at the end of the generator's context", "take a generator with a longer context"
    MAX_STEPS = "max-steps", "cut by --max-steps", "raise --max-steps"
    MAX_STEP_TOKENS = "max-step-tokens", "cut by --max-step-tokens", "raise --max-step-tokens"
    BUDGET = "budget", "cut by --generator-budget or --verifier-budget", "raise the budget"
    TIME_LIMIT = "time-limit", "cut by --time-limit", "raise --time-limit"
    VERIFIER = "verifier", "cut where the verifier could not read on", "take a verifier with a longer context"
    REPETITION = "repetition", "lost in repetition", "raise --temperature"
    THOUGHT = "thought", "ended within their thought", "set --thinking to a number of tokens"
    NO_FINAL_ANSWER = "no-final-answer", "complete without a final answer", "ask for \\boxed{} with --system-prompt"
    CANCELLED = "cancelled", "cancelled"
    UNKNOWN = "unknown", "without a recorded reason"


STOPPED = {
    StopReason.BUDGET: Unanswered.BUDGET,
    StopReason.DEADLINE: Unanswered.TIME_LIMIT,
    StopReason.CANCELLED: Unanswered.CANCELLED,
}
_ENDED = {"budget": Unanswered.BUDGET, "degenerate": Unanswered.REPETITION, "unclosed": Unanswered.THOUGHT}
"""Reasons by a node's termination, apart from `length`, which has several."""
_MANY = 0.2
"""Share of the paths. One that is cut counts as wrong, so that any accuracy may be too low by as much."""
_CUT = (Unanswered.MAX_TOKENS, Unanswered.MAX_STEPS, Unanswered.MAX_STEP_TOKENS, Unanswered.CONTEXT,
        Unanswered.BUDGET, Unanswered.VERIFIER)  # fmt: skip
_MAX_LISTED = 6
_STEP_END = "\n\n"


@dataclass(frozen=True, slots=True)
class Sample:
    """One search of a problem: a line of `samples.jsonl`.

    Attributes:
        gold: all accepted answers.
        error: the reason why a problem was refused or its answer could not be graded; both count as not solved.
        text: the selected path.
        answers: the candidates' answers with their counts.
        usage: the search's; in a derived sample, seconds and KV memory are None.
        asked: digest of the problem and its gold answers.
        wall_seconds: time since the previous sample or the start of the command, so that the sum over samples is the
            total time despite interruptions; 0 in a derived sample.
        epoch: number of the search among those of the problem, from 0.
        derived_from: name of the run whose larger search this sample was derived from; empty for a search of its own.
        unanswered: reason for no answer, a value of `Unanswered`; empty if there is one.
        warnings: those of the search's result.
    """

    unique_id: str
    level: int | None
    gold: str
    answer: str
    correct: bool
    error: str
    score: float | None
    stop_reason: str
    text: str
    answers: dict[str, int]
    usage: dict[str, Any]
    asked: str = ""
    wall_seconds: float = 0.0
    epoch: int = 0
    subject: str | None = None
    derived_from: str = ""
    unanswered: str = ""
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.correct, bool) or not isinstance(self.usage, dict):
            raise TypeError("correct must be true or false, and usage an object")
        if not isinstance(self.wall_seconds, int | float):
            raise TypeError("wall_seconds must be a number")
        object.__setattr__(self, "warnings", tuple(self.warnings))  # JSON has lists

    @property
    def refused(self) -> bool:
        """True if the problem could not be searched, for example for lack of memory."""
        return self.stop_reason == REFUSED

    @property
    def ungraded(self) -> bool:
        """True if there is an answer that could not be graded."""
        return bool(self.error) and not self.refused

    @property
    def why_unanswered(self) -> Unanswered | None:
        """The reason for no answer; None if there is one, or the search was refused."""
        return None if self.answer or self.refused else Unanswered(self.unanswered or Unanswered.UNKNOWN)

    @property
    def steps(self) -> list[str]:
        """Steps of the selected path; empty without one."""
        return [step for step in self.text.split(_STEP_END) if step.strip()]

    @property
    def key(self) -> tuple[str, int]:
        """Problem and epoch, which no other sample of a run has."""
        return self.unique_id, self.epoch

    def is_of(self, problem: Problem) -> bool:
        """Return true if this is a sample of `problem`, not of an earlier problem with the same id."""
        return self.asked == _digest(problem)


def sample_of(
    problem: Problem,
    result: SearchResult,
    grade: Grade,
    epoch: int = 0,
    derived_from: str = "",
    max_tokens: int | None = None,
) -> Sample:
    """Create the sample of a finished search, or of a result that was derived from another run's.

    `max_tokens` is that of `why_unanswered`.
    """
    answers: Counter[str] = Counter()
    for candidate in result.candidates:
        if candidate.answer:
            answers[candidate.answer] += candidate.multiplicity
    return _sample(
        problem, epoch, answer=result.answer, correct=grade.correct, error=grade.error, score=result.score,
        stop_reason=str(result.stop_reason), text=result.best.text if result.best else "", answers=dict(answers),
        usage=asdict(result.usage) | (dict.fromkeys(_NOT_DERIVED) if derived_from else {}), derived_from=derived_from,
        unanswered=why_unanswered(result, max_tokens) or "", warnings=result.warnings,
    )  # fmt: skip


def tree_record(sample: Sample, result: SearchResult) -> dict[str, Any]:
    """Return the tree of a sample's search: a line of `trees.jsonl`.

    Nodes are ordered by path and numbered in that order, so that the record does not depend on timing.
    """
    nodes = sorted(result.nodes, key=lambda node: node.path)
    place: dict[int | None, int | None] = {None: None}
    place |= {node.node_id: i for i, node in enumerate(nodes)}
    records = [asdict(node) | {"node_id": i, "parent_id": place[node.parent_id]} for i, node in enumerate(nodes)]
    return {"unique_id": sample.unique_id, "epoch": sample.epoch, "nodes": records}


def refused_sample(problem: Problem, why: str, epoch: int = 0) -> Sample:
    """Create the sample of a problem that could not be searched, for example one longer than the model's context."""
    return _sample(
        problem, epoch, answer="", correct=False, error=why, score=None, stop_reason=REFUSED, text="", answers={},
        usage=asdict(Usage()),
    )  # fmt: skip


def _sample(problem: Problem, epoch: int, **fields: Any) -> Sample:
    gold = " or ".join(problem.golds)
    of_problem = {"asked": _digest(problem), "epoch": epoch, "subject": problem.subject}
    return Sample(problem.unique_id, problem.level, gold, **of_problem, **fields)


def _digest(problem: Problem) -> str:
    before = ([m.role, m.content, *filter(None, [m.reasoning_content, m.more])] for m in problem.history)
    asked = [problem.problem, *problem.golds, *problem.tolerances, *before]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def why_unanswered(result: SearchResult, max_tokens: int | None) -> Unanswered | None:
    """The reason why a search has no answer; None if it has one.

    Args:
        result: the search's result, with its nodes.
        max_tokens: limit on a path's tokens before the prompt was known, which may have left less of the context.
    """
    if result.answer:
        return None
    if result.stop_reason in STOPPED:
        return STOPPED[result.stop_reason]
    if result.candidates:
        return Unanswered.NO_FINAL_ANSWER
    counts = lost_paths(result.nodes, result.configuration, max_tokens)
    return counts.most_common(1)[0][0] if counts else Unanswered.UNKNOWN


def lost_paths(
    nodes: Sequence[NodeRecord], request: SearchRequest, max_tokens: int | None = None
) -> Counter[Unanswered]:
    """The number of a tree's paths that ended without an answer, by reason.

    Args:
        nodes: the tree's.
        request: its search, with every default filled in.
        max_tokens: see `why_unanswered`.
    """
    tokens: dict[tuple[int, ...], int] = {(): 0}
    counts: Counter[Unanswered] = Counter()
    by_path = {tuple(node.path): node for node in nodes}  # which is a list in nodes that were read from a file
    for path, node in sorted(by_path.items()):
        if path:
            tokens[path] = tokens.get(path[:-1], 0) + node.tokens
        if reason := _reason(node, tokens[path], request, max_tokens):
            counts[reason] += node.multiplicity
    return counts


def _reason(node: NodeRecord, tokens: int, request: SearchRequest, max_tokens: int | None) -> Unanswered | None:
    """The reason why a path of so many tokens ended at `node`; None if it did not, or was not kept."""
    if node.termination != "length":
        return _ENDED.get(node.termination)
    if request.max_tokens is not None and tokens >= request.max_tokens:
        return Unanswered.CONTEXT if request.max_tokens < (max_tokens or 0) else Unanswered.MAX_TOKENS
    if request.max_steps is not None and node.depth >= request.max_steps:
        return Unanswered.MAX_STEPS
    return Unanswered.VERIFIER


def unanswered_in(runs: Sequence[tuple[str, Mapping[str, int], int]]) -> str:
    """One sentence as `unanswered_text` over several runs: their names, counts and numbers of searches."""
    without = [run for run in runs if run[1]]
    total = sum((Counter(counts) for _, counts, _ in without), Counter[str]())
    text = unanswered_text(total, sum(searches for *_, searches in without))
    return text and f"{text} ({listed([name for name, *_ in without])})"


def listed(names: Sequence[str]) -> str:
    """The names with commas between them; of many, the first and the number of the others."""
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def unanswered_text(counts: Mapping[str, int], searches: int) -> str:
    """One sentence on how many of `searches` ended without an answer, by reason, and what would help; empty if none."""
    return _counted(counts, searches, "searches ended without an answer")


def _counted(counts: Mapping[Any, int], among: int, what: str) -> str:
    """Say how many among how many ended for which reason, and what would help; empty if none did."""
    reasons = sorted(map(Unanswered, counts), key=lambda reason: -counts[reason])
    why = ", ".join(f"{counts[reason]:,} {reason.text}" for reason in reasons)
    advice = ", ".join(reason.advice for reason in reasons if reason.advice)
    text = f"{sum(counts.values()):,} of {among:,} {what}: {why}" + (f"; {advice}" if advice else "")
    return text if counts else ""


@dataclass(frozen=True, slots=True)
class CutPaths:
    """The paths of some searches that were cut.

    Attributes:
        counts: how many, by reason.
        paths: cut or not.
    """

    counts: Mapping[Unanswered, int]
    paths: int

    @classmethod
    def among(cls, lost: Iterable[Mapping[Unanswered, int]], paths: int) -> "CutPaths":
        """The cut ones among paths without an answer, see `lost_paths`, of several trees."""
        total = sum(map(Counter, lost), Counter[Unanswered]())
        return cls({reason: total[reason] for reason in _CUT if total[reason]}, paths)

    @property
    def many(self) -> bool:
        """True if a verdict that follows from the paths may be the limit's and not the model's."""
        return sum(self.counts.values()) > _MANY * self.paths

    def __str__(self) -> str:
        """Say how many were cut by what, and what would help; empty where none was."""
        return _counted(self.counts, self.paths, "paths were cut")
