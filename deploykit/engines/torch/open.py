"""Open a PyTorch file or a Hugging Face folder as a module in eval mode with its specs.

Nothing in a file runs as code unless `allow_pickle` says so: a checkpoint names a recipe that comes
with deploykit, and no other Python object; a folder's model is a class of the installed
transformers. Bare weights go into the user's architecture; a note reports everything that is not a
plain copy.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deploykit.core.artefact import sniff, torch_kind
from deploykit.core.errors import BadInput, NotFound, first_line, users_code
from deploykit.core.extras import require
from deploykit.core.files import atomic_write, check_readable, import_object, read_json
from deploykit.core.json_value import from_json, json_value
from deploykit.core.recipe import Recipe, Splits, find_bundled, load_recipe
from deploykit.core.task import ImageInput, Preprocess
from deploykit.core.tensors import BATCH, TensorSpec, make_spec, parse_spec
from deploykit.engines.data.examples import Example
from deploykit.engines.torch.files import (
    Content,
    dtype_of,
    is_state_dict,
    list_names,
    module_errors,
    quiet,
    read,
)
from deploykit.engines.torch.loaded import Loaded, before, by_position, describe_module, undescribed
from deploykit.engines.torch.outputs import (
    adapt,
    binding,
    flatten_outputs,
    output_names,
    parameter_names,
)
from deploykit.engines.torch.presets import Preset, build_named, preset_of, recognise

pytree = require("torch.utils._pytree")  # nothing else reads a program's structures
torch = require("torch")


def _from_program(path: Path, content: Content) -> Loaded:
    """Open a program, which states its own inputs. Raises BadInput where it returns no tensor."""
    where, program = str(path), content.value
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    arguments = list(program.graph_signature.user_inputs)  # tensor names or constants
    names = [name for name in arguments if isinstance(values.get(name), torch.Tensor)]
    axes: dict[Any, str] = {}  # the name of each size that is an expression

    def describe_value(name: str, tensor: Any) -> TensorSpec:
        shape: list[int | str] = list(tensor.shape)
        for at, size in enumerate(tensor.shape):
            if not isinstance(size, int):
                shape[at] = axes.get(size.node.expr, f"{name}_{at}")
        return make_spec(name, dtype_of(tensor), shape)

    for name in names:
        for at, size in enumerate(values[name].shape):
            axis = BATCH if at == 0 and BATCH not in axes.values() else f"{name}_{at}"
            if not isinstance(size, int):
                axes.setdefault(size.node.expr, axis)

    def bind(feeds: Sequence[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        fed = dict(zip(names, feeds, strict=True))
        leaves = [fed.get(item, item) for item in arguments]
        args, kwargs = pytree.tree_unflatten(leaves, program.call_spec.in_spec)
        return args, kwargs

    answers = [values.get(name, name) for name in program.graph_signature.user_outputs]
    found = flatten_outputs(pytree.tree_unflatten(answers, program.call_spec.out_spec))
    if not found:
        raise BadInput(f"{where}: the model returns no tensor")
    limits = {
        axes[symbol]: (max(1, int(span.lower)), int(span.upper) if span.upper.is_Integer else None)
        for symbol, span in program.range_constraints.items()
        if symbol in axes
    }
    places, tensors = zip(*found, strict=True)
    return Loaded(
        adapt(program.module(), bind, len(names)),
        tuple(describe_value(name, values[name]) for name in names),
        tuple(map(describe_value, output_names(places, set(names)), tensors)),
        content.source,
        ran_pickle=content.ran_pickle,
        limits=limits,
    )


CHECKPOINT_VERSION = 1
_LARGEST_SIZE = 1_000_000  # limits what a checkpoint's recipe builds, such as classes
_WHOLE_MODELS = ("torch.export", "TorchScript", "pickle")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's facts besides its weights. `sizes`: the arguments of the recipe's `build`."""

    recipe: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    image: ImageInput | None = None
    preprocess: Preprocess | None = None


