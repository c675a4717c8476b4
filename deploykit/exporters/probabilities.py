"""See whether a model's outputs are probabilities already, so that no softmax comes behind them."""

from __future__ import annotations

from typing import Any

from deploykit.core.extras import require
from deploykit.core.tensors import concrete
from deploykit.runtimes.torch.files import module_errors
from deploykit.runtimes.torch.loaded import Loaded

torch = require("torch")
_dispatch: Any = require("torch.utils._python_dispatch")

_NOT_ONE = 1e-3  # sums of rows that are probabilities are nearer to 1


def are_probabilities(loaded: Loaded, at: int) -> bool:
    """Whether an output comes from a sigmoid, or its rows add up to 1.

    Seen on random images, and on tokens of id 0.
    """
    inputs = []
    random = torch.Generator().manual_seed(0)
    for spec in loaded.inputs:
        shape = concrete(spec, {axis: low for axis, (low, _) in loaded.limits.items()})
        dtype = getattr(torch, spec.dtype)
        mask = "mask" in spec.name
        inputs.append((torch.rand(shape, generator=random) + mask).to(dtype))
    with module_errors("the model"), torch.inference_mode(), _SigmoidWatch() as watch:
        values = loaded.module(*inputs)[at]
    if values.untyped_storage().data_ptr() in watch.made:
        return True
    values = values.flatten(1)
    return bool((values >= 0).all() and ((values.sum(1) - 1).abs() < _NOT_ONE).all())


class _SigmoidWatch(_dispatch.TorchDispatchMode):  # type: ignore[misc] # torch comes through require
    """While active: where the results of sigmoids are in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[int] = set()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        sigmoid = func._opname.startswith(("sigmoid", "hardsigmoid"))
        for each in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(each, torch.Tensor) and not func.is_view:
                note = self.made.add if sigmoid else self.made.discard
                note(each.untyped_storage().data_ptr())
        return found
