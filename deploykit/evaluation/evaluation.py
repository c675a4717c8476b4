"""Decide whether a candidate may replace its reference, in one pass over the data.

On labelled data the task's metric decides, by the upper end of the drop's interval; without labels
the outputs do.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from deploykit.core.errors import BadInput
from deploykit.core.evidence import Drop, Evaluation, Interval, Parity, ParityRow
from deploykit.engines.data.samples import Samples, check_finite
from deploykit.engines.engine import Arrays, Engine
from deploykit.evaluation.accuracy import Metric, same_answers
from deploykit.evaluation.feeds import Feeds, comparison_feeds, single_rows
from deploykit.evaluation.parity import BOXES, compare_engines
from deploykit.evaluation.statistics import pooled_share

MAX_DROP = 0.01  # one percentage point
# Noise with 3 % of the signal's energy. It catches what is broken (a wrong scale, a lost layer) and
# not what is merely coarse: only labelled data can show that. At 10 dB, EfficientNet-B0 with random
# weights passed while one sample in twelve kept its answer.
MIN_SQNR_DB = 15.0
_SMALL_SHARE = 1e-3
NOTHING_FOUND = f"is below {_SMALL_SHARE:g} everywhere on these inputs"
MIN_BOXES = 0.9  # share of the boxes that either found


def evaluate(
    reference: Engine,
    candidate: Engine,
    *,
    samples: Samples | None,
    metric: Metric | None = None,
    max_drop: float | None = None,
    names: tuple[str, str] = ("reference", "candidate"),
    batch_size: int = 32,
    random: Sequence[Feeds] = (),
    shares: Collection[str] = (),
) -> Evaluation:
    """Run both engines once over the samples and decide.

    NaN, or infinity on one side only, always fails; where the samples hold it, they are BadInput.
    On labelled data with a metric, the upper end of the drop's 95 % interval must be at most
    `max_drop`. Otherwise every floating output's SQNR must be at least 15 dB; and, if `max_drop` is
    given or all outputs are integers, the upper end of the share of samples with another answer at
    most `max_drop`. One batch of outputs is in memory at a time.

    Args:
        reference, candidate: the two engines.
        samples: None for random inputs. Samples that do not fill a fixed batch are left out.
        metric: scores the outputs against the samples' labels.
        max_drop: a fraction, or in the metric's own unit; 0.01 where None.
        names: what tables and errors call the two.
        batch_size: samples per call.
        random: inputs where there are no samples; by default those of `comparison_feeds`. Rows of
            the largest are compared one by one too: see `single_rows`.
        shares: outputs from 0 to 1. Where one is below 0.001 everywhere, as the map of a detector
            that finds nothing, its SQNR says nothing: others decide, and none but such fails.

    Raises:
        BadInput: the two cannot be compared, the metric does not fit, or `max_drop` is given and
            nothing can be measured against it.
    """
    if max_drop is not None and not (math.isfinite(max_drop) and max_drop > 0):
        raise BadInput(f"`max_drop` must be a number above 0, got {max_drop}")
    if samples is None:
        if max_drop is not None:
            raise BadInput(
                "`max_drop` needs samples",
                hint="give labelled samples (or unlabelled ones, for agreement), or no bound",
            )
        if not random:
            random, _ = comparison_feeds(reference, candidate, None, None, None, batch_size)
        random = [*single_rows(random, reference.inputs), *random]
        parity = compare_engines(reference, candidate, random, names=names, random=True)
        return _without_labels(parity, None, None, None, shares)
    size, used = samples.batching(batch_size, (*reference.inputs, *candidate.inputs))
    samples = samples.first(used)
    labels = samples.labels if metric is not None else None
    scores: tuple[list[np.ndarray], list[np.ndarray]] = [], []
    answers: list[np.ndarray] = []  # of each batch, as `same_answers` counts them

    def add(number: int, left: Arrays, right: Arrays) -> None:
        """Count the answers to batch `number`, and score them where there are labels."""
        rows = slice(number * size, min((number + 1) * size, used))
        if metric is not None and labels is not None:
            for found, outputs in zip(scores, (left, right), strict=True):
                found.append(metric.rate(outputs, labels[rows], samples.where))
        equal = same_answers(left, right, samples.rows(rows), rows.stop - rows.start)
        if equal is not None:
            answers.append(equal)

    parity = compare_engines(reference, candidate, samples.batches(size), names=names, each=add)
    agreement = None
    if _broken(parity):
        check_finite(samples)
    elif answers:
        agreement = pooled_share(*np.concatenate(answers).T)
    if metric is not None and labels is not None and not _broken(parity):
        before, after = map(np.concatenate, scores)
        drop = metric.drop(before, after, labels)
        bound = MAX_DROP if max_drop is None else max_drop
        passed, reason = _drop_verdict(drop, bound)
        return Evaluation(parity, drop, agreement, used, passed, reason, bound, MIN_SQNR_DB)
    return _without_labels(parity, agreement, used, max_drop, shares)


def _broken(parity: Parity) -> str:
    row = next((row for row in parity.rows if row.floating and row.problem), None)
    return f"{_where(row)}: {row.problem}" if row else ""


def _where(row: ParityRow) -> str:
    return f"output '{row.output}' at batch {row.batch}"


def _without_labels(
    parity: Parity,
    agreement: Interval | None,
    samples: int | None,
    max_drop: float | None,
    shares: Collection[str],
) -> Evaluation:
    def verdict(passed: bool, reason: str) -> Evaluation:
        return Evaluation(parity, None, agreement, samples, passed, reason, max_drop, MIN_SQNR_DB)

    if failed := _broken(parity) or _lost_boxes(parity):
        return verdict(False, failed)
    reasons = [*parity.warnings]
    every = [row for row in parity.rows if row.floating]
    low = {row.output for row in every if row.sqnr_db < MIN_SQNR_DB}
    large = {row.output for row in every if max(row.scale or 0.0, row.max_abs) >= _SMALL_SHARE}
    small = (low & set(shares)) - large
    floating = [row for row in every if row.output not in small] or every
    if small:
        where = ", ".join(sorted(small))
        reasons.append(f"'{where}' {NOTHING_FOUND}")
    if floating:
        worst = min(floating, key=lambda row: row.sqnr_db)
        text = f"{_where(worst)}: SQNR {worst.sqnr_db:.1f} dB is"
        if worst.sqnr_db < MIN_SQNR_DB:
            return verdict(False, "; ".join([f"{text} below {MIN_SQNR_DB:g} dB", *reasons]))
        reasons.append(f"{text} {MIN_SQNR_DB:g} dB or more")
    elif samples is None:  # only integers, and no data that shows how many may differ
        row = parity.worst
        passed = not row.problem
        return verdict(passed, f"{_where(row)}: {row.problem or 'all integers are equal'}")
    else:
        max_drop = MAX_DROP if max_drop is None else max_drop
    if max_drop is not None:
        if agreement is None or samples is None:
            raise BadInput(
                "`max_drop`: no output holds an answer per sample, so no drop can be measured",
                hint="give labelled samples and a metric, or no bound",
            )
        passed, reason = _agreement_verdict(agreement, samples, max_drop)
        if not passed:
            return verdict(False, reason)
        reasons.append(reason)
    return verdict(True, "; ".join(reasons))


def _lost_boxes(parity: Parity) -> str:
    for row in parity.rows:
        if row.answers == BOXES and (row.agreement or 0.0) < MIN_BOXES:
            share = f"{(row.agreement or 0.0) * 100:.4g} % of the boxes"
            return f"{_where(row)}: both found {share}, below {MIN_BOXES:.0%}"
    return ""


def _agreement_verdict(agreement: Interval, n: int, max_drop: float) -> tuple[bool, str]:
    value, high = 1 - agreement.value, 1 - agreement.low
    text = f"up to {high * 100:.4g} % of the samples are answered differently"
    if high <= max_drop:
        return True, f"{text}, within {max_drop * 100:.4g} %"
    text += f", above {max_drop * 100:.4g} %"
    return False, text + _more_samples(n, value, high, max_drop, value > 0)


def _drop_verdict(drop: Drop, max_drop: float) -> tuple[bool, str]:
    def amount(value: float) -> str:
        return f"{value * 100:.4g} {drop.unit}" if drop.unit else f"{value:.4g}"

    value, high = drop.drop.value, drop.drop.high
    text = f"the upper end of the drop, {amount(high)}, is"
    if high <= max_drop:
        return True, f"{text} within {amount(max_drop)}"
    text += f" above {amount(max_drop)}"
    return False, text + _more_samples(drop.n, value, high, max_drop, drop.lost + drop.gained > 0)


def _more_samples(n: int, value: float, high: float, bound: float, changed: bool) -> str:
    """Return how many samples would show it, where the measured value is within the bound.

    An interval's half width shrinks with the square root of the samples, roughly; where nothing
    changed, its end is in proportion to 1 / (samples + 2).
    """
    if value >= bound:
        return ""
    about = math.ceil((n + 2) * ((high - value) / (bound - value)) ** (2 if changed else 1))
    return f"; the measured value is within: about {about} samples like these would show it"
