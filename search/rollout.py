"""Rollouts: solutions of a problem sampled as one tree of steps, for those who train on them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, ClassVar

from annotated_types import Interval

from espalier.engine.errors import Violation
from espalier.search.common_fields import PenaltyFields
from espalier.search.conversation import AboutProblem, ChatMessage
from espalier.search.result import StopReason, Usage
from espalier.search.schema import option, optional, text_violations

MAX_GOLDS = 16
_MAX_GOLD_BYTES = 4096


class Labels(StrEnum):
    """Source of a step's value; see `run.rollout`."""

    OUTCOME = "outcome"
    MONTE_CARLO = "monte-carlo"
    BINARY_SEARCH = "binary-search"


@dataclass(frozen=True, slots=True)
class RolloutSettings(PenaltyFields):
    """Solutions sampled for each problem, and continuations that value their steps."""

    help_panel: ClassVar = "Rollouts"

    solutions: int = option(16, "Solutions sampled for each problem.", Interval(ge=1, le=1024), short="-N")
    labels: Labels = option(
        Labels.OUTCOME,
        "What a step's value is. outcome: the share of its solutions that end right. monte-carlo: that share with "
        "--continuations more, sampled from the step. binary-search: whether any of them ends right; continuations "
        "only where the first wrong step of a wrong solution is searched for.",
    )
    continuations: int = option(
        8, "monte-carlo and binary-search: continuations sampled from a step.", Interval(ge=1, le=256)
    )
    temperature: float | None = optional(
        "Sampling temperature; default: generation_config.json's, else 0.8.", Interval(gt=0, le=10)
    )
    max_steps: int = option(40, "Maximum steps of a solution.", Interval(ge=1, le=128))
    max_step_tokens: int = option(256, "Maximum tokens of a step.", Interval(ge=1, le=2048))
    max_tokens: int = option(2048, "Maximum tokens of a solution.", Interval(ge=1, le=2**20))
    seed: int = option(0, "Seed of all sampling.", Interval(ge=0))


_NEUTRAL = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": ""}


def without_neutral_penalties(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without the penalties that change nothing, as records have them."""
    return {
        name: value for name, value in settings.items() if name not in _NEUTRAL or value not in (None, _NEUTRAL[name])
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest(RolloutSettings, AboutProblem):
    """A problem whose solutions are sampled.

    Attributes:
        problem: what is solved.
        history: messages before the problem; see `SearchRequest`.
        golds: right answers, by which steps are graded and valued, as by `grade`; without any they are not.
        time_limit: seconds from submission after which the tree ends as far as it is; None for no limit.
    """

    problem: str
    history: tuple[ChatMessage, ...] = ()
    golds: tuple[str, ...] = ()
    time_limit: Annotated[float | None, Interval(gt=0, le=24 * 3600)] = None

    algorithm: ClassVar[str] = "rollout"
    checked_apart: ClassVar = ("golds",)

    @property
    def beside(self) -> tuple[str, ...]:
        """See `AboutProblem`."""
        return self.golds

    @property
    def estimated_tokens(self) -> int:
        """About how many tokens are sampled, for shares."""
        return self.solutions * self.max_tokens

    def all_violations(self) -> list[Violation]:
        """See `AboutProblem`."""
        found = AboutProblem.all_violations(self)
        if self.labels == Labels.BINARY_SEARCH:
            found.append(Violation("labels", "must be outcome or monte-carlo; binary-search grades while it samples"))
        if len(self.golds) > MAX_GOLDS:
            found.append(Violation("golds", f"must be at most {MAX_GOLDS}, are {len(self.golds)}"))
        for gold in self.golds[:MAX_GOLDS]:
            found += text_violations("golds", gold, _MAX_GOLD_BYTES)
        return found


@dataclass(slots=True)
class StepRecord:
    """One step of a tree; while it is sampled, what is known of it grows.

    Attributes:
        parent: index of the step that it continues; None for a first one.
        text: what its tokens say.
        token_ids: as they were sampled.
        log_probabilities: of its tokens under the model at temperature 1.
        samples: solutions that drew it, token for token.
        end: why they end with it: `eos`, `boxed` or `length`; None where they go on.
        answer: of the solutions that end with it; None if they are cut off or go on.
        right: whether that is right; None if they go on, or nobody has graded it.
        continuations: sampled from its end.
        continuations_right: those that end right.
        value: see `Labels`; 0 if nobody has graded it.
    """

    parent: int | None
    text: str
    token_ids: list[int]
    log_probabilities: list[float]
    samples: int
    end: str | None = None
    answer: str | None = None
    right: bool | None = None
    continuations: int = 0
    continuations_right: int = 0
    value: float = 0.0


@dataclass(slots=True)
class RolloutStep(StepRecord):
    """A step with the answers of its continuations, for who grades them; empty texts are of those without an answer."""

    continuation_answers: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """The outcome of a `RolloutRequest`.

    Attributes:
        search_id: its id.
        prompt_token_ids: what every solution continues.
        steps: the tree, parents first. Solutions whose last step has no `end` were being continued when time ran out.
        stop_reason: why it ended.
        usage: what it cost.
        configuration: what was asked for, with defaults filled in.
        digests: of the models by role.
        error: why it failed; empty if it did not.
    """

    search_id: str
    prompt_token_ids: tuple[int, ...] = ()
    steps: tuple[RolloutStep, ...] = ()
    stop_reason: StopReason
    usage: Usage
    configuration: RolloutRequest
    digests: dict[str, str] = field(default_factory=dict)
    error: str = ""


def grade(steps: Sequence[RolloutStep], is_right: Callable[[str], bool]) -> None:
    """Grade a tree, and value its steps: the share of a step's solutions and continuations that end right.

    Args:
        steps: all of the tree, parents first.
        is_right: tells whether an answer is right.
    """
    right = [0] * len(steps)
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        if step.end:
            step.right = step.answer is not None and is_right(step.answer)
            right[index] = step.samples * step.right
        if step.parent is not None:
            right[step.parent] += right[index]
        step.continuations_right = sum(is_right(answer) for answer in step.continuation_answers if answer)
        step.value = round((right[index] + step.continuations_right) / (step.samples + step.continuations), 6)
