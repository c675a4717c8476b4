"""Run a pipeline in this process: the requests of a batch go through it stage by stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deploykit.engines.engine import Closing, Engine
from deploykit.pipelines.connect import StageGraph
from deploykit.pipelines.failures import named
from deploykit.pipelines.stages import WiredStage


def _ignore(_stage: str, _seconds: float) -> None:
    """Nobody wants to know how long a stage took."""


class OpenPipeline(Closing):
    """A checked graph and the engines of its models, which it closes; one thread at a time.

    `max_rows`: of a model's call; 0 where its rows may not be joined.
    """

    def __init__(
        self, graph: StageGraph, engines: Mapping[str, Engine], max_rows: Mapping[str, int]
    ) -> None:
        self.graph = graph
        self.engines = engines
        self._max_rows = max_rows

    @property
    def device(self) -> str:
        """Of its models."""
        return " and ".join(sorted({each.device for each in self.engines.values()})) or "cpu"

    def __call__(self, value: Any) -> Any:
        """The answer to one request. Raises StageFailed, and what a stage raises of our errors."""
        return self.run([value])[0]

    def run(
        self, inputs: Sequence[Any], on_stage: Callable[[str, float], None] = _ignore
    ) -> list[Any]:
        """The answers to several requests, whose rows a model runs together.

        `on_stage` gets the seconds of each stage.
        """
        values = [{self.graph.input: each} for each in inputs]
        for name, stage in self.graph.stages.items():
            began_s = time.perf_counter()
            given = (
                [stage.run(each) for each in values]
                if stage.ports is None
                else self._run_model(stage, values)
            )
            for each, value in zip(values, given, strict=True):
                each[name] = value
            on_stage(name, time.perf_counter() - began_s)
        return [each[self.graph.answer] for each in values]

    def _run_model(self, stage: WiredStage, values: Sequence[Mapping[str, Any]]) -> list[Any]:
        prepared = stage.prepare(values, self._max_rows[stage.name])
        with named(stage.name):
            outputs = [self.engines[stage.name](call.feeds) for call in prepared.calls]
        found = iter(stage.collect(prepared, outputs))
        given = [[next(found) for _ in stage.items(each)] for each in values]
        return given if stage.each else [each[0] for each in given]

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
