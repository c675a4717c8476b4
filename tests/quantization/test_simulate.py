from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from deploykit.engines.onnxruntime.engine import session_options
from deploykit.quantization.calibrate import Range
from tests.support.graphs.data import calibration, feeds, in_true_halves
from tests.support.graphs.protos import simulate, specs, to_half, to_pairs
from tests.support.onnx_zoo import int64_ids, linear, make, mnist_like, overflow

LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL")


def run(
    model: onnx.ModelProto, inputs: dict[str, np.ndarray], level: str = "ORT_DISABLE_ALL"
) -> np.ndarray:
    options = session_options(1)
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(None, inputs)[0])


@pytest.mark.parametrize("level", LEVELS)
def test_a_product_beyond_float16_is_infinite_as_on_a_gpu(level: str) -> None:
    half, _ = to_half(overflow(), "fp16")
    x = np.array([[1, 6, 7, -32]], np.float32)
    got = run(simulate(half), {"x": x}, level)
    np.testing.assert_array_equal(np.isinf(got), [[False, False, True, True]])


@pytest.mark.parametrize("level", LEVELS)
def test_bfloat16_has_the_range_of_float32(level: str) -> None:
    half, _ = to_half(overflow(), "bf16")
    x = np.full((1, 4), 32.0, np.float32)
    np.testing.assert_allclose(run(simulate(half), {"x": x}, level), 33.0, rtol=2**-7)


def plus_zero() -> onnx.ModelProto:
    nodes = [helper.make_node("Add", ["x", "zero"], ["y"], name="add")]
    row = ("N", 4)
    return make(nodes, {"x": row}, {"y": row}, {"zero": np.zeros(1, np.float32)})


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("to", "bits"), [("fp16", 11), ("bf16", 8)])
def test_values_are_rounded_to_the_type_ties_to_even(to: str, bits: int, level: str) -> None:
    half, _ = to_half(plus_zero(), to)
    ulp = 2.0 ** (1 - bits)  # at 1.0
    x = np.array([[1 + ulp / 4, 1 + ulp / 2, 1 + 3 * ulp / 2, 1 + ulp]], np.float32)
    wanted = [[1.0, 1.0, 1 + 2 * ulp, 1 + ulp]]
    np.testing.assert_array_equal(run(simulate(half), {"x": x}, level), wanted)


@pytest.mark.parametrize("graph", [linear, int64_ids, mnist_like])
def test_float16_is_as_numpys_own_but_for_the_order_of_sums(graph: object) -> None:
    model = graph()  # type: ignore[operator]
    half, _ = to_half(model, "fp16")
    inputs = feeds(model)
    (wanted,) = in_true_halves(half, inputs)
    assert specs(simulate(half)) == specs(half)
    # numpy adds up in float16, a GPU in float32: some ulp at 4, the size of these outputs
    np.testing.assert_allclose(run(simulate(half), inputs), wanted, atol=4 * 2.0**-8, rtol=0)


def test_half_inputs_and_outputs_stay_half() -> None:
    node = helper.make_node("Mul", ["x", "x"], ["y"], name="square")
    model = make([node], {"x": ("N", 2)}, {"y": ("N", 2)}, {})
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    got = run(simulate(model), {"x": np.array([[300.0, 3.0]], np.float16)})
    assert got.dtype == np.float16
    np.testing.assert_array_equal(got, [[np.inf, 9.0]])


def test_half_tensors_keep_their_names_and_hold_rounded_values() -> None:
    half, _ = to_half(mnist_like(), "fp16")
    names = {name for node in half.graph.node for name in node.output}
    assert names <= {name for node in simulate(half).graph.node for name in node.output}


def test_no_node_but_cast_computes_in_half() -> None:
    model = simulate(to_half(mnist_like(), "fp16")[0])
    onnx.checker.check_model(model, full_check=True)
    typed = onnx.shape_inference.infer_shapes(model).graph.value_info
    halves = {v.name for v in typed if v.type.tensor_type.elem_type == TensorProto.FLOAT16}
    halves |= {t.name for t in model.graph.initializer if t.data_type == TensorProto.FLOAT16}
    for node in model.graph.node:
        assert node.op_type == "Cast" or not halves.intersection((*node.input, *node.output))


def test_a_half_constant_node_keeps_its_value() -> None:
    nodes = [
        helper.make_node("Constant", [], ["k"], name="constant", value_float=0.1),
        helper.make_node("Add", ["x", "k"], ["y"], name="add"),
    ]
    model = make(nodes, {"x": ("N", 1)}, {"y": ("N", 1)}, {})
    got = run(simulate(to_half(model, "fp16")[0]), {"x": np.zeros((1, 1), np.float32)})
    assert got.item() == np.float16(0.1)


def test_pairs_inside_a_half_graph_are_simulated_too() -> None:
    int8 = to_pairs(linear(), calibration({"x": Range(-4.0, 4.0)}))
    half, _ = to_half(int8, "fp16")
    inputs = feeds(linear())
    got = run(simulate(half), inputs)
    wanted = run(int8, inputs)
    np.testing.assert_allclose(got, wanted, atol=0.05)  # a scale in half moves it by 2^-12


def test_the_source_is_left_alone() -> None:
    half, _ = to_half(mnist_like(), "fp16")
    before = half.SerializeToString()
    simulate(half)
    assert half.SerializeToString() == before
