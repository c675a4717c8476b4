"""A hardware target: what `profiles/NAME.toml`, or a file of your own, holds about it.

An unknown key is an error. A figure that was computed stands in `derived` with how, one that no
source was found for in `unverified`; both are printed as such. A Jetson power mode follows an at
sign: `jetson-orin-nano-8gb@15W`. docs/profiles.md has every key.

Units are base units: bytes, bytes/s, operations/s, watts. `memory_bytes` is what the driver
reports (`memory.total` of nvidia-smi; MemTotal where CPU and GPU share the memory).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from deploykit.core import files as paths
from deploykit.core.errors import BadInput, NotFound, Unsupported, did_you_mean
from deploykit.core.extras import installed
from deploykit.core.files import read_toml
from deploykit.core.jetpack import release_numbers
from deploykit.core.json_value import Record
from deploykit.core.machine import Machine, this_machine
from deploykit.core.precision import HARDWARE
from deploykit.core.runtime import RUNTIMES, TARGET_RUNTIMES

_VERSION = r"[0-9]+\.[0-9]+"
_LIST_PROFILES = "deploykit profiles lists them; or a file: ./mine.toml"
_TOO_LARGE = 1 << 63
_T = TypeVar("_T")
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
    watts: float | None
    gpu_mhz: int | None
    sms: int | None


@dataclass(frozen=True)
class Profile(Record):
    """A hardware target. Peaks are dense (no sparsity) and of the GPU alone; None is not known."""

    name: str
    summary: str
    runtime: str  # of the table in core/runtime.py
    device: str  # "cuda" | "cpu"
    architecture: str  # "x86_64" | "aarch64" | "any"
    precisions: tuple[str, ...]  # the types of a graph that it runs natively
    compute_capability: str | None
    sm_count: int | None
    memory_bytes: int | None
    unified_memory: bool
    bandwidth_bytes_per_s: float | None
    peak_ops_per_s: Mapping[str, float]
    workspace_bytes: int | None
    max_power_w: float | None
    tensorrt_min: str | None  # first and last MAJOR.MINOR of TensorRT that runs there
    tensorrt_max: str | None
    opset: int | None  # to export with, where the runtime needs an older one than the default
    gpu_names: tuple[str, ...]  # as the driver spells them; `auto` compares with these
    boards: tuple[str, ...]  # device tree ids: Jetson modules of a family share one GPU name
    container_base: Mapping[str, str]  # image to start from by host release: see `base_image`
    dla_cores: int  # deep learning accelerators next to the GPU, on some Jetson modules
    power_modes: tuple[PowerMode, ...]
    power_mode: str | None  # the mode chosen with NAME@MODE
    notes: tuple[str, ...]
    sources: tuple[str, ...]
    derived: Mapping[str, str]  # key -> how it was computed; a peak is "peak_ops_per_s.int8"
    unverified: tuple[str, ...]  # keys without a source

    def base_image(self, release: str = "") -> str | None:
        """The container image to start from on a host of `release`; without one the usual image.

        `container_base` is keyed by the first release an image is for, "jetpack-6.1" or "cuda-13",
        the usual one first. `jetpack-6.2.1` finds the last key of JetPack 6 that is not later.
        None where no key is for that release.
        """
        if not release:
            return next(iter(self.container_base.values()), None)
        kind, _, wanted = release.partition("-")
        numbers = release_numbers(wanted)
        found = [
            (known, image)
            for key, image in self.container_base.items()
            for family, _, since in [key.partition("-")]
            if family == kind and (known := release_numbers(since)) <= numbers
            if known[:1] == numbers[:1]
        ]
        return max(found)[1] if found else None


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
        raise NotFound(
            f"no profile '{name}'",
            hint=did_you_mean(name, ("auto", *profile_names()), _LIST_PROFILES),
        )
    profile = _read(path)
    return _with_mode(profile, mode[0]) if mode else profile


def choose_profile() -> tuple[Profile, str]:
    """The profile that fits this machine, and why it was chosen, as text."""
    machine = this_machine()
    found, _ = recognise(machine)
    if found is not None and found.device == "cpu":
        return found, "no NVIDIA GPU here"
    what = machine.gpus[0].name if machine.gpus else str(machine.board)
    if not installed("tensorrt"):
        return load_profile("cpu"), f"{what} is here, but TensorRT is not installed"
    if found is None:
        return _generic(machine), f"{what} is here, which no profile names"
    return found, f"this is a {found.summary}" if found.boards else f"{what} is here"


def recognise(machine: Machine) -> tuple[Profile | None, str]:
    """The profile that describes `machine`, whatever is installed, and by what it was recognised.

    None for a GPU or a board that no profile names.
    """
    every = sorted(map(load_profile, profile_names()), key=lambda profile: not profile.boards)
    found = next((profile for profile in every if fits(profile, machine)), None)
    if found is not None and found.boards:
        ids = [b for b in found.boards if any(b in each for each in machine.board_ids)]
        return found, f"the device tree names board {ids[0]}"
    if found is not None:
        names = [gpu.name for gpu in machine.gpus if gpu.name in found.gpu_names]
        return found, f"the driver names the GPU {names[0]}"
    if machine.l4t and not machine.board_ids:
        return None, "the board is not known: /proc/device-tree cannot be read here"
    if machine.l4t:
        first = min(machine.board_ids, key=lambda each: "+" in each)  # the module, not the kit
        return None, f"no profile names board {machine.board or 'not known'} ({first})"
    if machine.gpus:
        return None, f"no profile names {machine.gpus[0].name}"
    return load_profile("cpu"), "no NVIDIA GPU here"


def _generic(machine: Machine) -> Profile:
    """A GPU that no profile names, as its driver describes it: no peaks, and none are assumed.

    Raises Unsupported for one that TensorRT 10 does not run on.
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
    values: dict[str, Any] = {
        "summary": f"{gpu.name}, as its driver describes it",
        "runtime": "tensorrt",
        "device": "cuda",
        "architecture": machine.architecture,
        "precisions": [name for name in HARDWARE if name in ("fp32", "fp16", "int8", *more)],
        "gpu_names": [gpu.name],
        "unified_memory": gpu.memory_bytes is None,
        **({"memory_bytes": memory, "workspace_bytes": memory // 4} if memory else {}),
        **({"compute_capability": gpu.compute_capability} if any(capability) else {}),
        **({"tensorrt_min": "10.8"} if capability >= (10, 0) else {}),
    }
    return _Fields(Path("auto"), "", values).read(Profile, name="auto", power_mode=None)


def fits(profile: Profile, machine: Machine) -> bool:
    """Whether `machine` is what `profile` describes; never where it names neither board nor GPU.

    On a Jetson the board decides, as the modules of a family share one GPU name, and as not every
    one has `nvidia-smi`.
    """
    if profile.boards:
        return any(board in each for board in profile.boards for each in machine.board_ids)
    return any(gpu.name in profile.gpu_names for gpu in machine.gpus)


def _with_mode(profile: Profile, mode: str) -> Profile:
    """Modes are compared without case and without the `MODE_` that some boards put before them."""
    wanted = mode.lower().removeprefix("mode_")
    for known in profile.power_modes:
        if known.name.lower().removeprefix("mode_") == wanted:
            return replace(profile, power_mode=known.name)
    names = ", ".join(known.name for known in profile.power_modes)
    raise NotFound(
        f"profile '{profile.name}' has no power mode '{mode}'",
        hint=f"one of: {names}" if names else "this target has no power modes",
    )


def _read(path: Path) -> Profile:
    values, content = read_toml(path)
    keys = _Fields(path, content, values)
    profile = keys.read(Profile, name=path.stem, power_mode=None)
    _check(profile, values, keys)
    return profile


def _check(profile: Profile, values: Mapping[str, Any], keys: _Fields) -> None:
    """Refuse what no single key shows: a contradiction, or a key that names no other."""
    if not profile.precisions:
        raise keys.fail("precisions", "is needed, and is not empty")
    runtime = RUNTIMES[profile.runtime]
    if profile.device not in runtime.devices:
        needed = "' or '".join(runtime.devices)
        raise keys.fail("device", f"is '{profile.device}', but {runtime.title} needs '{needed}'")
    peaks = [f"peak_ops_per_s.{name}" for name in profile.peak_ops_per_s]
    for mark in ("derived", "unverified"):
        for key in getattr(profile, mark):
            if key not in values and key not in peaks:
                raise keys.fail(mark, f"names '{key}', which this profile does not have")


class _Fields:
    """Takes keys out of a TOML table one by one; an error names the file, the line and the key."""

    def __init__(self, path: Path, content: str, values: dict[str, Any], parent: str = "") -> None:
        self.path = path
        self.content = content
        self.values = dict(values)
        self.parent = parent  # "power_modes[0]." inside that table

    def fail(self, key: str, what: str) -> BadInput:
        return BadInput(f"{self.path}{self.line(key)}: '{self.parent}{key}' {what}")

    def line(self, key: str) -> str:
        """Where the key is, else where the table that it should be in begins, else nothing."""
        table = self.parent.partition("[")[0].rstrip(".")
        begin = self._find(table, 0) if table else 0
        found = self._find(key, begin) or begin
        return f":{found}" if found else ""

    def _find(self, name: str, begin: int) -> int:
        """The number of the line that sets `name`, from line `begin` on; 0 for none."""
        pattern = rf"""\s*\[*\s*(?:[\w-]+\s*\.\s*)?["']?{re.escape(name)}["']?\s*[=.\]]"""
        lines = enumerate(self.content.splitlines(), 1)
        return next((at for at, line in lines if at >= begin and re.match(pattern, line)), 0)

    def inner(self, values: dict[str, Any], parent: str) -> _Fields:
        return _Fields(self.path, self.content, values, parent)

    def read(self, kind: type[_T], **given: Any) -> _T:
        """All keys as a dataclass, each by the type of its field, but for those `given`."""
        names = {each.name: str(each.type) for each in dataclasses.fields(cast("Any", kind))}
        found = {key: _READERS[name](self, key) for key, name in names.items() if key not in given}
        self.refuse_unknown()
        return kind(**given, **found)

    def string(self, key: str) -> str:
        value = self.values.pop(key, None)
        if not isinstance(value, str) or not value:
            raise self.fail(key, "is needed, and is a string")
        allowed = _CHOICES.get(key, (value,))
        if value not in allowed:
            raise self.fail(key, f"is '{value}', not one of {', '.join(allowed)}")
        return value

    def version(self, key: str) -> str | None:
        if key not in self.values:
            return None
        value = self.string(key)
        if not re.fullmatch(_VERSION, value):
            raise self.fail(key, f"is a string such as '8.7', got {value!r}")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        value = self.values.pop(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(key, "is a list of strings")
        allowed = _CHOICES.get(key, value)
        for item in value:
            if item not in allowed:
                raise self.fail(key, f"holds '{item}', not one of {', '.join(allowed)}")
        return tuple(value)

    def flag(self, key: str) -> bool:
        value = self.values.pop(key, False)
        if not isinstance(value, bool):
            raise self.fail(key, "is true or false")
        return value

    def positive(self, key: str) -> float | None:
        value = self.values.pop(key, None)
        if value is None:
            return None
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value < _TOO_LARGE:  # false for nan, too
            raise self.fail(key, f"is a number above 0, got {value!r}")
        return float(value)

    def count(self, key: str) -> int | None:
        value = self.values.pop(key, None)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _TOO_LARGE:
            raise self.fail(key, f"is an integer above 0, got {value!r}")
        return value

    def peaks(self, key: str) -> dict[str, float]:
        value = self.values.pop(key, {})
        if not isinstance(value, dict):
            raise self.fail(key, "is a table: precision = operations per second")
        inner = self.inner(value, f"{key}.")
        found = {name: inner.positive(name) for name in HARDWARE}
        inner.refuse_unknown()
        return {name: peak for name, peak in found.items() if peak is not None}

    def table(self, key: str) -> dict[str, str]:
        value = self.values.pop(key, {})
        if not isinstance(value, dict):
            raise self.fail(key, "is a table of strings")
        inner = self.inner(value, f"{key}.")
        for name in value if key == "container_base" else ():
            if not re.fullmatch(r"(jetpack|cuda)-[0-9]+(\.[0-9]+)*", name):
                raise inner.fail(name, "is not a release such as 'jetpack-6.1' or 'cuda-13'")
        return {name: inner.string(name) for name in value}

    def modes(self, key: str) -> tuple[PowerMode, ...]:
        value = self.values.pop(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.fail(key, "is a list of tables")
        modes = []
        for number, item in enumerate(value):
            inner = self.inner(item, f"{key}[{number}].")
            modes.append(inner.read(PowerMode))
        return tuple(modes)

    def refuse_unknown(self) -> None:
        for key in self.values:
            raise self.fail(key, "is not a key that a profile has")


_READERS: Mapping[str, Callable[[_Fields, str], Any]] = {  # by the type of a field of Profile
    "str": _Fields.string,
    "str | None": _Fields.version,
    "bool": _Fields.flag,
    "int": lambda keys, key: keys.count(key) or 0,
    "int | None": _Fields.count,
    "float | None": _Fields.positive,
    "tuple[str, ...]": _Fields.strings,
    "tuple[PowerMode, ...]": _Fields.modes,
    "Mapping[str, float]": _Fields.peaks,
    "Mapping[str, str]": _Fields.table,
}


def precisions_everywhere(runtime: str) -> list[str]:
    """What every target of `runtime` computes in that its current version runs on."""
    found = [load_profile(name) for name in profile_names()]
    targets = [each for each in found if each.runtime == runtime and each.tensorrt_max is None]
    common = set.intersection(*(set(each.precisions) for each in targets))
    return [name for name in targets[0].precisions if name in common]
