"""Search for the cheapest precision that keeps the accuracy: the logic of precision "auto".

1. Each level as it is, until one passes: from here on there is something to keep.
2. A wider one is kept where the passing one is not 5 % cheaper: "FP16 is not worth it here".
3. The levels that failed are repaired, the widest first: nodes are kept in float32 in order of
   sensitivity per second saved, as long as the model stays 5 % cheaper than the best so far. Their
   number grows 1, 2, 4, 8 until a model passes, then halves back to the fewest that pass: some
   2 log2(nodes) evaluations. Exact where one more float32 node never makes a passing model fail.

Float32 always passes: `best` is None where it is what remains.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.evidence import SearchStep

# The seconds that `--to auto` may take: no step begins that would end after them.


class OutOfTime(BadInput):
    """What is left of the budget does not do for the next step."""


@dataclass(frozen=True)
class Budget:
    """`seconds` on `clock`, from `began` on. Raises BadInput where they are not above 0."""

    began: float
    seconds: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        check_seconds(self.seconds)

    @property
    def end(self) -> float:
        return self.began + self.seconds

    def check(self, needed_s: float = 0.0) -> None:
        """Raise OutOfTime where `needed_s` more would end after the budget, or it has ended."""
        now = self.clock()
        if now >= self.end or now + needed_s > self.end:
            raise OutOfTime(
                f"`budget_s` {self.seconds:g}: too short to try one candidate, "
                f"after {now - self.began:.3g} s of preparing",
                hint="give more seconds (600 is the default) or fewer samples, or name a precision",
            )

    def pace(self, share: float) -> Pace:
        """For steps that may take this share of what is left."""
        now = self.clock()
        return Pace(now + share * max(self.end - now, 0.0), self.clock)

    def steps(self) -> Callable[[int], None]:
        """To call before each of equal steps, with how many are left; raises OutOfTime.

        They are expected to take as long as the shortest so far.
        """
        began: list[float] = []  # one for each step

        def check(left: int) -> None:
            began.append(self.clock())
            took_s = (later - earlier for earlier, later in itertools.pairwise(began))
            self.check(left * min(took_s, default=0.0))

        return check


def check_seconds(seconds: float) -> None:
    """Raise BadInput for a budget that is not above 0."""
    if not seconds > 0:
        raise BadInput(f"`budget_s` must be above 0 seconds, got {seconds}")


class Pace:
    """Whether one more step would end after `until`, if it took as long as the longest so far."""

    def __init__(self, until: float, clock: Callable[[], float]) -> None:
        self.until, self.clock = until, clock
        self.last = clock()
        self.longest_s = 0.0

    def out_of_time(self) -> bool:
        """Ask before each step."""
        now = self.clock()
        self.longest_s, self.last = max(self.longest_s, now - self.last), now
        return now + self.longest_s > self.until or now >= self.until


LEAST_GAIN = 0.05  # predictions and measurements are no finer, and a wider type is safer

OUT_OF_TIME = "time budget"
INTERRUPTED = "interrupted"

Model = TypeVar("Model")


@dataclass(frozen=True)
class Verdict:
    """The result of an evaluation: `drop` is the figure it went by, `why` the same as text."""

    passed: bool
    drop: float
    why: str


@dataclass(frozen=True)
class Level(Generic[Model]):
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
    make: Callable[[frozenset[str]], Model]
    cost_s: Callable[[Model], float]
    sensitivity: Callable[[str], float]
    saving_s: Callable[[str], float]


@dataclass(frozen=True)
class Found(Generic[Model]):
    """A model that passed."""

    precision: str
    model: Model
    float32_nodes: tuple[str, ...]
    verdict: Verdict
    cost_s: float


@dataclass(frozen=True)
class Outcome(Generic[Model]):
    """The end of a search. `best` None: keep float32. `notes`: verdicts as text.

    `stopped`: "" if the search came to its end, else "time budget" or "interrupted"; `best` is
    then the cheapest model that had passed.
    """

    best: Found[Model] | None
    steps: tuple[SearchStep, ...]
    notes: tuple[str, ...]
    stopped: str

    @property
    def interrupted(self) -> bool:
        return self.stopped == INTERRUPTED

    @property
    def why(self) -> str:
        """The result in one sentence."""
        kept = "float32 stays: no narrower precision passed"
        if self.best is not None:
            count = len(self.best.float32_nodes)
            nodes = f", {_count(count)} kept in float32" if count else ""
            kept = f"{self.best.precision.upper()}{nodes}: {self.best.verdict.why}"
        elif any(step.passed for step in self.steps):
            kept = "float32 stays: what passed is not worth it"
        elif self.stopped:
            kept = "float32 stays: no narrower precision had passed"
        reason = {OUT_OF_TIME: "the time budget ran out", INTERRUPTED: "interrupted"}
        return f"{kept} ({reason[self.stopped]})" if self.stopped else kept


def search(
    levels: Sequence[Level[Model]],
    evaluate: Callable[[Model], Verdict],
    *,
    float32_cost_s: float = math.inf,
    budget: Budget,
    on_step: Callable[[SearchStep], object] | None = None,
) -> Outcome[Model]:
    """The cheapest model that passes; see the head of this file for the order of work.

    `levels`: narrowest first, float32 not among them. `budget`: no candidate begins that would end
    after it, if it took as long as the longest before it, and at most half of what is left goes
    into ranking; a callback gives up a candidate by OutOfTime. Ctrl-C (KeyboardInterrupt out of any
    callback) ends the search, too. Either keeps the best so far. Raises OutOfTime where no
    candidate came to its end; other errors of the callbacks pass through.
    """
    run = _Run(evaluate, float32_cost_s, budget, on_step)
    stopped = ""
    try:
        run.search(levels)
    except OutOfTime:
        if not run.steps:
            raise
        stopped = OUT_OF_TIME
        run.note_left_out(levels)
    except KeyboardInterrupt:
        stopped = INTERRUPTED
    return Outcome(run.best, tuple(run.steps), tuple(run.notes), stopped)


def not_worth(narrow: str, narrow_s: float, wider: str, wider_s: float) -> str:
    """Why `narrow` is not worth it where `wider` passes too; "" if it saves LEAST_GAIN."""
    figures = _comparison(narrow_s, wider, wider_s)
    return f"{narrow.upper()} is not worth it here: {figures}" if figures else ""


def rank(
    nodes: Sequence[str], sensitivity: Mapping[str, float], saving_s: Callable[[str], float]
) -> list[str]:
    """Nodes by sensitivity per second saved, most first; those never measured come last.

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


