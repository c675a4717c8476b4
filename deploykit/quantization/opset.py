"""Raise a graph to the opset that a precision needs, by onnx's own converter where that is due.

The file of somebody else cannot be exported again. Operators that mean the same in both opsets keep
their nodes; others (ReduceMax, Split, Upsample) are rewritten by onnx's version converter. Either
result is compared with the model before it is used.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import helper

from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput, DeploykitError, first_line
from deploykit.core.precision import BY_NAME, CAST, PAIRS, WEIGHTS
from deploykit.core.runtime import RUNTIMES
from deploykit.engines.data.samples import Samples
from deploykit.engines.engine import load
from deploykit.evaluation.feeds import comparison_feeds
from deploykit.evaluation.parity import compare_engines
from deploykit.graph.edit import Editor, raise_opset
from deploykit.graph.graph import Graph, opset
from deploykit.quantization.half_precision import PAIR_OPSET

_RAISED_BY_WRITERS = 13
_MAX_ERROR = 1e-4  # the same arithmetic in other nodes


def needed_opset(source: Graph, to: str, runtime: str, other_nodes: str) -> int:
    """Return the least opset of a graph in `to` with these other nodes; `auto`: of any level."""
    if to == "auto":
        return BY_NAME["int8"].min_opset if RUNTIMES[runtime].on_cpu else PAIR_OPSET
    least = BY_NAME[to].min_opset
    paired = BY_NAME[to].writer in (PAIRS, WEIGHTS) and other_nodes != "fp32"
    holds = any(node.op_type.endswith("uantizeLinear") for node in source.skeleton.graph.node)
    return max(least, PAIR_OPSET) if paired or (BY_NAME[to].writer == CAST and holds) else least


def with_opset(
    model: Artefact,
    source: Graph,
    least: int,
    samples: Samples | None,
    sizes: Mapping[str, int],
) -> tuple[Graph, tuple[str, ...]]:
    """Return `source`, the graph of `model`, in opset `least` or newer, and a note if it changed.

    From 13 on the writers themselves raise one whose operators mean the same in both. Raises
    BadInput where the graph cannot be converted, or computes something else then.
    """
    now = opset(source.model)
    if now >= least or not now:  # 0: none of ONNX's own operators
        return source, ()
    if now >= _RAISED_BY_WRITERS:
        with contextlib.suppress(BadInput):
            raise_opset(Editor(source).model, least)
            return source, ()
    converted = convert_opset(source, least)
    what = f"{model}: opset {now}, converted to {least}"
    with tempfile.TemporaryDirectory() as folder:
        path = converted.save(Path(folder) / source.path.name, temporary=True).path
        with load(model, "cpu") as reference:
            feeds, _ = comparison_feeds(reference, reference, samples, None, sizes)
            try:
                with load(path, "cpu") as engine:
                    parity = compare_engines(
                        reference,
                        engine,
                        feeds[:4],
                        max_error=_MAX_ERROR,
                        names=(model.name, f"opset {least}"),
                        random=samples is None,
                    )
                # NaN and infinity at the same places are the same answer
                same = all(
                    x.error <= _MAX_ERROR
                    or (x.floating and x.places_match and x.max_abs <= _MAX_ERROR * (x.scale or 0))
                    for x in parity.rows
                )
                why = "" if same else parity.why
            except DeploykitError as exc:
                why = exc.message.replace(f"{folder}/", "")
    if why:
        raise BadInput(
            f"{what}, does not compute the same: {why}",
            hint=f"export it again with opset {least}",
        )
    return converted, (f"{what}: {parity.why if parity.passed else 'equal, NaN included'}",)


def convert_opset(source: Graph, least: int) -> Graph:
    """Return the graph in opset `least`. Raises BadInput naming the operator that cannot be."""
    editor = Editor(source)
    try:
        raise_opset(editor.model, least)
    except BadInput:
        editor = Editor(source)
        try:  # its large weights are inputs here, of any size
            converted = onnx.version_converter.convert_version(editor.model, least)
        except (RuntimeError, ValueError, onnx.version_converter.ConvertError) as failure:
            why = first_line(failure)
            raise BadInput(
                f"{source.path.name}: opset {opset(source.model)} cannot be converted to {least}, "
                f"which this precision needs: {why}",
                hint=f"export it again with opset {least}",
            ) from failure
        editor.model.CopyFrom(converted)
        editor.graph = editor.model.graph
        for tensor in converted.graph.initializer:  # the converter adds axes and sizes
            if tensor.name not in editor.inputs:
                editor.constants.setdefault(tensor.name, tensor)
        version = helper.OP_SET_ID_VERSION_MAP[("ai.onnx", least)]
        editor.model.ir_version = max(editor.model.ir_version, version)
    return editor.finish(list(editor.graph.node))
