"""A CPU of round figures, in place of a probe: 100 GFLOP/s, 10 GB/s, 1 us for each node."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploykit.core.machine import default_threads, this_machine
from deploykit.graph import cost as kinds
from deploykit.graph.cost import Curve
from deploykit.planning.probe import VERSION, CpuCalibration, store_calibration

OPS_PER_S, BYTES_PER_S, LAUNCH_S, CALL_S = 100e9, 10e9, 1e-6, 5e-6
_WORK = (1e3, 1e6, 1e9)


def round_calibration() -> CpuCalibration:
    """Times of a node in proportion to its work."""
    rates = {f"fp32 {kind}": OPS_PER_S for kind in kinds.ARITHMETIC}
    rates |= {f"int8 {kind}": 4 * OPS_PER_S for kind in (kinds.CONVOLUTION, kinds.PRODUCT)}
    moving = set(kinds.KINDS) - {*kinds.ARITHMETIC, kinds.OTHER}
    rates |= {f"fp32 {kind}": BYTES_PER_S for kind in moving}
    curves = {name: Curve(_WORK, tuple(w / rate for w in _WORK)) for name, rate in rates.items()}
    machine = this_machine()
    return CpuCalibration(
        version=VERSION,
        cpu=machine.cpu,
        threads=default_threads(),
        runtime=f"onnxruntime {machine.packages.get('onnxruntime', '')}",
        created="2026-01-01T00:00:00+00:00",
        call_s=CALL_S,
        launch_s=LAUNCH_S,
        curves=curves,
        stream=Curve(_WORK, tuple(w / BYTES_PER_S for w in _WORK)),
        ops_per_s={"fp32": OPS_PER_S, "int8": 4 * OPS_PER_S},
        bytes_per_s=BYTES_PER_S,
        cache_bytes_per_s=4 * BYTES_PER_S,
        spread=1.0,
    )


def keep_round_calibration(folder: Path, monkeypatch: pytest.MonkeyPatch) -> CpuCalibration:
    """Let this machine's CPU be the round one, in the cache at `folder`."""
    monkeypatch.setenv("DEPLOYKIT_CACHE", str(folder))
    found = round_calibration()
    assert store_calibration(found) == []
    return found
