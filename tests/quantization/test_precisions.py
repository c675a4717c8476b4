"""FP16 and BF16 graphs, weights in 8 or 4 bits, and INT8 that is scaled in each call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import deploykit as dk
from deploykit.core.errors import BadInput
from deploykit.engines.data.samples import Samples
from deploykit.engines.engine import load
from deploykit.engines.onnxruntime.engine import session_options
from deploykit.graph.graph import Graph
from deploykit.quantization.qdq import Range
from deploykit.quantization.weights import dynamic_nodes, to_dynamic
from tests.support.exact_sums import needs_exact_sums
from tests.support.graphs.data import (
    calibration,
    feeds,
    in_true_halves,
    optimised,
    quality_db,
    quantized,
    run,
    samples,
    sqnr_db,
    stored,
    with_weight,
    writer_of,
)
from tests.support.graphs.protos import (
    calibrate,
    node_costs,
    simulate,
    specs,
    summarise,
    to_half,
    to_pairs,
    to_proto,
    to_weight_only,
)
from tests.support.graphs.small import parse
from tests.support.onnx_zoo import (
    conv_relu,
    int64_ids,
    linear,
    make,
    mnist_like,
    overflow,
    save,
    two_inputs,
)

ZOO = [linear, conv_relu, two_inputs, overflow, int64_ids, mnist_like]
# 11 bits a value, and outputs of the zoo are below 16: 8 ulp at 8 cover its deepest graph, 8 nodes
ATOL_FP16 = 8 * 2.0**-8
NAMES = {"fp16": "float16", "bf16": "bfloat16"}
HALVES = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
ROWS = "(float[N,4] x) => (float[N,4] y)"
LOWEST = float(np.finfo(np.float32).min)

Make = Callable[[], onnx.ModelProto]


@pytest.mark.parametrize("graph", ZOO)
def test_a_half_graph_computes_what_the_float_graph_does(graph: Make, tmp_path: Path) -> None:
    inputs, source = feeds(graph()), graph()
    ranges = calibrate(save(graph(), tmp_path / "m.onnx"), samples(graph())).ranges
    half, _ = to_half(source, ranges=ranges)
    onnx.checker.check_model(half, full_check=True)
    assert source == graph()
    assert specs(half) == specs(source)
    names = [node.name for node in half.graph.node]
    assert len({node.name for node in source.graph.node} | set(names)) == len(names)
    wanted = ReferenceEvaluator(graph()).run(None, inputs)
    with load(save(half, tmp_path / "half.onnx"), "cpu") as engine:
        answers = list(engine(inputs).values())
    for want, *got in zip(wanted, in_true_halves(half, inputs), answers, strict=True):
        for values in got:
            assert values.dtype == np.float32
            np.testing.assert_allclose(values, want, atol=ATOL_FP16, rtol=0)


def plus(value: float, name: str = "factor") -> onnx.ModelProto:
    return parse(ROWS, f"y = Add(x, {name})", **{name: value})


def unnamed() -> onnx.ModelProto:
    model = overflow()
    for node in model.graph.node:
        node.name = ""
    return model


CONSTANT = parse(ROWS, "epsilon = Constant<value_float = 1e-12>() y = Add(x, epsilon)")
TOO_LARGE = {"product": Range(0.0, 3.2e5)}
# what it is -> model, precision, ranges, the nodes that stay in float32
KEPT: dict[str, tuple[onnx.ModelProto, str, dict[str, Range], tuple[str, ...]]] = {
    "no ranges": (overflow(), "fp16", {}, ()),
    "a product above": (overflow(), "fp16", TOO_LARGE, ("scale_up", "scale_down")),
    "nodes without names": (unnamed(), "fp16", TOO_LARGE, ("Mul_0", "Mul_1")),
    "the range of bfloat16": (overflow(), "bf16", TOO_LARGE, ()),
    "half the largest": (linear(), "fp16", {"y": Range(-32752.0, 0.0)}, ()),
    "just above it": (linear(), "fp16", {"y": Range(-32753.0, 0.0)}, ("gemm",)),
    "a tensor that vanishes": (linear(), "fp16", {"x": Range(-1e-9, 1e-9)}, ("gemm",)),
    "a mask": (linear(), "fp16", {"y": Range(-np.inf, 3.0)}, ()),
    "infinity": (linear(), "fp16", {"y": Range(-3.0, np.inf)}, ("gemm",)),
    "a constant node": (CONSTANT, "fp16", {}, ("y",)),
    **{f"a weight of {x}": (plus(x), "fp16", {}, ("y",)) for x in (1e5, -3.4e38, 1e-12)},
    **{f"a weight of {x}": (plus(x), "fp16", {}, ()) for x in (0.0, 1e-6, -np.inf)},
}


@pytest.mark.parametrize(("model", "to", "ranges", "wanted"), KEPT.values(), ids=KEPT)
def test_what_float16_cannot_hold_keeps_its_nodes_in_float32(
    model: onnx.ModelProto, to: str, ranges: dict[str, Range], wanted: tuple[str, ...]
) -> None:
    half, kept = to_half(model, to, ranges)
    assert kept == wanted
    assert summarise(half).precision.get("float32", 0) == len(wanted)


def test_a_weight_shared_by_both_worlds_is_stored_in_both(tmp_path: Path) -> None:
    head = "(float[N,4] x) => (float[N,4] big, float[N,4] y)"
    model = parse(head, "big = Mul(x, w) y = Add(x, w)", w=np.arange(4.0))
    half, kept = to_half(model, ranges={"big": Range(0.0, 1e6)})
    assert kept == ("big",)
    assert {(t.name, t.data_type) for t in half.graph.initializer} == {
        ("w", TensorProto.FLOAT),
        ("w_float16", TensorProto.FLOAT16),
    }
    load(save(half, tmp_path / "m.onnx"), "cpu").close()


def test_a_tensor_is_cast_once_for_all_its_readers() -> None:
    head = "(float[N,4] x) => (float[N,4] a, float[N,4] b, float[N,4] c)"
    half, _ = to_half(parse(head, "a = Relu(x) b = Relu(x) c = Relu(x)"))
    assert summarise(half).operators == {"Cast": 1 + 3, "Relu": 3}


def test_a_body_finds_the_float32_tensor_that_it_names(tmp_path: Path) -> None:
    bodies = "then_branch = t () => (float[N,4] n) { n = Neg(r) }"
    bodies += ", else_branch = e () => (float[N,4] m) { m = Neg(r) }"
    half, _ = to_half(parse(ROWS, f"r = Relu(x) y = If(c) <{bodies}>", c=np.array(True)))
    x = np.array([[1, 2, -3, 4]], np.float32)
    np.testing.assert_array_equal(run(half, {"x": x}, tmp_path / "m.onnx"), -np.maximum(x, 0))
    assert summarise(half).precision["float16"] == 1


ID8 = "(int64[N,10] i) => (float[N,8] y)"
TABLE = np.linspace(0, 1, 80).reshape(10, 8)
# what it is -> head, body, and the precisions of its nodes in fp16 and in bf16
PRECISIONS = {
    "a cast to float becomes one to half": (
        *("(int64[N,4] i) => (float[N,4] y)", "f = Cast<to = 1>(i) y = Relu(f)"),
        *({"float16": 1}, {"bfloat16": 1}),
    ),
    "no half form": (ROWS, "y = CumSum(x, axis)", {"float32": 1}, {"float32": 1}),
    "an embedding is no index": (
        *("(int64[N,5] i) => (float[N,5,8] y)", "w = Gather(W, i) s = Mul(w, two) y = Relu(s)"),
        *({"float16": 3}, {"bfloat16": 3}),
    ),
    "constants on integers": (
        *(ID8, "f = Cast<to = 1>(i) h = MatMul(f, W) y = Relu(h)"),
        *({"float16": 1, "float32": 1}, {"bfloat16": 1, "float32": 1}),
    ),
    **{
        f"TensorRT lacks {kind} in bfloat16": (
            *(ROWS, f"r = Relu(x) y = {kind}(r)"),
            *({"float16": 2}, {"bfloat16": 1, "float32": 1}),
        )
        for kind in ("HardSwish", "Mish", "LpNormalization")
    },
}


@pytest.mark.parametrize(("head", "body", "fp16", "bf16"), PRECISIONS.values(), ids=PRECISIONS)
def test_nodes_are_half_where_their_operator_may_be(
    head: str, body: str, fp16: dict[str, int], bf16: dict[str, int]
) -> None:
    model = parse(head, body, W=TABLE, two=2.0, axis=1)
    for to, precision in (("fp16", fp16), ("bf16", bf16)):
        assert summarise(to_half(model, to)[0]).precision == precision


def test_what_tensorrt_lacks_in_bfloat16_is_named_and_openvino_gets_it(tmp_path: Path) -> None:
    path = save(parse(ROWS, "r = Relu(x) y = HardSwish(r)"), tmp_path / "m.onnx")
    for runtime, precision in (("tensorrt", 1), ("openvino", 2)):
        made = dk.quantize(path, to="bf16", runtime=runtime, out=tmp_path / f"{runtime}.onnx")
        assert made.manifest.precision["bfloat16"] == precision
        kept = [each for each in made.notes if "does not take them in bf16: HardSwish" in each]
        assert bool(kept) == (runtime == "tensorrt"), made.notes


def int8_linear(factor: float = 1.0) -> onnx.ModelProto:
    model = with_weight(linear(), "W", stored(linear())["W"] * factor)
    x = feeds(linear())["x"]
    return to_pairs(model, calibration({"x": Range(float(x.min()), float(x.max()))}))


@pytest.mark.parametrize("to", HALVES)
def test_scales_of_int8_pairs_become_half_and_nothing_is_cast_between(to: str) -> None:
    half, kept = to_half(int8_linear(), to)
    onnx.checker.check_model(half, full_check=True)
    assert kept == ()
    types = {t.name: t.data_type for t in half.graph.initializer}
    pairs = [node for node in half.graph.node if "Linear" in node.op_type]
    assert {types[node.input[1]] for node in pairs} == {HALVES[to]}
    kinds = ["Cast", "QuantizeLinear", "DequantizeLinear", "DequantizeLinear", "Gemm", "Cast"]
    assert [node.op_type for node in half.graph.node] == kinds


def test_pairs_raise_the_opset_to_one_whose_scales_may_be_half() -> None:
    assert summarise(int8_linear()).opset == {"ai.onnx": 18}
    assert summarise(to_half(int8_linear(), "fp16")[0]).opset == {"ai.onnx": 19}
    assert summarise(to_half(linear(), "fp16")[0]).opset == {"ai.onnx": 18}
    half, _ = to_half(conv_relu(), "bf16")  # TensorRT takes it; ONNX has it from opset 22 on
    assert summarise(half).precision == {"bfloat16": 2}
    assert summarise(half).opset == {"ai.onnx": 18}


def test_a_scale_that_float16_holds_badly_keeps_its_pair_in_float32(tmp_path: Path) -> None:
    int8 = int8_linear(1e-5)
    half, kept = to_half(int8, "fp16")
    assert kept == ("DequantizeLinear_W_dequantized",)
    inputs = feeds(linear())
    wanted = run(int8, inputs, tmp_path / "m.onnx")
    np.testing.assert_allclose(in_true_halves(half, inputs)[0], wanted, atol=1e-3)
    assert to_half(int8, "bf16")[1] == ()


def test_bfloat16_weights_are_rounded_to_nearest_even() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.array([1 + 2**-9, 1 + 2**-8, 1 + 3 * 2**-8, -1e-40, np.inf, 3.3e38], np.float32)
    half, _ = to_half(parse("(float[N,6] x) => (float[N,6] y)", "y = Add(x, w)", w=values), "bf16")
    (tensor,) = (t for t in half.graph.initializer if t.name == "w_bfloat16")
    assert tensor.raw_data == values.astype(ml_dtypes.bfloat16).tobytes()


@pytest.mark.parametrize("to", HALVES)
def test_nodes_named_in_keep_float32_stay_float32_and_are_not_reported(to: str) -> None:
    half, kept = to_half(mnist_like(), to, keep_float32=("conv1", "head"))
    assert kept == ()
    assert summarise(half).precision == {NAMES[to]: 5, "float32": 2}


def test_names_that_clash_are_avoided() -> None:
    half, _ = to_half(plus(2.0, name="x_float16"))
    onnx.checker.check_model(half, full_check=True)
    assert in_true_halves(half, {"x": np.ones((1, 4), np.float32)})[0].tolist() == [[3.0] * 4]


# Indices and lengths are exact: float16 counts in twos above 2048

# as `torch.arange(x.shape[1], dtype=float32)` is exported: `positions` float32[T]
ARANGE = """sizes = Shape<start = 1, end = 2>(x) length = Squeeze(sizes)
            limit = Cast<to = 1>(length) positions = Range(zero, limit, one) """
INDICES = {
    # angles as Hugging Face computes them: an outer product of frequencies and positions
    "rotary": f"""{ARANGE} row = Unsqueeze(positions, first) angles = MatMul(frequencies, row)
        waves = Cos(angles) wave = ReduceSum<keepdims = 1>(waves, first) y = Mul(x, wave)""",
    # float32 on both sides of the comparison
    "padding mask": f"""{ARANGE} last = Sub(limit, one) inside = Less(positions, last)
        y = Where(inside, x, zero)""",
    # T5's: the logarithm of a distance becomes an index
    "buckets": f"""{ARANGE} distances = Add(positions, one) logs = Log(distances)
        scaled = Mul(logs, hundred) bucket = Cast<to = 7>(scaled) values = Cast<to = 1>(bucket)
        small = Mul(values, step) y = Add(x, small)""",
    # a constant of integers, which the exporter made of an arange of fixed length
    "table of positions": f"""{ARANGE} cut = Slice(table, first, sizes)
        difference = Sub(cut, positions) y = Add(x, difference)""",
    # durations of a speech model: their sum is how long the output is
    "sum of lengths": """durations = Mul(x, two) total = ReduceSum<keepdims = 0>(durations)
        r = Range(zero, total, one) nothing = Sub(r, r) y = Add(nothing, one)""",
    "double positions": """sizes = Shape<start = 1, end = 2>(x) length = Squeeze(sizes)
        limit = Cast<to = 11>(length) one64 = Cast<to = 11>(one) zero64 = Cast<to = 11>(zero)
        positions64 = Range(zero64, limit, one64) positions = Cast<to = 1>(positions64)
        back = Sub(positions, flipped) small = Mul(back, tiny) y = Add(x, small)""",
}


def indices(case: str) -> onnx.ModelProto:
    return parse(
        f"(float[N,T] x) => (float[{'L' if 'lengths' in case else 'N,T'}] y)",
        INDICES[case],
        zero=0.0,
        one=1.0,
        two=2.0,
        hundred=100.0,
        flipped=17.0,
        tiny=2.0**-12,
        step=2.0**-10,
        first=[0],
        table=np.arange(5000.0),
        frequencies=(10.0 ** -np.arange(4))[:, None],
    )


@pytest.mark.parametrize("to", ["fp16", "bf16"])
@pytest.mark.parametrize("case", INDICES)
def test_indices_and_lengths_are_exact_at_any_length(case: str, to: str, tmp_path: Path) -> None:
    whole = indices(case)
    half, _ = to_half(whole, to)
    onnx.checker.check_model(half, full_check=True)
    with load(save(whole, tmp_path / "whole.onnx"), "cpu") as reference:
        for length in (301, 2051, 4099):
            x = {"x": np.ones((1, length), np.float32)}
            want = reference(x)["y"]
            got = in_true_halves(half, x)[0]
            assert got.shape == want.shape
            # the outputs are below 16: what is left is their own rounding, 2**-8 relative in bf16
            np.testing.assert_allclose(got, want, atol=2**-4 if to == "bf16" else 2**-7, rtol=0)


def test_activations_around_indices_stay_half_and_arithmetic_that_ends_in_one_does_not() -> None:
    half, kept = to_half(indices("rotary"))
    assert kept == ()
    nodes = {node.name: node for node in half.graph.node}
    assert all(name.endswith("_float16") for name in nodes["y"].input)
    head = "(int64[N,4] i, float[N,4] x) => (int64[N,4] y, float[N,4] z)"
    body = "f = Cast<to = 1>(i) g = Add(f, one) y = Cast<to = 7>(g) z = Relu(x)"
    half, _ = to_half(parse(head, body, one=1.0))
    ids = np.array([[1, 2048, 4095, 4097]])
    inputs = {"i": ids, "x": np.ones((1, 4), np.float32)}
    np.testing.assert_array_equal(in_true_halves(half, inputs)[0], ids + 1)
    assert summarise(half).precision == {"float16": 1, "float32": 1}


# Values that a half type cannot hold, small and large, keep what needs them in float32

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
    "other shapes": ("t = Max(a, e) u = Unsqueeze(t, at) v = Squeeze(u, at) y = Log(v)", 1e-10),
    "of a ratio": ("t = Add(a, e) s = ReduceSum(t, at) q = Div(t, s) y = Log(q)", 1e-10),
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


def lost(body: str, inputs: str = "", **constants: float) -> onnx.ModelProto:
    more = {"zero": 0.0, "third": 1 / 3, "minus": -0.5, "one": 1.0, "at": [1]}
    return parse(f"(float[N,8] x{inputs}) => (float[N,K] y)", body, 17, **more, **constants)


@pytest.mark.parametrize(("body", "epsilon"), EPSILONS.values(), ids=EPSILONS)
def test_an_epsilon_that_float16_loses_still_prevents_nan(body: str, epsilon: float) -> None:
    model = lost(f"a = Abs(x) {body}", e=epsilon)
    want = ReferenceEvaluator(model).run(None, {"x": X})[0]
    got = in_true_halves(to_half(model)[0], {"x": X})[0]
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, atol=0.01 * np.abs(want).max())


@pytest.mark.parametrize(
    "body", ["a = Add(x, e) y = Tanh(a)", "a = Mul(x, e) b = Add(a, x) y = Log(b)"]
)
def test_an_epsilon_that_nothing_needs_keeps_one_node(body: str) -> None:
    half, kept = to_half(lost(body, e=1e-10))
    assert kept == ("a",)
    assert summarise(half).precision == {"float32": 1, "float16": body.count("=") - 1}


def test_a_small_value_seen_in_calibration_is_kept_for_the_log() -> None:
    x = np.full((1, 8), -20.0, np.float32)
    ranges = {"x": Range(-20.0, 0.0), "a": Range(2e-9, 1.0), "y": Range(-20.0, 0.0)}
    half, _ = to_half(lost("a = Exp(x) y = Log(a)"), ranges=ranges)
    np.testing.assert_allclose(in_true_halves(half, {"x": x})[0], x, rtol=1e-3)


MASK = ", float[N,8] m"
M = np.array([[0] * 8, [1, 0] * 4] * 3, np.float32)  # whole rows are masked, too
PRODUCT = "kept = Cast<to = 1>(m) gone = Sub(one, kept) bias = Mul(gone, low)"
CHOICE = """lowest = Constant<value_float = -3.4028235e38>() kept = Cast<to = 9>(m)
            bias = Where(kept, zero, lowest)"""
MASKS = {
    "product": f"{PRODUCT} masked = Add(x, bias) y = Softmax(masked)",
    "choice": f"{CHOICE} masked = Add(x, bias) y = Softmax(masked)",
    "twice": f"{PRODUCT} once = Add(x, bias) masked = Add(once, bias) y = Softmax(masked)",
    # Hugging Face finds the rows that are masked as a whole by comparing
    "unmasked": f"""{CHOICE} all = Equal(bias, lowest) some = Where(all, zero, bias)
        masked = Add(x, some) y = Softmax(masked)""",
    "pooling": "k = Cast<to = 9>(m) s = Where(k, x, low) y = ReduceMax<axes = [1]>(s)",
}


@pytest.mark.parametrize("to", ["fp16", "bf16"])
@pytest.mark.parametrize("low", [-1e5, -1e9, LOWEST])
@pytest.mark.parametrize("case", MASKS)
def test_a_mask_past_the_type_is_finite_and_keeps_no_node_in_float32(
    case: str, low: float, to: str, tmp_path: Path
) -> None:
    model, mask = lost(MASKS[case], MASK, low=low), M.copy()
    mask[:, 0] = case == "twice" or mask[:, 0]  # a row masked as a whole, twice, is NaN in float32
    inputs = {"x": X, "m": mask}
    data = Samples({name: np.tile(array, (2, 1)) for name, array in inputs.items()}, None, "data")
    ranges = calibrate(save(model, tmp_path / "m.onnx"), data).ranges
    (want,) = in_true_halves(model, inputs)
    for half, kept in (to_half(model, to), to_half(model, to, ranges)):
        (got,) = in_true_halves(half, inputs)
        assert not np.isnan(got).any()
        np.testing.assert_allclose(got[1::2], want[1::2], atol=0.02)
        if case != "pooling":
            assert np.isfinite(got).all()
            assert kept == () or low == -1e5, kept


@pytest.mark.parametrize("to", ["fp16", "bf16"])
def test_a_mask_that_is_an_input_stays_finite(to: str) -> None:
    model = lost("s = Add(x, m) y = Softmax(s)", MASK)
    half, _ = to_half(model, to, {"m": Range(LOWEST, 0.0), "s": Range(LOWEST, 4.0)})
    assert np.isfinite(in_true_halves(half, {"x": X, "m": np.full_like(M, LOWEST)})[0]).all()


def test_what_looks_like_a_mask_and_is_none_keeps_its_nodes() -> None:
    assert to_half(lost(f"{CHOICE} masked = Add(x, bias) y = Relu(masked)", MASK))[1] != ()
    bound = "low = Constant<value_float = -3.4e38>() masked = Clip(x, low) y = Softmax(masked)"
    assert to_half(lost(bound))[1] == ("masked",)
    product = lost(MASKS["product"], MASK, low=LOWEST)
    assert to_half(product, ranges={"x": Range(-70000.0, 1.0)})[1] == ("masked",)


# A normal weight with its peak at 3 sigma in steps of peak/127: 10 log10(12 * 127**2 / 9) = 43 dB,
# of peak/7: 18 dB; an INT4 block of 128 has its peak there, too.
LEAST_SQNR_DB = {8: 40.0, 4: 16.0}
INT8, INT4 = "int8-weight-only", "int4-weight-only"
KINDS = {"MatMul": "MatMul(x, W)", "Gemm": "Gemm(x, W)", "GemmT": "Gemm<transB = 1>(x, W)"}


def layer(inputs: int = 256, kind: str = "MatMul") -> onnx.ModelProto:
    """One linear layer; kind "GemmT" stores its weight as [outputs, inputs]."""
    weight = np.random.default_rng(0).standard_normal((inputs, 24))
    head = f"(float[N,{inputs}] x) => (float[N,24] y)"
    return parse(head, f"y = {KINDS[kind]}", W=weight.T.copy() if kind == "GemmT" else weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("bits", "rows", "block"), [(8, 256, 0), (4, 256, 128), (4, 96, 32)])
def test_weights_have_a_scale_per_output_or_block(
    kind: str, bits: int, rows: int, block: int, tmp_path: Path
) -> None:
    model = layer(rows, kind)
    small = to_weight_only(model, f"int{bits}-weight-only", least_elements=1)
    onnx.checker.check_model(small, full_check=True)
    assert summarise(small).opset == {"ai.onnx": 21 if block else 18}
    assert quality_db(model, small, feeds(model, 32), tmp_path) > LEAST_SQNR_DB[bits]
    (node,) = (n for n in small.graph.node if n.op_type == "DequantizeLinear")
    tensors = {t.name: t for t in small.graph.initializer}
    by_inputs, by_outputs = (1, 0) if kind == "GemmT" else (0, 1)
    axis = by_inputs if block else by_outputs
    assert helper.get_node_attr_value(node, "axis") == axis
    shape = [24, 24]
    if block:
        assert helper.get_node_attr_value(node, "block_size") == block
        shape[axis] = rows // block
    assert list(tensors[node.input[1]].dims) == (shape if block else [24])
    weight = tensors[node.input[0]]
    assert weight.data_type == (TensorProto.INT4 if block else TensorProto.INT8)
    assert len(weight.raw_data) == rows * 24 * bits // 8
    half, kept = to_half(small, "fp16")
    assert (kept, summarise(half).operators["Cast"]) == ((), 2)
    inputs = feeds(model, 8)
    wanted = run(model, inputs, tmp_path / "a.onnx")
    assert sqnr_db(wanted, in_true_halves(half, inputs)[0]) > LEAST_SQNR_DB[bits] - 1


def test_layers_that_no_block_divides_and_small_ones_stay_and_a_weight_is_stored_once() -> None:
    head, body = "(float[N,256] x) => (float[N,8] y)", "h = MatMul(x, a) y = MatMul(h, b)"
    model = parse(head, body, a=np.ones((256, 100)), b=np.ones((100, 8)))
    small = to_weight_only(model, INT4, least_elements=1)
    assert list(writer_of(small, "y").input) == ["h", "b"]
    assert summarise(small).operators["DequantizeLinear"] == 1
    small = to_weight_only(mnist_like(), INT8, least_elements=7840)
    assert summarise(small).operators["DequantizeLinear"] == 1
    head = "(float[N,32] x) => (float[N,32] a, float[N,32] b)"
    model = parse(head, "a = MatMul(x, W) b = MatMul(x, W)", W=np.eye(32))
    small = to_weight_only(model, INT8, least_elements=1)
    assert summarise(small).operators == {"DequantizeLinear": 1, "MatMul": 2}


# A CPU computes half precision in float32; the simulation rounds as a GPU does

LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL")


def simulated(
    half: onnx.ModelProto, inputs: dict[str, np.ndarray], level: str = "ORT_DISABLE_ALL"
) -> np.ndarray:
    options = session_options(1)
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    session = ort.InferenceSession(simulate(half).SerializeToString(), options)
    return np.asarray(session.run(None, inputs)[0])


@pytest.mark.parametrize("level", LEVELS)
def test_a_product_beyond_float16_is_infinite_as_on_a_gpu_but_not_in_bfloat16(level: str) -> None:
    x = np.array([[1, 6, 7, -32]], np.float32)
    got = simulated(to_half(overflow(), "fp16")[0], {"x": x}, level)
    np.testing.assert_array_equal(np.isinf(got), [[False, False, True, True]])
    x = np.full((1, 4), 32.0, np.float32)
    got = simulated(to_half(overflow(), "bf16")[0], {"x": x}, level)
    np.testing.assert_allclose(got, 33.0, rtol=2**-7)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("to", "bits"), [("fp16", 11), ("bf16", 8)])
def test_values_are_rounded_to_the_type_ties_to_even(to: str, bits: int, level: str) -> None:
    half, _ = to_half(parse("(float[N,4] x) => (float[N,4] y)", "y = Add(x, zero)", zero=0.0), to)
    ulp = 2.0 ** (1 - bits)  # at 1.0
    x = np.array([[1 + ulp / 4, 1 + ulp / 2, 1 + 3 * ulp / 2, 1 + ulp]], np.float32)
    np.testing.assert_array_equal(
        simulated(half, {"x": x}, level), [[1.0, 1.0, 1 + 2 * ulp, 1 + ulp]]
    )


def test_half_inputs_and_outputs_stay_half() -> None:
    model = parse("(float16[N,2] x) => (float16[N,2] y)", "y = Mul(x, x)")
    got = simulated(model, {"x": np.array([[300.0, 3.0]], np.float16)})
    assert got.dtype == np.float16
    np.testing.assert_array_equal(got, [[np.inf, 9.0]])


def test_constant_nodes_and_pairs_inside_a_half_graph_are_simulated_too() -> None:
    body = "k = Constant<value_float = 0.1>() y = Add(x, k)"
    half = parse("(float16[N,1] x) => (float16[N,1] y)", body)
    value = onnx.numpy_helper.from_array(np.array(0.1, np.float16))
    half.graph.node[0].attribute[0].CopyFrom(helper.make_attribute("value", value))
    assert simulated(half, {"x": np.zeros((1, 1), np.float16)}).item() == np.float16(0.1)
    int8 = to_pairs(linear(), calibration({"x": Range(-4.0, 4.0)}))
    half, _ = to_half(int8, "fp16")
    inputs = feeds(linear())
    # a scale in half moves it by 2^-12
    np.testing.assert_allclose(simulated(half, inputs), simulated(int8, inputs), atol=0.05)


LEAST_DYNAMIC_DB = 35.0  # a layer whose activations fill all 255 steps; see test_qdq.py


def written(model: onnx.ModelProto, **options: object) -> onnx.ModelProto:
    return to_proto(to_dynamic(Graph(model), **options))


def gemm(attributes: str = "alpha = 1.0") -> onnx.ModelProto:
    body = f"y = Gemm<{attributes}>(x, w, b)"
    weights = np.random.default_rng(0).standard_normal((8, 8))
    return parse("(float[N,8] x) => (float[N,8] y)", body, w=weights, b=np.ones(8))


def layers(count: int = 2) -> onnx.ModelProto:
    random = np.random.default_rng(0)
    body = " ".join(f"m{n} = MatMul(x, w{n}) a{n} = Add(m{n}, b{n})" for n in range(count))
    weights = {f"w{n}": random.standard_normal((16, 16)) for n in range(count)}
    weights |= {f"b{n}": random.standard_normal(16) for n in range(count)}
    body += f" y = Sum({', '.join(f'a{n}' for n in range(count))})"
    return parse("(float[N,4,16] x) => (float[N,4,16] y)", body, **weights)


def lstm(directions: int = 1, extra: int = 0, **attributes: object) -> onnx.ModelProto:
    """Input x float32[5,N,8] -> all states of 6 units, with `extra` of LSTM's 5 optional inputs."""
    random = np.random.default_rng(0)
    shapes = {"W": (24, 8), "R": (24, 6), "B": (48,), "P": (18,)}
    names = ["x", "W", "R", *["B", "", "h", "c", "P"][:extra]]
    weights = {
        name: (random.standard_normal((directions, *shapes[name])) / 3).astype(np.float32)
        for name in shapes
        if name in names
    }
    inputs = {"x": (5, "N", 8)} | {name: (directions, "N", 6) for name in "hc" if name in names}
    node = helper.make_node("LSTM", names, ["y"], "lstm", hidden_size=6, **attributes)
    return make([node], inputs, {"y": (5, directions, "N", 6)}, weights)


