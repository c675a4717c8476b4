"""Weights in 8 or 4 bits, half precision simulated on a CPU, and INT8 scaled in each call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import deploykit as dk
from deploykit.core.errors import BadInput
from deploykit.engines.onnxruntime.engine import session_options
from deploykit.graph.graph import Graph
from deploykit.quantization.calibrate import Range
from deploykit.quantization.weights import dynamic_nodes, to_dynamic
from tests.support.exact_sums import needs_exact_sums
from tests.support.graphs.data import calibration, feeds, in_true_halves, sqnr_db
from tests.support.graphs.protos import (
    node_costs,
    simulate,
    specs,
    summarise,
    to_half,
    to_pairs,
    to_proto,
    to_weight_only,
)
from tests.support.graphs.qdq_graphs import (
    optimised,
    quality_db,
    quantized,
    run,
    stored,
    with_weight,
    writer_of,
)
from tests.support.graphs.small import parse
from tests.support.onnx_zoo import conv_relu, int64_ids, linear, make, mnist_like, overflow, save

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


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_close_however_weights_are_stored(kind: str, bits: int, tmp_path: Path) -> None:
    model = layer(kind=kind)
    small = to_weight_only(model, f"int{bits}-weight-only", least_elements=1)
    onnx.checker.check_model(small, full_check=True)
    assert summarise(small).opset == {"ai.onnx": 21 if bits == 4 else 18}
    assert quality_db(model, small, feeds(model, 32), tmp_path) > LEAST_SQNR_DB[bits]


def dequantize(model: onnx.ModelProto) -> tuple[onnx.NodeProto, dict[str, onnx.TensorProto]]:
    (node,) = (n for n in model.graph.node if n.op_type == "DequantizeLinear")
    return node, {t.name: t for t in model.graph.initializer}


@pytest.mark.parametrize(("kind", "axis"), [("MatMul", 1), ("Gemm", 1), ("GemmT", 0)])
def test_int8_has_a_scale_per_output(kind: str, axis: int) -> None:
    node, tensors = dequantize(to_weight_only(layer(kind=kind), INT8, least_elements=1))
    assert helper.get_node_attr_value(node, "axis") == axis
    assert list(tensors[node.input[1]].dims) == [24]
    assert tensors[node.input[0]].data_type == TensorProto.INT8


@pytest.mark.parametrize(("kind", "axis"), [("MatMul", 0), ("Gemm", 0), ("GemmT", 1)])
@pytest.mark.parametrize(("inputs", "block"), [(256, 128), (192, 64), (96, 32)])
def test_int4_blocks_divide_the_inputs(inputs: int, block: int, kind: str, axis: int) -> None:
    node, tensors = dequantize(to_weight_only(layer(inputs, kind), INT4, least_elements=1))
    assert helper.get_node_attr_value(node, "axis") == axis
    assert helper.get_node_attr_value(node, "block_size") == block
    shape = [24, 24]
    shape[axis] = inputs // block
    assert list(tensors[node.input[1]].dims) == shape
    assert tensors[node.input[0]].data_type == TensorProto.INT4
    assert len(tensors[node.input[0]].raw_data) == inputs * 24 // 2


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


@pytest.mark.parametrize("bits", [8, 4])
def test_float16_goes_on_top(bits: int, tmp_path: Path) -> None:
    model = layer()
    half, kept = to_half(to_weight_only(model, f"int{bits}-weight-only", least_elements=1), "fp16")
    assert kept == ()
    assert [n.op_type for n in half.graph.node] == ["DequantizeLinear", "Cast", "MatMul", "Cast"]
    inputs = feeds(model, 8)
    wanted = run(model, inputs, tmp_path / "a.onnx")
    assert sqnr_db(wanted, in_true_halves(half, inputs)[0]) > LEAST_SQNR_DB[bits] - 1


def test_what_cannot_be_stored_in_fewer_bits_is_refused() -> None:
    old = layer()
    old.opset_import[0].version = 17
    old.graph.node.append(helper.make_node("ReduceMean", ["y"], ["z"], name="mean", axes=[1]))
    broken = with_weight(layer(), "W", np.full((256, 24), np.nan))
    for model, to, least, why in (
        (mnist_like(), INT8, 7841, "7841 elements"),
        (conv_relu(), INT8, 1, "no Gemm or MatMul"),
        (broken, INT8, 1, "weight 'W'"),
        (broken, INT4, 1, "weight 'W'"),
        (to_weight_only(layer(), INT8, least_elements=1), INT8, 1, "quantized already"),
        (old, INT4, 1, r"'mean': ReduceMean of opset 17"),
    ):
        with pytest.raises(BadInput, match=why):
            to_weight_only(model, to, least_elements=least)


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


@pytest.mark.parametrize("graph", [linear, int64_ids, mnist_like])
def test_float16_is_as_numpys_but_for_order_of_sums(graph: Callable[[], onnx.ModelProto]) -> None:
    half, _ = to_half(graph(), "fp16")
    before, inputs = half.SerializeToString(), feeds(graph())
    (wanted,) = in_true_halves(half, inputs)
    assert specs(simulate(half)) == specs(half)
    # numpy adds up in float16, a GPU in float32: some ulp at 4, the size of these outputs
    np.testing.assert_allclose(simulated(half, inputs), wanted, atol=4 * 2.0**-8, rtol=0)
    assert half.SerializeToString() == before


def test_half_inputs_and_outputs_stay_half() -> None:
    model = parse("(float16[N,2] x) => (float16[N,2] y)", "y = Mul(x, x)")
    got = simulated(model, {"x": np.array([[300.0, 3.0]], np.float16)})
    assert got.dtype == np.float16
    np.testing.assert_array_equal(got, [[np.inf, 9.0]])


def test_no_node_but_cast_computes_in_half_and_names_are_kept() -> None:
    half = to_half(mnist_like(), "fp16")[0]
    model = simulate(half)
    onnx.checker.check_model(model, full_check=True)
    typed = onnx.shape_inference.infer_shapes(model).graph.value_info
    halves = {v.name for v in typed if v.type.tensor_type.elem_type == TensorProto.FLOAT16}
    halves |= {t.name for t in model.graph.initializer if t.data_type == TensorProto.FLOAT16}
    for node in model.graph.node:
        assert node.op_type == "Cast" or not halves.intersection((*node.input, *node.output))
    written, kept = ({name for n in m.graph.node for name in n.output} for m in (half, model))
    assert written <= kept


def test_constant_nodes_and_pairs_inside_a_half_graph_are_simulated_too() -> None:
    body = "k = Constant<value_float = 0.1>() y = Add(x, k)"
    half, _ = to_half(parse("(float[N,1] x) => (float[N,1] y)", body), "fp16")
    assert simulated(half, {"x": np.zeros((1, 1), np.float32)}).item() == np.float16(0.1)
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
    """MatMuls of one activation, each with a bias, added up."""
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
    [linear(), int64_ids(), mnist_like(), layers(), gemm(), gemm("transB = 1")],
    ids=["gemm", "ids", "cnn", "shared", "square", "transposed"],
)
def test_outputs_are_close_on_any_data(model: onnx.ModelProto, tmp_path: Path) -> None:
    int8 = written(model)
    onnx.checker.check_model(int8, full_check=True)
    assert specs(int8) == specs(model)
    for scale in (1.0, 1e3):  # there is no range to leave
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


@pytest.mark.parametrize("model", [lstm(), lstm(2, extra=5, direction="bidirectional")])
def test_an_lstm_is_close_with_any_of_its_inputs(model: onnx.ModelProto, tmp_path: Path) -> None:
    int8 = written(model)
    onnx.checker.check_model(int8, full_check=True)
    assert quality_db(model, int8, feeds(model, 32), tmp_path) > LEAST_DYNAMIC_DB


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


def test_what_cannot_be_quantized_says_why(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no Gemm, MatMul or LSTM") as caught:
        dk.quantize(save(conv_relu(), tmp_path / "c.onnx"), "int8-dynamic")
    assert "`to` int8" in str(caught.value.hint)
    with pytest.raises(BadInput, match="other than those kept in float32"):
        written(layers(1), keep_float32=("m0",))
    static, found = quantized(linear(), tmp_path)
    for there in (static, written(linear())):
        with pytest.raises(BadInput, match="quantized already"):
            written(there)
    with pytest.raises(BadInput, match="quantized already"):
        to_pairs(written(linear()), found)
    old = linear()
    old.opset_import[0].version = 10
    assert written(old).opset_import[0].version > 10
    with pytest.raises(BadInput, match="weight 'W' holds NaN"):
        written(with_weight(linear(), "W", np.full((4, 3), np.nan)))


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
