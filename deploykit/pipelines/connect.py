"""Connect the stages of a pipeline: every annotation checked where stages meet, no cycle.

A function's parameter is named after what it takes: a stage, an output of a model, or the
request's input, which is the one name that no stage has. The answer is what no other stage takes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import GenericAlias
from typing import Any, get_origin

import numpy as np

from deploykit.core.errors import BadInput, did_you_mean, first_line
from deploykit.core.json_value import ONE_JSON, json_value
from deploykit.engines.engine import Engine
from deploykit.pipelines.failures import StageFailed
from deploykit.pipelines.stages import (
    EACH,
    Definition,
    Function,
    Model,
    Origin,
    Ports,
    WiredStage,
    conforms,
    describe_value,
    meeting,
    shown,
)

# The input of a pipeline from bytes, and its answer as JSON values.

_JSON_TYPES = (dict, list, int, float, bool)
_VALUE_BYTES = 80  # of memory, for each comma, colon and opening bracket of JSON


def input_kind(takes: Any, where: str) -> str:
    """What a request is by the annotation of its input: image, text, json or bytes.

    Raises BadInput for an annotation that nothing is read as.
    """
    kind = get_origin(takes) or takes
    found = {bytes: "bytes", str: "text", np.ndarray: "image"}.get(kind)
    if found is not None:
        return found
    if kind in _JSON_TYPES or takes is Any:
        return "json"
    raise BadInput(
        f"{where}: the request's input is {shown(takes)}",
        hint="bytes, str, numpy.ndarray (an image), dict, list, int, float or bool",
    )


def reader(kind: str, takes: Any) -> Callable[[bytes], Any]:
    """How bytes become the input; it raises BadInput for bytes that are no such thing.

    bytes: as they are; text: UTF-8; image: uint8 (height, width, 3); json: checked with `takes`.
    """
    if kind == "image":
        from deploykit.pipelines.pixels import read_pixels  # Pillow, which others do not need

        return read_pixels
    if kind == "json":
        return lambda data: _from_json(data, takes)
    return _text if kind == "text" else bytes


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise BadInput(f"the text is not UTF-8: {exc.reason} at byte {exc.start}") from exc


def _from_json(data: bytes, takes: Any) -> Any:
    try:
        with ONE_JSON:
            value = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise BadInput(f"the input is not JSON: {first_line(exc)}") from exc
    if not conforms(value, takes):
        raise BadInput(f"the input is a JSON {describe_value(value)}, {shown(takes)} is needed")
    return value


def input_bytes(value: Any, data: bytes | None) -> int:
    """Return an upper bound of the memory of an input; `data`: the JSON that it was read from."""
    if data is not None:
        structure = sum(map(data.count, (b",", b":", b"[", b"{")))
        return 4 * len(data) + _VALUE_BYTES * structure  # a character may take 4 bytes
    return value.nbytes if isinstance(value, np.ndarray) else len(value)


def answer_json(stage: str, value: Any) -> Any:
    """The answer as JSON values: arrays become lists, NaN and infinity null. Raises StageFailed."""
    try:
        return _json(value)
    except RecursionError:
        raise StageFailed(f"stage '{stage}': its answer is too deep for JSON") from None
    except TypeError as exc:
        raise StageFailed(f"stage '{stage}': {first_line(exc)}") from None


def _json(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            finite, value = np.isfinite(value), value.astype(object)
            value[~finite] = None
        return _json(value.tolist()) if value.dtype == object else value.tolist()
    if isinstance(value, np.generic):
        return _json(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _json(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_asdict"):
        return [_json(each) for each in value]
    if hasattr(value, "__dataclass_fields__") and not hasattr(value, "to_dict"):
        return {name: _json(getattr(value, name)) for name in value.__dataclass_fields__}
    return json_value(value)


@dataclass(frozen=True)
class StageGraph:
    """A checked pipeline: its stages in an order in which they can run.

    `input`: the name of the request's input, `takes` its annotation, `kind` what a request is:
    image, text, json or bytes; `read`: how its bytes become the input.
    `answer`: the stage that gives the answer.
    """

    definition: Definition
    stages: Mapping[str, WiredStage]
    input: str
    takes: Any
    kind: str
    read: Callable[[bytes], Any]
    answer: str

    @property
    def metadata(self) -> dict[str, Any]:
        """In the form of the Open Inference Protocol's metadata of a model, less the name."""
        inputs, outputs = (
            [{"name": name, "datatype": "BYTES", "shape": [1]}]
            for name in (self.input, self.answer)
        )
        gives = shown(self.stages[self.answer].gives)
        about = {"stages": ", ".join(self.stages), "takes": self.kind, "gives": gives}
        return {
            "versions": ["1"],
            "platform": "deploykit_pipeline",
            "inputs": inputs,
            "outputs": outputs,
            "parameters": about,
        }

    def answer_json(self, value: Any) -> Any:
        """The answer as JSON values. Raises StageFailed."""
        return answer_json(self.answer, value)


