"""ONNX models whose dynamic axis 0 is a batch, and models whose axis 0 only looks like one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.support import onnx_zoo
from tests.support.onnx_zoo import make

ROW = ("N", 4)
_node = helper.make_node


def _int64(**values: Sequence[int] | int) -> dict[str, np.ndarray]:
    return {name: np.array(value, np.int64) for name, value in values.items()}


def _of_rows(
    nodes: Sequence[onnx.NodeProto],
    weights: Mapping[str, np.ndarray] | None = None,
    out: Sequence[int | str] = ROW,
) -> onnx.ModelProto:
    return make(nodes, {"x": ROW}, {"y": out}, weights or {})


def reverse() -> onnx.ModelProto:
    slicing = _int64(start=[-1], end=[-(2**31)], axis=[0], step=[-1])
    return _of_rows([_node("Slice", ["x", *slicing], ["y"])], slicing)


def top_k() -> onnx.ModelProto:
    """All rows, each column sorted."""
    nodes = [
        _node("Shape", ["x"], ["k"], start=0, end=1),
        _node("TopK", ["x", "k"], ["y", "order"], axis=0),
    ]
    return _of_rows(nodes)


def softmax() -> onnx.ModelProto:
    return _of_rows([_node("Softmax", ["x"], ["y"], axis=0)])


def cumsum() -> onnx.ModelProto:
    return _of_rows([_node("CumSum", ["x", "axis"], ["y"])], _int64(axis=0))


def layer_norm() -> onnx.ModelProto:
    """Subtract the mean over axis 0, as a layer normalisation over it."""
    nodes = [
        _node("ReduceMean", ["x", "axes"], ["mean"]),
        _node("Sub", ["x", "mean"], ["off"]),
        _node("Mul", ["off", "off"], ["square"]),
        _node("ReduceMean", ["square", "axes"], ["variance"]),
        _node("Add", ["variance", "epsilon"], ["positive"]),
        _node("Sqrt", ["positive"], ["deviation"]),
        _node("Div", ["off", "deviation"], ["y"]),
    ]
    return _of_rows(nodes, {**_int64(axes=[0]), "epsilon": np.array(1e-5, np.float32)})


def instance_norm() -> onnx.ModelProto:
    """Over axis 0, which stands where the pixels do."""
    nodes = [
        _node("Transpose", ["x"], ["columns"], perm=[1, 0]),
        _node("Unsqueeze", ["columns", "first"], ["image"]),
        _node("InstanceNormalization", ["image", "ones", "zeros"], ["normal"]),
        _node("Squeeze", ["normal", "first"], ["back"]),
        _node("Transpose", ["back"], ["y"], perm=[1, 0]),
    ]
    weights = {"ones": np.ones(4, np.float32), "zeros": np.zeros(4, np.float32)}
    return _of_rows(nodes, {**_int64(first=[0]), **weights})


def batch_norm() -> onnx.ModelProto:
    """With the statistics of the batch, as in training."""
    nodes = [
        _node(
            "BatchNormalization",
            ["x", "one", "zero", "zero", "one"],
            ["y", "mean", "variance"],
            training_mode=1,
        )
    ]
    return _of_rows(nodes, {"one": np.ones(4, np.float32), "zero": np.zeros(4, np.float32)})


def attention() -> onnx.ModelProto:
    """Unbatched: [T,D] -> [T,D], as `export` writes it with a dynamic axis 0."""
    nodes = [
        _node("Transpose", ["x"], ["keys"], perm=[1, 0]),
        _node("MatMul", ["x", "keys"], ["scores"]),
        _node("Softmax", ["scores"], ["weights"], axis=-1),
        _node("MatMul", ["weights", "x"], ["y"]),
    ]
    return _of_rows(nodes)


def similarity() -> onnx.ModelProto:
    """CLIP's scores: [N,N]."""
    nodes = [
        _node("Transpose", ["x"], ["other"], perm=[1, 0]),
        _node("MatMul", ["x", "other"], ["y"]),
    ]
    return _of_rows(nodes, out=("N", "N"))


