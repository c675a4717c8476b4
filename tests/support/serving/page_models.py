"""Small ONNX models whose answers tell what the page has sent."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser

HOSTILE = "<img src=x onerror=alert(1)>"
_WEIGHTS = ", ".join("1" if row // 4 == column else "0" for row in range(28) for column in range(7))


def bands(path: Path) -> Path:
    """Take image [N,1,28,28] -> bands [N,7]: the ink in each four of its columns."""
    return _save(
        path,
        f"""(float[N,1,28,28] image) => (float[N,7] bands) <float[28,7] weights = {{{_WEIGHTS}}}> {{
            axes = Constant<value = int64[2] {{1, 2}}>()
            columns = ReduceSum<keepdims=0>(image, axes)
            bands = MatMul(columns, weights)
        }}""",
    )


def colours(path: Path) -> Path:
    """Take photo uint8 [N,24,32,3] -> the mean red, green and blue of its upper half [N,3]."""
    return _save(
        path,
        """(uint8[N,24,32,3] photo) => (float[N,3] HOSTILE) {
            zero = Constant<value_ints=[0]>()
            half = Constant<value_ints=[12]>()
            axis = Constant<value_ints=[1]>()
            upper = Slice(photo, zero, half, axis)
            values = Cast<to=1>(upper)
            HOSTILE = ReduceMean<axes=[1, 2], keepdims=0>(values)
        }""",
    )


def sums(path: Path) -> Path:
    """Take a float32 [N,2] and b int64 [N,2] -> their sum in float64, and b as it came."""
    return _save(
        path,
        """(float[N,2] a, int64[N,2] b) => (double[N,2] sum, int64[N,2] same) {
            wide_a = Cast<to=11>(a)
            wide_b = Cast<to=11>(b)
            sum = Add(wide_a, wide_b)
            same = Identity(b)
        }""",
    )


def _save(path: Path, graph: str) -> Path:
    head = '<ir_version: 8, opset_import: ["" : 17]>'
    model = onnx.parser.parse_model(f"{head} {path.stem} {graph}")
    if model.graph.output[0].name == "HOSTILE":
        model.graph.output[0].name = model.graph.node[-1].output[0] = HOSTILE
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path