def connect_stages(definition: Definition, ports: Mapping[str, Ports]) -> StageGraph:
    """Check and connect the stages; `ports` by model. Raises BadInput naming what does not fit."""
    return _Connecting(definition, ports).graph()


def connect_engines(definition: Definition, engines: Mapping[str, Engine]) -> StageGraph:
    """The same, with what the opened models take and give."""
    return connect_stages(definition, {name: Ports.of(each) for name, each in engines.items()})


class _Connecting:
    def __init__(self, definition: Definition, ports: Mapping[str, Ports]) -> None:
        self._definition = definition
        self._where = definition.path.name
        self._ports = ports
        self._stages = {each.name: each for each in definition.stages}
        self._makers: dict[str, list[str]] = {}  # output -> models that have it
        for name, each in ports.items():
            for spec in () if each.task else each.outputs:
                self._makers.setdefault(spec.name, []).append(name)

    def graph(self) -> StageGraph:
        sources = {name: self._sources(name) for name in self._stages}
        entry = self._input(sources)
        order = self._order(sources)
        answer = self._answer(sources)
        takes = self._takes(entry, sources)
        stages: dict[str, WiredStage] = {}
        for name in order:
            stages[name] = self._stage(name, sources[name], stages, takes)
        kind = input_kind(takes, self._where)
        read = reader(kind, takes)
        return StageGraph(self._definition, stages, entry, takes, kind, read, answer)

    def _parameters(self, name: str) -> Mapping[str, Any]:
        about = self._stages[name]
        return about.takes if isinstance(about, Function) else self._ports[name].takes

    def _sources(self, name: str) -> dict[str, Origin]:
        """By parameter. What no stage has is taken for the request's input."""
        about, parameters, found = self._stages[name], self._parameters(name), {}
        wired = dict(about.wired)
        if "" in wired and len(parameters) == 1:
            wired = {next(iter(parameters)): wired[""]}
        for parameter in wired:
            if parameter not in parameters:
                raise BadInput(
                    f"{self._where}: model '{name}' has no input '{parameter}'"
                    if parameter
                    else f"{self._where}: model '{name}' has {len(parameters)} inputs",
                    hint=f"its inputs are: {', '.join(parameters)}",
                )
        for parameter in parameters:
            wanted = wired.get(parameter, parameter)
            source = self._source(name, wanted)
            optional = isinstance(about, Function) and parameter in about.optional
            if source is not None:
                found[parameter] = source
            elif not optional:
                found[parameter] = Origin(wanted)
        if not found:
            raise BadInput(f"{self._where}: stage '{name}' takes nothing")
        return found

    def _source(self, name: str, wanted: str) -> Origin | None:
        if wanted in self._stages and wanted != name:
            return Origin(wanted)
        makers = [each for each in self._makers.get(wanted, ()) if each != name]
        if len(makers) == 1:
            return self._output(makers[0], wanted)
        if makers:
            raise BadInput(
                f"{self._where}: stage '{name}' takes '{wanted}', an output of "
                f"{' and '.join(makers)}",
                hint=f"name the model's too: {makers[0]}_{wanted}",
            )
        for model, ports in self._ports.items():
            for spec in () if ports.task else ports.outputs:
                if f"{model}_{spec.name}" == wanted:
                    return self._output(model, spec.name)
        if wanted == name:
            raise BadInput(f"{self._where}: a cycle: {name} -> {name}")
        return None

    def _output(self, model: str, name: str) -> Origin:
        return Origin(model, name if len(self._ports[model].outputs) > 1 else "")

    def _input(self, sources: Mapping[str, Mapping[str, Origin]]) -> str:
        """The one name that no stage has: the request's input. The first function says which."""
        functions_first = sorted(sources, key=lambda n: isinstance(self._stages[n], Model))
        unknown = {
            source.stage: name
            for name in reversed(functions_first)
            for source in reversed(list(sources[name].values()))
            if source.stage not in self._stages
        }
        if not unknown:
            raise self._cycle(sources, self._stages)
        *others, entry = unknown
        if others:
            known = [*self._stages, *self._makers]
            raise BadInput(
                f"{self._where}: stage '{unknown[others[0]]}' takes '{others[0]}', which is "
                f"neither a stage nor an output of a model; the request's input is '{entry}'",
                hint=did_you_mean(others[0], known, f"there are: {', '.join(known)}"),
            )
        return entry

    def _order(self, sources: Mapping[str, Mapping[str, Origin]]) -> list[str]:
        left, order = dict.fromkeys(self._stages), list[str]()
        while left:
            ready = [n for n in left if not any(s.stage in left for s in sources[n].values())]
            if not ready:
                raise self._cycle(sources, left)
            order.append(ready[0])
            del left[ready[0]]
        return order

    def _cycle(self, sources: Mapping[str, Mapping[str, Origin]], left: Iterable[str]) -> BadInput:
        """Each of `left` waits for another of them, or for one that does."""
        trail = [next(iter(left))]
        while trail[-1] not in trail[:-1]:
            trail.append(next(s.stage for s in sources[trail[-1]].values() if s.stage in left))
        cycle = trail[trail.index(trail[-1]) :][::-1]
        return BadInput(f"{self._where}: a cycle: {' -> '.join(cycle)}")

    def _answer(self, sources: Mapping[str, Mapping[str, Origin]]) -> str:
        used = {source.stage for found in sources.values() for source in found.values()}
        ends = [name for name in self._stages if name not in used]
        if len(ends) == 1:
            return ends[0]
        answer = "answer" if "answer" in ends else ends[-1]
        unused = next(name for name in ends if name != answer)
        raise BadInput(
            f"{self._where}: no other stage takes '{unused}', and the answer is that of '{answer}'",
            hint=f"remove it, or name it _{unused} if it is not a stage",
        )

    def _takes(self, entry: str, sources: Mapping[str, Mapping[str, Origin]]) -> Any:
        """The annotation of the request's input; functions decide before models."""
        found: dict[str, Any] = {}
        for kind in (Function, Model):
            for name, about in self._stages.items():
                for parameter, source in sources[name].items():
                    if source.stage == entry and isinstance(about, kind):
                        found.setdefault(name, self._parameters(name)[parameter])
            if found:
                break
        (first, takes), *others = found.items()
        for name, other in others:
            if other != takes:
                raise BadInput(
                    f"{self._where}: the request's input '{entry}' is {shown(takes)} in '{first}' "
                    f"and {shown(other)} in '{name}'"
                )
        return bytes if takes == np.ndarray | bytes else takes  # a task's model decodes images

    def _stage(
        self, name: str, sources: Mapping[str, Origin], before: Mapping[str, WiredStage], entry: Any
    ) -> WiredStage:
        about, arguments = self._stages[name], {}
        for parameter, source in sources.items():
            wanted = self._parameters(name)[parameter]
            given = self._given(source, before, entry)
            how = meeting(given, wanted)
            if how is None:
                origin = f"'{source.stage}' gives" if source.stage in before else "the request has"
                raise BadInput(
                    f"{self._where}: stage '{name}' takes '{parameter}' as {shown(wanted)}, "
                    f"{origin} {shown(given)}"
                )
            arguments[parameter] = Origin(source.stage, source.output, how == EACH)
        ports = self._ports.get(name)
        gives = about.gives if isinstance(about, Function) else self._ports[name].gives
        stage = WiredStage(about, arguments, gives, ports)
        if stage.each:
            stage = WiredStage(about, arguments, GenericAlias(list, (gives,)), ports)
        return stage

    def _given(self, source: Origin, before: Mapping[str, WiredStage], entry: Any) -> Any:
        if source.stage not in before:
            return entry
        stage = before[source.stage]
        if not source.output:
            return stage.gives
        return list[np.ndarray] if stage.each else np.ndarray
