"""Read the input, preprocessing and labels of torchvision's, timm's and Ultralytics' models.

They come from the libraries' metadata, so that a file of weights and the model's name are enough.
Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from deploykit.core.errors import NotFound, did_you_mean
from deploykit.core.extras import installed, require
from deploykit.core.files import sha256
from deploykit.core.task import (
    CLASSIFY,
    DETECT,
    EMBED,
    LETTERBOX,
    SEGMENT,
    SHORTEST_EDGE,
    STRETCH,
    ImageInput,
    Preprocess,
)
from deploykit.core.tensors import TensorSpec, make_spec

torch = require("torch")

INPUT = "image"
_FEWEST = 16  # tensors: those of AlexNet
_COUNTERS = ("num_batches_tracked", "n_averaged")  # names that some files lack or add
_PACKAGES = (
    "torchvision.models",
    "torchvision.models.detection",
    "torchvision.models.segmentation",
)
_ZERO_TO_ONE = Preprocess("0..1", (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
_OWN_NORMALISATION = ("inception_v3", "googlenet")  # ImageNet weights set `transform_input`
_PHOTO = 4 / 3  # width to height of a photo, which is to be as large in a square input
_STRIDE = 32
ASSUMED = "the assumption that all is as for"  # begins a source that the file does not confirm
_RESIZES = "GeneralizedRCNNTransform"  # a name, as torchvision may be missing


@dataclass(frozen=True)
class Preset:
    """A model's `task`, its `inputs` in float32, and how an image becomes them.

    `image`: names the uint8 input that `preprocess` gives the graph. `classes`: how many the model
    has, None if that is not known. `labels`: empty if the library's labels are not this model's.
    `source`: the origin of these facts, for people. `unfit`: why it fits no task. `transform`: the
    library's own, from an image of Pillow to [C, H, W]. A deploykit checkpoint does not name its
    task (""), has the inputs of its recipe, and may lack `image` or `preprocess`.
    """

    task: str
    inputs: tuple[TensorSpec, ...]
    image: ImageInput | None
    preprocess: Preprocess | None
    labels: tuple[str, ...] = ()
    classes: int | None = None
    source: str = ""
    unfit: str = ""
    transform: Callable[[Any], Any] | None = None


def torchvision_name(arch: str | None) -> str | None:
    """Return torchvision's name for `arch`: "resnet18", "torchvision.models:resnet18".

    Return None for another library's model. Raises NotFound for an unknown bare name, MissingExtra.
    """
    package, colon, name = (arch or "").rpartition(":")
    if not (package in _PACKAGES if colon else name.isidentifier()):
        return None
    known = _torchvision().list_models()
    if name.lower() in known:
        return name.lower()
    if colon:
        return None
    hint = "pkg.mod:callable, ./file.py:callable, or the name of one of torchvision's models"
    raise NotFound(
        f"`arch` {arch}: torchvision has no model of that name",
        hint=did_you_mean(name, known, hint),
    )


def build_named(arch: str, weights: Mapping[str, Any]) -> Any:
    """Build a library's model without weights, sized for `weights`; None for other models.

    It gets as many classes as the last layer in `weights`, and auxiliary outputs if these have
    them. Raises NotFound, MissingExtra.
    """
    package, _, name = arch.partition(":")
    if package == "timm" and name:
        timm = require("timm")
        return _sized(lambda **given: timm.create_model(name, **given), weights)
    found = torchvision_name(arch)
    if found is None:
        return None
    builder = _torchvision().get_model_builder(found)
    known = inspect.signature(builder).parameters
    given: dict[str, Any] = {"weights": None}
    if "weights_backbone" in known:
        given["weights_backbone"] = None  # prevents a download
    auxiliary = any(".aux" in f".{key.lower()}" for key in weights)
    if "aux_loss" in known:
        given["aux_loss"] = auxiliary
    if found in _OWN_NORMALISATION:
        given |= {"aux_logits": auxiliary, "init_weights": False}
    module = _sized(lambda **more: builder(**given, **more), weights)
    if found in _OWN_NORMALISATION:
        module.transform_input = True
    return module


class _WithoutMemory(torch.overrides.TorchFunctionMode):  # type: ignore[misc,name-defined]
    """Makes weights without values, so that the largest network is built at once."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func in (torch.empty, torch.zeros, torch.ones, torch.full, torch.randn):
            given["device"] = "meta"
        return func(*args, **given)


