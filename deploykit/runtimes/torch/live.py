"""Take a live `nn.Module` and example inputs: the specs follow from the examples."""

from __future__ import annotations

import copy
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from deploykit.core.errors import BadInput
from deploykit.core.extras import require
from deploykit.core.tensors import BATCH, TensorSpec, make_spec
from deploykit.runtimes.torch.files import module_errors, quiet
from deploykit.runtimes.torch.loaded import Loaded, describe_module
from deploykit.runtimes.torch.outputs import parameter_names, to_numpy, wrapper_for
from deploykit.runtimes.torch.presets import preset_of

torch = require("torch")

DynamicAxes = Mapping[str, Mapping[int, str]]


def is_module(obj: object) -> bool:
    return isinstance(obj, torch.nn.Module)


def name_of(module: Any) -> str:
    """The module's class with its package: "torchvision.models.resnet.ResNet"."""
    kind = type(_unwrap(module))
    return f"{kind.__module__}.{kind.__qualname__}"


def load_live(module: Any, inputs: Sequence[TensorSpec]) -> Loaded:
    """`module` in eval mode on the CPU; the caller's own module stays as it is.

    Weights that are on the CPU already are shared, not copied. Raises BadInput.
    """
    name = name_of(module)
    with module_errors(name):
        copied = _copy(_unwrap(module))
        preset = preset_of(copied)
        inputs = inputs or (preset.inputs if preset else ())
        return replace(describe_module(name, copied, inputs, "module"), preset=preset)


def hash_weights(module: Any) -> str:
    """SHA-256 over the names, dtypes, shapes and bytes of the state_dict, in its order."""
    digest = hashlib.sha256()
    for name, value in _unwrap(module).state_dict().items():
        if isinstance(value, torch.Tensor):
            digest.update(f"{name}:{value.dtype}{tuple(value.shape)}".encode())
            plain = value.detach().cpu().contiguous().reshape(-1)
            digest.update(plain.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def specs_from(
    module: Any, example: object, dynamic_axes: DynamicAxes | None = None
) -> tuple[tuple[TensorSpec, ...], dict[str, np.ndarray]]:
    """The specs that `example` shows, and its arrays by name.

    `example`: a tensor, a tuple of tensors by position, or a dict of tensors by name. Axis 0 is the
    batch N of every input whose axis 0 is as long as the first input's. `dynamic_axes`: names of
    further axes, {"input_ids": {1: "T"}}. Raises BadInput.
    """
    tensors = _name_tensors(module, example)
    named = dict(dynamic_axes or {})
    unknown = [name for name in named if name not in tensors]
    if unknown:
        raise BadInput(
            f"`dynamic_axes` names '{unknown[0]}', which is not an input",
            hint="the inputs are: " + ", ".join(tensors),
        )
    batch = next((len(tensor) for tensor in tensors.values() if tensor.ndim), None)
    specs = []
    for name, tensor in tensors.items():
        axes: list[int | str] = list(tensor.shape)
        if axes and axes[0] == batch:
            axes[0] = BATCH
        for at, axis in named.get(name, {}).items():
            if not -len(axes) <= at < len(axes):
                raise BadInput(f"`dynamic_axes`: input '{name}' has no axis {at}")
            axes[at] = axis
        specs.append(make_spec(name, str(tensor.dtype).removeprefix("torch."), axes))
    return tuple(specs), {name: to_numpy(tensor) for name, tensor in tensors.items()}


def _name_tensors(module: Any, example: object) -> dict[str, Any]:
    if isinstance(example, Mapping):
        found = {str(name): value for name, value in example.items()}
    else:
        values = list(example) if isinstance(example, (tuple, list)) else [example]
        names = parameter_names(_unwrap(module)) if is_module(module) else []
        names += [f"input_{number}" for number in range(len(names), len(values))]
        found = dict(zip(names, values, strict=False))
    for name, value in found.items():
        if isinstance(value, np.ndarray):
            found[name] = value = torch.from_numpy(value)
        if not isinstance(value, torch.Tensor):
            packs = isinstance(value, (Mapping, tuple, list))
            raise BadInput(
                f"`example_inputs`: '{name}' is a {type(value).__name__}, not a tensor",
                hint=wrapper_for(name, value)
                if packs
                else "give a tensor, a tuple of tensors, or a dict of tensors by parameter name",
            )
    if not found:
        raise BadInput("`example_inputs` holds no tensor")
    return found


def _unwrap(module: Any) -> Any:
    """What torch.compile or DataParallel wraps."""
    while True:
        if isinstance(module, torch.nn.DataParallel):
            module = module.module
        elif hasattr(module, "_orig_mod"):
            module = module._orig_mod
        else:
            return module


def _copy(module: Any) -> Any:
    """A copy on the CPU; weights that are there already share their memory, but TorchScript's."""
    if isinstance(module, torch.jit.ScriptModule):
        stored = io.BytesIO()
        with quiet():  # deprecated, and the only way to copy one
            torch.jit.save(module, stored)
            stored.seek(0)
            return torch.jit.load(stored, map_location="cpu")
    memo: dict[int, Any] = {}
    for part in module.modules():
        own = [
            *vars(part).get("_parameters", {}).values(),
            *vars(part).get("_buffers", {}).values(),
        ]
        for value in (*own, *vars(part).values()):
            if isinstance(value, torch.nn.Parameter):
                memo[id(value)] = torch.nn.Parameter(value.detach().cpu(), value.requires_grad)
            elif isinstance(value, torch.Tensor):
                memo[id(value)] = value.detach().cpu()
    return copy.deepcopy(module, memo).cpu()
