"""Spans of calls, searches and rounds by OpenTelemetry, an optional extra that is imported only when it is asked for.

The standard environment variables switch it on: OTEL_TRACES_EXPORTER, or an endpoint such as
OTEL_EXPORTER_OTLP_ENDPOINT, unless OTEL_SDK_DISABLED is true. The SDK reads all others, such as OTEL_TRACES_SAMPLER.
Nothing is set for the whole process: no provider, no propagator.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

from espalier import __version__
from espalier.engine.errors import EspalierError
from espalier.search.result import USAGE_COUNTERS, SearchResult, StopReason
from espalier.search.run.executor import AnyResult
from espalier.search.service.access.calls import Call
from espalier.search.service.engine_thread import Search
from espalier.search.service.session import Observer

MAX_ROUNDS = 256
"""Rounds of one search that get a span; some algorithms make thousands."""

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_OTLP = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
_FAULTS = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
"""Codes that OpenTelemetry's conventions for gRPC servers count as the server's errors."""


class TracingError(EspalierError):
    """Traces are asked for in a way that cannot be followed."""


class Tracing:
    """Makes a span of each call, under it one of its search, and under that one of each round; an `Observer`.

    A call's span continues the trace of its `traceparent`. Spans are made at the end, from times noted before.
    """

    def __init__(self, provider: Any) -> None:
        """Create the tracer of a provider."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._extract = TraceContextTextMapPropagator().extract
        self._tracer = provider.get_tracer("espalier", __version__)

    def call_ended(self, call: Call) -> None:
        """End the span of a call."""
        span = self._span_of(call)
        attributes = {"espalier.code": call.code, "espalier.request_id": call.request_id}
        if call.reason is not None:
            attributes["espalier.reason"] = call.reason
        if call.caller is not None and call.caller.login:
            attributes["enduser.id"] = call.caller.name
        span.set_attributes(attributes)
        if call.code in _FAULTS:
            span.set_status(self._trace.StatusCode.ERROR)
        span.end(_wall_clock(call.started + call.seconds))

    def search_ended(self, call: Call, search: Search) -> None:
        """Make the spans of a search and its rounds; of none without a result, as its call tells why."""
        if (result := search.result) is None:
            return
        end = time.monotonic()
        start = end - result.usage.seconds
        context = self._trace.set_span_in_context(self._span_of(call))
        span = self._tracer.start_span("search", context, attributes=_attributes(result), start_time=_wall_clock(start))
        if result.stop_reason is StopReason.FAILED:
            span.set_status(self._trace.StatusCode.ERROR)
        context = self._trace.set_span_in_context(span)
        begun = start
        for number, ended in enumerate(search.rounds[:MAX_ROUNDS]):
            attributes = {"espalier.round": number, "espalier.depth": ended.depth, "espalier.scored": ended.scored}
            one = self._tracer.start_span("round", context, attributes=attributes, start_time=_wall_clock(begun))
            one.end(_wall_clock(ended.at))
            begun = ended.at
        span.end(_wall_clock(end))

    def _span_of(self, call: Call) -> Any:
        """The span of a call, begun when the call did; a search may end before its call or after it."""
        if call.span is None:
            parent = self._extract({"traceparent": call.traceparent} if call.traceparent else {})
            kind = self._trace.SpanKind.SERVER
            call.span = self._tracer.start_span(call.method, parent, kind=kind, start_time=_wall_clock(call.started))
        return call.span


@contextmanager
def traced() -> Iterator[Sequence[Observer]]:
    """Yield a `Tracing` if the environment asks for traces, else nothing; exports what is left at the end.

    Raises:
        TracingError: an exporter or a protocol is unknown, or OpenTelemetry is not installed.
    """
    exporters = [_exporter_class(name) for name in _exporter_names()]
    if not exporters:
        yield ()
        return
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({SERVICE_VERSION: __version__})
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):  # neither OTEL_SERVICE_NAME nor ours
        resource = resource.merge(Resource({SERVICE_NAME: "espalier"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for make in exporters:
        provider.add_span_processor(BatchSpanProcessor(make()))
    try:
        yield (Tracing(provider),)
    finally:
        provider.shutdown()


def _exporter_names() -> list[str]:
    """The exporters that the environment asks for: none unless it says where to, or how."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    default = "otlp" if any(os.environ.get(name) for name in _ENDPOINTS) else "none"
    names = (os.environ.get("OTEL_TRACES_EXPORTER") or default).split(",")
    return [name.strip() for name in names if name.strip() not in ("", "none")]


def _exporter_class(name: str) -> Callable[[], Any]:
    if name == "otlp":
        protocol = next((os.environ[key].strip() for key in _PROTOCOLS if os.environ.get(key)), "grpc")
        if protocol not in _OTLP:
            raise TracingError(f"OTEL_EXPORTER_OTLP_PROTOCOL must be {' or '.join(_OTLP)}, is {protocol!r}")
        name = _OTLP[protocol]
    found = list(entry_points(group="opentelemetry_traces_exporter", name=name))
    if not found:
        raise TracingError(
            f"the environment asks for traces, and there is no exporter {name!r}; install "
            "espalier-search[telemetry], or set OTEL_TRACES_EXPORTER to none, otlp or console"
        )
    return found[0].load()


def _attributes(result: AnyResult) -> dict[str, str | int | float | bool]:
    """Attributes of a search's span, without any text of it."""
    attributes: dict[str, str | int | float | bool] = {
        "espalier.search_id": result.search_id,
        "espalier.algorithm": str(result.configuration.algorithm),
        "espalier.stop_reason": str(result.stop_reason),
        **{f"espalier.{name}": getattr(result.usage, name) for name, each in USAGE_COUNTERS.items() if each.span},
    }
    if isinstance(result, SearchResult):
        attributes |= {
            "espalier.beam_width": result.configuration.beam_width,
            "espalier.expansion": result.configuration.expansion,
            "espalier.answer_found": bool(result.answer),
        }
    return attributes


def _wall_clock(monotonic: float) -> int:
    """The time since the epoch in nanoseconds, of a time in monotonic seconds."""
    return time.time_ns() - round((time.monotonic() - monotonic) * 1e9)
