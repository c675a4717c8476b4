"""The stages of a pipeline: functions and models, and how one of them runs.

A server and a pipeline in this process share it: here is no thread and no queue.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    is_typeddict,
)

import numpy as np

from deploykit.core.tensors import TensorSpec, carrier, mismatch
from deploykit.engines.engine import Arrays, Engine
from deploykit.engines.tasks.engine import TaskSteps
from deploykit.pipelines.failures import StageFailed, named, stage_error

if TYPE_CHECKING:
    from deploykit.engines.tasks.images import PlacedImage


# The calls of a model for the items of a list: joined and divided into batches of equal shapes.


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


# Compare the annotations of two stages where they meet, and values with an annotation.
#
# What Python cannot compare, such as a type variable or a protocol, is taken to fit.

WHOLE, EACH = "whole", "each"
_LISTS = (list, tuple)
_NUMBERS: Mapping[type, tuple[type, ...]] = {
    float: (float, int, np.floating, np.integer),
    int: (int, np.integer),
}


def meeting(given: Any, wanted: Any) -> str | None:
    """How a value annotated `given` reaches a parameter annotated `wanted`.

    "whole": as it is; "each": a list, of which each element is one call; None: not at all.
    """
    if _assignable(given, wanted):
        return WHOLE
    given = _unwrap(given)
    if _class(given) in _LISTS and _assignable((get_args(given) or (Any,))[0], wanted):
        return EACH
    return None


def conforms(value: object, annotation: Any) -> bool:
    """Whether `value`, with the elements of a list, tuple or dict, is what `annotation` says."""
    kind = _unwrap(annotation)
    args = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return any(conforms(value, each) for each in args)
    if get_origin(kind) is Literal:
        return value in args
    wanted = _class(kind)
    if wanted is None:
        return True
    try:
        if not isinstance(value, _NUMBERS.get(wanted, wanted)):
            return False
    except TypeError:  # a protocol
        return True
    if not args:
        return True
    if isinstance(value, np.ndarray):
        return _assignable(np.dtype[value.dtype.type], args[-1])  # type: ignore[name-defined]
    if isinstance(value, dict):
        return all(conforms(each, args[-1]) for each in value.values())
    if isinstance(value, tuple) and args[-1] is not Ellipsis:
        return len(value) == len(args) and all(map(conforms, value, args))
    if isinstance(value, (list, tuple)):
        return all(conforms(each, args[0]) for each in value)
    return True


def shown(annotation: Any) -> str:
    """As it is written in a program: `list[numpy.ndarray]`."""
    return "None" if annotation is type(None) else inspect.formatannotation(annotation)


def describe_value(value: object) -> str:
    """What a value is, for an error: `list of str`, `numpy.ndarray of uint8`."""
    name = shown(type(value))
    if isinstance(value, np.ndarray):
        return f"{name} of {value.dtype}"
    if isinstance(value, (list, tuple)) and value:
        return f"{name} of {' and '.join(sorted({shown(type(each)) for each in value})[:3])}"
    return name


def _assignable(given: Any, wanted: Any) -> bool:
    given, wanted = _unwrap(given), _unwrap(wanted)
    unions = (Union, types.UnionType)
    if get_origin(given) in unions:
        return all(_assignable(each, wanted) for each in get_args(given))
    if get_origin(wanted) in unions:
        return any(_assignable(given, each) for each in get_args(wanted))
    have, want = _class(given), _class(wanted)
    if have is None or want is None:
        return True
    try:
        if not issubclass(have, want) and not (want is float and have is int):
            return False
    except TypeError:  # a protocol
        return True
    inner_given, inner_wanted = get_args(given), get_args(wanted)
    if len(inner_given) != len(inner_wanted):
        return True
    return all(map(_assignable, inner_given, inner_wanted))


def _unwrap(annotation: Any) -> Any:
    """Without `Annotated`, `NewType` and None for its type."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif hasattr(annotation, "__supertype__"):
            annotation = annotation.__supertype__
        else:
            return type(None) if annotation is None else annotation


def _class(annotation: Any) -> type | None:
    """The class that a value has; None for any, and for what Python cannot check."""
    if is_typeddict(annotation):
        return dict
    if get_origin(annotation) is Literal:
        return type(get_args(annotation)[0])
    found = get_origin(annotation) or annotation
    return found if isinstance(found, type) and found is not object else None