def hidden_similarity() -> onnx.ModelProto:
    """The same with another name for the second axis, as an exporter may write it."""
    model = similarity()
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_param = "M"
    return model


def arg_max() -> onnx.ModelProto:
    """The row with the largest value of each column, at every row."""
    nodes = [
        _node("ArgMax", ["x"], ["best"], axis=0, keepdims=1),
        _node("Cast", ["best"], ["number"], to=TensorProto.FLOAT),
        _node("Mul", ["x", "zero"], ["rows"]),
        _node("Add", ["rows", "number"], ["y"]),
    ]
    return _of_rows(nodes, {"zero": np.array(0, np.float32)})


def row_number() -> onnx.ModelProto:
    """Add a hundredth of the number of its row."""
    nodes = [
        _node("Shape", ["x"], ["rows"], start=0, end=1),
        _node("Squeeze", ["rows"], ["count"]),
        _node("Range", ["zero", "count", "one"], ["numbers"]),
        _node("Cast", ["numbers"], ["floats"], to=TensorProto.FLOAT),
        _node("Unsqueeze", ["floats", "last"], ["column"]),
        _node("Mul", ["column", "hundredth"], ["small"]),
        _node("Add", ["x", "small"], ["y"]),
    ]
    hundredth = {"hundredth": np.array(0.01, np.float32)}
    return _of_rows(nodes, {**_int64(zero=0, one=1, last=[1]), **hundredth})


def gather_first() -> onnx.ModelProto:
    """The first row at every row."""
    nodes = [
        _node("Gather", ["x", "first"], ["row"], axis=0),
        _node("Mul", ["x", "zero"], ["rows"]),
        _node("Add", ["rows", "row"], ["y"]),
    ]
    return _of_rows(nodes, {**_int64(first=[0]), "zero": np.array(0, np.float32)})


def rows_above_zero() -> onnx.ModelProto:
    """The rows that begin with a positive number: how many there are depends on the values."""
    nodes = [
        _node("Gather", ["x", "first"], ["column"], axis=1),
        _node("Greater", ["column", "zero"], ["kept"]),
        _node("Compress", ["x", "kept"], ["y"], axis=0),
    ]
    return _of_rows(nodes, {**_int64(first=0), "zero": np.array(0, np.float32)})


