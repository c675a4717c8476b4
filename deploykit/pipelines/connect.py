"""Connect the stages of a pipeline: every annotation checked where stages meet, no cycle.

A function's parameter is named after what it takes: a stage, an output of a model, or the
request's input, which is the one name that no stage has. The answer is what no other stage takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import GenericAlias
from typing import Any

import numpy as np

from deploykit.core.errors import BadInput, did_you_mean
from deploykit.pipelines.annotations import EACH, meeting, shown
from deploykit.pipelines.formats import answer_json, input_kind, reader
from deploykit.pipelines.models import Ports
from deploykit.pipelines.stages import Definition, Function, Model, Origin, WiredStage
from deploykit.runtimes.engine import Engine


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
