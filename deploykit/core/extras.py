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
    "torch": "export",
    "onnxscript": "export",
    "sklearn": "train",
    "onnxconverter_common": "quantize",
}
_NOTES: Mapping[str, str] = {
    "onnxruntime": "; with an NVIDIA GPU: pip install 'deploykit[gpu]'",
    "tensorrt": "; on a Jetson it comes with JetPack",
}


def require(module: str) -> ModuleType:
    """Import `module`; raises MissingExtra with the install line, or Unsupported if it cannot load."""
    top = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as exc:
        if exc.name is not None and exc.name.partition(".")[0] != top:
            raise Unsupported(
                f"{top} is installed but needs '{exc.name}'", hint=install_hint(top)
            ) from exc
        raise MissingExtra(f"{top} is not installed", hint=install_hint(top)) from exc
    except (ImportError, OSError) as exc:
        raise Unsupported(f"{top} is installed but cannot be loaded: {first_line(exc)}") from exc


def install_hint(module: str) -> str:
    return f"pip install 'deploykit[{EXTRAS[module]}]'{_NOTES.get(module, '')}"


def installed(module: str) -> bool:
    """Whether `module` could be imported, without importing it."""
    return importlib.util.find_spec(module) is not None
