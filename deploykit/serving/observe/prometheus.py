"""Prometheus text: every metric the server may show, and how samples become lines.

In: samples by metric name, from the models, the devices, the log. Out: the text format, version
0.0.4. Names are ours (`deploykit_`), Triton's (`nv_`) and those every process has (`process_`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

Samples = Mapping[str, Sequence[str]]  # metric name -> its lines

TEXTS: Mapping[str, tuple[str, str]] = {
    "deploykit_requests_total": ("counter", "Inference requests by how they ended."),
    "deploykit_request_seconds": (
        "histogram",
        "Whole time in the server of a request answered with a result, all stages together.",
    ),
    "deploykit_stage_seconds": (
        "histogram",
        "Time of each stage of a successful request; what a batch took is charged to each in it.",
    ),
    "deploykit_queue_seconds": ("histogram", "Time a request waited for the engine."),
    "deploykit_compute_seconds": (
        "histogram",
        "Time a request's batch took: join, copy in, compute, copy out, split.",
    ),
    "deploykit_batch_rows": ("histogram", "Rows in each batch that the engine ran."),
    "deploykit_batch_wait_seconds_total": (
        "counter",
        "Time that requests waited while an engine stood idle: the cost of waiting for a batch.",
    ),
    "deploykit_queue_depth": ("gauge", "Requests waiting for the engine now."),
    "deploykit_requests_in_flight": ("gauge", "Requests taken and not answered yet."),
    "nv_inference_request_success": ("counter", "Requests answered with a result."),
    "nv_inference_request_failure": ("counter", "Requests that ended without a result."),
    "nv_inference_count": ("counter", "Rows inferred."),
    "nv_inference_exec_count": ("counter", "Runs of the engine."),
    "nv_inference_pending_request_count": ("gauge", "Requests waiting for the engine now."),
    "nv_inference_request_duration_us": ("counter", "Total time of successful requests."),
    "nv_inference_queue_duration_us": ("counter", "Total time successful requests waited."),
    "nv_inference_compute_input_duration_us": (
        "counter",
        "Total time to join the inputs and copy them to the device.",
    ),
    "nv_inference_compute_infer_duration_us": ("counter", "Total time in the engine."),
    "nv_inference_compute_output_duration_us": (
        "counter",
        "Total time to copy the outputs from the device and split them.",
    ),
    "nv_gpu_utilization": ("gauge", "Share of the last moments in which the GPU was busy, 0 to 1."),
    "nv_gpu_power_usage": ("gauge", "Power in watts; on a Jetson, of the whole module."),
    "nv_gpu_power_limit": ("gauge", "Power limit in watts."),
    "nv_energy_consumption": ("counter", "Energy in joules since the driver was loaded."),
    "nv_gpu_memory_total_bytes": ("gauge", "Memory of the GPU; on a Jetson, shared with the CPU."),
    "nv_gpu_memory_used_bytes": ("gauge", "Memory of the GPU in use."),
    "deploykit_gpu_info": ("gauge", "Always 1; the labels tell which GPU, and who reports on it."),
    "deploykit_gpu_clock_hertz": ("gauge", "Clock of the GPU now."),
    "deploykit_gpu_temperature_celsius": ("gauge", "Temperature of the GPU."),
    "deploykit_gpu_throttled": ("gauge", "1 while the GPU's clock is held down for this reason."),
    "deploykit_board_power_watts": ("gauge", "Power of each rail of a Jetson."),
    "deploykit_log_lines_dropped_total": (
        "counter",
        "Log lines dropped because nobody read the log fast enough.",
    ),
    "deploykit_spans_dropped_total": (
        "counter",
        "Traced requests dropped because the collector did not take them fast enough.",
    ),
    "process_resident_memory_bytes": ("gauge", "Resident memory of this process."),
    "process_cpu_seconds_total": ("counter", "Processor time of this process, user and system."),
    "process_start_time_seconds": ("gauge", "When this process began, in seconds since 1970."),
    "process_open_fds": ("gauge", "Open file descriptors."),
    "process_max_fds": ("gauge", "Limit of open file descriptors."),
    "process_threads": ("gauge", "Threads of this process."),
}


class Histogram:
    """Counts per bucket; a value equal to a bound belongs to that bound's bucket.

    `bounds` and values are whole numbers, `per` of them to one of the unit that is shown: bounds in
    microseconds and `per` 1,000,000 for a histogram in seconds.
    """

    def __init__(self, bounds: Sequence[int], per: int = 1) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0
        self._per = per
        shown = [str(bound if per == 1 else bound / per) for bound in bounds]
        self._ends = [f'le="{bound}"}} ' for bound in (*shown, "+Inf")]

    def add(self, value: int, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def lines(self, name: str, labels: str) -> list[str]:
        """Prometheus samples: cumulative buckets, sum and count."""
        out, so_far, start = [], 0, f"{name}_bucket{{{labels},"
        for end, count in zip(self._ends, self.counts, strict=True):
            so_far += count
            out.append(f"{start}{end}{so_far}")
        total = self.total / self._per
        return [*out, f"{name}_sum{{{labels}}} {total}", f"{name}_count{{{labels}}} {so_far}"]


def label(value: str) -> str:
    """A label's value with what the format cannot hold escaped."""
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def prometheus(
    samples: Iterable[Samples], texts: Mapping[str, tuple[str, str]] | None = None
) -> str:
    """The text of all samples, grouped by metric; one without samples is left out.

    `texts`: type and help of metrics that are not in TEXTS.
    """
    families: dict[str, list[str]] = {}
    for found in samples:
        for name, lines in found.items():
            families.setdefault(name, []).extend(lines)
    known = {**TEXTS, **(texts or {})}
    out: list[str] = []
    for name in [*(name for name in known if name in families), *(families.keys() - known.keys())]:
        kind, text = known.get(name, ("untyped", ""))
        if families[name]:
            out += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *families[name]]
    return "\n".join(out) + "\n"
