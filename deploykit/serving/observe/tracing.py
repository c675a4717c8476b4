"""OpenTelemetry: a span for each request, with a child for each of its stages, sent by OTLP/HTTP.

Serving never waits for it: times go into a bounded queue, and a thread builds and sends the spans.
A request's W3C traceparent is the parent; unsampled traces are skipped. Needs the extra [trace].
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from deploykit import __version__
from deploykit.core.errors import BadInput, first_line, without_secrets
from deploykit.core.extras import require
from deploykit.engines.engine import Closing
from deploykit.serving.batching.batcher import monotonic_us
from deploykit.serving.batching.queue import BatchRun, Pending, Watcher
from deploykit.serving.observe.metrics import Sample

log = logging.getLogger(__name__)

QUEUE_REQUESTS = 8192  # requests that may be queued
EXPORT_REQUESTS = 128  # requests in one message, with some thousand spans
PAUSE_S = 0.5  # between polls of an empty queue
EXPORT_S = 5.0  # time limit for sending one message, retries included
CLOSE_S = 3.0
_STAGES = ("decode", "queue", "join", "copy_in", "compute", "copy_out", "split")


class _Timing(NamedTuple):
    """The times of one request for its spans; `stages_us`: in the order of _STAGES."""

    name: str
    trace: str | None
    begun_us: int
    ended_us: int
    stages_us: tuple[int, ...]
    attributes: dict[str, Any]
    error: str | None


class Tracer(Closing):
    """Sends spans to `endpoint`, http(s)://host:port. Raises BadInput, MissingExtra."""

    def __init__(self, endpoint: str, *, clock_us: Callable[[], int] = monotonic_us) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadInput(f"`otlp` {without_secrets(endpoint)}: must be http(s)://HOST:PORT")
        self._trace = require("opentelemetry.trace")
        self._make_span = require("opentelemetry.sdk.trace").ReadableSpan
        otlp = require("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        propagation = require("opentelemetry.trace.propagation.tracecontext")
        resources = require("opentelemetry.sdk.resources")
        scope = require("opentelemetry.sdk.util.instrumentation")
        path = "" if parts.path.strip("/") else "/v1/traces"
        url = f"{endpoint.rstrip('/')}{path}"
        self._exporter = otlp.OTLPSpanExporter(endpoint=url, timeout=EXPORT_S)
        self._extract = propagation.TraceContextTextMapPropagator().extract
        self._ids = require("opentelemetry.sdk.trace.id_generator").RandomIdGenerator()
        ours = {"service.name": "deploykit", "service.version": __version__}
        named = resources.OTELResourceDetector().detect()  # OTEL_SERVICE_NAME and the like
        self._about = {
            "resource": resources.Resource(ours).merge(named),
            "instrumentation_scope": scope.InstrumentationScope("deploykit.serving", __version__),
        }
        self.clock_us = clock_us
        self._queue: deque[_Timing] = deque()
        self._lock = threading.Lock()
        self._dropped = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="trace", daemon=True)
        self._thread.start()

    def watch(self, model: str) -> Watcher:
        """Return a Watcher for the requests of one model."""
        return _ModelWatcher(self, model)

    def add_failure(self, asked: str, status: str, begun_s: float, trace: str | None) -> None:
        """Add a span for a request that failed before a model had it. `begun_s`: monotonic."""
        begun_us, now_us = int(begun_s * 1e6), self.clock_us()
        about = {"deploykit.request": asked}
        self.add([_Timing("refuse", trace, begun_us, now_us, (), about, status)])

    def samples(self) -> list[Sample]:
        """Return the number of dropped spans for Prometheus."""
        return [Sample("deploykit_spans_dropped_total", {}, self._dropped)]

    def close(self) -> None:
        """Send the queued spans, for some seconds at most."""
        self._closing.set()
        self._thread.join(CLOSE_S)
        self._exporter.shutdown()

    def add(self, requests: Sequence[_Timing]) -> None:
        with self._lock:
            free = QUEUE_REQUESTS - len(self._queue)
            self._queue.extend(requests[:free])
            self._dropped += max(0, len(requests) - free)

    # -- the thread ----------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._closing.wait(0 if self._queue else PAUSE_S) or self._queue:
            count = min(EXPORT_REQUESTS, len(self._queue))
            requests = [self._queue.popleft() for _ in range(count)]
            since_1970_us = time.time_ns() // 1000 - self.clock_us()
            try:
                spans = [span for each in requests for span in self._spans(each, since_1970_us)]
                sent = not spans or self._exporter.export(spans).name == "SUCCESS"
            except Exception as exc:  # noqa: BLE001 - a failing collector must not stop the server
                log.warning("traces were not sent: %s: %s", type(exc).__name__, first_line(exc))
                sent = False
            if not sent:
                with self._lock:
                    self._dropped += len(requests)

    def _spans(self, request: _Timing, since_1970_us: int) -> Iterator[Any]:
        """Yield the spans of a request, the root first.

        The SDK's `start_span` takes 5 to 8 times as long, on a thread that competes with serving:
        see benchmarks/results/observe_*.md.
        """
        trace, error = self._trace, request.error
        headers = {"traceparent": request.trace} if request.trace else {}
        parent = trace.get_current_span(self._extract(headers)).get_span_context()
        if parent.is_valid and not parent.trace_flags.sampled:
            return
        trace_id = parent.trace_id if parent.is_valid else self._ids.generate_trace_id()

        def span(name: str, start_us: int, end_us: int, **more: Any) -> Any:
            flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
            return self._make_span(
                name=name,
                context=trace.SpanContext(trace_id, self._ids.generate_span_id(), False, flags),
                start_time=(start_us + since_1970_us) * 1000,
                end_time=(end_us + since_1970_us) * 1000,
                **self._about,
                **more,
            )

        at_us = request.begun_us
        root = span(
            request.name,
            at_us,
            request.ended_us,
            parent=parent if parent.is_valid else None,
            kind=trace.SpanKind.SERVER,
            attributes=request.attributes,
            status=trace.Status(trace.StatusCode.ERROR if error else trace.StatusCode.UNSET, error),
        )
        yield root
        for name, took_us in zip(_STAGES, request.stages_us, strict=False):  # fewer if it failed
            if took_us > 0:
                yield span(name, at_us, at_us + took_us, parent=root.get_span_context())
            at_us += took_us