def save_checkpoint(
    out: Path,
    module: Any,
    name: str,
    recipe: Recipe,
    splits: Splits | None = None,
    *,
    on_written: Callable[[Path], object] = lambda _: None,
) -> None:
    """Write weights, the recipe's name and the specs: tensors and strings only, no code.

    `splits`: the training data, of which the checkpoint keeps the arguments of the recipe's
    `build`, the names of the classes, and the conversion of an image to the input. `on_written`
    gets the temporary file before it replaces `out`.
    """
    inputs, outputs = (tuple(map(str, specs)) for specs in (recipe.inputs, recipe.outputs))
    saved = Checkpoint(name, inputs, outputs)
    if splits:
        saved = replace(saved, sizes=splits.build_with, classes=splits.classes)
        saved = replace(saved, image=splits.image, preprocess=recipe.preprocess)
    document = {
        "deploykit_checkpoint": CHECKPOINT_VERSION,
        **json_value(saved, without=() if splits else ("preprocess",)),
        "state_dict": module.state_dict(),
    }
    save_whole(document, out, on_written)


def save_whole(
    document: Mapping[str, Any], out: Path, on_written: Callable[[Path], object] = lambda _: None
) -> None:
    """Call `torch.save` through `atomic_write`, as torch hides a full disk in its own error."""
    with atomic_write(out) as tmp:
        try:
            with tmp.open("wb") as file:
                torch.save(document, file)
        except RuntimeError as exc:
            if isinstance(exc.__context__, OSError):
                raise exc.__context__ from None
            raise
        on_written(tmp)


def load_weights(path: Path) -> dict[str, Any]:
    """Return the tensors by name in a checkpoint or a file of bare weights. Raises BadInput."""
    return dict(_weights_of(path, read(path, allow_pickle=False)))


def load_module(
    path: Path,
    *,
    arch: str | None = None,
    inputs: Sequence[TensorSpec] = (),
    allow_pickle: bool = False,
    example: Example | None = None,
) -> Loaded:
    """Open `path`, a file or a folder with config.json and model.safetensors.

    `arch`: `pkg.mod:callable` that builds the module of bare weights; `inputs`: its specs. Both are
    needed if the file does not hold them. Raises NotFound, BadInput, MissingExtra.
    """
    if path.is_dir():
        return load_folder(path, arch, inputs, example)
    content = read(path, allow_pickle=allow_pickle)
    if content.source == "checkpoint":
        return _from_checkpoint(path, content, arch, inputs)
    if content.source in _WHOLE_MODELS:
        if arch is not None:
            raise BadInput(f"{path}: holds a whole model, so `arch` {arch} has nothing to build")
        return _from_whole_model(path, content, inputs, example)
    if arch is None:
        raise undescribed(path, arch=True, inputs=not inputs, weights=content.value)
    module, built_with = build_module(arch, content.arguments, content.value)
    copied = copy_weights(path, module, content.value)
    content = replace(content, value=module, notes=(*content.notes, *built_with, *copied))
    with module_errors(path):
        preset = preset_of(module, arch, path)
        return describe_module(path, content, inputs, example=example, preset=preset)


