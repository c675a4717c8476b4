from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from deploykit.core.errors import BadInput
from deploykit.graph.edit import fold, raise_opset
from tests.support.graphs.data import feeds
from tests.support.graphs.protos import edit, to_proto
from tests.support.onnx_zoo import make, mnist_like

NORM = ["scale", "shift", "mean", "variance"]


def conv_norm(*, bias: bool = True, epsilon: float = 1e-5, tap: bool = False) -> onnx.ModelProto:
    """Conv -> BatchNormalization; with `tap` the convolution's output is an output too."""
    random = np.random.default_rng(0)
    weights = {name: random.uniform(0.5, 2, 3).astype(np.float32) for name in NORM}
    weights["W"] = random.standard_normal((3, 2, 1, 1)).astype(np.float32)
    weights["b"] = random.standard_normal(3).astype(np.float32)
    inputs = ["x", "W", "b"] if bias else ["x", "W"]
    if not bias:
        del weights["b"]
    nodes = [
        helper.make_node("Conv", inputs, ["c"], name="conv"),
        helper.make_node("BatchNormalization", ["c", *NORM], ["y"], name="norm", epsilon=epsilon),
    ]
    shape = ("N", 3, 4, 4)
    outputs = {"y": shape, "c": shape} if tap else {"y": shape}
    return make(nodes, {"x": ("N", 2, 4, 4)}, outputs, weights)


def folded(model: onnx.ModelProto) -> onnx.ModelProto:
    draft = edit(model)
    fold(draft)
    return to_proto(draft.finish(list(draft.graph.node)))


def outputs(model: onnx.ModelProto) -> list[np.ndarray]:
    x = np.random.default_rng(1).standard_normal((2, 2, 4, 4)).astype(np.float32)
    return [np.asarray(value) for value in ReferenceEvaluator(model).run(None, {"x": x})]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("epsilon", [1e-5, 0.1])
def test_a_batch_norm_folds_into_its_convolution(bias: bool, epsilon: float) -> None:
    model = conv_norm(bias=bias, epsilon=epsilon)
    wanted = outputs(model)
    model = folded(model)
    assert [(n.op_type, list(n.output)) for n in model.graph.node] == [("Conv", ["y"])]
    assert len(model.graph.initializer) == 2
    np.testing.assert_allclose(outputs(model)[0], wanted[0], rtol=1e-5, atol=1e-6)


def test_a_convolution_whose_output_is_read_elsewhere_is_not_folded() -> None:
    model = conv_norm(tap=True)
    wanted = outputs(model)
    model = folded(model)
    assert [node.op_type for node in model.graph.node] == ["Conv", "BatchNormalization"]
    for want, got in zip(wanted, outputs(model), strict=True):
        np.testing.assert_array_equal(got, want)


def test_weights_behind_constant_nodes_become_initializers() -> None:
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    nodes = [
        helper.make_node(
            "Constant", [], ["k"], name="constant", value=numpy_helper.from_array(weight)
        ),
        helper.make_node("Transpose", ["k"], ["t"], name="transpose", perm=[1, 0]),
        helper.make_node("MatMul", ["x", "t"], ["y"], name="matmul"),
    ]
    model = make(nodes, {"x": ("N", 4)}, {"y": ("N", 3)}, {})
    model = folded(model)
    assert [node.op_type for node in model.graph.node] == ["MatMul"]
    (only,) = model.graph.initializer
    assert only.name == "t"
    np.testing.assert_array_equal(numpy_helper.to_array(only), weight.T)


def test_a_constant_that_a_body_reads_is_kept() -> None:
    value = helper.make_tensor_value_info("n", onnx.TensorProto.FLOAT, None)
    body = helper.make_graph(
        [helper.make_node("Identity", ["w"], ["n"], name="same")], "body", [], [value]
    )
    node = helper.make_node("If", ["c"], ["y"], name="if", then_branch=body, else_branch=body)
    weights = {"c": np.array(True), "w": np.ones(4, np.float32)}
    model = make([node], {"x": ("N", 4)}, {"y": (4,)}, weights)
    model = folded(model)
    assert {tensor.name for tensor in model.graph.initializer} == {"c", "w"}


@pytest.mark.parametrize("least", [13, 19, 20, 21])
def test_a_raised_graph_is_valid_and_computes_the_same(least: int) -> None:
    model = mnist_like()
    model.ir_version = 8
    raise_opset(model, least)
    onnx.checker.check_model(model, full_check=True)
    assert model.opset_import[0].version == max(least, 18)  # a newer graph is left as it is
    assert model.ir_version == {13: 8, 21: 10}.get(least, 9)  # by the types of the opset
    inputs = feeds(mnist_like())
    (wanted,) = ReferenceEvaluator(mnist_like()).run(None, inputs)
    np.testing.assert_array_equal(ReferenceEvaluator(model).run(None, inputs)[0], wanted)


def node(kind: str, inputs: list[str], **attributes: object) -> onnx.ModelProto:
    made = helper.make_node(kind, inputs, ["y"], name="guilty", **attributes)
    weights = {"one": np.ones(3, np.float32)}
    model = make(
        [helper.make_node("Relu", ["x"], ["y"], name="relu")], {"x": ("N", 3)}, {}, weights
    )
    model.graph.node[0].CopyFrom(made)
    return model


@pytest.mark.parametrize(
    ("now", "model"),
    [
        (17, node("ReduceMean", ["x"], axes=[1])),  # axes became an input
        (17, node("Split", ["x"])),  # equal parts need a count
        (17, node("Resize", ["x", "", "one"])),
        (18, node("AveragePool", ["x"], kernel_shape=[2], ceil_mode=1)),
        (18, node("GridSample", ["x", "x"], mode="bilinear")),  # its modes have other names
        (20, node("GroupNormalization", ["x", "one", "one"], num_groups=1)),
        (12, node("ReduceSum", ["x"], axes=[1])),
    ],
    ids=lambda value: value.graph.node[0].op_type if isinstance(value, onnx.ModelProto) else None,
)
def test_an_operator_that_changed_its_meaning_is_named(now: int, model: onnx.ModelProto) -> None:
    model.opset_import[0].version = now
    with pytest.raises(BadInput, match=rf"'guilty': \w+ of opset {now}") as caught:
        raise_opset(model, 21)
    assert "--opset 21" in str(caught.value.hint)
    assert model.opset_import[0].version == now


def test_an_average_pool_without_ceil_mode_is_raised() -> None:
    model = node("AveragePool", ["x"], kernel_shape=[2])
    raise_opset(model, 19)
    assert model.opset_import[0].version == 19
