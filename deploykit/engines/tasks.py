"""Run a task's steps around an engine: turn images or sentences into answers.

Without a task, `class_axis` finds the answers in a model's outputs.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from deploykit.core.errors import BadInput
from deploykit.core.task import KINDS, ImageInput, Task, TextInput
from deploykit.core.tensors import Bytes, Specs, TensorSpec, mismatch
from deploykit.engines.engine import Arrays, Engine

if TYPE_CHECKING:
    from deploykit.engines.data.images import PlacedImage  # it needs Pillow


# An answer is, for each task:
# classify, text-classify   {"label", "score", "top": [{"label", "index", "score"}, ...]}
# detect    {"boxes": [{"label", "index", "score", "box": [x1, y1, x2, y2]}], "width", "height"}
# segment   {"segments": [{"label", "index", "pixels", "rle"}, ...], "width", "height"}, or "png"
# embed     {"embedding": [...]}
# Boxes and masks are in pixels of the image as it was sent, turned upright.
Answer = dict[str, Any]
Placed: TypeAlias = "Sequence[PlacedImage | None]"

RLE, PNG = "rle", "png"
_NO_ANSWER = 255  # PNG mask: pixels outside the model's input


def answer(task: Task, outputs: Arrays, placed: Placed, *, mask: str = RLE) -> list[Answer]:
    """Return one answer per row of `outputs`; `placed` has each row's image, None for a text.

    `mask`: "rle", COCO's run lengths for each label, or "png", one image of label indices.
    Raises BadInput for scores that are not finite.
    """
    rows: list[Answer] = resolve_name(KINDS[task.kind].answer)(task, outputs, placed, mask)
    return rows


def label_rows(task: Task, outputs: Arrays, _placed: object, _mask: str) -> list[Answer]:
    rows = []
    for scores in _finite(outputs, task.outputs.scores):
        scores = scores.reshape(-1)
        best = np.argsort(-scores, kind="stable")[: task.top_k].tolist()
        top = [{"label": task.label(i), "index": i, "score": float(scores[i])} for i in best]
        rows.append({"label": top[0]["label"], "score": top[0]["score"], "top": top})
    return rows


def box_rows(task: Task, outputs: Arrays, placed: Placed, _mask: str) -> list[Answer]:
    names, rows = task.outputs, []
    arrays = _finite(outputs, names.scores), _finite(outputs, names.boxes), outputs[names.classes]
    for image, scores, boxes, classes in zip(placed, *arrays, strict=True):
        assert image is not None
        kept = np.flatnonzero((scores >= task.threshold) & (scores > 0))
        kept = kept[np.argsort(-scores[kept], kind="stable")]
        corners = image.to_original(boxes[kept]).round(2).tolist()
        parts = zip(map(int, classes[kept]), map(float, scores[kept]), corners, strict=True)
        found = [
            {"label": task.label(index), "index": index, "score": score, "box": box}
            for index, score, box in parts
        ]
        rows.append({"boxes": found, "width": image.width, "height": image.height})
    return rows


def segment_rows(task: Task, outputs: Arrays, placed: Placed, form: str) -> list[Answer]:
    rows = []
    for classes, image in zip(outputs[task.outputs.mask], placed, strict=True):
        assert image is not None
        mask = _original_mask(classes, image)
        found = {"png": _png(mask)} if form == PNG else {"segments": _run_lengths(task, mask)}
        rows.append({**found, "width": image.width, "height": image.height})
    return rows


def embedding_rows(task: Task, outputs: Arrays, _placed: object, _mask: str) -> list[Answer]:
    return [{"embedding": row} for row in _finite(outputs, task.outputs.embedding).tolist()]


def _finite(outputs: Arrays, name: str) -> np.ndarray:
    array = outputs[name]
    if not np.isfinite(array).all():
        raise BadInput(f"the model's output '{name}' holds NaN or infinity")
    return array


def _original_mask(classes: np.ndarray, image: PlacedImage) -> np.ndarray:
    """Return each original pixel's label index, by nearest pixel; -1 where it was cut off."""
    height, width = classes.shape
    down, along = height / image.pixels.shape[0], width / image.pixels.shape[1]
    x = (np.arange(image.width) + 0.5) * image.scale_x + image.left
    y = (np.arange(image.height) + 0.5) * image.scale_y + image.top
    x, y = (np.floor(found).astype(int) for found in (x * along, y * down))
    found: np.ndarray = classes.astype(np.int32)[
        y.clip(0, height - 1)[:, None], x.clip(0, width - 1)
    ]
    found[(y < 0) | (y >= height), :] = -1
    found[:, (x < 0) | (x >= width)] = -1
    return found


