"""Settings of the solutions that are sampled of a generator, and of their labels."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, ClassVar

from annotated_types import Interval

from espalier.search.schema import Option


class Labels(StrEnum):
    """Source of a step's value; see `tree_sampler`."""

    OUTCOME = "outcome"
    MONTE_CARLO = "monte-carlo"
    BINARY_SEARCH = "binary-search"


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Solutions sampled for each problem, and continuations that value their steps."""

    help_panel: ClassVar = "Rollouts"

    solutions: Annotated[int, Interval(ge=1, le=1024), Option("Solutions sampled for each problem.", short="-N")] = 16
    labels: Annotated[
        Labels,
        Option(
            "What a step's value is. outcome: the share of its solutions that end right. monte-carlo: that share with "
            "--continuations more, sampled from the step. binary-search: whether any of them ends right; continuations "
            "only where the first wrong step of a wrong solution is searched for."
        ),
    ] = Labels.OUTCOME
    continuations: Annotated[
        int, Interval(ge=1, le=256), Option("monte-carlo and binary-search: continuations sampled from a step.")
    ] = 8
    temperature: Annotated[
        float | None,
        Interval(gt=0, le=10),
        Option("Sampling temperature; default: generation_config.json's, else 0.8."),
    ] = None
    max_steps: Annotated[int, Interval(ge=1, le=128), Option("Maximum steps of a solution.")] = 40
    max_step_tokens: Annotated[int, Interval(ge=1, le=2048), Option("Maximum tokens of a step.")] = 256
    max_tokens: Annotated[int, Interval(ge=1, le=2**20), Option("Maximum tokens of a solution.")] = 2048
    seed: Annotated[int, Interval(ge=0), Option("Seed of all sampling.")] = 0
