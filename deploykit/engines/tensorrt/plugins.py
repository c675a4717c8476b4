"""Register plugins with TensorRT before it parses a graph or loads a plan that needs them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from deploykit.core.errors import BadInput, NotFound, Unsupported, first_line, quote
from deploykit.core.files import sha256
from deploykit.engines.tensorrt.log import logger

_CREATORS = ("getCreators", "getPluginCreators")  # a library without them registers itself
_loaded: dict[Path, ctypes.CDLL] = {}


def load_plugins(nv: Any, libraries: Iterable[Path] = ()) -> None:
    """Register NVIDIA's own plugins, then those of `libraries`, each once per process.

    Loading a library runs its code. Raises Unsupported if one does not load.
    """
    try:
        nv.init_libnvinfer_plugins(logger(nv), "")
    except (RuntimeError, TypeError, ValueError) as exc:
        raise Unsupported(f"NVIDIA's own plugins do not load: {first_line(exc)}") from exc
    for library in libraries:
        path = library.resolve()
        if path in _loaded:
            continue
        registry = nv.get_plugin_registry()
        before = len(getattr(registry, "all_creators", ()))
        try:
            found = ctypes.CDLL(str(path))
            itself = len(getattr(registry, "all_creators", ())) > before  # twice is an error
            wanted = not itself and any(hasattr(found, name) for name in _CREATORS)
            if wanted and registry.load_library(str(path)) is None:
                raise RuntimeError("TensorRT refused it")
        except (OSError, RuntimeError) as exc:
            raise Unsupported(f"{library}: cannot be loaded: {first_line(exc)}") from exc
        _loaded[path] = found  # keep it loaded: running plans use its code


def recorded_plugins(plan: Path, recorded: Mapping[str, str]) -> list[Path]:
    """Return the libraries that a plan needs, next to it or where they were at the build.

    `recorded`: path -> SHA-256. Raises NotFound for a missing one, BadInput for another file.
    """
    found = []
    for name, digest in recorded.items():
        places = (plan.parent / Path(name).name, Path(name))
        path = next(filter(os.path.isfile, places), None)  # a name may be impossible
        if path is None:
            raise NotFound(
                f"{plan}: needs the plugin library {quote(Path(name).name)}",
                hint=f"put it next to {plan.name}, or build the engine again",
            )
        if sha256(path) != digest:
            raise BadInput(
                f"{path}: is not the plugin library that {plan.name} was built with (SHA-256 "
                "differs)",
                hint="copy it again, or build the engine again",
            )
        found.append(path)
    return found
