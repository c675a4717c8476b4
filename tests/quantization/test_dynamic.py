"""INT8 whose activations are scaled in each call, and what ONNX Runtime makes of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import deploykit as dk
from deploykit.core.errors import BadInput
from deploykit.graph.graph import Graph
from deploykit.quantization.dynamic import quantizable, to_dynamic
from tests.support.exact_sums import needs_exact_sums
from tests.support.graphs.data import feeds
from tests.support.graphs.protos import node_costs, specs, to_pairs, to_proto
from tests.support.graphs.qdq_graphs import optimised, quality_db, quantized, stored, with_weight
from tests.support.graphs.small import parse
from tests.support.onnx_zoo import conv_relu, int64_ids, linear, make, mnist_like, save

LEAST_SQNR_DB = 35.0  # a layer whose activations fill all 255 steps; see test_qdq.py


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
        assert quality_db(model, int8, inputs, tmp_path) > LEAST_SQNR_DB


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
    assert quality_db(model, int8, feeds(model, 32), tmp_path) > LEAST_SQNR_DB


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
    assert quality_db(lstm(), int8, feeds(model, 3), tmp_path) > LEAST_SQNR_DB


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
    assert quantizable(Graph(mnist_like())) == ("head",)
    computed, gru = lstm(), lstm()
    weights = helper.make_tensor_value_info("R", onnx.TensorProto.FLOAT, (1, 24, 6))
    computed.graph.input.append(weights)
    gru.graph.node[0].op_type = "GRU"
    odd = [gemm(attributes) for attributes in ("alpha = 2.0", "beta = 0.5", "transA = 1")]
    for model in (conv_relu(), *odd, lstm(layout=1), computed, gru):
        assert quantizable(Graph(model)) == ()


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
def test_quantize_needs_no_data_and_build_reads_the_kernels_back(
    model: Path, tmp_path: Path
) -> None:
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


@needs_exact_sums
def test_a_gate_that_it_fails_keeps_it_as_rejected(model: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).random((9, 4, 32), np.float32))
    options = {"data": tmp_path / "x.npz", "max_drop": 1e-9}
    with pytest.raises(dk.GateFailed):
        dk.quantize(model, "int8-dynamic", tmp_path / "q.onnx", **options)
    assert (tmp_path / "q.rejected.onnx").is_file()


@pytest.mark.parametrize("options", [{"runtime": "tensorrt"}, {"profile": "l4"}], ids=str)
def test_other_runtimes_are_refused(model: Path, options: dict[str, str]) -> None:
    with pytest.raises(BadInput, match="int8-dynamic runs only on onnxruntime, not on tensorrt"):
        dk.quantize(model, "int8-dynamic", **options)


def test_auto_tries_it_on_a_cpu(tmp_path: Path) -> None:
    source = save(mnist_like(), tmp_path / "c.onnx")
    np.savez(tmp_path / "calib.npz", **feeds(mnist_like(), 16))
    options = {"calib": tmp_path / "calib.npz", "runtime": "onnxruntime", "max_drop": 1e-9}
    with pytest.raises(dk.GateFailed) as caught:
        dk.quantize(source, "auto", tmp_path / "q.onnx", **options)
    steps = caught.value.result.search.steps
    assert {"int8", "int8-dynamic"} <= {step.precision for step in steps}
