"""Make a model's task part of it: the input's preprocessing, the task's own outputs, the labels."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from deploykit.core.errors import BadInput
from deploykit.core.files import check_readable, read_json, sha256
from deploykit.core.task import (
    CLS,
    DETECT,
    KINDS,
    LETTERBOX,
    MEAN,
    SHORTEST_EDGE,
    TOKENIZER,
    ImageInput,
    Kind,
    Preprocess,
    Task,
    TextInput,
)
from deploykit.core.tensors import TensorSpec, concrete

if TYPE_CHECKING:
    from deploykit.engines.torch.loaded import Loaded
    from deploykit.engines.torch.presets import Preset
    from deploykit.exporting.heads.head import TaskHead

# TensorRT's TopK takes no more boxes
_LIMITS = {"threshold": (0, 1), "iou": (0, 1), "boxes": (1, 3840), "max_length": (2, 1 << 20)}
_JOINERS = {0x200C: "", 0x200D: ""}  # between letters of some scripts, and parts of an emoji


@dataclass(frozen=True)
class TaskOptions:
    """The user's options for the task; None where the model's own metadata decide."""

    kind: Kind
    labels: tuple[str, ...] | None = None
    labels_from: str = "`labels`"
    threshold: float = 0.25
    iou: float = 0.7
    boxes: int = 300
    max_length: int | None = None
    tokenizer: Path | None = None
    pooling: str | None = None


@dataclass(frozen=True)
class Tasked:
    """A model with its task. `tokenizer`: the file to keep next to the graph."""

    loaded: Loaded
    task: Task | None = None
    pixels: Preprocess | None = None
    tokenizer: Path | None = None
    notes: tuple[str, ...] = ()

    def keep_tokenizer(self, graph: Path) -> Task | None:
        """Copy the tokenizer next to `graph`, and return the task that names the copy."""
        if self.task is None or self.tokenizer is None:
            return self.task
        shutil.copyfile(self.tokenizer, Path(f"{graph}{TOKENIZER}"))
        return self.task.named_after(graph.name)


def read_options(kind: str | None, **given: Any) -> TaskOptions | None:
    """Check the parameters of `export` that are about the task, None where not given.

    Returns None without a task. Raises NotFound or BadInput.
    """
    given = {key: value for key, value in given.items() if value is not None}
    if kind is None:
        for key in given:
            raise BadInput(f"`{key}` needs `task`", hint=f"`task`: one of {', '.join(KINDS)}")
        return None
    if kind not in KINDS:
        raise BadInput(f"`task` {kind}: unknown", hint=f"one of: {', '.join(KINDS)}")
    row = KINDS[kind]
    for key in (key for key in given if key not in row.options):
        having = ", ".join(each.name for each in KINDS.values() if key in each.options)
        raise BadInput(f"`{key}` does not go with `task` {kind}", hint=f"it goes with {having}")
    for key, (low, high) in _LIMITS.items():
        if not low <= given.get(key, low) <= high:
            raise BadInput(f"`{key}` must be from {low} to {high}, got {given[key]}")
    if given.get("pooling", MEAN) not in (MEAN, CLS):
        raise BadInput(f"`pooling` {given['pooling']}: unknown", hint=f"one of: {MEAN}, {CLS}")
    labels = given.get("labels")
    if isinstance(labels, (str, os.PathLike)):
        given |= {"labels": _read_labels(Path(labels)), "labels_from": str(labels)}
    elif labels is not None:
        given["labels"] = tuple(map(str, labels))
    if "tokenizer" in given:
        given["tokenizer"] = Path(given["tokenizer"])
    return TaskOptions(row, **given)


def with_task(
    loaded: Loaded,
    path: Path | None,
    options: TaskOptions | None,
    pixels: Preprocess | None,
    rule: dict[str, Any],
) -> Tasked:
    """Put a model behind its preprocessing, and the outputs of its task behind it.

    `path`: of the model's file or folder. `options`: None for a model without a task. `pixels`,
    `rule`: what the user's `preprocess` says of values, and about placing an image. Raises BadInput
    for a task that does not fit the model.
    """
    if options is None:
        from deploykit.engines.torch.loaded import with_preprocess

        return Tasked(with_preprocess(loaded, pixels) if pixels else loaded, pixels=pixels)
    from deploykit.exporting.heads.head import own_module
    from deploykit.exporting.library import check_answers

    takes, image = options.kind.takes, any(len(spec.shape) == 4 for spec in loaded.inputs)
    if "text" not in takes or ("image" in takes and image):
        job = _with_image(loaded, path, options, pixels, rule)
        folder = path if path and path.is_dir() else None
    elif pixels or rule:
        raise BadInput(
            f"`preprocess` is for an image; `task` {options.kind.name} of the model has none"
        )
    else:
        job = _with_text(loaded, path, options)
        folder = job.tokenizer and job.tokenizer.parent
    chosen = options.pooling is not None
    model = own_module(loaded)
    notes = check_answers(job.task, job.loaded, model, folder, pooled=chosen) if job.task else ()
    return replace(job, notes=job.notes + notes)


def _head(
    loaded: Loaded, options: TaskOptions, config: dict[str, Any], size: tuple[int, int] = (0, 0)
) -> TaskHead:
    from deploykit.exporting.heads.head import HeadRequest

    kind = options.kind.name
    if loaded.preset and loaded.preset.unfit:
        raise BadInput(
            loaded.preset.unfit,
            hint="export it without `task`, and decode its outputs in the client",
        )
    if loaded.preset and loaded.preset.task == DETECT != kind:
        raise BadInput(
            f"`task` {kind}: by {loaded.preset.source} the model finds boxes",
            hint=f"`task` {DETECT}",
        )
    request = HeadRequest(
        loaded,
        kind,
        size=size,
        iou=options.iou,
        boxes=options.boxes,
        labelled=options.labels is not None,
        problem=str(config.get("problem_type") or ""),
    )
    head: TaskHead = resolve_name(options.kind.head)(request)
    return head


def _with_image(
    loaded: Loaded,
    path: Path | None,
    options: TaskOptions,
    pixels: Preprocess | None,
    rule: dict[str, Any],
) -> Tasked:
    from deploykit.engines.torch.loaded import with_preprocess
    from deploykit.engines.torch.presets import ASSUMED, switch_resizing_off
    from deploykit.exporting.library import check_pixels, preset_of_folder

    kind, preset = options.kind, loaded.preset
    compared: tuple[str, ...] = ()
    text = loaded.inputs[0].dtype == "int64" and ids_of([spec.name for spec in loaded.inputs])
    if text or len(loaded.inputs) > 1:
        readers = " or ".join(each.name for each in KINDS.values() if "text" in each.takes)
        raise BadInput(
            f"`task` {kind.name} is for one image; the model takes "
            + ", ".join(map(str, loaded.inputs)),
            hint=f"for a text: `task` {readers}"
            if text
            else "one input is the image; wrap the model in a module that makes the others itself",
        )
    for key in ("tokenizer", "max_length", "pooling"):
        if getattr(options, key) is not None:
            raise BadInput(f"`{key}` is for a text, and the model takes an image")
    spec = next((each for each in loaded.inputs if _takes_bytes(each)), None)
    if spec is None:
        if pixels is None:
            preset = preset or preset_of_folder(path, loaded)
            compared = check_pixels(preset) if preset and not rule else ()
            pixels = preset.preprocess if preset else None
        if pixels is None:
            raise BadInput(
                f"`task` {kind.name}: nothing says how the pixels are normalised",
                hint="`preprocess`: imagenet, or a TOML file with mean and std",
            )
        loaded = with_preprocess(loaded, pixels)
        spec = next(each for each in loaded.inputs if _takes_bytes(each))
    _, height, width, channels = spec.shape
    if kind.any_size and {type(height), type(width)} == {str}:
        height = width = 0
    if not isinstance(height, int) or not isinstance(width, int):
        raise BadInput(
            f"`task` {kind.name}: the image {spec} has no fixed height and width",
            hint="images are resized to the model's size: give numbers in `inputs`",
        )
    resizing = switch_resizing_off(loaded.module, height, width) if height else ()
    placed = _place_image(
        ImageInput(spec.name, height, width, colours="RGB" if channels == 3 else "L"),
        kind,
        preset,
        imagenet=pixels is not None and pixels.name == "imagenet",
        rule=rule,
    )
    if (placed.colours == "L") != (channels == 1):
        raise BadInput(
            f"`preprocess`: colours = {placed.colours}, but the model has {channels} channels"
        )
    config = _config(loaded, None)
    head = _head(loaded, options, config, (height, width))
    placed = replace(placed, multiple=1 if height else _size_multiple(loaded))
    known, origin = (preset.labels, preset.source) if preset else ((), "")
    labels, notes = _labels(options, head.classes, known or _named(config))
    task = Task(kind.name, head.outputs, placed, None, labels, options.threshold, source=origin)
    if preset and origin.startswith(ASSUMED) and pixels is preset.preprocess and not rule:
        notes = (*notes, f"pixels are prepared by {origin}: `preprocess` says it otherwise")
    return Tasked(head.loaded, task, pixels, None, (*resizing, *head.notes, *notes, *compared))


def _takes_bytes(spec: TensorSpec) -> bool:
    return spec.dtype == "uint8" and len(spec.shape) == 4 and spec.shape[3] in (1, 3)


def _place_image(
    placed: ImageInput, kind: Kind, preset: Preset | None, *, imagenet: bool, rule: dict[str, Any]
) -> ImageInput:
    """Decide how an image is placed: by the user's `rule`, the preset, or what is usual."""
    height, width, own = placed.height, placed.width, preset.image if preset else None
    usual = own is None and kind.resize == SHORTEST_EDGE and imagenet
    if usual:
        own = ImageInput("", 224, 224, SHORTEST_EDGE, 256, colours=placed.colours)  # torchvision's
    if own is not None:
        least = min(own.height, own.width)
        edge = round(own.resize_to * min(height, width) / least) if height else least
        if usual:  # a library's own rule is not changed
            edge = max(edge, height, width)
        rule = {"resize": own.resize if height else SHORTEST_EDGE, "resize_to": edge, **rule}
        placed = replace(own, tensor=placed.tensor, height=height, width=width)
    elif kind.resize == LETTERBOX:
        placed = replace(placed, resize=LETTERBOX)
    placed = replace(placed, **rule)
    if not height and placed.resize != SHORTEST_EDGE:
        raise BadInput(
            f"`task` {kind.name}: nothing says how large an image of any ratio is made",
            hint=f'`preprocess`: a TOML file with resize = "{SHORTEST_EDGE}" and resize_to',
        )
    if placed.resize == SHORTEST_EDGE and placed.resize_to < max(height, width):
        raise BadInput(
            f"`preprocess`: resize_to = {placed.resize_to} is below the model's {height}x{width}",
            hint="the shorter side of an image is resized to it, then the middle is cut out",
        )
    return placed


