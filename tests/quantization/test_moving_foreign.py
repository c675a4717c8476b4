"""INT8 pairs that another tool placed for TensorRT, placed for ONNX Runtime by their own scales."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from deploykit.graph.graph import Graph
from deploykit.quantization.moving import move_foreign_pairs
from tests.support.graphs.data import feeds, sqnr_db
from tests.support.graphs.foreign_pairs import written_by_onnxruntime
from tests.support.graphs.protos import summarise, to_proto
from tests.support.graphs.qdq_graphs import optimised, run, stored
from tests.support.onnx_zoo import make, mnist_like, save

MOST_LOST_DB = 3.0  # of signal to noise by the move: half a bit


def blocks(
    *, silu: bool = False, join: str = "Add", most: float | None = None, halves: bool = False
) -> onnx.ModelProto:
    """Conv, activation, then two of ResNet's blocks, or of a YOLO's with SiLU or Concat.

    `most`: of a Clip in place of Relu. `halves`: what is joined is cut in two and swapped.
    """
    random = np.random.default_rng(0)
    weights: dict[str, np.ndarray] = {}
    nodes: list[onnx.NodeProto] = []

    def conv(name: str, source: str, channels: int, kernel: int = 3) -> str:
        shape = (8, channels, kernel, kernel)
        weights[f"w_{name}"] = (random.standard_normal(shape) / 6).astype(np.float32)
        nodes.append(
            helper.make_node("Conv", [source, f"w_{name}"], [name], name, pads=[kernel // 2] * 4)
        )
        return name

    def act(source: str) -> str:
        if most is not None:
            weights.update(least=np.array(0, np.float32), most=np.array(most, np.float32))
            names = [source, "least", "most"]
            nodes.append(helper.make_node("Clip", names, [f"{source}_act"], f"clip_{source}"))
            return f"{source}_act"
        if not silu:
            nodes.append(helper.make_node("Relu", [source], [f"{source}_act"], f"relu_{source}"))
            return f"{source}_act"
        gate, out = f"{source}_gate", f"{source}_act"
        nodes.append(helper.make_node("Sigmoid", [source], [gate], f"sigmoid_{source}"))
        nodes.append(helper.make_node("Mul", [source, gate], [out], f"mul_{source}"))
        return out

    last = act(conv("stem", "x", 3))
    for block in "ab":
        skip = last
        body = conv(f"{block}2", act(conv(f"{block}1", last, 8)), 8)
        if join == "Add":
            nodes.append(helper.make_node("Add", [body, skip], [f"{block}_sum"], f"{block}_add"))
            last = act(f"{block}_sum")
        else:
            parts = [act(body), skip]
            if halves:
                cut = [f"{block}_h0", f"{block}_h1"]
                split = {"axis": 1, "num_outputs": 2}
                nodes.append(helper.make_node("Split", parts[:1], cut, f"{block}_s", **split))
                parts = [cut[1], cut[0], skip]
            nodes.append(helper.make_node("Concat", parts, [f"{block}_cat"], f"{block}_c", axis=1))
            last = act(conv(f"{block}3", f"{block}_cat", 16, 1))
    conv("y", last, 8, 1)
    return make(nodes, {"x": ("N", 3, 8, 8)}, {"y": ("N", 8, 8, 8)}, weights)


CASES: dict[str, Callable[[], onnx.ModelProto]] = {
    "sequence": mnist_like,
    "residual": blocks,
    "silu": lambda: blocks(silu=True),
    "concat": lambda: blocks(join="Concat"),
    "clip": lambda: blocks(most=1.0),
    "halves": lambda: blocks(join="Concat", halves=True),
    "silu concat": lambda: blocks(silu=True, join="Concat"),
}


@pytest.mark.parametrize("case", CASES)
def test_onnxruntime_runs_a_foreign_file_in_integers_once_moved(case: str, tmp_path: Path) -> None:
    model = CASES[case]()
    foreign = written_by_onnxruntime(model, tmp_path)
    before = optimised(to_proto(foreign), tmp_path)
    assert not [kind for kind in before if kind.startswith("QLinear")], before
    moved = move_foreign_pairs(foreign, "onnxruntime")
    assert moved is not None
    done = optimised(to_proto(moved[0]), tmp_path)
    convs = sum(node.op_type == "Conv" for node in model.graph.node)
    # all but the last: what it writes is a result or, in float, what a head of float reads
    assert done.count("QLinearConv") >= convs - 1, done
    assert not {"Add", "Concat", "Mul", "Sigmoid"} & set(done), done
    inputs = feeds(model, 32, seed=1)
    wanted = run(model, inputs, tmp_path / "a.onnx")
    there = sqnr_db(wanted, run(to_proto(foreign), inputs, tmp_path / "b.onnx"))
    assert (
        sqnr_db(wanted, run(to_proto(moved[0]), inputs, tmp_path / "c.onnx")) > there - MOST_LOST_DB
    )
    onnx.checker.check_model(to_proto(moved[0]), full_check=True)


def test_weights_that_pass_through_a_pair_are_taken_as_int8(tmp_path: Path) -> None:
    foreign = written_by_onnxruntime(blocks(), tmp_path, AddQDQPairToWeight=True)
    assert stored(to_proto(foreign))["w_stem"].dtype == np.float32
    moved = move_foreign_pairs(foreign, "onnxruntime")
    assert moved is not None
    assert optimised(to_proto(moved[0]), tmp_path).count("QLinearConv") == 5


def by_hand(
    *, transposed: bool = False, uint8: bool = False, ends: bool = False
) -> onnx.ModelProto:
    """Two MatMuls; their weights transposed, or unsigned and shifted; the result through a pair."""
    random = np.random.default_rng(1)
    zero = np.full(4, 128 if uint8 else 0, np.uint8 if uint8 else np.int8)
    weights: dict[str, np.ndarray] = {"s": np.array(0.05, np.float32), "z": np.array(0, np.int8)}
    nodes = []
    last = "x"
    for layer in "ab":
        levels = random.integers(-100, 100, (4, 4)) + int(zero[0])
        weights |= {
            f"w{layer}": levels.astype(zero.dtype),
            f"s{layer}": random.uniform(0.005, 0.02, 4).astype(np.float32),
            f"z{layer}": zero,
        }
        names = [f"{each}{layer}" for each in ("w", "s", "z")]
        axis = 0 if transposed else 1
        nodes += [
            helper.make_node("QuantizeLinear", [last, "s", "z"], [f"q{layer}"], f"q{layer}"),
            helper.make_node("DequantizeLinear", [f"q{layer}", "s", "z"], [f"d{layer}"]),
            helper.make_node("DequantizeLinear", names, [f"dw{layer}"], axis=axis),
        ]
        weight = f"dw{layer}"
        if transposed:
            nodes.append(helper.make_node("Transpose", [weight], [f"t{layer}"], perm=[1, 0]))
            weight = f"t{layer}"
        nodes.append(helper.make_node("MatMul", [f"d{layer}", weight], [f"m{layer}"], f"m{layer}"))
        last = f"m{layer}"
    if ends:
        nodes.append(helper.make_node("QuantizeLinear", ["mb", "s", "z"], ["qy"]))
        nodes.append(helper.make_node("DequantizeLinear", ["qy", "s", "z"], ["y"]))
    else:
        nodes[-1].output[0] = "y"
    return make(nodes, {"x": ("N", 4)}, {"y": ("N", 4)}, weights)


@pytest.mark.parametrize("options", [{}, {"transposed": True}, {"uint8": True}, {"ends": True}])
def test_weights_are_read_as_their_pairs_mean_them(
    options: dict[str, bool], tmp_path: Path
) -> None:
    source = by_hand(**options)
    moved = move_foreign_pairs(Graph(source), "onnxruntime")
    assert moved is not None
    assert summarise(to_proto(moved[0])).precision.get("int8") == 2
    inputs = feeds(source, 64)
    wanted = run(source, inputs, tmp_path / "a.onnx")
    least = 12 if options.get("ends") else 20  # the steps of the last pair, which is gone
    assert sqnr_db(wanted, run(to_proto(moved[0]), inputs, tmp_path / "b.onnx")) > least


def test_a_tensor_that_others_read_is_not_clipped_to_what_one_reader_needs(tmp_path: Path) -> None:
    """Before a Relu less than 0 is nothing, but the second output shows it."""
    model = blocks()
    model.graph.output.append(helper.make_tensor_value_info("a_sum", 1, ["N", 8, 8, 8]))
    foreign = written_by_onnxruntime(model, tmp_path)
    moved = move_foreign_pairs(foreign, "onnxruntime")
    assert moved is not None
    path = save(to_proto(moved[0]), tmp_path / "b.onnx")
    from deploykit.engines.engine import load

    with load(path, "cpu") as engine:
        assert engine(feeds(model, 8))["a_sum"].min() < 0


@pytest.mark.parametrize("why", ["integers", "computed", "half", "none"])
def test_what_is_not_pairs_in_float32_is_left(why: str, tmp_path: Path) -> None:
    model = by_hand()
    if why == "integers":
        model.graph.node.append(helper.make_node("Cast", ["qa"], ["n"], to=TensorProto.INT32))
        model.graph.output.append(helper.make_tensor_value_info("n", TensorProto.INT32, ["N", 4]))
    elif why == "computed":
        model.graph.node.insert(0, helper.make_node("Abs", ["s"], ["s_abs"]))
        model.graph.node[1].input[1] = model.graph.node[2].input[1] = "s_abs"
    elif why == "half":
        from tests.support.graphs.protos import to_half

        model, _ = to_half(model)
    else:
        model = mnist_like()
    assert move_foreign_pairs(Graph(model), "onnxruntime") is None
