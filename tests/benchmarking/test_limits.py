"""Ceilings, energy and memory of a benchmark, where there is a meter, and the reason where not."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deploykit as dk
from deploykit.benchmarking.limits import EnergyLog, cpu_ceilings, measure_memory
from deploykit.benchmarking.timing import Setup, Timing, sweep
from deploykit.core.errors import Unsupported
from deploykit.core.evidence import Interval
from deploykit.evaluation.artefacts import no_progress
from deploykit.reporting.report import Point
from tests.support.fake_engine import FakeEngine
from tests.support.measure.simulated import bare_point
from tests.support.measure.virtual_time import feeds
from tests.support.onnx_zoo import mnist_like, save


def test_a_probe_that_finds_no_room_is_a_gap_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise Unsupported("/tmp/deploykit-probe/chain.onnx: no space left on the disk")

    monkeypatch.setattr("deploykit.benchmarking.limits.cpu_calibration", full)
    found, (gap,) = cpu_ceilings([], 60.0, no_progress)
    assert found == {}
    assert gap.what == "ceilings of the CPU"
    assert gap.why.endswith("no space left on the disk")


def test_a_short_run_waits_for_no_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEPLOYKIT_CACHE", str(tmp_path / "cache"))
    model = save(mnist_like(), tmp_path / "model.onnx")
    found = dk.bench([model], out=tmp_path / "r", seconds=0.05, batches=[1])
    assert (found.predicted, found.roofline) == ((), {})
    assert not (tmp_path / "cache").exists()
    gaps = [each for each in found.not_measured if each.what == "energy of cpu"]
    assert bool(gaps) != bool(found.energy)


class Meter:
    def __init__(self, *joules: float) -> None:
        self.sources = {"cpu": "RAPL, 1 package"}
        self.why = {"cuda:0": "no meter"}
        self._joules: list[float] = list(joules)

    def joules(self) -> Mapping[str, float]:
        return {"cpu": self._joules.pop(0)}


def point(label: str, rate: float, device: str = "cpu") -> Point:
    return bare_point(label, device=device, throughput_per_s=Interval(rate, rate, rate))


def test_energy_is_divided_by_the_rounds_of_each_point() -> None:
    """Idle 2 W; a: 10 W in two rounds, b: 40 W in one; what the warm-up took is nobody's."""
    steps = ["a, batch 1: warm-up", "a, batch 1: round 1", "b, batch 1: round 1"]
    steps += ["a, batch 1: round 2", "done"]
    joules = [0.0, 2.0, 100.0, 1000.0, 1010.0, 1050.0, 1060.0]
    meter: Any = Meter(*joules)
    found = EnergyLog(meter, no_progress, map(float, range(7)).__next__)
    for step in steps:
        found(step, 0.0)
    a, b = found.energy([point("a", 5.0), point("b", 10.0), point("c", 1.0)])
    assert (a.joules, a.above_idle, a.idle_w) == (2.0, 1.6, 2.0)
    assert (b.joules, b.above_idle, b.source) == (4.0, 3.8, "RAPL, 1 package")
    on_gpu = [point("a", 5.0, "cuda:0")]
    assert found.energy(on_gpu) == ()
    assert [(gap.what, gap.why) for gap in found.gaps(on_gpu)] == [("energy of cuda:0", "no meter")]


class Large(FakeEngine):
    """Holds so many MB, that the system has had to give it."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.held = np.ones(megabytes * 125_000)


def test_each_setup_has_the_peak_of_its_own_process() -> None:
    setups = [
        Setup("small", FakeEngine),
        Setup("large", partial(Large, 200), batches=(4,)),
        Setup("never timed", FakeEngine),
    ]
    points = sweep(setups[:2], [1, 4], Timing(0.0, 0.01, 2), feeds)
    steps: list[str] = []
    small, large = measure_memory(setups, points, feeds, lambda what, _: steps.append(what))
    assert (small.label, small.batch, large.label, large.batch) == ("small", 4, "large", 4)
    more_mb = (large.peak_bytes - small.peak_bytes) / 1e6
    assert 0.8 * 200 < more_mb < 1.5 * 200
    assert small.peak_bytes < 1e9  # not what this test process had
    assert steps == ["small: memory", "large: memory"]
