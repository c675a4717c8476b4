"""Time a pipeline from end to end and by stage, in this process."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.api.artefacts import Progress, no_progress
from deploykit.api.pipeline import pipeline
from deploykit.core.errors import BadInput
from deploykit.core.json_value import Record
from deploykit.core.paths import StrPath
from deploykit.core.statistics_basic import Interval

if TYPE_CHECKING:
    from deploykit.measure.latency import Latency
    from deploykit.pipelines.run import OpenPipeline

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageTime(Record):
    """One stage: its latency per call, and its share of the time of all calls."""

    latency: Latency
    share: float


@dataclass(frozen=True)
class PipelinePoint(Record):
    """Calls of `batch` requests, one after the other: latency of a call, requests per second."""

    batch: int
    latency: Latency
    per_s: Interval
    stages: Mapping[str, StageTime]


@dataclass(frozen=True)
class PipelineTimes(Record):
    """What `bench` measured of a pipeline in this process, one call at a time."""

    pipeline: str
    device: str
    files: int
    seconds: float
    points: tuple[PipelinePoint, ...]


def bench_pipeline(
    path: StrPath,
    data: StrPath,
    *,
    batches: Sequence[int] = (1,),
    warmup_s: float = 1.0,
    seconds: float = 10.0,
    device: str = "auto",
    trust: bool = False,
    on_progress: Progress = no_progress,
    on_note: Callable[[str], None] = log.warning,
) -> PipelineTimes:
    """Answer the files of `data` again and again, `batches` requests in a call, for `seconds`.

    From a file's bytes to the JSON of its answer. Raises as `predict_files` does.
    """
    from deploykit.pipelines.files import input_files

    if not batches or min(batches) < 1 or seconds <= 0:
        raise BadInput("`batches` and `seconds` must be above 0")
    files = input_files([data])
    given = [each.read_bytes() for each in files]
    points = []
    with pipeline(path, device=device, batch=max(batches), trust=trust, on_note=on_note) as opened:
        for number, batch in enumerate(batches):
            on_progress(f"batch {batch}", number / len(batches))
            points.append(_measure(opened, given, batch, warmup_s, seconds))
    return PipelineTimes(Path(path).name, opened.device, len(files), seconds, tuple(points))


def _measure(
    opened: OpenPipeline, files: Sequence[bytes], batch: int, warmup_s: float, seconds: float
) -> PipelinePoint:
    import numpy as np

    from deploykit.measure.latency import Latency
    from deploykit.measure.statistics import throughput
    from deploykit.measure.timing.closed_loop import no_garbage_collection

    endless = itertools.cycle(files)
    several = iter(lambda: list(itertools.islice(endless, batch)), None)
    with no_garbage_collection():
        for _ in opened.time(several, warmup_s):
            pass
        calls = list(opened.time(several, seconds))
        calls += [] if len(calls) > 1 else list(opened.time(several, 0))  # a rate needs two
    whole = np.array([call_s for call_s, _ in calls])
    stages = {name: np.array([each[name] for _, each in calls]) for name in calls[0][1]}
    blocks = np.array_split(whole, min(20, len(whole)))
    rate = throughput([batch * len(each) for each in blocks], [each.sum() for each in blocks])
    times = {n: StageTime(Latency.of(each), each.sum() / whole.sum()) for n, each in stages.items()}
    return PipelinePoint(batch, Latency.of(whole), rate, times)
