"""From a PyTorch model to fast, proven inference: `import deploykit as dk`, then `dk.export(...)`.

Importing this imports nothing else; each name below is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

_PUBLIC = {
    "train": "deploykit.api.train:train",
    "export": "deploykit.api.export:export",
    "quantize": "deploykit.api.quantize:quantize",
    "build": "deploykit.api.build:build",
    "load": "deploykit.runtimes.engine:load",
    "compare": "deploykit.api.compare:compare",
    "inspect": "deploykit.api.inspect:inspect",
    "predict": "deploykit.api.predict:predict",
    "bench": "deploykit.api.bench:bench",
    "serve": "deploykit.api.serve:serve",
    "load_test": "deploykit.api.load_test:load_test",
    "demo": "deploykit.api.demo:demo",
    "doctor": "deploykit.api.doctor:doctor",
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