def look(path: Path) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...], dict[str, Any]]:
    """Return the inputs and outputs that the file states, and its content, running no code of it.

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
        "types": dict(Counter(dtype_of(t) for t in weights.values())),
    }
    if content.source != "checkpoint":
        return (), (), details
    saved = _facts(path, content.value)
    inputs, outputs = (tuple(map(parse_spec, specs)) for specs in (saved.inputs, saved.outputs))
    return inputs, outputs, {**details, "recipe": saved.recipe}


def _from_whole_model(
    path: Path, content: Content, inputs: Sequence[TensorSpec], example: Example | None
) -> Loaded:
    with module_errors(path):
        if content.source == "torch.export":
            loaded = _from_program(path, content)
            if inputs and (tuple(inputs) != loaded.inputs or (example and example.arrays)):
                stated = ", ".join(map(str, loaded.inputs))
                hint = "leave `inputs` and `example_inputs` out"
                raise BadInput(f"{path}: states its own inputs, {stated}", hint=hint)
            return loaded
        module, notes = content.value.cpu(), content.notes
        if not isinstance(module, torch.jit.ScriptModule):
            halves = sum(each.dtype == torch.float16 for each in module.state_dict().values())
            if halves:  # as Ultralytics saves them
                notes += (f"{halves} tensors converted from float16 to float32",)
                module = module.float()
        content = replace(content, value=module, notes=notes)
        return describe_module(path, content, inputs, example=example, preset=preset_of(module))


def _weights_of(path: Path, content: Content) -> Mapping[str, Any]:
    found = content.value
    weights: Any = found.get("state_dict") if content.source == "checkpoint" else found
    if not is_state_dict(weights):
        raise BadInput(f"{path}: holds no state_dict")
    tensors: Mapping[str, Any] = weights
    return tensors


def _facts(path: Path, document: Mapping[str, Any]) -> Checkpoint:
    where, version = f"{path}: is a damaged deploykit checkpoint", document["deploykit_checkpoint"]
    if version != CHECKPOINT_VERSION:
        raise BadInput(
            f"{path}: is a checkpoint of version {version}, this is {CHECKPOINT_VERSION}"
        )
    saved: Checkpoint = from_json(Checkpoint, document, where)
    sizes, image, preprocess = saved.sizes, saved.image, saved.preprocess
    if not all(isinstance(key, str) and 0 < size <= _LARGEST_SIZE for key, size in sizes.items()):
        raise BadInput(f"{where}: its sizes are {sizes}")
    if image is not None and min(image.height, image.width) < 1:
        raise BadInput(f"{where}: its 'image' has {image.width}x{image.height} pixels")
    if preprocess and (
        len(preprocess.mean) != len(preprocess.std) or min(preprocess.std, default=0) <= 0
    ):
        raise BadInput(f"{where}: its 'preprocess' is {preprocess}")
    return saved


def _from_checkpoint(
    path: Path, content: Content, arch: str | None, wanted: Sequence[TensorSpec]
) -> Loaded:
    saved = _facts(path, content.value)
    name, sizes, image, preprocess = saved.recipe, saved.sizes, saved.image, saved.preprocess
    inputs, outputs = (tuple(map(parse_spec, specs)) for specs in (saved.inputs, saved.outputs))
    if wanted and tuple(wanted) != inputs:
        raise BadInput(
            f"{path}: its inputs are {', '.join(map(str, inputs))}",
            hint="a deploykit checkpoint contains them: leave `inputs` out",
        )
    recipe = _recipe_of(path, name, arch)
    if recipe is None:
        module, _ = build_module(arch or "", sizes)
    else:
        with users_code(f"{path}: the recipe's build failed with the sizes {sizes}"):
            module = recipe.sized_for(sizes).build()
    notes = copy_weights(path, module, _weights_of(path, content))
    if recipe is not None and "preprocess" not in content.value:
        preprocess = recipe.preprocess
    elif recipe is not None and preprocess != recipe.preprocess:
        own = f"pixels are normalised as in training, {preprocess}"
        notes = (*notes, f"{own}; the recipe has {recipe.preprocess}")
    bind, more = binding(module, [spec.name for spec in inputs])
    if preprocess is not None:
        module, bind, more = before(module, inputs, preprocess), by_position, notes[:0]
    adapter = adapt(module.eval(), bind, len(inputs))
    preset = None
    if image is not None or saved.classes:
        source = f"the training of {name}"
        preset = Preset("", inputs, image, preprocess, saved.classes, source=source)
    notes = (*notes, *more)
    return Loaded(adapter, inputs, outputs, content.source, name, notes=notes, preset=preset)


def _recipe_of(path: Path, name: str, arch: str | None) -> Recipe | None:
    """Return the recipe that trained a checkpoint, or None if `arch` builds the model.

    A name from the file finds only bundled recipes: code of a path or a module runs only if the
    user typed it.
    """
    if arch is not None:
        return load_recipe(arch) if arch.endswith((".py", ":RECIPE")) or arch == name else None
    try:
        find_bundled(name)
    except NotFound:
        raise BadInput(
            f"{path}: was trained with the recipe '{name}', which does not come with deploykit",
            hint="`arch` names that recipe again, as ./file.py or pkg.mod:RECIPE; its code runs",
        ) from None
    return load_recipe(name)


_SHOWN = 2  # names of each kind in an error
_MOST_WRAPPERS = 8


def build_module(
    arch: str,
    arguments: Mapping[str, Any] | None = None,
    weights: Mapping[str, Any] | None = None,
) -> tuple[Any, tuple[str, ...]]:
    """Build a module on the CPU by `arch`, `pkg.mod:callable` or `./file.py:callable`.

    The callable gets those of `arguments` that it names; a note lists them. A library's model,
    such as "resnet18", is built to fit `weights`. Raises BadInput, NotFound, MissingExtra.
    """
    given: dict[str, Any] = {}
    with module_errors(f"`arch` {arch}"):
        named = build_named(arch, weights or {})
    found: Any = named if named is not None else import_object(arch)
    if not isinstance(found, torch.nn.Module):
        with module_errors(f"`arch` {arch}"):
            given = _arguments(arch, found, arguments or {})
            found = found(**given)
    if not isinstance(found, torch.nn.Module):
        raise BadInput(f"`arch` {arch}: returned a {type(found).__name__}, not a torch.nn.Module")
    note = "built with the file's hyper_parameters: "
    notes = (note + ", ".join(f"{k}={v!r}" for k, v in given.items()),) if given else ()
    return found.cpu(), notes


def _arguments(arch: str, function: Any, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `offered` that `function` takes. Raises BadInput if it needs others."""
    signature = inspect.signature(function)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [name for name, each in signature.parameters.items() if each.kind in named]
    given = {name: offered[name] for name in known if name in offered}
    try:
        signature.bind(**given)
    except TypeError as exc:
        raise BadInput(
            f"`arch` {arch}: {exc}",
            hint="write a function without arguments and name that: "
            f"def build(): return {arch.rpartition(':')[2]}(...)  ->  `arch` ./file.py:build",
        ) from exc
    return given


