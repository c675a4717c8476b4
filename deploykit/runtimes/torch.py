"""Open a PyTorch file: as a module for `export`, and as the reference Engine for `compare`.

In: a deploykit checkpoint, or a bare `state_dict` together with the user's own architecture. Out: a
module in eval mode and its specs. Nothing in a file runs as code unless `allow_pickle` says so: a
checkpoint names a recipe that comes with deploykit, and no other Python object.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deploykit.core.errors import BadInput, DeploykitError, NotFound, Unsupported, first_line
from deploykit.core.extras import require
from deploykit.core.files import atomic_write, check_readable
from deploykit.core.recipe import bundled, load_recipe
from deploykit.core.resources import import_object
from deploykit.core.tensors import TensorSpec, concrete, parse_spec
from deploykit.runtimes.engine import Arrays, Closing, check_feeds

torch = require("torch")

CHECKPOINT_VERSION = 1
_LISTED_KEYS = 10


@dataclass(frozen=True)
class Loaded:
    """A torch module in eval mode on the CPU, its specs, and whether the file ran as a pickle."""

    module: Any
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    recipe: str | None
    ran_pickle: bool


def save_checkpoint(
    out: Path,
    module: Any,
    recipe: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
) -> None:
    """Write weights, the recipe's name and the specs: tensors and texts only, no code."""
    document = {
        "deploykit_checkpoint": CHECKPOINT_VERSION,
        "recipe": recipe,
        "inputs": [str(spec) for spec in inputs],
        "outputs": [str(spec) for spec in outputs],
        "state_dict": module.state_dict(),
    }
    with atomic_write(out) as tmp:
        torch.save(document, tmp)


def load_weights(path: Path) -> dict[str, Any]:
    """The state dict in a checkpoint or in a bare `state_dict` file. Raises BadInput."""
    content = _read(path, allow_pickle=False)
    if isinstance(content, dict) and "deploykit_checkpoint" in content:
        content = content.get("state_dict")
    if not _is_state_dict(content):
        raise BadInput(f"{path}: holds no state_dict")
    weights: dict[str, Any] = content
    return weights


def load_module(
    path: Path,
    *,
    arch: str | None = None,
    inputs: Sequence[TensorSpec] = (),
    allow_pickle: bool = False,
) -> Loaded:
    """Open `path` as a module.

    `arch`: `pkg.mod:callable` that builds the module of a bare `state_dict`; `inputs`: its specs,
    needed where the file does not hold them. Raises NotFound, BadInput.
    """
    content = _read(path, allow_pickle=allow_pickle)
    if isinstance(content, torch.nn.Module):
        return _described(path, content.cpu().eval(), inputs, ran_pickle=True)
    if isinstance(content, dict) and "deploykit_checkpoint" in content:
        return _from_checkpoint(path, content, arch)
    if not _is_state_dict(content):
        raise BadInput(
            f"{path}: holds a {type(content).__name__}, neither a checkpoint nor a state_dict",
            hint="save it with: torch.save(model.state_dict(), path)",
        )
    if arch is None:
        raise BadInput(
            f"{path}: is a bare state_dict, which does not say what the model is",
            hint="name what builds it: --arch pkg.mod:callable or --arch ./file.py:callable",
        )
    module = _build(arch)
    _fill(path, module, content)
    return _described(path, module.eval(), inputs, ran_pickle=False)


def _from_checkpoint(path: Path, content: dict[str, Any], arch: str | None) -> Loaded:
    name, version = content.get("recipe"), content["deploykit_checkpoint"]
    texts = [content.get("inputs"), content.get("outputs")]
    if version != CHECKPOINT_VERSION:
        raise BadInput(
            f"{path}: is a checkpoint of version {version}, this is {CHECKPOINT_VERSION}"
        )
    if not isinstance(name, str) or not all(isinstance(item, list) for item in texts):
        raise BadInput(f"{path}: is a damaged deploykit checkpoint")
    if arch is not None:
        module = _build(arch)
    else:
        try:
            bundled(name)  # a recipe of ours by its name: never a path or module out of a file
        except NotFound:
            raise BadInput(
                f"{path}: was trained with the recipe '{name}', which does not come with deploykit",
                hint="name what builds the model: --arch ./mine.py:callable",
            ) from None
        module = load_recipe(name).build()
    _fill(path, module, content.get("state_dict"))
    inputs, outputs = (tuple(parse_spec(str(text)) for text in item or []) for item in texts)
    return Loaded(module.eval(), inputs, outputs, name, ran_pickle=False)


def _read(path: Path, *, allow_pickle: bool) -> Any:
    check_readable(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=not allow_pickle)
    except pickle.UnpicklingError as exc:
        if allow_pickle:
            raise BadInput(f"{path}: cannot be unpickled: {first_line(exc)}") from exc
        raise BadInput(
            f"{path}: loading it would run Python code stored in the file, so it was not loaded",
            hint="save the weights alone: torch.save(model.state_dict(), path); or, if you trust "
            "whoever made the file: --allow-pickle",
        ) from exc
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError) as exc:
        raise BadInput(
            f"{path}: is not a readable PyTorch file (truncated or damaged?): {first_line(exc)}"
        ) from exc


def _is_state_dict(content: Any) -> bool:
    return (
        isinstance(content, Mapping)
        and len(content) > 0
        and all(isinstance(key, str) for key in content)
        and all(isinstance(value, torch.Tensor) for value in content.values())
    )