def _size_multiple(loaded: Loaded) -> int:
    """Return what height and width must be multiples of, as for the skip connections of a U-Net.

    `loaded`: its one input is uint8 [N, H, W, C]. Raises BadInput where no power of 2 will do.
    """
    import torch

    (spec,) = loaded.inputs
    for multiple in (1, 2, 4, 8, 16, 32, 64):
        shape = concrete(spec, sides_of(spec, multiple))
        with contextlib.suppress(Exception), torch.inference_mode():  # whatever a module raises
            loaded.module(torch.zeros(shape, dtype=torch.uint8))
            return multiple
    raise BadInput(
        f"the model takes no image of {shape[1]}x{shape[2]} pixels",
        hint="give height and width as numbers in `inputs`",
    )


def sides_of(image: TensorSpec, multiple: int) -> dict[str, int]:
    """Return sizes for H and W of `image` [N, H, W, C], which no larger power of 2 divides.

    One is above a power, one below: halving rounds down in some models, up in others.
    """
    height, width = map(str, image.shape[1:3])
    return {height: 128 + multiple, width: 256 - multiple}


def _labels(
    options: TaskOptions, classes: int | None, known: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    given = options.labels
    if "labels" not in options.kind.options:
        return (), ()
    if given is None:
        found = known if classes in (None, len(known)) else ()
        named = found or classes is None
        return found, () if named else ("its labels have no names: `labels` gives them",)
    if classes is not None and len(given) != classes:
        raise BadInput(
            f"{options.labels_from}: holds {len(given)} labels, the model has {classes} classes",
            hint="one label per line, in the order of the classes",
        )
    return given, ()


def _read_labels(path: Path) -> tuple[str, ...]:
    try:
        text = check_readable(path).read_text(encoding="utf-8-sig")
    except ValueError as exc:
        raise BadInput(f"{path}: is not a text file in UTF-8", hint="one label per line") from exc
    lines = [line.strip() for line in text.rstrip().split("\n")]
    if "" in lines:
        raise BadInput(f"{path}: line {lines.index('') + 1} is empty", hint="one label per line")
    if not "".join(lines).translate(_JOINERS).isprintable():
        raise BadInput(f"{path}: is not a text file with one label per line")
    return tuple(lines)


_IDS = ("input_ids", "ids", "tokens")
_NO_LIMIT = 1 << 20  # a tokenizer's configuration writes a far larger number for no limit
_USUAL_LENGTH = 512
_POSITIONS_AFTER_PADDING = ("roberta", "camembert", "xlm-roberta", "xlm-roberta-xl", "mpnet")


def ids_of(names: Sequence[str]) -> str | None:
    """Return which of the inputs `names` takes token ids; None for none."""
    return next((name for name in names if name in _IDS), None)


def _with_text(loaded: Loaded, model: Path | None, options: TaskOptions) -> Tasked:
    names = [spec.name for spec in loaded.inputs]
    ids = ids_of(names)
    if ids is None:
        raise BadInput(
            f"`task` {options.kind.name}: no input holds token ids, as input_ids:int64[N,T] does",
            hint="the inputs are: " + ", ".join(map(str, loaded.inputs)),
        )
    unfilled = [name for name in names if name != ids and not re.search("mask|type", name)]
    if unfilled:
        raise BadInput(
            f"`task` {options.kind.name}: a text fills {ids}, a mask and types; nothing fills "
            + ", ".join(unfilled),
            hint="wrap the model in a module that makes the others itself",
        )
    folder = model if model is None or model.is_dir() else model.parent
    path = options.tokenizer or (folder and folder / "tokenizer.json")
    if path is None or not path.is_file():
        where = f"{path}: no such file" if path else "a live module has no folder"
        raise BadInput(
            f"`task` {options.kind.name} needs the model's tokenizer; {where}",
            hint="`tokenizer`: the tokenizer.json that tokenizer.save_pretrained(folder) writes",
        )
    config = _config(loaded, folder)
    text = _describe_text(path, ids, names, options.max_length, config)
    axis = next(spec.shape[-1] for spec in loaded.inputs if spec.name == ids)
    if isinstance(axis, str):  # no longer rows are compared
        low, _ = loaded.limits.get(axis, (1, None))
        loaded = replace(loaded, limits={**loaded.limits, axis: (low, text.max_length)})
    if "pooling" in options.kind.options:
        from deploykit.exporting.heads.embed import with_pooling

        loaded = with_pooling(loaded, options.pooling, folder)
    head = _head(loaded, options, config)
    labels, notes = _labels(options, head.classes, _named(config))
    model_type = str(config.get("model_type") or "")
    task = Task(options.kind.name, head.outputs, text=text, labels=labels, source=model_type)
    return Tasked(head.loaded, task, None, path, (*head.notes, *notes))


def _describe_text(
    path: Path, ids: str, names: Sequence[str], max_length: int | None, config: dict[str, Any]
) -> TextInput:
    """Return how the tokenizer at `path` fills the inputs `names` of a model with this `config`.

    Raises BadInput for a file that is no tokenizer or not the model's, MissingExtra without the
    package that opens it.
    """
    from deploykit.engines.data.texts import Tokens
    from deploykit.engines.torch.open import read_settings

    tokenizer = read_json(path)
    if not isinstance(tokenizer, dict) or not isinstance(tokenizer.get("model"), dict):
        raise BadInput(f"{path}: is not a tokenizer.json of Hugging Face's tokenizers")
    padding = tokenizer.get("padding")
    pad = padding.get("pad_id") if isinstance(padding, dict) else config.get("pad_token_id")
    positions = config.get("max_position_embeddings")
    if type(positions) is not int or positions < 1:
        positions = None
    elif config.get("model_type") in _POSITIONS_AFTER_PADDING:
        positions -= (config.get("pad_token_id") or 0) + 1
    if max_length is not None and positions is not None and max_length > positions:
        raise BadInput(f"`max_length` {max_length}: the model has {positions} positions")
    stated = read_settings(path.parent, "tokenizer_config.json").get("model_max_length")
    trained = read_settings(path.parent, "sentence_bert_config.json").get("max_seq_length")
    known = (stated, trained, positions)
    limits = [each for each in known if isinstance(each, int) and 1 < each < _NO_LIMIT]
    text = TextInput(
        ids=ids,
        tokenizer=path.name,
        sha256=sha256(path),
        max_length=max_length or min(limits, default=_USUAL_LENGTH),
        mask=next((name for name in names if "mask" in name), ""),
        types=next((name for name in names if "type" in name), ""),
        pad_id=pad if type(pad) is int and pad >= 0 else 0,
    )
    size, largest = config.get("vocab_size"), max(Tokens(text, path.parent).largest_id, text.pad_id)
    if isinstance(size, int) and largest >= size:
        raise BadInput(
            f"{path}: has token {largest}, the model's tokens are 0 to {size - 1}",
            hint="`tokenizer`: the one that the model was trained with; after added tokens, "
            "model.resize_token_embeddings(len(tokenizer))",
        )
    return text


def _config(loaded: Loaded, folder: Path | None) -> dict[str, Any]:
    """Return the configuration of a transformers model; else what config.json in `folder` holds."""
    from deploykit.engines.torch.open import read_settings

    found: list[Any] = [getattr(part, "config", None) for part in loaded.module.modules()]
    own = [each.to_dict() for each in found if hasattr(each, "problem_type")]
    return own[0] if own else read_settings(folder, "config.json")


def _named(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the labels of a transformers' config, in the order of their numbers."""
    found = config.get("id2label")
    if not isinstance(found, dict) or not all(str(key).isdigit() for key in found):
        return ()
    by_number = {int(key): str(value) for key, value in found.items()}
    return tuple(by_number[at] for at in range(len(by_number)) if at in by_number)
