from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from deploykit.core.errors import BadInput
from deploykit.graph.edit import raise_opset
from tests.support.graphs.data import feeds
from tests.support.onnx_zoo import make, mnist_like


@pytest.mark.parametrize("least", [19, 20, 21])
def test_a_raised_graph_is_valid_and_computes_the_same(least: int) -> None:
    model = mnist_like()
    raise_opset(model, least)
    onnx.checker.check_model(model, full_check=True)
    assert model.opset_import[0].version == least
    inputs = feeds(mnist_like())
    (wanted,) = ReferenceEvaluator(mnist_like()).run(None, inputs)
    np.testing.assert_array_equal(ReferenceEvaluator(model).run(None, inputs)[0], wanted)


def test_a_newer_graph_is_left_as_it_is() -> None:
    model = mnist_like()
    raise_opset(model, 13)
    assert model == mnist_like()


def test_the_ir_version_follows_the_types_of_the_opset() -> None:
    model = mnist_like()
    model.ir_version = 8
    raise_opset(model, 21)
    assert model.ir_version == 10


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
