from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from deploykit.core.machine import (
    Gpu,
    default_threads,
    memory_bytes,
    parse_gpus,
    this_machine,
    usable_cores,
)
from deploykit.core.memory import available_bytes

CONF = """\
# comment
< POWER_MODEL ID=0 NAME=15W >
CPU_ONLINE CORE_0 1
< POWER_MODEL ID=1 NAME=25W >
< POWER_MODEL ID=2 NAME=MAXN_SUPER >
< PM_CONFIG DEFAULT=1 >
"""
RELEASE = (
    "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64, "
    "DATE: Wed Jan  8 01:49:37 UTC 2025\n# KERNEL_VARIANT: oot\n"
)
ARM_CPU = "processor\t: 0\nFeatures\t: fp asimd asimddp\n\nprocessor\t: 1\nFeatures\t: fp asimd\n"


def write(root: Path, path: str, content: str | bytes) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.fixture
def jetson(tmp_path: Path) -> Path:
    """What a Jetson Orin Nano with JetPack 6.2 shows under `/`."""
    write(tmp_path, "etc/nv_tegra_release", RELEASE)
    write(tmp_path, "etc/nvpmodel.conf", CONF)
    write(tmp_path, "var/lib/nvpmodel/status", "pmode:0001 fmode:fanNull\n")
    board = b"NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super\0"
    write(tmp_path, "proc/device-tree/model", board)
    ids = b"nvidia,p3768-0000+p3767-0005-super\0nvidia,p3767-0005\0nvidia,tegra234\0"
    write(tmp_path, "proc/device-tree/compatible", ids)
    write(tmp_path, "proc/cpuinfo", ARM_CPU)
    write(tmp_path, "proc/meminfo", "MemTotal:        7802164 kB\nMemFree: 1 kB\n")
    return tmp_path