@needs_exact_sums
@pytest.mark.parametrize(
    "model",
    [
        *(linear(), int64_ids(), mnist_like(), layers(), gemm(), gemm("transB = 1")),
        *(lstm(), lstm(2, extra=5, direction="bidirectional")),
    ],
    ids=["gemm", "ids", "cnn", "shared", "square", "transposed", "lstm", "all of lstm"],
)
def test_outputs_are_close_on_any_data(model: onnx.ModelProto, tmp_path: Path) -> None:
    int8 = written(model)
    onnx.checker.check_model(int8, full_check=True)
    assert specs(int8) == specs(model)
    saturates = model.graph.node[0].op_type == "LSTM"
    for scale in (1.0,) if saturates else (1.0, 1e3):  # there is no range to leave
        inputs = {
            name: array * np.float32(scale) if array.dtype == np.float32 else array
            for name, array in feeds(model, 32).items()
        }
        assert quality_db(model, int8, inputs, tmp_path) > LEAST_DYNAMIC_DB


@pytest.mark.parametrize("count", [1, 3])
def test_onnxruntime_runs_a_layer_and_its_bias_in_one_kernel(count: int, tmp_path: Path) -> None:
    int8 = written(layers(count))
    kinds = [node.op_type for node in int8.graph.node]
    assert kinds.count("DynamicQuantizeLinear") == 1  # once for all its readers
    assert kinds.count("MatMulInteger") == count
    done = optimised(int8, tmp_path)
    kernels = ("DynamicQuantizeMatMul", "MatMulIntegerToFloat")
    assert sum(done.count(kind) for kind in kernels) == count, done
    assert not {"MatMulInteger", "Add", "Cast", "Mul"} & set(done), done
    built = Graph.open(tmp_path / "optimised.onnx")
    assert built.precision["int8"] == count  # as the files of quantize_dynamic are read, too


