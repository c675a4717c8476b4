"""ONNX models whose dynamic axis 0 is a batch, and models whose axis 0 only looks like one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import onnx
from numpy.typing import ArrayLike

from tests.support import onnx_zoo
from tests.support.graphs.small import parse

ROW = ("N", 4)
Make = Callable[[], onnx.ModelProto]


def _rows(body: str, out: str = "N,4", **constants: ArrayLike) -> Make:
    return partial(parse, f"(float[N,4] x) => (float[{out}] y)", body, **constants)


def _steps(axes: str, out: str, body: str, **constants: ArrayLike) -> Make:
    return partial(parse, f"(float[{axes},4] x) => (float[{axes},{out}] y)", body, **constants)


_random = np.random.default_rng(5)
_LSTM = {
    "W": _random.standard_normal((1, 12, 4)).astype(np.float32),
    "R": _random.standard_normal((1, 12, 3)).astype(np.float32),
    "direction": [1],
}
_ATTENTION = "scores = MatMul(x, keys) w = Softmax<axis = -1>(scores) y = MatMul(w, x)"

reverse = _rows(
    "y = Slice(x, start, end, axis, step)", start=[-1], end=[-9999], axis=[0], step=[-1]
)
# unbatched: [T,D] -> [T,D], as `export` writes it with a dynamic axis 0
attention = _rows(f"keys = Transpose(x) {_ATTENTION}")
similarity = _rows("other = Transpose(x) y = MatMul(x, other)", out="N,N")  # CLIP's scores
# zeros, whatever it is given: nothing can be seen of its rows
same_for_all = _rows("y = Mul(x, zero)", zero=[0.0])

DEPENDENT: Mapping[str, Make] = {
    "reverse": reverse,
    "softmax": _rows("y = Softmax<axis = 0>(x)"),
    "attention": attention,
    "similarity": similarity,
    "row_number": _rows(  # adds a hundredth of the number of its row
        "rows = Shape<start = 0, end = 1>(x) count = Squeeze(rows) "
        "numbers = Range(zero, count, one) floats = Cast<to = 1>(numbers) "
        "column = Unsqueeze(floats, last) small = Mul(column, hundredth) y = Add(x, small)",
        zero=0,
        one=1,
        last=[1],
        hundredth=0.01,
    ),
    "rows_above_zero": _rows(  # how many there are depends on the values
        "column = Gather<axis = 1>(x, first) kept = Greater(column, zero) "
        "y = Compress<axis = 0>(x, kept)",
        first=0,
        zero=0.0,
    ),
    "largest_scale": _rows(  # of all rows, as in dynamic quantization
        "q, scale, zero = DynamicQuantizeLinear(x) y = DequantizeLinear(q, scale, zero)"
    ),
    "nan_to_all": _rows(  # only a NaN or an infinity shows the dependence
        "sum = ReduceSum<keepdims = 1>(x) nothing = Mul(sum, zero) y = Add(x, nothing)", zero=0.0
    ),
    "large_batches_only": _rows(  # adds the mean of all rows where there are 16 or more
        "rows = Shape<start = 0, end = 1>(x) many = GreaterOrEqual(rows, sixteen) "
        "factor = Cast<to = 1>(many) mean = ReduceMean<keepdims = 1>(x, axis) "
        "added = Mul(mean, factor) y = Add(x, added)",
        sixteen=[16],
        axis=[0],
    ),
    "boxes_and_scores": _rows(  # own boxes up to 5000, scores of all rows up to 1, never NaN
        "clipped = Clip(x, low, high) lost = IsNaN(clipped) safe = Where(lost, low, clipped) "
        "scores = Sigmoid(safe) k = Shape<start = 0, end = 1>(x) "
        "sorted, order = TopK<axis = 0>(scores, k) boxes = Mul(scores, size) "
        "y = Concat<axis = 1>(boxes, sorted)",
        out="N,8",
        low=-3.0,
        high=3.0,
        size=5000.0,
    ),
    "lstm_time_major": _steps(
        "T,N", "3", "all = LSTM<hidden_size = 3>(x, W, R) y = Squeeze(all, direction)", **_LSTM
    ),
    "same_for_all": same_for_all,
}
BATCHED: Mapping[str, Make] = {
    "linear": onnx_zoo.linear,
    "mnist_like": onnx_zoo.mnist_like,
    "int64_ids": onnx_zoo.int64_ids,
    "two_inputs": onnx_zoo.two_inputs,
    "lstm_batch_first": _steps(
        "N,T",
        "3",
        "steps = Transpose<perm = [1, 0, 2]>(x) all = LSTM<hidden_size = 3>(steps, W, R) "
        "states = Squeeze(all, direction) y = Transpose<perm = [1, 0, 2]>(states)",
        **_LSTM,
    ),
    "batched_attention": _steps("N,T", "4", f"keys = Transpose<perm = [0, 2, 1]>(x) {_ATTENTION}"),
    "two_ids": partial(  # word ids below 10 and segment ids below 2, as BERT's
        parse,
        "(int64[N,T] input_ids, int64[N,T] token_type_ids) => (float[N,T,8] y)",
        "a = Gather(words, input_ids) b = Gather(segments, token_type_ids) y = Add(a, b)",
        words=_random.standard_normal((10, 8)),
        segments=_random.standard_normal((2, 8)),
    ),
}
