"""Images or sentences in, answers out: the steps of a task around an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from deploykit.core.errors import BadInput
from deploykit.core.task import DETECT, EMBED, SEGMENT, ImageInput, Task, TextInput
from deploykit.core.tensors import Bytes, TensorSpec, mismatch
from deploykit.runtimes.engine import Engine
from deploykit.runtimes.tasks.answers import RLE, Answer, answer

if TYPE_CHECKING:
    from deploykit.runtimes.tasks.images import PlacedImage

Item = str | Bytes  # a text, or the bytes of a text or of an image file

MOST_ROWS = 32  # of one call, where rows may be joined


@dataclass(frozen=True, eq=False)
class ModelRow:
    """One item as one row of the model's inputs; `placed`: the image, None for a text."""

    feeds: Mapping[str, np.ndarray]
    placed: PlacedImage | None = None


class TaskSteps:
    """What a task does before and after its model. Any number of threads may call it.

    `folder`: where the task's files are, next to the model. Raises BadInput for a task that does
    not fit the model, MissingExtra without Pillow or `tokenizers`.
    """

    def __init__(
        self,
        task: Task,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        folder: Path,
    ) -> None:
        self.task = task
        _check_outputs(task, {spec.name: spec for spec in outputs})
        specs = {spec.name: spec for spec in inputs}
        if task.image is not None:
            from deploykit.runtimes.tasks.images import check_image_input

            check_image_input(task.image)
            _check_image(task.image, specs)
        if task.text is not None:
            from deploykit.runtimes.tasks.texts import Tokens

            self._length = _check_text(task.text, specs)
            self._tokens = Tokens(task.text, folder)

    def read(self, item: Item, where: str = "", *, most_pixels: int | None = None) -> ModelRow:
        """Raises BadInput, which names the item as `where`, and TooLarge above `most_pixels`."""
        if self.task.image is None:
            row = self._tokens.encode(item, where or "the text")
            return ModelRow(self._tokens.feeds([row], self._length))
        from deploykit.runtimes.tasks.images import read_image

        if isinstance(item, str):
            raise BadInput(f"{where or 'the item'}: is a text, and the model takes images")
        placed = read_image(item, self.task.image, where or "the image", most_pixels=most_pixels)
        return ModelRow({self.task.image.tensor: placed.pixels[None]}, placed)

    def answer(
        self,
        outputs: Mapping[str, np.ndarray],
        placed: Sequence[PlacedImage | None],
        *,
        mask: str = RLE,
    ) -> list[Answer]:
        """One answer for each row; see `answers.answer`."""
        return answer(self.task, outputs, placed, mask=mask)


class TaskEngine:
    """An engine with the steps of its task: `predict` takes images or sentences.

    Rows are joined only where the engine's manifest says that this changes no answer.
    """

    def __init__(self, engine: Engine, task: Task, folder: Path | None = None) -> None:
        """`folder` None: that of the file which the engine was loaded from."""
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
        """One answer for each item; `names` stand for the items in errors. Raises BadInput."""
        found: list[Answer] = []
        for at in range(0, len(items), self._rows):
            several = range(at, min(at + self._rows, len(items)))
            named = [names[n] if names else f"item {n + 1}" for n in several]
            rows = [self.steps.read(items[n], name) for n, name in zip(several, named, strict=True)]
            for same in _same_shapes(rows):
                feeds = {
                    name: np.concatenate([row.feeds[name] for row in same])
                    for name in same[0].feeds
                }
                outputs = self.engine(feeds)
                placed = [row.placed for row in same]
                found += self.steps.answer(outputs, placed, mask=mask)
        return found


def _same_shapes(rows: Sequence[ModelRow]) -> list[list[ModelRow]]:
    """Neighbours of one shape together: shorter sentences would have to be padded."""
    found: list[list[ModelRow]] = []
    for row in rows:
        shapes = {name: array.shape for name, array in row.feeds.items()}
        if found and {n: a.shape for n, a in found[-1][0].feeds.items()} == shapes:
            found[-1].append(row)
        else:
            found.append([row])
    return found


def _check_image(image: ImageInput, specs: Mapping[str, TensorSpec]) -> None:
    shape = (1, image.height, image.width, 1 if image.colours == "L" else 3)
    spec = specs.get(image.tensor)
    if spec is None or len(specs) > 1 or mismatch(spec, "uint8", shape):
        wanted = f"uint8[N,{','.join(str(size or 'any') for size in shape[1:])}]"
        raise BadInput(
            f"the task puts images into '{image.tensor}:{wanted}', the model's inputs are: "
            + ", ".join(map(str, specs.values()))
        )


def _check_text(text: TextInput, specs: Mapping[str, TensorSpec]) -> int | None:
    """The number of tokens that the model has, None where any number is possible."""
    names = {text.ids, text.mask, text.types} - {""}
    lengths = [spec.shape[-1] for spec in specs.values() if spec.shape]
    length = next((n for n in lengths if isinstance(n, int)), None)
    shape = (1, text.max_length if length is None else length)
    if names != set(specs) or any(mismatch(spec, "int64", shape) for spec in specs.values()):
        raise BadInput(
            f"the task puts tokens into int64[N,T] {', '.join(sorted(names))}, the model's inputs "
            "are: " + ", ".join(map(str, specs.values()))
        )
    if not 0 <= text.pad_id < 1 << 31:
        raise BadInput(f"the task fills rows up with the token {text.pad_id}")
    if length is not None and length < text.max_length:
        raise BadInput(f"the task allows {text.max_length} tokens, the model takes {length}")
    if length is not None and not text.mask:
        raise BadInput(f"the model takes {length} tokens, and has no mask for those of a padding")
    return length


def _check_outputs(task: Task, specs: Mapping[str, TensorSpec]) -> None:
    names = task.outputs
    needed = {
        DETECT: (names.scores, names.boxes, names.classes),
        SEGMENT: (names.mask,),
        EMBED: (names.embedding,),
    }.get(task.kind, (names.scores,))
    ranks = {names.boxes: 3, names.mask: 3}
    for name in needed:
        if name not in specs or len(specs[name].shape) != ranks.get(name, len(specs[name].shape)):
            raise BadInput(
                f"the task {task.kind} reads the output '{name}', the model's outputs are: "
                + ", ".join(map(str, specs.values()))
            )
    if needed == (names.scores,) and task.labels:
        count = specs[names.scores].shape[-1]
        if isinstance(count, int) and count != len(task.labels):
            raise BadInput(
                f"the task has {len(task.labels)} labels, the output '{names.scores}' has {count}"
            )