def copy_weights(where: Path, module: Any, weights: Mapping[str, Any]) -> tuple[str, ...]:
    """Copy `weights` into `module`; returns notes. Raises BadInput when they do not fit."""
    own = module.state_dict()
    weights, notes = _of_wrapped(own, weights)
    casts, wrong, sizes = Counter[str](), list[str](), list[str]()
    for key, theirs in weights.items():
        ours = own.get(key)
        if not _is_tensor(theirs) or not _is_tensor(ours):
            continue
        kinds = [(each.is_floating_point(), each.is_complex()) for each in (theirs, ours)]
        if kinds[0] != kinds[1]:  # torch would convert them silently
            wrong.append(f"{key} is {dtype_of(theirs)} in the file, {dtype_of(ours)} in the model")
        elif theirs.shape != ours.shape:  # a module may make room for it: it is asked below
            theirs, ours = list(theirs.shape), list(ours.shape)
            sizes.append(f"{key} has size {theirs} in the file, {ours} in the model")
        elif theirs.dtype != ours.dtype:
            casts[f"{dtype_of(theirs)} to {dtype_of(ours)}"] += 1
    if wrong:
        raise _misfit(where, weights, {"": wrong})
    try:
        missing, unexpected = module.load_state_dict(weights, strict=False)
    except RuntimeError as exc:
        raise _misfit(where, weights, {"": sizes or [first_line(exc)]}) from exc
    holders: dict[int, set[str]] = {}  # names that share a parameter
    for name, parameter in module.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), set()).add(name)
    groups = {name: names for names in holders.values() for name in names}
    tied = [key for key in missing if not groups.get(key, {key}) <= set(missing)]
    if tied:
        notes.append(f"not in the file, as they share another's weights: {list_names(tied)}")
    missing = [key for key in missing if key not in tied]
    if missing or unexpected:
        raise _misfit(where, weights, {"missing ": missing, "unexpected ": unexpected})
    notes += [f"{count} tensors converted from {cast}" for cast, count in casts.items()]
    return tuple(notes)


