from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import ArrayLike
from onnx import TensorProto

from deploykit.core.errors import BadInput
from deploykit.engines.engine import load
from deploykit.graph import cost as kinds
from deploykit.graph.cost import (
    Ceilings,
    Curve,
    NodeCost,
    costs_of,
    fixed_shapes,
    node_time,
    peak_bytes,
    predicted_s,
    savings_s,
)
from deploykit.graph.graph import Graph
from deploykit.planning import probe as chains
from deploykit.planning.probe import Chain
from tests.support.graphs.data import samples
from tests.support.graphs.protos import calibrate, mix, node_costs, summarise, to_pairs
from tests.support.graphs.small import parse
from tests.support.onnx_zoo import conv_relu, int64_ids, linear, mnist_like, save, two_inputs

PEAKS = {"fp32": 1e12, "fp16": 4e12, "int8": 8e12}  # of a made-up target
TARGET = Ceilings(PEAKS, 1e9)
IMAGE, ROWS = "float[1,2,8,8] x", "(float[N,4] x) => (float[] y)"


def costs(
    head: str, body: str, sizes: Mapping[str, int] | None = None, **constants: ArrayLike
) -> dict[str, NodeCost]:
    """Costs by the name of a node's first output."""
    graph = parse(head, body, **constants)
    return {cost.name: cost for cost in node_costs(graph, sizes or {})}


def test_resnet18_has_the_operations_that_torchvision_states() -> None:
    channels_of = {"x": 3, "pool": 64}
    inputs, lines = ["float[N,3,224,224] x", "float[1000,512] w"], []

    def conv(source: str, channels: int, kernel: int, stride: int = 1) -> str:
        out, options = f"t{len(lines)}", f"strides = {[stride] * 2}, pads = {[kernel // 2] * 4}"
        inputs.append(f"float[{channels},{channels_of[source]},{kernel},{kernel}] w{out}")
        lines.append(f"{out} = Conv <{options}> ({source}, w{out})")
        channels_of[out] = channels
        return out

    pool = "kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]"
    lines.append(f"pool = MaxPool <{pool}> ({conv('x', 64, 7, 2)})")
    last = "pool"
    for channels in (64, 128, 256, 512):
        for stride in (1 if channels == 64 else 2, 1):
            entry, last = last, conv(conv(last, channels, 3, stride), channels, 3)
            if stride == 2:
                conv(entry, channels, 1, 2)
    lines.append(f"a = GlobalAveragePool({last}) f = Flatten(a) y = Gemm <transB = 1> (f, w)")
    found = costs(f"({', '.join(inputs)}) => (float[] y)", " ".join(lines)).values()
    products = sum(c.flops or 0 for c in found if c.operator in ("Conv", "Gemm"))
    assert products / 2e9 == pytest.approx(1.814, abs=5e-4)  # torchvision: GFLOPS 1.81


@pytest.mark.parametrize(
    ("inputs", "call", "flops"),
    [
        ("float[5,7,3] a, float[3,4] b", "MatMul(a, b)", 2 * 5 * 7 * 4 * 3),
        ("float[2,8,7,3] a, float[2,8,3,7] b", "MatMul(a, b)", 2 * 2 * 8 * 7 * 7 * 3),
        ("float[6,5] a, float[5,4] b", "Gemm(a, b)", 2 * 6 * 5 * 4),
        ("float[6,5] a, float[6,4] b", "Gemm <transA = 1> (a, b)", 2 * 6 * 5 * 4),
        ("float[1,8,9,9] x, float[16,2,3,3] w", "Conv <group = 4> (x, w)", 2 * 16 * 49 * 2 * 9),
        ("float[1,8,5,5] x, float[8,4,2,2] w", "ConvTranspose <strides = [2, 2]> (x, w)", 6400),
        (IMAGE, "MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x)", 2 * 16 * 4),
        (IMAGE, "GlobalAveragePool(x)", 128),
        ("float[2,10] x", "Softmax(x)", 100),
        ("float[2,10] x", "Relu(x)", 20),
        ("float[2,10] a, float[10] b", "Add(a, b)", 20),
        ("float[2,10] x", "Transpose(x)", 0),
        *(  # 12 steps, batch 2, both directions
            (
                f"float[12,2,5] x, float[2,{7 * gates},5] w, float[2,{7 * gates},7] r",
                f'{kind} <hidden_size = 7, direction = "bidirectional"> (x, w, r)',
                2 * 12 * 2 * 2 * gates * 7 * (5 + 7),
            )
            for kind, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1))
        ),
    ],
)
def test_operations_by_hand(inputs: str, call: str, flops: int) -> None:
    assert costs(f"({inputs}) => (float[] y)", f"y = {call}")["y"].flops == flops


