"""torch reads its whole library of ONNX functions for each export, 1 s each time: once will do.

The registry is a constant of the installed packages and of the opset. Each export still gets one of
its own, with lists of its own, as it may add functions to it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

REGISTRY = "torch.onnx._internal.exporter._registration"


def share_the_registry() -> None:
    """Keep what torch read, once something has imported its exporter."""
    kind = getattr(sys.modules.get(REGISTRY), "ONNXRegistry", None)
    if kind is None or hasattr(kind, "deploykit_shares"):
        return
    read = functools.cache(kind.from_torchlib)

    def from_torchlib(*opset: int, **named: int) -> Any:
        kept = read(*opset, **named)
        registry = kind()
        vars(registry).update(vars(kept))
        registry.functions = {target: list(metas) for target, metas in kept.functions.items()}
        return registry

    kind.from_torchlib = staticmethod(from_torchlib)
    kind.deploykit_shares = True
