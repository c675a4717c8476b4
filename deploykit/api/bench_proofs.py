"""Prove what a benchmark times: parity with the baseline, and accuracy where there are labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from deploykit.api.bench_columns import BASELINE, Entry
from deploykit.api.feeds import comparison_feeds
from deploykit.core.errors import DeploykitError

if TYPE_CHECKING:
    import numpy as np

    from deploykit.measure.evaluate.parity import Parity
    from deploykit.measure.report.report import Accuracy, Gate, NotMeasured
    from deploykit.runtimes.data.samples import Samples
    from deploykit.runtimes.engine import Engine


class Proofs:
    """Of entries against `base`, the open baseline. `gates`: by the entry's key."""

    def __init__(
        self,
        base: Engine,
        reference: Entry,
        samples: Samples | None,
        device: str,
        note: Callable[[str], None],
    ) -> None:
        from deploykit.measure.evaluate.accuracy import TOP1
        from deploykit.measure.report.report import Accuracy
        from deploykit.measure.statistics import paired_drop

        self._base, self._reference, self._samples = base, reference, samples
        self._device, self._note = device, note
        self.parity: list[Parity] = []
        self.accuracy: list[Accuracy] = []
        self.gates: dict[str, Gate] = {}
        self._scores: np.ndarray | None = None
        if samples is not None and samples.labels is not None:
            feeds = comparison_feeds(base, base, samples, reference.artefact.path)[0]
            self._scores = self._top1(base, feeds)
        if self._scores is not None:
            score = paired_drop(self._scores, self._scores, TOP1)
            row = Accuracy(reference.precision, TOP1, score.n, score.reference, None, BASELINE)
            self.accuracy.append(row)

    def prove(self, item: Entry, gpu: str = "") -> Gate:
        """Parity, accuracy and the gate of `item`; those of a wrong rival are not kept.

        `gpu`: run it there, in place of the CPU.
        """
        from deploykit.api.verify import outputs_gate
        from deploykit.measure.evaluate.accuracy import TOP1
        from deploykit.measure.evaluate.parity import compare_engines
        from deploykit.measure.report.report import Accuracy
        from deploykit.measure.statistics import paired_drop

        samples, reference = self._samples, self._reference
        name = item.artefact.name
        if item.rival:
            name = f"{name} in {item.rival}"
        if gpu:
            name = f"{name} on {gpu}"
        device = gpu or ("cpu" if item.artefact.runtime.on_cpu else self._device)
        with item.open(device) as engine:
            feeds, fewer = comparison_feeds(self._base, engine, samples, reference.artefact.path)
            for text in (*(f"parity: {each}" for each in fewer), *engine.notes):
                self._note(text)
            names, random = (reference.artefact.name, name), samples is None
            parity = compare_engines(self._base, engine, feeds, names=names, random=random)
            drop, found = None, self._top1(engine, feeds)
        if found is not None and self._scores is not None:
            drop = paired_drop(self._scores, found, TOP1)
        gate = outputs_gate(item.artefact, parity, drop, item.precision)
        gate = replace(gate, name=f"outputs of {name}")
        if item.rival and not gate.passed:
            return gate
        if drop is not None and not gpu:
            row = Accuracy(item.precision, TOP1, drop.n, drop.candidate, drop.drop, item.label)
            self.accuracy.append(row)
        self.parity.append(parity)
        if not item.rival:
            self.gates[f"{item.key} {gpu}" if gpu else item.key] = gate
        return gate

    def admit(self, item: Entry, gaps: list[NotMeasured], gpu: str = "") -> bool:
        """Whether its outputs are right; else `gaps` says why it is not timed."""
        from deploykit.measure.report.report import NotMeasured

        try:
            gate = self.prove(item, gpu)
        except DeploykitError as exc:
            why = exc.message
        else:
            why = "" if gate.passed else gate.detail
        if why:
            what = f"{item.artefact.name} on the GPU" if gpu else f"{item.rival} on the CPU"
            gaps.append(NotMeasured(what, why))
        return not why

    def _top1(self, engine: Engine, feeds: Sequence[Mapping[str, np.ndarray]]) -> np.ndarray | None:
        from deploykit.measure.evaluate.accuracy import top1_scores

        if self._samples is None or self._samples.labels is None:
            return None
        return top1_scores(engine, self._samples, len(next(iter(feeds[0].values()))))
