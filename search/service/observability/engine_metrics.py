"""Metrics collected at each scrape: calls and searches, the KV pool, and the engine's counters."""

import asyncio
import math
import threading
import time
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    StateSetMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from espalier import __version__
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.engine.stats import COUNTERS, Histogram, RoleCounters, RoleStats
from espalier.search.server_info import KvBlocks, Occupancy
from espalier.search.service.engine_thread import EngineState, EngineThread
from espalier.search.service.errors import NotReadyError
from espalier.search.service.session import Session
from espalier.search.service.settings import ServerSettings

ASK_SECONDS = 0.5
"""Seconds that a scrape waits for the engine to end its step; it then shows what was reported last."""

_DIGEST_DIGITS = 12
_NOTHING = RoleCounters()


class EngineMetrics(Collector):
    """Asks for everything when it is collected, from a thread other than the event loop's.

    Between steps the engine thread reports its counters, which it keeps anyway. A busy or dead engine holds no scrape
    up: its last report is shown, and how old that is.
    """

    def __init__(self, engine: EngineThread, session: Session, settings: ServerSettings) -> None:
        """Create a collector on the event loop."""
        self._engine = engine
        self._session = session
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._held: tuple[Occupancy, float] | None = None  # as last reported, and when, in monotonic seconds

    def collect(self) -> Iterator[Metric]:
        """Yield the families.

        Raises:
            TimeoutError: the event loop does not answer.
        """
        assert threading.get_ident() != self._loop_thread, "a scrape must not block the event loop"
        state, admitted, waiting = asyncio.run_coroutine_threadsafe(self._look(), self._loop).result(4 * ASK_SECONDS)
        yield from self._of_the_server(state, admitted, waiting)
        if self._held is not None:
            held, at = self._held
            yield _gauge("engine_report_age_seconds", "Age of what follows from the engine.", time.monotonic() - at)
            yield from self._of_the_executor(held)
            yield from _of_the_models(held.stats)

    async def _look(self) -> tuple[EngineState, int, int]:
        """State of the engine, and calls that hold and that wait for a slot."""
        try:
            async with asyncio.timeout(ASK_SECONDS):
                self._held = await self._engine.occupancy(), time.monotonic()
        except (TimeoutError, NotReadyError):
            pass  # the last report stays, and its age tells
        return self._engine.state, self._session.admitted_calls, self._session.waiting_calls

    def _of_the_server(self, now: EngineState, admitted: int, waiting: int) -> Iterator[Metric]:
        models = self._engine.models
        digests = {role: models[role][:_DIGEST_DIGITS] for role in (GENERATOR, VERIFIER) if role in models}
        names = {f"{role}_name": name for role, name in self._engine.model_names.items()}
        labels = {"version": __version__, **digests, **names}
        yield InfoMetricFamily("espalier_build", "What is served.", labels)
        states = {str(state): state is now for state in EngineState}
        yield StateSetMetricFamily("espalier_engine_state", "How far the engine thread is.", states)
        yield _gauge("admitted_calls", "Calls that hold a slot.", admitted)
        yield _gauge("waiting_calls", "Calls that wait for a slot.", waiting)
        yield _gauge("search_slots", "Calls that may hold a slot.", self._session.slots)
        yield _gauge("queue_places", "Calls that may wait for a slot.", self._settings.max_queue)

    def _of_the_executor(self, held: Occupancy) -> Iterator[Metric]:
        yield _gauge("running_searches", "Searches that run.", held.running)
        yield _gauge("waiting_searches", "Searches that wait for memory.", held.waiting)
        size = self._engine.kv_memory_bytes
        yield _gauge("kv_pool_bytes", "Size of the KV pool, of one worker's where there are several.", size)
        blocks = GaugeMetricFamily("espalier_kv_blocks", "KV blocks of a model.", labels=("role", "state"))
        for role, each in held.kv_blocks.items():
            for state in KvBlocks.__slots__:
                blocks.add_metric((role, state), getattr(each, state))
        yield blocks


def _of_the_models(stats: dict[str, RoleStats]) -> Iterator[Metric]:
    """Families of what engines count by role; without samples where the executor has no counters."""
    held = GaugeMetricFamily("espalier_kv_bytes", "Bytes of the KV blocks of a model.", labels=("role", "state"))
    for role, each in stats.items():
        for state in KvBlocks.__slots__:
            held.add_metric((role, state), getattr(each, f"{state}_bytes"))
    yield held
    states = GaugeMetricFamily("espalier_recurrent_states", "Recurrent states of a model.", labels=("role", "state"))
    for role, each in stats.items():
        states.add_metric((role, "live"), each.live_states)
        states.add_metric((role, "cached"), each.cached_states)
    yield states
    for name, declared in COUNTERS.items():
        of_roles = {role: getattr(each, name) for role, each in stats.items()}
        yield _family(f"espalier_{declared.metric}", declared.text, of_roles, getattr(_NOTHING, name))


def _family(name: str, text: str, values: Mapping[str, Any], nothing: Any) -> Metric:
    """A counter or a histogram by role; which of them is told by the value where `nothing` was counted."""
    if not isinstance(nothing, Histogram):
        counter = CounterMetricFamily(name, text, labels=("role",))
        for role, value in values.items():
            counter.add_metric((role,), value)
        return counter
    histogram = HistogramMetricFamily(name, text, labels=("role",))
    for role, value in values.items():
        histogram.add_metric((role,), _buckets(value), value.sum)
    return histogram


def _buckets(values: Histogram) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound, as Prometheus has them."""
    bounds = [floatToGoString(bound) for bound in (*values.bounds, math.inf)]
    return list(zip(bounds, accumulate(values.counts), strict=True))


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"espalier_{name}", text, value)
