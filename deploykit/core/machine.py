"""Describe this machine: processor, memory, GPUs, JetPack release, packages; and its free memory.

Reading never raises: unknown values are None or empty. Tests pass a `root` in place of `/`.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import re
import resource
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploykit.core.errors import OutOfMemory, first_line
from deploykit.core.json_value import Record
from deploykit.core.runtime import ALL

PACKAGES = (
    "deploykit",
    "numpy",
    "onnx",
    *(package for each in ALL for package in each.packages),
    "onnxscript",
    "scikit-learn",
    "nvidia-cuda-runtime",
    "nvidia-cuda-runtime-cu12",
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
_M_MMAP_THRESHOLD = -3  # see mallopt(3)
_QUERY, _CSV = "name,memory.total,driver_version,compute_cap", "--format=csv,noheader,nounits"


@dataclass(frozen=True)
class Gpu(Record):
    """One NVIDIA GPU as its driver reports it; None where not reported (memory on a Jetson)."""

    name: str
    memory_bytes: int | None
    driver: str
    compute_capability: str | None


@dataclass(frozen=True)
class Machine(Record):
    """Hardware and software of this machine, as far as they can be read without privileges."""

    system: str
    architecture: str
    python: str
    cpu: str
    physical_cores: int
    usable_cores: int  # after affinity and container limits
    cpu_features: tuple[str, ...]
    memory_bytes: int | None
    gpus: tuple[Gpu, ...]
    board: str | None  # a Jetson's model in its device tree
    board_ids: tuple[str, ...]  # `compatible` in the device tree: "nvidia,p3767-0005"
    l4t: str | None  # the release that the board reports
    jetpack: str | None  # the JetPack release of `l4t`
    power_mode: str | None
    packages: Mapping[str, str]


def this_machine(root: Path = Path("/")) -> Machine:
    """Read the machine. Takes about 50 ms where `nvidia-smi` exists, 5 ms where it does not."""
    cpuinfo = file_text(root / "proc/cpuinfo")
    model_name = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    # "# R36 (release), REVISION: 4.3, ..." is 36.4.3
    tegra = file_text(root / "etc/nv_tegra_release")
    release = re.match(r"# R([0-9]{1,4}) \(release\), REVISION: ([0-9.]{1,20})", tegra)
    l4t = f"{release[1]}.{release[2]}" if release else None
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        python=platform.python_version(),
        cpu=model_name[1].strip() if model_name else platform.processor() or platform.machine(),
        physical_cores=_physical_cores(cpuinfo),
        usable_cores=usable_cores(root),
        cpu_features=cpu_features(cpuinfo),
        memory_bytes=memory_bytes(root),
        gpus=parse_gpus(_output("nvidia-smi", f"--query-gpu={_QUERY}", _CSV, limit_s=10.0) or ""),
        board=board_model(root),
        board_ids=tuple(_device_tree(root, "compatible").replace("\0", " ").split()),
        l4t=l4t,
        jetpack=jetpack_name(l4t),
        power_mode=power_mode(root),
        packages=_packages(),
    )


def file_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _device_tree(root: Path, name: str) -> str:
    """Read a board's property; a bundle's container has the device tree in /run/device-tree."""
    return file_text(root / "proc/device-tree" / name) or file_text(root / "run/device-tree" / name)


def board_model(root: Path) -> str | None:
    """Return a Jetson's model as its device tree names it."""
    return _device_tree(root, "model").strip("\0 \n") or None


def natural_number(text: str) -> int | None:
    """Return a system file's number; None for anything else, damaged content of any length too."""
    found = re.fullmatch(r"\s*([0-9]{1,18})\s*", text)
    return int(found[1]) if found else None


def cpu_features(cpuinfo: str) -> tuple[str, ...]:
    """Return the CPU features that decide speed and exactness, from the text of /proc/cpuinfo."""
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    flags = set(match[1].split()) if match else set()
    return tuple(flag for flag in _CPU_FLAGS if flag in flags)


def _physical_cores(cpuinfo: str) -> int:
    """Count the cores by (physical id, core id); without these, the logical processors."""
    pairs = re.findall(
        r"^physical id\s*:\s*(\d+)$.*?^core id\s*:\s*(\d+)$", cpuinfo, re.MULTILINE | re.DOTALL
    )
    return len(set(pairs)) or os.cpu_count() or 1


