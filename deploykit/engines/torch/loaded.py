"""Hold a PyTorch module that is ready to export or run, with its specs and its origin.

It may stand behind a preprocessing of pixels, so that it takes bytes.
"""

from __future__ import annotations

import copy
import hashlib
import io
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from deploykit.core.errors import BadInput
from deploykit.core.extras import require
from deploykit.core.files import read_toml
from deploykit.core.json_value import from_json
from deploykit.core.task import (
    COLOURS,
    IMAGENET,
    INTERPOLATIONS,
    RESIZE_RULES,
    SHORTEST_EDGE,
    Preprocess,
)
from deploykit.core.tensors import BATCH, TensorSpec, make_spec
from deploykit.engines.data.examples import Example
from deploykit.engines.torch.files import Content, dtype_of, module_errors, quiet
from deploykit.engines.torch.outputs import (
    WRAP,
    adapt,
    binding,
    describe,
    parameter_names,
    to_numpy,
)
from deploykit.engines.torch.presets import Preset, preset_of, recognise

torch = require("torch")


class FromBytes(torch.nn.Module):  # type: ignore[misc, name-defined] # torch is imported through require
    """Converts uint8 (N, H, W, C) to normalised float32 (N, C, H, W) and calls `module`.

    `place`: the position of the image among the inputs; the others go to `module` unchanged.
    """

    def __init__(self, module: Any, preprocess: Preprocess, place: int = 0) -> None:
        super().__init__()
        self.module = module
        self.place = place
        mean, std = (
            torch.tensor(v, dtype=torch.float64) for v in (preprocess.mean, preprocess.std)
        )
        # this is (byte * scale - mean) / std as one multiplication and one addition
        for name, values in (("scale", preprocess.scale / std), ("shift", -mean / std)):
            values_C = values.to(torch.float32)
            self.register_buffer(f"byte_{name}", values_C.reshape(1, -1, 1, 1), persistent=False)

    def normalise(self, image_NHWC: Any) -> Any:
        """Convert bytes to the image that `module` takes."""
        # the cast comes first: TensorRT takes uint8 only there
        image_NCHW = image_NHWC.to(torch.float32).permute(0, 3, 1, 2)
        return image_NCHW * self.byte_scale + self.byte_shift

    def forward(self, *inputs: Any) -> Any:
        image_NCHW = self.normalise(inputs[self.place])
        return self.module(*inputs[: self.place], image_NCHW, *inputs[self.place + 1 :])


def before(module: Any, inputs: Sequence[TensorSpec], preprocess: Preprocess | None) -> Any:
    """Return `module` for a recipe's data: behind `preprocess`, if the recipe has one.

    `inputs`: the recipe's inputs. Raises BadInput unless one of them is uint8 (N, H, W, C).
    """
    if preprocess is None:
        return module
    for place, spec in enumerate(inputs):
        if spec.dtype == "uint8" and spec.shape[3:] == (preprocess.channels,):
            return FromBytes(module, preprocess, place)
    raise BadInput(
        f"the recipe has a preprocess of {preprocess.channels} channels, but no input "
        f"uint8[N,H,W,{preprocess.channels}]",
        hint="its inputs are: " + ", ".join(map(str, inputs)),
    )


_EXPERTS = "_experts_implementation"  # of transformers' configurations


@dataclass(frozen=True)
class Loaded:
    """A torch module in eval mode on the CPU, its specs and its origin.

    `module`: takes the inputs by position in the order of `inputs`, returns a tuple in the order of
    `outputs`; the names of its weights begin with "module.". `source`: "checkpoint", "state_dict",
    "safetensors", "Lightning", "Hugging Face", "torch.export", "TorchScript", "pickle" or "module".
    `ran_pickle`: code in the file could run. `notes`: what was selected, dropped or converted, a
    sentence each. `limits`: the smallest and largest size (None: any) of those dynamic axes for
    which they are known. `model_class`: the class in transformers, if a folder names it. `preset`:
    its library's description. `parts`: the same model in two consecutive parts, the second of which
    chooses by values that may be equal, as NMS does. `sizes`: of the dynamic axes, at which it ran.
    `example`: the user's inputs.
    """

    module: Any
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    source: str
    recipe: str | None = None
    ran_pickle: bool = False
    notes: tuple[str, ...] = ()
    limits: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    model_class: str | None = None
    preset: Preset | None = None
    parts: tuple[Loaded, Loaded] | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    example: Example = field(default_factory=Example)


