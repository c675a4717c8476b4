"""Connect the stages of a pipeline: check annotations where stages meet, and refuse cycles.

A function's parameter is named after its source: a stage, an output of a model, or the request's
input, which is the one name that no stage has. The answer is the stage that no other stage takes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from types import GenericAlias
from typing import Any, get_args, get_origin

import numpy as np

from deploykit.core.errors import BadInput, StageFailed, did_you_mean, first_line
from deploykit.core.json_value import ONE_JSON, json_value
from deploykit.engines.engine import Engine
from deploykit.pipelines.stages import (
    Definition,
    Function,
    Model,
    Origin,
    Ports,
    WiredStage,
    conforms,
    describe_value,
    fits,
    shown,
)

_KINDS = {bytes: "bytes", str: "text", np.ndarray: "image"} | dict.fromkeys(
    (dict, list, int, float, bool, Any), "json"
)
_SMALL_BYTES = 64 << 10  # JSON of this size is parsed at once
_VALUE_BYTES = 80  # memory for each comma, colon and opening bracket of JSON


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
            from deploykit.engines.tasks.images import read_pixels  # needs Pillow

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


@dataclass
class _Connecting:
    definition: Definition
    ports: Mapping[str, Ports]
    sources: dict[str, dict[str, Origin]] = field(default_factory=dict)  # by stage and parameter

    def __post_init__(self) -> None:
        self.where = self.definition.path.name
        self.stages = {each.name: each for each in self.definition.stages}
        self.outputs: dict[str, list[str]] = {}  # output -> its models
        for name, each in self.ports.items():
            for spec in () if each.task else each.outputs:
                self.outputs.setdefault(spec.name, []).append(name)

    def error(self, text: str, hint: str | None = None) -> BadInput:
        return BadInput(f"{self.where}: {text}", hint=hint)

    def graph(self) -> StageGraph:
        self.sources = {name: self._find_sources(name) for name in self.stages}
        entry = self._find_input()
        order = self._order()
        used = {source.stage for found in self.sources.values() for source in found.values()}
        ends = [name for name in self.stages if name not in used]
        answer = "answer" if "answer" in ends else ends[-1]
        for name in ends:
            if name != answer:
                raise self.error(
                    f"no other stage takes '{name}', and the answer is that of '{answer}'",
                    hint=f"remove it, or name it _{name} if it is not a stage",
                )
        takes = self._find_annotation(entry)
        kind = _KINDS.get(get_origin(takes) or takes)
        if kind is None:
            hint = "bytes, str, numpy.ndarray (an image), dict, list, int, float or bool"
            raise self.error(f"the request's input is {shown(takes)}", hint)
        stages: dict[str, WiredStage] = {}
        for name in order:
            stages[name] = self._wire(name, stages, takes)
        return StageGraph(self.definition, stages, entry, takes, kind, answer)

    def _parameters(self, name: str) -> Mapping[str, Any]:
        about = self.stages[name]
        return about.takes if isinstance(about, Function) else self.ports[name].takes

    def _find_sources(self, name: str) -> dict[str, Origin]:
        """Return the origin of each parameter; a name that no stage has is the request's input."""
        about, parameters, sources = self.stages[name], self._parameters(name), {}
        wired = dict(about.wired)
        if "" in wired and len(parameters) == 1:
            wired = {next(iter(parameters)): wired[""]}
        for parameter in wired:
            if parameter not in parameters:
                what = f"no input '{parameter}'" if parameter else f"{len(parameters)} inputs"
                hint = f"its inputs are: {', '.join(parameters)}"
                raise self.error(f"model '{name}' has {what}", hint)
        for parameter in parameters:
            wanted = wired.get(parameter, parameter)
            source = self._find_source(name, wanted)
            optional = isinstance(about, Function) and parameter in about.optional
            if source is not None or not optional:
                sources[parameter] = source or Origin(wanted)
        if not sources:
            raise self.error(f"stage '{name}' takes nothing")
        return sources

    def _find_source(self, name: str, wanted: str) -> Origin | None:
        if wanted in self.stages and wanted != name:
            return Origin(wanted)
        models = [each for each in self.outputs.get(wanted, ()) if each != name]
        if len(models) > 1:
            raise self.error(
                f"stage '{name}' takes '{wanted}', an output of {' and '.join(models)}",
                hint=f"name the model's too: {models[0]}_{wanted}",
            )
        pairs = [(model, output) for output, owners in self.outputs.items() for model in owners]
        found = [(model, wanted) for model in models]
        for model, output in found or [pair for pair in pairs if "_".join(pair) == wanted]:
            return Origin(model, output if len(self.ports[model].outputs) > 1 else "")
        if wanted == name:
            raise self.error(f"a cycle: {name} -> {name}")
        return None

    def _find_input(self) -> str:
        """Return the one name that no stage has; functions come before models."""
        functions_first = sorted(self.stages, key=lambda n: isinstance(self.stages[n], Model))
        unknown = {
            source.stage: name
            for name in functions_first
            for source in self.sources[name].values()
            if source.stage not in self.stages
        }
        if not unknown:
            self._order()
        entry, *others = unknown
        for wrong in others:
            known = [*self.stages, *self.outputs]
            raise self.error(
                f"stage '{unknown[wrong]}' takes '{wrong}', which is neither a stage nor an output "
                f"of a model; the request's input is '{entry}'",
                hint=did_you_mean(wrong, known, f"there are: {', '.join(known)}"),
            )
        return entry

    def _order(self) -> list[str]:
        before = {
            name: [source.stage for source in sources.values() if source.stage in self.stages]
            for name, sources in self.sources.items()
        }
        try:
            return list(TopologicalSorter(before).static_order())
        except CycleError as exc:
            raise self.error(f"a cycle: {' -> '.join(exc.args[1])}") from None

    def _find_annotation(self, entry: str) -> Any:
        """Return the annotation of the request's input; functions decide before models."""
        takers = {
            name: self._parameters(name)[parameter]
            for name, sources in self.sources.items()
            for parameter, source in sources.items()
            if source.stage == entry
        }
        functions = {n: each for n, each in takers.items() if isinstance(self.stages[n], Function)}
        (first, takes), *others = (functions or takers).items()
        for name, other in others:
            if other != takes:
                raise self.error(
                    f"the request's input '{entry}' is {shown(takes)} in '{first}' and "
                    f"{shown(other)} in '{name}'"
                )
        return bytes if takes == np.ndarray | bytes else takes  # a model with a task decodes images

    def _wire(self, name: str, before: Mapping[str, WiredStage], entry: Any) -> WiredStage:
        about, arguments = self.stages[name], {}
        for parameter, source in self.sources[name].items():
            wanted = self._parameters(name)[parameter]
            given = entry
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
            gives = GenericAlias(list, (gives,))
        return WiredStage(about, arguments, gives, self.ports.get(name))
