"""What observing costs: a scrape of /metrics, a log line, the spans of a request.

`python benchmarks/observe.py` prints the least and the median of each, in microseconds.
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import set_span_in_context

from deploykit.serving.batching.queue import BatchRun, Pending
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.observe.logs import configure
from deploykit.serving.observe.metrics import expositions
from deploykit.serving.observe.tracing import Tracer
from deploykit.serving.options import ServeOptions

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.fake_engine import FakeEngine

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def measure(name: str, act: Callable[[], object], per: int = 1, times: int = 100) -> None:
    act()
    taken_us = []
    for _ in range(times):
        begun_ns = time.perf_counter_ns()
        act()
        taken_us.append((time.perf_counter_ns() - begun_ns) / 1000 / per)
        time.sleep(0.005)  # for the threads
    print(f"{name:48} {min(taken_us):9.1f} {statistics.median(taken_us):9.1f}")


def scrapes() -> None:
    for count in (1, 10):
        service = ModelRepository({f"m{i}": FakeEngine() for i in range(count)}, ServeOptions())
        measure(f"collect the samples of {count} models", service.samples)
        samples = service.samples()
        measure(f"write the text of {count} models", lambda: expositions(samples, [""]))  # noqa: B023
        service.close()


def log_lines() -> None:
    queue = configure("text", os.open(os.devnull, os.O_WRONLY))
    log = logging.getLogger("deploykit.x")
    measure("log.info", lambda: log.info("%s %s: %d %s", "GET", "/x", 400, "no"))
    queue.close()


def spans() -> None:
    def pending() -> Pending:
        return Pending({}, 2, (), print, 5_000_100, 0, 0, trace=TRACEPARENT, decode_us=100)

    run = BatchRun([pending() for _ in range(32)], 5_000_400, 20, 30, 500, 40, 10)
    tracer = Tracer("http://127.0.0.1:1")
    tracer.close()
    watcher: Any = tracer.watch("m")
    measure("note a request", lambda: watcher.record_run(run), per=32)
    (noted, *_) = tracer._queue
    measure("spans of a request, ours", lambda: list(tracer._spans(noted, 0)))
    provider, made = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(made))
    sdk = provider.get_tracer("x")

    def start_and_end() -> None:
        root = sdk.start_span("infer m", start_time=1)
        within = set_span_in_context(root)
        for name, start_us, end_us in noted.stages():
            sdk.start_span(name, within, start_time=start_us).end(end_us)
        root.end(2)
        made.clear()

    measure("spans of a request, the SDK's start_span", start_and_end)


if __name__ == "__main__":
    print(f"{'microseconds':48} {'least':>9} {'median':>9}")
    scrapes()
    log_lines()
    spans()
