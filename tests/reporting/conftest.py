"""A report with everything in it, as a run on a two-core machine could have given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deploykit.core.evidence import Gate, Interval
from deploykit.evaluation.statistics import Latency
from deploykit.reporting.report import (
    CLOSED_LOOP,
    Accuracy,
    LoadResult,
    NotMeasured,
    Point,
    Report,
    Step,
)
from deploykit.reporting.verdict import verdict

BATCHES = (1, 2, 4, 8, 16, 32, 64)
SETUPS = {  # label: precision, sessions, threads, ms of a call, ms of each row in it
    "fp32 CPU (baseline)": ("fp32", 1, 2, 0.060, 0.150),
    "fp32 CPU, 2 × 1": ("fp32", 2, 1, 0.035, 0.128),
    "fp16 CPU": ("fp16", 1, 2, 0.090, 0.171),
    "int8 CPU": ("int8", 1, 2, 0.055, 0.081),
}


def around(value: float, share: float) -> Interval:
    return Interval(value, value * (1 - share), value * (1 + share))


def latency(p50_ms: float, samples: int) -> Latency:
    p99 = around(p50_ms * 1.9, 0.08) if samples >= 368 else None
    return Latency(samples, around(p50_ms, 0.01), around(p50_ms * 1.25, 0.02), p99, p50_ms * 6.3)


def point(label: str, batch: int) -> Point:
    precision, sessions, threads, fixed_ms, row_ms = SETUPS[label]
    call_ms = fixed_ms + row_ms * batch
    rate, calls = 1000 * batch / call_ms, int(5000 / call_ms)
    shift = list(SETUPS).index(label)
    wobble = [(0.985, 1.0, 1.01, 0.995, 1.012)[(i * (shift + 1)) % 5] for i in range(5)]
    return Point(
        *(label, precision, "cpu", "onnxruntime 1.31.1", CLOSED_LOOP, batch, sessions, threads),
        samples=calls,
        rounds=5,
        duration_s=5.0,
        latency=latency(call_ms, calls),
        throughput_per_s=around(rate, 0.015),
        round_rates=tuple(rate * part for part in wobble),
        processes=5,
    )


def served(**changes: object) -> LoadResult:
    result = LoadResult(
        *("http://127.0.0.1:8000", "mnist-cnn", "closed", 32, None, 1, 0, 1.0, 5.0),
        achieved_per_s=around(4213.0, 0.03),
        latency=latency(7.21, 21065),
        sent=21065,
        ok=21065,
        refused=0,
        expired=0,
        failed=0,
        lag_p99_ms=None,
        client_busy=0.61,
        generator_limited=False,
        same_machine=True,
    )
    return replace(result, **changes)  # type: ignore[arg-type]


def accuracy(precision: str, *ends: float, drop: Interval | None) -> Accuracy:
    return Accuracy(precision, "top-1 accuracy", 540, Interval(*ends), drop)


PARITY = {"output": "logits", "max_abs": 2.4e-6, "max_rel": 1.1e-5, "rms": 6.2e-7}
PARITY |= {"sqnr_db": 118.0, "agreement": 1.0, "finite": True, "error": 2.4e-7, "problem": ""}
FILES = {"a": "mnist-cnn.pt", "b": "mnist-cnn.onnx", "max_error": 1e-3, "passed": True}


@pytest.fixture
def report() -> Report:
    open_loop = {"achieved_per_s": around(1988.0, 0.02), "latency": latency(1.13, 9940)}
    sample = Report(
        title="mnist-cnn on this machine",
        created="2026-11-21T09:30:00+00:00",
        command="deploykit demo -o out/",
        quick=True,
        baseline="fp32 CPU (baseline)",
        gates=(
            Gate("export parity", True, "max error 2.4e-06, bound 0.001"),
            Gate("int8 accuracy", True, "drop 0.2 pp (−0.3 to 0.7), bound 1.0 pp"),
        ),
        machine={
            "system": "Linux 6.1.0",
            "architecture": "x86_64",
            "python": "3.11.2",
            "cpu": "AMD EPYC 9R14",
            "physical_cores": 2,
            "usable_cores": 2,
            "cpu_features": ["avx2", "avx512f", "avx512_vnni"],
            "memory_bytes": 8 << 30,
            "gpus": [],
            "board": None,
            "packages": {"deploykit": "0.1.0", "numpy": "2.4.1", "onnxruntime": "1.31.1"},
        },
        artefacts=tuple(
            {"file": f"mnist-cnn.{name}.onnx", "sha256": name[0] * 64, "precision": name}
            | {"format": "onnx"}
            for name in ("fp32", "int8")
        ),
        accuracy=(
            accuracy("fp32", 0.987, 0.974, 0.994, drop=None),
            accuracy("fp16", 0.987, 0.974, 0.994, drop=Interval(0.0, -0.005, 0.005)),
            accuracy("int8", 0.985, 0.971, 0.993, drop=Interval(0.002, -0.003, 0.007)),
        ),
        parity=({**FILES, "rows": [PARITY | {"batch": n, "values": 10 * n} for n in (1, 32)]},),
        points=tuple(point(label, batch) for batch in BATCHES for label in SETUPS),
        serving=(
            served(),
            served(concurrency=1, latency=latency(0.61, 8000), achieved_per_s=around(1600.0, 0.02)),
            served(
                **{"mode": "open", "concurrency": None, "rate_per_s": 2000.0, **open_loop},
                sent=9970,
                ok=9940,
                refused=30,
                lag_p99_ms=0.21,
                errors={"503: the queue is full": 30},
            ),
        ),
        steps=(Step("train", 61.2), Step("export", 8.31), Step("bench", 74.0)),
        notes=("The garbage collector was off while calls were timed.",),
        not_measured=(NotMeasured("GPU", "no NVIDIA GPU on this machine"),),
    )
    return replace(sample, verdict=verdict(sample))
