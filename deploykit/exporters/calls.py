"""Which line of the user's code calls an operator, draws random numbers or changes the model."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from deploykit.core.errors import BadInput
from deploykit.core.extras import require
from deploykit.runtimes.torch.advice import innermost, rewrite_for

torch: Any = require("torch")
_dispatch: Any = require("torch.utils._python_dispatch")

_RANDOM_HINT = (
    "an exported model answers the same each time: in eval return the mean, and give F.dropout "
    "training=self.training"
)
_STATE_HINT = "a graph keeps no state between calls: take it as an input, and return the new one"
_QUANTIZED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized")


class CallWatch(_dispatch.TorchDispatchMode):  # type: ignore[misc] # torch comes through require
    """While active: the first line that called each operator, by "aten.name".

    `random`: the line that drew random numbers. `changed`: the model's own tensors that a line
    wrote to, by name.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self.lines: dict[str, str] = {}
        self.random = ""
        self.changed: dict[str, str] = {}
        own = (*module.named_parameters(), *module.named_buffers()) if _has_layers(module) else ()
        self._own = {tensor.data_ptr(): name for name, tensor in own if tensor.numel()}

    def __torch_dispatch__(
        self,
        func: Any,
        _types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        place = innermost(sys._getframe())
        self.lines.setdefault(f"{func.namespace}.{func._opname}", place)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random = self.random or place
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor):
            name = self._own.get(args[0].data_ptr())
            if name is not None:
                self.changed.setdefault(name.removeprefix("module."), place)
        return func(*args, **(kwargs or {}))

    def add_to(self, error: BadInput | Any) -> bool:
        """Say in `error` why the model's answers differ from call to call; False if they do not."""
        if self.random:
            error.message += f"; the model draws random numbers at {self.random}"
            error.hint = _RANDOM_HINT
        elif self.changed:
            name, place = next(iter(self.changed.items()))
            error.message += f"; the model changes its own '{name}' at {place}"
            error.hint = _STATE_HINT
        return bool(self.random or self.changed)

    def add_operator(self, error: BadInput, operator: str) -> None:
        """Name the line that calls `operator` in `error`, and what to write instead."""
        place = self.lines.get(operator, "")
        if place and place not in error.message:
            error.message += f" ({place})"
        error.hint = error.hint or self._by_layers(operator) or rewrite_for(operator)

    def _by_layers(self, operator: str) -> str | None:
        parametrized = torch.nn.utils.parametrize.is_parametrized
        layers = [each for _, each in self.module.named_modules() if parametrized(each)]
        if not layers or "linalg" not in operator:
            return None
        name = next(iter(layers[0].parametrizations))
        return (
            "keep the weight that the parametrization makes: torch.nn.utils.parametrize."
            f"remove_parametrizations(layer, '{name}') before the export"
        )


def check_layers(error: BadInput, module: Any) -> None:
    """Where the export failed over torch's own quantized layers, say that instead."""
    for name, layer in module.named_modules() if _has_layers(module) else ():
        if type(layer).__module__.startswith(_QUANTIZED):
            error.message = (
                f"layer '{name.removeprefix('module.')}' is one of torch's quantized layers, which "
                f"its exporter does not take ({type(layer).__module__}.{type(layer).__name__})"
            )
            error.hint = "export the float model, then: deploykit quantize --to int8 --calib DATA"
            return


def _has_layers(module: Any) -> bool:
    return isinstance(module, torch.nn.Module)