def usable_cores(root: Path = Path("/")) -> int:
    """Return the processors in this process's affinity mask, limited by a cgroup v2 CPU quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        cores = os.cpu_count() or 1
    quota, _, period = file_text(root / "sys/fs/cgroup/cpu.max").strip().partition(" ")
    share, of = natural_number(quota), natural_number(period)
    if share is not None and of:
        cores = min(cores, max(1, share // of))
    return cores


def default_threads(root: Path = Path("/")) -> int:
    """Return the CPU threads for one call: one per core, as hyper-threads share its arithmetic."""
    return min(usable_cores(root), _physical_cores(file_text(root / "proc/cpuinfo")))


def return_large_blocks() -> None:
    """Make malloc return freed blocks of 1 MiB or more to the system, from now on.

    glibc raises its threshold with each such block, up to 32 MiB (mallopt(3)), and keeps smaller
    ones: a server would keep the memory of its largest batches. Does nothing in another C library.
    """
    import ctypes  # late: its import costs more than the rest of this file

    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def memory_bytes(root: Path = Path("/")) -> int | None:
    """Return this machine's memory, or the container's limit (cgroup v2) if that is less."""
    total = _meminfo_bytes(root, "MemTotal")
    limit = natural_number(file_text(root / "sys/fs/cgroup/memory.max"))
    return total if total is None or limit is None else min(total, limit)


def _meminfo_bytes(root: Path, name: str) -> int | None:
    text = file_text(root / "proc/meminfo")
    match = re.search(rf"^{name}:\s*([0-9]{{1,15}}) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Read nvidia-smi's name, memory.total (MiB), driver_version, compute_cap: CSV, no units."""
    rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines())
    found = []
    for name, memory, driver, capability in (row for row in rows if len(row) == 4):
        mib, known = natural_number(memory), re.fullmatch(r"\d+\.\d+", capability)
        memory_bytes = None if mib is None else mib << 20
        found.append(Gpu(name, memory_bytes, driver, capability if known else None))
    return tuple(found)


def power_mode(root: Path) -> str | None:
    """Return the name of a Jetson's active nvpmodel mode."""
    status = re.search(r"pmode:([0-9]{1,9})", file_text(root / "var/lib/nvpmodel/status"))
    if status is None:
        return None
    pattern = rf"< POWER_MODEL ID={int(status[1])} NAME=(\S+) >"
    match = re.search(pattern, file_text(root / "etc/nvpmodel.conf"))
    return match[1] if match else None


def _packages() -> dict[str, str]:
    from importlib import metadata  # late: it takes a tenth of the time of `--help`

    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def tool_versions(*packages: str) -> dict[str, str]:
    """Return the versions of deploykit and of the installed `packages`: a manifest's made_with."""
    found = _packages()
    return {name: found[name] for name in ("deploykit", *packages) if name in found}


_VARIABLES = ("OMP_", "MKL_", "OPENBLAS_", "KMP_", "ORT_", "CUDA_VISIBLE_", "CUDA_LAUNCH_")
_QUIET = ("--no-optional-locks", "-c", "core.fsmonitor=false")  # git writes and starts nothing
_GIT_S = 5.0  # on a slow disk git may take longer: the commit is then left out


def provenance(folder: Path = Path(), root: Path = Path("/")) -> dict[str, Any]:
    """Return what a measurement depends on besides the machine; unknown values are left out.

    `project`: the commit of the measured checkout, which holds `folder`. `deploykit`: its own
    commit, if it runs from a checkout. `clocks`: governor, limits in MHz and turbo of the CPU.
    `affinity`: the CPUs that this process may use. `environment`: variables that set threads and
    GPUs of numeric libraries. `bench` adds `inputs`: their origin and their hash.
    """
    package = Path(__file__).resolve().parents[1]
    affinity = re.search(r"Cpus_allowed_list:\s*(\S+)", file_text(root / "proc/self/status"))
    own = package.parent / "pyproject.toml"  # an installed package may be inside another checkout
    found = {
        "project": _commit(folder),
        "deploykit": _commit(package, ours=True) if own.is_file() else {},
        "host": platform.node(),
        "clocks": _clocks(root),
        "affinity": affinity[1] if affinity else "",
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)
        },
    }
    return {name: value for name, value in found.items() if value}


def _commit(folder: Path, *, ours: bool = False) -> dict[str, Any]:
    """Return the commit, {} if unknown; for our own checkout (`ours`) also whether files differ.

    `git status` runs filters that a checkout's own configuration names, so it never runs in a
    folder that may be somebody else's.
    """
    git = ("git", *_QUIET, "-C", str(folder.absolute()))
    if not (commit := _output(*git, "rev-parse", "HEAD")):
        return {}
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no") if ours else None
    return {"commit": commit} | ({} if changed is None else {"changed": bool(changed)})


