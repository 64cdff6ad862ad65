"""The outcome of one problem of an evaluation: a line of `samples.jsonl`."""

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from espalier.experiments.evaluation.benchmarks import Problem
from espalier.experiments.evaluation.unanswered import Unanswered, why_unanswered
from espalier.search.result import SearchResult
from espalier.search.run.usage import UsageMeter
from espalier.search.voting.math_verify import Grade

REFUSED = "refused"
"""Stop reason of a problem that was not searched."""
_NOT_DERIVED = (
    "peak_kv_bytes", "generator_peak_kv_bytes", "verifier_peak_kv_bytes", "logical_blocks", "physical_blocks",
    "queue_seconds", "first_step_seconds", "seconds",
)  # fmt: skip
"""Fields of the usage that are None in derived samples."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One problem's outcome.

    `gold` lists all accepted answers, `answers` the candidates' answers with their counts.
    `error` is the reason why a problem was refused or its answer could not be graded; both count as not solved. `asked`
    is a digest of the problem and its gold answers, empty in samples of older versions. `wall_seconds` is the time
    since the previous sample or the start of the command, so that the sum over samples is the total time despite
    interruptions; 0 in samples of older versions. `epoch` counts the searches of a problem from 0.

    `unanswered` says why a search has no answer, a value of `Unanswered`; empty if it has one, and in samples of older
    versions.

    `derived_from` names the run whose larger search this sample was derived from, without a search of its own. Its
    seconds and KV memory are then None in `usage`, and `wall_seconds` is 0.
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

    def __post_init__(self) -> None:
        if not isinstance(self.correct, bool) or not isinstance(self.usage, dict):
            raise TypeError("correct must be true or false, and usage an object")
        if not isinstance(self.wall_seconds, int | float):
            raise TypeError("wall_seconds must be a number")

    @property
    def refused(self) -> bool:
        """Whether the problem could not be searched, for example for lack of memory."""
        return self.stop_reason == REFUSED

    @property
    def ungraded(self) -> bool:
        """Whether there is an answer that could not be graded."""
        return bool(self.error) and not self.refused

    @property
    def why_unanswered(self) -> Unanswered | None:
        """Why the search ended without an answer; None if it has one, or was refused."""
        return None if self.answer or self.refused else Unanswered(self.unanswered or Unanswered.UNKNOWN)

    @property
    def key(self) -> tuple[str, int]:
        """What no other sample of a run has: problem and epoch."""
        return self.unique_id, self.epoch

    def is_of(self, problem: Problem) -> bool:
        """Whether this is a sample of `problem`, not of an earlier problem with the same id."""
        return self.asked == _digest(problem) if self.asked else self.gold == _gold(problem)


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
    return Sample(
        unique_id=problem.unique_id,
        level=problem.level,
        gold=_gold(problem),
        answer=result.answer,
        correct=grade.correct,
        error=grade.error,
        score=result.score,
        stop_reason=str(result.stop_reason),
        text=result.best.text if result.best else "",
        answers=dict(answers),
        usage=asdict(result.usage) | (dict.fromkeys(_NOT_DERIVED) if derived_from else {}),
        asked=_digest(problem),
        epoch=epoch,
        subject=problem.subject,
        derived_from=derived_from,
        unanswered=why_unanswered(result, max_tokens) or "",
    )


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
    return Sample(
        unique_id=problem.unique_id,
        level=problem.level,
        gold=_gold(problem),
        answer="",
        correct=False,
        error=why,
        score=None,
        stop_reason=REFUSED,
        text="",
        answers={},
        usage=asdict(UsageMeter().close()),
        asked=_digest(problem),
        epoch=epoch,
        subject=problem.subject,
    )


def _gold(problem: Problem) -> str:
    return " or ".join(problem.golds)


def _digest(problem: Problem) -> str:
    before = [[message.role, message.content] for message in problem.history]
    asked = [problem.problem, *problem.golds, *problem.tolerances, *before]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
