from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from deploykit.core.machine import (
    JETPACKS,
    Gpu,
    available_bytes,
    default_threads,
    find_jetpack,
    jetpack_of,
    memory_bytes,
    parse_gpus,
    provenance,
    release_numbers,
    this_machine,
    usable_cores,
)

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


def test_jetson_is_recognised_also_in_a_container(jetson: Path) -> None:
    """Docker hides /sys/firmware, to which /proc/device-tree is a link there."""
    machine = this_machine(jetson)
    assert machine.board == "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super"
    assert "nvidia,p3767-0005" in machine.board_ids
    assert machine.l4t == "36.4.3"
    assert machine.power_mode == "25W"
    assert machine.memory_bytes == 7802164 * 1024
    assert machine.cpu_features == ("asimddp",)
    (jetson / "run").mkdir()
    (jetson / "proc/device-tree").rename(jetson / "run/device-tree")
    (jetson / "proc/device-tree").symlink_to("/sys/firmware/devicetree/none")
    assert this_machine(jetson) == machine


@pytest.mark.parametrize(
    ("l4t", "version", "tensorrt"),
    [
        ("35.6.3", "5.1.5", "8.5.2"),
        ("36.4.7", "6.2.1", "10.3.0"),
        ("36.4", "6.1", "10.3.0"),
        ("36.10.0", "6.2.2", "10.3.0"),  # newer than the table; 10 is not before 4
        ("39.2.0", "7.2", "10.16.2"),
        *((release, None, None) for release in (None, "", "R36", "32.7.1", "37.1", "40.0", "36.")),
    ],
)
def test_an_l4t_release_is_found_or_the_last_before_it(
    l4t: str | None, version: str | None, tensorrt: str | None
) -> None:
    found = find_jetpack(l4t)
    assert (found and found.version, found and found.tensorrt) == (version, tensorrt)
    assert version is None or jetpack_of(version) == found
    for key in ("l4t", "version"):
        assert sorted(JETPACKS, key=lambda row: release_numbers(getattr(row, key))) == [*JETPACKS]


def test_empty_root_is_all_unknown(tmp_path: Path) -> None:
    machine = this_machine(tmp_path)
    assert (machine.board, machine.l4t, machine.power_mode) == (None, None, None)
    assert (machine.memory_bytes, machine.board_ids, machine.cpu_features) == (None, (), ())
    assert (machine.physical_cores >= 1, machine.usable_cores >= 1) == (True, True)
    assert available_bytes(tmp_path) is None


def test_power_mode_is_found_by_its_number_and_garbage_in_system_files_raises_nothing(
    jetson: Path,
) -> None:
    for status, mode in (("0002", "MAXN_SUPER"), ("0007", None)):
        write(jetson, "var/lib/nvpmodel/status", f"pmode:{status} fmode:fanNull\n")
        assert this_machine(jetson).power_mode == mode
    for path in [path for path in jetson.rglob("*") if path.is_file()]:
        for content in (
            b"",
            b"\xff\xfe\0\n",
            b"pmode:x MemTotal: -1 kB < POWER_MODEL ID=",
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


INTEL = "".join(
    f"processor\t: {number}\nmodel name\t: A CPU @ 2.00GHz\nphysical id\t: {socket}\n"
    f"siblings\t: 4\ncore id\t\t: {core}\nflags\t\t: fpu avx2 avx512f\n\n"
    for number, (socket, core) in enumerate([(0, 0), (0, 1), (0, 0), (0, 1), (1, 0), (1, 0)])
)


def test_two_threads_of_a_core_are_one_core(tmp_path: Path) -> None:
    write(tmp_path, "proc/cpuinfo", INTEL)
    machine = this_machine(tmp_path)
    assert machine.physical_cores == 3  # two in the first socket, one in the second
    assert (machine.cpu, machine.cpu_features) == ("A CPU @ 2.00GHz", ("avx2", "avx512f"))


ALL = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        *((f"{quota} 100000", 1) for quota in (100000, 150000, 20000)),
        *((quota, ALL) for quota in ("max 100000", "", "0 0", "x y", "99900000 100000")),
    ],
)
def test_container_quota_cuts_the_cores(tmp_path: Path, quota: str, cores: int) -> None:
    write(tmp_path, "proc/cpuinfo", INTEL)
    write(tmp_path, "sys/fs/cgroup/cpu.max", f"{quota}\n")
    assert (usable_cores(tmp_path), default_threads(tmp_path)) == (cores, min(3, cores))


