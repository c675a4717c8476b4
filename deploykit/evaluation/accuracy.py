"""Top-1 accuracy: per sample 1.0 where the largest value of the first output is the label."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deploykit.core.errors import BadInput, GateFailed, first_line
from deploykit.core.evidence import Drop
from deploykit.core.files import import_object
from deploykit.engines.data.samples import Samples
from deploykit.engines.engine import Arrays, Engine
from deploykit.engines.tasks import class_axis
from deploykit.evaluation.statistics import paired_drop, relative_rise

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
    name, scores = engine.outputs[0].name, []
    for number, feeds in enumerate(samples.first(used).batches(size)):
        labels = samples.labels[number * size : number * size + size]
        scores.append(top1(engine(feeds)[name], labels, samples.where))
    return np.concatenate(scores)


# Scores are per sample so that two engines can be compared on the same samples. A user's own metric
# is a function of the same kind.

IGNORED = -100  # the label of a token that does not count, as in torch's cross_entropy
_BLOCK_METRICS = 1 << 20  # logits converted to float64 at a time


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
    return Metric(name, "", lambda outputs, labels: _user_scores(name, function, outputs, labels))


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
    step = max(1, _BLOCK_METRICS // vocabulary)
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


def _user_scores(
    name: str, function: Callable[..., object], outputs: Arrays, labels: np.ndarray
) -> np.ndarray:
    """Call the user's function and check its scores; errors name the metric."""
    try:
        found = np.asarray(function(outputs, labels))
    except (Exception, SystemExit) as exc:  # the user's own code may raise anything
        raise BadInput(f"metric {name}: failed: {type(exc).__name__}: {first_line(exc)}") from exc
    if found.dtype.kind not in "biuf" or found.shape != (len(labels),):
        raise BadInput(
            f"metric {name}: returned {found.dtype}{list(found.shape)}",
            hint=f"one number for each of the {len(labels)} samples of the batch is needed",
        )
    scores = found.astype(np.float64)
    if not bool(np.isfinite(scores).all()):
        raise BadInput(f"metric {name}: returned NaN or infinity for a sample")
    return scores


PERPLEXITY = "perplexity"
METRICS = {
    "top1": Metric(
        TOP1, "pp", lambda outputs, labels: top1(next(iter(outputs.values())), labels, TOP1)
    ),
    PERPLEXITY: Metric(PERPLEXITY, "%", log_likelihood, tokens),
}


# A detector gives as many boxes as it finds, sorted by score: a difference of 1e-6 swaps two rows
# or drops one. So each row is compared with its counterpart, which has the same label and an IoU of
# at least 0.5.

LEAST_IOU = 0.5
_LABELS = ("labels", "classes")
_MORE = ("masks", "keypoints", "keypoints_scores")  # these outputs have one row per box, too
_MOST = 4096  # boxes per image: the IoU of all pairs is in memory at once
_CLOSE = 1e-3  # share of the largest coordinate: boxes without an area this close are equal


@dataclass(frozen=True)
class Matches:
    """Paired boxes. `iou`: the sum over pairs. `images`: of each image, those matched and all.

    All are the boxes of both sides, pairs counted once.
    """

    iou: float
    images: tuple[tuple[int, int], ...]

    @property
    def matched(self) -> int:
        return sum(matched for matched, _ in self.images)

    @property
    def total(self) -> int:
        return sum(total for _, total in self.images)


def pair(left: Arrays, right: Arrays) -> tuple[Arrays, Arrays, Mapping[str, Matches]]:
    """Return both with only the boxes that both have, in the order of `left`.

    These outputs of `left` are recognised: [M,4] or [N,M,4] named "...boxes" with "...scores" and
    "...labels" or "...classes" [M] or [N,M] (and torchvision's masks and keypoints); and [N,M,6]
    that can only be corners, a score and a class. Others stay as they are. The `Matches` are by the
    name of the output that holds the boxes.
    """
    found: dict[str, Matches] = {}
    left, right = dict(left), dict(right)
    for head in list(_heads(left)):
        if any(left[name].shape[2:] != right[name].shape[2:] for name in head):
            continue
        mine, theirs = _rows(left, head), _rows(right, head)
        if mine[0].ndim != theirs[0].ndim or mine[0].shape[:-2] != theirs[0].shape[:-2]:
            continue
        if single := mine[0].ndim == 2:
            mine, theirs = ([array[None] for array in side] for side in (mine, theirs))
        images = range(len(mine[0]))
        pairs = [_pairs([a[n] for a in mine], [a[n] for a in theirs]) for n in images]
        for name in head:
            for side, outputs in enumerate((left, right)):
                parts = [outputs[name]] if single else outputs[name]
                taken = [part[each[side]] for part, each in zip(parts, pairs, strict=True)]
                outputs[name] = np.concatenate(taken)
        iou, counts = sum(each[2] for each in pairs), [(len(each[0]), each[3]) for each in pairs]
        found[head[0]] = Matches(iou, tuple(counts))
    return left, right, found


