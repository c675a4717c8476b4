"""Time a pipeline in this process, end to end and per stage, and return an ordinary report.

`sweep` times it like an engine: a call takes a batch of files, from their bytes to the JSON of the
answers. The stages' times in these calls have intervals over the same rounds.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from deploykit.benchmarking.timing import (
    FULL_S,
    Block,
    Measured,
    Setup,
    Timing,
    Turns,
    make_point,
)
from deploykit.core.files import sha256
from deploykit.core.machine import now, provenance, this_machine
from deploykit.core.tensors import TensorSpec
from deploykit.engines.engine import Arrays, Engine
from deploykit.evaluation.artefacts import Progress, no_progress
from deploykit.pipelines.pipeline import OpenPipeline
from deploykit.reporting.machine_load import Watch, invalid, sum_up
from deploykit.reporting.report import Point, Report
from deploykit.reporting.verdict import verdict


def bench_pipeline(
    opened: OpenPipeline,
    path: Path,
    files: Sequence[Path],
    batches: Sequence[int],
    timing: Timing,
    on_progress: Progress = no_progress,
) -> Report:
    """Answer `files` repeatedly by the pipeline of `path`, `batches` requests per call.

    Calls follow one another in this process. The points of stages have the scenario "stage of
    NAME". The caller writes the report.
    """
    name, points = path.stem, list[Point]()
    timed = TimedPipeline(opened, [each.read_bytes() for each in files])
    setup = Setup(name, lambda: timed, file=path.name, sha256=sha256(path))
    watch = Watch()
    before = watch.around(timing.seconds)
    turns = Turns(timing, on_progress, watch=watch)
    for batch in batches:
        timed.calls.clear()
        (found,) = turns.measure([setup], [batch], timed.feeds)
        points += [make_point([found]), *_stages(found, timed.calls)]
    outside = sum_up(watch, before, watch.around(timing.seconds))
    how = (
        f"each point: {timing.seconds:g} s in rounds after about {timing.warmup_s:g} s of warm-up, "
        f"in one process; {len(files)} files in turn, from their bytes to the JSON of the answers"
    )
    report = Report(
        title=f"{name}: a pipeline from end to end and by stage",
        created=now(),
        command="",
        quick=timing.seconds < FULL_S,
        machine=this_machine().to_dict(),
        provenance=provenance(),
        points=tuple(points),
        asked=(name,),
        outside=outside,
        invalid=invalid(outside, watch.bound),
        notes=(how,),
    )
    return replace(report, verdict=verdict(report))


def _stages(found: Measured, calls: Sequence[dict[str, float]]) -> list[Point]:
    """Return the time of each stage in the timed calls, which are the last, round after round."""
    counts = [len(block.calls_ns) for block in found.blocks]
    ends = list(itertools.accumulate(counts, initial=len(calls) - sum(counts)))
    timed = [calls[begin:end] for begin, end in itertools.pairwise(ends)]
    points = []
    for stage in calls[0]:
        blocks = []
        for each in timed:
            took_ns = np.array([max(1, round(call[stage] * 1e9)) for call in each], np.int64)
            rows = found.batch * len(each)
            blocks.append(Block(took_ns, rows, rows / (took_ns.sum() / 1e9)))
        part = replace(found, setup=replace(found.setup, label=stage), blocks=blocks)
        scenario = f"stage of {found.setup.label}"
        points.append(replace(make_point([part]), scenario=scenario))
    return points


class TimedPipeline(Engine):
    """Takes files in turn. `calls`: the seconds of each call's stages, with reading and JSON."""

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
        """Return a placeholder per file: the call takes the next files in turn."""
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
        """Do nothing: the function that opened the pipeline closes it."""
