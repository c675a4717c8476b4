"""Search for the cheapest precision that passes: the logic of `--to auto`, and nothing else.

In: precision levels, narrowest first, as callbacks that make, price and rank; a judge; a clock.
Out: `Outcome`: the model to keep, every step that was tried, and the verdicts in words.

1. Each level as it is, until one passes: from here on there is something to keep.
2. A wider one is kept where the passing one is not 5 % cheaper: "FP16 is not worth it here".
3. The levels that failed are repaired, the widest first: nodes are left wide in order of harm per
   second saved, as long as the model stays 5 % cheaper than what is kept so far. Their number grows
   1, 2, 4, 8 until a model passes, then halves back to the fewest that pass: some 2 log2(nodes)
   runs of the judge. Exact where one more wide node never makes a passing model fail.

Float32 always passes: it is what remains, `best` is None then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from deploykit.core.errors import BadInput, Unsupported

LEAST_GAIN = 0.05  # predictions and measurements are no finer, and a wider type is safer

OUT_OF_TIME = "time budget"
INTERRUPTED = "interrupted"

Model = TypeVar("Model")


@dataclass(frozen=True)
class Verdict:
    """What the judge says: `drop` is what the gate decided on, `text` says it in words."""

    passed: bool
    drop: float
    text: str


@dataclass(frozen=True)
class Level(Generic[Model]):
    """A precision to try.

    `nodes`: names of those that can be left wide, in graph order. `make`: a model in which the
    named nodes are wide; BadInput or Unsupported say that this precision cannot be had. `cost_s`:
    seconds of one call, predicted or measured. `bits`: of its widest common type; only a level of
    more bits can make one not worth it. `harm`: of one node narrowed alone, see
    `noise_share`. `saving_s`: seconds that narrowing one node saves.
    """

    precision: str
    bits: int
    nodes: tuple[str, ...]
    make: Callable[[frozenset[str]], Model]
    cost_s: Callable[[Model], float]
    harm: Callable[[str], float]
    saving_s: Callable[[str], float]


@dataclass(frozen=True)
class Step:
    """One model that was tried.

    `wide`: the nodes left wide, worst first; `elapsed_s`: since the search began. Where none could
    be made, `cost_s` and `drop` are infinite and `text` says why.
    """

    precision: str
    wide: tuple[str, ...]
    passed: bool
    drop: float
    text: str
    cost_s: float
    elapsed_s: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: null."""
        return {
            **vars(self),
            "wide": list(self.wide),
            "drop": _finite(self.drop),
            "cost_s": _finite(self.cost_s),
        }


@dataclass(frozen=True)
class Found(Generic[Model]):
    """A model that passed."""

    precision: str
    model: Model
    wide: tuple[str, ...]
    verdict: Verdict
    cost_s: float


@dataclass(frozen=True)
class Outcome(Generic[Model]):
    """The end of a search. `best` None: keep float32. `notes`: verdicts, in words.

    `stopped`: "" if the search came to its end, else "time budget" or "interrupted"; `best` is
    then the cheapest model that had passed.
    """

    best: Found[Model] | None
    steps: tuple[Step, ...]
    notes: tuple[str, ...]
    stopped: str

    @property
    def interrupted(self) -> bool:
        return self.stopped == INTERRUPTED

    @property
    def text(self) -> str:
        """The result in one sentence."""
        kept = "float32 stays: no narrower precision passed"
        if self.best is not None:
            wide = f", {_count(len(self.best.wide))} left wide" if self.best.wide else ""
            kept = f"{self.best.precision.upper()}{wide}: {self.best.verdict.text}"
        elif any(step.passed for step in self.steps):
            kept = "float32 stays: what passed is not worth it"
        elif self.stopped:
            kept = "float32 stays: no narrower precision had passed"
        reason = {OUT_OF_TIME: "the time budget ran out", INTERRUPTED: "interrupted"}
        return f"{kept} ({reason[self.stopped]})" if self.stopped else kept

    def to_dict(self) -> dict[str, Any]:
        return {
            "precision": self.best.precision if self.best else "float32",
            "wide": list(self.best.wide) if self.best else [],
            "cost_s": _finite(self.best.cost_s) if self.best else None,
            "drop": _finite(self.best.verdict.drop) if self.best else None,
            "text": self.text,
            "notes": list(self.notes),
            "stopped": self.stopped,
            "steps": [step.to_dict() for step in self.steps],
        }


