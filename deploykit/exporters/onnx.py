"""Export a torch module to ONNX through torch's current exporter (`dynamo=True`).

In: a module in eval mode and its specs. Out: a float32 ONNX file whose tensors are named as the
specs say and whose dynamic axes are dynamic. The exporter's notes on where each node came from are
left out: they hold paths of the machine, and the same model should give the same bytes.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx

from deploykit.core.errors import BadInput, first_line
from deploykit.core.extras import require
from deploykit.core.files import atomic_write
from deploykit.core.tensors import TensorSpec, concrete

torch = require("torch")
require("onnxscript")

DEFAULT_OPSET = 20  # what torch's exporter writes itself; NVIDIA's parsers take it
OPSETS = range(18, 24)
_EXAMPLE_SIZE = 2  # torch.export may take a size of 0 or 1 for a constant


def export_module(
    module: Any,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    out: Path,
    *,
    opset: int = DEFAULT_OPSET,
) -> None:
    """Write `module` to `out`. Raises BadInput when torch cannot export it, naming the reason."""
    if opset not in OPSETS:
        raise BadInput(f"opset {opset} is not offered", hint=f"{OPSETS[0]} to {OPSETS[-1]}")
    axes = sorted({axis for spec in inputs for axis in spec.shape if isinstance(axis, str)})
    dims = {axis: torch.export.Dim(axis) for axis in axes}
    sizes = {axis: _EXAMPLE_SIZE + number for number, axis in enumerate(axes)}
    example = tuple(
        torch.zeros(concrete(spec, sizes), dtype=getattr(torch, spec.dtype)) for spec in inputs
    )
    dynamic = tuple(
        {at: dims[axis] for at, axis in enumerate(spec.shape) if isinstance(axis, str)}
        for spec in inputs
    )
    with atomic_write(out) as tmp:
        try:
            with _quiet():
                torch.onnx.export(
                    module,
                    example,
                    str(tmp),
                    dynamo=True,
                    dynamic_shapes=dynamic,
                    input_names=[spec.name for spec in inputs],
                    output_names=[spec.name for spec in outputs],
                    opset_version=opset,
                    external_data=False,
                    verbose=False,
                )
        except (torch.onnx.OnnxExporterError, RuntimeError, ValueError, TypeError) as exc:
            raise BadInput(f"torch cannot export the model: {_cause(exc)}") from exc
        model = onnx.load(tmp)
        _strip(model, outputs)
        onnx.save(model, tmp)


def _strip(model: onnx.ModelProto, outputs: Sequence[TensorSpec]) -> None:
    """Remove notes of origin; name the outputs' dynamic axes as the specs do."""
    graph = model.graph
    del model.metadata_props[:]
    del graph.metadata_props[:]
    graph.ClearField("doc_string")
    for part in (graph.node, graph.input, graph.output, graph.value_info, graph.initializer):
        for item in part:
            del item.metadata_props[:]
            item.ClearField("doc_string")
    for value, spec in zip(graph.output, outputs, strict=True):
        dims = value.type.tensor_type.shape.dim
        for at, (dim, axis) in enumerate(zip(dims, spec.shape, strict=True)):
            if isinstance(axis, str) and dim.HasField("dim_value"):
                raise BadInput(
                    f"the exporter fixed axis {at} ({axis}) of output '{spec.name}' at "
                    f"{dim.dim_value}: something in the model reads that size as a constant",
                    hint="export with a fixed size for that axis, or change the model",
                )
            if isinstance(axis, str):
                dim.dim_param = axis


def _cause(exc: BaseException) -> str:
    """The innermost reason: torch wraps it in pages of advice."""
    while exc.__cause__ is not None:
        exc = exc.__cause__
    return first_line(exc)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's progress lines and its remarks on torchvision off the user's terminal."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
