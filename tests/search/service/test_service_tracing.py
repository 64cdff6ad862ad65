"""Spans of calls, searches and rounds, kept in memory by OpenTelemetry's own exporter."""

# An ended span has what its type leaves open:
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalOperand=false
# pyright: reportOperatorIssue=false, reportPrivateImportUsage=false, reportIncompatibleMethodOverride=false

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest
from callers_files import callers_file
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from raw_client import bearer, raw_stub
from scripted_orchestrator import USAGE
from server_thread import PATIENCE, wait_until

from espalier.search.client import SearchClient, ServiceError
from espalier.search.request import AlgorithmName, SearchRequest
from espalier.search.result import Started
from espalier.search.service.observability import tracing
from espalier.search.service.observability.tracing import Tracing, TracingError, traced
from espalier.v1 import search_pb2 as pb

TRACE, PARENT = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
VARIABLES = ("OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED", *tracing._ENDPOINTS, *tracing._PROTOCOLS)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def observers(exporter: InMemorySpanExporter) -> Iterator[Sequence[Tracing]]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield [Tracing(provider)]
    provider.shutdown()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """One that asks for no traces."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def wait_for(exporter: InMemorySpanExporter, name: str) -> ReadableSpan:
    wait_until(lambda: bool(named(exporter, name)))
    (span,) = named(exporter, name)
    return span


def is_within(inner: ReadableSpan, outer: ReadableSpan) -> bool:
    """Whether one span lies in the other, but for a millisecond by which clocks may be read apart."""
    return inner.start_time > outer.start_time - 1e6 and inner.end_time < outer.end_time + 1e6


def test_a_call_has_its_search_below_it_and_a_span_for_each_round_below_that(start, exporter, observers):
    with SearchClient(start(observers=observers).address) as client:
        result = client.solve(SearchRequest("solve", AlgorithmName.DVTS, beam_width=8, expansion=2), PATIENCE)
    call = wait_for(exporter, "SolveProblem")
    (search,), rounds = named(exporter, "search"), named(exporter, "round")

    assert (call.parent, call.kind, call.status.status_code) == (None, SpanKind.SERVER, StatusCode.UNSET)
    assert call.attributes["espalier.code"] == "OK"
    assert search.parent.span_id == call.context.span_id
    expected = {
        "search_id": result.search_id,
        "algorithm": "dvts",
        "beam_width": 8,
        "expansion": 2,
        "stop_reason": "finished",
        "answer_found": True,
        "generator_tokens": USAGE.generator_tokens,
        "generated_tokens": USAGE.generated_tokens,
        "verifier_tokens": USAGE.verifier_tokens,
    }
    assert {f"espalier.{name}": value for name, value in expected.items()}.items() <= search.attributes.items()
    assert (search.end_time - search.start_time) / 1e9 == pytest.approx(USAGE.seconds, abs=1e-3)

    assert [span.attributes["espalier.round"] for span in rounds] == [0, 1]
    assert [span.attributes["espalier.scored"] for span in rounds] == [4, 4]
    assert {span.parent.span_id for span in rounds} == {search.context.span_id}
    assert all(is_within(span, search) for span in rounds)
    assert rounds[0].end_time == pytest.approx(rounds[1].start_time, abs=1e6)
    assert {span.context.trace_id for span in (call, search, *rounds)} == {call.context.trace_id}


def test_no_text_of_a_problem_or_an_answer_is_in_a_span(start, exporter, observers):
    with SearchClient(start(observers=observers).address) as client:
        client.solve(SearchRequest("solve"), PATIENCE)
        with pytest.raises(ServiceError):
            client.solve(SearchRequest("fail"), PATIENCE)
    wait_until(lambda: len(named(exporter, "SolveProblem")) == 2)
    written = "".join(span.to_json() for span in exporter.get_finished_spans())
    for text in ("6*7", "boxed", "logits", '"42"'):
        assert text not in written


def test_a_search_without_an_answer_says_so(start, exporter, observers):
    with SearchClient(start(observers=observers).address) as client:
        client.solve(SearchRequest("nothing"), PATIENCE)
    assert wait_for(exporter, "search").attributes["espalier.answer_found"] is False


def test_the_callers_trace_is_continued(start, exporter, observers, tmp_path):
    server = start(observers=observers, callers=callers_file(tmp_path, ann=""))
    parent = (("traceparent", f"00-{TRACE:032x}-{PARENT:016x}-01"), ("x-request-id", "call-7"))
    with raw_stub(server.address) as stub:
        stub.SolveProblem(pb.SolveProblemRequest(problem="solve"), PATIENCE, (*bearer("ann"), *parent))
    call = wait_for(exporter, "SolveProblem")
    assert (call.context.trace_id, call.parent.span_id, call.parent.is_remote) == (TRACE, PARENT, True)
    assert (call.attributes["enduser.id"], call.attributes["espalier.request_id"]) == ("ann", "call-7")
    assert {span.context.trace_id for span in exporter.get_finished_spans()} == {TRACE}


@pytest.mark.parametrize("given", ["", "nonsense", f"00-{0:032x}-{PARENT:016x}-01", "00-" + "f" * 400, "\udcff"])
def test_a_traceparent_that_is_none_begins_a_trace_of_its_own(given: str, exporter, observers):
    call = tracing.Call("SolveProblem", "r", given)
    call.seconds = 0.01
    observers[0].call_ended(call)
    (span,) = exporter.get_finished_spans()
    assert span.parent is None


def test_what_the_caller_does_not_sample_is_not_exported(start, exporter, observers):
    with raw_stub(start(observers=observers).address) as stub:
        metadata = (("traceparent", f"00-{TRACE:032x}-{PARENT:016x}-00"),)
        stub.SolveProblem(pb.SolveProblemRequest(problem="solve"), PATIENCE, metadata)
        stub.SolveProblem(pb.SolveProblemRequest(problem="nothing"), PATIENCE)
    wait_until(lambda: bool(named(exporter, "SolveProblem")))
    assert TRACE not in {span.context.trace_id for span in exporter.get_finished_spans()}


def test_a_search_that_outlives_its_call_is_still_below_it(start, fake, exporter, observers):
    with SearchClient(start(observers=observers).address) as client:
        stream = client.solve_stream(SearchRequest("hold"), PATIENCE)
        assert isinstance(next(stream), Started)
        stream.close()
    call, search = wait_for(exporter, "SolveProblemStream"), wait_for(exporter, "search")
    assert search.parent.span_id == call.context.span_id
    assert call.attributes["espalier.code"] == "CANCELLED"
    assert search.attributes["espalier.stop_reason"] == "cancelled"


@pytest.mark.parametrize(
    ("problem", "code", "reason", "status", "searches"),
    [
        ("fail", "INTERNAL", "search_failed", StatusCode.ERROR, 1),
        ("bug", "INTERNAL", "internal", StatusCode.ERROR, 0),
        ("pool", "INVALID_ARGUMENT", "request_too_large", StatusCode.UNSET, 0),
        ("die", "UNAVAILABLE", "not_ready", StatusCode.ERROR, 0),
    ],
)
def test_a_failure_is_marked_where_it_is_the_servers(
    problem: str, code: str, reason: str, status: StatusCode, searches: int, start, exporter, observers
):
    with raw_stub(start(observers=observers).address) as stub, pytest.raises(grpc.RpcError):
        stub.SolveProblem(pb.SolveProblemRequest(problem=problem), PATIENCE)
    call = wait_for(exporter, "SolveProblem")
    assert (call.attributes["espalier.code"], call.attributes["espalier.reason"]) == (code, reason)
    assert call.status.status_code is status
    found = named(exporter, "search")
    assert [span.status.status_code for span in found] == [StatusCode.ERROR] * searches


def test_a_report_within_a_round_is_no_round(start, exporter, observers):
    with SearchClient(start(observers=observers).address) as client:
        client.solve(SearchRequest("grow"), PATIENCE)
    wait_for(exporter, "SolveProblem")
    assert [span.attributes["espalier.scored"] for span in named(exporter, "round")] == [4, 4]


def test_a_search_of_very_many_rounds_has_a_limited_number_of_spans(start, fake, exporter, observers):
    with ThreadPoolExecutor(1) as pool, SearchClient(start(observers=observers).address) as client:
        flooding = pool.submit(client.solve, SearchRequest("flood"), PATIENCE)
        fake.flood_until(2 * tracing.MAX_ROUNDS)
        fake.release.set()
        flooding.result(PATIENCE)
    wait_for(exporter, "SolveProblem")
    assert len(named(exporter, "round")) == tracing.MAX_ROUNDS


# ---- how it is switched on


def test_without_a_word_in_the_environment_nothing_is_imported():
    script = (
        "import sys\n"
        "from espalier.search.service.server import serve\n"
        "from espalier.search.service.observability.tracing import traced\n"
        "with traced() as observers:\n"
        "    assert observers == ()\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("variables", "exporters"),
    [
        ({}, []),
        ({"OTEL_TRACES_EXPORTER": "none"}, []),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, [GrpcExporter]),
        ({"OTEL_TRACES_EXPORTER": "otlp, console"}, [GrpcExporter, ConsoleSpanExporter]),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, [HttpExporter]),
        ({"OTEL_TRACES_EXPORTER": "otlp_proto_http"}, [HttpExporter]),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}, [GrpcExporter]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4317"}, [GrpcExporter]),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317", "OTEL_TRACES_EXPORTER": "none"}, []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317", "OTEL_SDK_DISABLED": "TRUE"}, []),
    ],
)
def test_the_standard_variables_choose_the_exporters(
    variables: dict[str, str], exporters: list[type], environment: pytest.MonkeyPatch
):
    for name, value in variables.items():
        environment.setenv(name, value)
    assert [tracing._exporter_class(name) for name in tracing._exporter_names()] == exporters


def test_spans_that_wait_are_sent_to_the_collector_at_the_end(environment):
    received: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    environment.setenv("NO_PROXY", "127.0.0.1")
    environment.setenv("OTEL_SERVICE_NAME", "our-searches")
    environment.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    environment.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    call = tracing.Call("SolveProblem", "r")
    call.seconds = 0.01
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        with traced() as (observer,):
            observer.call_ended(call)
        collector.shutdown()
        thread.join()
    (resource,) = ExportTraceServiceRequest.FromString(received[0]).resource_spans
    attributes = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    assert attributes["service.name"] == "our-searches"
    assert [span.name for scope in resource.scope_spans for span in scope.spans] == ["SolveProblem"]


def test_the_services_name_is_espalier_where_none_is_given(environment):
    environment.delenv("OTEL_SERVICE_NAME", raising=False)
    environment.delenv("OTEL_RESOURCE_ATTRIBUTES", raising=False)
    environment.setenv("OTEL_TRACES_EXPORTER", "console")
    with traced() as (observer,):
        assert observer._tracer.resource.attributes["service.name"] == "espalier"


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "no exporter 'zipkin'; install"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "'http/json'"),
    ],
)
def test_an_environment_that_cannot_be_followed_is_refused(
    variables: dict[str, str], why: str, environment: pytest.MonkeyPatch
):
    for name, value in variables.items():
        environment.setenv(name, value)
    with pytest.raises(TracingError, match=why), traced():
        pass


def test_traces_without_the_extra_installed_are_refused_with_its_name(environment):
    def nothing(**_: Any) -> list[Any]:
        return []

    environment.setattr(tracing, "entry_points", nothing)
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    with pytest.raises(TracingError, match=r"espalier-search\[telemetry\]"), traced():
        pass
