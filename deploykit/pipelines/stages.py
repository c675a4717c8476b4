"""The stages of a pipeline, functions and models: match their types, connect them, and run one.

A function's parameter is named after its source: a stage, an output of a model, or the request's
input, which is the one name that no stage has. The answer is the stage that no other stage takes.
A server and a pipeline in this process share this code, which has no threads and no queues.
"""

from __future__ import annotations

import inspect
import json
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate, chain, groupby, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import numpy as np

from deploykit.core.errors import BadInput, DeploykitError, StageFailed, did_you_mean, first_line
from deploykit.core.json_value import ONE_JSON, json_value
from deploykit.core.tensors import TensorSpec, carrier, concrete, mismatch
from deploykit.engines.engine import Arrays, Engine
from deploykit.engines.tasks import TaskSteps, answer

_KINDS = {bytes: "bytes", str: "text", np.ndarray: "image"} | dict.fromkeys(
    (dict, list, int, float, bool, Any), "json"
)
_SMALL_BYTES = 64 << 10  # JSON of this size is parsed at once
_VALUE_BYTES = 80  # memory for each comma, colon and opening bracket of JSON


@contextmanager
def located(where: str) -> Iterator[None]:
    """Begin the messages of errors with `where`."""
    try:
        yield
    except DeploykitError as exc:
        raise _begin(exc, where) from exc


def _begin(error: DeploykitError, where: str) -> DeploykitError:
    if error.message.startswith(where):
        return error
    return type(error)(f"{where}: {error.message}", hint=error.hint)


def stage_error(error: BaseException, stage: str) -> DeploykitError:
    """Return an error with the stage's name; a user's exception is reported by its class only."""
    where = f"stage '{stage}'"
    if isinstance(error, DeploykitError):
        return _begin(error, where)
    failed = StageFailed(f"{where} failed: {type(error).__name__}")
    failed.__cause__ = error
    return failed


def failure_reason(exc: DeploykitError) -> str:
    """Return a stage's exception and its place in one line, for the log and the command line."""
    cause = exc.__cause__ if isinstance(exc, StageFailed) else None
    if cause is None:
        return exc.message
    where = ""
    for frame in traceback.extract_tb(cause.__traceback__)[-1:]:
        where = f" ({Path(frame.filename).name}, line {frame.lineno})"
    text = first_line(cause)
    return f"{exc}{'' if text == type(cause).__name__ else f': {text}'}{where}"


_NUMBERS: Mapping[type, tuple[type, ...]] = {
    float: (float, int, np.floating, np.integer),
    int: (int, np.integer),
}


def fits(given: Any, wanted: Any) -> bool:
    """Return whether a value annotated `given` fits `wanted`; what Python cannot compare fits."""
    if get_origin(given) in (Union, types.UnionType):
        return all(fits(each, wanted) for each in get_args(given))
    if get_origin(wanted) in (Union, types.UnionType):
        return any(fits(given, each) for each in get_args(wanted))
    have, want = get_origin(given) or given, get_origin(wanted) or wanted
    if have in (Any, object) or want in (Any, object):
        return True
    try:
        if not issubclass(have, want) and (have, want) != (int, float):
            return False
    except TypeError:
        return True
    inner = get_args(given), get_args(wanted)
    return len(inner[0]) != len(inner[1]) or all(map(fits, *inner))


def conforms(value: object, annotation: Any) -> bool:
    """Return whether a value and the elements of a list, tuple or dict match an annotation."""
    kind, parts = get_origin(annotation) or annotation, get_args(annotation)
    if kind in (Union, types.UnionType):
        return any(conforms(value, part) for part in parts)
    if kind is Literal:
        return value in parts
    try:
        if not isinstance(value, _NUMBERS.get(kind, kind)):
            return False
    except TypeError:  # Any, a protocol, a type variable
        return True
    if not parts:
        return True
    if isinstance(value, np.ndarray):
        return fits(np.dtype[value.dtype.type], parts[-1])  # type: ignore[name-defined]
    if isinstance(value, dict):
        return all(conforms(each, parts[-1]) for each in value.values())
    if isinstance(value, tuple) and parts[-1] is not Ellipsis:
        return len(value) == len(parts) and all(map(conforms, value, parts))
    if isinstance(value, (list, tuple)):
        return all(conforms(each, parts[0]) for each in value)
    return True


