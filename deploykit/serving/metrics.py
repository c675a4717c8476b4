"""What one served model did, counted since the start: for `/stats` and for Prometheus.

In: finished batches and requests, from the engine's thread and the transport's. Out: the statistics
of the Open Inference Protocol and Prometheus text, under our names and Triton's. Counts never fall.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploykit.core.errors import Expired
from deploykit.serving.policy import BatchRun, Pending, Watcher

OUTCOMES = ("success", "rejected", "expired", "bad_request", "failed", "cancelled")
TRITON_REASONS: Mapping[str, tuple[str, ...]] = {
    "REJECTED": ("rejected", "expired"),
    "CANCELED": ("cancelled",),
    "BACKEND": ("failed",),
    "OTHER": ("bad_request",),
}
SECONDS = (
    1e-4,
    2.5e-4,
    5e-4,
    1e-3,
    2.5e-3,
    5e-3,
    1e-2,
    2.5e-2,
    5e-2,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Histogram:
    """Counts per bucket; a value equal to a bound belongs to that bound's bucket."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def lines(self, name: str, labels: str) -> list[str]:
        """Prometheus samples: cumulative buckets, sum and count."""
        out, so_far = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            so_far += count
            out.append(f'{name}_bucket{{{labels},le="{bound}"}} {so_far}')
        return [*out, f"{name}_sum{{{labels}}} {self.total}", f"{name}_count{{{labels}}} {so_far}"]


@dataclass
class _Durations:
    """How many, and how long together."""

    count: int = 0
    us: int = 0

    def add(self, us: int, times: int = 1) -> None:
        self.count += times
        self.us += us * times

    def to_dict(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.us * 1000}


@dataclass
class _Computed:
    """Time before, in and after the engine; each request is charged all of its batch's."""

    input: _Durations = field(default_factory=_Durations)
    infer: _Durations = field(default_factory=_Durations)
    output: _Durations = field(default_factory=_Durations)

    def add(self, run: BatchRun, times: int) -> None:
        self.input.add(run.stack_us, times)
        self.infer.add(run.engine_us, times)
        self.output.add(run.split_us, times)

    def to_dict(self) -> dict[str, dict[str, int]]:
        return {
            "compute_input": self.input.to_dict(),
            "compute_infer": self.infer.to_dict(),
            "compute_output": self.output.to_dict(),
        }


