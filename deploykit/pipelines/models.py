"""The calls of a model for the items of a list: joined and divided into batches of equal shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from deploykit.core.tensors import TensorSpec, carrier, mismatch
from deploykit.pipelines.failures import StageFailed, named
from deploykit.runtimes.engine import Arrays, Engine
from deploykit.runtimes.tasks.engine import TaskSteps

if TYPE_CHECKING:
    from deploykit.runtimes.tasks.images import PlacedImage


@dataclass(frozen=True)
class Ports:
    """What an opened model takes and gives. `task`: of a model that takes images or texts."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    task: TaskSteps | None = None

    @staticmethod
    def of(engine: Engine) -> Ports:
        """Of an opened model, with the task of its manifest."""
        file, steps = engine.source, None
        if file is not None and file.manifest is not None and file.manifest.task is not None:
            steps = TaskSteps(file.manifest.task, engine.inputs, engine.outputs, file.path.parent)
        return Ports(engine.inputs, engine.outputs, steps)

    @property
    def takes(self) -> Mapping[str, Any]:
        if self.task is not None:
            return {"image": np.ndarray | bytes} if self.task.task.image else {"text": str}
        return {spec.name: np.ndarray for spec in self.inputs}

    @property
    def gives(self) -> Any:
        if self.task is not None:
            return dict[str, Any]
        return np.ndarray if len(self.outputs) == 1 else dict[str, np.ndarray]


class Piece(NamedTuple):
    """Rows of one item that run in one call: rows `start` to `stop` of the call's outputs."""

    item: int
    start: int
    stop: int


class ModelCall(NamedTuple):
    """One call of a model, and whose rows it holds."""

    feeds: dict[str, np.ndarray]
    rows: int
    pieces: Sequence[Piece]


@dataclass(frozen=True)
class ModelCalls:
    """The calls of one model for several items.

    `states`, of each item: whether it has no batch axis, or what its task needs for the answer.
    """

    calls: list[ModelCall]
    states: list[Any]


def prepare_calls(
    name: str, ports: Ports, items: Sequence[Mapping[str, Any]], max_rows: int
) -> ModelCalls:
    """Join items of equal shapes into calls of up to `max_rows` rows; larger ones are divided.

    `max_rows` 0: the rows of a call may not be joined, so each item is one call. An array without
    the batch axis is one sample. Raises StageFailed for arrays that do not fit,
    BadInput for an image or a text that cannot be read.
    """
    feeds, states = list[Arrays](), list[Any]()
    arrays: Arrays
    state: Any
    for item in items:
        if ports.task is None:
            arrays, state = _feeds(name, ports, item, max_rows)
        else:
            with named(name):
                arrays, state = _task_feeds(ports.task, *item.values())
        feeds.append(arrays)
        states.append(state)
    return ModelCalls(list(_calls(feeds, max_rows)), states)


def _task_feeds(steps: TaskSteps, value: Any) -> tuple[Arrays, PlacedImage | None]:
    """One row for an image, as pixels or as the bytes of a file, or for a text."""
    if not isinstance(value, np.ndarray) or steps.task.image is None:
        prepared = steps.read(value)
        return prepared.feeds, prepared.placed
    from deploykit.pipelines.pixels import place_pixels  # Pillow, which a text does not need

    placed = place_pixels(value, steps.task.image)
    return {steps.task.image.tensor: placed.pixels[None]}, placed


def _feeds(name: str, ports: Ports, item: Mapping[str, Any], max_rows: int) -> tuple[Arrays, bool]:
    found, alone = {}, set[bool]()
    for spec in ports.inputs:
        array = np.ascontiguousarray(item[spec.name])
        batch_axis = bool(spec.shape) and (spec.batched or spec.shape[0] == 1)
        sample = batch_axis and item[spec.name].ndim == len(spec.shape) - 1
        alone.add(sample)
        found[spec.name] = array[None] if sample else array
        problem = mismatch(spec, array.dtype.name, found[spec.name].shape)
        if problem is not None:
            raise StageFailed(f"stage '{name}': {problem}")
    if len(alone) > 1:
        raise StageFailed(f"stage '{name}': some inputs have a batch axis and others have none")
    if len({len(array) for array in found.values()} if max_rows else ()) > 1:
        raise StageFailed(f"stage '{name}': its inputs have different numbers of rows")
    return found, alone.pop()


def _calls(items: Sequence[Arrays], max_rows: int) -> Iterator[ModelCall]:
    waiting: list[tuple[int, Arrays, int]] = []  # item, its rows, how many
    rows, shapes = 0, None
    for number, feeds in enumerate(items):
        count = len(next(iter(feeds.values()))) if max_rows else 1
        own = tuple((array.dtype, array.shape[1:]) for array in feeds.values())
        for at in range(0, count, max_rows or 1):
            take = min(count - at, max_rows or 1)
            if waiting and (rows + take > max_rows or own != shapes):
                yield _join(waiting)
                waiting, rows = [], 0
            part = feeds if take == count else {n: a[at : at + take] for n, a in feeds.items()}
            waiting.append((number, part, take))
            rows, shapes = rows + take, own
    if waiting:
        yield _join(waiting)


def _join(parts: Sequence[tuple[int, Arrays, int]]) -> ModelCall:
    feeds, rows, pieces = dict(parts[0][1]), 0, []
    if len(parts) > 1:
        feeds = {name: np.concatenate([each[name] for _, each, _ in parts]) for name in feeds}
    for item, _, count in parts:
        pieces.append(Piece(item, rows, rows + count))
        rows += count
    return ModelCall(feeds, rows, pieces)


def collect_outputs(
    name: str, ports: Ports, prepared: ModelCalls, outputs: Sequence[Arrays]
) -> list[Any]:
    """What the model gives for each item, from the outputs of each call."""
    parts: list[list[Arrays]] = [[] for _ in prepared.states]
    for call, found in zip(prepared.calls, outputs, strict=True):
        for item, start, stop in call.pieces:
            whole = len(call.pieces) == 1
            rows = found if whole else {name: array[start:stop] for name, array in found.items()}
            parts[item].append(rows)
    return [
        _output(name, ports, pieces, state)
        for pieces, state in zip(parts, prepared.states, strict=True)
    ]


def _output(name: str, ports: Ports, parts: Sequence[Arrays], state: Any) -> Any:
    if ports.task is not None:
        with named(name):
            return ports.task.answer(parts[0], [state])[0]
    found = {}
    for spec in ports.outputs:
        arrays = [each[spec.name] for each in parts] or [_no_rows(spec)]
        array = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        rows = bool(spec.shape) and spec.shape[0] in (1, ports.inputs[0].shape[0])
        found[spec.name] = array[0] if state and rows else array
    return found if len(found) > 1 else next(iter(found.values()))


def _no_rows(spec: TensorSpec) -> np.ndarray:
    sizes = [0 if isinstance(axis, str) else axis for axis in spec.shape[1:]]
    return np.zeros((0, *sizes), carrier(spec.dtype))