def _of_wrapped(
    own: Mapping[str, Any], weights: Mapping[str, Any]
) -> tuple[Mapping[str, Any], list[str]]:
    """Return the weights of the model with the names `own`, without what a wrapper put before them.

    Wrappers are DataParallel, torch.compile, AveragedModel, and a LightningModule with the model
    as an attribute. Of several prefixes the one with the most of the names counts, if one has; the
    average of a model, which ends with "module", only where that is alone.
    """
    counts = Counter[str]()
    for key in weights:
        parts = key.split(".", _MOST_WRAPPERS)
        tails = [(n, ".".join(parts[n:])) for n in range(1, len(parts))]
        counts.update(".".join([*parts[:n], ""]) for n, tail in tails if tail in own)
    top = max(counts.values(), default=0)
    most = [each for each, count in counts.items() if count == top]
    if len(most) > 1:
        most = [each for each in most if not each.endswith(".module.")]
    if len(most) != 1 or not own.keys().isdisjoint(weights):
        return weights, []
    prefix = most[0]
    names = [key for key in weights if key.startswith(prefix)]
    others = [key for key in weights if not key.startswith(prefix)]
    note = f"took the weights under '{prefix}'"
    note += f"; not used: {list_names(others)}" * bool(others)
    return {key.removeprefix(prefix): weights[key] for key in names}, [note]


def _misfit(
    where: Path, weights: Mapping[str, Any], reasons: Mapping[str, Sequence[str]]
) -> BadInput:
    """Return the error with a few of the names by reason, and the number of the others."""
    known = recognise(weights, where)
    listed = (f"{why}{list_names(names, _SHOWN)}" for why, names in reasons.items() if names)
    return BadInput(
        f"{where}: weights do not fit the model: {'; '.join(listed)}",
        hint=f"these are the weights of torchvision's {known}: `arch` {known}" if known else None,
    )


def _is_tensor(value: Any) -> bool:
    """Return whether `value` is a tensor with a shape: a lazy module's parameters have none yet."""
    return isinstance(value, torch.Tensor) and not torch.nn.parameter.is_lazy(value)


CONFIG, INDEX = "config.json", "model.safetensors.index.json"
PROCESSOR = "preprocessor_config.json"
_USUAL_CHANNELS = 3


def weight_files(folder: Path) -> list[Path]:
    """Return the folder's safetensors files. Raises BadInput if there are none."""
    if not (folder / CONFIG).is_file():
        raise BadInput(
            f"{folder}: is a folder without {CONFIG}",
            hint="name a file, or a folder that transformers' save_pretrained wrote",
        )
    whole = folder / "model.safetensors"
    if whole.is_file():
        return [whole]
    if not (folder / INDEX).is_file():
        raise BadInput(
            f"{folder}: has no model.safetensors",
            hint="save the model again with save_pretrained(folder), which writes one",
        )
    names = set(read_settings(folder, INDEX).get("weight_map", {}).values())
    return [check_readable(folder / Path(str(name)).name) for name in sorted(names)]