def test_dynamic_axes_take_the_sizes_that_are_given_and_are_one_otherwise() -> None:
    for sizes, flops in (({}, 24), ({"N": 5, "T": 7}, 24 * 35)):
        head = "(float[N,T,4] x, float[4,3] w) => (float[N,M,3] y)"
        found = costs(head, "y = MatMul(x, w)", sizes)
        assert found["y"].flops == flops
    model = linear()
    model.graph.input[0].type.tensor_type.shape.dim[0].Clear()
    assert node_costs(model, {"N": 3})[0].flops == 2 * 3 * 4 * 3  # as specs names it
    with pytest.raises(BadInput, match="axis N cannot be of size 0"):
        node_costs(linear(), {"N": 0})


SHAPES = """
    s = Shape <start = 0, end = 2> (x) p = ReduceProd <keepdims = 0> (s)
    first = Gather(s, zero) second = Gather(s, one) m = Mul(first, second)
    rows = Reshape(m, flat) shape = Concat <axis = 0> (rows, four)
    y = Reshape(x, shape) z = MatMul(y, w)
"""
MASK = f"""
    two = Constant <value_ints = [2]> () zeros = ConstantOfShape(two)
    whole = Cast <to = {TensorProto.INT64}> (zeros) threes = Add(whole, three)
    square = Expand(one, threes) shape = Shape(square) r = Reshape(x, shape) z = MatMul(r, r)
"""


def test_shapes_are_followed_through_arithmetic_on_shapes_and_where_they_are_generated() -> None:
    """As torch's exporters write them: inference alone does not see through these."""
    weights = {"zero": 0, "one": 1, "flat": [-1], "four": [4], "w": np.ones((4, 3))}
    found = costs("(float[N,T,4] x) => (float[] z)", SHAPES, {"N": 2, "T": 5}, **weights)
    assert found["z"].flops == 2 * 10 * 4 * 3
    found = costs("(float[N] x) => (float[] z)", MASK, {"N": 9}, three=[3, 3], one=np.ones(1))
    assert found["z"].flops == 2 * 27