def test_an_lstm_becomes_the_operator_of_onnxruntime(tmp_path: Path) -> None:
    int8 = written(lstm())
    assert optimised(int8, tmp_path) == ["DynamicQuantizeLSTM"]
    assert Graph(int8).precision == {"int8": 1}
    assert node_costs(int8, {})[0].flops == node_costs(lstm(), {})[0].flops == 2 * 5 * 24 * (8 + 6)
    values, weight = stored(int8), stored(lstm())["W"]
    np.testing.assert_array_equal(values["W_scale"], np.abs(weight).max(axis=2) / np.float32(127))
    assert {name: array.shape for name, array in values.items()} == {
        "W_int8": (1, 8, 24),
        "R_int8": (1, 6, 24),
        **dict.fromkeys(("W_zero", "W_scale", "R_zero", "R_scale"), (1, 24)),
    }


def test_the_gates_of_an_lstm_may_be_put_in_order_in_the_graph(tmp_path: Path) -> None:
    """As torch's exporter writes it without folding."""
    turned = """{0}_first = Slice({0}_torch, six, end) {0}_last = Slice({0}_torch, zero, six)
                {0}_2 = Concat<axis = 0>({0}_first, {0}_last) {0} = Unsqueeze({0}_2, zero) """
    weights = stored(lstm())
    model = parse(
        "(float[5,N,8] x) => (float[5,1,N,6] y)",
        f"{turned.format('W')}{turned.format('R')} y = LSTM<hidden_size = 6>(x, W, R)",
        W_torch=np.roll(weights["W"][0], 6, axis=0),
        R_torch=np.roll(weights["R"][0], 6, axis=0),
        zero=[0],
        six=[6],
        end=[24],
    )
    int8 = written(model)
    assert optimised(int8, tmp_path) == ["DynamicQuantizeLSTM"]
    assert quality_db(lstm(), int8, feeds(model, 3), tmp_path) > LEAST_DYNAMIC_DB