def recognise(weights: Mapping[str, Any], file: Path) -> str | None:
    """Return the name of torchvision's model with these weights, found by building its models.

    Models that the name of `file` mentions come first. Wrappers' prefixes do not count, nor does
    the number of classes.
    """
    theirs, unlike = _sizes(weights), set[str]()
    if len(theirs) < _FEWEST or not installed("torchvision"):
        return None
    library, names_alone = _torchvision(), dict.fromkeys(weights)
    models: list[str] = [each for each in library.list_models() if "quantized_" not in each]
    models.sort(key=lambda name: (name not in file.name, not name.startswith("resnet"), len(name)))
    for name in models:
        family = library.get_model_builder(name).__module__
        if family in unlike:
            continue
        with contextlib.suppress(Exception), warnings.catch_warnings(), _WithoutMemory():
            warnings.simplefilter("ignore")
            own = _sizes(build_named(name, names_alone).state_dict())
            if own.keys() == theirs.keys():  # built again with their number of classes
                own = _sizes(build_named(name, weights).state_dict())
            if own == theirs:
                return name
            if not own.keys() & theirs.keys():
                unlike.add(family)
    return None


def _sizes(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return shapes by name, without what a wrapper put before every name."""
    found = {
        key: value.shape
        for key, value in weights.items()
        if hasattr(value, "shape") and not key.endswith(_COUNTERS)
    }
    parts = zip(*(key.split(".")[:-1] for key in found), strict=False)
    shared = takewhile(lambda names: len(set(names)) == 1, parts)
    front = "".join(f"{names[0]}." for names in shared)
    return {key.removeprefix(front): shape for key, shape in found.items()}


def preset_of(module: Any, arch: str | None = None, file: Path | None = None) -> Preset | None:
    """Return the preset that the library of `module` states; None if that is not known.

    `arch`: the user's name for it. `file`: the weights; torchvision's own files are recognised by
    hash, for others the metadata of its newest weights count.
    """
    if isinstance(getattr(module, "pretrained_cfg", None), Mapping):
        return _of_timm(module)
    if type(module).__module__.startswith("ultralytics."):
        return _of_ultralytics(module)
    name = torchvision_name(arch) if arch is not None and arch.isprintable() else None
    return _of_torchvision(module, name, file) if name else None


def _torchvision() -> Any:
    return require("torchvision.models")


# torchvision


def _sized(build: Callable[..., Any], weights: Mapping[str, Any]) -> Any:
    """Call `build()`, with `num_classes` set if the last layer in `weights` has another size."""
    module = build()
    parameters = list(module.named_parameters())
    named = [each for each in parameters if each[0].endswith("box_predictor.cls_score.bias")]
    for name, parameter in named or parameters[-1:]:
        # a wrapper may have added a prefix: the shortest name is the model's own
        found = min((key for key in weights if f".{key}".endswith(f".{name}")), key=len, default="")
        theirs = getattr(weights.get(found), "shape", parameter.shape)
        if len(theirs) and theirs[0] != parameter.shape[0] and theirs[1:] == parameter.shape[1:]:
            return build(num_classes=int(theirs[0]))
    return module


def _of_torchvision(module: Any, name: str, file: Path | None) -> Preset | None:
    kinds = _torchvision().get_model_weights(name)
    digest = sha256(file)[:8] if file is not None and file.is_file() else None
    own = next((each for each in kinds if digest and digest in each.url), None)
    entry = own or kinds.DEFAULT
    labels, source = tuple(entry.meta.get("categories") or ()), f"torchvision's weights {entry}"
    if own is None:
        source = f"{ASSUMED} {entry}, though the file is none of torchvision's"
    transforms = entry.transforms()
    if getattr(module, "transform", None) is not None and hasattr(module.transform, "fixed_size"):
        return _of_detector(module, labels, source)
    mean, std = (tuple(getattr(transforms, key, ())) for key in ("mean", "std"))
    if len(mean) != 3:
        return None
    normalise = Preprocess(name, mean, std)
    filtered = str(transforms.interpolation.value)
    if getattr(transforms, "crop_size", None):
        (size, *_), (edge, *_) = transforms.crop_size, transforms.resize_size
        kind, placed = CLASSIFY, ImageInput(INPUT, size, size, SHORTEST_EDGE, edge, filtered)
    elif name in _torchvision().list_models(module=_torchvision().segmentation):
        (size, *_) = transforms.resize_size
        kind, placed = SEGMENT, ImageInput(INPUT, size, size, LETTERBOX, 0, filtered)
    else:
        return None
    facts = (_image(size), placed, normalise, labels)
    return Preset(kind, *facts, source=source, transform=transforms)


def _of_detector(module: Any, labels: tuple[str, ...], source: str) -> Preset:
    transform = module.transform
    if transform.fixed_size:
        width, height = transform.fixed_size
        placed = ImageInput(INPUT, height, width)
    else:
        side = math.ceil(min(transform.min_size[-1] * _PHOTO, transform.max_size) / _STRIDE)
        placed = ImageInput(INPUT, side * _STRIDE, side * _STRIDE, LETTERBOX)
    spec = make_spec(INPUT, "float32", [1, 3, placed.height, placed.width])
    box_predictor = getattr(getattr(module, "roi_heads", None), "box_predictor", None)
    heads = (
        getattr(getattr(module, "head", None), "classification_head", None),
        getattr(box_predictor, "cls_score", None),
    )
    sizes = [getattr(each, key, None) for each in heads for key in ("num_classes", "out_features")]
    sizes += [getattr(part, "num_columns", None) for part in heads]
    classes = next((size for size in sizes if size), None)
    return Preset(DETECT, (spec,), placed, _ZERO_TO_ONE, labels, classes, source)


def switch_resizing_off(module: Any, height: int, width: int) -> tuple[str, ...]:
    """Stop torchvision's detectors from resizing images of this size; return a note if so.

    They resize each image to about 800 pixels, although it was already placed for them.
    """
    parts = [each for each in module.modules() if type(each).__name__ == _RESIZES]
    found = [each for each in parts if each.fixed_size is None]
    for each in found:
        each.min_size, each.max_size = (min(height, width),), max(height, width)
    return ("switched the detector's own resizing of images off",) if found else ()


def _image(size: int) -> tuple[TensorSpec, ...]:
    return (make_spec(INPUT, "float32", ["N", 3, size, size]),)


# timm


def _of_timm(module: Any) -> Preset | None:
    config = {**module.pretrained_cfg}
    channels, height, width = config.get("input_size") or (0, 0, 0)
    mean, std = (tuple(map(float, config.get(key) or ())) for key in ("mean", "std"))
    if not channels or len(mean) != channels or len(std) != channels:
        return None
    rule, edge = SHORTEST_EDGE, math.floor(min(height, width) / (config.get("crop_pct") or 0.875))
    if config.get("crop_mode") == "squash":
        rule = STRETCH
    elif config.get("crop_mode") == "border":  # it pads each channel with another byte
        return None
    name = ".".join(filter(None, (config.get("architecture"), config.get("tag"))))
    filtered = config.get("interpolation") or "bilinear"
    spec = make_spec(INPUT, "float32", ["N", channels, height, width])
    placed = ImageInput(INPUT, height, width, rule, edge, filtered, "RGB" if channels == 3 else "L")
    labels, count = _timm_labels(module), getattr(module, "num_classes", -1)
    features = count == 0 or (not labels and count == config.get("num_classes"))  # as in CLIP
    return Preset(
        EMBED if features else CLASSIFY,
        (spec,),
        placed,
        Preprocess(name or "timm", mean, std),
        () if features else labels,
        source=f"timm's configuration of {name or type(module).__name__}",
        transform=lambda image: _timm_transform(module)(image),
    )


def _timm_transform(module: Any) -> Any:
    data = require("timm.data")
    return data.create_transform(**data.resolve_data_config({}, model=module))


def _timm_labels(module: Any) -> tuple[str, ...]:
    data = require("timm.data")
    subset = data.infer_imagenet_subset(module)
    return tuple(data.ImageNetInfo(subset).label_descriptions()) if subset else ()


# Ultralytics


def _of_ultralytics(module: Any) -> Preset | None:
    layers = getattr(module, "model", None)
    head = layers[-1] if layers is not None else None
    names = getattr(module, "names", {})
    listed = [names[key] for key in sorted(names)] if isinstance(names, Mapping) else list(names)
    if head is None:
        return None
    head.export = True  # return decoded boxes without the raw maps
    kind = CLASSIFY if type(head).__name__ == "Classify" else DETECT
    unfit = ""
    if type(head).__name__ in ("OBB", "OBB26", "SemanticSegment", "RTDETRDecoder"):
        unfit = f"{type(module).__name__}: its head {type(head).__name__} fits none of the tasks"
    options = getattr(module, "args", {})
    options = options if isinstance(options, Mapping) else vars(options)
    size = options.get("imgsz") or (224 if kind == CLASSIFY else 640)
    height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[-1]))
    spec = make_spec(INPUT, "float32", ["N", 3, height, width])
    placed = ImageInput(INPUT, height, width, LETTERBOX)
    if kind == CLASSIFY:
        placed = ImageInput(INPUT, height, width, SHORTEST_EDGE, min(height, width))
    return Preset(
        kind,
        (spec,),
        placed,
        _ZERO_TO_ONE,
        tuple(map(str, listed)),
        getattr(head, "nc", None) or len(listed) or None,
        f"the checkpoint of Ultralytics ({type(module).__name__})",
        unfit,
    )
