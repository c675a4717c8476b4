"""Load a hardware target from `profiles/NAME.toml` or from a file of your own.

An unknown key is an error. `derived` says how a computed figure was found, `unverified` lists the
figures without a source; both are printed as such. A Jetson power mode follows an at sign:
`jetson-orin-nano-8gb@15W`. docs/profiles.md has every key.

Units are base units: bytes, bytes/s, operations/s, watts. `memory_bytes` is what the driver
reports (`memory.total` of nvidia-smi; MemTotal where CPU and GPU share the memory).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from deploykit.core import files as paths
from deploykit.core.errors import BadInput, DeploykitError, NotFound, Unsupported, did_you_mean
from deploykit.core.extras import installed
from deploykit.core.files import read_toml
from deploykit.core.json_value import Record, from_json
from deploykit.core.machine import Machine, release_numbers, this_machine
from deploykit.core.precision import HARDWARE
from deploykit.core.runtime import RUNTIMES, TARGET_RUNTIMES
from deploykit.core.subprocesses import Child

_GIVEN = ("name", "power_mode")  # these come from NAME@MODE, not from the file
_VERSIONS = ("compute_capability", "tensorrt_min", "tensorrt_max")
_RELEASE = r"(jetpack|cuda)-[0-9]+(\.[0-9]+)*"
_LIST_PROFILES = "deploykit profiles lists them; or a file: ./mine.toml"
_TOO_LARGE = 1 << 63
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "runtime": TARGET_RUNTIMES,
    "device": ("cuda", "cpu"),
    "architecture": ("x86_64", "aarch64", "any"),
    "precisions": HARDWARE,
}


@dataclass(frozen=True)
class PowerMode:
    """One nvpmodel mode of a Jetson. None: the mode sets no limit, or it is not known."""

    name: str
    watts: float | None = None
    gpu_mhz: int | None = None
    sms: int | None = None


@dataclass(frozen=True)
class Profile(Record):
    """A hardware target. Peaks are dense (no sparsity) and of the GPU alone; None is not known."""

    name: str
    summary: str
    runtime: str  # a name in core/runtime.py
    device: str  # "cuda" | "cpu"
    architecture: str  # "x86_64" | "aarch64" | "any"
    precisions: tuple[str, ...]  # types of a graph that run natively
    compute_capability: str | None = None
    sm_count: int | None = None
    memory_bytes: int | None = None
    unified_memory: bool = False
    bandwidth_bytes_per_s: float | None = None
    peak_ops_per_s: Mapping[str, float] = field(default_factory=dict)
    workspace_bytes: int | None = None
    max_power_w: float | None = None
    tensorrt_min: str | None = None  # the first and last MAJOR.MINOR that run there
    tensorrt_max: str | None = None
    opset: int | None = None  # set where the runtime needs an older one than export's default
    gpu_names: tuple[str, ...] = ()  # the driver's spelling, with which `auto` compares
    boards: tuple[str, ...] = ()  # device tree ids: Jetson modules of a family share one GPU name
    # image to start from by host release: see `base_image`
    container_base: Mapping[str, str] = field(default_factory=dict)
    dla_cores: int = 0  # deep learning accelerators next to the GPU, on some Jetson modules
    power_modes: tuple[PowerMode, ...] = ()
    power_mode: str | None = None  # the mode chosen with NAME@MODE
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    # key -> how it was computed; a peak is "peak_ops_per_s.int8"
    derived: Mapping[str, str] = field(default_factory=dict)
    unverified: tuple[str, ...] = ()  # keys without a source

    def base_image(self, release: str = "") -> str | None:
        """Return the container image to start from on a host of `release`; without one the default.

        `container_base` is keyed by the first release an image is for, "jetpack-6.1" or "cuda-13",
        the default first. `jetpack-6.2.1` finds the last key of JetPack 6 that is not later.
        Return None if no key is for that release.
        """
        if not release:
            return next(iter(self.container_base.values()), None)
        family, _, wanted = release.partition("-")
        numbers, found = release_numbers(wanted), dict[tuple[int, ...], str]()
        for key, image in self.container_base.items():
            known = release_numbers(key.removeprefix(f"{family}-"))  # () for another family
            if known and known[:1] == numbers[:1] and known <= numbers:
                found[known] = image
        return found[max(found)] if found else None


def profile_names() -> list[str]:
    return sorted(path.stem for path in paths.folder("profiles").glob("*.toml"))


def load_profile(reference: str) -> Profile:
    """Load a profile by name, NAME@MODE or path; "auto" is this machine's. Raises BadInput."""
    if reference == "auto":
        return choose_profile()[0]
    name, *mode = [reference] if reference.endswith(".toml") else reference.rsplit("@", 1)
    if name.endswith(".toml"):
        path = Path(name)
    elif name.lower() in profile_names():
        path = paths.folder("profiles") / f"{name.lower()}.toml"
    else:
        hint = did_you_mean(name, ("auto", *profile_names()), _LIST_PROFILES)
        raise NotFound(f"no profile '{name}'", hint=hint)
    profile = _read(path, path.stem, read_toml(path))
    return _with_mode(profile, mode[0]) if mode else profile


