"""The metrics of one model, read by Prometheus' own parser."""

from __future__ import annotations

import errno
import resource
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as read_open_metrics,
)
from prometheus_client.parser import text_string_to_metric_families

from deploykit.core.errors import BadInput, Expired, Overloaded
from deploykit.engines.devices import Devices, GpuState
from deploykit.serving.batching.queue import BatchRun, Pending
from deploykit.serving.observe import metrics as process_module
from deploykit.serving.observe.metrics import (
    STAGES,
    STALE_S,
    ModelMetrics,
    Sampler,
)
from tests.support.serving.running import WAIT_S, infer_json, running
from tests.support.serving.scrapes import exposition

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


Eventually = Callable[[Callable[[], bool]], None]


def pending(arrived_us: int = 1000, *, rows: int = 1, decode_us: int = 7) -> Pending:
    return Pending({}, rows, (), lambda _: None, arrived_us, 0, 0, decode_us=decode_us)


def run(*requests: Pending, copies_us: tuple[int, int] = (0, 0), idle_us: int = 0) -> BatchRun:
    """Started at 1500 µs; 20 to join, 300 in the engine, 10 to split."""
    return BatchRun(requests, 1500, 20, copies_us[0], 300, copies_us[1], 10, idle_us)


def parsed(*metrics: ModelMetrics) -> dict[str, Any]:
    text, _ = exposition(sample for each in metrics for sample in each.samples(0, 0))
    families = list(text_string_to_metric_families(text.decode()))
    assert len({family.name for family in families}) == len(families)
    return {family.name: family for family in families}


def value(families: dict[str, Any], family: str, name: str, **labels: str) -> float:
    """The one sample of this name that has these labels, among others.

    The parser adds `_total` to counters that Triton named without.
    """
    found = [
        sample.value
        for sample in families[family].samples
        if sample.name in (name, f"{name}_total") and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, (name, labels, families[family].samples)
    return float(found[0])


def stage(families: dict[str, Any], what: str, name: str) -> float:
    full = f"deploykit_stage_seconds_{what}"
    return value(families, "deploykit_stage_seconds", full, stage=name)


def test_the_stages_of_each_request_of_a_batch_are_counted_also_with_tritons_names() -> None:
    metrics = ModelMetrics("m")
    metrics.record_run(
        run(pending(1000), pending(1400, decode_us=9), copies_us=(40, 50), idle_us=500)
    )
    metrics.record_answer(pending(1000), 6, 2000)
    found = parsed(metrics)
    sums_us = {name: round(stage(found, "sum", name) * 1e6) for name in STAGES}
    assert sums_us == dict(zip(STAGES, (16, 600, 40, 80, 600, 100, 20, 6), strict=True))
    counts = {name: stage(found, "count", name) for name in STAGES}
    assert counts == {**dict.fromkeys(STAGES, 2), "encode": 1}
    name = "deploykit_request_seconds"  # from the start of decoding to the answer
    assert value(found, name, f"{name}_sum") == pytest.approx(1007e-6)
    assert value(found, name, f"{name}_bucket", le="0.001") == 0
    assert value(found, name, f"{name}_bucket", le="0.0015") == 1
    name = "deploykit_batch_wait_seconds"
    assert value(found, name, f"{name}_total") == pytest.approx(500e-6)
    parts_us = {"queue": 600, "compute_input": 120, "compute_infer": 600, "compute_output": 120}
    for part, us in {**parts_us, "request": 1440}.items():
        name = f"nv_inference_{part}_duration_us"
        assert value(found, name, name) == us
    metrics.record_run(run(pending()))  # by an engine that does not time its copies
    found = parsed(metrics)
    counts = {name: stage(found, "count", name) for name in STAGES}
    assert counts == {**dict.fromkeys(STAGES, 3), "copy_in": 2, "copy_out": 2, "encode": 1}


def test_failures_have_tritons_reasons() -> None:
    metrics = ModelMetrics("m")
    refused = pending()
    refused.error = Overloaded("full")
    metrics.record_run(run())  # whose requests were all cancelled
    metrics.record_refusal(refused)
    late, broken = pending(), pending()
    late.error, broken.error = Expired("late"), BadInput("no")
    metrics.record_failure(late, 2000)
    metrics.record_failure(broken, 2000)
    for _ in range(3):
        metrics.record_cancellation()
    metrics.count("bad_request")
    found = parsed(metrics)
    name = "nv_inference_request_failure"
    reasons = {
        reason: value(found, name, name, reason=reason)
        for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER")
    }
    assert reasons == {"REJECTED": 2, "CANCELED": 3, "BACKEND": 1, "OTHER": 1}
    ours = {
        sample.labels["outcome"]: sample.value for sample in found["deploykit_requests"].samples
    }
    assert ours == {
        "success": 0, "rejected": 1, "expired": 1, "bad_request": 1, "failed": 1, "cancelled": 3,
    }  # fmt: skip


def test_every_histogram_is_cumulative_and_ends_in_its_count() -> None:
    odd = 'NVIDIA "X"\\\n{},='
    metrics = [ModelMetrics(odd), ModelMetrics("b")]
    for each in metrics:
        each.record_run(run(pending(rows=3), pending(0), copies_us=(1, 20_000_000)))
        each.record_answer(pending(), 5, 5_000_000)
    families = parsed(*metrics)
    text, _ = exposition((x for each in metrics for x in each.samples(0, 0)), OPEN_METRICS)
    assert list(read_open_metrics(text.decode()))  # it refuses bounds and counts that decrease
    histograms = [name for name, family in families.items() if family.type == "histogram"]
    assert len(histograms) == 5
    for name in histograms:
        last = [s for s in families[name].samples if s.labels.get("le") == "+Inf"]
        assert len(last) >= 2
        for sample in last:
            labels = {k: v for k, v in sample.labels.items() if k != "le"}
            assert value(families, name, f"{name}_count", **labels) == sample.value
    depth = families["deploykit_queue_depth"]  # models share one family
    assert [sample.labels["model"] for sample in depth.samples] == [odd, "b"]
    assert (depth.type, bool(depth.documentation)) == ("gauge", True)


def test_what_many_threads_record_is_counted_once_each() -> None:
    metrics = ModelMetrics("m")

    def record() -> None:
        for number in range(700):  # more than are kept before they are counted
            request = pending(1000 + number % 3, rows=1 + number % 2)
            metrics.record_run(run(request, idle_us=2))
            metrics.record_answer(request, 5, 2000)

    threads = [threading.Thread(target=record) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    status, found = metrics.status(), metrics.statistics()
    assert (status["runs"], status["rows"], status["idle_us"]) == (2100, 3150, 4200)
    assert status["batches"] == {"1": 1050, "2": 1050}
    assert sum(status["request"]["counts"]) == status["outcomes"]["success"] == 2100
    queue_us = 3 * sum(500 - number % 3 for number in range(700))
    assert found["inference_stats"]["queue"] == {"count": 2100, "ns": queue_us * 1000}
    assert status["stages_us"]["encode"] == 5 * 2100


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8"),
        ("text/html, */*", "text/plain; version=0.0.4; charset=utf-8"),
        ("application/openmetrics-text;version=1.0.0;q=0.6,text/plain;q=0.3", OPEN_METRICS),
    ],
)
def test_a_scrape_is_answered_in_the_format_that_it_accepts(accept: str, content_type: str) -> None:
    with running() as server:
        body = infer_json([1, 2, 3, 4], [1, 4])
        assert server.ask("POST", "/v2/models/m/infer", body).status == 200
        reply = server.ask("GET", "/metrics", accept=accept)
    assert reply.headers["content-type"].startswith(content_type)
    read = read_open_metrics if content_type == OPEN_METRICS else text_string_to_metric_families
    families = {family.name: family for family in read(reply.body.decode())}
    assert value(families, "deploykit_requests", "deploykit_requests_total", outcome="success") == 1
    assert value(families, "nv_inference_count", "nv_inference_count") == 1
    if content_type != OPEN_METRICS:  # Triton's counters keep their names
        assert b"# TYPE nv_inference_count counter\nnv_inference_count{" in reply.body