class _ModelWatcher(Watcher):
    """Records the requests of one model; called on an engine's thread."""

    def __init__(self, tracer: Tracer, model: str) -> None:
        self._tracer = tracer
        self._model = model

    def record_run(self, run: BatchRun) -> None:
        stages_us = (run.stack_us, run.copy_in_us, run.engine_us, run.copy_out_us, run.split_us)
        self._add(run.requests, run.started_us + run.busy_us, run.started_us, *stages_us)

    def record_failure(self, request: Pending, now_us: int) -> None:
        self._add([request], now_us, now_us)

    def record_refusal(self, request: Pending) -> None:
        self.record_failure(request, self._tracer.clock_us())

    def _add(
        self, requests: Sequence[Pending], ended_us: int, started_us: int, *stages_us: int
    ) -> None:
        timings = []
        for each in requests:
            begun_us, waited_us = each.arrived_us - each.decode_us, started_us - each.arrived_us
            about: dict[str, Any] = {
                "deploykit.model": self._model,
                "deploykit.rows": each.rows,
                "deploykit.batch_requests": len(requests),
            }
            if each.id:
                about["request.id"] = each.id
            times_us, error = (each.decode_us, waited_us, *stages_us), each.error
            why, name = error.message if error else None, f"infer {self._model}"
            timings.append(_Timing(name, each.trace, begun_us, ended_us, times_us, about, why))
        self._tracer.add(timings)
