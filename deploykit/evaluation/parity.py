"""Compare two engines on the same inputs, output by output.

The first engine is the reference: errors are relative to its values. Different names, dtypes or
shapes raise an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from deploykit.core.errors import BadInput
from deploykit.core.evidence import Parity, ParityRow
from deploykit.core.tensors import TensorSpec, batch_places
from deploykit.engines.engine import Arrays, Engine
from deploykit.engines.tasks import class_axis

MAX_ERROR = 1e-3
CLASSES, PIXELS, BOXES = "classes", "pixels", "boxes"  # `ParityRow.answers`
BLOCK = 1 << 20  # values that are converted to float64 at a time
REL_FLOOR = 1e-6  # below it a reference value counts as this large in max_rel


def compare_engines(
    a: Engine,
    b: Engine,
    feeds_list: Iterable[Mapping[str, np.ndarray]],
    *,
    names: tuple[str, str] = ("a", "b"),
    max_error: float = MAX_ERROR,
    each: Callable[[int, Arrays, Arrays], None] | None = None,
    random: bool = False,
) -> Parity:
    """Run both engines on each of the feeds and compare all outputs.

    Feeds of one batch size share their rows. `names` appear in the table and in errors. `each` gets
    the number of the feeds and the outputs of a and b, in the order of a's specs, until one is not
    finite. `random`: the feeds are made up, so that a size at which both are NaN or infinite at the
    same places (the deviation of one step) is left out where other sizes have an answer.

    Raises BadInput when inputs, outputs or their shapes differ, or when there is nothing to
    compare. An exceeded bound does not raise: `Parity.raise_if_over` does.
    """
    if not (math.isfinite(max_error) and max_error >= 0):  # NaN would pass anything
        raise BadInput(f"`max_error` must be 0 or more, got {max_error}")
    _check_same("input", a.inputs, b.inputs, names)
    _check_same("output", a.outputs, b.outputs, names)
    tallies: dict[tuple[str, int], Tally] = {}
    for number, feeds in enumerate(feeds_list):
        batch = _batch(a.inputs, feeds)
        values = a(feeds), b(feeds)
        left, right = ({spec.name: each[spec.name] for spec in a.outputs} for each in values)
        x, y, boxes = pair(left, right)
        for name in left:
            if x[name].dtype != y[name].dtype or x[name].shape != y[name].shape:
                found = (f"{each.dtype}{list(each.shape)}" for each in (x[name], y[name]))
                sides = ", ".join(map("{} from {}".format, found, names))
                raise BadInput(f"output '{name}' at batch {batch} is {sides}")
            axis = class_axis(name, x[name], feeds) if x[name] is left[name] else None
            images = [array.shape[:3] for array in feeds.values() if array.ndim == 4]
            mask = x[name].dtype.kind in "iu" and x[name].shape in images
            tally = tallies.setdefault((name, batch), Tally(x[name], mask=mask))
            tally.add(x[name], y[name], axis, boxes.get(name))
        if each is not None and not any(tally.not_finite for tally in tallies.values()):
            each(number, left, right)
    if not tallies:
        raise BadInput(f"{names[0]} and {names[1]}: no inputs to compare on")
    answered = {output for (output, _), tally in tallies.items() if not tally.not_finite}
    rows = tuple(
        tally.row(output, batch)
        for (output, batch), tally in tallies.items()
        if not (random and tally.places_match and tally.undefined and output in answered)
    )
    return Parity(names[0], names[1], rows, max_error)


def add_float32_errors(
    parity: Parity,
    reference: Engine,
    other: Callable[[Arrays], Mapping[str, np.ndarray]],
    feeds_list: Iterable[Arrays],
) -> Parity:
    """Return `parity` with float32's own errors: those of `reference` against `other`.

    `other`: the same computation in float64, or rounded in another order. More feeds only loosen
    the bound: those after which `parity` passes are not run.
    """
    found: dict[str, float] = {}
    for feeds in feeds_list:
        others, values, boxes = pair(other(feeds), reference(feeds))
        for name, array in values.items():
            if array.dtype.kind in "biuO" or array.shape != others[name].shape:
                continue
            tally = Tally(array)
            exact, rounded = (each[name].astype(np.float64) for each in (others, values))
            tally.add(exact, rounded, boxes=boxes.get(name))
            row = tally.row(name, 0)
            if not row.problem:
                found[name] = max(found.get(name, 0.0), row.error)
        rows = (replace(row, float32_error=found.get(row.output)) for row in parity.rows)
        parity = replace(parity, rows=tuple(rows))
        if parity.passed:
            break
    return parity


def in_other_batches(engine: Engine, feeds: Arrays) -> dict[str, np.ndarray]:
    """Return the outputs for `feeds`, computed row by row where the engine takes single rows.

    Another batch takes other kernels, which add in another order.
    """
    specs = (*engine.inputs, *engine.outputs)
    rows = _batch(engine.inputs, feeds)
    if rows < 2 or not all(spec.batched for spec in specs):
        return dict(engine(feeds))
    parts = [engine({n: a[row : row + 1] for n, a in feeds.items()}) for row in range(rows)]
    return {n: np.concatenate([part[n] for part in parts]) for n in parts[0]}


DRAWS_NUMBERS = "the model draws random numbers: two runs of it on the same inputs differ"
DRAW_NONE = "export it without: dropout in eval mode, noise as an input"


def draws_numbers(engine: Engine, feeds: Arrays) -> bool:
    """Return whether two runs of `engine` on the same inputs give different outputs."""
    first, second = ({n: a.copy() for n, a in engine(feeds).items()} for _ in range(2))
    nan = {name: array.dtype.kind in "fc" for name, array in first.items()}
    return not all(np.array_equal(first[n], second[n], equal_nan=nan[n]) for n in first)


def _check_same(
    kind: str, a: Sequence[TensorSpec], b: Sequence[TensorSpec], names: tuple[str, str]
) -> None:
    """Check that names and dtypes are equal and shapes fit, in any order; dynamic axes fit any.

    A file may declare an output's shape wrongly: each run compares what the outputs really have.
    """
    left, right = {spec.name: spec for spec in a}, {spec.name: spec for spec in b}
    for name in sorted(left.keys() ^ right.keys()):
        has, lacks = names if name in left else names[::-1]
        sides = zip(names, (a, b), strict=True)
        hint = "; ".join(f"{side}: {', '.join(map(str, specs))}" for side, specs in sides)
        raise BadInput(f"{has} has an {kind} '{name}', {lacks} has none", hint=hint)
    for name, spec in left.items():
        other, sizes = right[name], zip(spec.shape, right[name].shape, strict=False)
        differs = any(x != y for x, y in sizes if isinstance(x, int) and isinstance(y, int))
        differs |= len(spec.shape) != len(other.shape)
        if spec.dtype != other.dtype or (differs and kind == "input"):
            raise BadInput(f"{kind} '{name}' is {spec} in {names[0]}, {other} in {names[1]}")


def _batch(specs: Sequence[TensorSpec], feeds: Arrays) -> int:
    """Return the size of the batch: where an input has it, else of the first axis 0; else 1."""
    places = batch_places(specs) or {spec.name: 0 for spec in specs if spec.shape}
    sizes = (feeds[name].shape[at : at + 1] for name, at in places.items() if name in feeds)
    return int(next(filter(None, sizes), (1,))[0])


class Tally:
    """Adds up the differences of one output at one batch size, call by call.

    `mask`: the output is the class of each pixel; where scores are equal, either is right.
    """

    def __init__(self, like: np.ndarray, *, mask: bool = False) -> None:
        self.exact, self.mask = like.dtype.kind in "biuO", mask
        self.noun = "strings" if like.dtype.hasobject else "integers or booleans"
        self.values = self.compared = self.differing = self.undefined = 0
        self.rows = self.agreeing = 0
        self.max_abs = self.max_rel = self.scale = self.noise = self.signal = 0.0
        self.places_match = True
        self.answers, self.iou = "", 0.0
        self.shared = self.either = np.zeros(1, np.int64)  # pixels by class

    def add(
        self, a: np.ndarray, b: np.ndarray, axis: int | None = None, boxes: Matches | None = None
    ) -> None:
        """Add two arrays of one shape and dtype.

        `axis`: that of the classes, if there is one. `boxes`: how many of them both sides have.
        """
        if boxes is not None:
            matched, total = boxes.images.sum(0).tolist()
            self.answers, self.iou = BOXES, self.iou + boxes.iou
            self.rows, self.agreeing = self.rows + total, self.agreeing + matched
        self.values += a.size
        if a.size == 0:
            return
        if axis is not None:
            self.answers = PIXELS if a.ndim == 4 else CLASSES
            a, b = np.moveaxis(a, axis, -1), np.moveaxis(b, axis, -1)
        classes = 1 if axis is None else a.shape[-1]
        pairs, step = (a.reshape(-1, classes), b.reshape(-1, classes)), max(1, BLOCK // classes)
        for start in range(0, len(pairs[0]), step):
            self._add_rows(*(each[start : start + step] for each in pairs))

    def _add_rows(self, a: np.ndarray, b: np.ndarray) -> None:
        if self.exact:
            self.differing += int((a != b).sum())
        if a.dtype.hasobject:  # 0 and, where another string is, 1
            a, b = np.zeros(a.shape), a != b
        x, y = a.astype(np.float64), b.astype(np.float64)
        if x.shape[1] >= 2:
            self._add_answers(x.argmax(1), y.argmax(1), x.shape[1])
        both = np.isfinite(x) & np.isfinite(y)
        self.places_match &= np.array_equal(x[~both], y[~both], equal_nan=True)
        self.undefined += int((x[~both] != -np.inf).sum())  # -infinity masks
        x, y = x[both], y[both]
        self.compared += x.size
        if x.size == 0:
            return
        with np.errstate(over="ignore"):  # float64 outputs near its end: an infinite error is right
            off, size = np.abs(x - y), np.abs(x)
            self.max_abs = max(self.max_abs, float(off.max()))
            self.max_rel = max(self.max_rel, float((off / np.maximum(size, REL_FLOOR)).max()))
            self.scale = max(self.scale, float(size.max()))
            self.noise += float((off**2).sum())
            self.signal += float((size**2).sum())

    def _add_answers(self, left: np.ndarray, right: np.ndarray, classes: int) -> None:
        self.rows += len(left)
        self.agreeing += int((left == right).sum())
        if self.answers == PIXELS:
            each = (np.bincount(part, minlength=classes) for part in (left, right))
            shared = np.bincount(left[left == right], minlength=classes)
            self.shared, self.either = self.shared + shared, self.either + sum(each) - shared

    def row(self, output: str, batch: int) -> ParityRow:
        problem, error, boxes = self.problem, self.error, self.answers == BOXES
        there = self.either > 0
        mean_iou = (self.shared[there] / self.either[there]).mean() if there.any() else None
        if boxes:
            mean_iou = self.iou / self.agreeing if self.agreeing else None
        agreement = None
        if self.rows and (self.scale or boxes):
            agreement = self.agreeing / self.rows
            error = max(error, 1 - agreement) if boxes else error
        share = self.signal / self.noise if self.noise else math.inf
        return ParityRow(
            output=output,
            batch=batch,
            values=self.values + (self.rows - self.agreeing) * boxes,
            max_abs=self.max_abs,
            max_rel=self.max_rel,
            rms=math.sqrt(self.noise / self.compared) if self.compared else 0.0,
            # NaN where both squares passed the end of float64
            sqnr_db=10 * math.log10(share) if share > 0 else -math.inf,
            agreement=agreement,
            finite=self.compared == self.values,
            error=math.inf if problem else error,
            problem=problem,
            places_match=self.places_match,
            floating=not self.exact,
            scale=self.scale,
            answers=self.answers if agreement is not None else "",
            mean_iou=None if mean_iou is None else float(mean_iou),
        )

    @property
    def not_finite(self) -> bool:
        return bool(self.undefined) or not self.places_match

    @property
    def error(self) -> float:
        """The largest difference as a share of the scale; 0 where nothing differs."""
        if self.mask:
            return self.differing / max(1, self.values)
        return self.max_abs / (self.scale or self.max_abs) if self.max_abs else 0.0

    @property
    def problem(self) -> str:
        """The reason why no bound can be met; "" where there is none."""
        if not self.places_match:
            return "NaN or infinity in one of the two and not in the other"
        if self.differing and not self.mask:
            return f"{self.differing} of {self.values} {self.noun} differ"
        if self.values and not self.compared:
            return "no value is finite in either, so nothing could be compared"
        if self.undefined:
            return f"{self.undefined} of {self.values} values are NaN or infinity on both sides"
        return ""


# A detector gives as many boxes as it finds, sorted by score: a difference of 1e-6 swaps two rows
# or drops one. So each row is compared with its counterpart, which has the same label and an IoU of
# at least 0.5.

LEAST_IOU = 0.5
_LABELS = ("labels", "classes")
_MORE = ("masks", "keypoints", "keypoints_scores")  # these outputs have one row per box, too
_MOST = 4096  # boxes per image: the IoU of all pairs is in memory at once
_CLOSE = 1e-3  # share of the largest coordinate: boxes without an area this close are equal


class Matches(NamedTuple):
    """Paired boxes. `iou`: the sum over pairs. `images`: those matched and all, by image: [N,2].

    All are the boxes of both sides, pairs counted once.
    """

    iou: float
    images: np.ndarray


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
        mine, theirs = _rows(left, head), _rows(right, head)
        shapes = [(left[name].shape, right[name].shape) for name in head]
        alike = all(len(a) == len(b) and a[2:] == b[2:] for a, b in shapes)
        alike = alike and mine.shape[::2] == theirs.shape[::2]
        if not alike or not _are_boxes(mine, alone=len(head) == 1):
            continue
        one_image = len(shapes[0][0]) == 2
        pairs = [_pairs(*images) for images in zip(mine, theirs, strict=True)]
        for side, outputs in enumerate((left, right)):
            for name in head:
                parts = outputs[name][None] if one_image else outputs[name]
                taken = [part[each[side]] for part, each in zip(parts, pairs, strict=True)]
                outputs[name] = np.concatenate(taken)
        counts = np.array([(len(places), total) for places, _, _, total in pairs])
        found[head[0]] = Matches(sum(iou for _, _, iou, _ in pairs), counts)
    return left, right, found


def _heads(outputs: Arrays) -> Iterator[tuple[str, ...]]:
    """Yield the outputs that may be one head's: boxes, scores, labels and more; or all in one."""
    for name, array in outputs.items():
        if array.dtype.kind != "f" or array.ndim not in (2, 3) or array.shape[-2] > _MOST:
            continue
        stem = name.removesuffix("boxes")
        label = next((stem + each for each in _LABELS if stem + each in outputs), "")
        if name.endswith("boxes") and array.shape[-1] == 4 and label and f"{stem}scores" in outputs:
            more = [stem + each for each in _MORE if array.ndim == 2 and stem + each in outputs]
            more = [each for each in more if len(outputs[each]) == len(array)]
            yield (name, f"{stem}scores", label, *more)
        elif array.ndim == 3 and array.shape[-1] == 6:
            yield (name,)


