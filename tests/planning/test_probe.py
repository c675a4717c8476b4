from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deploykit.core.machine import default_threads
from deploykit.graph import cost as kinds
from deploykit.planning.probe import CpuCalibration, cpu_calibration, measure_cpu, store_calibration
from tests.support.calibrations import keep_round_calibration, round_calibration


def test_a_probe_measures_every_kind_below_its_ceilings() -> None:
    measured = measure_cpu("a CPU", "2026-01-01", threads=1, budget_s=0.0)
    fp32 = {f"fp32 {kind}" for kind in kinds.KINDS if kind != kinds.OTHER}
    assert fp32 < set(measured.curves)
    assert {"int8 convolution", "int8 matrix product"} < set(measured.curves)
    assert (measured.cpu, measured.threads) == ("a CPU", 1)
    assert measured.runtime.startswith("onnxruntime ")
    for name, curve in (*measured.curves.items(), ("stream", measured.stream)):
        assert list(curve.seconds) == sorted(curve.seconds)  # more work never takes less time
        assert list(curve.work) == sorted(set(curve.work))
        assert min(curve.seconds) > 0
        precision, _, kind = name.partition(" ")
        if kind in kinds.ARITHMETIC and kind != kinds.RECURRENT:
            points = zip(curve.work, curve.seconds, strict=True)
            rates = [work / (seconds + measured.call_s) for work, seconds in points]
            assert max(rates) <= measured.ops_per_s[precision]
    assert measured.spread >= 1
    assert 0 < measured.bytes_per_s <= measured.cache_bytes_per_s


def kept(threads: int | None = None) -> CpuCalibration | None:
    found, _ = cpu_calibration(threads=threads, only_kept=True)
    return found


def test_a_calibration_is_kept_for_the_same_cpu_threads_and_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = keep_round_calibration(tmp_path, monkeypatch)
    assert kept() == found
    assert kept(threads=found.threads + 1) is None
    for other in ({"cpu": "another"}, {"runtime": "onnxruntime 0.1"}, {"version": 0}):
        store_calibration(replace(found, **other))  # type: ignore[arg-type]
        assert kept() is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 1}', "null"])
def test_a_damaged_file_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setenv("DEPLOYKIT_CACHE", str(tmp_path))
    (tmp_path / f"cpu-calibration-{default_threads()}.json").write_text(content)
    assert kept() is None


def test_a_cache_that_cannot_be_written_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DEPLOYKIT_CACHE", str(tmp_path / "file"))
    (note,) = store_calibration(round_calibration())
    assert note.startswith("the calibration is measured again next time: ")


def test_a_probe_next_to_other_work_is_doubted() -> None:
    quiet = round_calibration()
    assert quiet.doubt == ""
    assert "calls took 1.6 times their least" in replace(quiet, spread=1.6).doubt
