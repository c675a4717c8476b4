"""Time a pipeline in this process, end to end and per stage, and return an ordinary report.

`sweep` times it like an engine: a call takes a batch of files, from their bytes to the JSON of the
answers. The stages' times in these calls have intervals over the same rounds.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from deploykit.benchmarking.timing import (
    FULL_S,
    Block,
    Measured,
    Setup,
    Timing,
    make_point,
    time_setups,
)
from deploykit.core.files import StrPath, sha256
from deploykit.core.machine import now, provenance, this_machine
from deploykit.core.tensors import TensorSpec
from deploykit.engines.engine import Arrays, Engine
from deploykit.evaluation.artefacts import Progress, claim_report, no_progress
from deploykit.pipelines.file import input_files
from deploykit.pipelines.pipeline import OpenPipeline, pipeline
from deploykit.reporting.machine_load import Watch, invalid, sum_up
from deploykit.reporting.points import Point
from deploykit.reporting.report import Report, write
from deploykit.reporting.verdict import verdict

log = logging.getLogger(__name__)


def bench_pipeline(
    path: StrPath,
    data: StrPath,
    *,
    batches: Sequence[int] = (1,),
    out: StrPath = "report",
    seconds: float = FULL_S,
    device: str = "auto",
    trust: bool = False,
    force: bool = False,
    command: str = "",
    on_progress: Progress = no_progress,
    on_note: Callable[[str], None] = log.warning,
) -> Report:
    """Answer the files of `data` repeatedly, `batches` requests per call, for `seconds`.

    Calls follow one another in this process. The points of stages have the scenario "stage of
    NAME". Raises what `predict_files` raises.
    """
    timing = Timing.lasting(seconds)
    files, folder = input_files([data]), claim_report(out, (path, data), force=force)
    name, around_s = Path(path).stem, min(0.5, seconds / 10)
    points: list[Point] = []
    most = max(batches, default=1)
    with pipeline(path, device=device, batch=most, trust=trust, on_note=on_note) as opened:
        timed = TimedPipeline(opened, [each.read_bytes() for each in files])
        setup = Setup(name, lambda: timed, file=Path(path).name, sha256=sha256(Path(path)))
        watch = Watch()
        before = watch.over(around_s, time.sleep)
        for batch in batches:
            timed.calls.clear()
            (found,) = time_setups([setup], [batch], timing, timed.feeds, on_progress, watch=watch)
            points += [make_point([found]), *_stages(found, timed.calls)]
        outside = sum_up(watch, before, watch.over(around_s, time.sleep))
    how = (
        f"each point: {timing.seconds:g} s in rounds after about {timing.warmup_s:g} s of warm-up, "
        f"in one process; {len(files)} files in turn, from their bytes to the JSON of the answers"
    )
    report = Report(
        title=f"{name}: a pipeline from end to end and by stage",
        created=now(),
        command=command,
        quick=seconds < FULL_S,
        machine=this_machine().to_dict(),
        provenance=provenance(),
        points=tuple(points),
        asked=(name,),
        outside=outside,
        invalid=invalid(outside, watch.bound),
        notes=(how,),
    )
    report = replace(report, verdict=verdict(report))
    write(report, folder)
    return report


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
