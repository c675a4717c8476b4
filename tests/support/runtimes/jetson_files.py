"""System files of Jetsons, to be written under a root of a test's own."""

from __future__ import annotations

from pathlib import Path


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


# as JetPack 6.2 lays them out on an Orin Nano developer kit
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
