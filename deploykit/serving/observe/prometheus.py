"""The table of all metrics, and the response of /metrics.

Names are ours (`deploykit_`), Triton's (`nv_`) and the standard ones of a process (`process_`).
prometheus_client writes the response; `metrics.py` counts.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from prometheus_client import Metric

METRICS: Mapping[str, tuple[str, str]] = {  # name -> type, help
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
    "deploykit_model_ready": ("gauge", "1 while the model is ready."),
    "deploykit_model_info": ("gauge", "Always 1; the labels name its runtime, device and file."),
    "deploykit_model_generation": ("gauge", "1, and one more for each file that was reloaded."),
    "deploykit_model_loaded_timestamp_seconds": ("gauge", "When the file in use was loaded."),
    "deploykit_model_notes": ("gauge", "Settings that could not be met; see the dashboard."),
    "deploykit_model_batched": ("gauge", "1 while requests are joined, 0 while each runs alone."),
    "deploykit_engines": ("gauge", "Engines (instances) of the model."),
    "deploykit_engines_hung": ("gauge", "Engines that do not return from a request."),
    "deploykit_batch_limit_rows": ("gauge", "Most rows per batch; `slo_ms` adjusts it."),
    "deploykit_queue_limit_rows": ("gauge", "Most rows that may wait, where `slo_ms` bounds them."),
    "deploykit_batch_delay_seconds": ("gauge", "How long an idle engine waits for more rows."),
    "deploykit_reloads_total": ("counter", "Times a replaced engine file was loaded."),
    "deploykit_reloads_given_up_total": ("counter", "Replaced engine files that took too long."),
    "deploykit_reload_failed": ("gauge", "1 while the engine's new file cannot be loaded."),
    "deploykit_previous_engine": ("gauge", "1 while the new engine failed or was rolled back."),
    "deploykit_shadow_total": ("counter", "Rows compared with the reference engine."),
    "deploykit_shadow_disagreements_total": ("counter", "Compared rows that disagreed."),
    "deploykit_shadow_dropped_total": ("counter", "Sampled requests that were not compared."),
    "deploykit_shadow_max_error": ("gauge", "Largest relative error of the compared rows."),
    "deploykit_shadow_alarm": ("gauge", "1 while more rows disagree than `shadow_alarm` allows."),
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
    "process_start_time_seconds": ("gauge", "Start of this process, in seconds since 1970."),
    "process_open_fds": ("gauge", "Open file descriptors."),
    "process_max_fds": ("gauge", "Limit of open file descriptors."),
    "process_threads": ("gauge", "Threads of this process."),
    # GPUs
    "nv_gpu_utilization": ("gauge", "Share of recent time in which the GPU was busy, 0 to 1."),
    "nv_gpu_power_usage": ("gauge", "Power in watts; on a Jetson, of the whole module."),
    "nv_gpu_power_limit": ("gauge", "Power limit in watts."),
    "nv_energy_consumption": ("counter", "Energy in joules since the driver was loaded."),
    "nv_gpu_memory_total_bytes": ("gauge", "Memory of the GPU; on a Jetson, shared with the CPU."),
    "nv_gpu_memory_used_bytes": ("gauge", "Memory of the GPU in use."),
    "deploykit_gpu_info": ("gauge", "Always 1; the labels name the GPU and the source."),
    "deploykit_gpu_clock_hertz": ("gauge", "Clock of the GPU now."),
    "deploykit_gpu_temperature_celsius": ("gauge", "Temperature of the GPU."),
    "deploykit_gpu_throttled": ("gauge", "1 while the GPU's clock is reduced for this reason."),
    "deploykit_board_power_watts": ("gauge", "Power of each rail of a Jetson."),
    "deploykit_board_temperature_celsius": ("gauge", "Temperature of each zone of a Jetson."),
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


class _Collector:
    """Yields the samples by metric in the order of METRICS, for prometheus_client."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._by_name: dict[str, list[Sample]] = {}
        for sample in samples:
            self._by_name.setdefault(sample.name, []).append(sample)

    def collect(self) -> Iterator[Metric]:
        from prometheus_client import core

        families = {
            "counter": core.CounterMetricFamily,
            "gauge": core.GaugeMetricFamily,
            "histogram": core.HistogramMetricFamily,
        }
        for name in sorted(self._by_name, key=_ORDER.__getitem__):
            kind, description = METRICS[name]
            make = families[kind]
            if kind == "counter" and not name.endswith("_total"):  # as OpenMetrics requires
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
