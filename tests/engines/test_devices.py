"""GPUs by NVML and by a Jetson's sysfs, the energy that they use, and which of them is cuda:0.

NVML is real nvidia-ml-py over a small stand-in library.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.core import profile as order
from deploykit.engines.devices import (
    Conditions,
    Devices,
    DeviceWatch,
    GpuState,
    JetsonReader,
    conditions_of,
    read_rails,
    read_zones,
)
from deploykit.serving.observe.metrics import gpu_samples
from tests.support.installed import compiled
from tests.support.runtimes.jetson_files import ORIN_NANO, rail, write

STUBS = Path(__file__).resolve().parent.parent / "support" / "runtimes"


# NVML


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libnvidia-ml.so.1 for LD_LIBRARY_PATH."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    path = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    return compiled(path, (STUBS / "nvml_stub.c").read_text()).parent


def seen(library: Path, kind: str, root: Path) -> list[dict[str, Any]]:
    """What a fresh process reads with this stand-in, as dictionaries."""
    program = (
        "import json, sys; from pathlib import Path;"
        "from deploykit.engines.devices import Devices;"
        "devices = Devices(Path(sys.argv[1])); devices.read();"
        "print(json.dumps([gpu.to_dict() for gpu in devices.read()])); devices.close()"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "STUB": kind}
    command = [sys.executable, "-c", program, root]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
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
    files = {
        "sys/class/devfreq/gpu-gpc-0/cur_freq": 1575000000,
        "proc/meminfo": "MemTotal: 1024 kB\nNvMapMemUsed: 512 kB",
        **rail("1-0040", 1, "VIN", 20000, 989),
    }
    (gpu,) = seen(library, "thor", write(tmp_path, files))
    assert (gpu["name"], gpu["uuid"], gpu["utilization"]) == ("NVIDIA H200", "GPU-3f1c", 0.63)
    assert (gpu["source"], gpu["clock_hz"]) == ("nvml+sysfs", 1_575_000_000)
    assert gpu["power_w"] == pytest.approx(19.78)
    assert gpu["memory_used_bytes"] == 512 << 10
    assert gpu["throttled"] is None


@pytest.mark.parametrize(("kind", "numbers"), [("lost", [0]), ("late", [])])
def test_a_gpu_or_a_driver_that_was_lost_does_not_hide_the_others(
    library: Path, tmp_path: Path, kind: str, numbers: list[int]
) -> None:
    assert [gpu["index"] for gpu in seen(library, kind, tmp_path)] == numbers


# for Prometheus


def test_only_known_values_become_samples_and_each_throttle_reason_a_series() -> None:
    state = GpuState("GPU-1", "B", 0, "nvml", utilization=0.5)
    assert [name for name, *_ in gpu_samples(state)] == ["deploykit_gpu_info", "nv_gpu_utilization"]
    reasons = [
        (labels["reason"], value)
        for name, labels, value in gpu_samples(replace(state, throttled=("sw_thermal",)))
        if name == "deploykit_gpu_throttled"
    ]
    assert (len(reasons), [reason for reason, on in reasons if on]) == (5, ["sw_thermal"])


# which GPU is cuda:0

UUIDS = ["GPU-" + "-".join((2 * n * 4, 2 * n * 2, 2 * n * 2, 2 * n * 2, 2 * n * 6)) for n in "ab"]


@pytest.mark.parametrize(("visible", "places"), [(None, [0, 1]), ("1,0", []), ("", [])])
def test_without_cuda_the_order_is_that_of_nvml_unless_gpus_may_be_hidden(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, places: list[int | None]
) -> None:
    monkeypatch.setattr(order, "_ask", lambda: ())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert order.cuda_order(UUIDS) == places


@pytest.fixture(scope="module")
def cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuda") / "libcuda.so.1"
    return compiled(path, (STUBS / "fakecuda.c").read_text()).parent


@pytest.mark.parametrize(("cuda", "places"), [("bb,aa", [1, 0]), ("bb", [1]), ("cc", [None])])
def test_cuda_itself_says_which_gpu_is_which(
    cuda_library: Path, monkeypatch: pytest.MonkeyPatch, cuda: str, places: list[int | None]
) -> None:
    """Whatever its variables hold: it knows which GPU is fastest, and a part of one (MIG)."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(cuda_library))
    monkeypatch.setenv("FAKECUDA_DEVICES", str(len(cuda.split(","))))
    monkeypatch.setenv("FAKECUDA_UUIDS", cuda)
    order._ask.cache_clear()
    assert order.cuda_order(UUIDS) == places
    order._ask.cache_clear()


