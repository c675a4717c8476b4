"""The table of all metrics, what is counted for one model, and the response of /metrics.

The statistics of the Open Inference Protocol and the metrics under our names (`deploykit_`),
Triton's (`nv_`) and the standard ones of a process (`process_`) use the same counters, which never
decrease. The times of batches are stored and counted for many batches at once, which costs a tenth
of counting each: integers in microseconds, and one lock per batch. prometheus_client writes the
response of /metrics.
"""

from __future__ import annotations

import itertools
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from deploykit.core.errors import BadInput, Expired
from deploykit.engines.devices import THROTTLES, Devices, GpuState
from deploykit.serving.batching.queue import BatchRun, Pending, Watcher
from deploykit.serving.options import VERSION

if TYPE_CHECKING:
    from prometheus_client import Metric

# Name -> kind, help. `least`, `most`: gauges of which that of one worker is shown for all of them;
# `shared`: a counter that all have in common. Every other kind is added up.
METRICS: Mapping[str, tuple[str, str]] = {
    # requests
    "deploykit_requests_total": ("counter", "Inference requests by outcome."),
    "deploykit_request_seconds": ("histogram", "Time in the server of a successful request."),
    "deploykit_stage_seconds": ("histogram", "Time of each stage of a successful request's batch."),
    "deploykit_queue_seconds": ("histogram", "Time a request waited for the engine."),
    "deploykit_compute_seconds": ("histogram", "Time of a request's batch, copies included."),
    "deploykit_batch_rows": ("histogram", "Rows in each batch that the engine ran."),
    "deploykit_batch_wait_seconds_total": ("counter", "Time requests waited for a fuller batch."),
    "deploykit_queue_depth": ("gauge", "Requests waiting for the engine now."),
    "deploykit_requests_in_flight": ("gauge", "Requests accepted and not answered yet."),
    "nv_inference_request_success": ("counter", "Requests that succeeded."),
    "nv_inference_request_failure": ("counter", "Requests that failed."),
    "nv_inference_count": ("counter", "Rows inferred."),
    "nv_inference_exec_count": ("counter", "Batches that the engine ran."),
    "nv_inference_pending_request_count": ("gauge", "Requests waiting for the engine now."),
    "nv_inference_request_duration_us": ("counter", "Total time of successful requests."),
    "nv_inference_queue_duration_us": ("counter", "Total time successful requests waited."),
    "nv_inference_compute_input_duration_us": ("counter", "Total time to join and copy inputs."),
    "nv_inference_compute_infer_duration_us": ("counter", "Total time in the engine."),
    "nv_inference_compute_output_duration_us": ("counter", "Total time to copy and split outputs."),
    # models
    "deploykit_model_ready": ("least", "1 while the model is ready."),
    "deploykit_model_info": ("most", "Always 1; the labels name its runtime, device and file."),
    "deploykit_model_generation": ("least", "1, and one more for each file that was reloaded."),
    "deploykit_model_loaded_timestamp_seconds": ("most", "When the file in use was loaded."),
    "deploykit_model_notes": ("most", "Settings that could not be met; see the dashboard."),
    "deploykit_model_batched": ("least", "1 while requests are joined, 0 while each runs alone."),
    "deploykit_engines": ("gauge", "Engines (instances) of the model."),
    "deploykit_engines_hung": ("gauge", "Engines that do not return from a request."),
    "deploykit_batch_limit_rows": ("most", "Most rows per batch; `slo_ms` adjusts it."),
    "deploykit_queue_limit_rows": ("gauge", "Most rows that may wait, where `slo_ms` bounds them."),
    "deploykit_batch_delay_seconds": ("most", "How long an idle engine waits for more rows."),
    "deploykit_reloads_total": ("counter", "Times a replaced engine file was loaded."),
    "deploykit_reloads_given_up_total": ("counter", "Replaced engine files that took too long."),
    "deploykit_reload_failed": ("most", "1 while the engine's new file cannot be loaded."),
    "deploykit_previous_engine": ("most", "1 while the new engine failed or was rolled back."),
    "deploykit_shadow_total": ("counter", "Rows compared with the reference engine."),
    "deploykit_shadow_disagreements_total": ("counter", "Compared rows that disagreed."),
    "deploykit_shadow_dropped_total": ("counter", "Sampled requests that were not compared."),
    "deploykit_shadow_max_error": ("most", "Largest relative error of the compared rows."),
    "deploykit_shadow_alarm": ("most", "1 while more than 1 % of the rows disagree."),
    # pipelines
    "deploykit_pipeline_requests_total": ("counter", "Requests of a pipeline by outcome."),
    "deploykit_pipeline_seconds": ("histogram", "Time of a successful request of a pipeline."),
    "deploykit_pipeline_in_flight": ("gauge", "Requests in a pipeline now."),
    "deploykit_pipeline_stage_requests_total": ("counter", "Requests of a stage by outcome."),
    "deploykit_pipeline_stage_seconds": ("histogram", "Time of a stage, with the wait for it."),
    "deploykit_pipeline_stage_in_flight": ("gauge", "Requests in a stage now, hanging ones too."),
    "deploykit_pipeline_stage_waiting": ("gauge", "Requests that wait for a thread of a stage."),
    # the server
    "deploykit_http_responses_total": ("counter", "HTTP replies by status, refusals included."),
    "deploykit_grpc_responses_total": ("counter", "gRPC calls by status, refusals included."),
    "deploykit_held_bytes": ("gauge", "Bytes of large requests and answers in the server."),
    "deploykit_held_limit_bytes": ("gauge", "The most bytes of large requests and answers."),
    "deploykit_workers": ("gauge", "Worker processes that serve now, of a server with several."),
    "deploykit_worker_restarts_total": ("counter", "Worker processes that were replaced."),
    "deploykit_log_lines_dropped_total": ("counter", "Log lines that no reader took in time."),
    "deploykit_spans_dropped_total": ("counter", "Traced requests that no collector took in time."),
    "process_resident_memory_bytes": ("gauge", "Resident memory of this process."),
    "process_cpu_seconds_total": ("counter", "Processor time of this process, user and system."),
    "process_start_time_seconds": ("least", "Start of this process, in seconds since 1970."),
    "process_open_fds": ("gauge", "Open file descriptors."),
    "process_max_fds": ("gauge", "Limit of open file descriptors."),
    "process_threads": ("gauge", "Threads of this process."),
    # GPUs
    "nv_gpu_utilization": ("most", "Share of recent time in which the GPU was busy, 0 to 1."),
    "nv_gpu_power_usage": ("most", "Power in watts; on a Jetson, of the whole module."),
    "nv_gpu_power_limit": ("most", "Power limit in watts."),
    "nv_energy_consumption": ("shared", "Energy in joules since the driver was loaded."),
    "nv_gpu_memory_total_bytes": ("most", "Memory of the GPU; on a Jetson, shared with the CPU."),
    "nv_gpu_memory_used_bytes": ("most", "Memory of the GPU in use."),
    "deploykit_gpu_info": ("most", "Always 1; the labels name the GPU and the source."),
    "deploykit_gpu_clock_hertz": ("most", "Clock of the GPU now."),
    "deploykit_gpu_temperature_celsius": ("most", "Temperature of the GPU."),
    "deploykit_gpu_throttled": ("most", "1 while the GPU's clock is reduced for this reason."),
    "deploykit_board_power_watts": ("most", "Power of each rail of a Jetson."),
    "deploykit_board_temperature_celsius": ("most", "Temperature of each zone of a Jetson."),
}


