"""What `Engine.on_step` is told about each batch: its size, and where its time went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from espalier.engine.scheduling.scheduler import SchedulerOutput

Times = tuple[float, float, float]
"""Of a launch: when scheduling began, when the launch began and when it ended. Of its results: when the wait for them
began and ended, and when they were processed."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One batch of one model. Times are `time.perf_counter` seconds.

    With `launch_ahead`, another batch is scheduled and launched between `launched` and `waiting`.

    Attributes:
        role: the model.
        rows: sequences in the batch.
        tokens: tokens computed.
        draws: tokens sampled.
        reads: positions at which a score was read.
        copied_blocks: partial blocks copied for sequences that part.
        begun: when scheduling began; it chooses rows and blocks.
        scheduled: when the launch began. On a CPU the launch computes the batch; on a GPU it enqueues kernels.
        launched: when the launch ended.
        waiting: when the wait for the results began.
        waited: when the results were there.
        updated: when the results were processed: sampled tokens appended, finished work taken out.
    """

    role: str
    rows: int
    tokens: int
    draws: int
    reads: int
    copied_blocks: int
    begun: float
    scheduled: float
    launched: float
    waiting: float
    waited: float
    updated: float

    @property
    def scheduling_seconds(self) -> float:
        """Seconds that the host spent on choosing the batch and on processing its results."""
        return self.scheduled - self.begun + self.updated - self.waited

    @property
    def computing_seconds(self) -> float:
        """Seconds of the launch and of the wait for the results."""
        return self.launched - self.scheduled + self.waited - self.waiting


def record_of(role: str, step: SchedulerOutput, launch: Times, collect: Times) -> StepRecord:
    """The record of a batch that was launched and whose results were collected at these times."""
    plan, draws = step.plan, 0 if step.draws is None else len(step.draws.step_positions)
    sizes = len(plan.rows), int(plan.counts.sum()), draws, len(step.reads), len(plan.copies[0])
    return StepRecord(role, *sizes, *launch, *collect)