@pytest.mark.parametrize("stated", ["[]", "[1]"])
@pytest.mark.parametrize("call", ["ConstantOfShape(huge)", "Range(zero, end, one)"])
def test_a_huge_constant_is_not_made(
    call: str, stated: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10^12 elements would be 8 TB, whatever shape the file states."""
    made = list[onnx.NodeProto]()
    monkeypatch.setattr(kinds, "evaluate_node", lambda node, *_: made.append(node))
    weights = {"huge": [10**6, 10**6], "zero": 0, "end": 10**12, "one": 1}
    kind = "int64" if "Range" in call else "float"
    head, body = f"(float[N] x) => ({kind}{stated} c, int64[] z)", f"c = {call} z = NonZero(x)"
    assert costs(head, body, **weights)["c"].flops == 0
    assert not made


def test_what_is_not_known_is_none() -> None:
    body = "places = NonZero(x) rows = Transpose(places) y = Relu(x)"
    found = costs("(float[N,4] x) => (int64[] rows, float[] y)", body)
    assert found["places"].flops is None
    assert found["rows"].write_bytes is None
    assert predicted_s(found.values(), TARGET) > 0


def test_a_damaged_graph_and_a_body_that_runs_an_unknown_number_of_times_are_not_known() -> None:
    body = "g = Gather(four, nine) r = Reshape(x, g) y = Relu(r)"
    assert costs(ROWS, body, four=[4], nine=[9])["y"].flops is None
    branch = "() => (float[] n) { n = Neg(x) }"
    body = f"y = If <then_branch = a {branch}, else_branch = b {branch}> (c)"
    assert costs(ROWS, body, c=np.array(True))["y"].flops is None


def test_nodes_without_a_name_get_the_names_that_reports_use() -> None:
    model = two_inputs()
    for node in model.graph.node:
        node.name = ""
    assert [c.name for c in node_costs(model, {})] == ["Add_0", "Mul_1"]
    assert not model.graph.node[0].name  # the model itself is left alone


def test_functions_are_looked_into() -> None:
    twice = '<domain: "local", opset_import: ["" : 18]> Twice (a) => (b) { b = Add(a, a) }'
    opsets = '<ir_version: 10, opset_import: ["" : 18, "local" : 1]>'
    graph = "g (float[N,4] x) => (float[N,4] y) { y = local.Twice(x) }"
    (found,) = node_costs(onnx.parser.parse_model(f"{opsets} {graph} {twice}"), {"N": 3})
    assert (found.operator, found.flops) == ("Add", 12)


def test_a_large_model_is_not_copied() -> None:
    """Shapes are enough: the data of this weight are missing."""
    model = linear()
    model.graph.initializer[0].CopyFrom(
        TensorProto(name="W", data_type=TensorProto.FLOAT, dims=(10**5, 10**5))
    )
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 10**5
    assert node_costs(model, {})[0].weight_bytes == 4 * 10**10 + 12


def test_an_activation_runs_inside_the_convolution_before_it() -> None:
    conv, relu = node_costs(conv_relu(), {"N": 2})
    image, result = 2 * 64 * 4, 2 * 4 * 64 * 4
    assert (conv.read_bytes, conv.write_bytes) == (image, result)
    assert (relu.read_bytes, relu.write_bytes) == (0, 0)


def test_a_tensor_that_two_nodes_read_goes_through_memory() -> None:
    found = costs("(float[10] x) => (float[] y)", "r = Relu(x) n = Neg(r) y = Add(r, n)")
    assert (found["r"].write_bytes, found["n"].read_bytes) == (40, 80)  # Add, inside Neg, reads r
    assert (found["n"].write_bytes, found["y"].read_bytes) == (40, 0)


def test_a_table_that_is_looked_up_is_read_by_the_row() -> None:
    embed, project = node_costs(int64_ids(), {"N": 1})
    assert (embed.weight_bytes, embed.weights) == (10 * 8 * 4, 80)
    assert embed.traffic_bytes == 5 * 8 + 2 * 5 * 8 * 4  # ids, the rows, and their copy
    assert project.traffic_bytes == 4 * (5 * 8 + 8 * 3 + 5 * 3)


def quantized(tmp_path: Path) -> onnx.ModelProto:
    path = save(mnist_like(), tmp_path / "m.onnx")
    return to_pairs(mnist_like(), calibrate(path, samples(mnist_like())))


def test_int8_weights_and_activations_are_a_byte_each(tmp_path: Path) -> None:
    wide = {cost.name: cost for cost in node_costs(mnist_like(), {})}
    narrow = {cost.name: cost for cost in node_costs(quantized(tmp_path), {})}
    assert wide["head"].weight_bytes == (784 * 10 + 10) * 4
    assert narrow["head"].weight_bytes == 784 * 10 + 10 * 4  # the bias is float
    assert (wide["head"].read_bytes, narrow["head"].read_bytes) == (784 * 4, 784)
    assert (wide["head"].precision, narrow["head"].precision) == ("float32", "int8")
    assert wide["head"].flops == narrow["head"].flops == 2 * 784 * 10


def test_dequantized_weights_are_counted_where_they_are_used() -> None:
    body = "dq = DequantizeLinear(q, scale) product = MatMul(x, dq) z = Reshape(product, shape)"
    weights = {"q": np.ones((4, 3), np.int8), "scale": 0.1, "shape": [3, 2]}
    found = costs("(float[2,4] x) => (float[] z)", body, **weights)
    assert found["z"].weight_bytes == 0  # a shape is no weight
    assert (found["dq"].weight_bytes, found["dq"].traffic_bytes) == (0, 0)
    assert (found["product"].weight_bytes, found["product"].precision) == (12, "float32")


def test_views_and_nodes_of_constants_cost_nothing() -> None:
    body = "t = Transpose(w) minus = Neg(t) flat = Flatten(x) y = MatMul(flat, minus)"
    found = costs("(float[2,2,2] x) => (float[] y)", body, w=np.ones((3, 4)))
    assert (found["minus"].flops, found["minus"].traffic_bytes) == (0, 0)
    assert found["flat"].traffic_bytes == 0
    assert (found["y"].flops, found["y"].weight_bytes) == (2 * 2 * 4 * 3, 48)


def test_the_mix_agrees_with_the_summary(tmp_path: Path) -> None:
    for model in (linear(), mnist_like(), two_inputs(), int64_ids(), quantized(tmp_path)):
        found, summary = mix(model, {}), summarise(model)
        assert found["nodes"] == summary.precision
        assert sum(found["weights"].values()) == summary.parameters
        assert sum(found["weight_bytes"].values()) == summary.weight_bytes


def test_the_mix_contains_the_share_of_each_precision(tmp_path: Path) -> None:
    document = json.loads(json.dumps(mix(quantized(tmp_path), {})))
    assert document["nodes"] == {"float32": 4, "int8": 3}
    assert document["shares"]["nodes"]["int8"] == pytest.approx(3 / 7)
    assert document["shares"]["flops"]["int8"] > 0.9
    assert document["weights"] == {"float32": 8 + 16 + 10, "int8": 72 + 1152 + 7840}
    assert document["unknown"] == []
    copy = parse("(float[N] x) => (float[N] y)", "y = Identity(x)")
    assert mix(copy, {})["shares"]["flops"] == {}  # it computes nothing


def test_a_weight_that_two_nodes_share_is_one_weight() -> None:
    model = parse(ROWS, "h = MatMul(x, w) y = MatMul(h, w)", w=np.ones((4, 4)))
    assert mix(model, {})["weights"] == {"float32": 16}


def cost(flops: int = 0, moved: int = 0, weights: int = 0, **more: Any) -> NodeCost:
    values = {"precision": "float32", "kind": kinds.CONVOLUTION} | more
    return replace(NodeCost("n", "Conv", "", flops, moved, weights, 0), **values)


@pytest.mark.parametrize(
    ("node", "seconds"),
    [
        (cost(10**9, 10), 1e-3),
        (cost(10, 10**6), 1e-3),
        (cost(10**9, precision="float16"), 2.5e-4),
        (cost(10**9, precision="int8"), 1.25e-4),
        (cost(10**9, precision="float8"), 1e-3),  # no peak of its own: that of fp32
    ],
)
def test_a_node_takes_the_longer_of_its_arithmetic_and_its_traffic(
    node: NodeCost, seconds: float
) -> None:
    assert node_time(node, TARGET).seconds == seconds
    assert predicted_s([node, cost(moved=10**6)], TARGET) == pytest.approx(seconds + 1e-3)


@pytest.mark.parametrize(("peaks", "bytes_per_s"), [({}, 1e9), (PEAKS, 0.0), ({"fp32": 0}, 1e9)])
def test_a_prediction_without_a_target_is_bad_input(
    peaks: Mapping[str, float], bytes_per_s: float
) -> None:
    with pytest.raises(BadInput, match="needs the peaks"):
        Ceilings(peaks, bytes_per_s)


def test_the_saving_of_a_node_is_by_its_name(tmp_path: Path) -> None:
    wide, narrow = node_costs(mnist_like(), {"N": 64}), node_costs(quantized(tmp_path), {"N": 64})
    saved = savings_s(wide, narrow, Ceilings(PEAKS, 1e11))
    assert saved["conv2"] > saved["conv1"] > 0
    assert saved["flatten"] == 0
    assert not any(name.startswith("QuantizeLinear") for name in saved)


CURVE = Curve((10.0, 1000.0), (1e-6, 1e-5))
SIMPLE = Ceilings({"fp32": 1e9, "int8": 4e9}, 1e9, launch_s=1e-6)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [(0, 0.0), (1, 1e-7), (10, 1e-6), (100, 10**-5.5), (1000, 1e-5), (5000, 5e-5)],
)
def test_a_curve_is_straight_in_logarithms_and_proportional_outside(
    work: float, seconds: float
) -> None:
    assert CURVE.at(work) == pytest.approx(seconds)


@pytest.mark.parametrize("node", [cost(10**6, 10), cost(10, 10**6)])
def test_a_node_takes_the_longer_of_arithmetic_and_traffic(node: NodeCost) -> None:
    assert node_time(node, SIMPLE).seconds == pytest.approx(1e-3 + 1e-6)
    assert node_time(node, SIMPLE).launch_s == 1e-6
    assert node_time(cost(100, 0), SIMPLE).launch_s == 0  # inside another kernel


def test_a_measured_curve_replaces_the_peak_and_counts_only_weights_as_traffic() -> None:
    measured = replace(SIMPLE, curves={"fp32 convolution": Curve((1e6,), (2e-3,))})
    time = node_time(cost(10**6, 10**9), measured)
    assert time.seconds == pytest.approx(2e-3)
    assert node_time(cost(10**6, 1, weights=10**7), measured).memory_s == pytest.approx(1e-2)


def test_a_precision_without_a_curve_of_its_own_takes_that_of_fp32() -> None:
    seconds = {"fp32 convolution": 1.0, "int8 convolution": 0.5}
    curves = {name: Curve((1.0,), (each,)) for name, each in seconds.items()}
    measured = replace(SIMPLE, curves=curves)
    for precision, each in (("int8", 0.5), ("float16", 1.0)):
        assert node_time(cost(1, 1, precision=precision), measured).seconds == pytest.approx(each)


def test_a_recurrent_node_takes_each_step_after_the_other_and_a_copy_follows_its_bytes() -> None:
    curves = {"fp32 recurrent": CURVE, "fp32 movement": CURVE}
    measured = replace(SIMPLE, launch_s=0.0, curves=curves)
    node = cost(1000, 1, kind=kinds.RECURRENT, steps=100)
    assert node_time(node, measured).seconds == pytest.approx(100 * 1e-6)
    assert node_time(node, SIMPLE).launch_s == pytest.approx(100 * SIMPLE.launch_s)  # on a GPU
    time = node_time(cost(0, 1000, kind=kinds.MOVEMENT), replace(measured, launch_s=1e-6))
    assert time.seconds == pytest.approx(1e-5)


KIB = 1024  # each tensor: 256 float32


def peak(model: onnx.ModelProto, batch: int = 1, scale: float = 1.0) -> int:
    return peak_bytes(fixed_shapes(Graph(model), {"N": batch}), lambda _name: scale)


def chain(*names: str) -> str:
    return " ".join(f"{made} = Relu({source})" for source, made in pairwise(names))


VIEW = "view = Reshape(a, shape)"
ROW, HALVES = "float[N,256]", "float[N,128,2]"


@pytest.mark.parametrize(
    ("body", "outputs", "tensors"),
    [
        (chain("x", "a", "b", "y"), f"{ROW} y", 3),
        (f"{chain('x', 'a', 'b', 'c')} y = Add(c, a)", f"{ROW} y", 4),
        (
            f"{chain('x', 'a')} {VIEW} {chain('x', 'c')} {chain('view', 'd')}",
            f"{ROW} c, {HALVES} d",
            4,
        ),
        (f"{chain('x', 'a')} {VIEW} {chain('x', 'b', 'c', 'y')}", f"{HALVES} view, {ROW} y", 4),
        (f"{chain('x', 'a')} {VIEW} v = Reshape(a, shape) y = Add(view, v)", f"{HALVES} y", 3),
        ("y = MatMul(x, w)", f"{ROW} y", 2),
    ],
    ids=[
        "a chain has two at a time and its input",
        "a branch lives until it is read",
        "a view shares memory and keeps its source alive",
        "an output that is a view keeps its source to the end",
        "two views are no memory of their own",
        "weights are no activations",
    ],
)
def test_the_peak_is_of_the_tensors_that_are_alive(body: str, outputs: str, tensors: int) -> None:
    weights = {"shape": [-1, 128, 2], "w": np.ones((256, 256))}
    model = parse(f"({ROW} x) => ({outputs})", body, **weights)
    assert peak(model) == tensors * KIB
    assert peak(model, 7, scale=0.5) == tensors * 7 * KIB / 2


def test_what_a_body_reads_from_outside_stays_alive() -> None:
    branch = "() => (float[] inner) { inner = Add(kept, kept) }"
    body = f"{chain('x', 'kept')} {chain('x', 'a', 'b')} d = If <then_branch = t {branch}, "
    body += f"else_branch = e {branch}> (c) y = Add(b, d)"
    model = parse(f"({ROW} x) => ({ROW} y)", body, c=np.array(True))
    assert peak(model) >= 4 * KIB


def pairs(operator: str, bias: str, after: str, zero: np.generic) -> onnx.ModelProto:
    """`operator` on quantized tensors. `after`: what its result goes through, "Relu Q"."""
    matrix, shape = ((8, 8, 3, 3), "8,6,6") if operator == "Conv" else ((8, 8), "8")
    body = "xq = QuantizeLinear(x, s, zero) xd = DequantizeLinear(xq, s, zero) "
    body += "w = DequantizeLinear(w8, s, zero8) "
    body += "b = DequantizeLinear(b32, s2) " if bias == "int32" else ""
    body += f"node = {operator}(xd, w{', b' * bool(bias)}) "
    last = "node"
    for step in after.split():
        if step == "Q":
            body += f"yq = QuantizeLinear({last}, s, zero) yd = DequantizeLinear(yq, s, zero) "
            last = "yd"
        else:
            body += f"cut = {step}({last}) "
            last = "cut"
    weights: dict[str, Any] = {"w8": np.ones(matrix, np.int8), "s": 0.1, "s2": 0.01}
    weights |= {"b32": np.ones(8, np.int32)} if bias == "int32" else {"b": np.ones(8)}
    head = f"(float[2,{shape}] x) => (float[] y)"
    weights |= {"zero": zero, "zero8": np.int8(0)}
    return parse(head, f"{body} y = Neg({last})", **weights)


@pytest.mark.parametrize("zero", [np.uint8(128), np.uint8(0), np.int8(0)], ids=repr)
@pytest.mark.parametrize("after", ["", "Q", "Relu Q"])
@pytest.mark.parametrize(
    ("operator", "bias"),
    [("Conv", ""), ("Conv", "float"), ("Gemm", "float"), ("Gemm", "int32"), ("MatMul", "")],
)
def test_a_cpu_runs_in_integers_what_onnx_runtime_does(
    operator: str, bias: str, after: str, zero: np.generic, tmp_path: Path
) -> None:
    model = pairs(operator, bias, after, zero)
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    runs = {node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node}
    integers = {"QLinearConv", "QGemm", "QLinearMatMul", "MatMulIntegerToFloat"} & runs
    known = fixed_shapes(Graph(model), {})
    found = {cost.name: cost for cost in costs_of(known, on_cpu=True)}
    assert found["node"].precision == ("int8" if integers else "float32")
    assert {each.precision for each in costs_of(known) if each.name == "node"} == {"int8"}


def test_pairs_that_a_cpu_has_no_kernel_for_are_converted_in_every_call() -> None:
    known = fixed_shapes(Graph(pairs("Conv", "", "Relu Q", np.int8(0))), {})
    found = {cost.name: cost for cost in costs_of(known, on_cpu=True)}
    elements = 2 * 8 * 6 * 6
    assert found["xd"].traffic_bytes == elements * (1 + 4)
    assert found["w"].traffic_bytes == 8 * 8 * 9 * (1 + 4)
    assert found["yq"].traffic_bytes == 2 * 8 * 4 * 4 * (4 + 1)  # not in the convolution's kernel
    assert found["node"].read_bytes == elements * 4
    compiled = {cost.name: cost for cost in costs_of(known)}
    assert [compiled[name].traffic_bytes for name in ("xd", "w", "yq")] == [0, 0, 0]


CHAINS = [
    chains.convolution(kinds.CONVOLUTION, 8, 6, 3),
    chains.convolution(kinds.POINTWISE, 8, 6, 1),
    chains.convolution(kinds.DEPTHWISE, 8, 6, 3),
    chains.convolution(kinds.STEM, 8, 6, 3),
    chains.convolution(kinds.CONVOLUTION, 8, 6, 3, precision="int8"),
    chains.product(4, 16),
    chains.product(4, 16, precision="int8"),
    chains.attention(2, 5),
    chains.recurrent(4, 3, 2),
    *(chains.passing(kind, 2048) for kind in chains._PASSING),
]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda each: f"{each.precision} {each.kind}")
def test_a_chain_holds_equal_nodes_of_its_kind_with_the_work_it_states(
    chain: Chain, tmp_path: Path
) -> None:
    graph = chain.graph()
    found = [c for c in kinds.node_costs(graph, {}) if c.kind == chain.kind and c.precision]
    assert len(found) == chain.count
    dtype = "int8" if chain.precision == "int8" else "float32"
    assert {cost.precision for cost in found} == {dtype}
    assert {cost.steps for cost in found} == {chain.steps}
    if chain.flops:
        assert {cost.flops for cost in found} == {chain.flops}
        assert chain.work == chain.flops / chain.steps
    else:
        alone = costs_of(fixed_shapes(graph, {}), on_cpu=True)
        assert {cost.traffic_bytes for cost in alone[1:]} == {chain.work}
    path = tmp_path / "chain.onnx"
    graph.save(path, temporary=True)
    with load(path, "cpu", threads=1) as engine:
        (answer,) = engine({"x": np.zeros(chain.shape, np.float32)}).values()
    assert answer.size


def test_every_kind_but_other_has_a_chain() -> None:
    assert {chain.kind for chain in CHAINS} == set(kinds.KINDS) - {kinds.OTHER}


@pytest.mark.parametrize(
    ("operator", "kind"),
    [("HardSwish", kinds.FUNCTION), ("HardSigmoid", kinds.SIMPLE), ("Relu", kinds.SIMPLE)],
)
def test_an_activation_is_of_the_kind_that_takes_as_long(operator: str, kind: str) -> None:
    """ONNX Runtime computes HardSwish as two nodes: it takes as long as tanh."""
    (activation,) = node_costs(parse(ROWS, f"y = {operator}(x)"), {})
    assert activation.kind == kind