def _heads(outputs: Arrays) -> Iterator[tuple[str, ...]]:
    """Yield the outputs of each head: boxes, scores, labels and more; or the one that holds all."""
    for name, array in outputs.items():
        if array.dtype.kind != "f" or array.ndim not in (2, 3) or array.shape[-2] > _MOST:
            continue
        if name.endswith("boxes") and array.shape[-1] == 4:
            stem = name.removesuffix("boxes")
            label = next((stem + each for each in _LABELS if stem + each in outputs), "")
            rows = [outputs[each] for each in (stem + "scores", label) if each in outputs]
            fits = len(rows) == 2 and all(each.shape == array.shape[:-1] for each in rows)
            if fits and _corners(array):
                more = [stem + each for each in _MORE if array.ndim == 2 and stem + each in outputs]
                more = [each for each in more if outputs[each].shape[:1] == array.shape[:1]]
                yield (name, stem + "scores", label, *more)
        elif array.ndim == 3 and array.shape[-1] == 6 and _only_boxes(array):
            yield (name,)


def _rows(outputs: Arrays, head: Sequence[str]) -> Sequence[np.ndarray]:
    """Return corners [..., M, 4], scores [..., M] and labels [..., M]."""
    if len(head) == 1:
        rows = outputs[head[0]]
        return rows[..., :4], rows[..., 4], rows[..., 5]
    return [outputs[name] for name in head[:3]]


def _corners(boxes: np.ndarray) -> bool:
    finite = bool(np.isfinite(boxes).all())
    return finite and bool((boxes[..., 2:] >= boxes[..., :2]).all())


def _only_boxes(rows: np.ndarray) -> bool:
    """Return whether all rows are corners, a score and a class, and some have an area."""
    scores, classes = rows[..., 4], rows[..., 5]
    shares = bool(((scores >= 0) & (scores <= 1)).all() and scores.any())
    numbers = bool(((classes >= 0) & (np.trunc(classes) == classes)).all())
    return shares and numbers and _corners(rows[..., :4]) and bool(_areas(rows[..., :4]).any())


def _pairs(
    left: Sequence[np.ndarray], right: Sequence[np.ndarray]
) -> tuple[list[int], list[int], float, int]:
    """Return the places of an image's paired boxes on both sides, their IoU, and all boxes."""
    (boxes, scores, labels), (others, their_scores, their_labels) = left, right
    mine, theirs = _real(boxes, scores), _real(others, their_scores)
    iou = _iou(boxes[mine], others[theirs])
    iou[labels[mine][:, None] != their_labels[theirs]] = 0
    found: tuple[list[int], list[int]] = ([], [])
    shared = 0.0
    for row, place in enumerate(mine):
        if not len(theirs) or iou[row].max() < LEAST_IOU:
            continue
        best = np.flatnonzero(iou[row] >= iou[row].max() - _CLOSE)
        gaps = np.abs(their_scores[theirs[best]].astype(np.float64) - float(scores[place]))
        column = best[gaps.argmin()]
        shared += float(iou[row, column])
        iou[:, column] = 0
        found[0].append(int(place))
        found[1].append(int(theirs[column]))
    return *found, shared, len(mine) + len(theirs) - len(found[0])


def _real(boxes: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Return the indices of the boxes, best first, without the zero rows that pad a fixed size."""
    order = np.argsort(-scores.astype(np.float64), kind="stable")
    return np.asarray(order[((scores != 0) | boxes.any(-1))[order]])


def _areas(boxes: np.ndarray) -> np.ndarray:
    sides = np.maximum(boxes[..., 2:] - boxes[..., :2], 0)
    return np.asarray(sides[..., 0] * sides[..., 1])


def _iou(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Intersection over union [L,R] of boxes [L,4] and [R,4]; 1 where they are all but equal."""
    right = np.where(np.isfinite(right), right, 0)  # then it overlaps no box of `left` much
    a, b = left.astype(np.float64)[:, None], right.astype(np.float64)[None]
    low, high = np.maximum(a[..., :2], b[..., :2]), np.minimum(a[..., 2:], b[..., 2:])
    shared = _areas(np.concatenate((low, high), -1))
    union = _areas(a) + _areas(b) - shared
    share = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    close = np.abs(a - b).max(-1) <= _CLOSE * np.abs(left).max(initial=0)
    return np.where(close, 1.0, share)


def same_answers(left: Arrays, right: Arrays, feeds: Arrays, rows: int) -> np.ndarray | None:
    """Return for each sample how many of its answers are equal, and how many there are: [N,2].

    Answers are boxes, else the classes or integers of the first output that has some. Boxes without
    an axis of images are those of one sample. None where no output has answers.
    """
    if boxes := pair(left, right)[2].values():
        return np.asarray(np.sum([each.images for each in boxes], axis=0))
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