def _rows(outputs: Arrays, head: Sequence[str]) -> np.ndarray:
    """Return corners, score and label of each box, float64 [N,M,6]; no image if they do not fit."""
    boxes, *others = (outputs[name] for name in head[:3])
    if any(each.shape != boxes.shape[:-1] or each.dtype.kind in "OU" for each in others):
        return np.zeros((0, 0, 6))
    rows = np.concatenate([boxes, *(each[..., None] for each in others)], -1, dtype=np.float64)
    return rows[None] if rows.ndim == 2 else rows


def _are_boxes(rows: np.ndarray, *, alone: bool) -> bool:
    """Return whether all rows are corners. `alone`: and a score and a class, some with an area."""
    boxes, scores, classes = rows[..., :4], rows[..., 4], rows[..., 5]
    if not len(rows) or not (np.isfinite(boxes).all() and (boxes[..., 2:] >= boxes[..., :2]).all()):
        return False
    shares = ((scores >= 0) & (scores <= 1)).all() and scores.any()
    numbers = ((classes >= 0) & (np.trunc(classes) == classes)).all()
    return not alone or bool(shares and numbers and _areas(boxes).any())


def _pairs(left: np.ndarray, right: np.ndarray) -> tuple[list[int], list[int], float, int]:
    """Return the places of an image's paired boxes on both sides, their IoU, and all boxes."""
    mine, theirs = _real(left), _real(right)
    iou = _iou(left[mine, :4], right[theirs, :4])
    iou[left[mine, None, 5] != right[theirs, 5]] = 0
    found: tuple[list[int], list[int]] = ([], [])
    shared = 0.0
    for row, place in enumerate(mine):
        if not len(theirs) or iou[row].max() < LEAST_IOU:
            continue
        best = np.flatnonzero(iou[row] >= iou[row].max() - _CLOSE)
        column = best[np.abs(right[theirs[best], 4] - left[place, 4]).argmin()]
        shared += float(iou[row, column])
        iou[:, column] = 0
        found[0].append(int(place))
        found[1].append(int(theirs[column]))
    return *found, shared, len(mine) + len(theirs) - len(found[0])


def _real(rows: np.ndarray) -> np.ndarray:
    """Return the indices of the boxes, best first, without the zero rows that pad a fixed size."""
    order = np.argsort(-rows[:, 4], kind="stable")
    return np.asarray(order[rows[order, :5].any(-1)])


def _areas(boxes: np.ndarray) -> np.ndarray:
    return np.asarray(np.maximum(boxes[..., 2:] - boxes[..., :2], 0).prod(-1))


def _iou(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Intersection over union [L,R] of boxes [L,4] and [R,4]; 1 where they are all but equal."""
    a, b = left[:, None], np.where(np.isfinite(right), right, 0)[None]  # 0 overlaps none much
    low, high = np.maximum(a[..., :2], b[..., :2]), np.minimum(a[..., 2:], b[..., 2:])
    shared = _areas(np.concatenate((low, high), -1))
    union = _areas(a) + _areas(b) - shared
    share = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    close = np.abs(a - b).max(-1) <= _CLOSE * np.abs(left).max(initial=0)
    return np.where(close, 1.0, share)