def test_weights_have_a_scale_per_output_and_named_nodes_stay_float() -> None:
    values = stored(written(gemm("transB = 1")))
    weight = stored(gemm("transB = 1"))["w"]
    np.testing.assert_array_equal(values["w_scale"], np.abs(weight).max(axis=1) / np.float32(127))
    assert values["w_int8"].shape == weight.T.shape
    assert "w" not in values
    int8 = written(layers(2), keep_float32=("m1",))
    node = next(node for node in int8.graph.node if node.name == "m1")
    assert list(node.input) == ["x", "w1"]
    assert Graph(int8).precision["int8"] == 1


def test_convolutions_other_products_and_lstms_that_the_operator_lacks_stay_float() -> None:
    assert dynamic_nodes(Graph(mnist_like())) == ("head",)
    computed, gru = lstm(), lstm()
    weights = helper.make_tensor_value_info("R", onnx.TensorProto.FLOAT, (1, 24, 6))
    computed.graph.input.append(weights)
    gru.graph.node[0].op_type = "GRU"
    odd = [gemm(attributes) for attributes in ("alpha = 2.0", "beta = 0.5", "transA = 1")]
    for model in (conv_relu(), *odd, lstm(layout=1), computed, gru):
        assert dynamic_nodes(Graph(model)) == ()