def choose_profile(gpu: int = 0) -> tuple[Profile, str]:
    """Return the profile that fits this machine, and the reason as text. `gpu`: CUDA's number."""
    machine = with_gpu(this_machine(), gpu)
    found, why = recognise(machine)
    if found is not None and found.device == "cpu":
        return found, why
    what = machine.gpus[0].name if machine.gpus else str(machine.board)
    if not installed("tensorrt"):
        return load_profile("cpu"), f"{what} is here, but TensorRT is not installed"
    if found is None:
        return _generic(machine), f"{what} is here, which no profile names"
    return found, why


def recognise(machine: Machine) -> tuple[Profile | None, str]:
    """Return the profile that describes `machine`, whatever is installed, and the reason as text.

    The profile is None for a GPU or a board that no profile names.
    """
    every = sorted(map(load_profile, profile_names()), key=lambda profile: not profile.boards)
    found = next((profile for profile in every if fits(profile, machine)), None)
    if found is not None:
        return found, f"this is a {found.summary}"
    if machine.l4t and not machine.board_ids:
        return None, "the board is not known: /proc/device-tree cannot be read here"
    if machine.l4t:
        first = min(machine.board_ids, key=lambda each: "+" in each)  # prefer the module to the kit
        return None, f"no profile names board {machine.board or 'not known'} ({first})"
    if machine.gpus:
        return None, f"no profile names {machine.gpus[0].name}"
    return load_profile("cpu"), "no NVIDIA GPU here"


def _generic(machine: Machine) -> Profile:
    """Return a profile, without peaks, of a GPU that none names, as its driver describes it.

    Raises Unsupported for a GPU that TensorRT 10 does not run on.
    """
    gpu = machine.gpus[0]
    capability = tuple(map(int, (gpu.compute_capability or "0.0").split(".")))
    if (0, 0) < capability < (7, 5):
        raise Unsupported(
            f"{gpu.name}: compute capability {gpu.compute_capability}, TensorRT needs 7.5 or later",
            hint="`profile` cpu",
        )
    since = {(8, 0): "bf16", (8, 9): "fp8", (10, 0): "fp4"}
    more = [name for first, name in since.items() if capability >= first]
    memory = gpu.memory_bytes or machine.memory_bytes
    return Profile(
        name="auto",
        summary=f"{gpu.name}, as its driver describes it",
        runtime="tensorrt",
        device="cuda",
        architecture=machine.architecture,
        precisions=tuple(name for name in HARDWARE if name in ("fp32", "fp16", "int8", *more)),
        compute_capability=gpu.compute_capability,
        memory_bytes=memory,
        workspace_bytes=memory // 4 if memory else None,
        unified_memory=gpu.memory_bytes is None,
        tensorrt_min="10.8" if capability >= (10, 0) else None,
        gpu_names=(gpu.name,),
    )


def fits(profile: Profile, machine: Machine) -> bool:
    """Return whether `profile` describes `machine`; never if it names neither board nor GPU.

    On a Jetson the board decides, as the modules of a family share one GPU name and some lack
    `nvidia-smi`.
    """
    if profile.boards:
        return any(board in each for board in profile.boards for each in machine.board_ids)
    return any(gpu.name in profile.gpu_names for gpu in machine.gpus)


def _with_mode(profile: Profile, mode: str) -> Profile:
    """Apply a mode, found without regard to case and to the `MODE_` that some boards put first."""
    known = {each.name.lower().removeprefix("mode_"): each.name for each in profile.power_modes}
    if found := known.get(mode.lower().removeprefix("mode_")):
        return replace(profile, power_mode=found)
    hint = f"one of: {', '.join(known.values())}" if known else "this target has no power modes"
    raise NotFound(f"profile '{profile.name}' has no power mode '{mode}'", hint=hint)


