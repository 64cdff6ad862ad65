"""The metrics of a server: what it counts of calls and searches, and what is held at the moment of a scrape.

The registry is the server's own, so that a process can hold several servers.
"""

import asyncio
import math
import time
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, core
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from espalier import __version__
from espalier.engine import stats
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.search.result import USAGE_COUNTERS
from espalier.search.server_info import KvBlocks, Occupancy
from espalier.search.service.access.calls import Call
from espalier.search.service.engine_thread import EngineState, Search
from espalier.search.service.errors import REASONS, NotReadyError
from espalier.search.service.session import Session

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the buckets of times; a search may take 300 seconds by default."""

ABORTED = "aborted"
"""Outcome of a search without a result: a worker refused it, or the engine died or was stopped."""

MAX_NAMES = 100
"""Different values of a label whose values come from outside; all further ones are `OTHER`."""
OTHER = "other"

_OPENMETRICS = "application/openmetrics-text"
ASK_SECONDS = 0.5
"""Seconds that a scrape waits for the engine to end its step; it then shows what was reported last."""

_DIGEST_DIGITS = 12
_NOTHING = stats.RoleCounters()
_STATES = KvBlocks.__slots__
_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
"""Load as vLLM names it, which llm-d reads unless it is told others."""


def _bounded(known: set[str], name: str) -> str:
    """The value of a label: `name` if it is one of the first `MAX_NAMES`, which `known` holds, else `OTHER`."""
    if len(known) < MAX_NAMES:
        known.add(name)
    return name if name in known else OTHER


class Metrics:
    """The metrics of one server; an `Observer`.

    Attributes:
        registry: holds all of them; other collectors may be registered.
        held: what the session and the engine hold, once they are watched.
    """

    held: "HeldMetrics"

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._methods, self._callers = set[str](), set[str]()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"espalier_{name}", text, labels, registry=self.registry)

        def seconds(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(f"espalier_{name}_seconds", text, labels, registry=self.registry, buckets=SECONDS)

        self._calls = counter("calls", "Calls that are over.", "method", "code")
        self._call_seconds = seconds("call", "Time from a call's arrival to its end.", "method")
        self._failures = counter("call_failures", "Calls that failed.", "reason")
        for reason in REASONS:  # shown at 0, else the first failure would not be an increase
            self._failures.labels(reason)
        self._caller_calls = counter("caller_calls", "Calls of a login that are over.", "caller", "code")
        self._caller_tokens = counter("caller_tokens", "Tokens that searches of a login used up.", "caller")

        self._searches = counter("searches", "Searches that have ended.", "algorithm", "outcome")
        self._queue_seconds = seconds("search_queue", "Time that a search waited before it started.")
        self._run_seconds = seconds("search_run", "Time from a search's start to its result.", "algorithm")
        self._first_step_seconds = seconds("search_first_step", "Time from a search's start to its first step.")
        made: dict[str, Counter] = {}
        self._usage: dict[str, Counter] = {}  # by the names of their fields
        for name, declared in USAGE_COUNTERS.items():
            if metric := declared.metric:
                if metric not in made:
                    made[metric] = counter(metric, declared.text, *(("role",) if declared.role else ()))
                self._usage[name] = made[metric].labels(declared.role) if declared.role else made[metric]

    def call_ended(self, call: Call) -> None:
        """Count a call that is over."""
        method = _bounded(self._methods, call.method)
        self._calls.labels(method, call.code).inc()
        self._call_seconds.labels(method).observe(call.seconds)
        if call.reason is not None:
            self._failures.labels(call.reason).inc()
        if call.caller is not None and call.caller.login:
            self._caller_calls.labels(_bounded(self._callers, call.caller.name), call.code).inc()

    def search_ended(self, call: Call, search: Search) -> None:
        """Count a search that has ended, and what it used up."""
        result = search.result
        algorithm = str((result.configuration if result else search.request).algorithm or "default")
        self._searches.labels(algorithm, str(result.stop_reason) if result else ABORTED).inc()
        if result is None:
            return
        usage = result.usage
        self._queue_seconds.observe(usage.queue_seconds)
        self._run_seconds.labels(algorithm).observe(usage.seconds)
        if usage.nodes:
            self._first_step_seconds.observe(usage.first_step_seconds)
        for name, counter in self._usage.items():
            counter.inc(getattr(usage, name))
        if call.caller is not None and call.caller.login:
            self._caller_tokens.labels(_bounded(self._callers, call.caller.name)).inc(usage.charged_tokens)

    def watch(self, session: Session) -> None:
        """Show what a session and its engine hold, too; call it on the event loop."""
        self.held = HeldMetrics(session)
        self.registry.register(self.held)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics as text. It waits for the event loop and the engine, so call it on another thread.

        Args:
            accept: the reader's `Accept` header, which may ask for OpenMetrics.

        Returns:
            The text, and its content type.
        """
        encode, content_type = choose_encoder(_OPENMETRICS if _OPENMETRICS in accept else "")
        return encode(self.registry), content_type