class ModelMetrics(Watcher):
    """The counters of one model. Safe from any thread: one short lock per batch or refusal."""

    def __init__(self, name: str, version: str) -> None:
        self.name = name
        self.version = version
        self._lock = threading.Lock()
        self._outcomes = dict.fromkeys(OUTCOMES, 0)
        self._success = _Durations()
        self._fail = _Durations()
        self._queue = _Durations()
        self._compute = _Computed()
        self._by_rows: dict[int, _Computed] = {}
        self._rows = 0
        self._runs = 0
        self._last_ms = 0
        self._queue_s = Histogram(SECONDS)
        self._compute_s = Histogram(SECONDS)
        self._batch_rows = Histogram(ROWS)

    def ran(self, run: BatchRun) -> None:
        busy_us = run.stack_us + run.engine_us + run.split_us
        count = len(run.requests)
        rows = sum(request.rows for request in run.requests)
        with self._lock:
            for request in run.requests:
                waited_us = run.started_us - request.arrived_us
                self._queue.add(waited_us)
                self._success.add(waited_us + busy_us)
                self._queue_s.add(waited_us / 1e6)
            self._outcomes["success"] += count
            self._compute.add(run, count)
            self._compute_s.add(busy_us / 1e6, count)
            self._by_rows.setdefault(rows, _Computed()).add(run, 1)
            self._batch_rows.add(rows)
            self._rows += rows
            self._runs += 1
            self._last_ms = int(time.time() * 1000)

    def failed(self, request: Pending, now_us: int) -> None:
        outcome = "expired" if isinstance(request.error, Expired) else "failed"
        self._count(outcome, now_us - request.arrived_us)

    def refused(self) -> None:
        self._count("rejected")

    def cancelled(self) -> None:
        self._count("cancelled")

    def bad_request(self) -> None:
        """A request for this model was refused before it reached the queue."""
        self._count("bad_request")

    def _count(self, outcome: str, us: int = 0) -> None:
        with self._lock:
            self._outcomes[outcome] += 1
            self._fail.add(us)

    def statistics(self) -> dict[str, Any]:
        """One entry of `model_stats`: cumulative, with all eight members of `inference_stats`."""
        none = _Durations().to_dict()
        with self._lock:
            return {
                "name": self.name,
                "version": self.version,
                "last_inference": self._last_ms,
                "inference_count": self._rows,
                "execution_count": self._runs,
                "inference_stats": {
                    "success": self._success.to_dict(),
                    "fail": self._fail.to_dict(),
                    "queue": self._queue.to_dict(),
                    **self._compute.to_dict(),
                    "cache_hit": none,
                    "cache_miss": none,
                },
                "batch_stats": [
                    {"batch_size": rows, **computed.to_dict()}
                    for rows, computed in sorted(self._by_rows.items())
                ],
            }

    def samples(self, waiting: int, unanswered: int) -> dict[str, list[str]]:
        """Prometheus samples by metric name; `waiting` and `unanswered` as they are now."""
        labels = f'model="{self.name}",version="{self.version}"'
        with self._lock:
            counts = dict(self._outcomes)
            simple = {
                "deploykit_queue_depth": waiting,
                "deploykit_requests_in_flight": unanswered,
                "nv_inference_request_success": counts["success"],
                "nv_inference_count": self._rows,
                "nv_inference_exec_count": self._runs,
                "nv_inference_pending_request_count": waiting,
                "nv_inference_request_duration_us": self._success.us,
                "nv_inference_queue_duration_us": self._queue.us,
                "nv_inference_compute_input_duration_us": self._compute.input.us,
                "nv_inference_compute_infer_duration_us": self._compute.infer.us,
                "nv_inference_compute_output_duration_us": self._compute.output.us,
            }
            histograms = {
                "deploykit_queue_seconds": self._queue_s,
                "deploykit_compute_seconds": self._compute_s,
                "deploykit_batch_rows": self._batch_rows,
            }
            shown = {name: [f"{name}{{{labels}}} {value}"] for name, value in simple.items()}
            shown.update({name: h.lines(name, labels) for name, h in histograms.items()})
        shown["deploykit_requests_total"] = [
            f'deploykit_requests_total{{{labels},outcome="{outcome}"}} {count}'
            for outcome, count in counts.items()
        ]
        shown["nv_inference_request_failure"] = [
            f'nv_inference_request_failure{{{labels},reason="{reason}"}} '
            f"{sum(counts[outcome] for outcome in outcomes)}"
            for reason, outcomes in TRITON_REASONS.items()
        ]
        return shown


_HELP: Mapping[str, tuple[str, str]] = {
    "deploykit_requests_total": ("counter", "Inference requests by how they ended."),
    "deploykit_queue_seconds": ("histogram", "Time a request waited for the engine."),
    "deploykit_compute_seconds": ("histogram", "Time a request's batch took: join, run, split."),
    "deploykit_batch_rows": ("histogram", "Rows in each batch that the engine ran."),
    "deploykit_queue_depth": ("gauge", "Requests waiting for the engine now."),
    "deploykit_requests_in_flight": ("gauge", "Requests taken and not answered yet."),
    "nv_inference_request_success": ("counter", "Requests answered with a result."),
    "nv_inference_request_failure": ("counter", "Requests that ended without a result."),
    "nv_inference_count": ("counter", "Rows inferred."),
    "nv_inference_exec_count": ("counter", "Runs of the engine."),
    "nv_inference_pending_request_count": ("gauge", "Requests waiting for the engine now."),
    "nv_inference_request_duration_us": ("counter", "Total time of successful requests."),
    "nv_inference_queue_duration_us": ("counter", "Total time successful requests waited."),
    "nv_inference_compute_input_duration_us": ("counter", "Total time to join the inputs."),
    "nv_inference_compute_infer_duration_us": ("counter", "Total time in the engine."),
    "nv_inference_compute_output_duration_us": ("counter", "Total time to split the outputs."),
}


def prometheus(samples: Sequence[Mapping[str, Sequence[str]]]) -> str:
    """The text format, version 0.0.4, of one `ModelMetrics.samples` per model."""
    lines = []
    for name, (kind, text) in _HELP.items():
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [line for model in samples for line in model[name]]
    return "\n".join(lines) + "\n"
