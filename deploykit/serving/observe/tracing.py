"""OpenTelemetry: a span for each request with a child for each of its stages, sent by OTLP/HTTP.

In: batches that ended well and requests that did not, as a `Watcher` of each model. Out: spans at a
collector, as children of the W3C traceparent that a request came with; one that says "not sampled"
is heeded. Serving waits for nothing: times are noted in a bounded queue, and a thread makes and
sends the spans. Needs deploykit[trace].
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from deploykit import __version__
from deploykit.core.errors import BadInput, first_line
from deploykit.core.extras import require
from deploykit.runtimes.engine import Closing
from deploykit.serving.batching.delivery import monotonic_us
from deploykit.serving.batching.policy import BatchRun, Pending, Watcher
from deploykit.serving.observe.prometheus import Sample

log = logging.getLogger(__name__)

KEPT = 8192  # requests that may wait to be sent
MOST = 128  # requests in one message, some thousand spans
PAUSE_S = 0.5  # how long a request waits for others to be sent with
SEND_S = 5.0  # how long one message may take, tried again or not
CLOSE_S = 3.0
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STAGES = ("join", "copy_in", "compute", "copy_out", "split")


class _Seen(NamedTuple):
    """One request: what it takes to make its spans, without its arrays."""

    model: str
    trace: str | None
    rows: int
    arrived_us: int
    decode_us: int
    ended_us: int
    batch: int  # requests that ran together
    started_us: int
    stages_us: tuple[int, ...]  # in the order of _STAGES; empty when it failed
    error: str | None


class Parent(NamedTuple):
    """Who asked, by a W3C traceparent."""

    trace_id: int
    span_id: int
    sampled: bool


def parent_of(traceparent: str | None) -> Parent | None:
    """None when there is no traceparent, or none that the standard calls valid."""
    found = _TRACEPARENT.fullmatch(traceparent or "")
    if found is None or (found[4] and found[0].startswith("00")):
        return None
    parent = Parent(int(found[1], 16), int(found[2], 16), bool(int(found[3], 16) & 1))
    return parent if parent.trace_id and parent.span_id else None


class Tracer(Closing):
    """Sends spans to `endpoint`, http(s)://host:port. Raises BadInput, MissingExtra."""

    def __init__(self, endpoint: str, *, clock_us: Callable[[], int] = monotonic_us) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadInput(f"--otlp {endpoint}: must be http://HOST:PORT or https://HOST:PORT")
        self._trace = require("opentelemetry.trace")
        self._sdk = require("opentelemetry.sdk.trace")
        exporting = require("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        resources = require("opentelemetry.sdk.resources")
        scope = require("opentelemetry.sdk.util.instrumentation")
        self._resource = resources.Resource(
            {"service.name": "deploykit", "service.version": __version__}
        )
        self._scope = scope.InstrumentationScope("deploykit.serving", __version__)
        path = "" if parts.path.strip("/") else "/v1/traces"
        url = f"{endpoint.rstrip('/')}{path}"
        self._exporter = exporting.OTLPSpanExporter(endpoint=url, timeout=SEND_S)
        self._clock_us = clock_us
        self._seen: deque[_Seen] = deque()
        self._changed = threading.Condition()
        self._dropped = 0
        self._ended = False
        self._thread = threading.Thread(target=self._loop, name="trace", daemon=True)
        self._thread.start()

    def watch(self, model: str) -> Watcher:
        """A Watcher of one model."""
        return _Watch(self, model)

    def samples(self) -> list[Sample]:
        """For Prometheus."""
        return [Sample("deploykit_spans_dropped_total", {}, self._dropped)]

    def close(self) -> None:
        """Send what waits, for some seconds at most."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(CLOSE_S)
        self._exporter.shutdown()

    def note(self, seen: Sequence[_Seen]) -> None:
        with self._changed:
            room = KEPT - len(self._seen)
            self._seen.extend(seen[:room])
            self._dropped += max(0, len(seen) - room)

    # -- the thread ----------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            with self._changed:
                if not self._seen:
                    self._changed.wait_for(lambda: self._ended, PAUSE_S)
                taken = [self._seen.popleft() for _ in range(min(MOST, len(self._seen)))]
                if not taken and self._ended:
                    return
            if taken:
                self._send(taken)

    def _send(self, taken: Sequence[_Seen]) -> None:
        since_1970_us = time.time_ns() // 1000 - self._clock_us()
        try:
            spans = [span for seen in taken for span in self._spans(seen, since_1970_us)]
            sent = self._exporter.export(spans).name == "SUCCESS"
        except Exception as exc:  # noqa: BLE001 - a collector's trouble is not the server's
            log.warning("traces were not sent: %s: %s", type(exc).__name__, first_line(exc))
            sent = False
        if not sent:
            with self._changed:
                self._dropped += len(taken)

    def _spans(self, seen: _Seen, since_1970_us: int) -> list[Any]:
        trace = self._trace
        parent = parent_of(seen.trace)
        if parent is not None and not parent.sampled:
            return []
        trace_id = parent.trace_id if parent else secrets.randbits(128) | 1
        above = None if parent is None else self._context(trace_id, parent.span_id, remote=True)
        own = self._context(trace_id, secrets.randbits(64) | 1)
        code = trace.StatusCode.ERROR if seen.error else trace.StatusCode.UNSET
        attributes = {
            "deploykit.model": seen.model,
            "deploykit.rows": seen.rows,
            "deploykit.batch_requests": seen.batch,
        }

        def span(name: str, context: Any, start_us: int, end_us: int, **more: Any) -> Any:
            return self._sdk.ReadableSpan(
                name=name,
                context=context,
                resource=self._resource,
                instrumentation_scope=self._scope,
                start_time=(start_us + since_1970_us) * 1000,
                end_time=(end_us + since_1970_us) * 1000,
                **more,
            )

        begun_us = seen.arrived_us - seen.decode_us
        found = [
            span(
                f"infer {seen.model}",
                own,
                begun_us,
                seen.ended_us,
                parent=above,
                kind=trace.SpanKind.SERVER,
                attributes=attributes,
                status=trace.Status(code, seen.error),
            )
        ]
        for name, start_us, took_us in _children(seen, begun_us):
            context = self._context(trace_id, secrets.randbits(64) | 1)
            found.append(span(name, context, start_us, start_us + took_us, parent=own))
        return found

    def _context(self, trace_id: int, span_id: int, *, remote: bool = False) -> Any:
        sampled = self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED)
        return self._trace.SpanContext(trace_id, span_id, remote, sampled)


def _children(seen: _Seen, begun_us: int) -> list[tuple[str, int, int]]:
    """Name, start and duration in µs of each stage; stages that took no time are left out."""
    found = [("decode", begun_us, seen.decode_us)]
    found.append(("queue", seen.arrived_us, seen.started_us - seen.arrived_us))
    at_us = seen.started_us
    for name, took_us in zip(_STAGES, seen.stages_us, strict=False):
        found.append((name, at_us, took_us))
        at_us += took_us
    return [each for each in found if each[2] > 0]


class _Watch(Watcher):
    """Notes what one model did; called on an engine's thread."""

    def __init__(self, tracer: Tracer, model: str) -> None:
        self._tracer = tracer
        self._model = model

    def ran(self, run: BatchRun) -> None:
        stages_us = (run.stack_us, run.copy_in_us, run.engine_us, run.copy_out_us, run.split_us)
        ended_us = run.started_us + run.busy_us
        count = len(run.requests)
        self._tracer.note(
            [
                _Seen(
                    self._model, each.trace, each.rows, each.arrived_us, each.decode_us,
                    ended_us, count, run.started_us, stages_us, None,
                )
                for each in run.requests
            ]
        )  # fmt: skip

    def failed(self, request: Pending, now_us: int) -> None:
        error = request.error.message if request.error else "failed"
        self._tracer.note(
            [
                _Seen(
                    self._model, request.trace, request.rows, request.arrived_us,
                    request.decode_us, now_us, 1, now_us, (), error,
                )
            ]
        )  # fmt: skip
