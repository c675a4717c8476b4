"""Report what this machine has, and which commands will therefore work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from deploykit.core.errors import Unsupported
from deploykit.core.extras import install_command, install_hint, installed
from deploykit.core.json_value import Record
from deploykit.core.machine import (
    JETPACKS,
    Gpu,
    JetPack,
    Machine,
    file_text,
    find_jetpack,
    release_numbers,
    this_machine,
    version_numbers,
)
from deploykit.core.profile import Profile, recognise
from deploykit.core.runtime import ALL, RUNTIMES
from deploykit.engines.devices import GpuState, read_gpus
from deploykit.engines.tensorrt.compatibility import LEAST_DRIVERS

# command -> modules that it needs beyond the base
NEEDS = {
    "inspect, profiles, load": (),
    "quantize, predict, bench, build --profile cpu": ("onnxruntime",),
    "serve": ("onnxruntime", "httptools"),
    "export": ("torch", "onnxscript", "onnxruntime"),
    "train": ("torch", "sklearn"),
    "demo": ("torch", "onnxscript", "onnxruntime", "sklearn", "httptools"),
    "build --check": ("tensorrt",),
}


@dataclass(frozen=True)
class Check:
    """A command, and whether it works here; `why` says what is missing."""

    command: str
    works: bool
    why: str


@dataclass(frozen=True)
class Health(Record):
    """The machine and its state, ONNX Runtime's providers, the checks and warnings.

    `profile`: the name of the profile that describes this machine, None where none does; `why`: how
    it was recognised. `gpus`: the state of each GPU now.
    """

    machine: Machine
    profile: str | None
    why: str
    gpus: tuple[GpuState, ...]
    providers: tuple[str, ...]
    checks: tuple[Check, ...]
    warnings: tuple[str, ...]


def doctor(root: Path = Path("/")) -> Health:
    """Look at this machine. Imports onnxruntime where it is installed, to ask for its providers."""
    machine, gpus = this_machine(root), read_gpus(root)
    if not machine.gpus:  # without nvidia-smi, in a container say
        found = [gpu for gpu in gpus if gpu.source == "nvml"]
        listed = tuple(Gpu(gpu.name, gpu.memory_total_bytes, "not known", None) for gpu in found)
        machine = replace(machine, gpus=listed)
    profile, why = recognise(machine)
    providers: tuple[str, ...] = ()
    warnings = list(profile_differences(profile, machine)) if profile else []
    warnings += jetson_faults(machine, root)
    warnings += [
        f"{gpu.name} lowers its clocks now: {', '.join(gpu.throttled)}"
        for gpu in gpus
        if gpu.throttled
    ]
    if installed("onnxruntime"):
        try:
            from deploykit.engines.onnxruntime.engine import providers as ask

            providers = ask()
        except Unsupported as exc:
            warnings.append(exc.message)
    if {"onnxruntime", "onnxruntime-gpu"} <= set(machine.packages):
        warnings.append(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other; "
            "uninstall both, then install one"
        )
    if machine.gpus and not machine.l4t and providers and "CUDAExecutionProvider" not in providers:
        warnings.append(
            "a GPU is here, but onnxruntime is the CPU build: " + install_command("gpu")
        )
    checks = [_check(command, needs) for command, needs in NEEDS.items()]
    for each in ALL:  # those with engines of their own
        if each.builder and each.opens[0] != "onnx":
            check = _check(f"build, bench, serve of {each.title} engines", each.modules)
            if not (each.on_cpu or machine.gpus or gpus):
                check = Check(check.command, False, "no NVIDIA GPU here; --profile cpu works")
            checks.append(check)
    name = profile.name if profile else None
    return Health(machine, name, why, gpus, providers, tuple(checks), tuple(warnings))


def _check(command: str, needs: tuple[str, ...]) -> Check:
    missing = [name for name in needs if not installed(name)]
    why = f"{', '.join(missing)}: {install_hint(*missing)}" if missing else ""
    return Check(command, not missing, why)


# What differs from the profile that describes this machine, one sentence each

_OLDEST_TENSORRT = "10.3"  # deploykit runs no engines of older versions
_DOCKER = re.compile(
    r"^Package: docker(?:-ce|\.io)\n(?:.+\n)*?Version: (?:\d+:)?(\d{1,4})\.", re.MULTILINE
)
_DOCKER_RAW = 28  # the first Docker that writes to iptables' table raw
_MEMORY_SHARE = 0.9  # of the profile's memory: another driver reports a few percent less


def profile_differences(profile: Profile, machine: Machine) -> tuple[str, ...]:
    """Return a sentence for each version, driver, memory or power mode that differs."""
    board, server = (_jetpack, _tensorrt, _memory, _power_mode), (_tensorrt, _memory, _driver)
    found = (check(profile, machine) for check in (board if profile.boards else server))
    return tuple(filter(None, found))


def _jetpack(profile: Profile, machine: Machine) -> str:
    """Check that the release is known, is for the module, and has a TensorRT that runs there."""
    if machine.l4t is None:
        return (
            "the JetPack release is not known: /etc/nv_tegra_release cannot be read "
            "(in a container, mount it)"
        )
    row, first = find_jetpack(machine.l4t), first_jetpack(profile)
    if row is None:
        return f"L4T {machine.l4t} belongs to no JetPack release that deploykit knows"
    if jetpack_fits(profile, row):
        return ""
    cure = f": install JetPack {first.version} or later" if first else ""
    release = f"JetPack {row.version} (L4T {machine.l4t}, TensorRT {row.tensorrt})"
    return f"{release} is not for {profile.summary}{cure}"


def jetson_faults(machine: Machine, root: Path = Path("/")) -> Iterator[str]:
    """Yield known faults of this L4T, Docker or TensorRT on Jetsons, with what helps.

    Sources: llama.cpp#23732, pytorch#185240; moby#49557; NVIDIA/TensorRT#4832.
    """
    release = release_numbers(machine.l4t or "0")
    if (36, 4, 7) <= release < (37,):
        yield (
            f"L4T {machine.l4t}: allocating GPU memory can fail though memory is free, since the "
            "fix of NvMap in 36.4.7: restart the board, keep memory free (fewer models, no "
            "desktop), or use L4T 36.4.4"
        )
    installed = _DOCKER.search(file_text(root / "var/lib/dpkg/status"))
    docker = int(installed[1]) if installed else 0
    if (36,) <= release < (37,) and docker >= _DOCKER_RAW:
        yield (
            f"Docker {docker} needs iptables' table raw, which the kernel of JetPack 6 lacks: "
            "containers with published ports do not start, and `docker build` has no network: use "
            "--network host for both, or install Docker 27"
        )
    tensorrt = machine.packages.get("tensorrt", "")
    if release_numbers(re.sub(r"[^\d.].*", "", tensorrt) or "0")[:3] == (10, 16, 2):
        yield (
            f"TensorRT {tensorrt} on an Orin refuses INT8 pairs with float16 scales (Could not "
            "infer output types for dequantize): quantize without --other-nodes fp16"
        )


def first_jetpack(profile: Profile) -> JetPack | None:
    """Return the first release for the module whose TensorRT runs there."""
    return next((row for row in JETPACKS if jetpack_fits(profile, row)), None)


def jetpack_fits(profile: Profile, row: JetPack) -> bool:
    """Return whether the release is for the module and its TensorRT runs there."""
    known = profile.compute_capability in row.compute_capabilities
    return known and in_range(profile, row.tensorrt)


def _tensorrt(profile: Profile, machine: Machine) -> str:
    for name in RUNTIMES["tensorrt"].packages if profile.runtime == "tensorrt" else ():
        version = machine.packages.get(name)
        if version and not in_range(profile, version):
            return f"{name} {version} is installed, {profile.name} needs {range_text(profile)}"
        if version and profile.boards and (11, 0) <= version_numbers(version)[:2] < (11, 4):
            return f"{name} {version} is installed, but TensorRT 11.0 to 11.3 run on no Jetson"
    return ""


def in_range(profile: Profile, version: str) -> bool:
    """Return whether this TensorRT runs there; a version without a number is accepted."""
    numbers = version_numbers(version)[:2]
    low = max(version_numbers(_OLDEST_TENSORRT), version_numbers(profile.tensorrt_min or "0"))
    return not numbers or low <= numbers <= version_numbers(profile.tensorrt_max or "999")


def range_text(profile: Profile) -> str:
    """Return the versions of TensorRT that run there: "10.3 or later"."""
    low = max(_OLDEST_TENSORRT, profile.tensorrt_min or "0", key=release_numbers)
    return f"{low} to {profile.tensorrt_max}" if profile.tensorrt_max else f"{low} or later"


def _memory(profile: Profile, machine: Machine) -> str:
    here = [gpu.memory_bytes for gpu in machine.gpus if gpu.name in profile.gpu_names]
    here_bytes, expected = (here or [None])[0], profile.memory_bytes
    if not here_bytes or not expected or here_bytes >= _MEMORY_SHARE * expected:
        return ""
    return (
        f"the driver reports {here_bytes / 2**30:.1f} GiB of GPU memory, {profile.name} has "
        f"{expected / 2**30:.1f}: a MIG slice, or another variant of the card"
    )


def _driver(_profile: Profile, machine: Machine) -> str:
    """Check that the driver runs the wheels' CUDA major. A Jetson's driver is JetPack's."""
    branches = [gpu.driver.partition(".")[0] for gpu in machine.gpus]
    driver = min((int(each) for each in branches if each.isdecimal()), default=None)
    for name, version in machine.packages.items():
        suffix = re.search(r"-cu(1[0-9])$", name)
        major = int(suffix[1]) if suffix else 0
        if name == "nvidia-cuda-runtime":
            major = (release_numbers(version) or (0,))[0]
        needed = LEAST_DRIVERS.get(major)
        if driver and needed and driver < needed:
            return (
                f"driver {machine.gpus[0].driver} does not run CUDA {major}, which {name} "
                f"{version} needs: install driver {needed} or later"
            )
    return ""


def _power_mode(profile: Profile, machine: Machine) -> str:
    known = [mode.name for mode in profile.power_modes]
    if machine.power_mode is None:
        return (
            "the power mode is not known: /var/lib/nvpmodel/status and /etc/nvpmodel.conf cannot "
            "be read (in a container, mount them)"
        )
    if not known or machine.power_mode in known:
        return ""
    return (
        f"power mode {machine.power_mode} is not one that {profile.name} knows "
        f"({', '.join(known)}): its clocks and multiprocessors are not known"
    )
