"""A Jetson by its system files: rails, clocks, heat, throttling; and damaged files."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploykit.engines.devices import GpuState, JetsonReader, read_rails, read_zones
from tests.support.runtimes.jetson_files import ORIN_NANO, rail, write


def jetson(root: Path) -> GpuState | None:
    return JetsonReader(root).read()


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
        **rail("1-0040", 2, "VDD_CPU_CV", 19000, 100),
        **rail("1-0041", 1, "VIN_SYS_5V0", 5000, 800),
        **rail("1-0041", 2, "NC", 5000, 800),
    }
    gpu = jetson(write(tmp_path, files))
    assert gpu is not None
    assert gpu.power_w == pytest.approx(3.8 + 1.9 + 4.0)
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


# rails of the AGX Orin, which has none for the whole module
AGX_ORIN = {
    "sys/class/devfreq/17000000.gpu/cur_freq": 1300500000,
    **rail("1-0040", 1, "VDD_GPU_SOC", 19000, 200),
    **rail("1-0040", 2, "VDD_CPU_CV", 19000, 100),
    **rail("1-0041", 1, "VIN_SYS_5V0", 5000, 800),
}
HWMON = "sys/bus/i2c/devices/1-0040/hwmon/hwmon3"


@pytest.mark.parametrize("total", ["VDD_IN", "POM_5V_IN", "VIN"])
def test_no_rail_is_counted_twice_where_a_total_is_measured(tmp_path: Path, total: str) -> None:
    rails, power = read_rails(write(tmp_path, {**AGX_ORIN, **rail("1-0042", 2, total, 5000, 3000)}))
    assert power == 15.0
    assert len(rails) == 4


@pytest.mark.parametrize("lost", ["in2_input", "curr2_input", "in2_label"])
@pytest.mark.parametrize("text", ["", "garbage", "1e3", "0x10", "12 mA", "９", "9" * 5000])
def test_a_sum_with_a_rail_that_cannot_be_read_is_unknown(
    tmp_path: Path, lost: str, text: str
) -> None:
    """Less than the module takes would look like a better result."""
    root = write(tmp_path, AGX_ORIN)
    damaged = "\x00\xff<>" if lost.endswith("label") else text
    (root / HWMON / lost).write_bytes(damaged.encode("latin-1", "replace"))
    rails, power = read_rails(root)
    assert power is None
    assert [name for name, _ in rails] == ["VDD_GPU_SOC", "VIN_SYS_5V0"]


def test_a_sum_without_one_of_its_smaller_rails_is_unknown(tmp_path: Path) -> None:
    root = write(tmp_path, AGX_ORIN | rail("1-0041", 2, "VDDQ_VDD2_1V8AO", 1800, 100))
    assert read_rails(root)[1] == pytest.approx(9.88)
    (root / "sys/bus/i2c/devices/1-0041/hwmon/hwmon3/curr2_input").unlink()
    assert read_rails(root)[1] is None


def test_a_total_that_cannot_be_read_is_not_replaced_by_a_sum(tmp_path: Path) -> None:
    root = write(tmp_path, ORIN_NANO)
    (root / HWMON / "curr1_input").unlink()
    assert read_rails(root) == ((("VDD_CPU_GPU_CV", 1.5),), None)


@pytest.mark.parametrize(
    ("mv", "ma", "watts"),
    [(5000, -80, 0.0), (0, 500, 0.0), (-5000, 100, None), (5000, 10**9, None)],
)
def test_the_offset_of_an_idle_rail_is_no_power_and_an_impossible_reading_unknown(
    tmp_path: Path, mv: int, ma: int, watts: float | None
) -> None:
    """Thor boards report a few hundred milliwatts below 0 without load."""
    assert read_rails(write(tmp_path, rail("1-0040", 1, "VDD_IN", mv, ma)))[1] == watts


def test_rails_of_another_board_are_not_summed(tmp_path: Path) -> None:
    """Thor measures what it takes in all with another chip: VDD_GPU is a part of it."""
    root = write(tmp_path, rail("1-0040", 1, "VDD_GPU", 20000, 100))
    assert read_rails(root) == ((("VDD_GPU", 2.0),), None)


def test_every_zone_is_read_but_those_that_are_off(tmp_path: Path) -> None:
    files = {}
    for at, (name, temp) in enumerate(
        [("tj-thermal", 51500), ("GPU-therm", 50000), ("cv0-thermal", -256000), ("soc2", "N/A")]
    ):
        files[f"sys/class/thermal/thermal_zone{at}/type"] = name
        files[f"sys/class/thermal/thermal_zone{at}/temp"] = str(temp)
    files["sys/class/thermal/thermal_zone9/temp"] = "1"  # its type is gone
    assert read_zones(write(tmp_path, files)) == (("gpu", 50.0), ("tj", 51.5))


def alert(at: int, name: str, state: object) -> dict[str, object]:
    base = f"sys/class/thermal/cooling_device{at}"
    return {f"{base}/type": name, f"{base}/cur_state": state, f"{base}/max_state": 2}


@pytest.mark.parametrize(
    ("files", "throttled"),
    [
        (alert(0, "gpu-throttle-alert", 1), ("sw_thermal",)),
        (alert(0, "gpu-throttle-alert", 0), ()),
        (alert(0, "pwm-fan", 3) | alert(1, "cpu-throttle-alert", 0), ()),  # a fan is no throttling
        (alert(0, "pwm-fan", 3), None),
        (alert(0, "gpu-throttle-alert", "x"), None),
    ],
    ids=["hot", "cool", "fan", "only-fan", "damaged"],
)
def test_a_thermal_alert_is_throttling(
    tmp_path: Path, files: dict[str, object], throttled: tuple[str, ...] | None
) -> None:
    gpu = jetson(write(tmp_path, ORIN_NANO | files))
    assert gpu is not None
    assert gpu.throttled == throttled


def test_new_over_current_events_are_throttling_and_old_ones_are_not(tmp_path: Path) -> None:
    """The counters run from the boot on: 813 at the first look say nothing of now."""
    base = "sys/class/hwmon/hwmon5"
    counts = {f"{base}/oc1_event_cnt": 0, f"{base}/oc3_event_cnt": 813}
    write(tmp_path, ORIN_NANO | {f"{base}/name": "soctherm_oc"} | counts)
    reader = JetsonReader(tmp_path)
    seen = []
    for count in (813, 813, 814, 814, "gone", 815):
        (tmp_path / base / "oc3_event_cnt").write_text(f"{count}\n")
        state = reader.read()
        assert state is not None
        seen.append(state.throttled)
    assert seen == [(), (), ("hw_slowdown",), (), (), ("hw_slowdown",)]


def test_power_mode_and_highest_clock_are_read(tmp_path: Path) -> None:
    files = {
        "sys/class/devfreq/17000000.gpu/max_freq": 1020000000,
        "var/lib/nvpmodel/status": "pmode:0002 fmode:fanNull",
        "etc/nvpmodel.conf": "< POWER_MODEL ID=1 NAME=25W >\n< POWER_MODEL ID=2 NAME=MAXN_SUPER >",
    }
    gpu = jetson(write(tmp_path, ORIN_NANO | files))
    assert gpu is not None
    assert (gpu.power_mode, gpu.clock_max_hz) == ("MAXN_SUPER", 1_020_000_000)


def test_folders_in_place_of_files_and_files_in_place_of_folders_are_unknown(
    tmp_path: Path,
) -> None:
    root = write(tmp_path, {"sys/class/devfreq/17000000.gpu/cur_freq": 1})
    for name in ("load", "type"):
        (root / "sys/devices/platform/gpu.0" / name).mkdir(parents=True)
    for folder in ("thermal", "hwmon"):
        (root / "sys/class" / folder).write_text("not a folder")
    (root / "sys/bus/i2c").mkdir(parents=True)
    (root / "sys/bus/i2c/devices").symlink_to("devices")  # to itself
    assert jetson(root) == GpuState("jetson-gpu.0", "NVIDIA Jetson", 0, "sysfs", clock_hz=1)


def test_files_that_vanish_while_they_are_read_raise_nothing(tmp_path: Path) -> None:
    import shutil
    import threading

    reader, ended = JetsonReader(tmp_path), threading.Event()

    def rewrite() -> None:
        while not ended.is_set():
            write(tmp_path, ORIN_NANO)
            shutil.rmtree(tmp_path / "sys", ignore_errors=True)

    thread = threading.Thread(target=rewrite)
    thread.start()
    try:
        powers = {state.power_w for _ in range(150) if (state := reader.read())}
    finally:
        ended.set()
        thread.join()
    assert powers <= {None, 5.52}  # never a part of it