def sensitivities(
    nodes: Sequence[str], sensitivity: Callable[[str], float], out_of_time: Callable[[], bool]
) -> dict[str, float]:
    """`sensitivity` of one node after the other, of as many as there is time for."""
    found: dict[str, float] = {}
    for name in nodes:
        if out_of_time():
            break
        found[name] = sensitivity(name)
    return found


def noise_share(wanted: Sequence[np.ndarray], got: Sequence[np.ndarray]) -> float:
    """Sensitivity seen at the outputs: noise energy by signal energy, added up over the outputs.

    Places that are not finite in `wanted` are left out; a value that is not where `wanted` is
    finite makes it infinite. For an integer output: the share that differs. Of another shape: 1.
    """
    total = 0.0
    for a, b in zip(wanted, got, strict=True):
        if a.shape != b.shape:  # a size that depends on the values, such as the number of boxes
            total += 1.0
            continue
        if a.dtype.kind in "biuO":
            total += float(np.mean(a != b)) if a.size else 0.0
            continue
        there = np.isfinite(a)
        x, y = a[there].astype(np.float64), b[there].astype(np.float64)
        if not np.isfinite(y).all():
            return math.inf
        signal, noise = float(np.sum(x**2)), float(np.sum((x - y) ** 2))
        total += noise / signal if signal > 0 else (math.inf if noise > 0 else 0.0)
    return total


