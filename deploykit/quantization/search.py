"""Precision "auto": search for the cheapest precision that keeps the accuracy.

1. Try each level as it is, until one passes: from here on there is something to keep.
2. A wider one is kept where the passing one is not 5 % cheaper: "FP16 is not worth it here".
3. The levels that failed are repaired, the widest first: nodes are kept in float32 in order of
   sensitivity per second saved, as long as the model stays 5 % cheaper than the best so far. The
   fewest that pass are found by halves, in at most log2(nodes) evaluations. It is exact if one more
   float32 node never makes a passing model fail.

Float32 always passes: `best` is None where only that remains.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from timeit import timeit
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.evidence import Evaluation, Evidence, SearchRecord, SearchStep
from deploykit.core.precision import DYNAMIC, PAIRS, auto_levels
from deploykit.core.profile import load_profile, precisions_everywhere
from deploykit.core.runtime import RUNTIMES
from deploykit.engines.engine import load
from deploykit.evaluation.artefacts import Progress
from deploykit.evaluation.feeds import axis_sizes
from deploykit.evaluation.statistics import ratio
from deploykit.graph import cost
from deploykit.graph.cost import Ceilings, NodeCost
from deploykit.graph.graph import Graph
from deploykit.quantization import qdq
from deploykit.quantization.calibrate import noise_share
from deploykit.quantization.half_precision import open_graph
from deploykit.quantization.job import Job, evaluate_engines, open_both
from deploykit.quantization.scales import Scales
from deploykit.quantization.weights import dynamic_nodes

LEAST_GAIN = 0.05  # predictions and measurements are no finer, and a wider type is safer
OUT_OF_TIME, INTERRUPTED = "time budget", "interrupted"


@dataclass(frozen=True)
class Level:
    """A precision to try.

    `bits`: of its widest common type; only a level of more bits can make one not worth it. `nodes`:
    names of those that can be kept in float32, in graph order.
    """

    precision: str
    bits: int
    nodes: tuple[str, ...]


class Verdict(NamedTuple):
    """The result of an evaluation: `drop` is the figure it went by, `why` the same as text."""

    passed: bool
    drop: float
    why: str


def rank(
    nodes: Sequence[str], sensitivity: Mapping[str, float], saving_s: Callable[[str], float]
) -> list[str]:
    """Sort nodes by sensitivity per second saved, most first; those never measured come last.

    First come nodes whose sensitivity is infinite or NaN, then those that save nothing.
    """

    def price(name: str) -> float:
        if name not in sensitivity:
            return -1.0
        finite = math.isfinite(sensitivity[name])
        return sensitivity[name] / max(saving_s(name), 1e-30) if finite else math.inf

    return sorted(nodes, key=price, reverse=True)


class _OutOfTimeError(Exception):
    """One more candidate would end after the budget."""


@dataclass
class Search:
    """A search for the cheapest model that passes; see the head of this file for the order of work.

    Args:
        candidates: makes and evaluates the models.
        levels: narrowest first, float32 not among them.
        float32_cost_s: seconds per call of the model as it is.
        seconds: after the first candidate none begins that would end after them, if it took as long
            as the longest before, and at most half of what is left goes into ranking.
        on_step: called after each evaluation.

    After `run`, `best` is the step of the cheapest that passed, `model` that model; None keeps
    float32. `stopped`: "" if the search came to its end, else "time budget" or "interrupted".
    """

    candidates: _Candidates
    levels: Sequence[Level]
    float32_cost_s: float = math.inf
    seconds: float = 600.0
    clock: Callable[[], float] = time.monotonic
    on_step: Callable[[SearchStep], object] = lambda _: None
    longest_s: float = 0.0
    best: SearchStep | None = None
    model: Any = None
    steps: list[SearchStep] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stopped: str = ""

    def __post_init__(self) -> None:
        self.began = self.candidate_began = self.clock()
        self.end = self.began + self.seconds

    @property
    def record(self) -> SearchRecord:
        """The record for the manifest, with the result in one sentence."""
        best = self.best
        if best is not None:
            count = len(best.float32_nodes)
            nodes = f", {count} node(s) kept in float32" if count else ""
            why = f"{best.precision.upper()}{nodes}: {best.why}"
        else:
            passed = any(step.passed for step in self.steps)
            why = "what passed is not worth it" if passed else "no narrower precision passed"
            why = f"float32 stays: {why}"
        reason = {OUT_OF_TIME: " (the time budget ran out)", INTERRUPTED: " (interrupted)"}
        return SearchRecord(
            passed=best is not None,
            why=why + reason.get(self.stopped, ""),
            precision=best.precision if best else "float32",
            float32_nodes=best.float32_nodes if best else (),
            cost_s=best.cost_s if best else None,
            drop=best.drop if best else None,
            stopped=self.stopped,
            notes=tuple(self.notes),
            steps=tuple(self.steps),
        )

    def run(self) -> None:
        """Search. Ctrl-C (KeyboardInterrupt out of any callback) ends it and keeps the best."""
        try:
            self._run()
        except _OutOfTimeError:
            self.stopped = OUT_OF_TIME
            tried = {step.precision for step in self.steps}
            missing = [each.precision for each in self.levels if each.precision not in tried]
            if missing:
                self.notes.append(f"not tried, for lack of time: {', '.join(missing)}")
        except KeyboardInterrupt:
            self.stopped = INTERRUPTED

    def _run(self) -> None:
        failed: list[tuple[Level, float]] = []
        for place, level in enumerate(self.levels):
            cost_s, _ = self._try(level)
            if self.best is not None:
                self._prefer_wider(level.bits, self.levels[place + 1 :])
                break
            failed.append((level, cost_s))
        for level, cost_s in reversed(failed):  # each has to beat the wider one before it
            if level.nodes and cost_s < math.inf:
                self._repair(level, cost_s)

    def _prefer_wider(self, bits: int, levels: Sequence[Level]) -> None:
        """Replace the passing level, of `bits`, by a wider one that passes at about that cost."""
        for level in levels:
            if level.bits > bits and self.best is not None:
                name, narrow_s = self.best.precision, self.best.cost_s
                cost_s, passed = self._try(level, worth=partial(_not_worth, narrow_s, name))
                if passed:
                    self._note(name, _not_worth(narrow_s, level.precision, cost_s))
                    bits = level.bits
        if self.best is not None:
            why = _not_worth(self.best.cost_s, "float32", self.float32_cost_s)
            if why:
                self._note(self.best.precision, why)
                self.best = None

    def _note(self, precision: str, why: str) -> None:
        self.notes.append(f"{precision.upper()} is not worth it here: {why}")

    def _repair(self, level: Level, plain_s: float) -> None:
        """Keep the fewest nodes in float32 with which `level` passes, if it is still worth it."""
        rival, rival_s = "float32", self.float32_cost_s
        if self.best is not None:
            rival, rival_s = self.best.precision, self.best.cost_s
        if why := _not_worth(plain_s, rival, rival_s):  # and float32 nodes only add to its cost
            self._note(level.precision, why)
            return
        self._check_time()
        order = self._order(level)
        failed, upper, dear, found = 0, len(order), "", False
        while upper - failed > 1:
            count = (failed + upper) // 2
            cost_s, passed = self._try(
                level, order[:count], lambda cost_s: not _not_worth(cost_s, rival, rival_s)
            )
            if cost_s == math.inf:
                return
            found |= passed
            why = _not_worth(cost_s, rival, rival_s)
            if passed or why:
                upper, dear = count, why
            else:
                failed = count
        if not found:
            end = f"; with {upper} it is not worth it: {dear}" if dear else ""
            tried = f"{failed} of {len(order)} node(s) kept in float32"
            self.notes.append(f"{level.precision.upper()} fails with {tried}{end}")

    def _order(self, level: Level) -> list[str]:
        """Return the nodes, worst first; those that half of the time left cannot rank are last."""
        until = min((self.clock() + self.end) / 2, self.end - self.longest_s)
        sensitivity: dict[str, float] = {}
        for name in level.nodes:
            if self.clock() >= until:
                missing = len(level.nodes) - len(sensitivity)
                self.notes.append(f"{level.precision.upper()}: no time to rank {missing} node(s)")
                break
            sensitivity[name] = self.candidates.sensitivity(level, name)
        return rank(level.nodes, sensitivity, partial(self.candidates.saving_s, level))

    def _try(
        self,
        level: Level,
        kept: Sequence[str] = (),
        worth: Callable[[float], object] = lambda _: True,
    ) -> tuple[float, bool]:
        """Make a candidate, and evaluate it if its cost is `worth` that.

        Return its cost, infinite if it cannot be made, and whether it passed. A candidate that
        passes is the best at once: Ctrl-C may come at any time.
        """
        self._check_time()
        model, cost_s = None, math.inf
        try:
            model = self.candidates.make(level, frozenset(kept))
        except (BadInput, Unsupported) as exc:
            verdict = Verdict(False, math.inf, exc.message)
        else:
            cost_s = self.candidates.cost_s(model)
            if not worth(cost_s):
                return cost_s, False
            verdict = self.candidates.evaluate(model)
        now = self.clock()
        self.longest_s = max(self.longest_s, now - self.candidate_began)
        step = SearchStep(level.precision, tuple(kept), *verdict, cost_s, now - self.began)
        self.steps.append(step)
        if verdict.passed:
            self.model, self.best = model, step
        self.on_step(step)
        return cost_s, verdict.passed

    def _check_time(self) -> None:
        self.candidate_began = self.clock()
        if self.steps and self.candidate_began + self.longest_s > self.end:
            raise _OutOfTimeError


class MeasuredCost(float):
    """Seconds of a call, with their ratio to those of float32 in each round of both."""

    rounds: Sequence[float] = ()


def _not_worth(narrow_s: float, wider: str, wider_s: float) -> str:
    """Give the figures that speak against `narrow_s`; "" if it gains LEAST_GAIN, beyond chance."""
    saves, chance = narrow_s <= (1 - LEAST_GAIN) * wider_s, False
    if isinstance(narrow_s, MeasuredCost) and isinstance(wider_s, MeasuredCost):
        times = ratio(wider_s.rounds, narrow_s.rounds)
        saves, chance = times.value * (1 - LEAST_GAIN) >= 1, times.low <= 1
    if saves and not chance:
        return ""
    figures = f"{narrow_s * 1e3:.3g} ms against {wider_s * 1e3:.3g} ms in {wider.upper()}"
    if saves:
        return f"{figures}, which is within the spread of the measurements"
    return f"{figures}; {LEAST_GAIN:.0%} less is asked for"


GENERIC_PROFILE = "l4"  # predicts the costs where no profile is named
COST_BATCH = 8
_SENSITIVITY_SAMPLES = 16
_ROUNDS = 9  # of a candidate and float32 in turn
_FLOAT32_ROUNDS = 3  # of float32 alone, for its figure: each candidate is timed next to it


# on disk, as large models would not fit into memory several times, with notes
_Candidate: TypeAlias = tuple[Graph, list[str]]


def search_precision(
    job: Job, out: Path, name: str, on_progress: Progress
) -> tuple[Graph, Evidence]:
    """Write the cheapest graph that passes to `out`, the model itself where float32 stays.

    For ONNX Runtime a cost is measured on this machine's CPU, for TensorRT it is predicted from the
    peaks of the target. `name`: what tables and errors call the file.
    """
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".auto.") as folder:
        candidates = _Candidates(job, Path(folder), name)
        on_progress(candidates.cost_note, 0.0)
        outcome = Search(candidates, candidates.levels(), candidates.cost_s((job.source, [])))

        def report(step: SearchStep) -> None:
            count, result = len(step.float32_nodes), "passes" if step.passed else "fails"
            kept = f", {count} node(s) kept in float32" if count else ""
            share = min(step.elapsed_s / outcome.seconds, 1.0)
            on_progress(f"{step.precision}{kept} {result}: {step.why}", share)

        outcome.on_step = report
        outcome.run()
        record = outcome.record
        notes = [record.why, *record.notes, candidates.cost_note]
        notes += [note for scales in candidates.scales.values() for note in scales.notes]
        if outcome.best is None:
            return job.source.save(out), job.evidence(job.scales, notes, search=record)
        if record.float32_nodes:
            notes.append(f"kept in float32 by the search: {', '.join(record.float32_nodes)}")
        best, best_notes = outcome.model
        notes += best_notes
        scales, passed = candidates.scales_for(record.precision), candidates.passed[best.path]
        return best.save(out), job.evidence(scales, notes, passed, record)


class _Candidates:
    """Writes, costs and evaluates the candidates of one search."""

    def __init__(self, job: Job, folder: Path, name: str) -> None:
        if job.calib is None:
            raise BadInput("precision auto needs calibration data: `calib`")
        self.job, self.folder, self.calib = job, folder, job.calib
        self.runtime = job.request.runtime
        self.measured = RUNTIMES[self.runtime].on_cpu
        self.target = job.request.target or load_profile(GENERIC_PROFILE)
        self.offered: Collection[str] = self.target.precisions
        self.sizes = axis_sizes(self.calib, job.source.inputs, COST_BATCH)
        batch = f"batch {COST_BATCH}"
        self.cost_note = f"costs are predicted for {self.target.name}, {batch}"
        if self.measured:
            self.cost_note = f"costs are measured on this machine, {batch}"
        elif job.request.target is None:
            self.offered = precisions_everywhere(self.runtime)
            self.cost_note = (
                f"no `profile` was named: tried what every target runs ({', '.join(self.offered)})"
                f", and {self.cost_note}"
            )
        self.name = name
        self.passed: dict[Path, Evaluation] = {}
        self.written = 0
        self.scales: dict[str, Scales] = {}  # by precision: its calibrator is chosen once
        self.savings: dict[str, Mapping[str, float]] = {}
        self.reference: list[np.ndarray] = []  # outputs for the samples of `_outputs`

    @property
    def ceilings(self) -> Ceilings:
        """Return the target's ceilings; BadInput for a CPU without figures, which is measured."""
        return Ceilings(self.target.peak_ops_per_s, self.target.bandwidth_bytes_per_s or 0.0)

    def levels(self) -> list[Level]:
        """Precisions to try, fewest bits first."""
        source = self.job.source
        computing = tuple(cost.name for cost in self._costs(source) if cost.flops)
        levels = []
        for precision, other in auto_levels(self.runtime, self.offered):
            name = precision.name if other == "fp32" else f"{precision.name}+{other}"
            nodes = computing
            if precision.writer == PAIRS:
                nodes = qdq.quantizable(source, self.runtime, precision.name)
            elif precision.writer == DYNAMIC:
                nodes = dynamic_nodes(source)
            if nodes or precision.writer != DYNAMIC:
                levels.append(Level(name, precision.bits, nodes))
        return levels

    def make(self, level: Level, keep_float32: frozenset[str]) -> _Candidate:
        """Write the model in a precision, except `keep_float32`, to disk."""
        graph, notes = self._convert(level.precision, keep_float32)
        self.written += 1
        return graph.save(self.folder / f"{self.written}.onnx"), notes

    def sensitivity(self, level: Level, name: str) -> float:
        self.reference = self.reference or self._outputs(self.job.source)
        alone, _ = self._convert(level.precision, frozenset(level.nodes) - {name})
        part = alone.save(self.folder / "part.onnx", temporary=True)
        return noise_share(self.reference, self._outputs(part))

    def saving_s(self, level: Level, name: str) -> float:
        """Return predicted seconds that a node saves; its operations if costs are measured."""
        if level.precision not in self.savings:
            float32 = self._costs(self.job.source)
            saved: Mapping[str, float] = {each.name: float(each.flops or 0) for each in float32}
            if not self.measured:
                converted = self._costs(self._convert(level.precision, ())[0])
                saved = cost.savings_s(float32, converted, self.ceilings)
            self.savings[level.precision] = saved
        return self.savings[level.precision].get(name, 0.0)

    def scales_for(self, precision: str) -> Scales:
        to = precision.partition("+")[0]
        if to not in self.scales:
            self.scales[to] = self.job.scales_for(to, self.folder)
        return self.scales[to]

    def _convert(self, precision: str, keep_float32: Collection[str]) -> tuple[Graph, list[str]]:
        to, _, other = precision.partition("+")
        return self.job.convert(self.scales_for(precision), to, other or "fp32", keep_float32)

    def _costs(self, graph: Graph) -> tuple[NodeCost, ...]:
        return cost.node_costs(graph, self.sizes)

    def cost_s(self, model: _Candidate) -> float:
        """Return seconds per call at COST_BATCH: measured, or the sum of its nodes' rooflines."""
        graph, _ = model
        if not self.measured:
            return cost.predicted_s(self._costs(graph), self.ceilings)
        feeds, source = self._feeds(COST_BATCH), self.job.source
        graphs = [graph] if graph is source else [graph, source]  # they take turns
        with ExitStack() as stack:
            engines = [
                stack.enter_context(open_graph(self.runtime, each, self.folder)) for each in graphs
            ]
            rounds = [
                [timeit(partial(each, feeds), number=1) for each in engines]
                for _ in range(1 + (_ROUNDS if len(graphs) > 1 else _FLOAT32_ROUNDS))
            ][1:]  # the first warms up
        measured = MeasuredCost(statistics.median(ours_s for ours_s, *_ in rounds))
        by_round = [times[0] / times[-1] for times in rounds]
        measured.rounds = by_round if graph is not source else [1.0] * _ROUNDS
        return measured

    def evaluate(self, model: _Candidate) -> Verdict:
        path = model[0].path
        with open_both(self.job, model[0]) as (reference, engine):
            found = evaluate_engines(self.job, reference, engine, self.name)
        if found.passed:
            self.passed[path] = found
        else:
            path.unlink()
            path.with_name(f"{path.name}.data").unlink(missing_ok=True)
        if found.drop is not None:
            figure = found.drop.drop.high
        elif found.agreement is not None:
            figure = 1 - found.agreement.low
        else:
            figure = math.inf if found.sqnr_db is None else 10 ** (-found.sqnr_db / 10)
        return Verdict(found.passed, figure, found.describe())

    def _outputs(self, graph: Graph) -> list[np.ndarray]:
        """Return a graph's outputs for the samples that sensitivity is measured on."""
        feeds = self._feeds(_SENSITIVITY_SAMPLES)
        if graph is self.job.source:
            engine = load(self.job.model, "cpu")
        else:
            engine = open_graph(self.runtime, graph, self.folder)
        with engine:
            return list(engine(feeds).values())

    def _feeds(self, samples: int) -> dict[str, np.ndarray]:
        """Return the first calibration samples; a graph with a fixed batch gets that many."""
        most = min(samples, self.job.batch_size)
        size, _ = self.calib.batching(most, self.job.source.inputs)
        return next(self.calib.batches(size))