class Gpus(Devices):
    """Gives one reading after the other, and the last one for ever."""

    def __init__(self, *readings: Sequence[GpuState]) -> None:
        self.readings = list(readings)

    def read(self) -> tuple[GpuState, ...]:
        return tuple(self.readings.pop(0) if len(self.readings) > 1 else self.readings[0])

    def close(self) -> None: ...


def two_gpus() -> Gpus:
    """GPU "a" is idle and hot, "b" works; NVML counts both from the bus."""
    return Gpus(
        *(
            (
                GpuState(UUIDS[0], "idle", 0, "nvml", energy_j=n, throttled=("sw_thermal",)),
                GpuState(UUIDS[1], "ours", 1, "nvml", energy_j=300.0 * n, throttled=()),
            )
            for n in range(1, 9)
        )
    )


@pytest.mark.parametrize(("visible", "name"), [("1", "cuda:0"), ("0,1", "cuda:1")])
def test_energy_and_conditions_are_those_of_the_gpu_that_cuda_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, name: str
) -> None:
    digits = [UUIDS[int(n)].removeprefix("GPU-").replace("-", "") for n in visible.split(",")]
    monkeypatch.setattr(order, "_ask", lambda: tuple((each, "") for each in digits))
    with DeviceWatch(two_gpus(), root=tmp_path, every_s=3600, only=(name,)) as watch:
        before = watch.joules()[name]
        assert watch.joules()[name] - before == 300
        assert [each.name for each in watch.conditions] == ["ours"]
        assert watch.reasons == ()


