"""The stages of a pipeline: functions and models, and how one of them runs.

A server and a pipeline in this process share it: here is no thread and no queue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploykit.pipelines.annotations import conforms, describe_value, shown
from deploykit.pipelines.failures import StageFailed, stage_error
from deploykit.pipelines.models import ModelCalls, Ports, collect_outputs, prepare_calls
from deploykit.runtimes.engine import Arrays


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
