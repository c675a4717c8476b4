from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from deploykit.engines.data.samples import Samples
from deploykit.quantization.calibrate import Range
from tests.support.graphs.data import in_true_halves
from tests.support.graphs.protos import calibrate, to_half
from tests.support.onnx_zoo import make, save

LOWEST = float(np.finfo(np.float32).min)
ROW = ("N", 6)
MASK = np.array([[1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]] * 4, np.int64)  # the second masks all
X = np.linspace(-3, 3, 48, dtype=np.float32).reshape(8, 6)


def node(kind: str, inputs: str, output: str, **attributes: object) -> onnx.NodeProto:
    return helper.make_node(kind, inputs.split(), [output], name=output, **attributes)


def attention(*nodes: onnx.NodeProto, end: str = "Softmax") -> onnx.ModelProto:
    """Scores x float32[N,6], mask int64[N,6] -> probabilities y."""
    lowest = node("Constant", "", "lowest", value_float=LOWEST)
    stored = {"zero": np.array(0, np.float32), "one": np.array(1, np.float32)}
    stored["minimum"] = np.array(LOWEST, np.float32)
    last = node(end, "masked", "y")
    inputs = {"x": ROW, "mask": ROW}
    return make([lowest, *nodes, last], inputs, {"y": ROW}, stored, integers=("mask",))


FLOAT = TensorProto.FLOAT
PRODUCT = (
    node("Cast", "mask", "kept", to=FLOAT),
    node("Sub", "one kept", "gone"),
    node("Mul", "gone minimum", "bias"),
    node("Add", "x bias", "masked"),
)
CHOICE = (
    node("Cast", "mask", "kept", to=TensorProto.BOOL),
    node("Where", "kept zero lowest", "bias"),
    node("Add", "x bias", "masked"),
)
TWICE = (*PRODUCT[:3], node("Add", "x bias", "once"), node("Add", "once bias", "masked"))
UNMASKED = (  # Hugging Face finds the rows that are masked as a whole by comparing
    *CHOICE[:2],
    node("Equal", "bias minimum", "all"),
    node("Where", "all zero bias", "some"),
    node("Add", "x some", "masked"),
)


@pytest.mark.parametrize("nodes", [PRODUCT, CHOICE, TWICE, UNMASKED])
def test_a_mask_of_the_lowest_float32_keeps_no_node_in_float32(
    nodes: tuple[onnx.NodeProto, ...], tmp_path: Path
) -> None:
    whole = attention(*nodes)
    mask = MASK.copy()
    mask[:, 0] = nodes is TWICE or mask[:, 0]  # a row masked as a whole, twice, is NaN in float32
    feeds = {"x": X, "mask": mask}
    ranges = calibrate(save(whole, tmp_path / "m.onnx"), Samples(feeds, None, "data")).ranges
    half, kept = to_half(whole, ranges=ranges)
    assert kept == ()
    (y,) = in_true_halves(half, feeds)
    (want,) = in_true_halves(whole, feeds)
    np.testing.assert_allclose(y[0], want[0], atol=1e-3)
    assert np.isfinite(y).all()
    if nodes is not UNMASKED:
        assert (y[0, 3:] == 0).all()


def test_a_mask_that_reaches_an_output_is_left_as_it_is() -> None:
    whole = attention(*CHOICE, end="Relu")
    assert to_half(whole)[1] != ()


def test_the_bound_of_a_clip_is_left_as_it_is() -> None:
    whole = attention(*CHOICE[:1], node("Clip", "x minimum", "masked"))
    assert to_half(whole)[1] == ("lowest", "masked")


def test_a_large_finite_value_is_no_mask() -> None:
    whole = attention(*PRODUCT)
    assert to_half(whole, ranges={"x": Range(-70000.0, 1.0)})[1] == ("masked",)