def load_folder(
    folder: Path, arch: str | None, inputs: Sequence[TensorSpec], example: Example | None = None
) -> Loaded:
    """Load the model that config.json names under `architectures`, in float32.

    `inputs`: the specs; if empty, the model's main input decides. Raises BadInput,
    MissingExtra.
    """
    if arch is not None:
        raise BadInput(
            f"{folder}: config.json names the model, so `arch` {arch} has nothing to build",
            hint=f"leave `arch` out, or export {folder / 'model.safetensors'} with it",
        )
    weight_files(folder)
    names = read_settings(folder, CONFIG).get("architectures") or []
    transformers = require("transformers")
    name = str(names[0]) if isinstance(names, list) and names else ""
    with module_errors(folder):
        found: Any = getattr(transformers, name, None)
    if not hasattr(found, "from_pretrained"):
        if not name:
            raise undescribed(f"{folder / CONFIG} (`architectures`)", arch=True, inputs=not inputs)
        raise BadInput(
            f"{folder}: transformers {transformers.__version__} has no model '{name}'",
            hint="export its model.safetensors with `arch` and `inputs`, or upgrade transformers",
        )
    with module_errors(f"{folder}: transformers cannot load it"), without_messages():
        module, report = found.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
        )
    wrong = {
        f"{key} ": sorted(map(str, report.get(f"{key}_keys") or ()))
        for key in ("missing", "mismatched")
    }
    if any(wrong.values()):  # transformers fills these with random numbers
        raise _misfit(folder, {}, wrong)
    specs = tuple(inputs) or _inputs(folder, module)
    with module_errors(folder):
        content = Content("Hugging Face", module)
        loaded = describe_module(folder, content, specs, example=example)
    return replace(loaded, model_class=f"transformers.{name}")


@contextmanager
def without_messages() -> Iterator[None]:
    """Keep transformers from writing messages and progress bars."""
    logging = require("transformers.utils.logging")
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with quiet("transformers", "sentence_transformers"):
            yield
    finally:
        if bars:
            logging.enable_progress_bar()


def _inputs(folder: Path, module: Any) -> tuple[TensorSpec, ...]:
    main, known = str(getattr(module, "main_input_name", "")), parameter_names(module)
    after = [make_spec(name, "int64", ["N", "U"]) for name in known if name == "decoder_input_ids"]
    if main == "input_ids":
        names = [name for name in ("input_ids", "attention_mask") if name in known]
        return (*(make_spec(name, "int64", ["N", "T"]) for name in names), *after)
    shape = _shape_of(main, module.config, read_settings(folder, PROCESSOR))
    if shape is None:
        where = f"{folder} ({type(module).__name__}, main input '{main}')"
        raise undescribed(where, inputs=True)
    return (make_spec(main, "float32", ["N", *shape]), *after)


def _shape_of(main: str, config: Any, processor: dict[str, Any]) -> list[int | str] | None:
    """Return the shape of one sample of the input `main`; None where the folder does not say it.

    `processor`: the settings of the folder's own processor of images.
    """
    inner = (getattr(config, name, None) for name in ("vision_config", "audio_config"))
    parts = [part for part in (config, *inner) if part is not None]

    def stated(name: str) -> Any:
        found = (getattr(part, name, None) for part in parts)
        return next((each for each in found if each is not None), None)

    size, bins = stated("image_size"), stated("num_mel_bins")
    if size is None:
        size = processor.get("crop_size") or processor.get("size")
    if main == "pixel_values":
        size = [size.get("height"), size.get("width")] if isinstance(size, dict) else size
        pair = [size, size] if isinstance(size, int) else list(size or ())
        whole = len(pair) == 2 and all(type(each) is int for each in pair)
        return [stated("num_channels") or _USUAL_CHANNELS, *pair] if whole else None
    if main == "input_values":  # sound itself, but for a model of spectrograms
        return [stated("max_length"), bins] if bins else ["T"]
    if main != "input_features":
        return None
    width, each = stated("feature_projection_input_dim"), stated("input_feat_per_channel")
    if width or each:
        return ["T", width or each * (stated("input_channels") or 1)]
    if bins and stated("max_source_positions"):  # a convolution halves Whisper's spectrograms
        return [bins, 2 * stated("max_source_positions")]
    return [1, "T", bins] if bins else None


def load_processor(folder: Path, kind: str) -> Any:
    """Load the processor of images or sound in `folder`. Raises BadInput, MissingExtra."""
    with module_errors(folder / PROCESSOR), without_messages():
        library = getattr(require("transformers"), kind)
        return library.from_pretrained(folder, local_files_only=True)


def read_settings(folder: Path | None, name: str) -> dict[str, Any]:
    """Return the object in the JSON file `name` of `folder`; {} where there is none."""
    path = folder / name if folder else None
    found = read_json(path) if path is not None and path.is_file() else {}
    return found if isinstance(found, dict) else {}
