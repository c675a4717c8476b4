"""What doctor says of a machine: its profile, what does not fit it, its state."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploykit.cli import machine as hardware
from deploykit.core.machine import Gpu, Machine, this_machine
from deploykit.core.profile import load_profile
from deploykit.engines.devices import GpuState
from deploykit.evaluation.doctor import Health, doctor, jetson_faults, profile_differences
from tests.support.runtimes.jetson_files import ORIN_NANO, write

RELEASE = "etc/nv_tegra_release"
BOARD: Mapping[str, object] = {
    **ORIN_NANO,
    "proc/device-tree/compatible": "nvidia,p3768-0000+p3767-0005\0nvidia,p3767-0005\0",
    RELEASE: "# R36 (release), REVISION: 4.3, GCID: 1, BOARD: generic",
    "var/lib/nvpmodel/status": "pmode:0001",
    "etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=15W >\n< POWER_MODEL ID=1 NAME=25W >",
}
THROTTLED = {
    "sys/class/thermal/cooling_device3/type": "gpu-throttle-alert",
    "sys/class/thermal/cooling_device3/cur_state": 1,
}


def examined(root: Path, changes: Mapping[str, object] = {}) -> Health:
    return doctor(write(root, {**BOARD, **changes}))


def text(health: Health) -> str:
    return "\n".join(part for part in hardware.health_lines(health) if isinstance(part, str))


def test_a_jetson_is_named_by_its_board_and_nothing_is_wrong_with_it(tmp_path: Path) -> None:
    health = examined(tmp_path)
    why = "this is a NVIDIA Jetson Orin Nano 8 GB"
    assert (health.profile, health.why) == ("jetson-orin-nano-8gb", why)
    assert (health.machine.jetpack, health.machine.l4t) == ("6.2", "36.4.3")
    assert health.warnings == ()
    lines = text(health)
    assert "JetPack 6.2 (L4T 36.4.3), power mode 25W" in lines
    assert "state      37% busy; 5.5 W; rails in W: VDD_CPU_GPU_CV 1.5, VDD_IN 5.5" in lines
    assert "none found" not in lines


OLD = "JetPack 6.0 (L4T 36.3.0, TensorRT 8.6.2) is not for NVIDIA Jetson Orin Nano 8 GB: "
NEW = "JetPack 7.0 (L4T 38.2.1, TensorRT 10.13.3) is not for NVIDIA Jetson Orin Nano 8 GB: "
WARNINGS = [  # changes to the board's files, and how the one warning begins
    ({RELEASE: "# R36 (release), REVISION: 3.0"}, OLD + "install JetPack 6.1 or later"),
    ({RELEASE: "# R38 (release), REVISION: 2.1"}, NEW + "install JetPack 6.1 or later"),
    ({RELEASE: "# R99 (release), REVISION: 1.0"}, "L4T 99.1.0 belongs to no JetPack release"),
    ({RELEASE: "garbage"}, f"the JetPack release is not known: /{RELEASE}"),
    ({"etc/nvpmodel.conf": "< POWER_MODEL ID=1 NAME=CUSTOM >"}, "power mode CUSTOM is not"),
    ({"var/lib/nvpmodel/status": "\0\xff"}, "the power mode is not known"),
    (THROTTLED, "NVIDIA Jetson Orin Nano Developer Kit lowers its clocks now: sw_thermal"),
]


@pytest.mark.parametrize(("changes", "says"), WARNINGS)
def test_what_does_not_fit_the_module_or_its_profile_is_a_warning(
    tmp_path: Path, changes: Mapping[str, object], says: str
) -> None:
    (warning,) = examined(tmp_path, changes).warnings
    assert warning.startswith(says)


@pytest.mark.parametrize(
    ("revision", "docker", "tensorrt", "says"),
    [
        ("4.4", "", "", ""),
        ("4.7", "", "", "L4T 36.4.7: allocating GPU memory can fail"),
        ("4.4", "27.5.1", "", ""),
        ("4.4", "28.0.4", "", "Docker 28 needs iptables' table raw"),
        ("4.4", "", "10.16.2.1", "TensorRT 10.16.2.1 on an Orin refuses INT8 pairs with float16"),
        ("4.4", "", "10.3.0", ""),
    ],
)
def test_known_faults_of_l4t_docker_and_tensorrt_are_warnings(
    tmp_path: Path, revision: str, docker: str, tensorrt: str, says: str
) -> None:
    package = f"Package: docker-ce\nStatus: install ok\nVersion: 5:{docker}-1~ubuntu.22.04~jammy"
    status = f"Package: dash\nVersion: 1\n\n{package if docker else ''}\n"
    root = write(tmp_path, {"var/lib/dpkg/status": status})
    machine = replace(this_machine(), l4t=f"36.{revision}", packages={"tensorrt": tensorrt})
    found = list(jetson_faults(machine, root))
    assert len(found) == bool(says)
    assert all(each.startswith(says) for each in found)
    assert not list(jetson_faults(replace(machine, l4t=None, packages={}), root))


def test_an_unknown_board_is_one_clear_line(tmp_path: Path) -> None:
    health = examined(tmp_path, {"proc/device-tree/compatible": "nvidia,p3701-0000\0"})
    assert (health.profile, health.warnings) == (None, ())
    board = "NVIDIA Jetson Orin Nano Developer Kit (nvidia,p3701-0000)"
    assert f"profile    none: no profile names board {board}" in text(health)


def server(name: str, *, driver: str = "580.65.06", memory: int = 0, **packages: str) -> Machine:
    gpu = Gpu(name, memory or load_profile("l4").memory_bytes, driver, "8.9")
    named = {key.replace("_", "-"): version for key, version in packages.items()}
    return replace(this_machine(), gpus=(gpu,), packages=named)


OLD_13 = "570.86.15"  # too old for CUDA 13
L4, HUGE = ("l4", "NVIDIA L4"), {"memory": 1 << 50}
OLD_CUDA = {"driver": "520.61.05", "nvidia_cuda_runtime_cu12": "12.8"}


@pytest.mark.parametrize(
    ("profile", "gpu", "machine", "says"),
    [
        (*L4, {"tensorrt_cu13": "11.4.0.106", "onnxruntime": "1.31.1"}, ""),
        (*L4, {"driver": OLD_13, "tensorrt_cu13": "11.4"}, "CUDA 13, .* tensorrt-cu13 11.4 .* 580"),
        (*L4, {"driver": OLD_13, "nvidia_cuda_runtime": "13.0.96"}, "CUDA 13, .* nvidia-cuda-runt"),
        (*L4, OLD_CUDA, "CUDA 12, which .* 525 or later"),
        (*L4, {"driver": OLD_13, "nvidia_cuda_runtime_cu12": "12.8"}, ""),
        (*L4, {"driver": "[N/A]", "tensorrt_cu13": "11.4"}, ""),
        (*L4, {"memory": 5 << 30}, "^the driver reports 5.0 GiB of GPU memory, l4 has 22.5"),
        (*L4, {"tensorrt": "8.6.1"}, "^tensorrt 8.6.1 is installed, l4 needs 10.3 or later$"),
        ("v100", "Tesla V100-SXM2-32GB", {"tensorrt": "10.16.1", **HUGE}, "needs 10.3 to 10.4$"),
        ("b200", "NVIDIA B200", {"tensorrt": "10.7.0", **HUGE}, "b200 needs 10.8 or later$"),
    ],
)
def test_what_does_not_fit_the_profile_of_a_server_is_a_warning(
    profile: str, gpu: str, machine: Mapping[str, Any], says: str
) -> None:
    found = profile_differences(load_profile(profile), server(gpu, **machine))
    assert len(found) == bool(says)
    assert all(re.search(says, each) for each in found)


@pytest.mark.parametrize(
    ("version", "runs"), [("10.3.0", True), ("11.3.0", False), ("11.4.1", True)]
)
def test_tensorrt_11_before_11_4_is_for_no_jetson(tmp_path: Path, version: str, runs: bool) -> None:
    """NVIDIA's page on the migration of JetPack to TensorRT 11."""
    here = replace(this_machine(write(tmp_path, BOARD)), packages={"tensorrt": version})
    found = profile_differences(load_profile("jetson-agx-orin-64gb"), here)
    assert any("run on no Jetson" in sentence for sentence in found) is not runs


def test_a_gpu_only_nvml_lists_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container without the driver's utilities has NVML at most."""
    found = (GpuState("GPU-1", "NVIDIA H200", 0, "nvml", memory_total_bytes=143771 << 20),)
    monkeypatch.setattr("deploykit.evaluation.doctor.read_gpus", lambda _root: found)
    health = doctor(tmp_path)
    assert (health.profile, health.why) == ("h200", "this is a NVIDIA H200 SXM 141 GB, Hopper")
    assert "gpu        NVIDIA H200, 140 GiB, driver not known" in text(health)
