"""Run every sample of a data set through an engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

    from deploykit.runtimes.data.samples import Samples
    from deploykit.runtimes.engine import Engine


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

        facts = self.to_dict() | {"seconds": f"{self.seconds:.3g}", "accuracy": ""}
        if (score := self.accuracy) is not None:
            shown = f"{score.value:.2%}, {score.low:.2%} to {score.high:.2%}"
            facts["accuracy"] = f"{shown} (95 %)"
        return notebook.facts_html("Predictions", facts)


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
    on_progress: Progress = no_progress,
) -> Predicted:
    """Run every sample of an .npz or a folder through `engine` into an .npz of outputs by name.

    `on`: "local", or "ray" to spread the batches over a Ray cluster, that of $RAY_ADDRESS or one on
    this machine; the outputs are the same. `trust`: see `open_proven`. `force`: replace a file that
    deploykit did not write.
    """
    import numpy as np

    from deploykit.runtimes.data.samples import read_samples, write_npz

    if batch < 1:
        raise BadInput(f"`batch` must be 1 or more, got {batch}")
    if on not in ("local", "ray"):
        raise BadInput(f"`on` {quote(on)}: is neither local nor ray")
    data = Path(data)
    out = claim(out, PREDICTIONS, (engine, data), force=force)
    artefact = Artefact.open(engine)
    with ExitStack() as stack:
        (proven,) = open_proven(artefact, device, trust=trust)
        opened = stack.enter_context(proven)
        samples = read_samples(data, opened.inputs)
        size = batch if opened.inputs[0].batched else 1
        where = opened.device
        if on == "ray":
            answers, where = _on_ray(artefact, opened, samples, size, trust), f"ray, {where}"
        else:
            answers = map(opened, samples.batches(size))
        parts: dict[str, list[Any]] = {spec.name: [] for spec in opened.outputs}
        started = time.perf_counter()
        for number, answer in enumerate(answers, 1):
            for name, values in answer.items():
                parts[name].append(values)
            done = min(number * size, len(samples))
            on_progress(f"{done}/{len(samples)} samples", done / len(samples))
        seconds = time.perf_counter() - started
        outputs = {name: np.concatenate(arrays) for name, arrays in parts.items()}
        write_npz(out, outputs, kind=PREDICTIONS)
        accuracy, note = _accuracy(samples, next(iter(outputs.values()), None))
        return Predicted(out, len(samples), seconds, where, accuracy, note)


def _accuracy(samples: Samples, answers: Any) -> tuple[Interval | None, str]:
    """Top-1 accuracy of the first output; None where there is none, and a note."""
    from deploykit.measure.evaluate.accuracy import top1
    from deploykit.measure.statistics import proportion

    if samples.labels is None:
        names = ", ".join(map(quote, samples.unused))
        why = f"no accuracy: run without {names}; labels are an array named 'labels'"
        return None, why if names else ""
    try:
        scores = top1(answers, samples.labels, samples.where)
        return proportion(round(scores.sum()), len(scores)), ""
    except BadInput as exc:  # labels of another kind: targets, tokens, masks
        return None, f"no accuracy: {exc.message}" + (f"; {exc.hint}" if exc.hint else "")


def _on_ray(
    artefact: Artefact, opened: Engine, samples: Samples, size: int, trust: bool
) -> Iterator[Mapping[str, np.ndarray]]:
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
        samples.batches(size),
        gpu=kind == "cuda",
    )


def _open_on_node(path: Path, device: str, trust: bool) -> Engine:
    """The engine of one actor, which has one CPU core or one GPU."""
    (engine,) = open_proven(path, device, threads=1 if device == "cpu" else None, trust=trust)
    return engine