class BucketCounts(NamedTuple):
    """A histogram's counts, cumulative by upper bound, and the sum of its values."""

    counts: list[tuple[str, int]]
    total: float


class Sample(NamedTuple):
    """One value of a metric in METRICS."""

    name: str
    labels: Mapping[str, str]
    value: float | BucketCounts


class Histogram:
    """Counts per bucket; a value equal to a bound belongs to that bound's bucket.

    `bounds` and values are integers; `per` of them make one unit of the metric: microseconds and
    1,000,000 for a histogram in seconds.
    """

    def __init__(self, bounds: Sequence[int], per: int = 1) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0
        self._per = per
        self._ends = [*(str(bound if per == 1 else bound / per) for bound in bounds), "+Inf"]

    def add(self, values: np.ndarray, times: np.ndarray | None = None) -> None:
        """Count integers, shape (values,), each once or as often as in `times`."""
        at = np.searchsorted(self.bounds, values)
        found = np.bincount(at, times, len(self.counts))
        self.counts = [old + int(new) for old, new in zip(self.counts, found, strict=True)]
        self.total += int(values.sum() if times is None else values @ times)

    def add_one(self, value: int) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def buckets(self) -> BucketCounts:
        cumulative = itertools.accumulate(self.counts)
        return BucketCounts(list(zip(self._ends, cumulative, strict=True)), self.total / self._per)


