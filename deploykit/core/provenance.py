"""Record what else a measurement depends on: the code's commit, the host, its clocks, its settings.

Reading never raises: what is not known is left out. Tests pass a `root` in place of `/`.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from deploykit.core.machine import file_text

_VARIABLES = ("OMP_", "MKL_", "OPENBLAS_", "KMP_", "ORT_", "CUDA_VISIBLE_", "CUDA_LAUNCH_")
_QUIET = ("--no-optional-locks", "-c", "core.fsmonitor=false")  # writes nothing, starts no program
_GIT_S = 5.0  # a checkout on a slow disk may take longer, and is then not known


def provenance(folder: Path = Path(), root: Path = Path("/")) -> dict[str, Any]:
    """`project`: the commit of the checkout that holds `folder`, the one being measured.

    `deploykit`: its own commit, where it runs from a checkout. `clocks`: governor, limits in MHz
    and turbo of the CPU. `affinity`: the CPUs that this process may use. `environment`: variables
    that set threads and GPUs of numeric libraries. `bench` adds `inputs`: where they are from, and
    their hash.
    """
    package = Path(__file__).resolve().parents[1]
    own = package.parent / "pyproject.toml"  # an installed package may lie in another's checkout
    found = {
        "project": _commit(folder),
        "deploykit": _commit(package, ours=True) if own.is_file() else {},
        "host": platform.node(),
        "clocks": _clocks(root),
        "affinity": _ranges(_affinity()),
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)
        },
    }
    return {name: value for name, value in found.items() if value}


def _commit(folder: Path, *, ours: bool = False) -> dict[str, Any]:
    """Return the commit, {} without one or without git; of our own checkout, whether files differ.

    `git status` runs the filters that a checkout's own configuration names, so it never runs in a
    folder that may be a stranger's.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit or not ours:
        return {"commit": commit} if commit else {}
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit} | ({} if changed is None else {"changed": bool(changed)})


def _git(folder: Path, *words: str) -> str | None:
    command = ["git", *_QUIET, "-C", str(folder.absolute()), *words]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()


def _clocks(root: Path) -> dict[str, Any]:
    cpus = root / "sys/devices/system/cpu"
    policies = sorted(cpus.glob("cpufreq/policy*"))

    def each(name: str) -> list[str]:
        return list(dict.fromkeys(filter(None, (file_text(p / name).strip() for p in policies))))

    lows, highs = ([_mhz(t) for t in each(f"scaling_{end}_freq")] for end in ("min", "max"))
    boost = file_text(cpus / "cpufreq/boost").strip()
    no_turbo = file_text(cpus / "intel_pstate/no_turbo").strip()
    found: Mapping[str, Any] = {
        "governor": ", ".join(each("scaling_governor")),
        "driver": ", ".join(each("scaling_driver")),
        "min_mhz": min(filter(None, lows), default=None),
        "max_mhz": max(filter(None, highs), default=None),
        "turbo": {"1": "on", "0": "off"}.get(boost) or {"0": "on", "1": "off"}.get(no_turbo),
    }
    return {name: value for name, value in found.items() if value}


def _mhz(text: str) -> float | None:
    return int(text) / 1e3 if text.isascii() and text.isdigit() else None


def _affinity() -> Iterable[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 0)


def _ranges(numbers: Iterable[int]) -> str:
    """{0, 1, 2, 5} -> "0-2,5", as taskset and cgroups write it."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
