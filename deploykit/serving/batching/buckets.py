"""Let requests of different lengths share a batch: pad a dynamic axis to the next bucket.

A model without a mask may answer differently when its input is padded: `check` runs the engine
both ways and refuses a model whose outputs disagree.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product

import numpy as np

from deploykit.core.errors import BadInput, DeploykitError, DeviceLost
from deploykit.core.tensors import InputKey, TensorSpec, carrier
from deploykit.engines.data.samples import random_feeds
from deploykit.engines.engine import Arrays, Engine
from deploykit.serving.batching.queue import Pending, align

TOLERANCE = 1e-3  # relative to the largest value of the output
_CACHED = 4096
_CHECKED = 64  # combinations of lengths that are checked


class Buckets:
    """The buckets of one model, whose axis 0 is the batch. Raises BadInput.

    `lengths`: the bucket lengths of each axis. `pad`: the padding value of each input, default 0.
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        lengths: Mapping[str, Sequence[int]],
        pad: Mapping[str, float],
    ) -> None:
        self.lengths = {axis: tuple(sorted(set(found))) for axis, found in lengths.items()}
        self._name = name
        self._where: dict[str, tuple[str, int]] = {}  # axis -> an input that has it, and its index
        self._inputs: dict[str, dict[int, str]] = {}
        self.fill: dict[str, np.ndarray] = {}
        self._carried = tuple(
            TensorSpec(spec.name, carrier(spec.dtype), spec.shape) for spec in inputs
        )
        # rounds each bucketed axis up to its bucket; raises BadInput above the largest one
        self.key: Callable[[InputKey], InputKey] = lru_cache(_CACHED)(self._key)
        for spec in inputs:
            named = self._inputs[spec.name] = self._axes(spec)
            for number, axis in named.items():
                self._where.setdefault(axis, (spec.name, number))
            if named:
                self.fill[spec.name] = _fill(spec, pad.get(spec.name, 0))
        self._outputs = {spec.name: axes for spec in outputs if (axes := self._axes(spec))}
        for axis, found in self.lengths.items():
            if axis not in self._where:
                raise BadInput(f"model '{name}': no input has an axis '{axis}' besides the batch")
            if not found or found[0] < 1:
                raise BadInput(f"`buckets` {axis}: lengths are 1 or more, got {list(found)}")

    def _axes(self, spec: TensorSpec) -> dict[int, str]:
        return {
            number: axis
            for number, axis in enumerate(spec.shape)
            if number and isinstance(axis, str) and axis in self.lengths
        }

    def _key(self, key: InputKey) -> InputKey:
        return tuple((name, kind, self._bucket_shape(name, shape)) for name, kind, shape in key)

    def _bucket_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        longer = list(shape)
        for number, axis in self._inputs[name].items():
            length, lengths = shape[number - 1], self.lengths[axis]
            if length > lengths[-1]:
                raise BadInput(
                    f"input '{name}': axis {axis} is {length}, this server takes at most "
                    f"{lengths[-1]}",
                    hint="send shorter inputs, or start the server with a larger bucket",
                )
            if length:  # an empty axis is not padded: `check` cannot cover it
                longer[number - 1] = lengths[bisect_left(lengths, length)]
        return tuple(longer)

    def stack(self, batch: Sequence[Pending]) -> Arrays:
        """Join the rows of requests with equal keys, each padded to the key's lengths."""
        rows = sum([request.rows for request in batch])
        joined: dict[str, np.ndarray] = {}
        for name, _, shape in batch[0].key:
            arrays = [request.feeds[name] for request in batch]
            if all(array.shape[1:] == shape for array in arrays):
                joined[name] = align(arrays[0]) if len(arrays) == 1 else np.concatenate(arrays)
                continue
            padded = joined[name] = np.empty((rows, *shape), arrays[0].dtype)
            padded[...] = self.fill[name]
            start = 0
            for array in arrays:
                end = start + len(array)
                there = (slice(start, end), *map(slice, array.shape[1:]))
                padded[there] = array
                start = end
        return joined

    def cut(self, request: Pending, outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Crop each bucketed axis of the outputs to the length of the request's own inputs."""
        cropped = dict(outputs)
        for name, axes in self._outputs.items():
            parts = [slice(None)] * outputs[name].ndim
            for number, axis in axes.items():
                given, at = self._where[axis]
                parts[number] = slice(request.feeds[given].shape[at])
            cropped[name] = outputs[name][tuple(parts)]
        return cropped

    def sizes(self) -> list[dict[str, int]]:
        """Return every combination of buckets, shortest first."""
        return [
            dict(zip(self.lengths, chosen, strict=True))
            for chosen in product(*self.lengths.values())
        ]

    def check(self, engine: Engine, most_rows: int) -> None:
        """Run random inputs unpadded and padded; raise BadInput if the outputs differ.

        The padded ones run as one batch, as in production, so leakage between rows is found too.
        A length that the engine rejects unpadded is skipped, as long as another padded one works.
        """
        for batch in self._samples(most_rows):
            together = engine(self.stack(batch))
            padded = [each.key != _lengths_of(each.feeds) for each in batch]
            compared = not any(padded)
            for row, request in enumerate(batch):
                mine = {name: array[row : row + 1] for name, array in together.items()}
                try:
                    alone = engine(request.feeds)
                except DeviceLost:
                    raise
                except DeploykitError:
                    continue
                compared |= padded[row]
                for name, got in self.cut(request, mine).items():
                    want = alone[name]
                    where = f"model '{self._name}': output '{name}' at {self._lengths(request)}"
                    same = got.shape == want.shape
                    pair = got.reshape(1, -1), want.reshape(1, -1)
                    error = relative_errors(*pair)[0] if same else math.inf
                    if not error <= TOLERANCE:
                        raise BadInput(
                            f"{where} changes by {error:.2g} (relative) when its input is "
                            f"padded to the bucket; at most {TOLERANCE:g} is allowed",
                            hint="give it a mask, the right `pad` values, or serve it without "
                            "`buckets`",
                        )
            if not compared:
                raise BadInput(
                    f"model '{self._name}': no length below the bucket of "
                    f"{self._lengths(batch[-1])} runs, so the effect of padding cannot be checked"
                )

    def _samples(self, most_rows: int) -> Iterator[list[Pending]]:
        """Yield requests of one row, those of one bucket together, shortest first.

        The longest but one is padded too, and most likely to run unpadded.
        """
        lows = {axis: (0, *found[:-1]) for axis, found in self.lengths.items()}
        for seed, sizes in enumerate(self.sizes()[:_CHECKED]):
            batch = []
            for number in range(min(4, max(1, most_rows))):
                lengths = {}
                for axis, high in sizes.items():
                    low = lows[axis][self.lengths[axis].index(high)] + 1
                    lengths[axis] = (low, (low + high) // 2, max(low, high - 1), high)[number]
                feeds = random_feeds(self._carried, lengths, seed)
                key = self.key(_lengths_of(feeds))
                batch.append(Pending(feeds, 1, key, lambda _: None, 0, 0, 0))
            yield batch

    def _lengths(self, request: Pending) -> str:
        return ", ".join(
            f"{axis}={request.feeds[name].shape[at]}" for axis, (name, at) in self._where.items()
        )


def _lengths_of(feeds: Arrays) -> InputKey:
    return tuple((name, "", array.shape[1:]) for name, array in feeds.items())


def relative_errors(got_RK: np.ndarray, want_RK: np.ndarray, least: float = 1e-300) -> np.ndarray:
    """Return, per row, the largest difference over the largest value of `want`, or `least`.

    It is infinite where only one is finite; two NaN agree, as do two equal infinities. Values
    without a difference, such as strings, agree only if they are equal.
    """
    if want_RK.dtype.kind not in "fiub":
        return np.where((got_RK == want_RK).all(axis=1), 0.0, np.inf)
    got, want = got_RK.astype(np.float64), want_RK.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.abs(got - want)
        off[(got == want) | (np.isnan(got) & np.isnan(want))] = 0.0
        off[np.isnan(off)] = np.inf
        scale = np.where(np.isfinite(want), np.abs(want), 0.0).max(axis=1, initial=least)
        return np.asarray((off / scale[:, None]).max(axis=1, initial=0.0))


def _fill(spec: TensorSpec, value: float) -> np.ndarray:
    """Return `value` in the dtype of an input. Raises BadInput if it does not fit."""
    if spec.dtype == "string":
        raise BadInput(f"input '{spec.name}' holds strings, which cannot be padded to a bucket")
    with np.errstate(all="ignore"):
        filled = np.asarray(value).astype(carrier(spec.dtype))
    if spec.dtype[0] in "biu" and spec.dtype != "bfloat16" and float(filled) != value:
        raise BadInput(f"`pad` {spec.name}={value:g}: the input is {spec.dtype}")
    return filled
