"""Counts calls and searches, and renders all metrics of a server.

The registry is the server's own, so that a process can hold several servers.
"""

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder

from espalier.search.service.access.calls import Call
from espalier.search.service.engine_thread import Search
from espalier.search.service.errors import REASONS
from espalier.search.usage import USAGE_COUNTERS

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the buckets of times; a search may take 300 seconds by default."""

ABORTED = "aborted"
"""Outcome of a search without a result: a worker refused it, or the engine died or was stopped."""

MAX_NAMES = 100
"""Different values of a label whose values come from outside; all further ones are `OTHER`."""
OTHER = "other"

_OPENMETRICS = "application/openmetrics-text"


def _bounded(known: set[str], name: str) -> str:
    """The value of a label: `name` if it is one of the first `MAX_NAMES`, which `known` holds, else `OTHER`."""
    if len(known) < MAX_NAMES:
        known.add(name)
    return name if name in known else OTHER


class Metrics:
    """The metrics of one server; an `Observer`.

    Attributes:
        registry: holds all of them; other collectors may be registered.
    """

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

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics as text. It waits for the event loop and the engine, so call it on another thread.

        Args:
            accept: the reader's `Accept` header, which may ask for OpenMetrics.

        Returns:
            The text, and its content type.
        """
        encode, content_type = choose_encoder(_OPENMETRICS if _OPENMETRICS in accept else "")
        return encode(self.registry), content_type
