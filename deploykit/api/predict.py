"""Run every sample of a data set through an engine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploykit.api.artefacts import Progress, no_progress
from deploykit.api.open import open_proven
from deploykit.api.outputs import PREDICTIONS, claim
from deploykit.core.artefact import ArtefactLike
from deploykit.core.errors import BadInput
from deploykit.core.json_value import Record
from deploykit.core.paths import StrPath
from deploykit.core.statistics_basic import Interval


@dataclass(frozen=True)
class Predicted(Record):
    """What `predict` wrote; `accuracy` is None without labels, or where `note` says why."""

    path: Path
    samples: int
    seconds: float
    device: str
    accuracy: Interval | None
    note: str = ""

    def _repr_html_(self) -> str:
        from deploykit.measure.report import notebook

        return notebook.facts_html("Predictions", self.to_dict() | {"accuracy": self.accuracy})


def predict(
    engine: ArtefactLike,
    data: StrPath,
    out: StrPath,
    *,
    batch: int = 32,
    device: str = "auto",
    trust: bool = False,
    force: bool = False,
    on_progress: Progress = no_progress,
) -> Predicted:
    """Run every sample of an .npz or a folder through `engine` into an .npz of outputs by name.

    `trust`: see `open_proven`. `force`: replace a file that deploykit did not write.
    """
    import numpy as np

    from deploykit.measure.evaluate.accuracy import top1
    from deploykit.measure.statistics import proportion
    from deploykit.runtimes.data.samples import read_samples, write_npz

    if batch < 1:
        raise BadInput(f"`batch` must be 1 or more, got {batch}")
    data = Path(data)
    out = claim(out, PREDICTIONS, (engine, data), force=force)
    (proven,) = open_proven(engine, device, trust=trust)
    with proven as opened:
        samples = read_samples(data, opened.inputs)
        size = batch if opened.inputs[0].batched else 1
        parts: dict[str, list[Any]] = {spec.name: [] for spec in opened.outputs}
        started = time.perf_counter()
        for number, feeds in enumerate(samples.batches(size), 1):
            for name, values in opened(feeds).items():
                parts[name].append(values)
            done = min(number * size, len(samples))
            on_progress(f"{done}/{len(samples)} samples", done / len(samples))
        seconds = time.perf_counter() - started
        outputs = {name: np.concatenate(arrays) for name, arrays in parts.items()}
        write_npz(out, outputs, kind=PREDICTIONS)
        accuracy, note = None, ""
        if samples.labels is not None:
            try:
                scores = top1(outputs[opened.outputs[0].name], samples.labels, str(data))
                accuracy = proportion(round(scores.sum()), len(scores))
            except BadInput as exc:  # labels of another kind: targets, tokens, masks
                note = f"no accuracy: {exc.message}" + (f"; {exc.hint}" if exc.hint else "")
        return Predicted(out, len(samples), seconds, opened.device, accuracy, note)
