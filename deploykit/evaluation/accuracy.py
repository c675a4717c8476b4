"""Score answers per sample, and decide whether a candidate may replace its reference.

On labelled data the task's metric decides, by the upper end of the drop's interval; without labels
the outputs do. Both engines are scored on the same samples, in one pass over the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from deploykit.core.errors import BadInput, DeploykitError, GateFailed, users_code
from deploykit.core.evidence import Drop, Evaluation, Interval, Parity, ParityRow
from deploykit.core.files import import_object
from deploykit.engines.data.samples import Samples, check_finite
from deploykit.engines.engine import Arrays, Engine
from deploykit.engines.tasks import class_axis
from deploykit.evaluation.feeds import Feeds, comparison_feeds, single_rows
from deploykit.evaluation.parity import BOXES, compare_engines, pair
from deploykit.evaluation.statistics import paired_drop, pooled_share, relative_rise

TOP1 = "top-1 accuracy"
_BLOCK = 4096  # samples at a time


def top1(values: np.ndarray, labels: np.ndarray, where: str) -> np.ndarray:
    """Return 1.0 where the largest of `values` (samples, classes) is the label, else 0.0.

    Integers and strings (samples,) are labels themselves, as of a model that ends in ArgMax.
    Labels are as `class_numbers` takes them. Returns float64 (samples,). Raises BadInput when they
    are not classes, or the values are not one per class, and GateFailed where one is NaN or
    infinity.
    """
    if values.ndim and values.size == len(values) == len(labels) and values.dtype.kind in "iubOU":
        answers = values.reshape(-1)
        if answers.dtype.kind in "OU" and labels.size == len(labels):
            return np.asarray(answers.astype(str) == labels.reshape(-1).astype(str), np.float64)
        classes = labels.shape[1] if labels.ndim == 2 else 0
        return np.asarray(answers == class_numbers(labels, classes, where), np.float64)
    if values.ndim != 2 or len(values) != len(labels) or values.shape[1] < 2:
        raise BadInput(
            f"{where}: the first output is {values.shape}, top-1 needs (samples, classes)",
            hint="`metric` pkg.mod:function or ./file.py:function scores other outputs",
        )
    labels = class_numbers(labels, values.shape[1], where)
    if int(labels.min()) < 0 or int(labels.max()) >= values.shape[1]:
        raise BadInput(
            f"{where}: labels run from {labels.min()} to {labels.max()}, "
            f"the model has {values.shape[1]} classes"
        )
    broken, right = 0, np.empty(len(values))
    for at in range(0, len(values), _BLOCK):  # `values` may be larger than the memory
        block = values[at : at + _BLOCK]
        broken += int((~np.isfinite(block) & (block != -np.inf)).any(1).sum())
        right[at : at + _BLOCK] = block.argmax(1) == labels[at : at + _BLOCK]
    if broken:
        raise GateFailed(f"{where}: the model's answer is NaN or infinity for {broken} samples")
    return right


def class_numbers(labels: np.ndarray, classes: int, where: str) -> np.ndarray:
    """Return class numbers of any type or one-hot rows as integers (samples,).

    Raises BadInput for strings, fractions, and rows that are not one-hot.
    """
    found = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    rows = found.ndim == 2 and found.shape[1] == classes and found.dtype.kind in "biuf"
    if rows and np.isin(found, (0, 1)).all() and (found.sum(1) == 1).all():
        return np.asarray(found.argmax(1))
    if found.ndim == 1 and found.dtype.kind in "bf" and bool((np.trunc(found) == found).all()):
        found = found.astype(np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise BadInput(
            f"{where}: labels are {labels.dtype}{list(labels.shape)}",
            hint="top-1 needs a class number for each sample, from 0 in the order of the model's "
            f"output, or a one-hot row of {classes}",
        )
    return found


def top1_scores(engine: Engine, samples: Samples, batch_size: int = 64) -> np.ndarray:
    """`top1` of an engine's first output over labelled samples. Raises BadInput."""
    if samples.labels is None:
        raise BadInput(f"{samples.where}: no array 'labels'")
    size, used = samples.batching(batch_size, engine.inputs)
    name, batches = engine.outputs[0].name, samples.first(used).batches(size)
    labels = (samples.labels[at : at + size] for at in range(0, used, size))
    pairs = zip(batches, labels, strict=True)
    return np.concatenate([top1(engine(x)[name], right, samples.where) for x, right in pairs])


IGNORED = -100  # the label of a token that does not count, as in torch's cross_entropy
_LOGITS = 1 << 20  # logits converted to float64 at a time


