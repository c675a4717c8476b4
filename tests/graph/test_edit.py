from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from deploykit.core.errors import BadInput
from deploykit.graph.edit import fold, raise_opset
from tests.support.graphs.data import feeds
from tests.support.graphs.protos import edit, to_proto
from tests.support.graphs.small import parse
from tests.support.onnx_zoo import mnist_like

ROWS = "(float[N,4] x) => (float[] y)"
NORM = ["scale", "shift", "mean", "variance"]


def conv_norm(*, bias: bool = True, epsilon: float = 1e-5, tap: bool = False) -> onnx.ModelProto:
    """Conv -> BatchNormalization; with `tap` the convolution's output is an output too."""
    random = np.random.default_rng(0)
    weights = {name: random.uniform(0.5, 2, 3) for name in NORM}
    weights["W"] = random.standard_normal((3, 2, 1, 1))
    weights["b"] = random.standard_normal(3)
    outputs = f"float[N,3,4,4] y{', float[N,3,4,4] c' * tap}"
    body = f"c = Conv(x, W{', b' * bias}) "
    body += f"y = BatchNormalization <epsilon = {epsilon:f}> (c, {', '.join(NORM)})"
    return parse(f"(float[N,2,4,4] x) => ({outputs})", body, **weights)


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
    weight = np.arange(12, dtype=np.float32)
    constant = f"k = Constant <value = float[3,4] {{{', '.join(map(str, weight))}}}> ()"
    model = folded(parse(ROWS, f"{constant} t = Transpose(k) y = MatMul(x, t)"))
    assert [node.op_type for node in model.graph.node] == ["MatMul"]
    (only,) = model.graph.initializer
    assert only.name == "t"
    np.testing.assert_array_equal(numpy_helper.to_array(only), weight.reshape(3, 4).T)


def test_a_constant_that_a_body_reads_is_kept() -> None:
    branch = "() => (float[] n) { n = Identity(w) }"
    body = f"y = If <then_branch = t {branch}, else_branch = e {branch}> (c)"
    model = folded(parse(ROWS, body, c=np.array(True), w=np.ones(4)))
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


def node(call: str) -> onnx.ModelProto:
    return parse("(float[N,3] x) => (float[] y)", f"[guilty] y = {call}", one=np.ones(3))


@pytest.mark.parametrize(
    ("now", "call"),
    [
        (17, "ReduceMean <axes = [1]> (x)"),  # axes became an input
        (17, "Split(x)"),  # equal parts need a count
        (17, 'Resize(x, "", one)'),
        (18, "AveragePool <kernel_shape = [2], ceil_mode = 1> (x)"),
        (18, 'GridSample <mode = "bilinear"> (x, x)'),  # its modes have other names
        (20, "GroupNormalization <num_groups = 1> (x, one, one)"),
        (12, "ReduceSum <axes = [1]> (x)"),
        (9, "BatchNormalization(x, one, one, one, one)"),  # its further outputs
    ],
)
def test_an_operator_that_changed_its_meaning_is_named(now: int, call: str) -> None:
    model = node(call)
    model.opset_import[0].version = now
    with pytest.raises(BadInput, match=rf"'guilty': \w+ of opset {now}") as caught:
        raise_opset(model, 21)
    assert "--opset 21" in str(caught.value.hint)
    assert model.opset_import[0].version == now


def test_an_average_pool_without_ceil_mode_is_raised() -> None:
    model = node("AveragePool <kernel_shape = [2]> (x)")
    raise_opset(model, 19)
    assert model.opset_import[0].version == 19
