"""Precision "auto": cost and evaluate the candidates of a runtime for the search."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.api.evaluate import (
    Job,
    convert_graph,
    evaluate_engines,
    open_both,
)
from deploykit.api.feeds import axis_sizes
from deploykit.api.open_graph import open_graph
from deploykit.core.errors import BadInput
from deploykit.core.evidence import Evaluation, SearchRecord, SearchStep
from deploykit.core.precision import DYNAMIC, PAIRS, auto_levels
from deploykit.core.profile import load_profile, precisions_everywhere
from deploykit.core.runtime import RUNTIMES

if TYPE_CHECKING:
    from deploykit.api.artefacts import Progress
    from deploykit.onnx_graph.cost import NodeCost
    from deploykit.onnx_graph.graph import Graph
    from deploykit.onnx_graph.roofline import Ceilings
    from deploykit.quantization.budget import Budget
    from deploykit.quantization.search import Level, Outcome, Verdict

GENERIC_PROFILE = "l4"  # predicts the costs where no profile is named
COST_BATCH = 8
SMOOTHQUANT = "+smoothquant"  # after a precision's name
_SENSITIVITY_SAMPLES = 16
_RUNS = 7  # the median is the cost, where it is measured


@dataclass(frozen=True)
class _Candidate:
    """A graph in one precision, on disk: large models would not fit into memory several times."""

    graph: Graph
    cost_s: float
    notes: tuple[str, ...]

    @property
    def path(self) -> Path:
        return self.graph.path


def search_precision(
    job: Job, out: Path, name: str, on_progress: Progress
) -> tuple[Graph, Job, SearchRecord, Evaluation | None, list[str]]:
    """Write the cheapest graph that passes to `out`, the model itself where float32 stays.

    For ONNX Runtime a cost is measured on this machine's CPU, for TensorRT it is predicted from the
    peaks of the target. Returns that graph, the job with its calibration, what was tried, the
    evaluation where something passed, and notes for the user.
    """
    from deploykit.onnx_graph import storage
    from deploykit.onnx_graph.graph import Graph
    from deploykit.quantization import search
    from deploykit.quantization.budget import Budget

    budget = job.budget or Budget(time.monotonic(), job.request.budget_s)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".auto.") as folder:
        candidates = _Candidates(job, Path(folder), name, budget)
        on_progress(candidates.cost_note, 0.0)

        def report(step: SearchStep) -> None:
            count, result = len(step.float32_nodes), "passes" if step.passed else "fails"
            kept = f", {count} nodes kept in float32" if count else ""
            share = min((budget.clock() - budget.began) / budget.seconds, 1.0)
            on_progress(f"{step.precision}{kept} {result}: {step.why}", share)

        outcome = search.search(
            candidates.levels(),
            candidates.evaluate,
            float32_cost_s=candidates.cost_s(job.source),
            budget=budget,
            on_step=report,
        )
        notes = [outcome.why, *outcome.notes, candidates.cost_note]
        notes += [note for each in candidates.jobs.values() for note in each.notes]
        if outcome.best is None:
            return job.source.save(out), job, _record(outcome), None, notes
        best, kept = outcome.best.model, outcome.best.float32_nodes
        if kept:
            notes.append(f"kept in float32 by the search: {', '.join(kept)}")
        data = best.path.with_name(f"{best.path.name}.data")
        if data.exists():
            storage.point_to(best.path, f"{out.name}.data")
            data.replace(out.with_name(f"{out.name}.data"))
        best.path.replace(out)
        passed = candidates.passed[best.path]
        job = candidates.job_for(outcome.best.precision)
        return Graph.open(out), job, _record(outcome), passed, [*notes, *best.notes]


def _record(outcome: Outcome[Any]) -> SearchRecord:
    best = outcome.best
    return SearchRecord(
        passed=best is not None,
        why=outcome.why,
        precision=best.precision if best else "float32",
        float32_nodes=best.float32_nodes if best else (),
        cost_s=best.cost_s if best else None,
        drop=best.verdict.drop if best else None,
        stopped=outcome.stopped,
        notes=outcome.notes,
        steps=outcome.steps,
    )


class _Candidates:
    """Writes, costs and evaluates the candidates of one search."""

    def __init__(self, job: Job, folder: Path, name: str, budget: Budget) -> None:
        if job.calib is None:
            raise BadInput("precision auto needs calibration data: `calib`")
        self.job, self.folder, self.calib = job, folder, job.calib
        self.budget = budget
        self.measured = RUNTIMES[job.request.runtime].on_cpu
        self.target = job.request.target or load_profile(GENERIC_PROFILE)
        self.offered: Collection[str] = self.target.precisions
        self.inputs = job.source.inputs
        self.sizes = axis_sizes(self.calib, self.inputs, COST_BATCH)
        batch = f"batch {COST_BATCH}"
        self.cost_note = f"costs are predicted for {self.target.name}, {batch}"
        if self.measured:
            self.cost_note = f"costs are measured on this machine, {batch}"
        elif job.request.target is None:
            self.offered = precisions_everywhere(job.request.runtime)
            self.cost_note = (
                f"no `profile` was named: tried what every target runs ({', '.join(self.offered)})"
                f", and {self.cost_note}"
            )
        self.name = name  # of the resulting file, for tables and errors
        self.passed: dict[Path, Evaluation] = {}
        self.written = 0
        self.reference_outputs: dict[str, Any] = {}
        self.jobs: dict[tuple[str, bool], Job] = {}  # with the calibration of a precision

    def levels(self) -> list[Level[Any]]:
        """Precisions to try, fewest bits first."""
        from deploykit.quantization import dynamic, qdq

        computing = tuple(cost.name for cost in self._costs(self.job.source) if cost.flops)
        levels = []
        for each, other in auto_levels(self.job.request.runtime, self.offered):
            name = each.name if other == "fp32" else f"{each.name}+{other}"
            nodes = computing
            if each.writer == PAIRS:
                nodes = qdq.quantizable(self.job.source, self.job.request.runtime, each.name)
            elif each.writer == DYNAMIC:
                nodes = dynamic.quantizable(self.job.source)
                if not nodes:
                    continue
            levels.append(self._level(name, each.bits, nodes))
            if each.writer == PAIRS and not self.job.request.smoothquant and self._has_outliers():
                levels.append(self._level(name + SMOOTHQUANT, each.bits, nodes))
        return levels

    def job_for(self, precision: str) -> Job:
        """The job with the scales of `precision`: its calibrator is chosen once."""
        from deploykit.api.calibration import calibrate_for

        to, smooth = precision.partition("+")[0], precision.endswith(SMOOTHQUANT)
        if (to, smooth) not in self.jobs:
            self.jobs[to, smooth] = calibrate_for(self.job, to, self.folder, smoothquant=smooth)
        return self.jobs[to, smooth]

    def _has_outliers(self) -> bool:
        from deploykit.quantization.smoothquant import smooth

        calibration = self.job.calibration
        return calibration is not None and bool(
            smooth(self.job.source, calibration.channel_peaks)[1]
        )

    def make(self, precision: str, keep_float32: Collection[str]) -> _Candidate:
        """The model in `precision` but for the nodes in `keep_float32`, on disk, with its cost."""
        graph, notes = self._convert(precision, keep_float32)
        self.written += 1
        graph = graph.save(self.folder / f"{self.written}.onnx")
        return _Candidate(graph, self.cost_s(graph), tuple(notes))

    def _convert(self, precision: str, keep_float32: Collection[str]) -> tuple[Graph, list[str]]:
        to, _, other_nodes = precision.removesuffix(SMOOTHQUANT).partition("+")
        job = self.job_for(precision)
        return convert_graph(job, to, other_nodes or "fp32", keep_float32)

    def cost_s(self, graph: Graph) -> float:
        """Seconds of one call at COST_BATCH: measured, or the sum of its nodes' rooflines."""
        from deploykit.onnx_graph import roofline

        if not self.measured:
            return roofline.predicted_s(self._costs(graph), self._ceilings())
        feeds = self._feeds(COST_BATCH)
        with self._open(graph) as engine:
            engine(feeds)
            times_s, step = list[float](), self.budget.steps()
            for number in range(_RUNS):
                step(_RUNS - number)
                began = time.perf_counter()
                engine(feeds)
                times_s.append(time.perf_counter() - began)
        return statistics.median(times_s)

    def evaluate(self, candidate: _Candidate) -> Verdict:
        from deploykit.quantization import search

        with open_both(self.job, candidate.graph) as (reference, engine):
            step = self.budget.steps()
            found = evaluate_engines(self.job, reference, engine, self.name, step)
        if found.passed:
            self.passed[candidate.path] = found
        else:
            candidate.path.unlink()
            candidate.path.with_name(f"{candidate.path.name}.data").unlink(missing_ok=True)
        if found.drop is not None:
            figure = found.drop.drop.high
        elif found.agreement is not None:
            figure = 1 - found.agreement.low
        else:
            figure = math.inf if found.sqnr_db is None else 10 ** (-found.sqnr_db / 10)
        return search.Verdict(found.passed, figure, found.describe())

    def _level(self, precision: str, bits: int, nodes: tuple[str, ...]) -> Level[Any]:
        from deploykit.quantization import search

        every = frozenset(nodes)
        savings: dict[str, float] = {}

        def sensitivity(name: str) -> float:
            model, _ = self._convert(precision, every - {name})
            wanted, got = self._reference(), self._outputs(model)
            return search.noise_share(wanted, got)

        def saving_s(name: str) -> float:
            if not savings:
                savings.update(self._savings(precision))
            return savings.get(name, 0.0)

        return search.Level(
            precision,
            bits,
            nodes,
            make=lambda keep_float32: self.make(precision, keep_float32),
            cost_s=lambda candidate: candidate.cost_s,
            sensitivity=sensitivity,
            saving_s=saving_s,
        )

    def _savings(self, precision: str) -> Mapping[str, float]:
        """Predicted seconds that each node saves; where costs are measured, its operations."""
        from deploykit.onnx_graph import roofline

        float32 = self._costs(self.job.source)
        if self.measured:
            return {each.name: float(each.flops or 0) for each in float32}
        converted = self._costs(self._convert(precision, ())[0])
        return roofline.savings_s(float32, converted, self._ceilings())

    def _costs(self, graph: Graph) -> tuple[NodeCost, ...]:
        from deploykit.onnx_graph import cost

        return cost.node_costs(graph, self.sizes)

    def _ceilings(self) -> Ceilings:
        from deploykit.onnx_graph.roofline import Ceilings

        target = self.target
        return Ceilings(target.peak_ops_per_s, target.bandwidth_bytes_per_s or 0.0)

    def _feeds(self, samples: int) -> dict[str, Any]:
        """The first calibration samples; a graph with a fixed batch gets that many."""
        calib = self.calib
        size, _ = calib.batching(samples, self.inputs)
        return next(calib.batches(size))

    def _reference(self) -> list[Any]:
        if not self.reference_outputs:
            from deploykit.runtimes.engine import load

            with load(self.job.model, "cpu") as engine:
                self.reference_outputs = engine(self._feeds(_SENSITIVITY_SAMPLES))
        return list(self.reference_outputs.values())

    def _outputs(self, graph: Graph) -> list[Any]:
        with self._open(graph) as engine:
            return list(engine(self._feeds(_SENSITIVITY_SAMPLES)).values())

    def _open(self, graph: Graph) -> Any:
        return open_graph(
            self.job.request.runtime,
            graph.save(self.folder / "part.onnx", temporary=True),
            self.folder,
        )