class Undescribed(BadInput):
    """A file, folder or module does not say what the model or its inputs are.

    `arch`: the name of torchvision's model with these weights; "" where none has them.
    """

    arch = ""


def undescribed(
    where: object,
    *,
    arch: bool = False,
    inputs: bool = False,
    weights: Mapping[str, Any] | None = None,
) -> Undescribed:
    """Return one error for all that `where` lacks: the architecture, the inputs or both.

    `weights`: those of the file, which may be of a model of torchvision.
    """
    if weights and (name := recognise(weights, Path(str(where)))):
        message = f"{where}: does not say what the model is; these are the weights of torchvision's"
        error = Undescribed(f"{message} {name}", hint=f"`arch` {name}")
        error.arch = name
        return error
    builds = (
        "`arch` builds the model: a name of torchvision's such as resnet50, timm:NAME, "
        "pkg.mod:callable or ./file.py:callable"
    )
    describes = "`inputs` describes each input, for example 'x:float32[N,3,224,224]'"
    lacks = {"what the model is": builds} if arch else {}
    lacks |= {"what its inputs are": describes} if inputs else {}
    message = f"{where}: does not say {' or '.join(lacks)}"
    return Undescribed(message, hint="; ".join(lacks.values()))


def describe_module(
    where: object,
    content: Content,
    inputs: Sequence[TensorSpec],
    *,
    example: Example | None = None,
    preset: Preset | None = None,
) -> Loaded:
    """Find the outputs of `content`, a module, by running it. `inputs`: else those of `preset`."""
    module = content.value
    inputs = tuple(inputs) or (preset.inputs if preset else ())
    if not inputs:
        raise undescribed(where, inputs=True)
    configs: list[Any] = [getattr(part, "config", None) for part in module.modules()]
    caching = [config for config in configs if getattr(config, "use_cache", None) is True]
    for config in caching:  # transformers' key/value cache is an object that no graph can return
        config.use_cache = False
    cached = ["switched use_cache off in the model's config"] if caching else []
    grouped = [each for each in configs if getattr(each, _EXPERTS, None) == "grouped_mm"]
    for config in grouped:  # ONNX has no product of groups
        setattr(config, _EXPERTS, "batched_mm")
    if grouped:
        cached.append("set the model's experts to batched_mm, as set_experts_implementation does")
    bind, more = binding(module, [spec.name for spec in inputs])
    adapter = adapt(module.eval(), bind, len(inputs))
    example = example or Example()
    found = describe(str(where), adapter, inputs, example)
    if isinstance(module, torch.jit.ScriptModule):
        # an exporter cannot follow from Python into TorchScript: the selection of outputs is traced
        with module_errors(where), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # deprecated, and the only way to this format
            adapter = torch.jit.trace(adapter, tuple(found.feeds), check_trace=False, strict=False)
    sizes = [
        f"the model takes axis {axis} "
        + (f"from {low} {f'to {high}' if high else 'on'}" if low > 1 else f"up to {high}")
        for axis, (low, high) in found.limits.items()
    ]
    return Loaded(
        adapter,
        inputs,
        found.outputs,
        content.source,
        ran_pickle=content.ran_pickle,
        notes=(*content.notes, *cached, *more, *sizes),
        limits=found.limits,
        preset=preset,
        sizes=found.sizes,
        example=example,
    )


