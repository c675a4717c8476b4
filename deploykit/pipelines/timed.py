"""A pipeline as an engine, so that it is timed as engines are, and the time of each stage."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np

from deploykit.core.tensors import TensorSpec
from deploykit.pipelines.run import OpenPipeline
from deploykit.runtimes.engine import Arrays, BaseEngine


class TimedPipeline(BaseEngine):
    """Takes files in turn. `calls`: the seconds of each stage, of each call.

    A call goes from the bytes of files to the JSON values of their answers; both count as stages.
    """

    runtime = "pipeline"
    max_batch = None

    def __init__(self, opened: OpenPipeline, files: Sequence[bytes]) -> None:
        self._opened = opened
        self._files = itertools.cycle(files)
        self.inputs = (TensorSpec(opened.graph.input, "string", ("N",)),)
        self.outputs = (TensorSpec(opened.graph.answer, "string", ("N",)),)
        self.device = opened.device
        self.calls: list[dict[str, float]] = []

    def feeds(self, batch: int) -> Arrays:
        """As many places as files are wanted: the call takes those whose turn it is."""
        return {self.inputs[0].name: np.full(batch, "", object)}

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        graph, now, stages = self._opened.graph, time.perf_counter, dict[str, float]()
        count = len(feeds[graph.input])
        began_s = now()
        inputs = [graph.read(each) for each in itertools.islice(self._files, count)]
        stages[graph.input] = now() - began_s
        found = self._opened.run(inputs, stages.__setitem__)
        ended_s = now()
        for each in found:
            graph.answer_json(each)
        stages["JSON"] = now() - ended_s
        self.calls.append(stages)
        return {}

    def close(self) -> None:
        """Whoever opened the pipeline closes it."""
