"""INT8 whose activations are scaled in each call, and what ONNX Runtime makes of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from deploykit.core.errors import BadInput
from deploykit.graph.graph import Graph
from deploykit.quantization.dynamic import quantizable, to_dynamic
from tests.support.exact_sums import needs_exact_sums
from tests.support.graphs.data import feeds, sqnr_db
from tests.support.graphs.protos import node_costs, specs, to_pairs, to_proto
from tests.support.graphs.qdq_graphs import optimised, quantized, run, stored
from tests.support.onnx_zoo import conv_relu, int64_ids, linear, make, mnist_like

LEAST_SQNR_DB = 35.0  # a layer whose activations fill all 255 steps; see test_qdq.py


def written(model: onnx.ModelProto, **options: object) -> onnx.ModelProto:
    return to_proto(to_dynamic(Graph(model), **options))


def gemm(**attributes: object) -> onnx.ModelProto:
    random = np.random.default_rng(0)
    weights = {"w": random.standard_normal((8, 8)).astype(np.float32), "b": np.ones(8, np.float32)}
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], "gemm", **attributes)
    return make([node], {"x": ("N", 8)}, {"y": ("N", 8)}, weights)


def layers(count: int = 2) -> onnx.ModelProto:
    """MatMuls of one activation, each with a bias, added up."""
    random = np.random.default_rng(0)
    weights: dict[str, np.ndarray] = {}
    nodes = []
    for number in range(count):
        weights[f"w{number}"] = random.standard_normal((16, 16)).astype(np.float32)
        weights[f"b{number}"] = random.standard_normal(16).astype(np.float32)
        names = [f"m{number}", f"b{number}"]
        nodes.append(helper.make_node("MatMul", ["x", f"w{number}"], names[:1], f"matmul{number}"))
        nodes.append(helper.make_node("Add", names, [f"a{number}"], f"bias{number}"))
    nodes.append(helper.make_node("Sum", [f"a{n}" for n in range(count)], ["y"], "sum"))
    return make(nodes, {"x": ("N", 4, 16)}, {"y": ("N", 4, 16)}, weights)


def lstm(directions: int = 1, extra: int = 0, **attributes: object) -> onnx.ModelProto:
    """Input x float32[5,N,8] -> all states of 6 units, with `extra` of LSTM's 5 optional inputs."""
    random = np.random.default_rng(0)
    shapes = {"W": (directions, 24, 8), "R": (directions, 24, 6), "B": (directions, 48)}
    weights = {
        name: random.standard_normal(shape).astype(np.float32) / 3 for name, shape in shapes.items()
    }
    weights["P"] = random.standard_normal((directions, 18)).astype(np.float32)
    names = ["x", "W", "R", *["B", "lengths", "h", "c", "P"][:extra]]
    states = {"h": (directions, "N", 6), "c": (directions, "N", 6)}
    inputs = {"x": (5, "N", 8)} | {name: shape for name, shape in states.items() if name in names}
    names = ["" if name == "lengths" else name for name in names]
    weights = {name: array for name, array in weights.items() if name in names}
    node = helper.make_node("LSTM", names, ["y"], "lstm", hidden_size=6, **attributes)
    return make([node], inputs, {"y": (5, directions, "N", 6)}, weights)


