"""The inputs that a benchmark times: the data given, else golden samples, else random numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput
from deploykit.core.tensors import TensorSpec, batch_axes, steps_counted

if TYPE_CHECKING:
    import numpy as np

    from deploykit.runtimes.data.samples import Samples
    from deploykit.runtimes.engine import Engine

DATA, GOLDEN, RANDOM = "the data given", "golden samples", "random numbers"


@dataclass(frozen=True)
class BenchInputs:
    """Makes the inputs of one call. `sizes`: of the dynamic axes other than the batch.

    `source`: DATA, GOLDEN or RANDOM. `arrays`: its samples, which are repeated, or cut, to fill an
    axis; None for random numbers.
    """

    specs: tuple[TensorSpec, ...]
    sizes: Mapping[str, int]
    source: str
    arrays: Mapping[str, np.ndarray] | None = None

    def __call__(self, batch: int) -> dict[str, np.ndarray]:
        """Inputs of `batch` rows; a fixed axis 0 keeps its size."""
        from deploykit.runtimes.data.samples import random_feeds

        sizes = {**self.sizes, **dict.fromkeys(batch_axes(self.specs), batch)}
        if self.arrays is None:
            return random_feeds(self.specs, sizes)
        return {spec.name: self._fit(spec, sizes) for spec in self.specs}

    def _fit(self, spec: TensorSpec, sizes: Mapping[str, int]) -> np.ndarray:
        import numpy as np

        array = (self.arrays or {})[spec.name]
        for place, axis in enumerate(spec.shape):
            size = axis if isinstance(axis, int) else sizes.get(axis, array.shape[place])
            if size != array.shape[place]:
                array = array.take(np.arange(size) % array.shape[place], axis=place)
        if (steps := steps_counted(spec, self.specs, sizes)) is not None:
            array = np.minimum(array, steps).astype(array.dtype)
        return np.ascontiguousarray(array)

    def identify(self) -> dict[str, str]:
        """What tells them from other inputs: where they are from, and a hash of 32 rows."""
        digest = hashlib.sha256()
        for name, array in sorted(self(32).items()):
            kept = array.astype(str) if array.dtype.hasobject else array
            digest.update(f"{name} {kept.dtype} {kept.shape} ".encode() + kept.tobytes())
        return {"from": self.source, "sha256": digest.hexdigest()}

    def describe(self) -> str:
        """For the report: "inputs: golden samples, T = 128"."""
        sizes = "".join(f", {name} = {size}" for name, size in self.sizes.items())
        return f"inputs: {self.source}{sizes}"


def choose_inputs(
    artefact: Artefact, engine: Engine, samples: Samples | None, axes: Mapping[str, int]
) -> BenchInputs:
    """For the model in `artefact`, open as `engine`. `axes`: sizes that were asked for.

    Raises BadInput for an axis that the model does not have, or the batch's, and where nothing
    tells the size of one.
    """
    specs = engine.inputs
    named = dict.fromkeys(str(a) for spec in specs for a in spec.shape if isinstance(a, str))
    free = [axis for axis in named if axis not in batch_axes(specs)]
    _check_axes(axes, free, specs)
    arrays = samples.inputs if samples is not None else _golden(artefact, engine)
    source = RANDOM if arrays is None else GOLDEN if samples is None else DATA
    sizes = dict(axes)
    for spec in specs:
        for place, axis in enumerate(spec.shape):
            if arrays is not None and axis in free:
                sizes.setdefault(str(axis), arrays[spec.name].shape[place])
    unknown = [axis for axis in free if axis not in sizes]
    if unknown:
        raise BadInput(
            f"{artefact}: how large is the axis {', '.join(unknown)} of its inputs?",
            hint=f"`axis` {unknown[0]}=SIZE, or `data` of the usual size: time depends on it",
        )
    if any(size == 0 for array in (arrays or {}).values() for size in array.shape):
        raise BadInput(f"{artefact}: an input of size 0 cannot be timed")
    found = BenchInputs(specs, {axis: sizes[axis] for axis in free}, source, arrays)
    if source == RANDOM:
        try:
            engine(found(1))
        except BadInput as exc:
            hint = "`data`: inputs that the model takes; these were random numbers"
            raise BadInput(exc.message, hint=exc.hint or hint) from exc
    return found


def _check_axes(axes: Mapping[str, int], free: Sequence[str], specs: Sequence[TensorSpec]) -> None:
    for axis, size in axes.items():
        if axis in batch_axes(specs):
            raise BadInput(f"`axis` {axis} is the batch", hint="its sizes are `batches`")
        if axis not in free:
            there = ", ".join(free) or "none"
            raise BadInput(f"`axis` {axis} is no dynamic axis of the inputs; there are: {there}")
        if size < 1:
            raise BadInput(f"`axis` {axis} must be 1 or more, got {size}")


def _golden(artefact: Artefact, engine: Engine) -> Mapping[str, np.ndarray] | None:
    from deploykit.api.golden import find_samples, open_samples

    golden = find_samples(artefact.path, artefact.manifest) if artefact.manifest else None
    if golden is None:
        return None
    return open_samples(golden, artefact.path, engine.inputs, engine.outputs)[1]
