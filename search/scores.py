"""Scores of given steps: what the verifier thinks of solutions that were written elsewhere."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Interval

from espalier.engine.errors import InvalidRequestError, Violation
from espalier.search.common_fields import Aggregation
from espalier.search.conversation import ChatMessage, conversation_text
from espalier.search.request import violations_with_problem
from espalier.search.result import StopReason, Usage
from espalier.search.schema import text_violations
from espalier.search.score_session import ScoreSessionRequest

MAX_SOLUTIONS = 256
MAX_STEPS = 256
MAX_TOTAL_STEPS = 4096
MAX_SOLUTION_BYTES = 2**20
"""Size of all steps of a request together."""
_CHARACTERS_PER_TOKEN = 3


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A problem and solutions whose steps are scored; steps that solutions begin with together are read once.

    Attributes:
        problem: what is solved.
        solutions: the steps of each, in order.
        history: messages before the problem; see `SearchRequest`.
        aggregation: how a solution's score is made of its steps'.
        seed: of scorers that sample.
        verifier_budget: verifier tokens of all solutions at most, including the problem; None for no limit.
        time_limit: seconds from submission after which steps are left without scores; None for no limit.
    """

    problem: str
    solutions: tuple[tuple[str, ...], ...]
    history: tuple[ChatMessage, ...] = ()
    aggregation: Aggregation = Aggregation.LAST
    seed: Annotated[int, Interval(ge=0, le=2**63 - 1)] = 0
    verifier_budget: Annotated[int | None, Interval(ge=1, le=16 * 2**20)] = None
    time_limit: Annotated[float | None, Interval(gt=0, le=24 * 3600)] = None

    algorithm: ClassVar[str] = "score"

    @property
    def problem_text(self) -> str:
        """The problem with the turns before it, as a verifier reads it."""
        return conversation_text(self.problem, self.history) if self.history else self.problem

    @property
    def size(self) -> int:
        """Characters of the problem, the messages before it and all steps."""
        return len(self.problem_text) + sum(len(step) for steps in self.solutions for step in steps)

    @property
    def estimated_tokens(self) -> int:
        """About how many tokens are read, for shares."""
        return self.size // _CHARACTERS_PER_TOKEN

    def validate(self) -> None:
        """Check every field.

        Raises:
            InvalidRequestError: lists all violations.
        """
        found = violations_with_problem(self, without=("solutions",)) + _solution_violations(self.solutions)
        if found:
            raise InvalidRequestError(found)


def make_score_request(request: ScoreRequest | str, steps: Iterable[str] | Iterable[Iterable[str]]) -> ScoreRequest:
    """A request as it is, or that of a problem's text and the steps of one solution, or of several.

    Raises:
        TypeError: `steps` are a single text.
    """
    if isinstance(request, ScoreRequest):
        return request
    if isinstance(steps, str):
        raise TypeError("steps are a list of texts, or a list of such lists, and not one text")
    listed = [each if isinstance(each, str) else tuple(each) for each in steps]
    one = bool(listed) and all(isinstance(each, str) for each in listed)
    return ScoreRequest(request, (tuple(listed),) if one else tuple(listed))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class SolutionScores:
    """The scores of one solution.

    Attributes:
        score: of the whole; None if a step that it is made of has none.
        step_scores: of each step, in [0, 1]; None for a step without one. A verifier of whole answers scores the last
            step alone.
        reason: why steps have no score: the first reason that there was; empty if all have one.
    """

    score: float | None
    step_scores: tuple[float | None, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """The outcome of a `ScoreRequest`, or of a session, whose scores were reported before.

    Attributes:
        search_id: its id.
        solutions: the scores of each solution; empty for a session.
        stop_reason: why it ended.
        usage: what it cost.
        configuration: what was asked for.
        scorer: what has scored, as results of searches name it.
        digests: of the models by role.
        error: why it failed; empty if it did not.
    """

    search_id: str
    solutions: tuple[SolutionScores, ...]
    stop_reason: StopReason
    usage: Usage
    configuration: ScoreRequest | ScoreSessionRequest
    scorer: str
    digests: dict[str, str]
    error: str = ""


def _solution_violations(solutions: Sequence[Sequence[str]]) -> list[Violation]:
    if not 1 <= len(solutions) <= MAX_SOLUTIONS:
        return [Violation("solutions", f"must be between 1 and {MAX_SOLUTIONS}, are {len(solutions)}")]
    for number, steps in enumerate(solutions):
        place = f"solutions[{number}]"
        if not 1 <= len(steps) <= MAX_STEPS:
            return [Violation(place, f"must have between 1 and {MAX_STEPS} steps, has {len(steps)}")]
        if not all(step.strip() for step in steps):
            return [Violation(place, "must have no empty step")]
    if (count := sum(map(len, solutions))) > MAX_TOTAL_STEPS:
        return [Violation("solutions", f"must have at most {MAX_TOTAL_STEPS} steps together, have {count}")]
    everything = "".join(step for steps in solutions for step in steps)
    return text_violations("solutions", everything, MAX_SOLUTION_BYTES)
