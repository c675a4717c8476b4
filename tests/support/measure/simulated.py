"""Reports of simulated runs, in which the truth is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from deploykit.core.evidence import Interval
from deploykit.evaluation.statistics import Latency, throughput
from deploykit.reporting.report import CLOSED_LOOP, Point, Report

ROUNDS, CALLS, BATCHES = 5, 800, (1, 2, 4)
MACHINE = {
    "cpu": "An Example CPU",
    "usable_cores": 2,
    "gpus": [],
    "memory_bytes": 8 << 30,
    "power_mode": None,
    "packages": {"deploykit": "0.1.0", "numpy": "2.3.0", "onnx": "1.19.0"},
}
PROVENANCE = {
    "host": "a",
    "project": {"commit": "1e"},
    "clocks": {"governor": "performance", "max_mhz": 3000.0},
    "affinity": "0-1",
    "inputs": {"from": "golden samples", "sha256": "c0ffee"},
}


def plain(text: str) -> str:
    return text.replace("\u202f", " ")


def bare_point(label: str = "A", batch: int = 1, **changes: Any) -> Point:
    """A point of one session in one process."""
    point = Point(
        *(label, "fp32", "cpu", "onnxruntime 1.31.1", CLOSED_LOOP, batch, 1, 1, 100, 5, 1.0),
        latency=Latency(100, None, None, None, 1.0),
        throughput_per_s=Interval(1.0, 1.0, 1.0),
        round_rates=(),
    )
    return replace(point, **changes)


def point(batch: int, call_s: float, random: np.random.Generator, label: str = "model") -> Point:
    """Rounds differ by 0.5 %, calls by 10 %."""
    calls_s = [
        call_s * np.exp(0.005 * random.standard_normal() + 0.1 * random.standard_normal(CALLS))
        for _ in range(ROUNDS)
    ]
    seconds, rows = [float(each.sum()) for each in calls_s], [float(batch * CALLS)] * ROUNDS
    return bare_point(
        label,
        batch,
        threads=2,
        shapes={"x": (batch, 64)},
        samples=ROUNDS * CALLS,
        duration_s=sum(seconds),
        latency=Latency.of(*calls_s),
        throughput_per_s=throughput(rows, seconds),
        round_rates=tuple(r / s for r, s in zip(rows, seconds, strict=True)),
    )


def simulated(seed: int, slower: float = 1.0) -> Report:
    """A report whose process differs from others by 1 %, as on a real machine."""
    random = np.random.default_rng(seed)
    process = float(np.exp(0.01 * random.standard_normal()))
    return Report(
        title="a model",
        created="2026-01-01T00:00:00+00:00",
        command="deploykit bench model.onnx",
        baseline="model",
        machine=MACHINE,
        provenance=PROVENANCE,
        artefacts=({"file": "model.onnx", "sha256": "a" * 64, "precision": "fp32"},),
        points=tuple(point(n, 1e-3 * n * slower * process, random) for n in BATCHES),
    )
