"""Values that a half type cannot hold, small and large, keep what needs them in float32."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from deploykit.quantization.calibrate import Range
from tests.support.graphs.data import in_true_halves
from tests.support.graphs.protos import to_half

X = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
X[1::2] = 0  # rows in which nothing but the epsilon is left
MEAN = "q = Mul(x, x) v = ReduceMean<axes = [1], keepdims = 1>(q) t = Add(v, e)"
# what follows Abs(x), `a`, and the epsilon
EPSILONS = {
    "log of a sum": ("t = Add(a, e) y = Log(t)", 1e-10),
    "log of a maximum": ("t = Max(a, e) y = Log(t)", 1e-10),
    "log of a bound": ("t = Clip(a, e) y = Log(t)", 1e-10),
    "log of a choice": ("z = Equal(a, zero) t = Where(z, e, a) y = Log(t)", 1e-10),
    "a constant node": ("c = Constant<value_float = 1e-10>() t = Add(c, a) y = Log(t)", 1.0),
    "other shapes": ("t = Max(a, e) u = Unsqueeze(t, one) v = Squeeze(u, one) y = Log(v)", 1e-10),
    "of a ratio": ("t = Add(a, e) s = ReduceSum(t, one) q = Div(t, s) y = Log(q)", 1e-10),
    "of a square": ("t = Add(a, e) u = Mul(t, t) y = Log(u)", 1e-6),
    "of a power": ("t = Add(a, e) u = Pow(t, third) y = Log(u)", 1e-10),
    "normalised": ("n = ReduceL2<axes = [1]>(x) c = Clip(n, e) y = Div(x, c)", 1e-12),
    "root mean square": (f"{MEAN} s = Sqrt(t) i = Reciprocal(s) y = Mul(x, i)", 1e-12),
    "negative power": (f"{MEAN} i = Pow(t, minus) y = Mul(x, i)", 1e-12),
    "a large reciprocal": ("t = Add(a, e) i = Reciprocal(t) y = Mul(x, i)", 1e-6),
    "one by": ("t = Add(a, e) i = Div(third, t) y = Mul(x, i)", 1e-7),
    "log of softmax": ("b = Mul(x, e) p = Softmax(b) y = Log(p)", 20.0),
    "log of sigmoid": ("b = Mul(x, e) p = Sigmoid(b) y = Log(p)", 9.0),
}
# whole rows are masked, too
MASKS = {
    "product": "g = Sub(one, m) b = Mul(g, low) s = Add(x, b) y = Softmax(s)",
    "choice": "k = Cast<to = 9>(m) s = Where(k, x, low) y = Softmax(s)",
    "pooling": "k = Cast<to = 9>(m) s = Where(k, x, low) y = ReduceMax<axes = [1]>(s)",
}
M = np.array([[0] * 8, [1, 0] * 4] * 3, np.float32)


def graph(body: str, inputs: str = "", **constants: float) -> onnx.ModelProto:
    head = '<ir_version: 8, opset_import: ["" : 17]>'
    model = onnx.parser.parse_model(f"{head} g (float[N,8] x{inputs}) => (float y) {{ {body} }}")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    read = {name for node in model.graph.node for name in node.input}
    for name, value in constants.items():
        if name in read:
            kind = np.int64 if "queeze" in body or "ReduceSum" in body else np.float32
            array = np.array([1], kind) if name == "one" else np.array(value, np.float32)
            model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


@pytest.mark.parametrize(("body", "epsilon"), EPSILONS.values(), ids=EPSILONS)
def test_an_epsilon_that_float16_loses_still_prevents_nan(body: str, epsilon: float) -> None:
    more = {"zero": 0.0, "third": 1 / 3, "minus": -0.5, "one": 1.0}
    model = graph(f"a = Abs(x) {body}", e=epsilon, **more)
    want = ReferenceEvaluator(model).run(None, {"x": X})[0]
    half, _ = to_half(model)
    got = in_true_halves(half, {"x": X})[0]
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, atol=0.01 * np.abs(want).max())


@pytest.mark.parametrize("to", ["fp16", "bf16"])
@pytest.mark.parametrize("low", [-1e5, -1e9, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("body", MASKS.values(), ids=MASKS)
def test_a_mask_past_the_type_is_finite_in_rows_that_are_masked_as_a_whole(
    body: str, low: float, to: str
) -> None:
    model = graph(body, ", float[N,8] m", low=low, one=1.0)
    feeds = {"x": X, "m": M}
    want = ReferenceEvaluator(model).run(None, feeds)[0]
    got = in_true_halves(to_half(model, to)[0], feeds)[0]
    assert not np.isnan(got).any()
    np.testing.assert_allclose(got[1::2], want[1::2], atol=0.02)
    assert np.isfinite(got).all() or "Max" in body


def test_a_mask_that_is_an_input_stays_finite() -> None:
    model = graph("s = Add(x, m) y = Softmax(s)", ", float[N,8] m")
    low = float(np.finfo(np.float32).min)
    for to in ("fp16", "bf16"):
        half, _ = to_half(model, to, {"m": Range(low, 0.0), "s": Range(low, 4.0)})
        got = in_true_halves(half, {"x": X, "m": np.full_like(M, low)})[0]
        assert np.isfinite(got).all()


def test_a_small_value_seen_in_calibration_is_kept_for_the_log() -> None:
    model = graph("a = Exp(x) y = Log(a)")
    x = np.full((1, 8), -20.0, np.float32)
    ranges = {"x": Range(-20.0, 0.0), "a": Range(2e-9, 1.0), "y": Range(-20.0, 0.0)}
    got = in_true_halves(to_half(model, ranges=ranges)[0], {"x": x})[0]
    np.testing.assert_allclose(got, x, rtol=1e-3)


def test_an_epsilon_that_nothing_needs_keeps_one_node() -> None:
    half, kept = to_half(graph("a = Add(x, e) y = Tanh(a)", e=1e-10))
    assert kept == ("Add_0",)
    names = {name for node in half.graph.node if node.op_type == "Tanh" for name in node.input}
    assert names == {"a_float16"}