def test_what_cannot_be_converted_is_refused_with_why(tmp_path: Path) -> None:
    static, found = quantized(linear(), tmp_path)
    dynamic = written(linear())
    old = layer()
    old.opset_import[0].version = 17
    old.graph.node.append(helper.make_node("ReduceMean", ["y"], ["z"], name="mean", axes=[1]))
    broken = with_weight(layer(), "W", np.full((256, 24), np.nan))

    def small(model: onnx.ModelProto, to: str, least: int = 1) -> onnx.ModelProto:
        return to_weight_only(model, to, least_elements=least)

    for convert, why in (
        (lambda: to_half(to_half(linear())[0]), "float16 already"),
        (lambda: to_half(parse("(int64[N] i) => (int64[N] y)", "y = Abs(i)")), "nothing in float3"),
        (lambda: to_half(dynamic), "multiplies integers that each call scales"),
        (lambda: small(mnist_like(), INT8, 7841), "7841 elements"),
        (lambda: small(conv_relu(), INT8), "no Gemm or MatMul"),
        (lambda: small(broken, INT8), "weight 'W'"),
        (lambda: small(broken, INT4), "weight 'W'"),
        (lambda: small(small(layer(), INT8), INT8), "quantized already"),
        (lambda: small(old, INT4), r"'mean': ReduceMean of opset 17"),
        (lambda: written(broken), "weight 'W' holds NaN"),
        (lambda: written(layers(1), keep_float32=("m0",)), "other than those kept in float32"),
        (lambda: written(static), "quantized already"),
        (lambda: written(dynamic), "quantized already"),
        (lambda: to_pairs(dynamic, found), "quantized already"),
    ):
        with pytest.raises(BadInput, match=why):
            convert()
    with pytest.raises(BadInput, match="no Gemm, MatMul or LSTM") as caught:
        dk.quantize(save(conv_relu(), tmp_path / "c.onnx"), "int8-dynamic")
    assert "int8 quantizes convolutions" in str(caught.value.hint)
    old = linear()
    old.opset_import[0].version = 10
    assert written(old).opset_import[0].version > 10


