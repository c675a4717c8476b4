"""GPUs by NVML and by a Jetson's sysfs. NVML is real nvidia-ml-py over a small stand-in library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.core import cuda_order as order
from deploykit.engines.devices import (
    Conditions,
    Devices,
    EnergyMeter,
    GpuState,
    GpuWatch,
    conditions_of,
)
from deploykit.serving.observe.metrics import gpu_samples
from scripts.nvidia import fetch
from tests.support.runtimes.jetson_files import rail, write

GCC = shutil.which("gcc")
HERE = Path(__file__).resolve().parent.parent / "support" / "runtimes"


# -- NVML -----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libnvidia-ml.so.1 for LD_LIBRARY_PATH."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    if GCC is None:
        pytest.skip("no gcc to build the stand-in of NVML with")
    folder = tmp_path_factory.mktemp("nvml")
    source, built = HERE / "nvml_stub.c", folder / "libnvidia-ml.so.1"
    subprocess.run([GCC, "-shared", "-fPIC", "-Wall", "-o", built, source], check=True)
    return folder


def seen(library: Path, kind: str, root: Path) -> list[dict[str, Any]]:
    """What a fresh process reads with this stand-in, as dictionaries."""
    program = (
        "import json, sys; from pathlib import Path;"
        "from deploykit.engines.devices import Devices;"
        "devices = Devices(Path(sys.argv[1])); devices.read();"
        "print(json.dumps([gpu.to_dict() for gpu in devices.read()])); devices.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, root],
        env={**os.environ, "LD_LIBRARY_PATH": str(library), "STUB": kind},
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_nvml_reports_every_value_of_a_data_centre_gpu(library: Path, tmp_path: Path) -> None:
    (gpu,) = seen(library, "full", tmp_path)
    assert gpu == {
        "uuid": "GPU-3f1c",
        "name": "NVIDIA H200",
        "index": 0,
        "source": "nvml",
        "utilization": 0.63,
        "power_w": 412.5,
        "power_limit_w": 700.0,
        "energy_j": pytest.approx(12345.678),
        "memory_used_bytes": 1_000_000_000,
        "memory_total_bytes": 150_000_000_000,
        "clock_hz": 1_755_000_000,
        "memory_clock_hz": 2_619_000_000,
        "temperature_c": 52,
        "throttled": ["power_cap", "hw_thermal"],  # idle, 0x1, is no throttling
        "clock_max_hz": None,
        "power_mode": None,
        "rails": {},
        "zones": {},
    }


def test_what_nvml_does_not_support_is_taken_from_sysfs(library: Path, tmp_path: Path) -> None:
    """Thor: NVML has the name and the load, sysfs the rest."""
    root = write(
        tmp_path,
        {
            "sys/class/devfreq/gpu-gpc-0/cur_freq": 1575000000,
            "proc/meminfo": "MemTotal: 1024 kB\nNvMapMemUsed: 512 kB",
            **rail("1-0040", 1, "VIN", 20000, 989),
        },
    )
    (gpu,) = seen(library, "thor", root)
    assert (gpu["name"], gpu["uuid"], gpu["utilization"]) == ("NVIDIA H200", "GPU-3f1c", 0.63)
    assert (gpu["source"], gpu["clock_hz"]) == ("nvml+sysfs", 1_575_000_000)
    assert gpu["power_w"] == pytest.approx(19.78)
    assert gpu["memory_used_bytes"] == 512 << 10
    assert gpu["throttled"] is None


def test_a_gpu_that_was_lost_does_not_hide_the_others(library: Path, tmp_path: Path) -> None:
    assert [gpu["index"] for gpu in seen(library, "lost", tmp_path)] == [0]


def test_without_a_driver_there_is_no_gpu(library: Path, tmp_path: Path) -> None:
    assert seen(library, "late", tmp_path) == []


def test_a_machine_without_nvidia_has_no_gpu(tmp_path: Path) -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine has an NVIDIA GPU")
    devices = Devices(tmp_path)
    assert devices.read() == ()
    devices.close()


# -- for Prometheus -------------------------------------------------------------------------------


def test_only_known_values_become_samples() -> None:
    about = {"name": 'A "B"', "index": "0", "source": "nvml"}
    assert list(gpu_samples(GpuState("GPU-1", 'A "B"', 0, "nvml", utilization=0.5))) == [
        ("deploykit_gpu_info", {"gpu_uuid": "GPU-1", **about}, 1),
        ("nv_gpu_utilization", {"gpu_uuid": "GPU-1"}, 0.5),
    ]


def test_each_throttle_reason_is_a_separate_series() -> None:
    samples = gpu_samples(GpuState("G", "n", 0, "nvml", throttled=("sw_thermal",)))
    found = {
        labels["reason"]: value
        for name, labels, value in samples
        if name == "deploykit_gpu_throttled"
    }
    assert len(found) == 5
    assert [reason for reason, value in found.items() if value] == ["sw_thermal"]


def test_a_gpu_that_was_throttled_at_any_time_is_reported() -> None:
    reasons = iter([(), ("sw_thermal",), None])

    class Found(Devices):
        def read(self) -> tuple[GpuState, ...]:
            return (GpuState("GPU-1", "H200", 0, "nvml", throttled=next(reasons)),)

    with GpuWatch(Found(), every_s=3600) as watch:
        assert watch.reasons == ()
        watch._look()
        assert watch.reasons == ("sw_thermal",)
    assert watch.reasons == ("sw_thermal",)


# -- which GPU is cuda:0 ---------------------------------------------------------------------------

UUIDS = ["GPU-" + "-".join((2 * n * 4, 2 * n * 2, 2 * n * 2, 2 * n * 2, 2 * n * 6)) for n in "ab"]


@pytest.mark.parametrize(
    ("visible", "places"),
    [
        (None, [0, 1]),
        ("1", [1]),
        ("1,0", [1, 0]),
        (" 1 , 0 ", [1, 0]),
        ("GPU-bb", [1]),
        (UUIDS[1], [1]),
        ("1,7,0", [1]),  # CUDA stops at the first that it does not know
        ("0,0", [0]),
        ("-1", []),
        ("", []),
        ("GPU-", []),
        ("MIG-8b3c", [None]),
    ],
)
def test_without_cuda_the_order_is_that_of_its_variable(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, places: list[int | None]
) -> None:
    monkeypatch.setattr(order, "_answer", lambda *_: ())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert order.cuda_order(UUIDS) == places


@pytest.mark.parametrize(
    ("cuda", "places"), [("bb,aa", [1, 0]), ("bb", [1]), ("aa,bb", [0, 1]), ("cc", [None])]
)
def test_cuda_itself_says_which_gpu_is_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str, places: list[int | None]
) -> None:
    """Whatever its variables hold: it knows which GPU is fastest, and a part of one (MIG)."""
    try:
        fetch.library(tmp_path / "libcuda.so.1", (HERE / "fakecuda.c").read_text(encoding="utf-8"))
    except fetch.Unobtainable as exc:
        pytest.skip(str(exc))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("FAKECUDA_DEVICES", str(len(cuda.split(","))))
    monkeypatch.setenv("FAKECUDA_UUIDS", cuda)
    order._answer.cache_clear()
    assert order.cuda_order(UUIDS) == places
    order._answer.cache_clear()


class TwoGpus(Devices):
    """GPU "a" is idle and hot, "b" works; NVML counts both from the bus."""

    def __init__(self) -> None:
        self.readings = 0

    def read(self) -> tuple[GpuState, ...]:
        self.readings += 1
        spent = float(self.readings)
        return (
            GpuState(UUIDS[0], "idle", 0, "nvml", energy_j=spent, throttled=("sw_thermal",)),
            GpuState(UUIDS[1], "ours", 1, "nvml", energy_j=300 * spent, throttled=()),
        )

    def close(self) -> None: ...


@pytest.mark.parametrize(("visible", "name"), [("1", "cuda:0"), ("0,1", "cuda:1")])
def test_energy_and_conditions_are_those_of_the_gpu_that_cuda_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, name: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with EnergyMeter(tmp_path, TwoGpus()) as meter:
        before = meter.joules()[name]
        assert meter.joules()[name] - before == 300
    with GpuWatch(TwoGpus(), every_s=3600, only=(name,)) as watch:
        assert [each.name for each in watch.conditions] == ["ours"]
        assert watch.reasons == ()


def test_a_part_of_a_gpu_has_no_meter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-8b3c")
    with EnergyMeter(tmp_path, TwoGpus()) as meter:
        assert "cuda:0" not in meter.joules()
        assert "a part of a GPU (MIG)" in meter.why["cuda:0"]


def test_the_conditions_of_a_run_are_its_extremes() -> None:
    first = GpuState(
        "G", "Orin", 0, "sysfs", power_w=5.0, clock_hz=306_000_000, clock_max_hz=1_020_000_000,
        throttled=(), power_mode="15W", zones=(("cpu", 61.0), ("gpu", 40.0)),
    )  # fmt: skip
    later = replace(
        first, power_w=10.0, clock_hz=1_020_000_000, temperature_c=55.0, throttled=("sw_thermal",)
    )
    unknown = replace(first, power_w=None, clock_hz=None, throttled=None, power_mode=None)
    found = conditions_of([first, later, unknown])
    assert replace(found, trace={}) == Conditions(
        "Orin", "sysfs", 3, "15W", 306.0, 1020.0, 1020.0, 7.5, 10.0, 61.0, ("sw_thermal",)
    )
    assert found.trace == {
        "clock_mhz": (306.0, 1020.0, None),
        "power_w": (5.0, 10.0, None),
        "temperature_c": (61.0, 61.0, 61.0),
    }
    assert conditions_of([first, replace(first, power_mode="25W")]).power_mode == "15W, 25W"


def test_conditions_that_no_source_reports_are_unknown() -> None:
    found = conditions_of([GpuState("G", "n", 0, "nvml")])
    known = [name for name, value in found.to_dict().items() if value is not None]
    assert known == ["name", "source", "samples", "trace"]
    assert set(found.trace.values()) == {(None,)}


@pytest.mark.parametrize(("states", "kept"), [(120, 120), (121, 61), (5000, 120)])
def test_the_trace_of_a_long_run_keeps_states_at_equal_intervals(states: int, kept: int) -> None:
    found = conditions_of([GpuState("G", "n", 0, "nvml", power_w=float(i)) for i in range(states)])
    watts = found.trace["power_w"]
    assert len(watts) == kept
    assert len(set(np.diff(np.array(watts, dtype=float)))) == 1
