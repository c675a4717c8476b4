"""Compare what a task adds to a model with what the model's own library does.

torchvision, timm and transformers prepare images themselves; the pipelines of transformers, its
segmentation and sentence-transformers make answers. What cannot be compared is named in a note.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deploykit.core.errors import BadInput, first_line
from deploykit.core.extras import require
from deploykit.core.task import (
    EMBED,
    LETTERBOX,
    SEGMENT,
    SHORTEST_EDGE,
    STRETCH,
    ImageInput,
    Preprocess,
    Task,
)
from deploykit.core.tensors import concrete
from deploykit.engines.tasks import TaskSteps
from deploykit.engines.torch.files import module_errors
from deploykit.engines.torch.loaded import FromBytes, Loaded
from deploykit.engines.torch.open import PROCESSOR, load_processor, without_messages
from deploykit.engines.torch.presets import INPUT, Preset

torch = require("torch")

_LEVELS = 1.0  # mean difference of a pixel, of 255: other decoders round otherwise
_ROUNDING = 1e-3  # of scores and embeddings; the share of pixels with two best classes
_FILTERS = {0: "nearest", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
_SENTENCES = ("The quick brown fox jumps over the lazy dog.", "Où est-il ? Nobody knows, 12 of 34.")
_CURE = "`preprocess`: a TOML file that says how images are prepared"


def check_pixels(preset: Preset) -> tuple[str, ...]:
    """Raise BadInput unless the library of `preset` prepares an image as `preset` says.

    Return a note where that could not be compared.
    """
    if preset.transform is None or preset.image is None or preset.preprocess is None:
        return ()
    why = "it keeps an image's ratio, the graph has one size"
    if preset.image.resize != LETTERBOX:
        try:
            made = list(map(preset.transform, _photos()))
            off = _levels_off(made, preset.image, preset.preprocess)
        except Exception as exc:  # noqa: BLE001 - a library of any version
            why = first_line(exc)
        else:
            if off <= _LEVELS:
                return ()
            raise BadInput(
                f"{preset.source} prepares an image unlike what it says: pixels are {off:.0f} of "
                "255 off",
                hint=_CURE,
            )
    return (f"pixels not compared with {preset.source}: {why}",)


def _photos() -> list[Any]:
    from deploykit.engines.data.images import Image

    random, found = np.random.default_rng(0), []
    for width, height in ((200, 150), (160, 240)):
        coarse = random.integers(40, 216, (5, 7, 3)).astype(np.uint8)
        image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        noisy = np.asarray(image) + random.integers(-40, 40, (height, width, 3))
        found.append(Image.fromarray(noisy.clip(0, 255).astype(np.uint8)))
    return found


def _levels_off(made_CHW: Sequence[Any], image: ImageInput, pixels: Preprocess) -> float:
    """Return by how many of 255 levels a pixel of `_photos()` differs on average, at most.

    `made_CHW`: what the library makes of them. 255 where one has another size.
    """
    from deploykit.engines.data.images import place

    mean, std = (np.reshape(values, (-1, 1, 1)) for values in (pixels.mean, pixels.std))
    off = []
    for photo, theirs in zip(_photos(), map(np.asarray, made_CHW), strict=True):
        ours = place(photo, image, "the image").pixels.transpose(2, 0, 1)
        if theirs.shape != ours.shape:
            return 255.0
        off.append(float(np.abs((theirs * std + mean) / pixels.scale - ours).mean()))
    return max(off)


def preset_of_folder(folder: Path | None, loaded: Loaded) -> Preset | None:
    """Return how the image processor in a folder of transformers prepares an image.

    None for a folder without one. Raises BadInput for one that prepares images in another way than
    `ImageInput` can say.
    """
    if folder is None or not (folder / PROCESSOR).is_file():
        return None
    found = load_processor(folder, "AutoImageProcessor")
    kind = type(found).__name__
    with module_errors(folder / PROCESSOR):
        made = [found(images=x, return_tensors="np")["pixel_values"][0] for x in _photos()]
    channels, height, width = made[0].shape
    scaled, normal = (getattr(found, f"do_{each}", None) for each in ("rescale", "normalize"))
    values = (found.image_mean, found.image_std) if normal else (0.0, 1.0)
    mean, std = (tuple(map(float, np.broadcast_to(each, channels))) for each in values)
    pixels = Preprocess(kind, mean, std, float(found.rescale_factor) if scaled else 1.0)
    for image in _placings(found, height, width):
        if _levels_off(made, image, pixels) <= _LEVELS:
            return Preset("", loaded.inputs, image, pixels, source=f"the folder's {kind}")
    raise BadInput(
        f"{folder / PROCESSOR}: {kind} prepares an image in a way that a task cannot", hint=_CURE
    )


def _placings(processor: Any, height: int, width: int) -> Iterator[ImageInput]:
    """Yield the ways in which `processor`, which makes this size, may place an image."""
    size, least = getattr(processor, "size", None), min(height, width)
    filtered = _FILTERS.get(int(getattr(processor, "resample", None) or 0), "bilinear")
    sides = (getattr(size, "shortest_edge", None), getattr(size, "height", None), least)
    shares = (1, getattr(processor, "crop_pct", None) or 1)
    edges = {int(side / share) for side in sides if side for share in shares}
    for colours in ("RGB", "BGR"):
        for edge in sorted(each for each in edges if each >= least):
            for rule in (STRETCH, SHORTEST_EDGE):
                yield ImageInput(INPUT, height, width, rule, edge, filtered, colours)


def check_answers(
    task: Task, loaded: Loaded, model: Any, folder: Path | None, *, pooled: bool
) -> tuple[str, ...]:
    """Raise BadInput unless the library of `model` gives the answers of `loaded`.

    `loaded`: the model behind its `task`; `model`: as the library built it, from `folder`.
    `pooled`: the user chose the pooling. Return a note where it was not compared.
    """
    described = folder is not None and (folder / "modules.json").is_file()
    library, compare = "transformers' own answers", _off_transformers
    if task.kind == EMBED:
        if pooled or not described or task.text is None:
            return ()
        library, compare = "sentence-transformers", _off_sentence_transformers
    elif not type(model).__module__.startswith("transformers."):
        return ()
    try:
        if folder is None:
            raise BadInput("a live module has no folder")
        with without_messages():
            off = compare(task, loaded, model, folder)
    except Exception as exc:  # noqa: BLE001 - a library of any version, or none
        return (f"not compared with {library}: {first_line(exc)}",)
    if off > _ROUNDING:
        raise BadInput(
            f"`task` {task.kind}: its answers are not those of {library}: {off:.2g} off",
            hint="the library does more than a task, such as adding a prompt: export it without "
            "`task`, and make the answers of its outputs in the client",
        )
    return ()


def _ours(task: Task, loaded: Loaded, folder: Path) -> np.ndarray:
    """Return the first output for `_SENTENCES`, read as a server reads them, a row each."""
    rows, steps = [], TaskSteps(task, loaded.inputs, loaded.outputs, folder)
    for text in _SENTENCES:
        feeds = steps.read(text).feeds
        tensors = (torch.from_numpy(feeds[spec.name]) for spec in loaded.inputs)
        with torch.inference_mode():
            rows.append(loaded.module(*tensors)[0][0].numpy())
    return np.stack(rows)


def _off_sentence_transformers(task: Task, loaded: Loaded, model: Any, folder: Path) -> float:
    del model
    library = require("sentence_transformers").SentenceTransformer
    whole = library(str(folder), device="cpu", local_files_only=True)
    theirs = whole.encode(list(_SENTENCES), normalize_embeddings=True)
    return float(np.abs(_ours(task, loaded, folder) - theirs).max())


def _off_transformers(task: Task, loaded: Loaded, model: Any, folder: Path) -> float:
    """Return the largest difference of scores, or the share of pixels with another class.

    An image is random bytes, and the model gets what the graph's first step makes of them.
    """
    library = require("transformers")
    if task.text is not None:
        tokenizer = library.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        pipeline = library.TextClassificationPipeline(
            model=model, tokenizer=tokenizer, device="cpu"
        )
        found, ours = pipeline(list(_SENTENCES), top_k=None), _ours(task, loaded, folder)
    else:
        processor = load_processor(folder, "AutoImageProcessor")
        (spec,) = loaded.inputs
        free = dict.fromkeys((axis for axis in spec.shape[1:] if isinstance(axis, str)), 128)
        random = torch.Generator().manual_seed(0)
        image = torch.randint(0, 256, concrete(spec, free), generator=random, dtype=torch.uint8)
        first = next(each for each in loaded.module.modules() if isinstance(each, FromBytes))
        with torch.inference_mode():
            pixels = first.normalise(image)
            answers, mine = model(pixel_values=pixels), loaded.module(image)[0]
            if task.kind == SEGMENT:
                (mask,) = processor.post_process_semantic_segmentation(
                    answers, target_sizes=[tuple(pixels.shape[2:])]
                )
                return float((mine[0] != mask).float().mean())
            kind = library.ImageClassificationPipeline
            pipeline = kind(model=model, image_processor=processor, device="cpu")
            found = [pipeline.postprocess(answers, top_k=model.config.num_labels)]
            ours = mine.numpy()
    names = [model.config.id2label[at] for at in range(ours.shape[1])]
    rows = [{each["label"]: each["score"] for each in row} for row in found]
    return float(np.abs(ours - np.array([[row[name] for name in names] for row in rows])).max())
