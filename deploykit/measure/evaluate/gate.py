"""Whether a candidate may replace its reference: one pass over the data, one verdict.

In: two engines and samples, with labels if there are any. Out: `Judgement`. On labelled data the
task decides, by the upper end of the drop's interval; without labels the outputs do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from deploykit.core.errors import BadInput
from deploykit.measure.evaluate.metrics import Metric, Scores, drop_of
from deploykit.measure.evaluate.parity import Parity, ParityRow, compare_engines
from deploykit.measure.statistics import (
    ADJUSTED_WALD,
    Drop,
    Interval,
    proportion,
    samples_to_show_agreement,
    samples_to_show_no_drop,
)
from deploykit.runtimes.data.samples import Samples, random_feeds
from deploykit.runtimes.engine import Arrays, Engine

MAX_DROP = 0.01  # one percentage point
MIN_SQNR_DB = 15.0
RANDOM_BATCHES = (1, 2, 7, 32)


@dataclass(frozen=True)
class Judgement:
    """What was found and decided. `reason`: one line, why it passed or failed.

    `drop`: on labelled data. `agreement`: the share of equal answers per sample (the largest value
    of the first output that has classes; for whole numbers the value itself), None where no output
    has any. `samples`: how many it was judged on, None for random inputs. `max_drop`: the bound
    that applied, None if none did.
    """

    parity: Parity
    drop: Drop | None
    agreement: Interval | None
    samples: int | None
    passed: bool
    reason: str
    max_drop: float | None
    min_sqnr_db: float

    @property
    def sqnr_db(self) -> float | None:
        """The lowest of any floating output at any batch size; None where no output is floating.

        Minus infinity where NaN or infinity stands on one side only.
        """
        rows = [row for row in self.parity.rows if row.floating]
        return min((row.sqnr_db if row.places_match else -math.inf for row in rows), default=None)

    def describe(self) -> str:
        """For a table: "drop 0.4 pp, 0.1 to 0.7, n = 540", or agreement and SQNR."""
        if self.drop is not None:
            return self.drop.describe()
        if any(not row.places_match for row in self.parity.rows):
            return "NaN or infinity"
        parts = []
        if self.agreement is not None and self.samples is not None:
            share = self.agreement
            value, low, high = (f"{x * 100:.1f}" for x in (share.value, share.low, share.high))
            parts.append(f"agreement {value} %, {low} to {high}, n = {self.samples}")
        if self.sqnr_db is not None:
            equal = self.sqnr_db == math.inf
            parts.append("equal outputs" if equal else f"SQNR {self.sqnr_db:.1f} dB")
        return "; ".join(parts) + (" on random inputs" if self.samples is None else "")

    def to_dict(self) -> dict[str, object]:
        """For a manifest; figures that are infinite are null."""
        sqnr_db = self.sqnr_db
        return {
            "passed": self.passed,
            "reason": self.reason,
            "samples": self.samples,
            "max_drop": self.max_drop,
            "min_sqnr_db": self.min_sqnr_db,
            "drop": self.drop.to_dict() if self.drop else None,
            "agreement": self.agreement.to_dict() if self.agreement else None,
            "sqnr_db": sqnr_db if sqnr_db is not None and math.isfinite(sqnr_db) else None,
            "parity": self.parity.to_dict(),
        }


def judge(
    reference: Engine,
    candidate: Engine,
    *,
    samples: Samples | None,
    metric: Metric | None = None,
    max_drop: float | None = None,
    min_sqnr_db: float | None = None,
    names: tuple[str, str] = ("reference", "candidate"),
    batch_size: int = 32,
    sizes: Mapping[str, int] | None = None,
) -> Judgement:
    """Run both engines once over the samples and decide.

    Values that are NaN or infinite on one side only fail, whatever else holds. Else, on labelled
    data with a metric: the upper end of the drop's 95 % interval is at most `max_drop` (a fraction
    or the metric's own unit, 0.01 where None). Else: every floating output's SQNR is at least
    `min_sqnr_db`; and, if `max_drop` is given, the upper end of the share of samples that answer
    differently is at most that. A model whose outputs are all whole numbers is always held to the
    latter.

    The default of 15 dB is noise with 3 % of the signal's energy. It catches what is broken (a
    wrong scale, a lost layer) and lets pass what is merely coarse: whether that is good enough for
    a task, only labelled data can tell. At 10 dB, EfficientNet-B0 with random weights passed while
    one sample in twelve kept its answer.

    `samples`: None for seeded random inputs, `sizes` giving dynamic axes other than the batch.
    Samples that do not fill a fixed batch are left out. One batch of outputs is kept at a time.
    Raises BadInput where the two cannot be compared, the metric does not fit, or `max_drop` is
    given and nothing could be held to it.
    """
    if max_drop is not None and not (math.isfinite(max_drop) and max_drop > 0):
        raise BadInput(f"the largest drop must be a number above 0, got {max_drop}")
    min_sqnr_db = MIN_SQNR_DB if min_sqnr_db is None else min_sqnr_db
    if math.isnan(min_sqnr_db):
        raise BadInput("the least SQNR must be a number of decibels")
    if samples is None:
        if max_drop is not None:
            raise BadInput(
                "without samples no drop can be judged",
                hint="give labelled samples (or unlabelled ones, for agreement), or no bound",
            )
        random = _random(reference, candidate, sizes or {}, batch_size)
        parity = compare_engines(reference, candidate, random, names=names)
        return _without_labels(parity, None, None, None, min_sqnr_db)
    size, used = samples.batching(batch_size, (*reference.inputs, *candidate.inputs))
    samples = samples.first(used)
    scores: list[Scores] = []
    if samples.labels is not None and metric is not None:
        scores = [Scores(metric, samples.where) for _ in names]
    same: list[np.ndarray] = []

    labels = samples.labels

    def watch(number: int, left: Arrays, right: Arrays) -> None:
        start = number * size
        rows = min(size, used - start)
        if labels is not None and scores:
            for scored, outputs in zip(scores, (left, right), strict=True):
                scored.add(outputs, labels[start : start + rows])
        equal = _equal_answers(left, right, rows)
        if equal is not None:
            same.append(equal)

    parity = compare_engines(reference, candidate, samples.batches(size), names=names, each=watch)
    broken = _broken(parity)
    if broken:
        return Judgement(parity, None, None, used, False, broken, max_drop, min_sqnr_db)
    answers, equal = sum(each.size for each in same), sum(int(each.sum()) for each in same)
    agreement = proportion(used * equal / answers, used) if answers else None
    if not scores:
        return _without_labels(parity, agreement, used, max_drop, min_sqnr_db)
    drop = drop_of(*scores)
    bound = MAX_DROP if max_drop is None else max_drop
    passed, reason = _drop_verdict(drop, bound)
    return Judgement(parity, drop, agreement, used, passed, reason, bound, min_sqnr_db)


def _random(
    reference: Engine, candidate: Engine, sizes: Mapping[str, int], batch_size: int
) -> Iterable[dict[str, np.ndarray]]:
    """Seeded inputs at several batch sizes, none above what either engine takes."""
    limits = (engine.max_batch or batch_size for engine in (reference, candidate))
    most = min(batch_size, *limits)
    batches = dict.fromkeys(min(batch, most) for batch in RANDOM_BATCHES)
    for batch in batches:
        axes = {str(spec.shape[0]): batch for spec in reference.inputs if spec.batched}
        yield random_feeds(reference.inputs, {**sizes, **axes}, batch)


def _equal_answers(left: Arrays, right: Arrays, rows: int) -> np.ndarray | None:
    """Where both answer alike, boolean, for the first output that holds answers."""
    for name, values in left.items():
        others = right[name]
        if values.ndim == 0 or len(values) != rows:
            continue
        if values.dtype.kind in "biu":
            return np.asarray(values == others)
        if values.ndim in (2, 3) and values.shape[-1] >= 2:
            return np.asarray(values.argmax(-1) == others.argmax(-1))
    return None


def _broken(parity: Parity) -> str:
    row = next((row for row in parity.rows if not row.places_match), None)
    return f"{_where(row)}: {row.problem}" if row else ""


def _where(row: ParityRow) -> str:
    return f"output '{row.output}' at batch {row.batch}"


def _without_labels(
    parity: Parity,
    agreement: Interval | None,
    samples: int | None,
    max_drop: float | None,
    min_sqnr_db: float,
) -> Judgement:
    def verdict(passed: bool, reason: str) -> Judgement:
        return Judgement(parity, None, agreement, samples, passed, reason, max_drop, min_sqnr_db)

    floating = [row for row in parity.rows if row.floating]
    broken = _broken(parity)
    if broken:
        return verdict(False, broken)
    reasons = []
    if floating:
        worst = min(floating, key=lambda row: row.sqnr_db)
        text = f"{_where(worst)}: SQNR {worst.sqnr_db:.1f} dB is"
        if worst.sqnr_db < min_sqnr_db:
            return verdict(False, f"{text} below {min_sqnr_db:g} dB")
        reasons.append(f"{text} {min_sqnr_db:g} dB or more")
    elif samples is None:  # nothing but whole numbers, and no data that says how many may differ
        row = parity.worst
        passed = not row.problem
        return verdict(passed, f"{_where(row)}: {row.problem or 'all whole numbers are equal'}")
    else:
        max_drop = MAX_DROP if max_drop is None else max_drop
    if max_drop is not None:
        if agreement is None or samples is None:
            raise BadInput(
                "no output holds an answer per sample, so no drop can be judged",
                hint="give labelled samples and a metric, or no bound",
            )
        passed, reason = _agreement_verdict(agreement, samples, max_drop)
        if not passed:
            return verdict(False, reason)
        reasons.append(reason)
    return verdict(True, "; ".join(reasons))


def _agreement_verdict(agreement: Interval, n: int, max_drop: float) -> tuple[bool, str]:
    value, high = 1 - agreement.value, 1 - agreement.low
    text = f"up to {high * 100:.4g} % of the samples are answered differently"
    if high <= max_drop:
        return True, f"{text}, within {max_drop * 100:.4g} %"
    text += f", above {max_drop * 100:.4g} %"
    return False, text + _too_few(n, value, high, max_drop, samples_to_show_agreement(max_drop))


def _drop_verdict(drop: Drop, max_drop: float) -> tuple[bool, str]:
    def amount(value: float) -> str:
        return f"{value * 100:.4g} {drop.unit}" if drop.unit else f"{value:.4g}"

    text = f"the upper end of the drop, {amount(drop.drop.high)}, is"
    if drop.drop.high <= max_drop:
        return True, f"{text} within {amount(max_drop)}"
    value, high = drop.drop.value, drop.drop.high
    if drop.method == ADJUSTED_WALD:
        fewest = samples_to_show_no_drop(max_drop)
    else:  # its width comes from the spread that was seen: at how many would it be narrow enough?
        fewest = math.ceil(drop.n * ((high - value) / max_drop) ** 2)
    text += f" above {amount(max_drop)}"
    return False, text + _too_few(drop.n, value, high, max_drop, fewest)


def _too_few(n: int, value: float, high: float, bound: float, fewest: int) -> str:
    """What more samples could change. `fewest`: those that a drop of 0 would need.

    An interval's half width shrinks with the square root of the samples, roughly.
    """
    if value >= bound:
        return ""
    if n < fewest:
        return f"; {n} samples cannot show that even of no drop at all, {fewest} are needed"
    about = math.ceil(n * ((high - value) / (bound - value)) ** 2)
    return f"; what was seen is within: some {about} samples like these would show it"
