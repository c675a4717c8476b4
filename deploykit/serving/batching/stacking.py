"""Join requests along axis 0 into one input, and give each request its own rows of the outputs.

Outputs are checked against the engine's declaration first: no request gets another's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from deploykit.core.errors import DeploykitError
from deploykit.core.tensors import TensorSpec, carrier
from deploykit.runtimes.engine import Arrays
from deploykit.serving.batching.policy import Pending

_LARGE_BYTES = 64 << 10  # of an output

Stack = Callable[[Sequence[Pending]], Arrays]
Cut = Callable[[Pending, dict[str, np.ndarray]], dict[str, np.ndarray]]


class EngineFailed(DeploykitError):  # noqa: N818 - named as its siblings in core/errors.py
    """The engine raised, or returned other outputs than declared; the log has the details."""


def stack(batch: Sequence[Pending]) -> Arrays:
    """The requests' rows along axis 0, in order; one request's arrays are copied to align them."""
    if len(batch) == 1:
        return {name: align(array) for name, array in batch[0].feeds.items()}
    names = batch[0].feeds
    return {name: np.concatenate([request.feeds[name] for request in batch]) for name in names}


def align(array: np.ndarray) -> np.ndarray:
    """The array as native libraries need it: views of received bytes may begin anywhere."""
    return array if array.flags.aligned else array.copy()


class Splitter:
    """Checks and splits the outputs of one engine. `joined`: axis 0 of every output is the batch.

    `cut` removes the padding of a request's outputs; None without buckets.
    """

    def __init__(
        self, outputs: Sequence[TensorSpec], *, joined: bool, cut: Cut | None = None
    ) -> None:
        self._declared = tuple(
            _Declared(spec.name, np.dtype(carrier(spec.dtype)), spec.shape) for spec in outputs
        )
        self._joined = joined
        self._cut = cut

    def __call__(self, batch: Sequence[Pending], outputs: Mapping[str, np.ndarray]) -> None:
        """Set each request's `outputs`. Raises EngineFailed, then having set none."""
        self.check(outputs, sum([request.rows for request in batch]))
        if len(batch) == 1:
            batch[0].outputs = dict(outputs)
        else:
            start = 0
            arrays = [(declared.name, outputs[declared.name]) for declared in self._declared]
            for request in batch:
                end = start + request.rows
                request.outputs = {name: array[start:end] for name, array in arrays}
                start = end
        if self._cut is not None:
            for request in batch:
                request.outputs = self._cut(request, request.outputs)
        if sum([array.nbytes for array in outputs.values()]) > _LARGE_BYTES:
            for request in batch:
                _own_large(request.outputs)

    def check(self, outputs: Mapping[str, np.ndarray], rows: int) -> None:
        """Raise EngineFailed unless these can be the outputs of `rows` rows."""
        for declared in self._declared:
            array = outputs.get(declared.name)
            if array is None or array.dtype != declared.dtype:
                got = "nothing" if array is None else array.dtype.name
                raise EngineFailed(
                    f"the engine returned {got} for output '{declared.name}' ({declared.dtype})"
                )
            shape = array.shape
            if self._joined and (not shape or shape[0] != rows):
                raise EngineFailed(
                    f"the engine returned shape {list(shape)} for output '{declared.name}', "
                    f"{rows} rows were expected"
                )
            if shape != declared.seen:
                declared.check(shape)


def _own_large(outputs: dict[str, np.ndarray]) -> None:
    """Copy large arrays that lie in other memory: of the whole batch, or of the engine.

    A client may be slow to read them, and would keep that memory, or ONNX Runtime's arena would
    grow, although only their own bytes are counted in the memory budget.
    """
    for name, array in outputs.items():
        if array.nbytes > _LARGE_BYTES and not array.flags.owndata:
            outputs[name] = array.copy()


class _Declared:
    """The declared dtype and shape of one output. `seen`: the last shape that passed the check."""

    __slots__ = ("axes", "dtype", "name", "seen")

    def __init__(self, name: str, dtype: np.dtype[Any], axes: tuple[int | str, ...]) -> None:
        self.name = name
        self.dtype = dtype
        self.axes = axes
        self.seen: tuple[int, ...] | None = None

    def check(self, shape: tuple[int, ...]) -> None:
        fits = len(shape) == len(self.axes) and all(
            isinstance(want, str) or want == got for want, got in zip(self.axes, shape, strict=True)
        )
        if not fits:
            raise EngineFailed(
                f"the engine returned shape {list(shape)} for output '{self.name}', which is "
                f"[{', '.join(map(str, self.axes))}]"
            )
        self.seen = shape
