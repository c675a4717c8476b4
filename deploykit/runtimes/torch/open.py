"""Open a PyTorch file or a Hugging Face folder as a module in eval mode with its specs.

Nothing in a file runs as code unless `allow_pickle` says so: a checkpoint names a recipe that comes
with deploykit, and no other Python object.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deploykit.core.artefact import sniff, torch_kind
from deploykit.core.errors import BadInput, NotFound
from deploykit.core.extras import require
from deploykit.core.files import atomic_write
from deploykit.core.json_value import json_value
from deploykit.core.manifest import from_json
from deploykit.core.preprocess import Preprocess
from deploykit.core.recipe import Recipe, Splits, find_bundled, load_recipe
from deploykit.core.task import ImageInput
from deploykit.core.tensors import TensorSpec, parse_spec
from deploykit.runtimes.torch.files import Content, is_state_dict, module_errors, read
from deploykit.runtimes.torch.loaded import (
    Loaded,
    by_position,
    describe_module,
    undescribed,
)
from deploykit.runtimes.torch.operators import with_torchvision
from deploykit.runtimes.torch.outputs import adapt, binding
from deploykit.runtimes.torch.preprocess import before
from deploykit.runtimes.torch.presets import Preset, preset_of
from deploykit.runtimes.torch.programs import open_program
from deploykit.runtimes.torch.weights import build_module, copy_weights, in_float32

torch = require("torch")

CHECKPOINT_VERSION = 1
_LARGEST_SIZE = 1_000_000  # of what a checkpoint lets its recipe build, such as classes
_WHOLE_MODELS = ("torch.export", "TorchScript", "pickle")


def save_checkpoint(
    out: Path,
    module: Any,
    recipe: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    splits: Splits | None = None,
) -> None:
    """Write weights, the recipe's name and the specs: tensors and strings only, no code.

    `splits`: what it was trained on. Of them the checkpoint keeps the arguments that the recipe's
    model was built with, the names of the classes, and how an image became the input.
    """
    document = {
        "deploykit_checkpoint": CHECKPOINT_VERSION,
        "recipe": recipe,
        "inputs": [str(spec) for spec in inputs],
        "outputs": [str(spec) for spec in outputs],
        "sizes": dict(splits.build_with) if splits else {},
        "classes": list(splits.classes) if splits else [],
        "image": json_value(splits.image) if splits else None,
        "state_dict": module.state_dict(),
    }
    save_whole(document, out)


def save_whole(document: Mapping[str, Any], out: Path) -> None:
    """`torch.save` through `atomic_write`: torch hides a full disk behind an error of its own."""
    with atomic_write(out) as tmp, tmp.open("wb") as file:
        try:
            torch.save(document, file)
        except RuntimeError as exc:
            if isinstance(exc.__context__, OSError):
                raise exc.__context__ from None
            raise


def load_weights(path: Path) -> dict[str, Any]:
    """The tensors by name in a checkpoint or in a file of bare weights. Raises BadInput."""
    return dict(_weights_of(path, read(path, allow_pickle=False)))


def load_module(
    path: Path,
    *,
    arch: str | None = None,
    inputs: Sequence[TensorSpec] = (),
    allow_pickle: bool = False,
) -> Loaded:
    """Open `path`, a file or a folder with config.json and model.safetensors.

    `arch`: `pkg.mod:callable` that builds the module of bare weights; `inputs`: its specs; both are
    needed where the file does not hold them. Raises NotFound, BadInput, MissingExtra.
    """
    if path.is_dir():
        from deploykit.runtimes.torch import huggingface

        return huggingface.load_folder(path, arch, inputs)
    content = read(path, allow_pickle=allow_pickle, described=bool(inputs))
    if content.source == "checkpoint":
        return _from_checkpoint(path, content, arch, inputs)
    if content.source in _WHOLE_MODELS:
        if arch is not None:
            raise BadInput(f"{path}: holds a whole model, so `arch` {arch} has nothing to build")
        return _from_whole_model(path, content, inputs)
    if arch is None:
        raise undescribed(path, arch=True, inputs=not inputs)
    module, built_with = build_module(arch, content.arguments, content.value)
    preset = preset_of(module, arch, path)
    inputs = tuple(inputs) or (preset.inputs if preset else ())
    if not inputs:
        raise undescribed(path, inputs=True)
    notes = (
        *content.notes,
        *built_with,
        *copy_weights(path, module, content.value, content.source),
    )
    with module_errors(path):
        loaded = describe_module(path, module, inputs, content.source, notes=notes)
    return replace(loaded, preset=preset)


def model_files(path: Path) -> list[Path]:
    """The files that hold the model's weights: `path`, or those in the folder."""
    if not path.is_dir():
        return [path]
    from deploykit.runtimes.torch import huggingface

    return huggingface.weight_files(path)