@needs_exact_sums
@pytest.mark.parametrize(
    "model",
    [linear(), int64_ids(), mnist_like(), layers(), gemm(), gemm(transB=1)],
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
        wanted = run(model, inputs, tmp_path / "a.onnx")
        assert sqnr_db(wanted, run(int8, inputs, tmp_path / "b.onnx")) > LEAST_SQNR_DB


@pytest.mark.parametrize("count", [1, 3])
def test_onnxruntime_runs_a_layer_and_its_bias_in_one_kernel(count: int, tmp_path: Path) -> None:
    int8 = written(layers(count))
    done = optimised(int8, tmp_path)
    kernels = ("DynamicQuantizeMatMul", "MatMulIntegerToFloat")
    assert sum(done.count(kind) for kind in kernels) == count, done
    assert not {"MatMulInteger", "Add", "Cast", "Mul"} & set(done), done
    built = Graph.open(tmp_path / "optimised.onnx")
    assert built.precision["int8"] == count  # as the files of quantize_dynamic are read, too


@pytest.mark.parametrize("model", [lstm(), lstm(2, extra=5, direction="bidirectional")])
def test_an_lstm_is_close_with_any_of_its_inputs(model: onnx.ModelProto, tmp_path: Path) -> None:
    int8, inputs = written(model), feeds(model, 32)
    onnx.checker.check_model(int8, full_check=True)
    wanted = run(model, inputs, tmp_path / "a.onnx")
    assert sqnr_db(wanted, run(int8, inputs, tmp_path / "b.onnx")) > LEAST_SQNR_DB


def test_an_lstm_becomes_the_operator_of_onnxruntime(tmp_path: Path) -> None:
    int8 = written(lstm())
    assert optimised(int8, tmp_path) == ["DynamicQuantizeLSTM"]
    assert Graph(int8).precision == {"int8": 1}
    assert node_costs(int8, {})[0].flops == node_costs(lstm(), {})[0].flops == 2 * 5 * 24 * (8 + 6)
    values, weight = stored(int8), stored(lstm())["W"]
    np.testing.assert_array_equal(values["W_scale"], np.abs(weight).max(axis=2) / np.float32(127))
    assert {name: values[name].shape for name in ("W_int8", "R_int8", "W_zero", "R_scale")} == {
        "W_int8": (1, 8, 24),
        "R_int8": (1, 6, 24),
        "W_zero": (1, 24),
        "R_scale": (1, 24),
    }
    assert not {"W", "R"} & values.keys()


def test_the_gates_of_an_lstm_may_be_put_in_order_in_the_graph(tmp_path: Path) -> None:
    model, nodes, weights = lstm(), [], stored(lstm())
    for name in ("W", "R"):  # as torch's exporter writes it without folding
        values = np.roll(weights[name][0], 6, axis=0)
        halves = (f"{name}_first", 6, 24), (f"{name}_last", 0, 6)
        for half, start, end in halves:
            nodes.append(helper.make_node("Slice", [f"{name}_torch", str(start), str(end)], [half]))
        nodes.append(
            helper.make_node("Concat", [half for half, *_ in halves], [f"{name}_2"], axis=0)
        )
        nodes.append(helper.make_node("Unsqueeze", [f"{name}_2", "0"], [name]))
        weights[f"{name}_torch"] = values
        del weights[name]
    weights |= {str(n): np.array([n]) for n in (0, 6, 24)}
    del model.graph.initializer[:]
    model.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in weights.items())
    both = [*nodes, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(both)
    int8, inputs = written(model), feeds(model, 3)
    assert optimised(int8, tmp_path) == ["DynamicQuantizeLSTM"]
    wanted = run(lstm(), inputs, tmp_path / "a.onnx")
    assert sqnr_db(wanted, run(int8, inputs, tmp_path / "b.onnx")) > LEAST_SQNR_DB


def test_an_activation_is_quantized_once_for_all_its_readers() -> None:
    kinds = [node.op_type for node in written(layers(3)).graph.node]
    assert kinds.count("DynamicQuantizeLinear") == 1
    assert kinds.count("MatMulInteger") == 3


def test_weights_have_a_scale_per_output() -> None:
    values = stored(written(gemm(transB=1)))
    weight = stored(gemm(transB=1))["w"]
    np.testing.assert_array_equal(values["w_scale"], np.abs(weight).max(axis=1) / np.float32(127))
    assert values["w_int8"].shape == weight.T.shape
    assert "w" not in values


def test_convolutions_and_other_products_stay_float() -> None:
    assert quantizable(Graph(mnist_like())) == ("head",)
    assert quantizable(Graph(conv_relu())) == ()
    for attributes in ({"alpha": 2.0}, {"beta": 0.5}, {"transA": 1}):
        model = gemm(**attributes)
        assert quantizable(Graph(model)) == ()


def test_lstms_that_the_operator_lacks_stay_float() -> None:
    batch_first, computed = lstm(layout=1), lstm()
    computed.graph.input.append(
        helper.make_tensor_value_info("R", onnx.TensorProto.FLOAT, (1, 24, 6))
    )
    gru = lstm()
    gru.graph.node[0].op_type = "GRU"
    for model in (batch_first, computed, gru):
        assert quantizable(Graph(model)) == ()


def test_named_nodes_stay_float() -> None:
    int8 = written(layers(2), keep_float32=("matmul1",))
    node = next(node for node in int8.graph.node if node.name == "matmul1")
    assert list(node.input) == ["x", "w1"]
    assert Graph(int8).precision["int8"] == 1


def test_what_cannot_be_quantized_says_why(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no Gemm, MatMul or LSTM") as caught:
        written(conv_relu())
    assert "`to` int8" in str(caught.value.hint)
    with pytest.raises(BadInput, match="other than those kept in float32"):
        written(layers(1), keep_float32=("matmul0",))
    static, found = quantized(linear(), tmp_path)
    for there in (static, written(linear())):
        with pytest.raises(BadInput, match="quantized already"):
            written(there)
    with pytest.raises(BadInput, match="quantized already"):
        to_pairs(written(linear()), found)
    old = linear()
    old.opset_import[0].version = 10
    assert written(old).opset_import[0].version > 10
    broken = linear()
    weight = numpy_helper.to_array(broken.graph.initializer[0]).copy()
    weight[0, 0] = np.nan
    broken.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "W"))
    with pytest.raises(BadInput, match="weight 'W' holds NaN"):
        written(broken)