@dataclass(frozen=True)
class Function:
    """A stage that is a Python function. `takes`: the annotation of each parameter.

    `wired`: by parameter, the stage that it takes where its name does not say so. `optional`:
    parameters that have a default.
    """

    name: str
    call: Callable[..., Any]
    takes: Mapping[str, Any]
    gives: Any
    optional: frozenset[str] = frozenset()
    wired: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """A stage that is a model. `wired`: by input, the stage that it takes; "": its only input."""

    name: str
    file: Path
    wired: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Definition:
    """A pipeline as its file has it, in the file's order; nothing is known of the models yet.

    `in_flight`: by stage, how many requests may be in it at a time; `timeout_ms`: how long each.
    """

    path: Path
    stages: tuple[Function | Model, ...]
    in_flight: Mapping[str, int]
    timeout_ms: Mapping[str, float]

    @property
    def models(self) -> dict[str, Path]:
        return {each.name: each.file for each in self.stages if isinstance(each, Model)}


@dataclass(frozen=True)
class Origin:
    """Where an argument comes from. `output`: of a model, "" for all that the stage gives.

    `each`: it is a list, and the stage is called for each element.
    """

    stage: str
    output: str = ""
    each: bool = False


@dataclass(frozen=True)
class WiredStage:
    """One stage of a checked graph. `gives`: the annotation of what it gives in all.

    `ports`: of a model.
    """

    about: Function | Model
    arguments: Mapping[str, Origin]
    gives: Any
    ports: Ports | None = None

    @property
    def name(self) -> str:
        return self.about.name

    @property
    def each(self) -> bool:
        return any(source.each for source in self.arguments.values())

    def after(self, stages: Mapping[str, Any]) -> set[str]:
        """The stages that it waits for, of `stages`."""
        return {source.stage for source in self.arguments.values() if source.stage in stages}

    def items(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The arguments of each call; one call unless a list is taken element by element.

        `values`: what stages gave, and the request's input. Raises StageFailed for lists of
        different lengths.
        """
        found = {name: _value(source, values) for name, source in self.arguments.items()}
        if not self.each:
            return [found]
        lengths = {name: len(found[name]) for name, source in self.arguments.items() if source.each}
        if len(set(lengths.values())) > 1:
            given = ", ".join(f"'{name}' {length}" for name, length in lengths.items())
            raise StageFailed(f"stage '{self.name}': lists of different lengths: {given}")
        return [
            {name: value[at] if name in lengths else value for name, value in found.items()}
            for at in range(next(iter(lengths.values())))
        ]

    def run(self, values: Mapping[str, Any]) -> Any:
        """What a function gives, checked. Raises StageFailed, and a DeploykitError as it is."""
        assert isinstance(self.about, Function)
        given = [_call(self.about, each) for each in self.items(values)]
        return given if self.each else given[0]

    def prepare(self, values: Sequence[Mapping[str, Any]], max_rows: int) -> ModelCalls:
        """The calls of a model for several requests; see `prepare_calls`."""
        assert self.ports is not None
        items = [item for each in values for item in self.items(each)]
        return prepare_calls(self.name, self.ports, items, max_rows)

    def collect(self, calls: ModelCalls, outputs: Sequence[Arrays]) -> list[Any]:
        """What a model gives, for each item."""
        assert self.ports is not None
        return collect_outputs(self.name, self.ports, calls, outputs)


def _value(source: Origin, values: Mapping[str, Any]) -> Any:
    value = values[source.stage]
    if not source.output:
        return value
    one = [each[source.output] for each in (value if isinstance(value, list) else [value])]
    return one if isinstance(value, list) else one[0]


def _call(function: Function, given: Mapping[str, Any]) -> Any:
    try:
        value = function.call(**given)
    except (MemoryError, KeyboardInterrupt):
        raise
    except BaseException as exc:  # exit() in it must not end the process
        raise stage_error(exc, function.name) from exc
    if not conforms(value, function.gives):
        raise StageFailed(
            f"stage '{function.name}' gave {describe_value(value)}, its annotation is "
            f"{shown(function.gives)}"
        )
    return value