def shown(annotation: Any) -> str:
    """Write an annotation as in source code: `list[numpy.ndarray]`."""
    return "None" if annotation is type(None) else inspect.formatannotation(annotation)


def describe_value(value: object) -> str:
    """Describe a value's type for an error: `list of str`, `numpy.ndarray of uint8`."""
    name = shown(type(value))
    if isinstance(value, np.ndarray):
        return f"{name} of {value.dtype}"
    if isinstance(value, (list, tuple)) and value:
        return f"{name} of {' and '.join(sorted({shown(type(each)) for each in value})[:3])}"
    return name


class ModelCalls(NamedTuple):
    """The inputs of a model's calls; `collect` turns their outputs into each request's value."""

    feeds: list[Arrays]
    collect: Callable[[Sequence[Arrays]], list[Any]]


@dataclass(frozen=True)
class Ports:
    """Inputs and outputs of an opened model. `task`: set if it takes images or strings."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    task: TaskSteps | None = None

    @staticmethod
    def of(engine: Engine) -> Ports:
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

    def read(self, item: Mapping[str, Any], max_rows: int) -> tuple[Arrays, Any]:
        """Return an item's tensors, and its task's state, or whether it lacks a batch axis.

        Raises StageFailed for arrays that do not fit, BadInput for an image or a text that cannot
        be read.
        """
        if self.task is None:
            return self._read_tensors(item, max_rows)
        (value,), image = item.values(), self.task.task.image
        if not isinstance(value, np.ndarray) or image is None:
            prepared = self.task.read(value)
            return prepared.feeds, prepared.placed
        from deploykit.engines.data.images import place_pixels  # needs Pillow

        placed = place_pixels(value, image)
        return {image.tensor: placed.pixels[None]}, placed

    def _read_tensors(self, item: Mapping[str, Any], max_rows: int) -> tuple[Arrays, bool]:
        feeds, alone = {}, set[bool]()
        for spec in self.inputs:
            array = np.ascontiguousarray(item[spec.name])
            batch_axis = bool(spec.shape) and (spec.batched or spec.shape[0] == 1)
            sample = batch_axis and item[spec.name].ndim == len(spec.shape) - 1
            alone.add(sample)
            feeds[spec.name] = array[None] if sample else array
            problem = mismatch(spec, array.dtype.name, feeds[spec.name].shape)
            if problem is not None:
                raise StageFailed(problem)
        if len(alone) > 1:
            raise StageFailed("some inputs have a batch axis and others have none")
        if max_rows and len({len(array) for array in feeds.values()}) > 1:
            raise StageFailed("its inputs have different numbers of rows")
        return feeds, alone.pop()

    def answers(self, outputs: Arrays, rows: Sequence[int], states: Sequence[Any]) -> list[Any]:
        """Return the result of each item. `outputs`: of all `rows`; nothing without a call."""
        whole = outputs or {
            spec.name: np.zeros((0, *concrete(spec, {})[1:]), carrier(spec.dtype))
            for spec in self.outputs
        }
        if self.task is not None:
            return answer(self.task.task, whole, states)
        found, ends = [], list(accumulate(rows))
        for end, count, state in zip(ends, rows, states, strict=True):
            one = {n: a[end - count : end] for n, a in whole.items()} if ends[1:] else whole
            found.append(self._result(one, state))
        return found

    def _result(self, outputs: Arrays, sample: bool) -> Any:
        found = {}
        for spec in self.outputs:
            rows = bool(spec.shape) and spec.shape[0] in (1, self.inputs[0].shape[0])
            found[spec.name] = outputs[spec.name][0] if sample and rows else outputs[spec.name]
        return found if len(found) > 1 else next(iter(found.values()))


def _shapes(feeds: Arrays) -> list[Any]:
    return [(array.dtype, array.shape[1:]) for array in feeds.values()]


def _join(parts: Sequence[Arrays]) -> Arrays:
    """Return one array of all rows for each name; nothing without parts."""
    if len(parts) < 2:
        return dict(*parts)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


@dataclass(frozen=True)
class Function:
    """A function. `takes`: the annotations; `wired`: its stages; `optional`: have a default."""

    name: str
    call: Callable[..., Any]
    takes: Mapping[str, Any]
    gives: Any
    optional: frozenset[str] = frozenset()
    wired: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """A stage that is a model. `wired` maps an input to its stage; "" is its only input."""

    name: str
    file: Path
    wired: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Definition:
    """A pipeline as defined in its file, in the file's order; its models are not open yet.

    `in_flight`: the most concurrent requests, by stage; `timeout_ms`: the longest time of each.
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
    """The source of an argument. `output`: a model's output, "" for the stage's whole result.

    With `each` the argument is a list, and the stage is called for each element.
    """

    stage: str
    output: str = ""
    each: bool = False

    def value(self, values: Mapping[str, Any]) -> Any:
        value = values[self.stage]
        if not self.output:
            return value
        if isinstance(value, list):
            return [each[self.output] for each in value]
        return value[self.output]