def _build(arch: str) -> Any:
    build = import_object(arch)
    if not callable(build):
        raise BadInput(f"--arch {arch}: is a {type(build).__name__}, a callable is needed")
    module = build()
    if not isinstance(module, torch.nn.Module):
        raise BadInput(f"--arch {arch}: returned a {type(module).__name__}, not a torch.nn.Module")
    return module.cpu()


def _fill(path: Path, module: Any, weights: Any) -> None:
    """Load `weights` into `module`; an error lists what is missing and what is not expected."""
    if not _is_state_dict(weights):
        raise BadInput(f"{path}: holds no state_dict")
    try:
        missing, unexpected = module.load_state_dict(weights, strict=False)
    except RuntimeError as exc:
        reason = " ".join(line.strip() for line in str(exc).splitlines()[1:3])
        raise BadInput(f"{path}: weights do not fit the model: {reason}") from exc
    if missing or unexpected:
        raise BadInput(
            f"{path}: weights do not fit the model: "
            f"missing {_listed(missing)}; unexpected {_listed(unexpected)}"
        )


def _listed(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _LISTED_KEYS} more" if len(keys) > _LISTED_KEYS else ""
    return ", ".join(keys[:_LISTED_KEYS]) + more if keys else "none"


def _described(
    path: Path, module: Any, inputs: Sequence[TensorSpec], *, ran_pickle: bool
) -> Loaded:
    """Find the outputs of a module that came without specs, by running it on zeros."""
    if not inputs:
        raise BadInput(
            f"{path}: the file does not say what the model's inputs are",
            hint="name each: --input 'x:float32[N,3,224,224]'",
        )
    axes = {axis for spec in inputs for axis in spec.shape if isinstance(axis, str)}
    shapes = []
    for size in (2, 3):  # two sizes of every dynamic axis: an output axis that moves is dynamic
        feeds = [_zeros(spec, dict.fromkeys(axes, size)) for spec in inputs]
        try:
            with torch.inference_mode():
                values = _as_tuple(module(*feeds))
        except (RuntimeError, TypeError, ValueError, IndexError) as exc:
            raise BadInput(
                f"{path}: the model does not take {', '.join(map(str, inputs))}: {first_line(exc)}"
            ) from exc
        shapes.append([(_dtype_name(value), tuple(value.shape)) for value in values])
    outputs = []
    for number, ((dtype, small), (_, large)) in enumerate(zip(*shapes, strict=True)):
        name = "output" if len(shapes[0]) == 1 else f"output_{number}"
        axes_out: list[int | str] = [
            low if low == high else ("N" if at == 0 else f"{name}_{at}")
            for at, (low, high) in enumerate(zip(small, large, strict=True))
        ]
        outputs.append(TensorSpec(name, dtype, tuple(axes_out)))
    return Loaded(module, tuple(inputs), tuple(outputs), None, ran_pickle)


def _zeros(spec: TensorSpec, sizes: Mapping[str, int]) -> Any:
    return torch.zeros(concrete(spec, sizes), dtype=getattr(torch, spec.dtype))


def _dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _as_tuple(values: Any) -> tuple[Any, ...]:
    values = values if isinstance(values, (tuple, list)) else (values,)
    if not all(isinstance(value, torch.Tensor) for value in values):
        raise BadInput("the model's outputs are not tensors; this version reads tensors and tuples")
    return tuple(values)


def open_engine(path: Path, device: str = "auto", threads: int | None = None) -> TorchEngine:
    """A deploykit checkpoint as an Engine; raises BadInput for a file without specs."""
    return TorchEngine(load_module(path), path.name, device, threads)


class TorchEngine(Closing):
    """The reference: PyTorch eager, float32."""

    max_batch: int | None = None

    def __init__(self, loaded: Loaded, where: str, device: str, threads: int | None) -> None:
        cuda = torch.cuda.is_available()
        chosen = ("cuda:0" if cuda else "cpu") if device == "auto" else device
        if chosen != "cpu" and not cuda:
            raise Unsupported(
                f"{where}: device '{device}' was asked for, but torch sees no GPU",
                hint="see: deploykit doctor",
            )
        self.inputs, self.outputs = loaded.inputs, loaded.outputs
        self.runtime = f"torch {torch.__version__}"
        self.device = chosen
        self._where = where
        self._module = loaded.module.to(chosen)
        if threads is not None:
            torch.set_num_threads(threads)  # torch keeps one number for the whole process

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        if self._module is None:
            raise DeploykitError(f"{self._where}: the engine is closed")
        check_feeds(self.inputs, feeds, self._where)
        arrays = [np.require(feeds[spec.name], requirements=["C", "W"]) for spec in self.inputs]
        with torch.inference_mode():
            tensors = [torch.from_numpy(array).to(self.device) for array in arrays]
            values = _as_tuple(self._module(*tensors))
        pairs = zip(self.outputs, values, strict=True)
        return {spec.name: value.cpu().numpy().copy() for spec, value in pairs}

    def close(self) -> None:
        self._module = None


def parameters(module: Any) -> dict[str, int]:
    """Parameters of a module: how many, how many of them train, and their bytes."""
    every = list(module.parameters())
    return {
        "parameters": sum(p.numel() for p in every),
        "trainable": sum(p.numel() for p in every if p.requires_grad),
        "weight_bytes": sum(p.numel() * p.element_size() for p in every),
    }
