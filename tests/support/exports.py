"""torch reads what is constant anew for each export: once will do, in a third less time.

An export still gets a registry of ONNX functions of its own, as it may add some. The composite
operators change only where somebody registers one, and are replaced for a score of devices.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

REGISTRY = "torch.onnx._internal.exporter._registration"
OPERATORS = "_collect_all_valid_cia_ops"
KEYS = ("_AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE", "_BACKEND_KEYS_TO_OVERRIDE")


def share_the_constants() -> None:
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
    _share_the_operators()


def _share_the_operators() -> None:
    import torch._C
    from torch._export import utils
    from torch.export import decomp_utils, exported_program

    for name in KEYS:
        keys = getattr(exported_program, name, [])
        keys[:] = [key for key in keys if key.name.endswith(("CPU", "CUDA", "Meta"))]
    collect = getattr(utils, OPERATORS, None)
    if collect is None:
        return
    at = functools.cache(lambda _operators: collect())

    def collected() -> Any:
        return at(len(torch._C._dispatch_get_all_op_names()))

    for module in (utils, decomp_utils, exported_program):
        if hasattr(module, OPERATORS):
            setattr(module, OPERATORS, collected)
