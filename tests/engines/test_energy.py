from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deploykit.engines.devices import EnergyMeter, GpuState

HIGHEST = 999_999


def package(root: Path, number: int, name: str, energy_uj: int | str) -> Path:
    folder = root / f"sys/class/powercap/intel-rapl:{number}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{HIGHEST}\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    return folder / "energy_uj"


class Gpus:
    """Gives one reading after the other, and the last one for ever."""

    def __init__(self, *readings: Sequence[GpuState]) -> None:
        self.readings = list(readings)
        self.closed = False

    def read(self) -> tuple[GpuState, ...]:
        return tuple(self.readings.pop(0) if len(self.readings) > 1 else self.readings[0])

    def close(self) -> None:
        self.closed = True


def gpu(source: str = "nvml", **more: Any) -> GpuState:
    return GpuState("uuid", "NVIDIA L4", 0, source, **more)


def meter(
    root: Path, *readings: Sequence[GpuState], seconds: Sequence[float] = (0.0,)
) -> EnergyMeter:
    clock = iter([*seconds, *[seconds[-1]] * 1000])
    gpus: Any = Gpus(*(readings or ((),)))
    return EnergyMeter(root, gpus, clock=lambda: next(clock))


def test_packages_are_added_up_and_a_counter_may_begin_again(tmp_path: Path) -> None:
    first, second = (
        package(tmp_path, 0, "package-0", 100),
        package(tmp_path, 1, "package-1", 990_000),
    )
    package(tmp_path, 2, "psys", 5)
    with meter(tmp_path) as found:
        assert found.sources == {"cpu": "RAPL, 2 packages"}
        assert found.joules() == {"cpu": 0.0}
        first.write_text("400100")
        second.write_text("90000")  # 100,000 microjoules on
        assert found.joules()["cpu"] == pytest.approx(0.5)
        assert found.joules()["cpu"] == pytest.approx(0.5)


def test_without_a_meter_the_reason_is_given(tmp_path: Path) -> None:
    with meter(tmp_path) as found:
        assert found.joules() == {}
        assert found.why["cpu"].startswith("no RAPL meter in /sys/class/powercap")


@pytest.mark.parametrize("content", ["", "x", "-5", "9" * 40])
def test_a_counter_that_may_not_be_read_is_named(tmp_path: Path, content: str) -> None:
    package(tmp_path, 0, "package-0", content)
    with meter(tmp_path) as found:
        assert found.joules() == {}
        assert "package-0 may not be read" in found.why["cpu"]


def test_a_counter_that_goes_away_gives_no_figure(tmp_path: Path) -> None:
    path = package(tmp_path, 0, "package-0", 1)
    with meter(tmp_path) as found:
        path.unlink()
        assert found.joules() == {}
        assert found.why["cpu"] == "the RAPL counters could no longer be read"


def test_a_gpu_has_the_difference_of_its_counter(tmp_path: Path) -> None:
    readings = [[gpu(energy_j=1000.0 + n, power_w=70.0)] for n in (0, 0, 30)]
    with meter(tmp_path, *readings) as found:
        assert found.sources == {"cuda:0": "NVML, counter of the GPU"}
        assert found.joules() == {"cuda:0": 0.0}
        assert found.joules() == {"cuda:0": 30.0}


def test_power_is_integrated_where_there_is_no_counter(tmp_path: Path) -> None:
    watts = [[gpu(power_w=10.0)], [gpu(power_w=30.0)]]
    found = meter(tmp_path, *watts, seconds=[0.0, 2.0])
    with found:
        found._ended.set()  # no thread takes a reading meanwhile
        assert found.sources == {"cuda:0": "NVML, power of the GPU"}
        assert found.joules()["cuda:0"] == pytest.approx(40.0)


def test_the_rails_of_a_jetson_are_the_cpus_too(tmp_path: Path) -> None:
    with meter(tmp_path, [gpu("nvml+sysfs", power_w=10.0)], seconds=[0.0, 1.0]) as found:
        rails = "power rails of the whole module"
        assert found.sources == {"cuda:0": rails, "cpu": rails}
        used = found.joules()
        assert used["cpu"] == used["cuda:0"]
        assert "cpu" not in found.why


def test_a_gpu_that_reports_nothing_is_named(tmp_path: Path) -> None:
    with meter(tmp_path, [gpu()]) as found:
        assert found.why["cuda:0"] == "NVIDIA L4 reports neither energy nor power"