def with_preprocess(loaded: Loaded, preprocess: Preprocess) -> Loaded:
    """Make `loaded` take bytes. Raises BadInput unless one input is an image of these channels."""
    if loaded.source == "TorchScript":
        raise BadInput(
            "`preprocess` does not go with TorchScript, whose graph is fixed",
            hint="export the state_dict with `arch` instead",
        )
    place, spec = image_input(loaded.inputs, preprocess)
    inputs = (*loaded.inputs[:place], spec, *loaded.inputs[place + 1 :])
    module = FromBytes(loaded.module, preprocess, place).eval()
    return replace(loaded, module=adapt(module, by_position, len(inputs)), inputs=inputs)


def by_position(inputs: Sequence[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    return inputs, {}


def is_module(obj: object) -> bool:
    return isinstance(obj, torch.nn.Module)


def name_of(module: Any) -> str:
    """Return the module's class with its package: "torchvision.models.resnet.ResNet"."""
    kind = type(_unwrap(module))
    return f"{kind.__module__}.{kind.__qualname__}"


def load_live(module: Any, inputs: Sequence[TensorSpec], example: Example | None = None) -> Loaded:
    """Load `module` in eval mode on the CPU, without changing the caller's module.

    Weights that are already on the CPU are shared, not copied. Raises BadInput.
    """
    name = name_of(module)
    with module_errors(name):
        copied = _copy(_unwrap(module))
        preset = preset_of(copied)
        content = Content("module", copied)
        return describe_module(name, content, inputs, example=example, preset=preset)


def hash_weights(module: Any) -> str:
    """Return the SHA-256 of names, dtypes, shapes and bytes of the state_dict, in its order."""
    digest = hashlib.sha256()
    for name, value in _unwrap(module).state_dict().items():
        if isinstance(value, torch.Tensor):
            digest.update(f"{name}:{value.dtype}{tuple(value.shape)}".encode())
            plain = value.detach().cpu().contiguous().reshape(-1)
            digest.update(plain.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def specs_from(
    module: Any, example: object, dynamic_axes: Mapping[str, Mapping[int, str]] | None = None
) -> tuple[tuple[TensorSpec, ...], dict[str, np.ndarray]]:
    """Derive the specs from `example`; return them and its arrays by name.

    `example`: a tensor, a tuple of tensors by position, or a dict of tensors by name. Axis 0 is the
    batch N of every input whose axis 0 is as long as the first input's. `dynamic_axes`: names of
    other axes, {"input_ids": {1: "T"}}. Raises BadInput.
    """
    if isinstance(example, Mapping):
        tensors = {str(name): value for name, value in example.items()}
    else:
        values = list(example) if isinstance(example, (tuple, list)) else [example]
        names = parameter_names(_unwrap(module)) if is_module(module) else []
        names += [f"input_{number}" for number in range(len(names), len(values))]
        tensors = dict(zip(names, values, strict=False))
    for name, value in tensors.items():
        if isinstance(value, np.ndarray):
            tensors[name] = torch.from_numpy(value)
        elif not isinstance(value, torch.Tensor):
            packs = isinstance(value, (Mapping, tuple, list))
            usual = "give a tensor, a tuple of tensors, or a dict of tensors by parameter name"
            what = f"`example_inputs`: '{name}' is a {type(value).__name__}, not a tensor"
            raise BadInput(what, hint=WRAP if packs else usual)
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
        specs.append(make_spec(name, dtype_of(tensor), axes))
    return tuple(specs), {name: to_numpy(tensor) for name, tensor in tensors.items()}


def _unwrap(module: Any) -> Any:
    while True:
        if isinstance(module, torch.nn.DataParallel):
            module = module.module
        elif hasattr(module, "_orig_mod"):
            module = module._orig_mod
        else:
            return module


def _copy(module: Any) -> Any:
    """Copy `module` to the CPU; weights already there are shared, except TorchScript's."""
    if isinstance(module, torch.jit.ScriptModule):
        stored = io.BytesIO()
        with quiet():  # it is deprecated, and the only way to copy
            torch.jit.save(module, stored)
            stored.seek(0)
            return torch.jit.load(stored, map_location="cpu")
    memo: dict[int, Any] = {}
    attributes = (value for part in module.modules() for value in vars(part).values())
    for value in (*module.parameters(), *module.buffers(), *attributes):
        if isinstance(value, torch.nn.Parameter):
            memo[id(value)] = torch.nn.Parameter(value.detach().cpu(), value.requires_grad)
        elif isinstance(value, torch.Tensor):
            memo[id(value)] = value.detach().cpu()
    return copy.deepcopy(module, memo).cpu()


_PLACING: Mapping[str, Sequence[object]] = {  # the values of a key about placing an image
    "resize": RESIZE_RULES,
    "interpolation": INTERPOLATIONS,
    "colours": COLOURS,
    "resize_to": range(1, (1 << 14) + 1),
    "padding": range(256),
}


def load_preprocess(reference: str | None) -> tuple[Preprocess | None, dict[str, Any]]:
    """Read `imagenet`, or a TOML file with `mean`, `std` and optionally `scale` (by default 1/255).

    The second result has those fields of `ImageInput` that the file gives: `resize`, `resize_to`,
    `interpolation`, `colours` and `padding`. Raises NotFound, or BadInput naming the file and the
    key at fault.
    """
    if reference is None:
        return None, {}
    if reference == IMAGENET.name:
        return IMAGENET, {}
    if not reference.endswith(".toml"):
        raise BadInput(
            f"`preprocess`: '{reference}' is neither 'imagenet' nor a .toml file",
            hint="a file holds: mean = [0.5, 0.5, 0.5] and std = [0.5, 0.5, 0.5]",
        )
    path = Path(reference)
    values = read_toml(path)
    known = ("mean", "std", "scale", *_PLACING)
    if unknown := set(values) - set(known):
        raise BadInput(
            f"{path}: unknown key '{sorted(unknown)[0]}'", hint=f"the keys are: {', '.join(known)}"
        )
    found: Preprocess = from_json(Preprocess, {**values, "name": path.stem}, str(path))
    mean, divisors = found.mean, (*found.std, found.scale)
    finite = all(map(math.isfinite, (*mean, *divisors)))
    if not finite or not 0 < len(mean) == len(found.std) or min(divisors) <= 0:
        raise BadInput(f"{path}: needs mean and std, a number per channel; std and scale above 0")
    placing = {key: value for key, value in values.items() if key in _PLACING}
    for key, value in placing.items():
        allowed = _PLACING[key]
        if value not in allowed or isinstance(value, (bool, float)):
            few = (allowed[0], "...", allowed[-1]) if isinstance(allowed, range) else allowed
            listed = ", ".join(map(str, few))
            raise BadInput(f"{path}: {key} must be one of {listed}, got {value!r}")
    if ("resize_to" in placing) != (placing.get("resize") == SHORTEST_EDGE):
        raise BadInput(f'{path}: resize = "{SHORTEST_EDGE}" and resize_to go together')
    return found, placing


def image_input(inputs: Sequence[TensorSpec], preprocess: Preprocess) -> tuple[int, TensorSpec]:
    """Return the position of the image among the inputs, and its spec as uint8, channels last.

    Raises BadInput unless exactly one input is float32 (N, C, H, W) with the channels of
    `preprocess`.
    """
    found = [
        (place, spec)
        for place, spec in enumerate(inputs)
        if spec.dtype == "float32" and len(spec.shape) == 4 and spec.shape[1] == preprocess.channels
    ]
    if len(found) != 1:
        raise BadInput(
            f"`preprocess` {preprocess.name}: {len(found)} inputs are "
            f"float32[N,{preprocess.channels},H,W], exactly one must be",
            hint="the inputs are: " + ", ".join(map(str, inputs)),
        )
    place, spec = found[0]
    batch, channels, height, width = spec.shape
    return place, replace(spec, dtype="uint8", shape=(batch, height, width, channels))