def test_a_part_of_a_gpu_has_no_meter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-8b3c")
    with DeviceWatch(two_gpus(), root=tmp_path, every_s=3600) as found:
        assert "cuda:0" not in found.joules()
        assert "a part of a GPU (MIG)" in found.why["cuda:0"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with meter(tmp_path, [gpu()]) as found:
        assert found.why["cuda:0"] == "NVIDIA L4 reports neither energy nor power"


# the conditions of a run


def test_the_conditions_of_a_run_are_its_extremes() -> None:
    first = GpuState("G", "Orin", 0, "sysfs", power_w=5.0, clock_hz=306_000_000, throttled=())
    zones = (("cpu", 61.0), ("gpu", 40.0))
    first = replace(first, clock_max_hz=1_020_000_000, power_mode="15W", zones=zones)
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
    found = conditions_of([GpuState("G", "n", 0, "nvml")])
    known = [name for name, value in found.to_dict().items() if value is not None]
    assert known == ["name", "source", "samples", "trace"]


@pytest.mark.parametrize(("states", "kept"), [(120, 120), (121, 61)])
def test_the_trace_of_a_long_run_keeps_states_at_equal_intervals(states: int, kept: int) -> None:
    found = conditions_of([GpuState("G", "n", 0, "nvml", power_w=float(i)) for i in range(states)])
    watts = found.trace["power_w"]
    assert len(watts) == kept
    assert len(set(np.diff(np.array(watts, dtype=float)))) == 1


# energy


def package(root: Path, number: int, name: str, energy_uj: int | str) -> Path:
    base = f"sys/class/powercap/intel-rapl:{number}"
    values = {"name": name, "max_energy_range_uj": 999_999, "energy_uj": energy_uj}
    write(root, {f"{base}/{key}": value for key, value in values.items()})
    return root / base / "energy_uj"


def gpu(source: str = "nvml", **more: Any) -> GpuState:
    return GpuState("uuid", "NVIDIA L4", 0, source, **more)


def meter(
    root: Path, *readings: Sequence[GpuState], seconds: Sequence[float] = (0.0,)
) -> DeviceWatch:
    clock, gpus = iter([*seconds, *[seconds[-1]] * 1000]), Gpus(*(readings or ((),)))
    return DeviceWatch(gpus, root=root, every_s=3600, clock=lambda: next(clock))


def test_packages_are_added_up_and_a_counter_may_begin_again_or_go_away(tmp_path: Path) -> None:
    first = package(tmp_path, 0, "package-0", 100)
    second = package(tmp_path, 1, "package-1", 990_000)
    package(tmp_path, 2, "psys", 5)
    with meter(tmp_path) as found:
        assert found.sources == {"cpu": "RAPL, 2 packages"}
        assert found.joules() == {"cpu": 0.0}
        first.write_text("400100")
        second.write_text("90000")  # 100,000 microjoules on
        assert found.joules()["cpu"] == pytest.approx(0.5)
        assert found.joules()["cpu"] == pytest.approx(0.5)
        first.unlink()
        assert found.joules() == {}
        assert found.why["cpu"] == "the RAPL counters could no longer be read"


@pytest.mark.parametrize("content", [None, "x", "-5"])
def test_without_a_readable_counter_the_reason_is_given(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        package(tmp_path, 0, "package-0", content)
    with meter(tmp_path) as found:
        assert found.joules() == {}
        reason = "no RAPL meter in" if content is None else "package-0 may not be read"
        assert reason in found.why["cpu"]


def test_power_is_integrated_where_there_is_no_counter(tmp_path: Path) -> None:
    readings = [[gpu(energy_j=1000.0 + n, power_w=70.0)] for n in (0, 30)]
    with meter(tmp_path, *readings) as found:
        assert found.sources == {"cuda:0": "NVML, counter of the GPU"}
    watts = [[gpu(power_w=10.0)], [gpu(power_w=30.0)]]
    with meter(tmp_path, *watts, seconds=[0.0, 2.0]) as found:
        assert found.sources == {"cuda:0": "NVML, power of the GPU"}
        assert found.joules()["cuda:0"] == pytest.approx(40.0)
    with meter(tmp_path, [gpu("nvml+sysfs", power_w=10.0)], seconds=[0.0, 1.0]) as found:
        rails = "power rails of the whole module"  # of a Jetson, the CPU's too
        assert found.sources == {"cuda:0": rails, "cpu": rails}
        used = found.joules()
        assert used["cpu"] == used["cuda:0"]
        assert "cpu" not in found.why


# a Jetson by its system files


def jetson(root: Path, *files: dict[str, object]) -> GpuState:
    for each in files:
        write(root, each)
    state = JetsonReader(root).read()
    assert state is not None
    return state


def test_a_jetson_is_read_from_its_files(tmp_path: Path) -> None:
    files: dict[str, object] = {
        "sys/class/devfreq/17000000.gpu/max_freq": 1020000000,
        "var/lib/nvpmodel/status": "pmode:0002 fmode:fanNull",
        "etc/nvpmodel.conf": "< POWER_MODEL ID=1 NAME=25W >\n< POWER_MODEL ID=2 NAME=MAXN_SUPER >",
    }
    gpu = jetson(tmp_path, ORIN_NANO, files)
    assert gpu.name == "NVIDIA Jetson Orin Nano Developer Kit"
    assert gpu.utilization == pytest.approx(0.371)
    assert (gpu.clock_hz, gpu.clock_max_hz) == (624_750_000, 1_020_000_000)
    assert (gpu.temperature_c, gpu.power_mode) == (42.25, "MAXN_SUPER")
    assert gpu.memory_used_bytes == 512 << 20
    assert gpu.memory_total_bytes == 7802880 << 10
    assert dict(gpu.rails) == pytest.approx({"VDD_IN": 5.52, "VDD_CPU_GPU_CV": 1.5})
    assert gpu.power_w == pytest.approx(5.52)  # the rail of all, not the sum of it and its parts
    assert gpu.throttled is None


def test_older_boards_are_read_and_other_machines_are_none(tmp_path: Path) -> None:
    """Xavier and older Orin: the GPU is a device of its own, under its chip's name."""
    other = {"sys/class/devfreq/devfreq0/cur_freq": 1, "proc/meminfo": "MemTotal: 1 kB"}
    assert JetsonReader(write(tmp_path, other)).read() is None
    clock = "sys/class/devfreq/17000000.ga10b"
    gpu = jetson(tmp_path, {f"{clock}/cur_freq": 306000000, f"{clock}/device/load": 999})
    assert (gpu.utilization, gpu.clock_hz) == (0.999, 306_000_000)


def test_a_jetson_is_read_while_its_process_has_no_file_descriptor_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folders cannot be listed: before Python 3.13 `glob` raises that."""

    def glob(*_: object) -> Iterator[Path]:
        raise OSError(errno.EMFILE, "Too many open files")

    write(tmp_path, ORIN_NANO | {"sys/devices/platform/gpu.0/load": 500})
    monkeypatch.setattr(Path, "glob", glob)
    state = JetsonReader(tmp_path).read()
    assert state is not None
    assert (state.utilization, state.clock_hz, state.zones) == (0.5, None, ())


def test_incomplete_and_damaged_system_files_give_the_readable_values(tmp_path: Path) -> None:
    files: dict[str, object] = {
        "sys/devices/platform/gpu.0/load": "none",
        "sys/class/devfreq/gpu-gpc-0/cur_freq": "1575000000",
        "sys/class/hwmon": "not a folder",
        "sys/class/thermal/thermal_zone0/type": "gpu-thermal",
        "sys/class/thermal/thermal_zone0/temp/folder": 1,
        "sys/bus/i2c/devices/1-0040/name": "ina3221",
        "sys/bus/i2c/devices/1-0040/hwmon/hwmon3/in1_label": "VIN",
    }
    unknown = GpuState("jetson-gpu.0", "NVIDIA Jetson", 0, "sysfs")
    assert jetson(tmp_path, files) == replace(unknown, clock_hz=1_575_000_000)


# rails of the AGX Orin, which has none for the whole module
AGX_ORIN: dict[str, object] = {
    "sys/class/devfreq/17000000.gpu/cur_freq": 1300500000,
    **rail("1-0040", 1, "VDD_GPU_SOC", 19000, 200),
    **rail("1-0040", 2, "VDD_CPU_CV", 19000, 100),
    **rail("1-0041", 1, "VIN_SYS_5V0", 5000, 800),
    **rail("1-0041", 3, "NC", 5000, 800),
}
SMALL = rail("1-0041", 2, "VDDQ_VDD2_1V8AO", 1800, 100)
HWMON = "sys/bus/i2c/devices/1-004{}/hwmon/hwmon3/{}"


@pytest.mark.parametrize(
    ("files", "count", "power"),
    [
        (AGX_ORIN, 3, 3.8 + 1.9 + 4.0),
        (AGX_ORIN | SMALL, 4, 9.88),
        # no rail is counted twice where a total is measured
        (AGX_ORIN | rail("1-0042", 2, "POM_5V_IN", 5000, 3000), 4, 15.0),
        (rail("1-0040", 1, "VDD_GPU", 20000, 100), 1, None),  # of another board, Thor: a part
        # the offset of an idle rail is no power, and an impossible reading unknown
        (rail("1-0040", 1, "VDD_IN", 5000, -80), 1, 0.0),
        (rail("1-0040", 1, "VDD_IN", -5000, 100), 0, None),
        (rail("1-0040", 1, "VDD_IN", 5000, 10**9), 0, None),
    ],
)
def test_power_rails_are_summed_where_no_total_is_measured(
    tmp_path: Path, files: dict[str, object], count: int, power: float | None
) -> None:
    rails, found = read_rails(write(tmp_path, files))
    assert (len(rails), found) == (count, power if power is None else pytest.approx(power))


@pytest.mark.parametrize(
    ("files", "lost"),
    [
        *((AGX_ORIN, HWMON.format(0, name)) for name in ("in2_input", "curr2_input", "in2_label")),
        (AGX_ORIN | SMALL, HWMON.format(1, "curr2_input")),
        (ORIN_NANO, HWMON.format(0, "curr1_input")),  # a total is not replaced by a sum
        (AGX_ORIN | rail("1-0042", 2, "POM_5V_IN", 5000, 3000), HWMON.format(2, "in2_label")),
    ],
)
@pytest.mark.parametrize("text", ["", "1e3", "12 mA", "９", "9" * 5000])
def test_a_sum_with_a_rail_that_cannot_be_read_is_unknown(
    tmp_path: Path, files: dict[str, object], lost: str, text: str
) -> None:
    """Less than the module takes would look like a better result."""
    root = write(tmp_path, files)
    before = len(read_rails(root)[0])
    damaged = "\x00\xff<>" if lost.endswith("label") else text
    (root / lost).write_bytes(damaged.encode("latin-1", "replace"))
    rails, power = read_rails(root)
    assert (len(rails), power) == (before - 1, None)


def test_every_zone_is_read_but_those_that_are_off(tmp_path: Path) -> None:
    files: dict[str, object] = {}
    zones = {"tj-thermal": 51500, "GPU-therm": 50000, "cv0-thermal": -256000, "soc2": "N/A"}
    for at, (name, temp) in enumerate(zones.items()):
        files[f"sys/class/thermal/thermal_zone{at}/type"] = name
        files[f"sys/class/thermal/thermal_zone{at}/temp"] = str(temp)
    files["sys/class/thermal/thermal_zone9/temp"] = "1"  # its type is gone
    assert read_zones(write(tmp_path, files)) == (("gpu", 50.0), ("tj", 51.5))


@pytest.mark.parametrize(
    ("name", "state", "throttled"),
    [
        ("gpu-throttle-alert", 1, ("sw_thermal",)),
        ("gpu-throttle-alert", 0, ()),
        ("pwm-fan", 3, None),  # a fan is no throttling
        ("gpu-throttle-alert", "x", None),
    ],
)
def test_a_thermal_alert_is_throttling(
    tmp_path: Path, name: str, state: object, throttled: tuple[str, ...] | None
) -> None:
    base = "sys/class/thermal/cooling_device0"
    files = {f"{base}/type": name, f"{base}/cur_state": state, f"{base}/max_state": 2}
    assert jetson(tmp_path, ORIN_NANO, files).throttled == throttled


def test_new_over_current_events_are_throttling_and_old_ones_are_not(tmp_path: Path) -> None:
    """The counters run from the boot on: 813 at the first look say nothing of now."""
    base = "sys/class/hwmon/hwmon5"
    counts = {f"{base}/oc1_event_cnt": 0, f"{base}/oc3_event_cnt": 813}
    write(tmp_path, ORIN_NANO | {f"{base}/name": "soctherm_oc"} | counts)
    reader = JetsonReader(tmp_path)
    found = []
    for count in (813, 813, 814, 814, "gone", 815):
        (tmp_path / base / "oc3_event_cnt").write_text(f"{count}\n")
        state = reader.read()
        assert state is not None
        found.append(state.throttled)
    assert found == [(), (), ("hw_slowdown",), (), (), ("hw_slowdown",)]
