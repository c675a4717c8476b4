"""Write a float32 graph in another precision: one entry point for all rows of the table."""

from __future__ import annotations

from collections.abc import Collection

from deploykit.core.errors import BadInput
from deploykit.core.precision import BY_NAME, CAST, DYNAMIC, WEIGHTS
from deploykit.graph.graph import Graph
from deploykit.quantization import dynamic, half_precision, qdq, weights
from deploykit.quantization.calibrate import Calibration


def convert(
    source: Graph,
    to: str,
    calibration: Calibration | None = None,
    *,
    runtime: str = "tensorrt",
    other_nodes: str = "fp32",
    keep_float32: Collection[str] = (),
) -> tuple[Graph, tuple[str, ...]]:
    """Return the graph in `to`, and the nodes that float16's range guard kept in float32.

    `keep_float32`: names of nodes to leave as they are. `other_nodes`: the precision of the nodes
    around 8-bit ones and stored weights. Raises BadInput as the writers do, and where `to` needs a
    calibration and there is none.
    """
    precision, ranges = BY_NAME[to], calibration.ranges if calibration else None
    if precision.writer == CAST:
        return half_precision.to_half(source, to, ranges, keep_float32=keep_float32)
    if precision.writer == WEIGHTS:
        typed = weights.to_weight_only(source, to)
    elif precision.writer == DYNAMIC:
        typed = dynamic.to_dynamic(source, keep_float32=keep_float32)
    elif calibration is None:
        raise BadInput(
            f"`to` {to} needs calibration data", hint="`calib`: an .npz or a folder, 100 samples"
        )
    else:
        typed = qdq.to_pairs(source, calibration, to, runtime=runtime, keep_float32=keep_float32)
    if other_nodes == "fp32":
        return typed, ()
    return half_precision.to_half(typed, other_nodes, ranges)