@dataclass(frozen=True)
class WiredStage:
    """A stage of a checked graph. `gives`: its result's annotation; `ports`: those of a model."""

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

    def items(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return each call's arguments; a list by element makes several. Raises StageFailed."""
        found = {name: source.value(values) for name, source in self.arguments.items()}
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
        """Run a function and check its result. Raises StageFailed, or its own DeploykitError."""
        assert isinstance(self.about, Function)
        found, gives = [], self.about.gives
        for arguments in self.items(values):
            try:
                value = self.about.call(**arguments)
            except (MemoryError, KeyboardInterrupt):
                raise
            except BaseException as exc:  # exit() in a stage must not end the process
                raise stage_error(exc, self.name) from exc
            if not conforms(value, gives):
                raise StageFailed(
                    f"stage '{self.name}' gave {describe_value(value)}, its annotation is "
                    f"{shown(gives)}"
                )
            found.append(value)
        return found if self.each else found[0]

    def prepare(self, values: Sequence[Mapping[str, Any]], max_rows: int) -> ModelCalls:
        """Join items of equal shapes into calls of up to `max_rows` rows; divide larger ones.

        `values`: of several requests. With `max_rows` 0 rows must not be joined, so each item is
        one call. An array without the batch axis is one sample. Raises as `Ports.read`.
        """
        assert self.ports is not None
        ports, where = self.ports, f"stage '{self.name}'"
        with located(where):
            items = [self.items(each) for each in values]
            pairs = [ports.read(item, max_rows) for some in items for item in some]
        calls, groups = list[Arrays](), list[tuple[int, list[int], list[Any]]]()
        for _, group in groupby(pairs, lambda pair: _shapes(pair[0]) if max_rows else id(pair)):
            feeds, states = map(list, zip(*group, strict=True))
            whole = _join(feeds)
            rows = [len(next(iter(each.values()))) for each in feeds] if max_rows else [1]
            cuts = [slice(at, at + max_rows) for at in range(0, sum(rows), max_rows or 1)]
            groups.append((len(cuts), rows, states))
            calls += [{n: a[cut] for n, a in whole.items()} if max_rows else whole for cut in cuts]

        def collect(outputs: Sequence[Arrays]) -> list[Any]:
            found, left = list[Any](), iter(outputs)
            with located(where):
                for count, rows, states in groups:
                    found += ports.answers(_join(list(islice(left, count))), rows, states)
            results = iter(found)
            given = [[next(results) for _ in some] for some in items]
            return given if self.each else [value for (value,) in given]

        return ModelCalls(calls, collect)


@dataclass(frozen=True)
class StageGraph:
    """A checked pipeline: its stages in an order in which they can run.

    `input`: the name of the request's input, `takes` its annotation, `kind` the type of a request:
    image, text, json or bytes. `answer`: the stage that returns the answer.
    """

    definition: Definition
    stages: Mapping[str, WiredStage]
    input: str
    takes: Any
    kind: str
    answer: str

    @property
    def metadata(self) -> dict[str, Any]:
        """The Open Inference Protocol's metadata of a model, without the name."""
        gives = shown(self.stages[self.answer].gives)
        parameters = {"stages": ", ".join(self.stages), "takes": self.kind, "gives": gives}
        return {
            "versions": ["1"],
            "platform": "deploykit_pipeline",
            "inputs": [{"name": self.input, "datatype": "BYTES", "shape": [1]}],
            "outputs": [{"name": self.answer, "datatype": "BYTES", "shape": [1]}],
            "parameters": parameters,
        }

    def read(self, data: bytes, *, own_file: bool = False) -> Any:
        """Decode a request's bytes as the input; an image is uint8 (H, W, 3). Raises BadInput."""
        if self.kind == "image":
            from deploykit.engines.data.images import read_pixels  # needs Pillow

            return read_pixels(data, own_file=own_file)
        if self.kind == "bytes":
            return data
        try:
            if self.kind == "text":
                return data.decode("utf-8")
            with ONE_JSON if len(data) > _SMALL_BYTES else nullcontext():
                # with functions of Python the parser lets other threads run between two numbers
                value = json.loads(data, parse_int=lambda x: int(x), parse_float=lambda x: float(x))
        except UnicodeDecodeError as exc:
            what = f"the {self.kind} is not UTF-8"
            raise BadInput(f"{what}: {exc.reason} at byte {exc.start}") from exc
        except (ValueError, RecursionError) as exc:
            raise BadInput(f"the input is not JSON: {first_line(exc)}") from exc
        if not conforms(value, self.takes):
            wanted = shown(self.takes)
            raise BadInput(f"the input is a JSON {describe_value(value)}, {wanted} is needed")
        return value

    def answer_json(self, value: Any) -> Any:
        """Return the answer as JSON values; NaN and infinity are null. Raises StageFailed."""
        with self.writing():
            return plain(value)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Raise StageFailed for an answer that has no JSON form."""
        try:
            yield
        except RecursionError:
            raise StageFailed(f"stage '{self.answer}': its answer is too deep for JSON") from None
        except TypeError as exc:
            text = first_line(exc.__cause__ or exc)
            raise StageFailed(f"stage '{self.answer}': {text}") from None


def input_bytes(value: Any, data: bytes | None) -> int:
    """Return an upper bound of an input's memory; `data` is the JSON that it was read from."""
    if data is not None:
        structure = sum(map(data.count, (b",", b":", b"[", b"{")))
        return 4 * len(data) + _VALUE_BYTES * structure  # a character may take 4 bytes
    return value.nbytes if isinstance(value, np.ndarray) else len(value)


def plain(value: Any) -> Any:
    """Return `value` as JSON values. Raises TypeError, RecursionError."""
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_asdict"):
        return [plain(each) for each in value]
    if hasattr(value, "__dataclass_fields__") and not hasattr(value, "to_dict"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return json_value(value)


def connect_engines(definition: Definition, engines: Mapping[str, Engine]) -> StageGraph:
    """Check and connect the stages; `engines` by model. Raises BadInput for a mismatch."""
    return _Connecting(definition, {name: Ports.of(each) for name, each in engines.items()}).graph()


class _Connecting:
    """Finds where each parameter's value is from, by the names that stages and outputs have."""

    def __init__(self, definition: Definition, ports: Mapping[str, Ports]) -> None:
        self.definition, self.ports = definition, ports
        self.stages = {each.name: each for each in definition.stages}
        self.takes = {
            name: each.takes if isinstance(each, Function) else ports[name].takes
            for name, each in self.stages.items()
        }
        self.names = {name: [Origin(name)] for name in self.stages}
        outputs = [
            (model, spec.name, Origin(model, spec.name if len(each.outputs) > 1 else ""))
            for model, each in ports.items()
            for spec in (() if each.task else each.outputs)
        ]
        for _, output, origin in outputs:
            self.names.setdefault(output, []).append(origin)
        for model, output, origin in outputs:
            self.names.setdefault(f"{model}_{output}", [origin])
        self.sources = {name: self._find_sources(name) for name in self.stages}

    def error(self, text: str, hint: str | None = None) -> BadInput:
        return BadInput(f"{self.definition.path.name}: {text}", hint=hint)

    def graph(self) -> StageGraph:
        before = {name: [o.stage for o in found.values()] for name, found in self.sources.items()}
        try:
            order = list(TopologicalSorter(before).static_order())
        except CycleError as exc:
            raise self.error(f"a cycle: {' -> '.join(exc.args[1])}") from None
        entry, takes = self._find_input()
        used = set(chain.from_iterable(before.values()))
        ends = [name for name in self.stages if name not in used]
        answer = "answer" if "answer" in ends else ends[-1]
        for name in ends:
            if name != answer:
                raise self.error(
                    f"no other stage takes '{name}', and the answer is that of '{answer}'",
                    hint=f"remove it, or name it _{name} if it is not a stage",
                )
        kind = _KINDS.get(get_origin(takes) or takes)
        if kind is None:
            hint = "bytes, str, numpy.ndarray (an image), dict, list, int, float or bool"
            raise self.error(f"the request's input is {shown(takes)}", hint)
        stages: dict[str, WiredStage] = {}
        for name in filter(self.stages.__contains__, order):  # without the request's input
            stages[name] = self._wire(name, stages, takes)
        return StageGraph(self.definition, stages, entry, takes, kind, answer)

    def _find_sources(self, name: str) -> dict[str, Origin]:
        """Return the origin of each parameter; a name that no stage has is the request's input."""
        about, takes, sources = self.stages[name], self.takes[name], {}
        wired = dict(about.wired)
        if "" in wired and len(takes) == 1:
            wired = {next(iter(takes)): wired[""]}
        for parameter in (each for each in wired if each not in takes):
            what = f"no input '{parameter}'" if parameter else f"{len(takes)} inputs"
            raise self.error(f"model '{name}' has {what}", f"its inputs are: {', '.join(takes)}")
        for parameter in takes:
            wanted = wired.get(parameter, parameter)
            found = [origin for origin in self.names.get(wanted, ()) if origin.stage != name]
            if len(found) > 1 and found[0].stage != wanted:  # a stage's name comes before outputs'
                models = [origin.stage for origin in found]
                raise self.error(
                    f"stage '{name}' takes '{wanted}', an output of {' and '.join(models)}",
                    hint=f"name the model's too: {models[0]}_{wanted}",
                )
            if found or not (isinstance(about, Function) and parameter in about.optional):
                # a stage that takes itself is a cycle
                sources[parameter] = found[0] if found else Origin(wanted)
        if not sources:
            raise self.error(f"stage '{name}' takes nothing")
        return sources

    def _find_input(self) -> tuple[str, Any]:
        """Return the one name that no stage has, and its annotation; functions decide first."""
        takers: dict[str, tuple[str, Any]] = {}
        for name in sorted(self.stages, key=lambda name: isinstance(self.stages[name], Model)):
            for parameter, origin in self.sources[name].items():
                if origin.stage not in self.stages:
                    takers.setdefault(origin.stage, (name, self.takes[name][parameter]))
        entry, *others = takers
        for wrong in others:
            raise self.error(
                f"stage '{takers[wrong][0]}' takes '{wrong}', which is neither a stage nor an "
                f"output of a model; the request's input is '{entry}'",
                hint=did_you_mean(wrong, self.names, f"there are: {', '.join(self.names)}"),
            )
        takes = takers[entry][1]
        return entry, bytes if takes == np.ndarray | bytes else takes  # a task decodes images

    def _wire(self, name: str, before: Mapping[str, WiredStage], entry: Any) -> WiredStage:
        about, arguments = self.stages[name], {}
        for parameter, source in self.sources[name].items():
            wanted, given = self.takes[name][parameter], entry
            if source.stage in before:
                stage = before[source.stage]
                tensor = list[np.ndarray] if stage.each else np.ndarray
                given = tensor if source.output else stage.gives
            each = not fits(given, wanted)  # then it must be a list of what fits
            is_list = (get_origin(given) or given) in (list, tuple)
            if each and not (is_list and fits((get_args(given) or (Any,))[0], wanted)):
                origin = f"'{source.stage}' gives" if source.stage in before else "the request has"
                raise self.error(
                    f"stage '{name}' takes '{parameter}' as {shown(wanted)}, {origin} "
                    f"{shown(given)}"
                )
            arguments[parameter] = Origin(source.stage, source.output, each)
        gives = about.gives if isinstance(about, Function) else self.ports[name].gives
        if any(source.each for source in arguments.values()):
            gives = types.GenericAlias(list, (gives,))
        return WiredStage(about, arguments, gives, self.ports.get(name))
