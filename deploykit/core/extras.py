"""Optional packages: import one, or say which extra of deploykit installs it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from types import ModuleType

from deploykit.core.errors import MissingExtra, Unsupported, first_line

EXTRAS: Mapping[str, str] = {
    "onnxruntime": "cpu",
    "tensorrt": "tensorrt",
    "cuda": "tensorrt",
    "tensorrt_rtx": "tensorrt",
    "torch": "export",
    "onnxscript": "export",
    "safetensors": "export",
    "sklearn": "train",
    "PIL": "images",
    "opentelemetry": "trace",
}
_NOTES: Mapping[str, str] = {
    "onnxruntime": "; with an NVIDIA GPU: pip install 'deploykit[gpu]'",
    "tensorrt": "; on a Jetson it comes with JetPack",
}


def require(module: str) -> ModuleType:
    """Import `module`, one of EXTRAS or a module inside it.

    Raises MissingExtra when its package is not installed, Unsupported when it is but does not load.
    """
    top = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as exc:
        if isinstance(exc, ModuleNotFoundError) and exc.name == top:
            raise missing(top) from exc
        raise Unsupported(
            f"{top} is installed but cannot be loaded: {first_line(exc)}", hint=install_hint(top)
        ) from exc


def missing(module: str) -> MissingExtra:
    """The error for `module`, one of EXTRAS, not being installed."""
    return MissingExtra(f"{module} is not installed", hint=install_hint(module))


def install_hint(module: str) -> str:
    return f"pip install 'deploykit[{EXTRAS[module]}]'{_NOTES.get(module, '')}"


def installed(module: str) -> bool:
    """Whether `module` could be imported, without importing it."""
    return importlib.util.find_spec(module) is not None
