"""Run a graph once on inputs far from the usual ones, and say where it leaves PyTorch.

The comparison of an export is on ordinary values. A kernel may be exact there and wrong beyond:
ONNX Runtime's Sigmoid is 0 from -18 on, and attention over a row that is masked as a whole has no
definition that all share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from deploykit.core.errors import DeploykitError
from deploykit.core.tensors import TensorSpec
from deploykit.engines.engine import Engine
from deploykit.evaluation.parity import add_float32_errors, compare_engines

if TYPE_CHECKING:
    from deploykit.engines.torch.engine import TorchEngine

_ROWS = 3
_MAX_ERROR = 1e-2  # of values this large; what float32 itself loses is added
_LARGE = (1e2, 1e4)


def probe_outside(
    reference: TorchEngine, exported: Engine, usual: Mapping[str, np.ndarray]
) -> tuple[str, ...]:
    """Return a note for each kind of input on which the graph does not answer as the model does.

    `usual`: inputs that the model takes. Inputs that the model itself refuses are left out.
    """
    notes: dict[str, str] = {}
    for kind, what, feeds in _unusual(reference.inputs, usual):
        with suppress(DeploykitError):
            reference(feeds)
            try:
                why = _difference(reference, exported, feeds, only_places=kind == "zeros")
            except DeploykitError as exc:  # the graph does not take what the model does
                why = exc.message
            if why:
                text = f"with {what} the graph does not answer as PyTorch does: {why}"
                notes.setdefault(kind, text)
    return tuple(notes.values())


def _masks(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    rows = [spec for spec in specs if len(spec.shape) > 1]
    return [spec for spec in rows if "mask" in spec.name.lower() or spec.dtype == "bool"]


def _hides(spec: TensorSpec) -> bool:
    """Return the value that hides a place: True for a boolean named for padding."""
    return spec.dtype == "bool" and "pad" in spec.name.lower()


def _unusual(
    specs: Sequence[TensorSpec], usual: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, str, dict[str, np.ndarray]]]:
    """Yield inputs with their kind, of which the first difference is enough, and their name."""
    batched = {spec.name for spec in specs if spec.batched}
    arrays = {n: array[:_ROWS] if n in batched else array for n, array in usual.items()}
    masks = _masks(specs)
    floats = [spec for spec in specs if "float" in spec.dtype and spec not in masks]
    for size in _LARGE if floats else ():
        random, made = np.random.default_rng(0), {}
        for spec in floats:
            values = random.uniform(-size, size, arrays[spec.name].shape)
            made[spec.name] = np.asarray(values, arrays[spec.name].dtype)
        yield "large", f"values of up to {size:g}", {**arrays, **made}
    if floats:
        yield (
            "zeros",
            "zeros",
            {**arrays, **{x.name: np.zeros_like(arrays[x.name]) for x in floats}},
        )
    for spec in (each for each in specs if each.dtype == "bool"):
        for value in (True, False):
            made = {spec.name: np.full_like(arrays[spec.name], value)}
            what = f"'{spec.name}' {str(value).lower()} everywhere"
            yield spec.name, what, {**arrays, **made}
    for spec in (each for each in masks if "float" not in each.dtype):
        hidden = arrays[spec.name].copy()
        hidden[:1] = _hides(spec)
        what = f"a row that '{spec.name}' hides as a whole"
        yield f"{spec.name} hides", what, {**arrays, spec.name: hidden}


def _difference(
    reference: TorchEngine,
    exported: Engine,
    feeds: Mapping[str, np.ndarray],
    *,
    only_places: bool,
) -> str:
    """Return by what the answers differ; "" if they do not, or float32 explains it.

    `only_places`: look at NaN and the infinities alone, as equal scores may be ordered differently.
    """
    parity = compare_engines(reference, exported, [feeds], max_error=_MAX_ERROR)
    if not parity.passed:
        with suppress(DeploykitError):  # its code names float32
            parity = add_float32_errors(parity, reference, reference.in_float64, [feeds])
    for row in parity.rows:
        if row.places_match and only_places:
            continue
        if not row.places_match or (row.problem and not row.floating):
            return f"output '{row.output}': {row.problem}"
        if not row.problem and row.error > parity.bound(row):
            return f"output '{row.output}' is off by {row.error:.2g} of its largest value"
    return ""