@dataclass(frozen=True)
class Metric:
    """A function that scores each sample, and the unit in which a drop is given.

    `score`: outputs by name, in the model's order, and the labels of the same samples -> float64
    (samples,), higher is better. `unit`: "pp" for shares, "%" for log-likelihoods (the drop is
    perplexity's relative rise), "" for the score's own. `weigh`: labels -> (samples,), how much
    each sample counts; for log-likelihoods alone.
    """

    name: str
    unit: str
    score: Callable[[Arrays, np.ndarray], np.ndarray]
    weigh: Callable[[np.ndarray], np.ndarray] | None = None

    def rate(self, outputs: Arrays, labels: np.ndarray, where: str) -> np.ndarray:
        """Return the scores, (samples,). Raises BadInput naming the data, `where`."""
        labels = labels.view()
        labels.flags.writeable = False  # the other engine is scored on the same labels
        try:
            return self.score(outputs, labels)
        except BadInput as exc:
            raise BadInput(f"{where}: {exc.message}", hint=exc.hint) from exc

    def drop(self, reference: np.ndarray, candidate: np.ndarray, labels: np.ndarray) -> Drop:
        """Return how much worse the candidate's scores are, with an interval. Raises BadInput."""
        if self.weigh is not None:
            return relative_rise(reference, candidate, self.weigh(labels), self.name)
        return paired_drop(reference, candidate, self.name, unit=self.unit)


def find_metric(name: str) -> Metric:
    """Find "top1", "perplexity", or a user's `pkg.mod:function` or `./file.py:function`.

    The function takes (outputs, labels) as `Metric.score` does. Importing it runs its code. Raises
    NotFound, BadInput.
    """
    if name in METRICS:
        return METRICS[name]
    if ":" not in name:
        raise BadInput(
            f"'{name}' is not a metric",
            hint=f"one of: {', '.join(METRICS)}; or your own, as pkg.mod:function or "
            "./file.py:function",
        )
    function = import_object(name)
    if not callable(function):
        raise BadInput(f"{name}: is a {type(function).__name__}, not a function")

    def score(outputs: Arrays, labels: np.ndarray) -> np.ndarray:
        with users_code(f"metric {name}: failed"):
            try:
                found = np.asarray(function(outputs, labels))
            except DeploykitError as exc:  # `users_code` lets it pass
                exc.message = f"metric {name}: failed: {exc.message}"
                raise
        if found.dtype.kind not in "biuf" or found.shape != (len(labels),):
            raise BadInput(
                f"metric {name}: returned {found.dtype}{list(found.shape)}",
                hint=f"one number for each of the {len(labels)} samples of the batch is needed",
            )
        if not bool(np.isfinite(found).all()):
            raise BadInput(f"metric {name}: returned NaN or infinity for a sample")
        return found.astype(np.float64)

    return Metric(name, "", score)


