"""What this machine has, and which commands will therefore work."""

from __future__ import annotations

from dataclasses import dataclass

from deploykit.core.errors import Unsupported
from deploykit.core.extras import install_command, install_hint, installed
from deploykit.core.json_value import Record
from deploykit.core.machine import Machine, this_machine
from deploykit.core.runtime import ALL, Runtime

# command -> modules that it needs beyond the base
_NEEDS = {
    "inspect, profiles": (),
    "load": ("httptools",),
    "quantize, predict, bench, build --profile cpu": ("onnxruntime",),
    "serve": ("onnxruntime", "httptools"),
    "export": ("torch", "onnxscript", "onnxruntime"),
    "train": ("torch", "sklearn"),
    "demo": ("torch", "onnxscript", "onnxruntime", "sklearn", "httptools"),
    "build --check": ("tensorrt",),
}


@dataclass(frozen=True)
class Check:
    """Whether a command works here; `why` says what is missing."""

    command: str
    works: bool
    why: str


@dataclass(frozen=True)
class Health(Record):
    """The machine, ONNX Runtime's providers, the checks and warnings."""

    machine: Machine
    providers: tuple[str, ...]
    checks: tuple[Check, ...]
    warnings: tuple[str, ...]


def doctor() -> Health:
    """Look at this machine. Imports onnxruntime where it is installed, to ask for its providers."""
    machine = this_machine()
    providers: tuple[str, ...] = ()
    warnings = []
    if installed("onnxruntime"):
        try:
            from deploykit.runtimes.onnxruntime.engine import providers as ask

            providers = ask()
        except Unsupported as exc:
            warnings.append(exc.message)
    if {"onnxruntime", "onnxruntime-gpu"} <= set(machine.packages):
        warnings.append(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other; "
            "uninstall both, then install one"
        )
    if machine.gpus and providers and "CUDAExecutionProvider" not in providers:
        warnings.append(
            "a GPU is here, but onnxruntime is the CPU build: " + install_command("gpu")
        )
    checks = [_check(command, needs) for command, needs in _NEEDS.items()]
    checks += [_engines(each, machine) for each in ALL if each.builder and "onnx" not in each.opens]
    return Health(machine, providers, tuple(checks), tuple(warnings))


def _engines(runtime: Runtime, machine: Machine) -> Check:
    """Whether a runtime's own engines can be built and run here."""
    command = f"build, bench, serve of {runtime.title} engines"
    if not runtime.on_cpu and not machine.gpus:
        return Check(command, False, "no NVIDIA GPU here; --profile cpu works")
    return _check(command, runtime.modules)


def _check(command: str, needs: tuple[str, ...]) -> Check:
    missing = [name for name in needs if not installed(name)]
    why = "; ".join(f"{name}: {install_hint(name)}" for name in missing)
    return Check(command, not missing, why)
