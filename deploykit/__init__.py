"""From a PyTorch model to fast, proven inference: `import deploykit as dk`, then `dk.export(...)`.

Importing this imports nothing else; each name below is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

_PUBLIC = {
    "train": "deploykit.api.making:train",
    "export": "deploykit.api.exporting:export",
    "quantize": "deploykit.api.precision:quantize",
    "build": "deploykit.api.making:build",
    "load": "deploykit.runtimes.engine:load",
    "compare": "deploykit.api.proof:compare",
    "inspect": "deploykit.api.proof:inspect",
    "predict": "deploykit.api.proof:predict",
    "bench": "deploykit.api.figures:bench",
    "serve": "deploykit.api.service:serve",
    "load_test": "deploykit.api.figures:load_test",
    "demo": "deploykit.api.tour:demo",
    "doctor": "deploykit.api.health:doctor",
    "profile": "deploykit.core.profile:load_profile",
    "Engine": "deploykit.runtimes.engine:Engine",
    "DeploykitError": "deploykit.core.errors:DeploykitError",
    "GateFailed": "deploykit.core.errors:GateFailed",
    "BadInput": "deploykit.core.errors:BadInput",
    "Unsupported": "deploykit.core.errors:Unsupported",
}


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'deploykit' has no attribute '{name}'")
    module, _, attribute = _PUBLIC[name].partition(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return [*_PUBLIC, "__version__"]
