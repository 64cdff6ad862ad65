"""Step records: the size of each batch and where its time went, given to `Engine.on_step`."""

from dataclasses import dataclass


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