class _Run(Generic[Model]):
    """The state of one search: what was tried, and the best so far."""

    def __init__(
        self,
        evaluate: Callable[[Model], Verdict],
        float32_cost_s: float,
        budget: Budget,
        on_step: Callable[[SearchStep], object] | None,
    ) -> None:
        self.evaluate = evaluate
        self.float32_cost_s = float32_cost_s
        self.budget = budget
        self.clock = budget.clock
        self.on_step = on_step
        self.best: Found[Model] | None = None
        self.steps: list[SearchStep] = []
        self.notes: list[str] = []
        self.candidate_began = self.clock()
        self.longest_s = 0.0  # of a candidate

    def search(self, levels: Sequence[Level[Model]]) -> None:
        failed: list[tuple[Level[Model], float]] = []
        for place, level in enumerate(levels):
            self._check_time()
            cost_s = self._plain(level)
            if self.best is not None:
                self._prefer_wider(level.bits, levels[place + 1 :])
                break
            failed.append((level, cost_s))
        for level, cost_s in reversed(failed):  # each has to beat the wider one before it
            self._repair(level, cost_s)

    def _plain(self, level: Level[Model]) -> float:
        """Try it with no node in float32; returns its cost, infinite if it cannot be made."""
        model = self._make(level, ())
        if model is None:
            return math.inf
        cost_s = level.cost_s(model)
        self._passes(level, model, (), cost_s)
        return cost_s

    def _prefer_wider(self, bits: int, levels: Sequence[Level[Model]]) -> None:
        """Give up what passed, of `bits`, for something wider that passes at about that cost."""
        for level in levels:
            if level.bits <= bits:
                continue
            self._check_time()
            model = self._make(level, ())
            if model is None or self.best is None:
                continue
            cost_s = level.cost_s(model)
            note = not_worth(self.best.precision, self.best.cost_s, level.precision, cost_s)
            if note and self._passes(level, model, (), cost_s):
                self.notes.append(note)
                bits = level.bits
        if self.best is not None:
            kept = self.best.precision, self.best.cost_s
            note = not_worth(*kept, "float32", self.float32_cost_s)
            if note:
                self.notes.append(note)
                self.best = None

    def _repair(self, level: Level[Model], plain_s: float) -> None:
        """Keep as few nodes in float32 as it passes with, if it is then still worth it."""
        name, rival, rival_s = level.precision, "float32", self.float32_cost_s
        if self.best is not None:
            rival, rival_s = self.best.precision, self.best.cost_s
        if not level.nodes or plain_s == math.inf:
            return
        note = not_worth(name, plain_s, rival, rival_s)
        if note:  # and float32 nodes only add to its cost
            self.notes.append(note)
            return
        self._check_time()
        order = self._order(level)
        failed, upper, bounded = 0, len(order), False
        dear, found = "", False
        while upper - failed > 1:
            count = (failed + upper) // 2 if bounded else min(max(2 * failed, 1), upper - 1)
            self._check_time()
            kept = tuple(order[:count])
            model = self._make(level, kept)
            if model is None:
                return
            cost_s = level.cost_s(model)
            too_dear = _comparison(cost_s, rival, rival_s)
            passed = not too_dear and self._passes(level, model, kept, cost_s)
            found |= passed
            if passed or too_dear:
                upper, bounded, dear = count, True, too_dear
            else:
                failed = count
        if not found:
            end = f"; with {upper} it is not worth it: {dear}" if dear else ""
            tried = f"{failed} of {_count(len(order))} kept in float32"
            self.notes.append(f"{name.upper()} fails with {tried}{end}")

    def _order(self, level: Level[Model]) -> list[str]:
        """The nodes, worst first; what half of the time left cannot rank comes last."""
        now = self.clock()
        until = min(now + (self.budget.end - now) / 2, self.budget.end - self.longest_s)
        pace = Pace(until, self.clock)
        sensitivity = sensitivities(level.nodes, level.sensitivity, pace.out_of_time)
        missing = len(level.nodes) - len(sensitivity)
        if missing:
            self.notes.append(
                f"{level.precision.upper()}: there was no time to rank {_count(missing)}"
            )
        return rank(level.nodes, sensitivity, level.saving_s)

    def _make(self, level: Level[Model], kept: tuple[str, ...]) -> Model | None:
        try:
            return level.make(frozenset(kept))
        except (BadInput, Unsupported) as exc:
            if isinstance(exc, OutOfTime):
                raise
            self._note_step(level, kept, Verdict(False, math.inf, exc.message), math.inf)
            return None

    def _passes(
        self, level: Level[Model], model: Model, kept: tuple[str, ...], cost_s: float
    ) -> bool:
        """Evaluate it. What passes is the best at once: Ctrl-C may come at any time."""
        verdict = self.evaluate(model)
        if verdict.passed:
            self.best = Found(level.precision, model, kept, verdict, cost_s)
        self._note_step(level, kept, verdict, cost_s)
        return verdict.passed

    def _note_step(
        self, level: Level[Model], kept: tuple[str, ...], verdict: Verdict, cost_s: float
    ) -> None:
        now = self.clock()
        self.longest_s = max(self.longest_s, now - self.candidate_began)
        elapsed_s = now - self.budget.began
        passed, drop, why = verdict.passed, verdict.drop, verdict.why
        step = SearchStep(level.precision, kept, passed, drop, why, cost_s, elapsed_s)
        self.steps.append(step)
        if self.on_step is not None:
            self.on_step(step)

    def _check_time(self) -> None:
        self.candidate_began = self.clock()
        self.budget.check(self.longest_s)

    def note_left_out(self, levels: Sequence[Level[Model]]) -> None:
        """What there was no time for."""
        tried = {step.precision for step in self.steps}
        missing = [level.precision for level in levels if level.precision not in tried]
        if missing:
            self.notes.append(f"not tried, for lack of time: {', '.join(missing)}")


def _comparison(narrow_s: float, wider: str, wider_s: float) -> str:
    """The figures that speak against `narrow_s`; "" if it is LEAST_GAIN or more below `wider_s`."""
    if narrow_s <= (1 - LEAST_GAIN) * wider_s:
        return ""
    figures = f"{_ms(narrow_s)} against {_ms(wider_s)} in {wider.upper()}"
    if wider_s > 0:  # else it computes nothing
        share = narrow_s / wider_s - 1
        figures += f", {abs(share):.1%} {'more' if share > 0 else 'less'}"
    return f"{figures}; {LEAST_GAIN:.0%} less is asked for"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _count(nodes: int) -> str:
    return f"{nodes} node" if nodes == 1 else f"{nodes} nodes"
