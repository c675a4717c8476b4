"""A hardware target: what `profiles/NAME.toml` says of it.

In: a name, a name with a Jetson power mode (`jetson-orin-nano-8gb@15W`) or a path to a TOML file.
Out: `Profile`. An unknown key is an error; a figure that no source was found for is listed in
`unverified`, and reports print it as such.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deploykit.core import resources
from deploykit.core.errors import BadInput, NotFound
from deploykit.core.files import check_readable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4")


@dataclass(frozen=True)
class PowerMode:
    """One nvpmodel mode of a Jetson. None: the mode sets no limit, or it is not known."""

    name: str
    watts: float | None
    gpu_mhz: int | None
    sms: int | None

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "watts": self.watts, "gpu_mhz": self.gpu_mhz, "sms": self.sms}


@dataclass(frozen=True)
class Profile:
    """A hardware target. Peaks are dense (no sparsity), operations per second; None is not known."""

    name: str
    summary: str
    runtime: str  # "tensorrt" | "onnxruntime"
    device: str  # "cuda" | "cpu"
    architecture: str  # "x86_64" | "aarch64" | "any"
    precisions: tuple[str, ...]  # what `build` offers there
    compute_capability: str | None
    sm_count: int | None
    memory_bytes: int | None
    unified_memory: bool
    bandwidth_bytes_per_s: float | None
    peak_ops_per_s: Mapping[str, float]
    workspace_bytes: int | None
    max_power_w: float | None
    gpu_names: tuple[str, ...]  # as the driver spells them; `auto` compares with these
    power_modes: tuple[PowerMode, ...]
    power_mode: str | None  # the mode chosen with NAME@MODE
    notes: tuple[str, ...]
    sources: tuple[str, ...]
    unverified: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        values = dict(vars(self))
        values["power_modes"] = [mode.to_dict() for mode in self.power_modes]
        values["peak_ops_per_s"] = dict(self.peak_ops_per_s)
        return {
            key: list(item) if isinstance(item, tuple) else item for key, item in values.items()
        }


def profile_names() -> list[str]:
    return sorted(path.stem for path in resources.folder("profiles").glob("*.toml"))


def load_profile(reference: str) -> Profile:
    """Load a profile by name, NAME@MODE or path. Raises NotFound or BadInput."""
    name, separator, mode = reference.rpartition("@") if "@" in reference else (reference, "", "")
    if name.endswith(".toml"):
        path = check_readable(Path(name))
    elif name in profile_names():
        path = resources.folder("profiles") / f"{name}.toml"
    else:
        raise NotFound(
            f"no profile '{name}'",
            hint="one of: auto, " + ", ".join(profile_names()) + "; or a file: ./mine.toml",
        )
    profile = _read(path)
    return _with_mode(profile, mode) if separator else profile


def _with_mode(profile: Profile, mode: str) -> Profile:
    for known in profile.power_modes:
        if known.name.lower() == mode.lower():
            return replace(profile, power_mode=known.name)
    names = ", ".join(known.name for known in profile.power_modes)
    raise NotFound(
        f"profile '{profile.name}' has no power mode '{mode}'",
        hint=f"one of: {names}" if names else "this target has no power modes",
    )


def _read(path: Path) -> Profile:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as exc:
        raise BadInput(f"{path}: is not a text file in UTF-8") from exc
    except tomllib.TOMLDecodeError as exc:
        raise BadInput(f"{path}: is not valid TOML: {exc}") from exc
    fields = _Fields(path, values)
    profile = Profile(
        name=path.stem,
        summary=fields.text("summary"),
        runtime=fields.choice("runtime", ("tensorrt", "onnxruntime")),
        device=fields.choice("device", ("cuda", "cpu")),
        architecture=fields.choice("architecture", ("x86_64", "aarch64", "any")),
        precisions=fields.texts("precisions", PRECISIONS),
        compute_capability=fields.optional_text("compute_capability"),
        sm_count=fields.count("sm_count"),
        memory_bytes=fields.count("memory_bytes"),
        unified_memory=fields.flag("unified_memory"),
        bandwidth_bytes_per_s=fields.positive("bandwidth_bytes_per_s"),
        peak_ops_per_s=fields.peaks("peak_ops_per_s"),
        workspace_bytes=fields.count("workspace_bytes"),
        max_power_w=fields.positive("max_power_w"),
        gpu_names=fields.texts("gpu_names"),
        power_modes=fields.modes("power_modes"),
        power_mode=None,
        notes=fields.texts("notes"),
        sources=fields.texts("sources"),
        unverified=fields.texts("unverified"),
    )
    fields.refuse_unknown()
    return profile


class _Fields:
    """Takes keys out of a TOML table one by one; each error names the file, the key and its line."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = dict(values)

    def fail(self, key: str, what: str) -> BadInput:
        return BadInput(f"{self.path}{self.line(key)}: '{key}' {what}")

    def line(self, key: str) -> str:
        for number, line in enumerate(self.path.read_text(encoding="utf-8").splitlines(), 1):
            if line.lstrip(" [").startswith(key):
                return f":{number}"
        return ""

    def text(self, key: str) -> str:
        value = self.values.pop(key, None)
        if not isinstance(value, str) or not value:
            raise self.fail(key, "is needed, and is a text")
        return value

    def optional_text(self, key: str) -> str | None:
        return self.text(key) if key in self.values else None

    def choice(self, key: str, allowed: tuple[str, ...]) -> str:
        value = self.text(key)
        if value not in allowed:
            raise self.fail(key, f"is '{value}', not one of {', '.join(allowed)}")
        return value

    def texts(self, key: str, allowed: tuple[str, ...] | None = None) -> tuple[str, ...]:
        value = self.values.pop(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(key, "is a list of texts")
        for item in value:
            if allowed is not None and item not in allowed:
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
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise self.fail(key, f"is a number above 0, got {value!r}")
        return float(value)

    def count(self, key: str) -> int | None:
        value = self.values.pop(key, None)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.fail(key, f"is a whole number above 0, got {value!r}")
        return value

    def peaks(self, key: str) -> dict[str, float]:
        value = self.values.pop(key, {})
        if not isinstance(value, dict):
            raise self.fail(key, "is a table: precision = operations per second")
        inner = _Fields(self.path, value)
        found = {name: inner.positive(name) for name in PRECISIONS if name in value}
        inner.refuse_unknown()
        return {name: peak for name, peak in found.items() if peak is not None}

    def modes(self, key: str) -> tuple[PowerMode, ...]:
        value = self.values.pop(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.fail(key, "is a list of tables")
        modes = []
        for item in value:
            inner = _Fields(self.path, item)
            modes.append(
                PowerMode(
                    inner.text("name"),
                    inner.positive("watts"),
                    inner.count("gpu_mhz"),
                    inner.count("sms"),
                )
            )
            inner.refuse_unknown()
        return tuple(modes)

    def refuse_unknown(self) -> None:
        for key in self.values:
            raise self.fail(key, "is not a key that a profile has")
