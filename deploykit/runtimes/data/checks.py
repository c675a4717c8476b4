"""Look at data for what would make a calibration or an evaluation worse than it seems.

In: `Samples`. Out: warnings, and how many samples two sets share. Nothing here refuses data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from deploykit.core.tensors import TensorSpec
from deploykit.runtimes.data.samples import Samples

FEW = 100  # samples, below which a calibration rests on chance
_NORMALISED = 16.0  # pixels scaled to a standard deviation of 1 span some 5, those in 0..1 span 1


def check_calibration(samples: Samples, inputs: Sequence[TensorSpec]) -> tuple[str, ...]:
    """Warnings, one sentence each, of what makes a calibration worse than it looks.

    Few samples, many of them alike, pixels that were not normalised, a channel that never changes.
    What cannot calibrate anything (NaN, all samples the same) is refused where it is done.
    """
    count = len(samples)
    found = []
    if count < FEW:
        found.append(f"{count} samples are few: some hundred, like the real ones, serve best")
    alike = count - len(set(_digests(samples)))
    if alike * 10 > count:
        found.append(f"{alike} of {count} samples repeat another one")
    for spec in inputs:
        array = samples.inputs[spec.name]
        axis = _channel_axis(spec)
        if axis is None:
            continue
        others = tuple(n for n in range(array.ndim) if n != axis)
        low, high = array.min(others), array.max(others)
        if spec.dtype.startswith("float") and high.max() - low.min() > _NORMALISED:
            found.append(
                f"'{spec.name}' runs from {low.min():g} to {high.max():g}: its pixels do not look "
                "normalised; do the same as for training"
            )
        for channel in np.flatnonzero(low == high):
            found.append(f"channel {channel} of '{spec.name}' is {low[channel]:g} everywhere")
    return tuple(f"{samples.where}: {text}" for text in found)


def _channel_axis(spec: TensorSpec) -> int | None:
    """The axis of a picture's channels, 1 or 3 of them: the last of bytes, else the second."""
    if len(spec.shape) != 4:
        return None
    order = (3, 1) if spec.dtype == "uint8" else (1, 3)
    return next((axis for axis in order if spec.shape[axis] in (1, 3)), None)


def overlap(calib: Samples, test: Samples) -> int:
    """How many samples of `test` are in `calib` too, byte for byte.

    A model that was fitted to its own test data looks better than it is.
    """
    known = set(_digests(calib))
    return sum(digest in known for digest in _digests(test))


def _digests(samples: Samples) -> Iterator[bytes]:
    """A hash of each sample: all its inputs' bytes."""
    names = sorted(samples.inputs)
    for number in range(len(samples)):
        digest = hashlib.blake2b(digest_size=16)
        for name in names:
            digest.update(samples.inputs[name][number].tobytes())
        yield digest.digest()