def _run_lengths(task: Task, mask: np.ndarray) -> list[Answer]:
    """Return COCO's uncompressed form: counts of 0 and 1 in turn, columns first, from 0."""
    flat = mask.T.reshape(-1)
    starts = np.concatenate(([0], np.flatnonzero(flat[1:] != flat[:-1]) + 1))
    ends, values = np.append(starts[1:], flat.size), flat[starts]
    found = []
    for index in sorted({int(value) for value in np.unique(values)} - {-1}):
        runs = values == index
        edges = np.stack([starts[runs], ends[runs]], axis=1).reshape(-1)
        counts = np.diff(np.concatenate(([0], edges, [flat.size])))
        pixels = int(counts[1::2].sum())
        if not counts[-1]:
            counts = counts[:-1]
        rle = {"size": list(mask.shape), "counts": counts.tolist()}
        found.append({"label": task.label(index), "index": index, "pixels": pixels, "rle": rle})
    return found


def _png(mask: np.ndarray) -> str:
    if mask.size and int(mask.max()) >= _NO_ANSWER:
        raise BadInput(f"a PNG mask has {_NO_ANSWER} labels at most", hint="ask for mask=rle")
    from deploykit.engines.data.images import Image

    data = io.BytesIO()
    Image.fromarray(np.where(mask < 0, _NO_ANSWER, mask).astype(np.uint8)).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


Item = str | Bytes  # a string, or the bytes of a string or an image file

MOST_ROWS = 32  # per call, if rows may be joined


@dataclass(frozen=True, eq=False)
class ModelRow:
    """One item as one row of the model's inputs; `placed`: the image, None for a text."""

    feeds: Arrays
    placed: PlacedImage | None = None


class TaskSteps:
    """The steps of a task before and after its model. Any number of threads may call it.

    `folder`: the folder of the model and the task's files. Raises BadInput for a task that does
    not fit the model, MissingExtra without Pillow or `tokenizers`.
    """

    def __init__(self, task: Task, inputs: Specs, outputs: Specs, folder: Path) -> None:
        self.task = task
        _check_outputs(task, {spec.name: spec for spec in outputs})
        specs = {spec.name: spec for spec in inputs}
        if task.image is not None:
            from deploykit.engines.data.images import check_image_input

            check_image_input(task.image)
            _check_image(task.image, specs)
        if task.text is not None:
            from deploykit.engines.data.texts import Tokens

            self._length = _check_text(task.text, specs)
            self._tokens = Tokens(task.text, folder)

    def read(
        self,
        item: Item,
        where: str = "",
        *,
        most_pixels: int | None = None,
        own_file: bool = False,
    ) -> ModelRow:
        """Turn an item into a row. Raises BadInput naming `where`, TooLarge above `most_pixels`."""
        if self.task.image is None:
            return ModelRow(self._tokens.feeds(item, where or "the text", self._length))
        from deploykit.engines.data.images import read_image

        if isinstance(item, str):
            raise BadInput(f"{where or 'the item'}: is a text, and the model takes images")
        placed = read_image(
            item,
            self.task.image,
            where or "the image",
            most_pixels=most_pixels,
            own_file=own_file,
        )
        return ModelRow({self.task.image.tensor: placed.pixels[None]}, placed)


class TaskEngine:
    """An engine with the steps of its task: `predict` takes the user's own images or sentences.

    Rows are joined only where the engine's manifest says that this changes no answer.
    """

    def __init__(self, engine: Engine, task: Task, folder: Path | None = None) -> None:
        """Read the task's files in `folder`, by default that of the engine's file."""
        if folder is None:
            folder = engine.source.path.parent if engine.source else Path()
        self.engine = engine
        self.steps = TaskSteps(task, engine.inputs, engine.outputs, folder)
        joined = engine.batching is not None and engine.batching.passed
        together = joined and engine.inputs[0].batched
        self._rows = min(MOST_ROWS, engine.max_batch or MOST_ROWS) if together else 1

    def predict(
        self, items: Sequence[Item], *, names: Sequence[str] = (), mask: str = RLE
    ) -> list[Answer]:
        """Return one answer per item; errors use `names` for the items. Raises BadInput."""
        found: list[Answer] = []
        names = names or [f"item {number}" for number in range(1, len(items) + 1)]
        for at in range(0, len(items), self._rows):
            some = slice(at, at + self._rows)
            pairs = zip(items[some], names[some], strict=True)
            rows = [self.steps.read(item, name, own_file=True) for item, name in pairs]
            # adjacent rows of one shape, as shorter sentences would need padding
            for _, group in groupby(rows, lambda row: [a.shape for a in row.feeds.values()]):
                same = list(group)
                feeds = {n: np.concatenate([row.feeds[n] for row in same]) for n in same[0].feeds}
                outputs = self.engine(feeds)
                placed = [row.placed for row in same]
                found += answer(self.steps.task, outputs, placed, mask=mask)
        return found