@pytest.fixture
def model(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    graph = parse(
        "(float[N,4,32] x) => (float[N,4,8] y)",
        "m = MatMul(x, w0) a = Add(m, b0) g = Tanh(a) y = MatMul(g, w1)",
        w0=random.standard_normal((32, 64)),
        b0=random.standard_normal(64),
        w1=random.standard_normal((64, 8)),
    )
    return save(graph, tmp_path / "model.onnx")


@needs_exact_sums
def test_quantize_needs_no_data_and_build_reads_it_back(model: Path, tmp_path: Path) -> None:
    made = dk.quantize(model, "int8-dynamic", tmp_path / "q.onnx")
    assert made.manifest.precision["int8"] == 2
    evidence = made.manifest.evidence
    assert evidence.accuracy.passed
    assert evidence.accuracy.sqnr_db > 30
    assert (evidence.quantize.to, evidence.quantize.runtime) == ("int8-dynamic", "onnxruntime")
    built = dk.build(model, "cpu", precision="int8-dynamic", out=tmp_path / "built.onnx")
    kinds = [node.op_type for node in onnx.load(built.path).graph.node]
    assert kinds.count("DynamicQuantizeMatMul") == 2
    again = dk.build(made.path, "cpu", out=tmp_path / "b.onnx")
    assert again.manifest.precision["int8"] == built.manifest.precision["int8"] == 2


def test_auto_tries_it_on_a_cpu(tmp_path: Path) -> None:
    source = save(mnist_like(), tmp_path / "c.onnx")
    np.savez(tmp_path / "calib.npz", **feeds(mnist_like(), 16))
    options = {"calib": tmp_path / "calib.npz", "runtime": "onnxruntime", "max_drop": 1e-9}
    with pytest.raises(dk.GateFailed) as caught:
        dk.quantize(source, "auto", tmp_path / "q.onnx", **options)
    steps = caught.value.result.search.steps
    assert {"int8", "int8-dynamic"} <= {step.precision for step in steps}