BATCHES = """
import sys
from pathlib import Path
from deploykit.core.machine import return_large_blocks

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

if sys.argv[1] == "return":
    return_large_blocks()
del [bytearray(16 << 20)][0]
bytearray(16 << 20)
before = resident_mib()
blocks = [bytearray(8 << 20) for _ in range(16)]
small = bytearray(4000)
del blocks[:-1]
print(resident_mib() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="no glibc here")
def test_large_freed_blocks_return_to_the_system() -> None:
    kept = {
        how: int(subprocess.check_output([sys.executable, "-c", BATCHES, how]))
        for how in ("keep", "return")
    }
    assert kept["keep"] > 64  # what this is for: 120 MiB were freed
    assert kept["return"] < 24


def test_jetson_is_recognised(jetson: Path) -> None:
    machine = this_machine(jetson)
    assert machine.board == "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super"
    assert "nvidia,p3767-0005" in machine.board_ids
    assert machine.l4t == "36.4.3"
    assert machine.power_mode == "25W"
    assert machine.memory_bytes == 7802164 * 1024
    assert machine.cpu_features == ("asimddp",)


def test_a_container_has_the_device_tree_where_it_is_mounted(jetson: Path) -> None:
    """Docker hides /sys/firmware, to which /proc/device-tree is a link there."""
    outside = this_machine(jetson)
    (jetson / "run").mkdir()
    (jetson / "proc/device-tree").rename(jetson / "run/device-tree")
    (jetson / "proc/device-tree").symlink_to("/sys/firmware/devicetree/none")
    assert this_machine(jetson) == outside


def test_power_mode_is_found_by_its_number_not_its_place(jetson: Path) -> None:
    write(jetson, "var/lib/nvpmodel/status", "pmode:0002 fmode:fanNull\n")
    assert this_machine(jetson).power_mode == "MAXN_SUPER"
    write(jetson, "var/lib/nvpmodel/status", "pmode:0007 fmode:fanNull\n")
    assert this_machine(jetson).power_mode is None


@pytest.mark.parametrize(
    ("release", "l4t"),
    [
        ("# R35 (release), REVISION: 6.1, GCID: 1\n", "35.6.1"),
        ("# R39 (release), REVISION: 2.0, GCID: 1\n", "39.2.0"),
        ("nonsense", None),
        ("", None),
    ],
)
def test_release_is_read_from_its_first_line(jetson: Path, release: str, l4t: str | None) -> None:
    write(jetson, "etc/nv_tegra_release", release)
    assert this_machine(jetson).l4t == l4t


def test_empty_root_is_all_unknown(tmp_path: Path) -> None:
    machine = this_machine(tmp_path)
    assert (machine.board, machine.l4t, machine.power_mode) == (None, None, None)
    assert (machine.memory_bytes, machine.board_ids, machine.cpu_features) == (None, (), ())
    assert machine.physical_cores >= 1
    assert machine.usable_cores >= 1


def test_garbage_in_system_files_raises_nothing(jetson: Path) -> None:
    for path in [path for path in jetson.rglob("*") if path.is_file()]:
        for content in (
            b"",
            b"\xff\xfe\0\n",
            b"pmode:x MemTotal: -1 kB < POWER_MODEL ID=",
            bytes(99),
            b"9" * 5000,  # more digits than Python turns into a number
            "\u00b2 \uff11\uff12".encode(),  # digits that are no numbers, or not ours
            b"pmode:" + b"1" * 5000,
        ):
            kept = path.read_bytes()
            path.write_bytes(content)
            this_machine(jetson)
            path.write_bytes(kept)
        path.unlink()
        path.mkdir()  # not even a file
        this_machine(jetson)


def test_this_machine_is_plain_data() -> None:
    values = json.loads(json.dumps(this_machine().to_dict()))
    assert values["packages"]["numpy"]
    assert isinstance(values["gpus"], list)


INTEL = "".join(
    f"processor\t: {number}\nmodel name\t: A CPU @ 2.00GHz\nphysical id\t: {socket}\n"
    f"siblings\t: 4\ncore id\t\t: {core}\nflags\t\t: fpu avx2 avx512f\n\n"
    for number, (socket, core) in enumerate([(0, 0), (0, 1), (0, 0), (0, 1), (1, 0), (1, 0)])
)


def test_two_threads_of_a_core_are_one_core(tmp_path: Path) -> None:
    write(tmp_path, "proc/cpuinfo", INTEL)
    machine = this_machine(tmp_path)
    assert machine.physical_cores == 3  # two in the first socket, one in the second
    assert machine.cpu == "A CPU @ 2.00GHz"
    assert machine.cpu_features == ("avx2", "avx512f")


def test_default_threads_are_the_smaller_of_cores_and_what_may_be_used(tmp_path: Path) -> None:
    write(tmp_path, "proc/cpuinfo", INTEL)
    write(tmp_path, "sys/fs/cgroup/cpu.max", "max 100000\n")
    assert default_threads(tmp_path) == min(3, len(os.sched_getaffinity(0)))
    write(tmp_path, "sys/fs/cgroup/cpu.max", "100000 100000\n")
    assert default_threads(tmp_path) == 1


@pytest.mark.parametrize(
    ("quota", "cores"), [("100000 100000", 1), ("150000 100000", 1), ("20000 100000", 1)]
)
def test_container_quota_cuts_the_cores(tmp_path: Path, quota: str, cores: int) -> None:
    write(tmp_path, "sys/fs/cgroup/cpu.max", f"{quota}\n")
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize("quota", ["max 100000", "", "0 0", "x y", "99900000 100000"])
def test_no_quota_leaves_the_affinity_mask(tmp_path: Path, quota: str) -> None:
    write(tmp_path, "sys/fs/cgroup/cpu.max", f"{quota}\n")
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("max", 2048000),
        ("1000000", 1000000),
        ("9" * 18, 2048000),
        ("9" * 5000, 2048000),
        ("\u00b2", 2048000),
    ],
)
def test_container_limit_cuts_the_memory(tmp_path: Path, limit: str, expected: int) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal:  2000 kB\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", f"{limit}\n")
    assert memory_bytes(tmp_path) == expected


@pytest.mark.parametrize(
    ("limit", "expected"), [("", 62 * 1024), ("max", 62 * 1024), ("9000", 6000), ("4000", 1000)]
)
def test_available_memory_counts_caches_and_the_containers_limit(
    tmp_path: Path, limit: str, expected: int
) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal: 100 kB\nMemFree: 5 kB\nMemAvailable:    62 kB\n")
    for name, text in (("max", limit), ("current", "5000"), ("stat", "anon 3\ninactive_file 2000")):
        write(tmp_path, f"sys/fs/cgroup/memory.{name}", f"{text}\n")
    assert available_bytes(tmp_path) == expected


def test_available_memory_is_unknown_where_the_kernel_does_not_report_it(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None


MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("line", "gpu"),
    [
        (
            "NVIDIA H200, 143771, 570.86.15, 9.0",
            Gpu("NVIDIA H200", 143771 * MIB, "570.86.15", "9.0"),
        ),
        ("Tesla T4, 15360, 535.183.01, 7.5", Gpu("Tesla T4", 15360 * MIB, "535.183.01", "7.5")),
        ("Orin (nvgpu), [N/A], 540.4.0, [N/A]", Gpu("Orin (nvgpu)", None, "540.4.0", None)),
        (
            "NVIDIA GB10, [Not Supported], 580.95.05, 12.1",
            Gpu("NVIDIA GB10", None, "580.95.05", "12.1"),
        ),
    ],
)
def test_line_of_nvidia_smi_is_one_gpu(line: str, gpu: Gpu) -> None:
    assert parse_gpus(line + "\n") == (gpu,)


def test_gpus_keep_their_order() -> None:
    text = "A, 1, 1.0, 8.0\nB, 2, 1.0, 8.9\n"
    assert [gpu.name for gpu in parse_gpus(text)] == ["A", "B"]


@pytest.mark.parametrize(
    "text", ["", "No devices were found\n", "NVIDIA-SMI has failed, because: x\n", "a,b,c,d,e\n"]
)
def test_other_output_of_nvidia_smi_is_not_a_gpu(text: str) -> None:
    assert parse_gpus(text) == ()


@pytest.mark.parametrize(
    ("script", "count"),
    [
        ("echo 'NVIDIA L4, 23034, 550.1, 8.9'", 1),
        ("echo 'NVIDIA L4, 23034, 550.1, 8.9'; exit 9", 0),
        (r"printf '\377\376, 1, 1.0, 8.0\n'", 1),
        ("kill -9 $$", 0),
    ],
    ids=["works", "fails", "not-text", "dies"],
)
def test_a_failing_nvidia_smi_means_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, count: int
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert len(this_machine(tmp_path).gpus) == count


def test_an_nvidia_smi_that_cannot_run_means_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_bytes(b"\x7fELF not really")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert this_machine(tmp_path).gpus == ()
