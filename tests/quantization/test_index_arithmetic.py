from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from deploykit.engines.engine import load
from tests.support.graphs.data import in_true_halves
from tests.support.graphs.protos import summarise, to_half
from tests.support.onnx_zoo import make, save

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
LENGTHS = (301, 2051, 4099)
ONE, ZERO = np.array(1, np.float32), np.array(0, np.float32)

Node = onnx.NodeProto


def node(kind: str, inputs: str, output: str, **attributes: object) -> Node:
    return helper.make_node(kind, inputs.split(), [output], name=output, **attributes)


def arange() -> list[Node]:
    """As `torch.arange(x.shape[1], dtype=float32)` is exported: `positions` float32[T]."""
    return [
        node("Shape", "x", "sizes", start=1, end=2),
        node("Squeeze", "sizes", "length"),
        node("Cast", "length", "limit", to=FLOAT),
        node("Range", "zero limit one", "positions"),
    ]


def model(
    nodes: Sequence[Node],
    weights: Mapping[str, np.ndarray] | None = None,
    y: tuple[int | str, ...] = ("N", "T"),
) -> onnx.ModelProto:
    constants = {"one": ONE, "zero": ZERO, **(weights or {})}
    return make([*nodes], {"x": ("N", "T")}, {"y": y}, constants)


def positions_added() -> onnx.ModelProto:
    scale = {"scale": np.array(2.0**-12, np.float32)}
    return model(
        [*arange(), node("Mul", "positions scale", "small"), node("Add", "x small", "y")], scale
    )


def rotary() -> onnx.ModelProto:
    """Angles as Hugging Face computes them: an outer product of frequencies and positions."""
    nodes = [
        *arange(),
        node("Unsqueeze", "positions first", "row"),
        node("MatMul", "frequencies row", "angles"),
        node("Cos", "angles", "waves"),
        node("ReduceSum", "waves first", "wave", keepdims=1),
        node("Mul", "x wave", "y"),
    ]
    weights = {
        "frequencies": (10.0 ** -np.arange(4)).astype(np.float32)[:, None],
        "first": np.array([0], np.int64),
    }
    return model(nodes, weights)


def padding_mask() -> onnx.ModelProto:
    """1 where a position is before the last but one, float32 on both sides of the comparison."""
    nodes = [
        *arange(),
        node("Sub", "limit one", "last"),
        node("Less", "positions last", "inside"),
        node("Where", "inside x zero", "y"),
    ]
    return model(nodes)


def buckets() -> onnx.ModelProto:
    """T5's: the logarithm of a distance becomes an index."""
    nodes = [
        *arange(),
        node("Add", "positions one", "distances"),
        node("Log", "distances", "logs"),
        node("Mul", "logs scale", "scaled"),
        node("Cast", "scaled", "bucket", to=INT64),
        node("Cast", "bucket", "values", to=FLOAT),
        node("Mul", "values step", "small"),
        node("Add", "x small", "y"),
    ]
    weights = {"scale": np.array(100, np.float32), "step": np.array(2.0**-10, np.float32)}
    return model(nodes, weights)


def table_of_positions() -> onnx.ModelProto:
    """A constant of integers, which the exporter made of an arange of fixed length."""
    nodes = [
        *arange(),
        node("Slice", "table zeros sizes", "cut"),
        node("Sub", "cut positions", "difference"),
        node("Add", "x difference", "y"),
    ]
    weights = {"table": np.arange(5000, dtype=np.float32), "zeros": np.array([0], np.int64)}
    return model(nodes, weights)


def sum_of_lengths() -> onnx.ModelProto:
    """Durations of a speech model: their sum is how long the output is."""
    nodes = [
        node("Mul", "x two", "durations"),
        node("ReduceSum", "durations", "total", keepdims=0),
        node("Range", "zero total one", "r"),
        node("Sub", "r r", "nothing"),
        node("Add", "nothing one", "y"),
    ]
    return model(nodes, {"two": np.array(2, np.float32)}, y=("L",))


def double_positions() -> onnx.ModelProto:
    nodes = [
        node("Shape", "x", "sizes", start=1, end=2),
        node("Squeeze", "sizes", "length"),
        node("Cast", "length", "limit", to=TensorProto.DOUBLE),
        node("Range", "zero64 limit one64", "positions64"),
        node("Cast", "positions64", "positions", to=FLOAT),
        node("Sub", "positions flipped", "back"),
        node("Mul", "back scale", "small"),
        node("Add", "x small", "y"),
    ]
    weights = {
        "zero64": np.array(0, np.float64),
        "one64": np.array(1, np.float64),
        "flipped": np.array(17, np.float32),
        "scale": np.array(2.0**-12, np.float32),
    }
    return model(nodes, weights)


@pytest.mark.parametrize("to", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "graph",
    [
        positions_added,
        rotary,
        padding_mask,
        buckets,
        table_of_positions,
        sum_of_lengths,
        double_positions,
    ],
)
def test_indices_and_lengths_are_exact_at_any_length(
    graph: Callable[[], onnx.ModelProto], to: str, tmp_path: Path
) -> None:
    whole = graph()
    half, _ = to_half(whole, to)
    onnx.checker.check_model(half, full_check=True)
    with load(save(whole, tmp_path / "whole.onnx"), "cpu") as reference:
        for length in LENGTHS:
            x = {"x": np.ones((1, length), np.float32)}
            want = reference(x)["y"]
            got = in_true_halves(half, x)[0]
            assert got.shape == want.shape
            # the outputs are below 16: what is left is their own rounding, 2**-8 relative in bf16
            np.testing.assert_allclose(got, want, atol=2**-4 if to == "bf16" else 2**-7, rtol=0)


def test_activations_around_indices_stay_half() -> None:
    half, kept = to_half(rotary())
    assert kept == ()
    types = {n.name: n for n in half.graph.node}
    assert all(name.endswith("_float16") for name in types["y"].input)


def test_an_embedding_is_no_index() -> None:
    nodes = [
        node("Gather", "table ids", "words"),
        node("Mul", "words two", "scaled"),
        node("Relu", "scaled", "y"),
    ]
    weights = {
        "table": np.linspace(0, 1, 80, dtype=np.float32).reshape(10, 8),
        "two": np.array(2.0, np.float32),
    }
    whole = make(nodes, {"ids": ("N", 5)}, {"y": ("N", 5, 8)}, weights, integers=("ids",))
    assert summarise(to_half(whole)[0]).precision == {"float16": 3}


def test_weights_on_integer_inputs_are_half() -> None:
    nodes = [node("Cast", "i", "f", to=FLOAT), node("MatMul", "f W", "h"), node("Relu", "h", "y")]
    weights = {"W": np.linspace(0, 1, 80, dtype=np.float32).reshape(10, 8)}
    whole = make(nodes, {"i": ("N", 10)}, {"y": ("N", 8)}, weights, integers=("i",))
    assert summarise(to_half(whole)[0]).precision == {"float16": 2}
