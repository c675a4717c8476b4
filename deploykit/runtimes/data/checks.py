"""Warn about data that makes a calibration or an evaluation look better than it is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from deploykit.core.errors import BadInput
from deploykit.core.tensors import TensorSpec
from deploykit.runtimes.data.samples import Samples

FEW = 100  # samples; fewer make a calibration depend on chance
_BLOCK = 64  # samples looked at in one go
_NORMALISED = 16.0  # pixels scaled to a standard deviation of 1 span some 5, those in 0..1 span 1


def check_calibration(samples: Samples, inputs: Sequence[TensorSpec]) -> tuple[str, ...]:
    """One warning each for few samples, duplicates, pixels not normalised, a constant channel.

    The calibration itself refuses data that cannot calibrate anything: NaN, all samples equal.
    """
    count = len(samples)
    found = []
    if count < FEW:
        found.append(f"only {count} samples: a few hundred real ones are better")
    repeated = count - len(set(_digests(samples)))
    if repeated * 10 > count:
        found.append(f"{repeated} of {count} samples are duplicates")
    for spec in inputs:
        array = samples.inputs[spec.name]
        axis = _channel_axis(spec)
        if axis is None:
            continue
        others = tuple(n for n in range(array.ndim) if n != axis)
        low, high = array.min(others), array.max(others)
        if spec.dtype.startswith("float") and high.max() - low.min() > _NORMALISED:
            found.append(
                f"'{spec.name}' ranges from {low.min():g} to {high.max():g}: its pixels look "
                "unnormalised; preprocess them as for training"
            )
        for channel in np.flatnonzero(low == high):
            found.append(f"channel {channel} of '{spec.name}' is {low[channel]:g} everywhere")
    return tuple(f"{samples.where}: {text}" for text in found)


def check_finite(samples: Samples) -> None:
    """Raise BadInput naming the first sample that holds NaN or infinity."""
    for name, array in samples.inputs.items():
        if array.dtype.kind != "f":
            continue
        for start in range(0, len(array), _BLOCK):
            block = array[start : start + _BLOCK]
            odd = ~np.isfinite(block.reshape(len(block), -1)).all(1)
            if odd.any():
                raise BadInput(
                    f"{samples.where}: input '{name}' of sample {start + int(odd.argmax())} holds "
                    "NaN or infinity, and so do the model's answers",
                    hint="leave such samples out, or fill the gaps as for training",
                )


def _channel_axis(spec: TensorSpec) -> int | None:
    """The axis of an image's 1 or 3 channels: for uint8 the last first, else the second first."""
    if len(spec.shape) != 4:
        return None
    order = (3, 1) if spec.dtype == "uint8" else (1, 3)
    return next((axis for axis in order if spec.shape[axis] in (1, 3)), None)


def overlap(calib: Samples, test: Samples) -> int:
    """How many samples of `test` are also in `calib`, byte for byte."""
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