def log_likelihood(outputs: Arrays, labels: np.ndarray) -> np.ndarray:
    """Return the mean log-likelihood of each sample's labels, in nats per token.

    The first output: logits, float (samples, T, vocabulary) or (samples, vocabulary). `labels`:
    integers, (samples, T) or (samples,), each the token that the logits at its place predict;
    -100 is left out, and a sample without any other label scores 0 (its weight is 0). Returns
    float64 (samples,). Raises BadInput.
    """
    logits = next(iter(outputs.values()))
    if labels.dtype.kind not in "iu" or logits.dtype.kind in "biuO":
        raise BadInput(
            f"{PERPLEXITY}: needs logits and integer labels, got {logits.dtype} and {labels.dtype}"
        )
    if logits.ndim not in (2, 3) or logits.shape[:-1] != labels.shape or not logits.shape[-1]:
        raise BadInput(
            f"{PERPLEXITY}: labels of shape {labels.shape} need a first output of "
            f"{(*labels.shape, 'vocabulary')}, it is {logits.shape}"
        )
    vocabulary = logits.shape[-1]
    flat = labels.reshape(-1)
    counted = np.flatnonzero(flat != IGNORED)
    used = flat[counted]
    if used.size and (int(used.min()) < 0 or int(used.max()) >= vocabulary):
        raise BadInput(
            f"{PERPLEXITY}: labels run from {used.min()} to {used.max()}, the vocabulary has "
            f"{vocabulary} tokens",
            hint=f"{IGNORED} is the label of a token that does not count",
        )
    rows = logits.reshape(-1, vocabulary)
    found = np.zeros(flat.shape)
    step = max(1, _LOGITS // vocabulary)
    for start in range(0, len(counted), step):
        places = counted[start : start + step]
        block = rows[places].astype(np.float64)
        with np.errstate(invalid="ignore"):  # infinite logits give NaN, which is refused later
            block -= block.max(1, keepdims=True)
            chosen = block[np.arange(len(places)), flat[places].astype(np.intp)]
            found[places] = chosen - np.log(np.exp(block).sum(1))
    sums = found.reshape(len(labels), -1).sum(1)
    return np.asarray(sums / np.maximum(tokens(labels), 1.0))


def tokens(labels: np.ndarray) -> np.ndarray:
    """Return the number of labels that count in each sample; float64 (samples,)."""
    return np.asarray((labels != IGNORED).reshape(len(labels), -1).sum(1, dtype=np.float64))


PERPLEXITY = "perplexity"
METRICS = {
    "top1": Metric(
        TOP1, "pp", lambda outputs, labels: top1(next(iter(outputs.values())), labels, TOP1)
    ),
    PERPLEXITY: Metric(PERPLEXITY, "%", log_likelihood, tokens),
}


MAX_DROP = 0.01  # one percentage point
# Noise with 3 % of the signal's energy. It catches what is broken (a wrong scale, a lost layer) and
# not what is merely coarse: only labelled data can show that. At 10 dB, EfficientNet-B0 with random
# weights passed while one sample in twelve kept its answer.
MIN_SQNR_DB = 15.0
_SMALL_SHARE = 1e-3
NOTHING_FOUND = f"is below {_SMALL_SHARE:g} everywhere on these inputs"
MORE_SAMPLES = "the measured value is within"  # more of them would show it
MIN_BOXES = 0.9  # share of the boxes that either found


@dataclass(frozen=True)
class Criterion:
    """The metric and the bounds by which a candidate passes.

    `metric`: scores the outputs against the samples' labels. `max_drop`: a fraction, or in the
    metric's own unit; 0.01 where None. `shares`: outputs from 0 to 1. Where one is below 0.001
    everywhere, as the map of a detector that finds nothing, its SQNR says nothing: others decide,
    and none but such fails.
    """

    metric: Metric | None = None
    max_drop: float | None = None
    shares: Collection[str] = ()


def evaluate(
    reference: Engine,
    candidate: Engine,
    samples: Samples | None,
    criterion: Criterion = Criterion(),
    *,
    names: tuple[str, str] = ("reference", "candidate"),
    batch_size: int = 32,
    random: Sequence[Feeds] = (),
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
        criterion: the metric and the bound.
        names: what tables and errors call the two.
        batch_size: samples per call.
        random: inputs where there are no samples; by default those of `comparison_feeds`. Where
            they fail, rows of the largest are compared one by one too: see `single_rows`.

    Raises:
        BadInput: the two cannot be compared, the metric does not fit, or `max_drop` is given and
            nothing can be measured against it.
    """
    metric, max_drop = criterion.metric, criterion.max_drop
    if max_drop is not None and not (math.isfinite(max_drop) and max_drop > 0):
        raise BadInput(f"`max_drop` must be a number above 0, got {max_drop}")
    drop, agreement, used = None, None, None
    if samples is None:
        if max_drop is not None:
            raise BadInput(
                "`max_drop` needs samples",
                hint="give labelled samples (or unlabelled ones, for agreement), or no bound",
            )
        if not random:
            random, _ = comparison_feeds(reference, candidate, None, None, None, batch_size)
        parity = compare_engines(reference, candidate, random, names=names, random=True)
        passed, _, _ = _decide(parity, None, None, None, criterion)
        if not passed and (single := single_rows(random, reference.inputs)):
            random = [*single, *random]
            parity = compare_engines(reference, candidate, random, names=names, random=True)
    else:
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
            answers.extend([] if equal is None else [equal])

        parity = compare_engines(reference, candidate, samples.batches(size), names=names, each=add)
        if _broken(parity):
            check_finite(samples)
        else:
            agreement = pooled_share(*np.concatenate(answers).T) if answers else None
            if metric is not None and labels is not None:
                before, after = map(np.concatenate, scores)
                drop = metric.drop(before, after, labels)
    passed, reason, bound = _decide(parity, drop, agreement, used, criterion)
    return Evaluation(parity, drop, agreement, used, passed, reason, bound, MIN_SQNR_DB)


def _decide(
    parity: Parity,
    drop: Drop | None,
    agreement: Interval | None,
    samples: int | None,
    criterion: Criterion,
) -> tuple[bool, str, float | None]:
    """Return whether the candidate passes, the reason, and the bound on the drop that applied."""
    bound, reasons = criterion.max_drop, [*parity.warnings]
    if failed := _broken(parity):
        return False, failed, bound
    if drop is not None:
        bound = MAX_DROP if bound is None else bound
        text, changed = "the upper end of the drop, {}, is", drop.lost + drop.gained > 0
        passed, reason = _bounded(text, drop.drop, bound, drop.unit, drop.n, changed=changed)
        return passed, reason, bound
    for row in parity.rows:
        if row.answers == BOXES and (found := row.agreement or 0.0) < MIN_BOXES:
            share = f"{found * 100:.4g} % of the boxes"
            return False, f"{_where(row)}: both found {share}, below {MIN_BOXES:.0%}", bound
    floating = [row for row in parity.rows if row.floating]
    low = {row.output for row in floating if row.sqnr_db < MIN_SQNR_DB}
    large = {row.output for row in floating if max(row.scale or 0.0, row.max_abs) >= _SMALL_SHARE}
    if small := (low & set(criterion.shares)) - large:
        reasons.append(f"'{', '.join(sorted(small))}' {NOTHING_FOUND}")
        floating = [row for row in floating if row.output not in small] or floating
    if floating:
        worst = min(floating, key=lambda row: row.sqnr_db)
        text = f"{_where(worst)}: SQNR {worst.sqnr_db:.1f} dB is"
        if worst.sqnr_db < MIN_SQNR_DB:
            return False, "; ".join([f"{text} below {MIN_SQNR_DB:g} dB", *reasons]), bound
        reasons.append(f"{text} {MIN_SQNR_DB:g} dB or more")
    elif samples is None:  # only integers, and no data that shows how many may differ
        row = parity.worst
        reason = f"{_where(row)}: {row.problem or 'all integers are equal'}"
        return not row.problem, reason, bound
    else:
        bound = MAX_DROP if bound is None else bound
    if bound is not None:
        if agreement is None or samples is None:
            raise BadInput(
                "`max_drop`: no output holds an answer per sample, so no drop can be measured",
                hint="give labelled samples and a metric, or no bound",
            )
        text = "up to {} of the samples are answered differently,"
        lost = Interval(1 - agreement.value, 1 - agreement.high, 1 - agreement.low)
        passed, reason = _bounded(text, lost, bound, "%", samples, changed=lost.value > 0)
        reasons = [*reasons, reason] if passed else [reason]
        return passed, "; ".join(reasons), bound
    return True, "; ".join(reasons), bound


def _broken(parity: Parity) -> str:
    row = next((row for row in parity.rows if row.floating and row.problem), None)
    return f"{_where(row)}: {row.problem}" if row else ""


def _where(row: ParityRow) -> str:
    return f"output '{row.output}' at batch {row.batch}"


def _bounded(
    text: str, drop: Interval, bound: float, unit: str, n: int, *, changed: bool
) -> tuple[bool, str]:
    """Return whether the upper end of `drop`, of `n` samples, is within `bound`, and the reason.

    `text`: what the reason says of that end. `changed`: some sample changed. Where the measured
    value is within, the reason says how many samples would show it: an interval's half width
    shrinks with the square root of the samples, roughly; where nothing changed, its end is in
    proportion to 1 / (samples + 2).
    """

    def amount(value: float) -> str:
        return f"{value * 100:.4g} {unit}" if unit else f"{value:.4g}"

    passed = drop.high <= bound
    text = f"{text.format(amount(drop.high))} {'within' if passed else 'above'} {amount(bound)}"
    if passed or drop.value >= bound:
        return passed, text
    times = (drop.high - drop.value) / (bound - drop.value)
    about = math.ceil((n + 2) * times ** (2 if changed else 1))
    return False, f"{text}; {MORE_SAMPLES}: about {about} samples like these would show it"


def same_answers(left: Arrays, right: Arrays, feeds: Arrays, rows: int) -> np.ndarray | None:
    """Return for each sample how many of its answers are equal, and how many there are: [N,2].

    Answers are boxes, else the classes or integers of the first output that has some. Boxes without
    an axis of images are those of one sample. None where no output has answers.
    """
    if boxes := pair(left, right)[2].values():
        return np.asarray(sum(each.images for each in boxes))
    for name, values in left.items():
        others = right[name]
        if values.ndim == 0 or len(values) != rows or not (values.any() or others.any()):
            continue
        axis = class_axis(name, values, feeds)
        if axis is not None:
            values, others = values.argmax(axis), others.argmax(axis)
        if values.dtype.kind in "biuO":
            equal = np.asarray(values == others).reshape(rows, -1)
            return np.stack([equal.sum(1), np.full(rows, equal.shape[1])], 1)
    return None