def search(
    levels: Sequence[Level[Model]],
    judge: Callable[[Model], Verdict],
    *,
    float32_cost_s: float = math.inf,
    budget_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
    on_step: Callable[[Step], object] | None = None,
) -> Outcome[Model]:
    """The cheapest model that passes; see the head of this file for the order of work.

    `levels`: narrowest first, float32 not among them. `budget_s`: seconds on `clock`; no new step
    begins after them, and at most half of what is left goes into ranking. Ctrl-C (KeyboardInterrupt
    out of any callback) ends the search, too, and keeps the best so far. Raises BadInput for a
    budget that is not above 0; other errors of the callbacks pass through.
    """
    if not budget_s > 0:
        raise BadInput(f"the time budget must be above 0 seconds, got {budget_s}")
    run = _Run(judge, float32_cost_s, clock, clock() + budget_s, on_step)
    stopped = ""
    try:
        run.search(levels)
    except _OutOfTimeError:
        stopped = OUT_OF_TIME
    except KeyboardInterrupt:
        stopped = INTERRUPTED
    return Outcome(run.best, tuple(run.steps), tuple(run.notes), stopped)


def not_worth(
    narrow: str, narrow_s: float, wide: str, wide_s: float, *, least: float = LEAST_GAIN
) -> str:
    """Why `narrow` is not worth it beside a `wide` that passes too; "" if it saves `least`."""
    figures = _compared(narrow_s, wide, wide_s, least)
    return f"{narrow.upper()} is not worth it here: {figures}" if figures else ""


def ranked(
    nodes: Sequence[str], harm: Mapping[str, float], saving_s: Callable[[str], float]
) -> list[str]:
    """Nodes by harm per second saved, most first; those without a known harm come last, in order.

    A node that harms and saves nothing stands first, as does one whose harm is infinite or NaN.
    """

    def price(name: str) -> float:
        if name not in harm:
            return -1.0
        if not math.isfinite(harm[name]):
            return math.inf
        saved = saving_s(name)
        return harm[name] / saved if saved > 0 else math.inf if harm[name] > 0 else 0.0

    return sorted(nodes, key=lambda name: -price(name))


def sensitivities(
    nodes: Sequence[str], harm: Callable[[str], float], out_of_time: Callable[[], bool]
) -> dict[str, float]:
    """`harm` of one node after the other, of as many as there is time for."""
    found: dict[str, float] = {}
    for name in nodes:
        if out_of_time():
            break
        found[name] = harm(name)
    return found


def noise_share(wanted: Sequence[np.ndarray], got: Sequence[np.ndarray]) -> float:
    """Harm seen at the outputs: noise energy by signal energy, added up over the outputs.

    Places that are not finite in `wanted` are left out; a value that is not where `wanted` is
    finite makes it infinite. An output of whole numbers counts the share of those that differ.
    """
    total = 0.0
    for a, b in zip(wanted, got, strict=True):
        if a.dtype.kind in "biu":
            total += float(np.mean(a != b)) if a.size else 0.0
            continue
        there = np.isfinite(a)
        x, y = a[there].astype(np.float64), b[there].astype(np.float64)
        if not np.isfinite(y).all():
            return math.inf
        signal, noise = float(np.sum(x**2)), float(np.sum((x - y) ** 2))
        total += noise / signal if signal > 0 else (math.inf if noise > 0 else 0.0)
    return total


class _OutOfTimeError(Exception):
    """The budget is used up."""


