"""FP16 and BF16 graphs: what is cast, and what needs float32 keeps it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

import deploykit as dk
from deploykit.core.errors import BadInput
from deploykit.engines.data.samples import Samples
from deploykit.engines.engine import load
from deploykit.quantization.calibrate import Range
from tests.support.graphs.data import calibration, feeds, in_true_halves, samples
from tests.support.graphs.protos import calibrate, specs, summarise, to_half, to_pairs
from tests.support.graphs.qdq_graphs import run, stored, with_weight
from tests.support.graphs.small import parse
from tests.support.onnx_zoo import (
    conv_relu,
    int64_ids,
    linear,
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
    "a constant node": (CONSTANT, "fp16", {}, ("epsilon", "y")),
    **{f"a weight of {x}": (plus(x), "fp16", {}, ("y",)) for x in (1e5, -3.4e38, 1e-12)},
    **{f"a weight of {x}": (plus(x), "fp16", {}, ()) for x in (0.0, 1e-6, -np.inf)},
}


@pytest.mark.parametrize(("model", "to", "ranges", "wanted"), KEPT.values(), ids=KEPT)
def test_what_float16_cannot_hold_keeps_its_nodes_in_float32(
    model: onnx.ModelProto, to: str, ranges: dict[str, Range], wanted: tuple[str, ...]
) -> None:
    half, kept = to_half(model, to, ranges)
    assert kept == wanted
    counted = [name for name in wanted if name != "epsilon"]
    assert summarise(half).precision.get("float32", 0) == len(counted)


def test_a_graph_with_nothing_to_cast_is_refused() -> None:
    with pytest.raises(BadInput, match="float16 already"):
        to_half(to_half(linear())[0])
    with pytest.raises(BadInput, match="nothing in float32"):
        to_half(parse("(int64[N,4] i) => (int64[N,4] y)", "y = Abs(i)"))


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
    "weights on integers": (
        *(ID8, "f = Cast<to = 1>(i) h = MatMul(f, W) y = Relu(h)"),
        *({"float16": 2}, {"bfloat16": 2}),
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
    "positions added": f"{ARANGE} small = Mul(positions, tiny) y = Add(x, small)",
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


def test_an_epsilon_that_nothing_needs_keeps_one_node() -> None:
    half, kept = to_half(lost("a = Add(x, e) y = Tanh(a)", e=1e-10))
    assert kept == ("a",)
    names = {name for node in half.graph.node if node.op_type == "Tanh" for name in node.input}
    assert names == {"a_float16"}


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
    assert to_half(lost(bound))[1] == ("low", "masked")
    product = lost(MASKS["product"], MASK, low=LOWEST)
    assert to_half(product, ranges={"x": Range(-70000.0, 1.0)})[1] == ("masked",)
