"""Run every sample of a data set through an engine."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.api.arguments import checked
from deploykit.api.artefacts import Progress, no_progress
from deploykit.api.open import open_proven
from deploykit.api.outputs import PREDICTIONS, claim
from deploykit.core.artefact import Artefact, ArtefactLike
from deploykit.core.errors import BadInput, quote
from deploykit.core.files import manifest_path
from deploykit.core.json_value import Record
from deploykit.core.paths import StrPath
from deploykit.core.statistics_basic import Interval

if TYPE_CHECKING:
    import numpy as np

    from deploykit.runtimes.data.partial import PartialOutputs
    from deploykit.runtimes.data.sources import DataSource
    from deploykit.runtimes.data.stream import SampleStream
    from deploykit.runtimes.engine import Arrays, Engine

log = logging.getLogger(__name__)

_BLOCK = 4096  # rows of outputs at a time


@dataclass(frozen=True)
class Predicted(Record):
    """What `predict` wrote; `accuracy` is None without labels, or where `note` says why.

    `resumed`: how many of the samples an earlier run had done that was stopped; `seconds` were
    spent on the others.
    """

    path: Path
    samples: int
    seconds: float
    device: str
    accuracy: Interval | None
    note: str = ""
    resumed: int = 0

    def _repr_html_(self) -> str:
        from deploykit.measure.report import notebook

        facts = self.to_dict() | {"seconds": f"{self.seconds:.3g}", "accuracy": ""}
        if (score := self.accuracy) is not None:
            shown = f"{score.value:.2%}, {score.low:.2%} to {score.high:.2%}"
            facts["accuracy"] = f"{shown} (95 %)"
        return notebook.facts_html("Predictions", facts)


@checked
def predict(
    engine: ArtefactLike,
    data: StrPath,
    out: StrPath,
    *,
    batch: int = 32,
    device: str = "auto",
    on: str = "local",
    trust: bool = False,
    force: bool = False,
    restart: bool = False,
    on_progress: Progress = no_progress,
    on_note: Callable[[str], None] = log.warning,
) -> Predicted:
    """Run every sample of an .npz or a folder through `engine` into an .npz of outputs by name.

    Samples are read as they are needed, and outputs kept in `OUT.parts` until all are there: after
    a run that was stopped, the same call goes on where that was. It begins anew, with a note, if
    engine, runtime, device or batch are others or the samples so far have changed, and with
    `restart`. `on`: "local", or "ray" to spread the batches over a Ray cluster, that of
    $RAY_ADDRESS or one on this machine; the outputs are the same. `trust`: see `open_proven`.
    `force`: replace a file that deploykit did not write.
    """
    from deploykit.runtimes.data.partial import PartialOutputs
    from deploykit.runtimes.data.samples import write_npz
    from deploykit.runtimes.data.sources import find_source

    if batch < 1:
        raise BadInput(f"`batch` must be 1 or more, got {batch}")
    if on not in ("local", "ray"):
        raise BadInput(f"`on` {quote(on)}: is neither local nor ray")
    out = claim(out, PREDICTIONS, (engine, data), force=force)
    artefact = Artefact.open(engine)
    with ExitStack() as stack:
        (proven,) = open_proven(artefact, device, trust=trust)
        opened = stack.enter_context(proven)
        source = find_source(Path(data), opened.inputs, task=artefact.task)
        size = batch if opened.inputs[0].batched else 1
        made_by = {"engine": artefact.sha256, "runtime": opened.runtime, "device": opened.device}
        parts = PartialOutputs(out, {**made_by, "batch": str(size)}, restart=restart)
        stack.enter_context(parts)
        stream = stack.enter_context(_open_stream(source, parts, on_progress))
        resumed = parts.done.samples
        if parts.dropped:
            on_note(f"{parts.folder}: begun anew: {parts.dropped}")
        elif resumed:
            on_note(f"{out}: goes on after the {resumed} samples that an earlier run has done")
        run = (
            partial(_on_ray, artefact, opened, trust=trust) if on == "ray" else partial(map, opened)
        )
        started = time.perf_counter()
        _append_all(parts, stream, size, run, on_progress)
        seconds = time.perf_counter() - started
        outputs = parts.arrays()
        write_npz(out, outputs, kind=PREDICTIONS)
        parts.finish()
        _note_nan(outputs, on_note)
        accuracy, note = _accuracy(source, next(iter(outputs.values()), None), stream.read_labels())
        where = f"ray, {opened.device}" if on == "ray" else opened.device
        return Predicted(out, source.count, seconds, where, accuracy, note, resumed)


def _open_stream(source: DataSource, parts: PartialOutputs, on_progress: Progress) -> SampleStream:
    """The samples after those of `parts`, or all, where these have changed."""
    from deploykit.runtimes.data.stream import SampleStream

    stream = SampleStream(source)
    if not parts.done.samples:
        return stream
    on_progress("comparing the samples so far", 0.0)
    if stream.skip(parts.done.samples) == parts.done.digest:
        return stream
    stream.close()
    parts.drop("the samples so far have changed")
    return SampleStream(source)


def _append_all(
    parts: PartialOutputs,
    stream: SampleStream,
    size: int,
    run: Callable[[Iterator[Arrays]], Iterator[Arrays]],
    on_progress: Progress,
) -> None:
    """Run all that is left, in order; the next batches are read meanwhile."""
    from deploykit.runtimes.data.stream import Batch, read_ahead

    waiting: deque[Batch] = deque()  # those that are running, without their arrays

    def feeds() -> Iterator[Arrays]:
        for each in read_ahead(stream.batches(size)):
            waiting.append(replace(each, feeds={}))
            yield each.feeds

    count, resumed, started = stream.source.count, parts.done.samples, time.perf_counter()
    for answer in run(feeds()) if resumed < count else ():
        batch = waiting.popleft()
        parts.append(answer, batch.samples, batch.digest)
        done = parts.done.samples
        rate = (done - resumed) / max(time.perf_counter() - started, 1e-9)
        left = str(timedelta(seconds=round((count - done) / rate)))
        on_progress(f"{done}/{count} samples, {rate:,.0f}/s, {left} left", done / count)


def _note_nan(outputs: Mapping[str, np.ndarray], on_note: Callable[[str], None]) -> None:
    """Pass on a note for each output that is NaN somewhere; it may be larger than the memory."""
    import numpy as np

    for name, values in outputs.items():
        rows, others = [], tuple(range(1, values.ndim))
        for at in range(0, len(values) if values.dtype.kind in "fc" else 0, _BLOCK):
            block = values[at : at + _BLOCK]
            rows += (at + np.flatnonzero(np.isnan(block).any(others))).tolist()
        if rows:
            what = f"{len(rows)} of {len(values)} rows, first in {rows[0]}"
            on_note(f"output '{name}' is NaN in {what}")


def _accuracy(
    source: DataSource, answers: np.ndarray | None, labels: np.ndarray | None
) -> tuple[Interval | None, str]:
    """Top-1 accuracy of the first output; None where there is none, and a note."""
    from deploykit.measure.evaluate.accuracy import top1
    from deploykit.measure.statistics import proportion

    if labels is None or answers is None:
        names = ", ".join(map(quote, source.unused))
        why = f"no accuracy: run without {names}; labels are an array named 'labels'"
        return None, why if names else ""
    try:
        scores = top1(answers, labels, source.where)
        return proportion(round(scores.sum()), len(scores)), ""
    except BadInput as exc:  # labels of another kind: targets, tokens, masks
        return None, f"no accuracy: {exc.message}" + (f"; {exc.hint}" if exc.hint else "")


def _on_ray(
    artefact: Artefact, opened: Engine, batches: Iterator[Arrays], *, trust: bool
) -> Iterator[Arrays]:
    """The outputs of each batch; `opened` has shown that the file is the one its manifest names."""
    from deploykit.cluster.data import Shipped, predict_batches

    path, evidence = artefact.path, artefact.manifest and artefact.manifest.evidence
    others = [manifest_path(path)] if evidence else []
    if evidence:
        others += [path.with_name(e.file) for e in (evidence.weights, evidence.golden) if e]
    kind = opened.device.partition(":")[0]
    return predict_batches(
        Shipped.read(path, others),
        partial(_open_on_node, device=kind, trust=trust),
        batches,
        gpu=kind == "cuda",
    )


def _open_on_node(path: Path, device: str, trust: bool) -> Engine:
    """The engine of one actor, which has one CPU core or one GPU."""
    (engine,) = open_proven(path, device, threads=1 if device == "cpu" else None, trust=trust)
    return engine