class HeldMetrics(Collector):
    """The load of the engine and the session.

    Asks for everything when it is collected, from a thread other than the event loop's.

    Between steps the engine thread reports its counters, which it keeps anyway. A busy or dead engine holds no scrape
    up: its last report is shown, and how old that is.
    """

    def __init__(self, session: Session) -> None:
        """Create a collector on the event loop."""
        self._engine, self._queue, self._max_queue = session.engine, session.queue, session.settings.max_queue
        self._loop = asyncio.get_running_loop()
        label = session.settings.served_name.replace("\\", r"\\").replace('"', r"\"")
        self._gauges = [f'# TYPE vllm:{name} gauge\nvllm:{name}{{model_name="{label}"}} ' for name in _GAUGES]
        self._held: tuple[Occupancy, float] | None = None  # as last reported, and when, in monotonic seconds

    def collect(self) -> Iterator[core.Metric]:
        """Yield the families.

        Raises:
            TimeoutError: the event loop does not answer.
        """
        state, admitted, waiting = asyncio.run_coroutine_threadsafe(self._look(), self._loop).result(4 * ASK_SECONDS)
        yield from self._of_the_server(state, admitted, waiting)
        if self._held is not None:
            held, at = self._held
            yield _gauge("engine_report_age_seconds", "Age of what follows from the engine.", time.monotonic() - at)
            yield from self._of_the_executor(held)
            yield from _of_the_models(held.stats)

    def gauges(self) -> bytes:
        """Return the load in the names that gateways of inference servers read, without waiting.

        Calls are counted at this moment; what the engine holds is as it last reported, and it is asked to report.
        """
        held = self._engine.last_report
        self._engine.ask_report()
        waiting_for_memory, share = 0, 0.0
        if held is not None:
            waiting_for_memory = held.waiting
            if size := held.pools * self._engine.kv_memory_bytes:
                share = min(1.0, sum(each.live_bytes for each in held.stats.values()) / size)
        running = max(0, self._queue.held - waiting_for_memory)
        values = running, self._queue.waiting + waiting_for_memory, round(share, 6)
        return "".join(f"{head}{value}\n" for head, value in zip(self._gauges, values, strict=True)).encode()

    async def _look(self) -> tuple[EngineState, int, int]:
        """State of the engine, and calls that hold and that wait for a slot."""
        try:
            async with asyncio.timeout(ASK_SECONDS):
                self._held = await self._engine.occupancy(), time.monotonic()
        except (TimeoutError, NotReadyError):
            pass  # the last report stays, and its age tells
        return self._engine.state, self._queue.held, self._queue.waiting

    def _of_the_server(self, now: EngineState, admitted: int, waiting: int) -> Iterator[core.Metric]:
        models = self._engine.models
        digests = {role: models[role][:_DIGEST_DIGITS] for role in (GENERATOR, VERIFIER) if role in models}
        names = {f"{role}_name": name for role, name in self._engine.model_names.items()}
        yield core.InfoMetricFamily("espalier_build", "What is served.", {"version": __version__, **digests, **names})
        states = {str(state): state is now for state in EngineState}
        yield core.StateSetMetricFamily("espalier_engine_state", "How far the engine thread is.", states)
        yield _gauge("admitted_calls", "Calls that hold a slot.", admitted)
        yield _gauge("waiting_calls", "Calls that wait for a slot.", waiting)
        yield _gauge("search_slots", "Calls that may hold a slot.", self._queue.slots)
        yield _gauge("queue_places", "Calls that may wait for a slot.", self._max_queue)

    def _of_the_executor(self, held: Occupancy) -> Iterator[core.Metric]:
        yield _gauge("running_searches", "Searches that run.", held.running)
        yield _gauge("waiting_searches", "Searches that wait for memory.", held.waiting)
        size = self._engine.kv_memory_bytes
        yield _gauge("kv_pool_bytes", "Size of the KV pool, of one worker's where there are several.", size)
        blocks = {role: {state: getattr(each, state) for state in _STATES} for role, each in held.kv_blocks.items()}
        yield _by_role("kv_blocks", "KV blocks of a model.", blocks)


def _of_the_models(models: dict[str, stats.RoleStats]) -> Iterator[core.Metric]:
    """Families of what engines count by role; without samples where the executor has no counters."""
    held = {role: {state: getattr(each, f"{state}_bytes") for state in _STATES} for role, each in models.items()}
    yield _by_role("kv_bytes", "Bytes of the KV blocks of a model.", held)
    states = {role: {"live": each.live_states, "cached": each.cached_states} for role, each in models.items()}
    yield _by_role("recurrent_states", "Recurrent states of a model.", states)
    for name, declared in stats.COUNTERS.items():
        of_roles = {role: getattr(each, name) for role, each in models.items()}
        yield _family(f"espalier_{declared.metric}", declared.text, of_roles, getattr(_NOTHING, name))


def _family(name: str, text: str, values: Mapping[str, Any], nothing: Any) -> core.Metric:
    """A counter or a histogram by role; which of them is told by the value where `nothing` was counted."""
    is_histogram = isinstance(nothing, stats.Histogram)
    kind: Any = core.HistogramMetricFamily if is_histogram else core.CounterMetricFamily
    family = kind(name, text, labels=("role",))
    for role, value in values.items():
        family.add_metric((role,), *((_buckets(value), value.sum) if is_histogram else (value,)))
    return family


def _buckets(values: stats.Histogram) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound, as Prometheus has them."""
    bounds = [floatToGoString(bound) for bound in (*values.bounds, math.inf)]
    return list(zip(bounds, accumulate(values.counts), strict=True))


def _gauge(name: str, text: str, value: float) -> core.Metric:
    return core.GaugeMetricFamily(f"espalier_{name}", text, value)


def _by_role(name: str, text: str, values: Mapping[str, Mapping[str, float]]) -> core.Metric:
    """A gauge of states of each role."""
    gauge = core.GaugeMetricFamily(f"espalier_{name}", text, labels=("role", "state"))
    for role, states in values.items():
        for state, value in states.items():
            gauge.add_metric((role, state), value)
    return gauge