def _output(*command: str, limit_s: float = _GIT_S) -> str | None:
    """Return what a program prints; None if it is absent, fails, or takes longer."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=limit_s, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()


def _clocks(root: Path) -> dict[str, Any]:
    cpus = root / "sys/devices/system/cpu"
    names = ("scaling_governor", "scaling_driver", "scaling_min_freq", "scaling_max_freq")
    governors, drivers, lows, highs = (
        dict.fromkeys(file_text(each).strip() for each in sorted(cpus.glob(f"cpufreq/policy*/{n}")))
        for n in names
    )
    boost = file_text(cpus / "cpufreq/boost").strip()
    no_turbo = file_text(cpus / "intel_pstate/no_turbo").strip()
    low, high = ([n / 1e3 for n in map(natural_number, khz) if n] for khz in (lows, highs))
    found: Mapping[str, Any] = {
        "governor": ", ".join(filter(None, governors)),
        "driver": ", ".join(filter(None, drivers)),
        "min_mhz": min(low, default=None),
        "max_mhz": max(high, default=None),
        "turbo": {"1": "on", "0": "off"}.get(boost) or {"0": "on", "1": "off"}.get(no_turbo),
    }
    return {name: value for name, value in found.items() if value}


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


# What a Jetson's L4T release brings, TensorRT above all. A board reports the L4T release
# (`# R36 (release), REVISION: 4.3` is 36.4.3); the JetPack name is derived from it, never the
# reverse, since some JetPack releases came with several. Sources: NVIDIA's archive of JetPack
# downloads and the release notes of meta-tegra (docs/jetson.md).


@dataclass(frozen=True)
class JetPack:
    """One release. `l4t` is its first L4T release; it reaches to the next row of the same major."""

    version: str
    l4t: str
    python: str
    tensorrt: str
    compute_capabilities: tuple[str, ...]  # 7.2 is Xavier, 8.7 Orin, 11.0 Thor


_5 = ("3.8", "8.5.2", ("7.2", "8.7"))
_6 = ("3.10", "10.3.0", ("8.7",))
_7_1 = ("3.12", "10.13.3", ("11.0",))
_7_2 = ("3.12", "10.16.2", ("8.7", "11.0"))
JETPACKS = (
    JetPack("5.1", "35.2.1", *_5),
    JetPack("5.1.1", "35.3.1", *_5),
    JetPack("5.1.2", "35.4.1", *_5),
    JetPack("5.1.3", "35.5.0", *_5),
    JetPack("5.1.4", "35.6.0", *_5),
    JetPack("5.1.5", "35.6.1", *_5),
    JetPack("5.1.6", "35.6.4", *_5),
    JetPack("6.0", "36.2.0", "3.10", "8.6.2", ("8.7",)),  # 36.2.0 was a preview
    JetPack("6.1", "36.4.0", *_6),
    JetPack("6.2", "36.4.3", *_6),
    JetPack("6.2.1", "36.4.4", *_6),
    JetPack("6.2.2", "36.5.0", *_6),
    JetPack("7.0", "38.2.0", *_7_1),
    JetPack("7.1", "38.4.0", *_7_1),
    JetPack("7.2", "39.0", *_7_2),  # 39.0 was early access
    JetPack("7.2.1", "39.2.1", *_7_2),
)


def release_numbers(release: str) -> tuple[int, ...]:
    """Return `36.4` as (36, 4, 0), at least three numbers, to compare; () for anything else."""
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})*", release):
        return ()
    found = tuple(map(int, release.split(".")))
    return found + (0,) * (3 - len(found))


def find_jetpack(l4t: str | None) -> JetPack | None:
    """Return the JetPack release of an L4T release, or the last one before it of the same major.

    Return None if `l4t` is not a release, has an unknown major, or is older than the table.
    """
    wanted = release_numbers(l4t or "")
    rows = [each for each in JETPACKS if release_numbers(each.l4t)[:1] == wanted[:1]]
    return next((each for each in reversed(rows) if release_numbers(each.l4t) <= wanted), None)


def jetpack_name(l4t: str | None) -> str | None:
    """Return the JetPack version of an L4T release; `6.2.2 or later` if the table lacks it."""
    row = find_jetpack(l4t)
    if row is None:
        return None
    newer = release_numbers(l4t or "") > release_numbers(row.l4t)
    return f"{row.version} or later" if newer else row.version


def jetpack_of(version: str) -> JetPack | None:
    """Return the row of a JetPack version, such as `6.2.1`."""
    return next((each for each in JETPACKS if each.version == version), None)


# Free memory, and the error that names the sizes of what does not fit.

USE_LESS = (
    "use a smaller or a quantised model or a smaller batch, stop other programs, or allow more "
    "memory (`ulimit -v`, a container's limit)"
)
# messages about missing memory: of C++, ONNX Runtime, PyTorch, and of starting a thread
_NO_MEMORY = re.compile(
    "bad_alloc|[Ff]ailed to allocate memory|not enough memory|can't allocate memory"
    "|Cannot allocate memory|unable to mmap|Resource temporarily unavailable|can't start new thread"
)
_LARGE_BYTES = 1 << 28  # smaller arrays are not compared with the free memory
# Where CPU and GPU share memory, the parser, the builder and the plan each hold the weights, and
# the builder loads libraries ("Init builder kernel library: CPU +666 MiB", TensorRT 8.6).
_COPIES, _BUILDER_BYTES = 3, 1 << 30
_NUMPY_ASKED = re.compile(r"Unable to allocate ([\d.]+ \w+)")
ASKED_BYTES = re.compile(r"(?:requested buffer of size|smaller than requested bytes of) (\d+)")


def builder_bytes(weights_bytes: int, shared: bool) -> int:
    """Return what a TensorRT build holds on the device: all copies of the weights, the builder.

    `shared`: the CPU's memory is the GPU's, so what the builder holds there counts too.
    """
    return _COPIES * weights_bytes + _BUILDER_BYTES if shared else weights_bytes


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory a process can still get without swapping, within a cgroup v2 limit."""
    available, group = _meminfo_bytes(root, "MemAvailable"), root / "sys/fs/cgroup"
    read = (file_text(group / f"memory.{name}") for name in ("max", "current"))
    limit, used = map(natural_number, read)
    if available is None or limit is None or used is None:
        return available
    stat = file_text(group / "memory.stat")
    cache = re.search(r"^inactive_file ([0-9]{1,18})$", stat, re.MULTILINE)
    free = limit - used + (int(cache[1]) if cache else 0)
    return min(available, max(0, free))