def look(path: Path) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...], dict[str, Any]]:
    """Inputs and outputs, as far as the file says, and what it holds; no code of it runs.

    Raises NotFound, BadInput, MissingExtra.
    """
    if sniff(path) == "torch" and (form := torch_kind(path)) != "pickle":
        return (), (), {"kind": form, "contents": "not opened, as that may run code of the file"}
    content = read(path, allow_pickle=False)
    weights = _weights_of(path, content)
    details: dict[str, Any] = {
        "kind": content.source,
        "tensors": len(weights),
        "parameters": sum(tensor.numel() for tensor in weights.values()),
        "weight_bytes": sum(t.numel() * t.element_size() for t in weights.values()),
        "types": dict(Counter(str(t.dtype).removeprefix("torch.") for t in weights.values())),
    }
    if content.source != "checkpoint":
        return (), (), details
    loaded = load_module(path)
    return loaded.inputs, loaded.outputs, {**details, "recipe": loaded.recipe}


def _from_whole_model(path: Path, content: Content, inputs: Sequence[TensorSpec]) -> Loaded:
    with module_errors(path):
        if content.source != "torch.export":
            module, notes = in_float32(content.value.cpu())
            preset = preset_of(module)
            loaded = describe_module(
                path,
                module,
                inputs or (preset.inputs if preset else ()),
                content.source,
                ran_pickle=content.ran_pickle,
                notes=(*content.notes, *notes),
            )
            return replace(loaded, preset=preset)
        program = open_program(str(path), content.value, inputs)
    return Loaded(
        program.module,
        program.inputs,
        program.outputs,
        content.source,
        ran_pickle=content.ran_pickle,
        notes=program.notes,
        limits=program.limits,
    )


def _weights_of(path: Path, content: Content) -> Mapping[str, Any]:
    found = content.value
    weights: Any = found.get("state_dict") if content.source == "checkpoint" else found
    if not is_state_dict(weights):
        raise BadInput(f"{path}: holds no state_dict")
    tensors: Mapping[str, Any] = weights
    return tensors


def _from_checkpoint(
    path: Path, content: Content, arch: str | None, wanted: Sequence[TensorSpec]
) -> Loaded:
    document = content.value
    name, version = document.get("recipe"), document["deploykit_checkpoint"]
    listed = [document.get("inputs"), document.get("outputs")]
    if version != CHECKPOINT_VERSION:
        raise BadInput(
            f"{path}: is a checkpoint of version {version}, this is {CHECKPOINT_VERSION}"
        )
    if not isinstance(name, str) or not all(isinstance(item, list) for item in listed):
        raise BadInput(f"{path}: is a damaged deploykit checkpoint")
    sizes = document.get("sizes", {})
    if not isinstance(sizes, dict) or not all(
        isinstance(key, str) and type(size) is int and 0 < size <= _LARGEST_SIZE
        for key, size in sizes.items()
    ):
        raise BadInput(f"{path}: is a damaged deploykit checkpoint: its sizes are {sizes}")
    inputs, outputs = (tuple(parse_spec(str(spec)) for spec in item or []) for item in listed)
    if wanted and tuple(wanted) != inputs:
        raise BadInput(
            f"{path}: its inputs are {', '.join(map(str, inputs))}",
            hint="a deploykit checkpoint contains them: leave `inputs` out",
        )
    recipe = _recipe_of(path, name, arch)
    if recipe is None:
        module, _ = build_module(arch or "", sizes)
    else:
        module = with_torchvision(recipe.sized_for(sizes).build)
    preprocess = recipe.preprocess if recipe else None
    notes = copy_weights(path, module, _weights_of(path, content))
    bind, more = binding(module, [spec.name for spec in inputs])
    if preprocess is not None:
        module, bind, more = before(module, inputs, preprocess), by_position, notes[:0]
    adapter = adapt(module.eval(), bind, len(inputs))
    preset = _preset_of_training(path, document, inputs, preprocess)
    notes = (*notes, *more)
    return Loaded(adapter, inputs, outputs, content.source, name, notes=notes, preset=preset)


def _preset_of_training(
    path: Path,
    document: Mapping[str, Any],
    inputs: tuple[TensorSpec, ...],
    preprocess: Preprocess | None,
) -> Preset | None:
    """What the checkpoint says of its images and classes; None where it says nothing."""
    where = f"{path}: is a damaged deploykit checkpoint: its"
    image = from_json(ImageInput | None, document.get("image"), f"{where} image")
    classes = from_json(tuple[str, ...], document.get("classes", []), f"{where} classes")
    if image is not None and min(image.height, image.width) < 1:
        raise BadInput(f"{where} image has {image.width}x{image.height} pixels")
    if image is None and not classes:
        return None
    source = f"the training of {document['recipe']}"
    return Preset("", inputs, image, preprocess, classes, source=source)


def _recipe_of(path: Path, name: str, arch: str | None) -> Recipe | None:
    """What a checkpoint was trained with, or None where `arch` builds the model.

    A name out of the file finds packaged recipes alone: code of a path or a module runs only where
    the user typed it.
    """
    if arch is not None:
        return load_recipe(arch) if arch.endswith(".py") or arch == name else None
    try:
        find_bundled(name)
    except NotFound:
        raise BadInput(
            f"{path}: was trained with the recipe '{name}', which does not come with deploykit",
            hint="`arch` names that recipe again, as ./file.py or pkg.mod:RECIPE; its code runs",
        ) from None
    return load_recipe(name)