class _Run(Generic[Model]):
    """The state of one search: what was tried, and the best so far."""

    def __init__(
        self,
        judge: Callable[[Model], Verdict],
        float32_cost_s: float,
        clock: Callable[[], float],
        deadline: float,
        on_step: Callable[[Step], object] | None,
    ) -> None:
        self.judge = judge
        self.float32_cost_s = float32_cost_s
        self.clock = clock
        self.began = clock()
        self.deadline = deadline
        self.on_step = on_step
        self.best: Found[Model] | None = None
        self.steps: list[Step] = []
        self.notes: list[str] = []

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
        """Try it with no node left wide; returns its cost, infinite if it cannot be made."""
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
        """Leave the fewest nodes wide with which it passes and is still worth it."""
        name, rival, rival_s = level.precision, "float32", self.float32_cost_s
        if self.best is not None:
            rival, rival_s = self.best.precision, self.best.cost_s
        if not level.nodes or plain_s == math.inf:
            return
        note = not_worth(name, plain_s, rival, rival_s)
        if note:  # and leaving nodes wide only adds to its cost
            self.notes.append(note)
            return
        order = self._order(level)
        failed, upper, bounded = 0, len(order), False
        dear, found = "", False
        while upper - failed > 1:
            count = (failed + upper) // 2 if bounded else min(max(2 * failed, 1), upper - 1)
            self._check_time()
            wide = tuple(order[:count])
            model = self._make(level, wide)
            if model is None:
                return
            cost_s = level.cost_s(model)
            too_dear = _compared(cost_s, rival, rival_s)
            passed = not too_dear and self._passes(level, model, wide, cost_s)
            found |= passed
            if passed or too_dear:
                upper, bounded, dear = count, True, too_dear
            else:
                failed = count
        if not found:
            end = f"; with {upper} it is not worth it: {dear}" if dear else ""
            tried = f"{failed} of {_count(len(order))} left wide"
            self.notes.append(f"{name.upper()} fails with {tried}{end}")

    def _order(self, level: Level[Model]) -> list[str]:
        """The nodes, worst first; what half of the time left cannot rank comes last."""
        began = self.clock()
        until = began + (self.deadline - began) / 2
        harm = sensitivities(level.nodes, level.harm, lambda: self.clock() >= until)
        missing = len(level.nodes) - len(harm)
        if missing:
            self.notes.append(
                f"{level.precision.upper()}: there was no time to rank {_count(missing)}"
            )
        return ranked(level.nodes, harm, level.saving_s)

    def _make(self, level: Level[Model], wide: tuple[str, ...]) -> Model | None:
        try:
            return level.make(frozenset(wide))
        except (BadInput, Unsupported) as exc:
            self._note_step(level, wide, Verdict(False, math.inf, exc.message), math.inf)
            return None

    def _passes(
        self, level: Level[Model], model: Model, wide: tuple[str, ...], cost_s: float
    ) -> bool:
        """Judge it. What passes is the best at once: Ctrl-C may come at any time."""
        verdict = self.judge(model)
        if verdict.passed:
            self.best = Found(level.precision, model, wide, verdict, cost_s)
        self._note_step(level, wide, verdict, cost_s)
        return verdict.passed

    def _note_step(
        self, level: Level[Model], wide: tuple[str, ...], verdict: Verdict, cost_s: float
    ) -> None:
        elapsed_s = self.clock() - self.began
        passed, drop, text = verdict.passed, verdict.drop, verdict.text
        step = Step(level.precision, wide, passed, drop, text, cost_s, elapsed_s)
        self.steps.append(step)
        if self.on_step is not None:
            self.on_step(step)

    def _check_time(self) -> None:
        if self.clock() >= self.deadline:
            raise _OutOfTimeError


def _compared(narrow_s: float, wide: str, wide_s: float, least: float = LEAST_GAIN) -> str:
    """The figures that speak against `narrow_s`; "" if it is at least `least` below `wide_s`."""
    if narrow_s <= (1 - least) * wide_s:
        return ""
    share = narrow_s / wide_s - 1
    side = "more" if share > 0 else "less"
    figures = f"{_ms(narrow_s)} against {_ms(wide_s)} in {wide.upper()}, {abs(share):.1%} {side}"
    return f"{figures}; {least:.0%} less is asked for"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _count(nodes: int) -> str:
    return f"{nodes} node" if nodes == 1 else f"{nodes} nodes"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