@pytest.mark.parametrize(
    ("limit", "whole", "available"),
    [
        ("max", 100 * 1024, 62 * 1024),
        ("", 100 * 1024, 62 * 1024),
        ("9000", 9000, 6000),
        ("4000", 4000, 1000),
        *((digits, 100 * 1024, 62 * 1024) for digits in ("9" * 18, "9" * 5000, "\u00b2")),
    ],
)
def test_a_containers_limit_cuts_the_memory_and_caches_are_available(
    tmp_path: Path, limit: str, whole: int, available: int
) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal: 100 kB\nMemFree: 5 kB\nMemAvailable:    62 kB\n")
    for name, text in (("max", limit), ("current", "5000"), ("stat", "anon 3\ninactive_file 2000")):
        write(tmp_path, f"sys/fs/cgroup/memory.{name}", f"{text}\n")
    assert (memory_bytes(tmp_path), available_bytes(tmp_path)) == (whole, available)


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("NVIDIA H200, 143771, 570.8, 9.0", [Gpu("NVIDIA H200", 143771 << 20, "570.8", "9.0")]),
        ("Orin (nvgpu), [N/A], 540.4.0, [N/A]", [Gpu("Orin (nvgpu)", None, "540.4.0", None)]),
        ("GB10, [Not Supported], 580.9, 12.1", [Gpu("GB10", None, "580.9", "12.1")]),
        (
            "A, 1, 1.0, 8.0\nB, 2, 1.0, 8.9",
            [Gpu("A", 1 << 20, "1.0", "8.0"), Gpu("B", 2 << 20, "1.0", "8.9")],
        ),
        *((text, []) for text in ("", "No devices were found", "NVIDIA-SMI has failed, as: x")),
        ("a,b,c,d,e", []),
    ],
)
def test_lines_of_nvidia_smi_are_gpus_in_their_order(text: str, gpus: list[Gpu]) -> None:
    assert parse_gpus(f"{text}\n") == tuple(gpus)


SHELL = b"#!/bin/sh\n"


@pytest.mark.parametrize(
    ("script", "count"),
    [
        (SHELL + b"printf '\\377\\376, 1, 1.0, 8.0\\n'", 1),  # not UTF-8
        (SHELL + b"echo 'NVIDIA L4, 23034, 550.1, 8.9'; exit 9", 0),
        (b"\x7fELF not really", 0),
    ],
)
def test_a_failing_nvidia_smi_means_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: bytes, count: int
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_bytes(script)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert len(this_machine(tmp_path).gpus) == count


def test_clocks_are_read_over_all_cpus_and_left_out_where_they_are_not_known(
    tmp_path: Path,
) -> None:
    folder = "sys/devices/system/cpu"
    for text in ("", "garbage", "-1", "²"):
        write(tmp_path, f"{folder}/cpufreq/policy0/scaling_max_freq", text)
        write(tmp_path, f"{folder}/cpufreq/boost", text)
        assert "clocks" not in provenance(tmp_path, tmp_path)
    for name, text in {
        "cpufreq/policy0/scaling_governor": "performance\n",
        "cpufreq/policy0/scaling_min_freq": "800000\n",
        "cpufreq/policy0/scaling_max_freq": "3500000\n",
        "cpufreq/policy4/scaling_governor": "powersave\n",
        "cpufreq/policy4/scaling_max_freq": "4200000\n",
        "intel_pstate/no_turbo": "1\n",
    }.items():
        write(tmp_path, f"{folder}/{name}", text)
    assert provenance(tmp_path, tmp_path)["clocks"] == {
        "governor": "performance, powersave",
        "min_mhz": 800.0,
        "max_mhz": 4200.0,
        "turbo": "off",
    }


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    command = ["git", *who, "-C", str(folder), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="no git on PATH")
def test_the_commit_of_the_folder_is_named_and_no_program_of_a_checkout_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "project" not in provenance(tmp_path)
    git(tmp_path, "init", "-q")
    assert "project" not in provenance(tmp_path)  # no commit yet
    write(tmp_path, "a.txt", "1")
    git(tmp_path, "add", "a.txt")
    git(tmp_path, "commit", "-qm", "One")
    write(tmp_path, ".gitattributes", "*.txt filter=own\n")
    trap = tmp_path / "trap.sh"
    write(tmp_path, "trap.sh", f"#!/bin/sh\ntouch {tmp_path}/started\ncat\n")
    trap.chmod(0o755)
    git(tmp_path, "config", "filter.own.clean", str(trap))
    write(tmp_path, "a.txt", "2")
    commit = git(tmp_path, "rev-parse", "HEAD")
    git(tmp_path, "config", "core.fsmonitor", str(trap))
    assert provenance(tmp_path)["project"] == {"commit": commit}
    assert not (tmp_path / "started").exists()
    monkeypatch.setenv("PATH", "")
    assert "project" not in provenance(tmp_path)


def test_the_variables_of_numeric_libraries_are_kept_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    found = provenance()
    assert found["environment"]["OMP_NUM_THREADS"] == "3"
    assert "hidden" not in str(found)
    assert found["affinity"][0].isdigit()
    assert found["host"]
