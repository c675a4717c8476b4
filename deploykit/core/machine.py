"""Describe this machine: processor, memory, GPUs, Jetson release, installed packages.

Reading never raises: unknown values are None or empty. Tests pass a `root` in place of `/`.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploykit.core.json_value import Record
from deploykit.core.runtime import ALL

PACKAGES = (
    "deploykit",
    "numpy",
    "onnx",
    *(package for each in ALL for package in each.packages),
    "onnxscript",
    "scikit-learn",
)
_CPU_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "amx_int8",
    "avx512_bf16",
    "asimddp",
    "i8mm",
)
_M_MMAP_THRESHOLD = -3  # of mallopt(3)
_QUERY = "name,memory.total,driver_version,compute_cap"


@dataclass(frozen=True)
class Gpu(Record):
    """One NVIDIA GPU as its driver reports it; None where not reported (memory on a Jetson)."""

    name: str
    memory_bytes: int | None
    driver: str
    compute_capability: str | None


@dataclass(frozen=True)
class Machine(Record):
    """What this machine is, as far as it can be read without privileges."""

    system: str
    architecture: str
    python: str
    cpu: str
    physical_cores: int
    usable_cores: int  # what this process may use: affinity and container limits
    cpu_features: tuple[str, ...]
    memory_bytes: int | None
    gpus: tuple[Gpu, ...]
    board: str | None  # a Jetson's model, from its device tree
    board_ids: tuple[str, ...]  # the device tree's `compatible`, as in "nvidia,p3767-0005"
    l4t: str | None
    power_mode: str | None
    packages: Mapping[str, str]


def this_machine(root: Path = Path("/")) -> Machine:
    """Read the machine. Takes about 50 ms where `nvidia-smi` exists, 5 ms where it does not."""
    cpuinfo = file_text(root / "proc/cpuinfo")
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        python=platform.python_version(),
        cpu=_cpu_name(cpuinfo),
        physical_cores=_physical_cores(cpuinfo),
        usable_cores=usable_cores(root),
        cpu_features=cpu_features(cpuinfo),
        memory_bytes=memory_bytes(root),
        gpus=_gpus(),
        board=file_text(root / "proc/device-tree/model").strip("\0 \n") or None,
        board_ids=tuple(file_text(root / "proc/device-tree/compatible").replace("\0", " ").split()),
        l4t=_l4t(file_text(root / "etc/nv_tegra_release")),
        power_mode=_power_mode(root),
        packages=_packages(),
    )


def file_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cpu_name(cpuinfo: str) -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def cpu_features(cpuinfo: str) -> tuple[str, ...]:
    """Those of the features that decide speed and exactness, from the text of /proc/cpuinfo."""
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    flags = set(match[1].split()) if match else set()
    return tuple(flag for flag in _CPU_FLAGS if flag in flags)


def _physical_cores(cpuinfo: str) -> int:
    """Cores, not hyper-threads: pairs of (physical id, core id); else the number of processors."""
    pairs = re.findall(
        r"^physical id\s*:\s*(\d+)$.*?^core id\s*:\s*(\d+)$", cpuinfo, re.MULTILINE | re.DOTALL
    )
    return len(set(pairs)) or os.cpu_count() or 1


def usable_cores(root: Path = Path("/")) -> int:
    """Processors in this process's affinity mask, cut by a cgroup v2 CPU quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        cores = os.cpu_count() or 1
    quota, _, period = file_text(root / "sys/fs/cgroup/cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def default_threads(root: Path = Path("/")) -> int:
    """CPU threads for one call: one per core, as hyper-threads share a core's arithmetic."""
    return min(usable_cores(root), _physical_cores(file_text(root / "proc/cpuinfo")))


def return_large_blocks(nbytes: int = 1 << 20) -> None:
    """Make malloc return freed blocks of `nbytes` or more to the system, from now on.

    glibc raises its threshold with each such block, up to 32 MiB (mallopt(3)), and keeps smaller
    ones: a server would keep the memory of its largest batches. Does nothing in another C library.
    """
    import ctypes  # costs more than the rest of this file

    try:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, nbytes)
    except (AttributeError, OSError):
        return


def memory_bytes(root: Path = Path("/")) -> int | None:
    """This machine's memory, or the container's limit (cgroup v2) where that is less."""
    match = re.search(r"^MemTotal:\s*(\d+) kB", file_text(root / "proc/meminfo"), re.MULTILINE)
    total = int(match[1]) * 1024 if match else None
    limit = file_text(root / "sys/fs/cgroup/memory.max").strip()
    if total is not None and limit.isdigit():
        return min(total, int(limit))
    return total


def _gpus() -> tuple[Gpu, ...]:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return ()
    command = [smi, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpus(answer.stdout.decode(errors="replace"))


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Read nvidia-smi's name, memory.total (MiB), driver_version, compute_cap: CSV, no units."""
    gpus = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 4:
            continue
        name, memory, driver, capability = cells
        gpus.append(
            Gpu(
                name,
                int(memory) * 1024 * 1024 if memory.isdigit() else None,
                driver,
                capability if re.fullmatch(r"\d+\.\d+", capability) else None,
            )
        )
    return tuple(gpus)


def _l4t(release: str) -> str | None:
    """`# R36 (release), REVISION: 4.3, ...` is 36.4.3."""
    match = re.match(r"# R(\d+) \(release\), REVISION: ([\d.]+)", release)
    return f"{match[1]}.{match[2]}" if match else None


def _power_mode(root: Path) -> str | None:
    """The active nvpmodel mode of a Jetson, resolved to its name."""
    status = re.search(r"pmode:(\d+)", file_text(root / "var/lib/nvpmodel/status"))
    if status is None:
        return None
    pattern = rf"< POWER_MODEL ID={int(status[1])} NAME=(\S+) >"
    match = re.search(pattern, file_text(root / "etc/nvpmodel.conf"))
    return match[1] if match else None


def _packages() -> dict[str, str]:
    from importlib import metadata  # a tenth of the time of `--help`, which does not need it

    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def tool_versions(*packages: str) -> dict[str, str]:
    """Versions of deploykit and of the installed ones of `packages`: a manifest's made_with."""
    found = _packages()
    return {name: found[name] for name in ("deploykit", *packages) if name in found}
