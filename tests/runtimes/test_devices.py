"""GPUs by NVML and by a Jetson's sysfs. NVML is real nvidia-ml-py over a small stand-in library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploykit.runtimes.devices import Devices, GpuState, ThrottleWatch, jetson
from deploykit.serving.observe.process import gpu_samples

GCC = shutil.which("gcc")
HERE = Path(__file__).resolve().parent.parent / "support" / "runtimes"


def write(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def rail(chip: str, number: int, name: str, mv: int, ma: int) -> dict[str, object]:
    base = f"sys/bus/i2c/devices/{chip}/hwmon/hwmon3"
    return {
        f"sys/bus/i2c/devices/{chip}/name": "ina3221",
        f"{base}/in{number}_label": name,
        f"{base}/in{number}_input": mv,
        f"{base}/curr{number}_input": ma,
    }


ORIN_NANO: dict[str, object] = {
    "sys/devices/platform/gpu.0/load": 371,
    "sys/class/devfreq/17000000.gpu/cur_freq": 624750000,
    "sys/class/thermal/thermal_zone0/type": "cpu-thermal",
    "sys/class/thermal/thermal_zone0/temp": 48000,
    "sys/class/thermal/thermal_zone1/type": "gpu-thermal",
    "sys/class/thermal/thermal_zone1/temp": 42250,
    "proc/meminfo": "MemTotal: 7802880 kB\nMemFree: 1 kB\nNvMapMemUsed: 524288 kB",
    "proc/device-tree/model": "NVIDIA Jetson Orin Nano Developer Kit\0",
    **rail("1-0040", 1, "VDD_IN", 5000, 1104),
    **rail("1-0040", 2, "VDD_CPU_GPU_CV", 5000, 300),
    **rail("1-0040", 3, "NC", 5000, 900),
    "sys/bus/i2c/devices/1-0041/name": "eeprom",
}


def test_a_jetson_is_read_from_its_files(tmp_path: Path) -> None:
    gpu = jetson(write(tmp_path, ORIN_NANO))
    assert gpu is not None
    assert gpu.name == "NVIDIA Jetson Orin Nano Developer Kit"
    assert gpu.utilization == pytest.approx(0.371)
    assert gpu.clock_hz == 624_750_000
    assert gpu.temperature_c == 42.25
    assert gpu.memory_used_bytes == 512 << 20
    assert gpu.memory_total_bytes == 7802880 << 10
    assert dict(gpu.rails) == pytest.approx({"VDD_IN": 5.52, "VDD_CPU_GPU_CV": 1.5})
    assert gpu.power_w == pytest.approx(5.52)  # the rail of all, not the sum of it and its parts
    assert gpu.throttled is None


def test_power_rails_are_summed_when_there_is_no_total(tmp_path: Path) -> None:
    files = {
        "sys/devices/gpu.0/load": 0,
        **rail("1-0040", 1, "VDD_GPU_SOC", 19000, 200),
        **rail("1-0041", 1, "VIN_SYS_5V0", 5000, 800),
    }
    gpu = jetson(write(tmp_path, files))
    assert gpu is not None
    assert gpu.power_w == pytest.approx(3.8 + 4.0)
    assert gpu.utilization == 0


def test_utilization_is_read_from_the_clocks_device(tmp_path: Path) -> None:
    """Xavier and older Orin: the GPU is a device of its own, under its chip's name."""
    files = {
        "sys/class/devfreq/17000000.ga10b/cur_freq": 306000000,
        "sys/class/devfreq/17000000.ga10b/device/load": 999,
        "sys/class/devfreq/13e10000.host1x/cur_freq": 1,
    }
    gpu = jetson(write(tmp_path, files))
    assert gpu is not None
    assert (gpu.utilization, gpu.clock_hz) == (0.999, 306_000_000)


def test_incomplete_and_damaged_system_files_give_the_readable_values(tmp_path: Path) -> None:
    files = {
        "sys/devices/platform/gpu.0/load": "none",
        "sys/class/devfreq/gpu-gpc-0/cur_freq": "1575000000",
        "sys/class/thermal/thermal_zone0/type": "gpu-thermal",
        "sys/bus/i2c/devices/1-0040/name": "ina3221",
        "sys/bus/i2c/devices/1-0040/hwmon/hwmon3/in1_label": "VIN",
    }
    gpu = jetson(write(tmp_path, files))
    assert gpu == GpuState(
        "jetson-gpu.0", "NVIDIA Jetson", 0, "sysfs", clock_hz=1_575_000_000,
    )  # fmt: skip


def test_another_machine_is_not_a_jetson(tmp_path: Path) -> None:
    files = {"sys/class/devfreq/devfreq0/cur_freq": 1, "proc/meminfo": "MemTotal: 1 kB"}
    assert jetson(write(tmp_path, files)) is None


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
        "from deploykit.runtimes.devices import Devices;"
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
        "rails": {},
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

    with ThrottleWatch(Found(), every_s=3600) as watch:
        assert watch.reasons == ()
        watch._look()
        assert watch.reasons == ("sw_thermal",)
    assert watch.reasons == ("sw_thermal",)
