"""Count what one model served, for `/stats`, the dashboard and Prometheus.

The statistics of the Open Inference Protocol and the metrics under our names and Triton's use the
same counters, which never decrease. The times of batches are stored and counted for many batches at
once, which costs a tenth of counting each: integers in microseconds, and one lock per batch.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from deploykit.core.errors import BadInput, Expired
from deploykit.engines.devices import THROTTLES, Devices, GpuState
from deploykit.serving.batching.queue import BatchRun, Pending, Watcher
from deploykit.serving.observe.prometheus import BucketCounts, Histogram, Sample

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
    def __init__(self, name: str, version: str) -> None:
        self.name = name
        self.version = version
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
                "version": self.version,
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
        labels = {"model": self.name, "version": self.version}
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
KEEP_ON_S = 90.0  # how long to sample after the last call; above the usual scrape interval
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

    While `latest` is called now and then, a thread takes a snapshot every second; otherwise it
    sleeps. The first call starts the thread. Thread-safe.
    """

    def __init__(
        self, devices: Devices | None = None, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._devices = devices
        self._clock_s = clock_s
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._newest: Snapshot | None = None
        self._called_s = clock_s()
        self._closing = False

    def latest(self) -> Snapshot | None:
        """Return the newest snapshot, None if there is no recent one. Never waits."""
        with self._changed:
            now_s = self._called_s = self._clock_s()
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._loop, name="sampler", daemon=True)
                self._thread.start()
            self._changed.notify()
            fresh = self._newest is not None and now_s - self._newest.at_s <= STALE_S
            return self._newest if fresh else None

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
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(INTERVAL_S)  # a daemon: this does not wait for a driver that hangs

    def _loop(self) -> None:
        devices = self._devices
        try:
            while True:
                at_s = self._clock_s()
                try:
                    devices = devices or Devices()
                    process = this_process()
                except OSError:  # the process has no file descriptor left
                    process = {}
                snapshot = Snapshot(at_s, process, devices.read() if devices else ())
                with self._changed:
                    self._newest = snapshot
                    self._changed.wait_for(lambda: self._closing, INTERVAL_S)
                    while not self._closing and self._clock_s() - self._called_s > KEEP_ON_S:
                        self._changed.wait()
                    if self._closing:
                        return
        finally:
            if devices:
                devices.close()


def this_process() -> dict[str, float]:
    """Read /proc for this process: the values of `_PROCESS`. Raises OSError. Slow with many files.

    `started_s`: seconds since 1970.
    """
    root = Path("/proc/self")
    fields = (root / "stat").read_text().rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return {
        "resident_bytes": int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
        "cpu_s": (int(fields[11]) + int(fields[12])) / ticks,
        "started_s": _since_1970_s(int(fields[19]) / ticks),
        "open_fds": sum(1 for _ in (root / "fd").iterdir()),
        "max_fds": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "threads": int(fields[17]),
    }


@lru_cache(maxsize=1)
def _since_1970_s(since_boot_s: float) -> float:
    """Convert a time since the boot; cached, so that setting the wall clock does not change it."""
    return round(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot_s, 2)


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
