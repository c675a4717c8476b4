"""Traces: spans that the real exporter sends to a small collector."""

from __future__ import annotations

import gzip
import http.server
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deploykit.core.errors import BadInput, Expired, Overloaded
from deploykit.serving.batching.queue import BatchRun, Pending
from deploykit.serving.observe import tracing
from deploykit.serving.observe.tracing import EXPORT_REQUESTS, QUEUE_REQUESTS, Tracer
from tests.support.serving.running import WAIT_S, infer_json, running

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry is not installed")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


class Collector(http.server.ThreadingHTTPServer):
    """Keeps what is posted to it: paths, spans, and the attributes of their resources."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Post)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.paths: set[str] = set()
        self.spans: list[Any] = []
        self.attributes: dict[str, str] = {}
        self.status = 200

    def root(self) -> Any:
        """The one span whose parent is the caller's."""
        (found,) = [span for span in self.spans if span.parent_span_id.hex() == SPAN]
        return found


class Post(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for each in resource.resource.attributes:
                self.server.attributes[each.key] = each.value.string_value
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.server.paths.add(self.path)
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        yield found
        found.shutdown()
        thread.join(WAIT_S)


def pending(trace: str | None = None, arrived_us: int = 5_000_100) -> Pending:
    return Pending({}, 2, (), lambda _: None, arrived_us, 0, 0, trace=trace, decode_us=100)


def run(*requests: Pending) -> BatchRun:
    return BatchRun(requests, 5_000_400, 20, 30, 500, 40, 10)


def sent(collector: Collector, act: Callable[[Tracer], None]) -> list[Any]:
    """The spans that `act` exports; the clock stands at 6 s."""
    with Tracer(collector.url, clock_us=lambda: 6_000_000) as tracer:
        act(tracer)
    return collector.spans


def test_a_request_is_a_span_with_a_child_for_each_stage(collector: Collector) -> None:
    spans = sent(
        collector, lambda tracer: tracer.watch("m").record_run(run(pending(PARENT), pending()))
    )
    assert collector.attributes["service.name"] == "deploykit"
    assert collector.paths == {"/v1/traces"}
    assert len(spans) == 16
    root = collector.root()
    assert (root.name, root.trace_id.hex()) == ("infer m", TRACE)
    attributes = {each.key: each.value for each in root.attributes}
    assert attributes["deploykit.model"].string_value == "m"
    assert attributes["deploykit.rows"].int_value == 2
    assert attributes["deploykit.batch_requests"].int_value == 2
    children = [span for span in spans if span.parent_span_id == root.span_id]
    begun_ns = root.start_time_unix_nano
    assert [
        (each.name, (each.start_time_unix_nano - begun_ns) // 1000,
         (each.end_time_unix_nano - begun_ns) // 1000)
        for each in children
    ] == [
        ("decode", 0, 100), ("queue", 100, 400), ("join", 400, 420), ("copy_in", 420, 450),
        ("compute", 450, 950), ("copy_out", 950, 990), ("split", 990, 1000),
    ]  # fmt: skip
    assert root.end_time_unix_nano - begun_ns == 1_000_000
    other = next(span for span in spans if span.name == "infer m" and span != root)
    assert other.parent_span_id == b""
    assert other.trace_id not in (root.trace_id, bytes(16))


def test_a_request_that_failed_before_its_model_is_a_span(collector: Collector) -> None:
    (span,) = sent(collector, lambda tracer: tracer.add_failure("GET /v2", "401", 5.999, PARENT))
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("refuse", TRACE, SPAN)
    assert span.end_time_unix_nano - span.start_time_unix_nano == 1_000_000
    assert (span.status.code, span.status.message) == (2, "401")
    assert [each.value.string_value for each in span.attributes] == ["GET /v2"]


def test_the_standard_variables_name_the_service_and_its_attributes(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "shop")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test,service.name=no")
    sent(collector, lambda tracer: tracer.watch("m").record_run(run(pending())))
    found = [collector.attributes[n] for n in ("service.name", "deployment.environment")]
    assert found == ["shop", "test"]
    assert collector.attributes["service.version"]


@pytest.mark.parametrize(
    ("body", "status", "rows"),
    [
        (b'{"id":"a7",' + infer_json([1, 2, 3, 4], [1, 4])[1:], 200, 1),
        (b'{"id":"a7",' + infer_json([1, 2, 3], [1, 3])[1:], 400, 0),
        (b"{", 400, 0),
    ],
    ids=["answered", "refused", "unreadable"],
)
def test_a_request_over_http_is_traced_with_its_id_refused_ones_too(
    collector: Collector, body: bytes, status: int, rows: int
) -> None:
    with running() as server, Tracer(collector.url) as tracer:
        server.server.repository.models["m"].watch(tracer.watch("m"))
        reply = server.ask("POST", "/v2/models/m/infer", body, Traceparent=PARENT)
        assert reply.status == status
    root = collector.root()
    attributes = {each.key: each.value for each in root.attributes}
    assert attributes["deploykit.rows"].int_value == rows
    assert (root.status.code == 2) is (status != 200)
    if status == 200:
        assert attributes["request.id"].string_value == "a7"
        assert "compute" in {span.name for span in collector.spans}


def test_the_span_of_a_failed_request_carries_the_error(collector: Collector) -> None:
    late, refused = pending(), pending(PARENT)
    late.error = Expired("the request waited 40 ms, past its time limit")
    refused.error = Overloaded("the queue is full")

    def fail(tracer: Tracer) -> None:
        watcher = tracer.watch("m")
        watcher.record_failure(late, 5_040_100)
        watcher.record_refusal(refused)

    spans = sent(collector, fail)
    assert collector.root().status.message == "the queue is full"
    root, *others = [span for span in spans if span.parent_span_id.hex() != SPAN]
    assert (root.name, root.status.code) == ("infer m", 2)
    assert root.status.message == "the request waited 40 ms, past its time limit"
    stages = [span.name for span in others if span.parent_span_id == root.span_id]
    assert stages == ["decode", "queue"]


@pytest.mark.parametrize(
    ("traceparent", "parents"),
    [
        (PARENT, {SPAN}),
        (f"cc-{TRACE}-{SPAN}-03-more", {SPAN}),  # a later version of the standard may have more
        (f"00-{TRACE}-{SPAN}-00", set()),  # the client does not sample it
        (f"00-{TRACE}-{SPAN}-01-more", {""}),
        (f"ff-{TRACE}-{SPAN}-01", {""}),
        (f"00-{TRACE}-{'0' * 16}-01", {""}),
        ("\ud800", {""}),
    ],
)
def test_an_invalid_traceparent_starts_a_new_trace(
    collector: Collector, traceparent: str, parents: set[str]
) -> None:
    spans = sent(collector, lambda tracer: tracer.watch("m").record_run(run(pending(traceparent))))
    roots = [span for span in spans if span.name == "infer m"]
    assert {span.parent_span_id.hex() for span in roots} == parents
    assert all((span.trace_id.hex() == TRACE) is (parents == {SPAN}) for span in roots)
    assert bool(spans) is bool(parents)


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://h:4317", "http://", "file:///etc"])
def test_an_endpoint_that_is_not_http_is_rejected(endpoint: str) -> None:
    with pytest.raises(BadInput, match="`otlp`"):
        Tracer(endpoint)


def test_spans_that_a_full_queue_or_the_collector_rejects_are_counted_as_dropped(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector.status = 400
    monkeypatch.setattr(tracing, "PAUSE_S", 3600.0)  # nothing is sent before the end
    monkeypatch.setattr(tracing, "CLOSE_S", 60.0)
    with Tracer(collector.url) as tracer:
        watcher = tracer.watch("m")
        watcher.record_run(run(*[pending() for _ in range(QUEUE_REQUESTS + 5)]))
        assert tracer.samples()[0].value == 5
        tracer._queue.clear()
        watcher.record_run(run(*[pending() for _ in range(EXPORT_REQUESTS + 2)]))  # two messages
    assert tracer.samples()[0].value == 5 + EXPORT_REQUESTS + 2
