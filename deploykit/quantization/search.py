"""Precision "auto": search for the cheapest precision that keeps the accuracy.

1. Try each level as it is, until one passes: from here on there is something to keep.
2. A wider one is kept where the passing one is not 5 % cheaper: "FP16 is not worth it here".
3. The levels that failed are repaired, the widest first: nodes are kept in float32 in order of
   sensitivity per second saved, as long as the model stays 5 % cheaper than the best so far. Their
   number grows 1, 2, 4, 8 until a model passes, then halves back to the fewest that pass: some
   2 log2(nodes) evaluations. It is exact if one more float32 node never makes a passing model fail.

Float32 always passes: `best` is None where only that remains.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.evidence import Evaluation, Evidence, SearchRecord, SearchStep
from deploykit.core.precision import DYNAMIC, PAIRS, auto_levels
from deploykit.core.profile import load_profile, precisions_everywhere
from deploykit.core.runtime import RUNTIMES
from deploykit.engines.engine import Arrays, Engine, load
from deploykit.evaluation.artefacts import Progress
from deploykit.evaluation.feeds import axis_sizes
from deploykit.evaluation.simulate import open_graph
from deploykit.evaluation.statistics import ratio
from deploykit.graph import cost, storage
from deploykit.graph.cost import Ceilings, NodeCost
from deploykit.graph.graph import Graph
from deploykit.quantization import qdq
from deploykit.quantization.job import Job, evaluate_engines, open_both
from deploykit.quantization.scales import Scales, noise_share
from deploykit.quantization.weights import dynamic_nodes


@dataclass(frozen=True)
class Budget:
    """The ten minutes that a search may take."""

    began: float
    seconds: float = 600.0
    clock: Callable[[], float] = time.monotonic

    @property
    def end(self) -> float:
        return self.began + self.seconds


LEAST_GAIN = 0.05  # predictions and measurements are no finer, and a wider type is safer
OUT_OF_TIME, INTERRUPTED = "time budget", "interrupted"


@dataclass(frozen=True)
class Verdict:
    """The result of an evaluation: `drop` is the figure it went by, `why` the same as text."""

    passed: bool
    drop: float
    why: str


@dataclass(frozen=True)
class Level:
    """A precision to try.

    `nodes`: names of those that can be kept in float32, in graph order. `make`: a model in which
    the named nodes are float32; BadInput or Unsupported mean that it cannot be written. `cost_s`:
    seconds of one call, predicted or measured. `bits`: of its widest common type; only a level of
    more bits can make one not worth it. `sensitivity`: the error at the outputs with that node
    alone narrowed, see `noise_share`. `saving_s`: seconds that narrowing one node saves.
    """

    precision: str
    bits: int
    nodes: tuple[str, ...]
    make: Callable[[frozenset[str]], Any]
    cost_s: Callable[[Any], float]
    sensitivity: Callable[[str], float]
    saving_s: Callable[[str], float]


def search(
    levels: Sequence[Level],
    evaluate: Callable[[Any], Verdict],
    *,
    float32_cost_s: float = math.inf,
    budget: Budget,
    on_step: Callable[[SearchStep], object] = lambda _: None,
) -> Search:
    """Find the cheapest model that passes; see the head of this file for the order of work.

    Args:
        levels: narrowest first, float32 not among them.
        evaluate: decides on a model of a level.
        float32_cost_s: seconds per call of the model as it is.
        budget: after the first candidate none begins that would end after it, if it took as long as
            the longest before, and at most half of what is left goes into ranking.
        on_step: called after each evaluation. Ctrl-C (KeyboardInterrupt out of any callback) ends
            the search and keeps the best so far; other errors pass through.
    """
    found = Search(evaluate, float32_cost_s, budget, on_step, candidate_began=budget.clock())
    try:
        found.run(levels)
    except _OutOfTimeError:
        found.stopped = OUT_OF_TIME
        tried = {step.precision for step in found.steps}
        missing = [level.precision for level in levels if level.precision not in tried]
        if missing:
            found.notes.append(f"not tried, for lack of time: {', '.join(missing)}")
    except KeyboardInterrupt:
        found.stopped = INTERRUPTED
    return found


def not_worth(narrow: str, narrow_s: float, wider: str, wider_s: float) -> str:
    """Say why `narrow` is not worth it where `wider` passes too; "" if it saves LEAST_GAIN."""
    figures = _comparison(narrow_s, wider, wider_s)
    return f"{narrow.upper()} is not worth it here: {figures}" if figures else ""


def rank(
    nodes: Sequence[str], sensitivity: Mapping[str, float], saving_s: Callable[[str], float]
) -> list[str]:
    """Sort nodes by sensitivity per second saved, most first; those never measured come last.

    First come nodes that cost accuracy and save nothing, or whose sensitivity is infinite or NaN.
    """

    def price(name: str) -> float:
        if name not in sensitivity:
            return -1.0
        if not math.isfinite(sensitivity[name]):
            return math.inf
        saved = saving_s(name)
        return (
            sensitivity[name] / saved if saved > 0 else math.inf if sensitivity[name] > 0 else 0.0
        )

    return sorted(nodes, key=lambda name: -price(name))


class _OutOfTimeError(Exception):
    """One more candidate would end after the budget."""


@dataclass
class Search:
    """A search: what was tried, and the best so far, `model` with its step; None keeps float32.

    `stopped`: "" if the search came to its end, else "time budget" or "interrupted"; `best` is then
    the cheapest model that had passed. `longest_s`: of the slowest candidate.
    """

    evaluate: Callable[[Any], Verdict]
    float32_cost_s: float
    budget: Budget
    on_step: Callable[[SearchStep], object]
    candidate_began: float
    longest_s: float = 0.0
    best: SearchStep | None = None
    model: Any = None
    steps: list[SearchStep] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stopped: str = ""

    @property
    def record(self) -> SearchRecord:
        """The record for the manifest, with the result in one sentence."""
        best = self.best
        why = "float32 stays: no narrower precision passed"
        if best is not None:
            count = len(best.float32_nodes)
            nodes = f", {_count(count)} kept in float32" if count else ""
            why = f"{best.precision.upper()}{nodes}: {best.why}"
        elif any(step.passed for step in self.steps):
            why = "float32 stays: what passed is not worth it"
        elif self.stopped:
            why = "float32 stays: no narrower precision had passed"
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

    def run(self, levels: Sequence[Level]) -> None:
        failed: list[tuple[Level, float]] = []
        for place, level in enumerate(levels):
            cost_s, _ = self._try(level)
            if self.best is not None:
                self._prefer_wider(level.bits, levels[place + 1 :])
                break
            failed.append((level, cost_s))
        for level, cost_s in reversed(failed):  # each has to beat the wider one before it
            self._repair(level, cost_s)

    def _prefer_wider(self, bits: int, levels: Sequence[Level]) -> None:
        """Replace the passing level, of `bits`, by a wider one that passes at about that cost."""
        for level in levels:
            if level.bits > bits and self.best is not None:
                name, narrow_s = self.best.precision, self.best.cost_s
                cost_s, passed = self._try(level, worth=partial(_comparison, narrow_s, name))
                if passed:
                    self.notes.append(not_worth(name, narrow_s, level.precision, cost_s))
                    bits = level.bits
        if self.best is not None:
            note = not_worth(self.best.precision, self.best.cost_s, "float32", self.float32_cost_s)
            if note:
                self.notes.append(note)
                self.best = None

    def _repair(self, level: Level, plain_s: float) -> None:
        """Keep the fewest nodes in float32 with which `level` passes, if it is still worth it."""
        rival, rival_s = "float32", self.float32_cost_s
        if self.best is not None:
            rival, rival_s = self.best.precision, self.best.cost_s
        if not level.nodes or plain_s == math.inf:
            return
        note = not_worth(level.precision, plain_s, rival, rival_s)
        if note:  # and float32 nodes only add to its cost
            self.notes.append(note)
            return
        self._check_time()
        order = self._order(level)
        failed, upper, bounded = 0, len(order), False
        dear, found = "", False
        while upper - failed > 1:
            count = (failed + upper) // 2 if bounded else min(max(2 * failed, 1), upper - 1)
            cost_s, passed = self._try(
                level, order[:count], lambda cost_s: not _comparison(cost_s, rival, rival_s)
            )
            if cost_s == math.inf:
                return
            found |= passed
            too_dear = _comparison(cost_s, rival, rival_s)
            if passed or too_dear:
                upper, bounded, dear = count, True, too_dear
            else:
                failed = count
        if not found:
            end = f"; with {upper} it is not worth it: {dear}" if dear else ""
            tried = f"{failed} of {_count(len(order))} kept in float32"
            self.notes.append(f"{level.precision.upper()} fails with {tried}{end}")

    def _order(self, level: Level) -> list[str]:
        """Return the nodes, worst first; those that half of the time left cannot rank are last."""
        last, end, longest_s = self.budget.clock(), self.budget.end, 0.0
        until = min(last + (end - last) / 2, end - self.longest_s)
        sensitivity: dict[str, float] = {}
        for name in level.nodes:
            now = self.budget.clock()
            longest_s, last = max(longest_s, now - last), now
            if now + longest_s > until or now >= until:
                missing = len(level.nodes) - len(sensitivity)
                self.notes.append(f"{level.precision.upper()}: no time to rank {_count(missing)}")
                break
            sensitivity[name] = level.sensitivity(name)
        return rank(level.nodes, sensitivity, level.saving_s)

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
        try:
            model = level.make(frozenset(kept))
        except (BadInput, Unsupported) as exc:
            model, cost_s, verdict = None, math.inf, Verdict(False, math.inf, exc.message)
        else:
            cost_s = level.cost_s(model)
            if not worth(cost_s):
                return cost_s, False
            verdict = self.evaluate(model)
        now, (passed, drop, why) = self.budget.clock(), astuple(verdict)
        self.longest_s = max(self.longest_s, now - self.candidate_began)
        elapsed_s = now - self.budget.began
        step = SearchStep(level.precision, tuple(kept), passed, drop, why, cost_s, elapsed_s)
        self.steps.append(step)
        if passed:
            self.model, self.best = model, step
        self.on_step(step)
        return cost_s, passed

    def _check_time(self) -> None:
        self.candidate_began = self.budget.clock()
        if self.steps and self.candidate_began + self.longest_s > self.budget.end:
            raise _OutOfTimeError


class MeasuredCost(float):
    """Seconds of a call, with their ratio to those of float32 in each round of both."""

    rounds: Sequence[float] = ()


def _comparison(narrow_s: float, wider: str, wider_s: float) -> str:
    """Give the figures that speak against `narrow_s`; "" if it gains LEAST_GAIN, beyond chance."""
    saves, chance = narrow_s <= (1 - LEAST_GAIN) * wider_s, False
    if isinstance(narrow_s, MeasuredCost) and isinstance(wider_s, MeasuredCost):
        times = ratio(wider_s.rounds, narrow_s.rounds)
        saves, chance = times.value * (1 - LEAST_GAIN) >= 1, times.low <= 1
    if saves and not chance:
        return ""
    figures = f"{narrow_s * 1e3:.3g} ms against {wider_s * 1e3:.3g} ms in {wider.upper()}"
    if wider_s > 0:  # else the model computes nothing
        share = narrow_s / wider_s - 1
        figures += f", {abs(share):.1%} {'more' if share > 0 else 'less'}"
    if saves:
        return f"{figures}, which is within the spread of the measurements"
    return f"{figures}; {LEAST_GAIN:.0%} less is asked for"


def _count(nodes: int) -> str:
    return f"{nodes} node" if nodes == 1 else f"{nodes} nodes"


GENERIC_PROFILE = "l4"  # predicts the costs where no profile is named
COST_BATCH = 8
_SENSITIVITY_SAMPLES = 16
_ROUNDS = 15  # of a measured cost


@dataclass(frozen=True)
class _Candidate:
    """A graph in one precision, on disk: large models would not fit into memory several times."""

    graph: Graph
    cost_s: float
    notes: tuple[str, ...]


def search_precision(
    job: Job, out: Path, name: str, on_progress: Progress
) -> tuple[Graph, Evidence]:
    """Write the cheapest graph that passes to `out`, the model itself where float32 stays.

    For ONNX Runtime a cost is measured on this machine's CPU, for TensorRT it is predicted from the
    peaks of the target. `name`: what tables and errors call the file.
    """
    budget = Budget(time.monotonic())
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".auto.") as folder:
        candidates = _Candidates(job, Path(folder), name)
        on_progress(candidates.cost_note, 0.0)

        def report(step: SearchStep) -> None:
            count, result = len(step.float32_nodes), "passes" if step.passed else "fails"
            kept = f", {count} nodes kept in float32" if count else ""
            share = min((budget.clock() - budget.began) / budget.seconds, 1.0)
            on_progress(f"{step.precision}{kept} {result}: {step.why}", share)

        outcome = search(
            candidates.levels(),
            candidates.evaluate,
            float32_cost_s=candidates.cost_s(job.source),
            budget=budget,
            on_step=report,
        )
        record = outcome.record
        notes = [record.why, *record.notes, candidates.cost_note]
        notes += [note for scales in candidates.scales.values() for note in scales.notes]
        if outcome.best is None:
            return job.source.save(out), job.evidence(job.scales, notes, search=record)
        if record.float32_nodes:
            notes.append(f"kept in float32 by the search: {', '.join(record.float32_nodes)}")
        best: _Candidate = outcome.model
        path, scales = best.graph.path, candidates.scales_for(record.precision)
        data = path.with_name(f"{path.name}.data")
        if data.exists():
            storage.point_to(path, f"{out.name}.data")
            data.replace(out.with_name(f"{out.name}.data"))
        path.replace(out)
        notes += best.notes
        return Graph.open(out), job.evidence(scales, notes, candidates.passed[path], record)


def _seconds(engine: Engine, feeds: Arrays) -> float:
    began = time.perf_counter()
    engine(feeds)
    return time.perf_counter() - began


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
                if not nodes:
                    continue
            levels.append(self._level(name, precision.bits, nodes))
        return levels

    def _level(self, precision: str, bits: int, nodes: tuple[str, ...]) -> Level:
        every = frozenset(nodes)

        def sensitivity(name: str) -> float:
            self.reference = self.reference or self._outputs(self.job.source)
            alone, _ = self._convert(precision, every - {name})
            part = alone.save(self.folder / "part.onnx", temporary=True)
            return noise_share(self.reference, self._outputs(part))

        @cache
        def savings_s() -> Mapping[str, float]:
            """Return predicted seconds that each node saves; operations if costs are measured."""
            float32 = self._costs(self.job.source)
            if self.measured:
                return {each.name: float(each.flops or 0) for each in float32}
            converted = self._costs(self._convert(precision, ())[0])
            return cost.savings_s(float32, converted, self.ceilings)

        return Level(
            precision,
            bits,
            nodes,
            make=lambda keep_float32: self._make(precision, keep_float32),
            cost_s=lambda candidate: float(candidate.cost_s),
            sensitivity=sensitivity,
            saving_s=lambda name: savings_s().get(name, 0.0),
        )

    def scales_for(self, precision: str) -> Scales:
        to = precision.partition("+")[0]
        if to not in self.scales:
            self.scales[to] = self.job.scales_for(to, self.folder)
        return self.scales[to]

    def _convert(self, precision: str, keep_float32: Collection[str]) -> tuple[Graph, list[str]]:
        to, _, other = precision.partition("+")
        return self.job.convert(self.scales_for(precision), to, other or "fp32", keep_float32)

    def _make(self, precision: str, keep_float32: Collection[str]) -> _Candidate:
        """Write the model in `precision`, except `keep_float32`, to disk, and find its cost."""
        graph, notes = self._convert(precision, keep_float32)
        self.written += 1
        graph = graph.save(self.folder / f"{self.written}.onnx")
        return _Candidate(graph, self.cost_s(graph), tuple(notes))

    def _costs(self, graph: Graph) -> tuple[NodeCost, ...]:
        return cost.node_costs(graph, self.sizes)

    def cost_s(self, graph: Graph) -> float:
        """Return seconds per call at COST_BATCH: measured, or the sum of its nodes' rooflines."""
        if not self.measured:
            return cost.predicted_s(self._costs(graph), self.ceilings)
        feeds = self._feeds(COST_BATCH)
        opened = (open_graph(self.runtime, each, self.folder) for each in (graph, self.job.source))
        with ExitStack() as stack:
            both = [stack.enter_context(engine) for engine in opened]
            # they take turns, and the first turn warms up
            rounds = [[_seconds(each, feeds) for each in both] for _ in range(1 + _ROUNDS)][1:]
        measured = MeasuredCost(statistics.median(ours_s for ours_s, _ in rounds))
        measured.rounds = [ours_s / float32_s for ours_s, float32_s in rounds]
        return measured

    def evaluate(self, candidate: _Candidate) -> Verdict:
        path = candidate.graph.path
        with open_both(self.job, candidate.graph) as (reference, engine):
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
