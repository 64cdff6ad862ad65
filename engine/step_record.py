"""Step records: the size of each batch and where its time went, given to `Engine.on_step`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from espalier.engine.scheduling.planner import StepPlan

Times = tuple[float, float, float]
"""Of a launch: when scheduling began, when the launch began and when it ended. Of its results: when the wait for them
began and ended, and when they were processed."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One batch of one model. Times are `time.perf_counter` seconds.

    With `launch_ahead`, another batch is scheduled and launched between `launch_end` and `wait_start`.

    Attributes:
        role: the model.
        rows: sequences in the batch.
        tokens: tokens computed.
        draws: tokens sampled.
        reads: positions at which a score was read.
        copied_blocks: partial blocks copied for sequences that part.
        schedule_start: when scheduling began; it chooses rows and blocks.
        launch_start: when the launch began. On a CPU the launch computes the batch; on a GPU it enqueues kernels.
        launch_end: when the launch ended.
        wait_start: when the wait for the results began.
        wait_end: when the results were there.
        update_end: when the results were processed: sampled tokens appended, finished work taken out.
    """

    role: str
    rows: int
    tokens: int
    draws: int
    reads: int
    copied_blocks: int
    schedule_start: float
    launch_start: float
    launch_end: float
    wait_start: float
    wait_end: float
    update_end: float

    @property
    def scheduling_seconds(self) -> float:
        """Seconds that the host spent on choosing the batch and on processing its results."""
        return self.launch_start - self.schedule_start + self.update_end - self.wait_end

    @property
    def computing_seconds(self) -> float:
        """Seconds of the launch and of the wait for the results."""
        return self.launch_end - self.launch_start + self.wait_end - self.wait_start


def record_of(role: str, plan: StepPlan, launch: Times, collect: Times) -> StepRecord:
    """The record of a batch that was launched and whose results were collected at these times."""
    draws, reads = len(plan.draws.step_positions) if plan.draws else 0, sum(map(len, plan.reads.values()))
    sizes = len(plan.rows), int(plan.counts.sum()), draws, reads, plan.copied_blocks
    return StepRecord(role, *sizes, *launch, *collect)