def largest_scale() -> onnx.ModelProto:
    """Rounds to 1/127 of the largest value of all rows, as dynamic quantization does."""
    nodes = [
        _node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        _node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    return _of_rows(nodes)


def nan_to_all() -> onnx.ModelProto:
    """Add 0 times the sum of all rows: only a NaN or an infinity shows the dependence."""
    nodes = [
        _node("ReduceSum", ["x"], ["sum"], keepdims=1),
        _node("Mul", ["sum", "zero"], ["nothing"]),
        _node("Add", ["x", "nothing"], ["y"]),
    ]
    return _of_rows(nodes, {"zero": np.array(0, np.float32)})


def large_batches_only() -> onnx.ModelProto:
    """Adds the mean of all rows where there are 16 or more."""
    nodes = [
        _node("Shape", ["x"], ["rows"], start=0, end=1),
        _node("GreaterOrEqual", ["rows", "sixteen"], ["many"]),
        _node("Cast", ["many"], ["factor"], to=TensorProto.FLOAT),
        _node("ReduceMean", ["x", "axis"], ["mean"], keepdims=1),
        _node("Mul", ["mean", "factor"], ["added"]),
        _node("Add", ["x", "added"], ["y"]),
    ]
    return _of_rows(nodes, _int64(sixteen=[16], axis=[0]))


def boxes_and_scores() -> onnx.ModelProto:
    """Each row's own box, up to 5000, and the scores of all rows, sorted: up to 1, never NaN."""
    nodes = [
        _node("Clip", ["x", "low", "high"], ["clipped"]),
        _node("IsNaN", ["clipped"], ["lost"]),
        _node("Where", ["lost", "low", "clipped"], ["safe"]),
        _node("Sigmoid", ["safe"], ["scores"]),
        _node("Shape", ["x"], ["k"], start=0, end=1),
        _node("TopK", ["scores", "k"], ["sorted", "order"], axis=0),
        _node("Mul", ["scores", "size"], ["boxes"]),
        _node("Concat", ["boxes", "sorted"], ["y"], axis=1),
    ]
    weights = {"low": -3.0, "high": 3.0, "size": 5000.0}
    arrays = {name: np.array(value, np.float32) for name, value in weights.items()}
    return _of_rows(nodes, arrays, out=("N", 8))


def same_for_all() -> onnx.ModelProto:
    """Zeros, whatever it is given: nothing can be seen of its rows."""
    return _of_rows([_node("Mul", ["x", "zero"], ["y"])], {"zero": np.zeros(1, np.float32)})


def _lstm(*, batch_first: bool) -> onnx.ModelProto:
    random = np.random.default_rng(5)
    shapes = {"W": (1, 12, 4), "R": (1, 12, 3)}
    weights = {
        name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()
    }
    swapped = {"perm": [1, 0, 2]}
    if not batch_first:
        nodes = [
            _node("LSTM", ["x", "W", "R"], ["all"], hidden_size=3),
            _node("Squeeze", ["all", "direction"], ["y"]),
        ]
        return make(
            nodes, {"x": ("T", "N", 4)}, {"y": ("T", "N", 3)}, {**weights, **_int64(direction=[1])}
        )
    nodes = [
        _node("Transpose", ["x"], ["steps"], **swapped),
        _node("LSTM", ["steps", "W", "R"], ["all"], hidden_size=3),
        _node("Squeeze", ["all", "direction"], ["states"]),
        _node("Transpose", ["states"], ["y"], **swapped),
    ]
    return make(
        nodes, {"x": ("N", "T", 4)}, {"y": ("N", "T", 3)}, {**weights, **_int64(direction=[1])}
    )


def lstm_time_major() -> onnx.ModelProto:
    return _lstm(batch_first=False)


def lstm_batch_first() -> onnx.ModelProto:
    return _lstm(batch_first=True)


def batched_attention() -> onnx.ModelProto:
    """[N,T,D] -> [N,T,D]."""
    nodes = [
        _node("Transpose", ["x"], ["keys"], perm=[0, 2, 1]),
        _node("MatMul", ["x", "keys"], ["scores"]),
        _node("Softmax", ["scores"], ["weights"], axis=-1),
        _node("MatMul", ["weights", "x"], ["y"]),
    ]
    return make(nodes, {"x": ("N", "T", 4)}, {"y": ("N", "T", 4)}, {})


def two_ids() -> onnx.ModelProto:
    """Word ids below 10 and segment ids below 2, as BERT's."""
    random = np.random.default_rng(6)
    tables = {
        name: random.standard_normal((rows, 8)).astype(np.float32)
        for name, rows in (("words", 10), ("segments", 2))
    }
    nodes = [
        _node("Gather", ["words", "input_ids"], ["a"]),
        _node("Gather", ["segments", "token_type_ids"], ["b"]),
        _node("Add", ["a", "b"], ["y"]),
    ]
    ids = {"input_ids": ("N", "T"), "token_type_ids": ("N", "T")}
    return make(nodes, ids, {"y": ("N", "T", 8)}, tables, integers=tuple(ids))


DEPENDENT: Mapping[str, Callable[[], onnx.ModelProto]] = {
    each.__name__: each
    for each in (
        reverse,
        top_k,
        softmax,
        cumsum,
        layer_norm,
        instance_norm,
        batch_norm,
        attention,
        similarity,
        hidden_similarity,
        arg_max,
        row_number,
        gather_first,
        rows_above_zero,
        largest_scale,
        nan_to_all,
        large_batches_only,
        boxes_and_scores,
        lstm_time_major,
        same_for_all,
    )
}
BATCHED: Mapping[str, Callable[[], onnx.ModelProto]] = {
    each.__name__: each
    for each in (
        onnx_zoo.linear,
        onnx_zoo.mnist_like,
        onnx_zoo.int64_ids,
        onnx_zoo.two_inputs,
        lstm_batch_first,
        batched_attention,
        two_ids,
    )
}