# -- The background sampler of process and GPU metrics: it never blocks and hides stale values


class Gated(Devices):
    """Devices whose driver answers when the gate is open; counts how often it is read."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.reads = 0
        self.closed = False

    def read(self) -> tuple[GpuState, ...]:
        self.reads += 1
        assert self.gate.wait(WAIT_S)
        return (GpuState("GPU-1", "n", 0, "nvml", utilization=self.reads / 100),)

    def close(self) -> None:
        self.closed = True


def test_devices_are_read_once_for_all_requests_of_a_while(
    eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = Gated()
    monkeypatch.setattr(process_module, "INTERVAL_S", 3600.0)
    with closing(Sampler(devices)) as sampler:
        assert devices.reads == 0  # not before the first request
        eventually(lambda: bool(sampler.samples()))
        for _ in range(1000):
            found = {sample.name: sample for sample in sampler.samples()}
        assert devices.reads == 1
        assert found["nv_gpu_utilization"].labels == {"gpu_uuid": "GPU-1"}
        assert found["nv_gpu_utilization"].value == 0.01
        assert 3 <= found["process_open_fds"].value < found["process_max_fds"].value
        assert found["process_resident_memory_bytes"].value > 10 << 20
        assert abs(found["process_start_time_seconds"].value - time.time()) < 1 << 20
        assert found["process_cpu_seconds_total"].value > 0
    assert devices.closed


def test_what_is_old_is_left_out(eventually: Eventually, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "INTERVAL_S", 0.01)
    devices, now_s = Gated(), [100.0]
    with closing(Sampler(devices, lambda: now_s[0])) as sampler:
        eventually(lambda: sampler.latest() is not None)
        before = devices.reads
        devices.gate.clear()
        eventually(lambda: devices.reads > before)  # the driver hangs
        now_s[0] += STALE_S + 0.1
        assert sampler.latest() is None
        assert sampler.samples() == []
        devices.gate.set()
        eventually(lambda: sampler.latest() is not None)


def test_the_sampler_survives_a_lack_of_file_descriptors(
    eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "INTERVAL_S", 0.01)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with closing(Sampler(Gated())) as sampler:

        def has_process() -> bool | None:
            found = sampler.latest()
            return None if found is None else bool(found.process)

        eventually(lambda: has_process() is True)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
        try:
            eventually(lambda: has_process() is False)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        eventually(lambda: has_process() is True)


def test_gpus_are_sampled_once_the_process_has_file_descriptors_again(
    eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def devices() -> Devices:
        tries.append(len(tries))
        if len(tries) == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return Devices()

    monkeypatch.setattr(process_module, "Devices", devices)
    monkeypatch.setattr(process_module, "INTERVAL_S", 0.01)
    with closing(Sampler()) as sampler:
        eventually(lambda: bool((found := sampler.latest()) and found.process))
    assert len(tries) == 2