def _unlike(task: str, kind: str, specs: Mapping[str, TensorSpec]) -> BadInput:
    """Return the error for a `task` that does not fit the inputs or outputs of the model."""
    return BadInput(
        f"the task {task}, the model's {kind} are: {', '.join(map(str, specs.values()))}"
    )


def _check_image(image: ImageInput, specs: Mapping[str, TensorSpec]) -> None:
    shape = (1, image.height, image.width, 1 if image.colours == "L" else 3)
    spec = specs.get(image.tensor)
    if spec is None or len(specs) > 1 or mismatch(spec, "uint8", shape):
        wanted = f"uint8[N,{','.join(str(size or 'any') for size in shape[1:])}]"
        raise _unlike(f"puts images into '{image.tensor}:{wanted}'", "inputs", specs)


def _check_text(text: TextInput, specs: Mapping[str, TensorSpec]) -> int | None:
    """Return the model's number of tokens, None if any number is possible."""
    names = {text.ids, text.mask, text.types} - {""}
    lengths = [spec.shape[-1] for spec in specs.values() if spec.shape]
    length = next((n for n in lengths if isinstance(n, int)), None)
    shape = (1, text.max_length if length is None else length)
    if names != set(specs) or any(mismatch(spec, "int64", shape) for spec in specs.values()):
        raise _unlike(f"puts tokens into int64[N,T] {', '.join(sorted(names))}", "inputs", specs)
    if not 0 <= text.pad_id < 1 << 31:
        raise BadInput(f"the task fills rows up with the token {text.pad_id}")
    if length is not None and length < text.max_length:
        raise BadInput(f"the task allows {text.max_length} tokens, the model takes {length}")
    if length is not None and not text.mask:
        raise BadInput(f"the model takes {length} tokens, and has no mask for those of a padding")
    return length


def _check_outputs(task: Task, specs: Mapping[str, TensorSpec]) -> None:
    names, needed = task.outputs, KINDS[task.kind].outputs
    for name in (getattr(names, field) for field in needed):
        spec = specs.get(name)
        if spec is None or (name in (names.boxes, names.mask) and len(spec.shape) != 3):
            raise _unlike(f"{task.kind} reads the output '{name}'", "outputs", specs)
        classes = [n for n in spec.shape[-1:] if needed == ("scores",) and isinstance(n, int)]
        if task.labels and classes not in ([], [len(task.labels)]):
            raise BadInput(
                f"the task has {len(task.labels)} labels, the output '{name}' has {classes[0]}"
            )


# The evaluation and the server's shadow use the same rule. A shape shows the axis only if an input
# has the same positions: tokens, pixels, or the samples themselves. Boxes, anchors, features,
# embeddings and coordinates have no answer that could be counted.

# An output with such a word in its name holds vectors or coordinates.
_NO_CLASSES = re.compile(
    r"box|embed|feature|hidden|latent|pool|coord|point|landmark|offset|delta|regress|vector|descriptor"
)
_UNIT = 1e-3  # the largest deviation from length 1 after normalising


def class_axis(name: str, values: np.ndarray, feeds: Arrays) -> int | None:
    """Return the class axis of output `name`, given the inputs of the same call; None if none.

    [N,C]: 1. [N,T,C] next to an input [N,T] or [N,T,F]: 2. [N,C,H,W] next to an image of that
    height and width: 1, or 3 for [N,H,W,C].
    """
    shape, given = values.shape, [array.shape for array in feeds.values()]
    axis = None
    if values.dtype.kind in "biuO" or _NO_CLASSES.search(name.lower()):
        return None
    if len(shape) == 2:
        # rows of length 1 with a negative value are normalised embeddings
        axis = 1
        if (values < 0).any():
            lengths = np.linalg.norm(values.astype(np.float64), axis=1)
            axis = None if (np.abs(lengths - 1) < _UNIT).all() else 1
    elif len(shape) == 3 and any(len(s) in (2, 3) and s[:2] == shape[:2] for s in given):
        axis = 2
    elif len(shape) == 4:
        images = [s for s in given if len(s) == 4 and s[0] == shape[0]]
        if any(s[2:] == shape[2:] for s in images):
            axis = 1
        elif any(s[1:3] == shape[1:3] for s in images):
            axis = 3
    return axis if axis is not None and shape[axis] >= 2 else None