def free_bytes() -> int | None:
    """Return the memory this process can still get: the system's, or by its limits (`ulimit`)."""
    status = file_text(Path("/proc/self/status"))
    found = [available_bytes()]
    for field, which in (("VmSize", resource.RLIMIT_AS), ("VmData", resource.RLIMIT_DATA)):
        limit, used = resource.getrlimit(which)[0], re.search(rf"{field}:\s*(\d+) kB", status)
        if limit != resource.RLIM_INFINITY and used:
            found.append(max(0, limit - int(used[1]) * 1024))
    return min((each for each in found if each is not None), default=None)


def does_not_fit(where: object, what: str = "", files: Iterable[Path] = ()) -> OutOfMemory:
    """Return the error for missing memory; `where` begins it, `what` is a library's message."""
    asked = ASKED_BYTES.search(what)
    sizes = [f"{int(asked[1]) / 2**20:,.1f} MiB were needed at once"] if asked else []
    sizes += [f"{size} were needed at once" for size in _NUMPY_ASKED.findall(what)]
    if held := sum(each.stat().st_size for each in files if each.is_file()):
        sizes.append(f"{held / 2**20:,.1f} MiB are in its files, to load it takes up to twice that")
    if (free := free_bytes()) is not None:
        sizes.append(f"{free / 2**20:,.1f} MiB are free")
    text = f"{where}: does not fit into memory" if str(where) else "not enough memory"
    return OutOfMemory(f"{text}: {'; '.join(sizes)}", hint=USE_LESS)


def check_fits(what: str, nbytes: int) -> None:
    """Raise OutOfMemory for arrays that the free memory cannot hold."""
    if nbytes > _LARGE_BYTES and nbytes > (free_bytes() or nbytes):
        raise does_not_fit(f"{what} of {nbytes / 2**20:,.0f} MiB")


def lacks_memory(exc: BaseException) -> bool:
    """Return whether `exc` is a MemoryError, or what a library raises in its place."""
    return isinstance(exc, MemoryError) or bool(_NO_MEMORY.search(str(exc)))


@contextlib.contextmanager
def memory_errors(where: object, files: Iterable[Path] = ()) -> Iterator[None]:
    """Turn MemoryError, and what libraries raise in its place, into OutOfMemory."""
    try:
        yield
    except Exception as exc:
        if isinstance(exc, OutOfMemory) or not lacks_memory(exc):
            raise
        raise does_not_fit(where, first_line(exc), files) from exc


def version_numbers(version: str) -> tuple[int, ...]:
    """Return (10, 13, 3) for "10.13.3.post1"; empty if `version` does not begin with a number."""
    match = re.match(r"\d{1,6}(\.\d{1,6})*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