def _read(path: Path, name: str, values: Mapping[str, Any]) -> Profile:
    """Read a profile. Raises BadInput for a key that is unknown, wrong or contradicts another."""

    def fail(key: str, what: str) -> BadInput:
        return BadInput(f"{path}: '{key}' {what}")

    keys = [each.name for each in fields(Profile) if each.name not in _GIVEN]
    modes = [each.name for each in fields(PowerMode)]
    for key, value in _flat(values):
        table, _, inner = key.partition(".")
        known = {"peak_ops_per_s": HARDWARE, "power_modes": modes}.get(table, (inner,))
        if table not in keys or (inner and inner not in known):
            raise fail(key, "is not a key that a profile has")
        if type(value) in (int, float) and not 0 < value < _TOO_LARGE:  # nan is refused, too
            raise fail(key, f"is a number above 0, got {value!r}")
        if value not in _CHOICES.get(table, (value,)):
            raise fail(key, f"holds '{value}', not one of {', '.join(_CHOICES[table])}")
        if table in _VERSIONS and not re.fullmatch(r"[0-9]+\.[0-9]+", str(value)):
            raise fail(key, f"is a string such as '8.7', got {value!r}")
        if table == "container_base" and not re.fullmatch(_RELEASE, inner):
            raise fail(key, "is not a release such as 'jetpack-6.1' or 'cuda-13'")
    profile: Profile = from_json(Profile, {**values, "name": name}, str(path))
    if not profile.precisions:
        raise fail("precisions", "is needed, and is not empty")
    runtime = RUNTIMES[profile.runtime]
    if profile.device not in runtime.devices:
        needed = "' or '".join(runtime.devices)
        raise fail("device", f"is '{profile.device}', but {runtime.title} needs '{needed}'")
    return profile


def _flat(values: Mapping[str, Any], table: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of a TOML document with its key, also inside tables and lists."""
    for key, value in values.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                yield from _flat(each, f"{key}.")
            else:
                yield f"{table}{key}", each


def precisions_everywhere(runtime: str) -> list[str]:
    """Return the precisions that all targets of `runtime`'s current version have in common."""
    found = [load_profile(name) for name in profile_names()]
    targets = [each for each in found if each.runtime == runtime and each.tensorrt_max is None]
    common = set.intersection(*(set(each.precisions) for each in targets))
    return [name for name in targets[0].precisions if name in common]


# Which GPU CUDA calls `cuda:N` in this process. NVML and nvidia-smi order GPUs by their place on
# the bus. CUDA has the fastest first, unless CUDA_DEVICE_ORDER says otherwise, and hides those that
# CUDA_VISIBLE_DEVICES leaves out.

_CUDA_S = 60.0  # limit of asking CUDA


def cuda_order(uuids: Sequence[str]) -> list[int | None]:
    """Return for each of CUDA's devices in this process its place in `uuids`, those of NVML.

    None: it is none of these, as a part of a GPU (MIG) has a UUID of its own. Without CUDA the
    order is that of `uuids`; there are none if CUDA_VISIBLE_DEVICES is set, as all may be hidden.
    """
    if devices := _ask():
        digits = [uuid.removeprefix("GPU-").replace("-", "").lower() for uuid in uuids]
        return [digits.index(uuid) if uuid in digits else None for uuid, _ in devices]
    return [] if "CUDA_VISIBLE_DEVICES" in os.environ else list(range(len(uuids)))


def with_gpu(machine: Machine, number: int) -> Machine:
    """Return `machine` with the GPU `cuda:number` alone, with none where CUDA has no such GPU.

    A part of a GPU (MIG) has a name of its own, "NVIDIA H100 80GB HBM3 MIG 1g.10gb", with its
    memory.
    """
    gpus, hides = machine.gpus, "CUDA_VISIBLE_DEVICES" in os.environ
    if not gpus or (len(gpus) == 1 and not hides):
        return machine
    if devices := _ask():
        (name,) = [name for _, name in devices[number : number + 1]] or [""]
        found = [gpu for gpu in gpus if gpu.name == name]
        part = re.search(r" MIG .*\.(\d+)gb", name)
        whole = [gpu for gpu in gpus if part and name.startswith(gpu.name)]
        found += [replace(gpu, name=name, memory_bytes=int(part[1]) << 30) for gpu in whole if part]
    else:
        found = [] if hides else list(gpus[number : number + 1])
    return replace(machine, gpus=tuple(found[:1]))


@functools.cache
def _ask() -> tuple[tuple[str, str], ...]:
    """Return UUID, in hexadecimal, and name of each of CUDA's devices; none without CUDA.

    It is asked in a process of its own: the forks of a process that has asked cannot use CUDA.
    """
    found: tuple[tuple[str, str], ...] = ()
    with (
        contextlib.suppress(OSError, DeploykitError),
        contextlib.closing(Child("CUDA", _send_devices)) as child,
    ):
        found = child.receive() if child.poll(_CUDA_S) else ()
    return found


def _send_devices(pipe: Connection[Any, Any]) -> None:
    cuda, found = ctypes.CDLL("libcuda.so.1"), []
    count, device = ctypes.c_int(), ctypes.c_int()
    uuid, name = ctypes.create_string_buffer(16), ctypes.create_string_buffer(256)
    if cuda.cuInit(0) == 0 == cuda.cuDeviceGetCount(ctypes.byref(count)):
        for number in range(count.value):
            cuda.cuDeviceGet(ctypes.byref(device), number)
            cuda.cuDeviceGetUuid_v2(uuid, device)
            cuda.cuDeviceGetName(name, len(name), device)
            found.append((uuid.raw.hex(), name.value.decode(errors="replace")))
    pipe.send(tuple(found))
