"""The workers of an executor: which of them are up, what they hold, and the weights that they have."""

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from espalier.engine.errors import CheckpointError, EspalierError, FatalError, first_line
from espalier.engine.roles import GENERATOR
from espalier.experiments.executors.routing import RecentProblems, WorkerState, totals
from espalier.experiments.executors.worker import (
    Loaded,
    Lost,
    NoAnswerError,
    PrepareReload,
    Question,
    Reload,
    Stepped,
    Transport,
)
from espalier.search.server_info import KvBlocks, Occupancy

log = logging.getLogger("espalier.executors")

_WAIT_SECONDS = 0.01
_ANSWER_SECONDS = 2.0
"""Seconds that one worker has to check a request before another is asked."""
_MAX_ASKED = 2
"""Workers that are asked about a request before it is checked without them."""
_SILENT_SECONDS = 120.0
"""Seconds without a report after which a worker with searches hangs; its first steps may have to compile kernels."""
_LOAD_SECONDS = 1800.0
"""Seconds that a worker has to load weights that are to take the generator's place."""
_LOST_SECONDS = 300.0
"""Seconds without any worker after which no search can continue."""


class Workers:
    """The workers behind a transport.

    Attributes:
        states: what is known of each, by its number.
        description: what the first one described, with the digests of the weights that all have now.
        hardware: the machine of each; see `provenance.hardware`.
    """

    def __init__(self, transport: Transport) -> None:
        """Wait until all have loaded.

        Raises:
            EspalierError: a worker cannot load or ended, or workers differ in version or models.
        """
        self.states = [WorkerState(number) for number in range(transport.workers)]
        self.send = transport.send
        self._transport = transport
        self._none_since: float | None = None
        self._folder = ""  # whose weights are to be in the generator's place; empty for those of the start
        self._prepared = "", ""  # folder and digest of what all workers have loaded beside
        described = self._wait_for_all()
        self.description = described[0]
        self.hardware = [described[worker.number].hardware for worker in self.states]
        if what := next(filter(None, (self._differs(*each) for each in described.items())), ""):
            raise FatalError(what)

    def poll(self, seconds: float) -> Iterator[tuple[WorkerState, Stepped | Lost]]:
        """Wait for reports, and give those that concern searches; a lost worker is still up."""
        for number, report in self._transport.poll(seconds):
            worker = self.states[number]
            worker.heard = time.monotonic()
            match report:
                case Loaded(folder=folder) if folder != self._folder and not worker.up:
                    self.send(number, Reload(self._folder))  # it has the weights of its start
                case Loaded() if why := self._differs(number, report):
                    worker.up = False
                    log.warning("worker %d did not come back: %s", number, why)
                case Loaded():
                    log.info("worker %d goes on" if worker.up else "worker %d is back", number)
                    worker.up, worker.held, worker.folder = True, report.held, report.folder
                case Stepped():
                    worker.held = report.held
                    yield worker, report
                case Lost(error) if not worker.up:
                    log.warning("worker %d did not come back: %s", number, first_line(error))
                case Lost():
                    yield worker, report

    def occupancy(self, searches: int) -> Occupancy:
        """Return what is held now, of so many searches; blocks and counters are those that each last reported."""
        running = sum(len(worker.running) for worker in self.states)
        blocks: dict[str, KvBlocks] = {}
        for role, held in (item for worker in self.states for item in worker.held.kv_blocks.items()):
            others = blocks.get(role, KvBlocks(0, 0, 0))
            blocks[role] = KvBlocks(others.live + held.live, others.cached + held.cached, others.free + held.free)
        stats = totals(worker.stats for worker in self.states)
        return Occupancy(running, searches - running, blocks, stats, sum(worker.up for worker in self.states))

    def ask(self, question: Question) -> Any:
        """Ask one of the workers with the fewest searches, or a second one if that does not answer.

        Raises:
            NoAnswerError: neither answers in time.
        """
        why = NoAnswerError("all workers are lost")
        up = [worker for worker in self.states if worker.up]
        for worker in sorted(up, key=lambda worker: len(worker.running))[:_MAX_ASKED]:
            try:
                return self._transport.check(worker.number, question, _ANSWER_SECONDS)
            except NoAnswerError as error:
                why = error
        raise why

    def prepare_reload(self, folder: str) -> str:
        """Have all workers load weights beside those that go on; if one cannot, all let go of them."""
        workers, asked = range(len(self.states)), PrepareReload(folder)
        try:
            with ThreadPoolExecutor(len(workers)) as pool:
                digest, *others = {*pool.map(lambda at: self._transport.check(at, asked, _LOAD_SECONDS), workers)}
            if others:
                raise CheckpointError(f"{folder} is not the same for all workers: their digests differ")
        except BaseException:
            self.cancel_reload()
            raise
        self._prepared = folder, digest
        return digest

    def cancel_reload(self) -> None:
        """Have all workers let go of what they have loaded beside."""
        for worker in self.states:
            with suppress(EspalierError):  # it is lost, and so is what it held
                self._transport.check(worker.number, PrepareReload(None), _ANSWER_SECONDS)

    def reload(self, folder: str, hear: Callable[[float], None]) -> None:
        """Have each worker go on with other weights between two of its steps; waits until all do, or are lost.

        One that comes back later is given them before its first search. `hear` takes the reports of some seconds.
        """
        if self._prepared[0] != folder:
            self.prepare_reload(folder)
        self._folder, digest = self._prepared
        self._prepared = "", ""
        self.description = replace(self.description, models={**self.description.models, GENERATOR: digest})
        waited_for = [worker for worker in self.states if worker.up]
        for worker in waited_for:
            worker.folder, worker.recent, worker.heard = "", RecentProblems(), time.monotonic()
            self.send(worker.number, Reload(folder))
        late = time.monotonic() + _SILENT_SECONDS
        while True:
            hear(_WAIT_SECONDS)
            if not (left := [worker.number for worker in waited_for if worker.up and worker.folder != folder]):
                return
            if time.monotonic() > late:
                late += _SILENT_SECONDS
                for number in left:
                    log.warning("worker %d does not take the weights of %s, and is ended", number, folder)
                    self._transport.restart(number)

    def require_some(self) -> None:
        """Raise a FatalError if all are lost, and none has come back within some minutes."""
        if any(worker.up for worker in self.states):
            self._none_since = None
            return
        if self._none_since is None:
            self._none_since = time.monotonic()
            log.warning("all workers are lost; waiting for one to come back")
        if time.monotonic() - self._none_since > _LOST_SECONDS:
            raise FatalError(f"all workers are lost, and none has come back within {_LOST_SECONDS:g} seconds")

    def restart_silent(self) -> None:
        """Have workers ended that have searches and report nothing; they are lost, and come back."""
        now = time.monotonic()
        for worker in self.states:
            if worker.up and worker.running and now - worker.heard > _SILENT_SECONDS:
                log.warning("worker %d has reported nothing for %g s, and is ended", worker.number, _SILENT_SECONDS)
                worker.heard = now
                self._transport.restart(worker.number)

    def _wait_for_all(self) -> dict[int, Loaded]:
        """Wait for every worker; raises what one of them reports while others still load."""
        described: dict[int, Loaded] = {}
        while len(described) < len(self.states):
            for number, report in self._transport.poll(_WAIT_SECONDS):
                if isinstance(report, Lost):
                    raise report.error
                assert isinstance(report, Loaded), "a worker without searches reports nothing else"
                described[number] = report
                self.states[number].up, self.states[number].held = True, report.held
        return described

    def _differs(self, number: int, other: Loaded) -> str:
        """Return how a worker differs from worker 0, which makes it useless; empty if it does not."""
        mine, theirs = ({"version": each.version, **each.models} for each in (self.description, other))
        differing = "; ".join(
            f"{name} {own} and {theirs.get(name)}" for name, own in mine.items() if own != theirs.get(name)
        )
        what = f"workers 0 and {number} differ, so that results would depend on the worker: {differing}"
        return what if differing else ""

    def close(self) -> None:
        """End all workers."""
        for worker in self.states:
            worker.lose()
        self._transport.close()