OUTCOMES = ("success", "rejected", "expired", "bad_request", "failed", "cancelled")
TRITON_REASONS: Mapping[str, tuple[str, ...]] = {
    "REJECTED": ("rejected", "expired"),
    "CANCELED": ("cancelled",),
    "BACKEND": ("failed",),
    "OTHER": ("bad_request",),
}
STAGES = ("decode", "queue", "join", "copy_in", "compute", "copy_out", "split", "encode")
US = 1_000_000  # per second
_DECADES = (10, 100, 1000, 10_000, 100_000, 1_000_000)
STAGE_US = (*(step * decade for decade in _DECADES for step in (1, 2, 5)), 10 * US)
_FINE = (1, 1.5, 2, 3, 4, 5, 6, 8)  # fine steps, for p50 and p99
REQUEST_US = (50, *(int(step * decade) for decade in _DECADES[1:] for step in _FINE), 10 * US)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_RECENT = 256  # runs counted together

_COMPUTE = ("compute_input", "compute_infer", "compute_output")


def durations(count: int, times_us: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Format durations as in the statistics of the protocol, each a sum over `count` requests."""
    return {name: {"count": count, "ns": int(us) * 1000} for name, us in times_us.items()}


def inference_stats(
    count: int, times_us: Mapping[str, int], failures: int, fail_us: int
) -> dict[str, Any]:
    """Return all members of `inference_stats`; those without a time are 0."""
    names = ("success", "queue", *_COMPUTE)
    return {
        **durations(count, {name: times_us.get(name, 0) for name in names}),
        **durations(failures, {"fail": fail_us}),
        **durations(0, {"cache_hit": 0, "cache_miss": 0}),
    }


class ModelMetrics(Watcher):
    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._outcomes = dict.fromkeys(OUTCOMES, 0)
        self._fail_us = 0
        # µs before, in and after the engine, each request with its batch's full time; and requests
        self._compute = np.zeros(4, np.int64)
        self._by_rows: dict[int, np.ndarray] = {}  # the same, by the rows of a batch
        self._rows = 0
        self._runs = 0
        self._last_s = 0.0
        self._idle_us = 0
        self._stages = {stage: Histogram(STAGE_US, US) for stage in STAGES}
        self._compute_s = Histogram(STAGE_US, US)
        self._request_s = Histogram(REQUEST_US, US)
        self._batch_rows = Histogram(ROWS)
        # not counted yet: values of each run, pairs for each of its requests, pairs for each answer
        self._recent: list[tuple[int, ...]] = []
        self._waits: list[int] = []
        self._answers: list[int] = []

    def record_run(self, run: BatchRun) -> None:
        """Count a batch that succeeded; called on the engine's thread."""
        requests, started_us, *times = run
        with self._lock:
            self._recent.append((sum([each.rows for each in requests]), len(requests), *times))
            for each in requests:
                self._waits += started_us - each.arrived_us, each.decode_us
            self._last_s = time.time()
            if len(self._recent) >= _RECENT:
                self._count_recent()

    def record_answer(self, request: Pending, encode_us: int, now_us: int) -> None:
        """Count a response that is ready to be sent."""
        with self._lock:
            self._answers += encode_us, request.decode_us + now_us - request.arrived_us

    def _count_recent(self) -> None:
        """Count everything recorded since the last call. Needs the lock."""
        stages = self._stages
        if self._answers:
            encode_us, request_us = np.array(self._answers, np.int64).reshape(-1, 2).T
            stages["encode"].add(encode_us)
            self._request_s.add(request_us)
            self._answers.clear()
        if not self._recent:
            return
        # a client may have cancelled the only request of a run
        queue_us, decode_us = np.array(self._waits, np.int64).reshape(-1, 2).T
        rows, requests, *times, idle_us = np.array(self._recent, np.int64).T
        self._recent.clear()
        self._waits.clear()
        join_us, copy_in_us, compute_us, copy_out_us, split_us = times
        stages["queue"].add(queue_us)
        stages["decode"].add(decode_us)
        copied = requests * ((copy_in_us > 0) | (copy_out_us > 0))  # otherwise there are no copies
        for stage, us, count in (
            ("join", join_us, requests),
            ("copy_in", copy_in_us, copied),
            ("compute", compute_us, requests),
            ("copy_out", copy_out_us, copied),
            ("split", split_us, requests),
        ):
            stages[stage].add(us, count)
        input_us, output_us = join_us + copy_in_us, copy_out_us + split_us
        columns = np.stack([input_us, compute_us, output_us, np.ones_like(rows)])
        self._compute += columns @ requests
        self._compute_s.add(input_us + compute_us + output_us, requests)
        for size in set(rows.tolist()):
            self._by_rows[size] = self._by_rows.get(size, 0) + columns @ (rows == size)
        self._batch_rows.add(rows)
        self._rows += int(rows.sum())
        self._runs += len(rows)
        self._idle_us += int(idle_us.sum())
        self._outcomes["success"] += int(requests.sum())

    def record_failure(self, request: Pending, now_us: int) -> None:
        outcome = "expired" if isinstance(request.error, Expired) else "failed"
        self.count(outcome, now_us - request.arrived_us)

    def record_refusal(self, request: Pending) -> None:
        if isinstance(request.error, Expired):
            self.count("expired")
        else:
            self.count("bad_request" if isinstance(request.error, BadInput) else "rejected")

    def record_cancellation(self) -> None:
        self.count("cancelled")

    def count(self, outcome: str, us: int = 0) -> None:
        """Count a request that did not succeed, `us` after it arrived."""
        with self._lock:
            self._outcomes[outcome] += 1
            self._fail_us += us

    def _times_us(self) -> dict[str, int]:
        """Return the total times of all successes, as in the statistics of the protocol."""
        *compute_us, _ = map(int, self._compute)
        queue_us = self._stages["queue"].total
        times = {"success": queue_us + sum(compute_us), "queue": queue_us}
        return {**times, **dict(zip(_COMPUTE, compute_us, strict=True))}

    def statistics(self) -> dict[str, Any]:
        """Return one entry of `model_stats`: cumulative, with all members of `inference_stats`."""
        with self._lock:
            self._count_recent()
            failures = sum(self._outcomes.values()) - self._outcomes["success"]
            count, times_us = int(self._compute[3]), self._times_us()
            return {
                "name": self.name,
                "version": VERSION,
                "last_inference": int(self._last_s * 1000),
                "inference_count": self._rows,
                "execution_count": self._runs,
                "inference_stats": inference_stats(count, times_us, failures, self._fail_us),
                "batch_stats": [
                    {"batch_size": rows, **durations(int(n), dict(zip(_COMPUTE, us, strict=True)))}
                    for rows, (*us, n) in sorted(self._by_rows.items())
                ],
            }

    def status(self) -> dict[str, Any]:
        """Return the counts for the dashboard: numbers since the start, times in µs."""
        with self._lock:
            self._count_recent()
            return {
                "outcomes": dict(self._outcomes),
                "rows": self._rows,
                "runs": self._runs,
                "idle_us": self._idle_us,
                "last_ms": int(self._last_s * 1000),
                "request": {"counts": list(self._request_s.counts), "us": self._request_s.total},
                "stages_us": {stage: found.total for stage, found in self._stages.items()},
                "batches": {str(rows): int(found[3]) for rows, found in self._by_rows.items()},
            }

    def samples(self, waiting: int, unanswered: int) -> list[Sample]:
        """Return the samples for Prometheus; `waiting` and `unanswered` are the current numbers."""
        labels = {"model": self.name, "version": VERSION}
        with self._lock:
            self._count_recent()
            counts, times_us = dict(self._outcomes), self._times_us()
            values: dict[str, float | BucketCounts] = {
                "deploykit_queue_depth": waiting,
                "deploykit_requests_in_flight": unanswered,
                "deploykit_batch_wait_seconds_total": self._idle_us / US,
                "deploykit_request_seconds": self._request_s.buckets,
                "deploykit_queue_seconds": self._stages["queue"].buckets,
                "deploykit_compute_seconds": self._compute_s.buckets,
                "deploykit_batch_rows": self._batch_rows.buckets,
                "nv_inference_request_success": counts["success"],
                "nv_inference_count": self._rows,
                "nv_inference_exec_count": self._runs,
                "nv_inference_pending_request_count": waiting,
                "nv_inference_request_duration_us": times_us.pop("success"),
                **{f"nv_inference_{name}_duration_us": us for name, us in times_us.items()},
            }
            stages = {stage: found.buckets for stage, found in self._stages.items()}
        failures = {
            reason: sum(counts[outcome] for outcome in outcomes)
            for reason, outcomes in TRITON_REASONS.items()
        }
        return [
            *(Sample(name, labels, value) for name, value in values.items()),
            *split_by("deploykit_stage_seconds", labels, "stage", stages),
            *split_by("deploykit_requests_total", labels, "outcome", counts),
            *split_by("nv_inference_request_failure", labels, "reason", failures),
        ]


def split_by(
    name: str, labels: Mapping[str, str], label: str, values: Mapping[str, float | BucketCounts]
) -> Iterator[Sample]:
    """Yield samples of one metric, one for each value of `label`."""
    return (Sample(name, {**labels, label: each}, value) for each, value in values.items())


INTERVAL_S = 1.0
STALE_S = 5.0
_PROCESS = {
    "process_resident_memory_bytes": "resident_bytes",
    "process_cpu_seconds_total": "cpu_s",
    "process_start_time_seconds": "started_s",
    "process_open_fds": "open_fds",
    "process_max_fds": "max_fds",
    "process_threads": "threads",
}


@dataclass(frozen=True)
class Snapshot:
    """The state at `at_s` of the monotonic clock. `process` is empty if it could not be read."""

    at_s: float
    process: Mapping[str, float]
    gpus: tuple[GpuState, ...]


class Sampler:
    """Samples the process and the GPUs in the background: no scrape waits for a driver.

    The first call of `latest` starts a thread that takes a snapshot every second. Thread-safe.
    """

    def __init__(
        self, devices: Devices | None = None, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._devices = devices
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._newest: Snapshot | None = None
        self._closing = threading.Event()

    def latest(self) -> Snapshot | None:
        """Return the newest snapshot, None if there is no recent one. Never waits."""
        with self._lock:
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._loop, name="sampler", daemon=True)
                self._thread.start()
        newest = self._newest
        return newest if newest and self._clock_s() - newest.at_s <= STALE_S else None

    def samples(self) -> list[Sample]:
        """Return the state of the process and the GPUs for Prometheus."""
        latest = self.latest()
        if latest is None:
            return []
        process = latest.process
        return [
            *(Sample(name, {}, process[field]) for name, field in _PROCESS.items() if process),
            *(sample for gpu in latest.gpus for sample in gpu_samples(gpu)),
        ]

    def close(self) -> None:
        with self._lock:
            self._closing.set()
        if self._thread is not None:
            self._thread.join(INTERVAL_S)  # a daemon: this does not wait for a driver that hangs

    def _loop(self) -> None:
        devices = self._devices
        try:
            while not self._closing.is_set():
                at_s, process = self._clock_s(), dict[str, float]()
                with suppress(OSError, KeyError, ValueError):  # /proc cannot be read
                    devices = devices or Devices()
                    process = this_process()
                self._newest = Snapshot(at_s, process, devices.read() if devices else ())
                self._closing.wait(INTERVAL_S)
        finally:
            if devices:
                devices.close()


def this_process() -> dict[str, float]:
    """Read /proc for this process: the values of `_PROCESS`. Slow with many files.

    `started_s`: seconds since 1970. Raises OSError or KeyError without a file descriptor, and
    ValueError without a limit of them.
    """
    from prometheus_client import PROCESS_COLLECTOR

    samples = [sample for family in PROCESS_COLLECTOR.collect() for sample in family.samples]
    found = {each.name: each.value for each in samples}
    found["process_threads"] = sum(1 for _ in Path("/proc/self/task").iterdir())
    return {field: found[name] for name, field in _PROCESS.items()}


_GAUGES: Sequence[tuple[str, Mapping[str, str], Callable[[GpuState], float | None]]] = (
    ("nv_gpu_utilization", {}, lambda gpu: gpu.utilization),
    ("nv_gpu_power_usage", {}, lambda gpu: gpu.power_w),
    ("nv_gpu_power_limit", {}, lambda gpu: gpu.power_limit_w),
    ("nv_energy_consumption", {}, lambda gpu: gpu.energy_j),
    ("nv_gpu_memory_total_bytes", {}, lambda gpu: gpu.memory_total_bytes),
    ("nv_gpu_memory_used_bytes", {}, lambda gpu: gpu.memory_used_bytes),
    ("deploykit_gpu_temperature_celsius", {}, lambda gpu: gpu.temperature_c),
    ("deploykit_gpu_clock_hertz", {"domain": "compute"}, lambda gpu: gpu.clock_hz),
    ("deploykit_gpu_clock_hertz", {"domain": "memory"}, lambda gpu: gpu.memory_clock_hz),
)


def gpu_samples(gpu: GpuState) -> Iterator[Sample]:
    """Yield the samples of one GPU; values that its source does not report are left out."""
    uuid = {"gpu_uuid": gpu.uuid}
    about = {"name": gpu.name, "index": str(gpu.index), "source": gpu.source}
    about |= {"power_mode": gpu.power_mode} if gpu.power_mode else {}
    yield Sample("deploykit_gpu_info", {**uuid, **about}, 1)
    for name, labels, read in _GAUGES:
        value = read(gpu)
        if value is not None:
            yield Sample(name, {**uuid, **labels}, value)
    if gpu.throttled is not None:
        for reason in THROTTLES:
            value = int(reason in gpu.throttled)
            yield Sample("deploykit_gpu_throttled", {**uuid, "reason": reason}, value)
    for rail, watts in gpu.rails:
        yield Sample("deploykit_board_power_watts", {**uuid, "rail": rail}, watts)
    for zone, degrees in gpu.zones:
        yield Sample("deploykit_board_temperature_celsius", {**uuid, "zone": zone}, degrees)


class _Collector:
    """Yields the samples by metric in the order of METRICS, for prometheus_client."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._by_name: dict[str, list[Sample]] = {}
        for sample in samples:
            self._by_name.setdefault(sample.name, []).append(sample)

    def collect(self) -> Iterator[Metric]:
        from prometheus_client import core

        counter, histogram = core.CounterMetricFamily, core.HistogramMetricFamily
        families = {"counter": counter, "shared": counter, "histogram": histogram}
        for name in sorted(self._by_name, key=_ORDER.__getitem__):
            kind, description = METRICS[name]
            make = families.get(kind, core.GaugeMetricFamily)
            if make is counter and not name.endswith("_total"):  # as OpenMetrics requires
                make = core.UnknownMetricFamily
            samples = self._by_name[name]
            family = make(name, description, labels=list(samples[0].labels))
            for _, labels, value in samples:
                values = value if isinstance(value, BucketCounts) else (value,)
                family.add_metric(list(labels.values()), *values)
            yield family


_ORDER = {name: place for place, name in enumerate(METRICS)}


def expositions(samples: Iterable[Sample], accepts: Iterable[str]) -> dict[str, tuple[bytes, str]]:
    """Write samples as (text, content type), by Accept header, which may ask for OpenMetrics."""
    from prometheus_client.exposition import choose_encoder, generate_latest

    encoded: dict[str, bytes] = {}  # by content type: clients may vary their headers freely
    found, collector = {}, _Collector(samples)
    for accept in accepts:
        encode, content_type = choose_encoder(accept)
        if content_type not in encoded:
            text = encode(collector)
            if encode is generate_latest:  # untyped metrics are Triton's counters without _total
                text = text.replace(b" untyped\n", b" counter\n")
            encoded[content_type] = text
        found[accept] = encoded[content_type], content_type
    return found
