"""Report what this machine has, and which commands will therefore work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from deploykit.core.errors import Unsupported
from deploykit.core.extras import install_command, install_hint, installed
from deploykit.core.json_value import Record
from deploykit.core.machine import Gpu, Machine, this_machine
from deploykit.core.profile import recognise
from deploykit.core.runtime import ALL, Runtime
from deploykit.engines.devices import GpuState, read_gpus
from deploykit.evaluation.host import jetson_faults, profile_differences

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
    checks += [
        _engines(each, bool(machine.gpus or gpus))
        for each in ALL
        if each.builder and each.opens[0] != "onnx"
    ]
    name = profile.name if profile else None
    return Health(machine, name, why, gpus, providers, tuple(checks), tuple(warnings))


def _engines(runtime: Runtime, gpu: bool) -> Check:
    """Return whether a runtime's own engines can be built and run here."""
    command = f"build, bench, serve of {runtime.title} engines"
    if not runtime.on_cpu and not gpu:
        return Check(command, False, "no NVIDIA GPU here; --profile cpu works")
    return _check(command, runtime.modules)


def _check(command: str, needs: tuple[str, ...]) -> Check:
    missing = [name for name in needs if not installed(name)]
    why = f"{', '.join(missing)}: {install_hint(*missing)}" if missing else ""
    return Check(command, not missing, why)
