"""A scheduler whose steps are launched before the results of the step before are known, for GPUs.

    step k       scheduled, launched | ............................ | results
    step k + 1                       | scheduled, launched | ...... |         | results
                                       its tokens: -1 - i for draw i of step k

The draws of the step in flight are tokens of the next one, though only the device knows them: a branch goes on as if
its sampling of the lowest index drew what all of them drew, and nothing that stops it. What turns out otherwise is
dropped. A guided branch waits for its token instead: what it may draw next depends on it.

Drafts are verified behind tokens that are known, so while branches are to have any, those in flight are left out until
their results are there.
"""

import numpy as np

from espalier.engine.scheduling.planner import StepPlan, WaitingRequest
from espalier.engine.scheduling.running_samples import DecodeRows, Draws, RunningRequest, StepResults
from espalier.engine.scheduling.scheduler import Scheduler
from espalier.engine.work import Done


class LaunchAheadScheduler(Scheduler):
    """A `Scheduler` that plans a step while the one before is in flight."""

    def schedule(self, max_tokens: int) -> StepPlan | None:
        """See `Scheduler`."""
        if self._in_flight and (draws := self._in_flight[-1].draws) and not self._waits_for(draws):
            self._append_placeholders(draws)
        return super().schedule(max_tokens)

    def update(self, plan: StepPlan, results: StepResults) -> list[Done]:
        """See `Scheduler`; drops from the next step what it draws for branches that have stopped or diverged."""
        if plan.draws and (live := plan.draws.live) is not None:
            results = results.of(live)
        running = len(self._branches.running)
        done = super().update(plan, results)
        if done or len(self._branches.running) != running:
            for step in self._in_flight:
                step.draws = step.draws and self._select_live(step.draws)
        return done

    def drop_all_kv(self) -> None:
        """See `Scheduler`; takes the tokens that stand for draws away again."""
        for branch in self._branches.running:
            while self.table.tokens[branch.row, self.table.lengths[branch.row] - 1] < 0:
                self.table.lengths[branch.row] -= 1
        super().drop_all_kv()

    def _ready(self) -> tuple[list[RunningRequest], list[WaitingRequest]]:
        running, waiting = super()._ready()
        for step in self._in_flight[-1:]:
            leaving = {id(item) for item in (*step.scored, *step.opened)}
            if (draws := step.draws) and self._waits_for(draws):
                leaving |= set(map(id, draws.decode.branches))
            elif draws:  # its last token, whatever it is
                full = np.flatnonzero(self._branches.are_full(draws.decode, draws.positions))
                leaving |= {id(draws.decode.branches[i]) for i in (*full, *draws.decode.matchers)}
            running = [branch for branch in running if id(branch) not in leaving]
            waiting = [item for item in waiting if id(item) not in leaving]
        return running, waiting

    def _waits_for(self, draws: Draws) -> bool:
        """True if branches of a step in flight go on only when its results are there."""
        return draws.depths is not None or (self.speculation is not None and self.speculation.length > 0)

    def _append_placeholders(self, draws: Draws) -> None:
        """Give each branch of a step in flight that can go on a token that stands for the one being drawn."""
        decode, positions = draws.decode, draws.positions
        goes_on = (self.table.lengths[decode.rows] == positions) & ~self._branches.are_full(decode, positions)
        goes_on &= np.array([not (b.matcher or b in draws.opened) for b in decode.branches], dtype=bool)
        if goes_on.any():
            firsts = decode.firsts if draws.live is None else draws.live[decode.firsts]
            self.table.write_tokens(decode.rows[goes_on], positions[goes_on], -1 - firsts[goes_on])

    def _select_live(self, draws: Draws) -> Draws | None:
        """The draws of a step in flight, without those for branches that have stopped and samplings that diverged."""
        decode, alive = draws.decode, set(map(id, (*self._branches.running, *draws.opened)))
        live = [
            draw
            for draw, (b, index) in enumerate(zip(decode.branch_of.tolist(), decode.indices, strict=True))
            if id(branch := decode.branches[b]) in alive and index in branch.indices
        ]
        if live and len(live) < len(decode.indices):
            draws.live = np.array(live, dtype=np.int64)
            draws.decode = DecodeRows([branch for branch in decode.branches if id(branch) in alive])
            draws.step_positions = draws.step_positions[draws.live]
        return draws if live else None
