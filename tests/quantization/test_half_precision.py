from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import deploykit as dk
from deploykit.core.errors import BadInput
from deploykit.engines.data.samples import Samples
from deploykit.engines.engine import load
from deploykit.quantization.calibrate import Calibration, Range
from tests.support.graphs.data import calibration, feeds, in_true_halves, samples, sqnr_db
from tests.support.graphs.protos import calibrate, load_graph, specs, summarise, to_half, to_pairs
from tests.support.onnx_zoo import (
    conv_relu,
    int64_ids,
    linear,
    make,
    mnist_like,
    overflow,
    save,
    two_inputs,
)

ZOO = [linear, conv_relu, two_inputs, overflow, int64_ids, mnist_like]
# 11 bits a value, and outputs of the zoo are below 16: 8 ulp at 8 cover its deepest graph, 8 nodes
ATOL_FP16 = 8 * 2.0**-8

Make = Callable[[], onnx.ModelProto]


@pytest.mark.parametrize("graph", ZOO)
def test_a_half_graph_computes_what_the_float_graph_does(graph: Make, tmp_path: Path) -> None:
    inputs, source = feeds(graph()), graph()
    ranges = calibrate(save(graph(), tmp_path / "m.onnx"), samples(graph())).ranges
    half, _ = to_half(source, ranges=ranges)
    onnx.checker.check_model(half, full_check=True)
    assert source == graph()
    assert specs(half) == specs(source)
    names = [node.name for node in half.graph.node]
    assert len({node.name for node in source.graph.node} | set(names)) == len(names)
    wanted = ReferenceEvaluator(graph()).run(None, inputs)
    for want, got in zip(wanted, in_true_halves(half, inputs), strict=True):
        np.testing.assert_allclose(got, want, atol=ATOL_FP16, rtol=0)
        assert got.dtype == np.float32
    with load(save(half, tmp_path / "half.onnx"), "cpu") as engine:
        for want, got in zip(wanted, engine(inputs).values(), strict=True):
            np.testing.assert_allclose(got, want, atol=ATOL_FP16, rtol=0)


def test_weights_take_half_the_bytes() -> None:
    half, kept = to_half(mnist_like())
    assert kept == ()
    assert summarise(half).weight_bytes * 2 == summarise(mnist_like()).weight_bytes
    assert summarise(half).precision == {"float16": 7}


def scaled(factor: float, name: str = "factor") -> onnx.ModelProto:
    return make(
        [helper.make_node("Add", ["x", name], ["y"], name="add")],
        {"x": ("N", 4)},
        {"y": ("N", 4)},
        {name: np.array(factor, np.float32)},
    )


def of_a_constant_node() -> onnx.ModelProto:
    value = numpy_helper.from_array(np.array(1e-12, np.float32))
    nodes = [
        helper.make_node("Constant", [], ["epsilon"], name="constant", value=value),
        helper.make_node("Add", ["x", "epsilon"], ["y"], name="add"),
    ]
    return make(nodes, {"x": ("N", 4)}, {"y": ("N", 4)}, {})


def unnamed() -> onnx.ModelProto:
    model = overflow()
    for node in model.graph.node:
        node.name = ""
    return model


TOO_LARGE = {"product": Range(0.0, 3.2e5)}
# what it is -> model, precision, ranges, the nodes that stay in float32
KEPT: dict[str, tuple[onnx.ModelProto, str, dict[str, Range], tuple[str, ...]]] = {
    "no ranges": (overflow(), "fp16", {}, ()),
    "a product above": (overflow(), "fp16", TOO_LARGE, ("scale_up", "scale_down")),
    "nodes without names": (unnamed(), "fp16", TOO_LARGE, ("Mul_0", "Mul_1")),
    "the range of bfloat16": (overflow(), "bf16", TOO_LARGE, ()),
    "half the largest": (linear(), "fp16", {"y": Range(-32752.0, 0.0)}, ()),
    "just above it": (linear(), "fp16", {"y": Range(-32753.0, 0.0)}, ("gemm",)),
    "a tensor that vanishes": (linear(), "fp16", {"x": Range(-1e-9, 1e-9)}, ("gemm",)),
    "a mask": (linear(), "fp16", {"y": Range(-np.inf, 3.0)}, ()),
    "infinity": (linear(), "fp16", {"y": Range(-3.0, np.inf)}, ("gemm",)),
    "a constant node": (of_a_constant_node(), "fp16", {}, ("constant", "add")),
    **{f"a weight of {x}": (scaled(x), "fp16", {}, ("add",)) for x in (1e5, -3.4e38, 1e-12)},
    **{f"a weight of {x}": (scaled(x), "fp16", {}, ()) for x in (0.0, 1e-6, -np.inf)},
}


@pytest.mark.parametrize(("model", "to", "ranges", "wanted"), KEPT.values(), ids=KEPT)
def test_what_float16_cannot_hold_keeps_its_nodes_in_float32(
    model: onnx.ModelProto, to: str, ranges: dict[str, Range], wanted: tuple[str, ...]
) -> None:
    half, kept = to_half(model, to, ranges)
    assert kept == wanted
    counted = [name for name in wanted if name != "constant"]
    assert summarise(half).precision.get("float32", 0) == len(counted)


def test_nodes_that_overflow_are_right_in_float32_and_infinite_in_float16() -> None:
    big = {"x": np.full((1, 4), 32.0, np.float32)}  # 32 * 1e4 is five times the largest float16
    assert np.isinf(in_true_halves(to_half(overflow())[0], big)[0]).all()
    guarded, _ = to_half(overflow(), ranges=TOO_LARGE)
    np.testing.assert_allclose(in_true_halves(guarded, big)[0], 33.0, atol=0.04)  # 1 ulp at 33


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (lambda: to_half(linear())[0], "float16 already"),
        (
            lambda: make(
                [helper.make_node("Abs", ["i"], ["y"], name="abs")],
                {"i": ("N", 4)},
                {"y": ("N", 4)},
                {},
                integers=("i", "y"),
            ),
            "nothing in float32",
        ),
    ],
)
def test_a_graph_with_nothing_to_cast_is_refused(model: Make, problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        to_half(model())


def test_a_weight_shared_by_both_worlds_is_stored_in_both(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["big"], name="wide"),
        helper.make_node("Add", ["x", "w"], ["y"], name="half"),
    ]
    row = ("N", 4)
    weights = {"w": np.arange(4, dtype=np.float32)}
    model = make(nodes, {"x": row}, {"big": row, "y": row}, weights)
    half, kept = to_half(model, ranges={"big": Range(0.0, 1e6)})
    assert kept == ("wide",)
    assert {(t.name, t.data_type) for t in half.graph.initializer} == {
        ("w", TensorProto.FLOAT),
        ("w_float16", TensorProto.FLOAT16),
    }
    load(save(half, tmp_path / "m.onnx"), "cpu").close()


def test_a_tensor_is_cast_once_for_all_its_readers() -> None:
    nodes = [helper.make_node("Relu", ["x"], [f"y{i}"], name=f"relu{i}") for i in range(3)]
    model = make(nodes, {"x": ("N", 4)}, {f"y{i}": ("N", 4) for i in range(3)}, {})
    half, _ = to_half(model)
    assert summarise(half).operators == {"Cast": 1 + 3, "Relu": 3}


def test_a_body_finds_the_float32_tensor_that_it_names(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("n", TensorProto.FLOAT, None)
    negate = helper.make_node("Neg", ["r"], ["n"], name="neg")
    body = helper.make_graph([negate], "body", [], [value])
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], name="relu"),
        helper.make_node("If", ["c"], ["y"], name="if", then_branch=body, else_branch=body),
    ]
    model = make(nodes, {"x": ("N", 4)}, {"y": ("N", 4)}, {"c": np.array(True)})
    half, _ = to_half(model)
    x = np.array([[1, 2, -3, 4]], np.float32)
    with load(save(half, tmp_path / "m.onnx"), "cpu") as engine:
        np.testing.assert_array_equal(engine({"x": x})["y"], -np.maximum(x, 0))
    assert summarise(half).precision["float16"] == 1


def test_arithmetic_that_ends_in_an_index_stays_float32(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["i"], ["f"], name="to_float", to=TensorProto.FLOAT),
        helper.make_node("Add", ["f", "one"], ["g"], name="next"),
        helper.make_node("Cast", ["g"], ["y"], name="to_index", to=TensorProto.INT64),
        helper.make_node("Relu", ["x"], ["z"], name="relu"),
    ]
    weights = {"one": np.array(1, np.float32)}
    row = ("N", 4)
    model = make(nodes, {"i": row, "x": row}, {"y": row, "z": row}, weights, integers=("i", "y"))
    half, _ = to_half(model)
    ids = np.array([[1, 2048, 4095, 4097]])  # float16 counts in twos above 2048
    inputs = {"i": ids, "x": np.ones((1, 4), np.float32)}
    np.testing.assert_array_equal(in_true_halves(half, inputs)[0], ids + 1)
    assert summarise(half).precision == {"float16": 1, "float32": 1}


def test_a_cast_to_float_in_the_graph_becomes_a_cast_to_half() -> None:
    nodes = [
        helper.make_node("Cast", ["i"], ["f"], name="to_float", to=TensorProto.FLOAT),
        helper.make_node("Relu", ["f"], ["y"], name="relu"),
    ]
    model = make(nodes, {"i": ("N", 4)}, {"y": ("N", 4)}, {}, integers=("i",))
    half, _ = to_half(model)
    assert [node.op_type for node in half.graph.node] == ["Cast", "Relu", "Cast"]


def test_operators_without_a_half_form_stay_float32() -> None:
    node = helper.make_node("CumSum", ["x", "axis"], ["y"], name="sum")
    row = ("N", 4)
    model = make([node], {"x": row}, {"y": row}, {"axis": np.array(1)})
    assert summarise(to_half(model, "fp16")[0]).precision == {"float32": 1}


@pytest.mark.parametrize("operator", ["HardSwish", "Mish", "LpNormalization"])
def test_an_operator_that_tensorrt_lacks_in_bfloat16_stays_float32_there_alone(
    operator: str,
) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], name="relu"),
        helper.make_node(operator, ["r"], ["y"], name="own"),
    ]
    model = make(nodes, {"x": ("N", 4)}, {"y": ("N", 4)}, {})
    kept = {"bf16": {"bfloat16": 1, "float32": 1}, "fp16": {"float16": 2}}
    for to, precision in kept.items():
        assert summarise(to_half(model, to)[0]).precision == precision


def test_what_tensorrt_lacks_in_bfloat16_is_named_and_openvino_gets_it(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], name="relu"),
        helper.make_node("HardSwish", ["r"], ["y"], name="own"),
    ]
    path = save(make(nodes, {"x": ("N", 4)}, {"y": ("N", 4)}, {}), tmp_path / "m.onnx")
    for runtime, precision in (("tensorrt", 1), ("openvino", 2)):
        made = dk.quantize(path, to="bf16", runtime=runtime, out=tmp_path / f"{runtime}.onnx")
        assert made.manifest.precision["bfloat16"] == precision
        kept = [each for each in made.notes if "does not take them in bf16: HardSwish" in each]
        assert bool(kept) == (runtime == "tensorrt"), made.notes


def int8_linear() -> onnx.ModelProto:
    return to_pairs(linear(), _calibration(feeds(linear())["x"]))


NAMES = {"fp16": "float16", "bf16": "bfloat16"}
HALVES = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}


@pytest.mark.parametrize("to", HALVES)
def test_scales_of_int8_pairs_become_half_and_nothing_is_cast_between(to: str) -> None:
    half, kept = to_half(int8_linear(), to)
    onnx.checker.check_model(half, full_check=True)
    assert kept == ()
    types = {t.name: t.data_type for t in half.graph.initializer}
    pairs = [node for node in half.graph.node if "Linear" in node.op_type]
    assert {types[node.input[1]] for node in pairs} == {HALVES[to]}
    assert [n.op_type for n in half.graph.node] == [
        "Cast",
        "QuantizeLinear",
        "DequantizeLinear",
        "DequantizeLinear",
        "Gemm",
        "Cast",
    ]


def test_pairs_raise_the_opset_to_one_whose_scales_may_be_half() -> None:
    assert summarise(int8_linear()).opset == {"ai.onnx": 18}
    assert summarise(to_half(int8_linear(), "fp16")[0]).opset == {"ai.onnx": 19}
    assert summarise(to_half(linear(), "fp16")[0]).opset == {"ai.onnx": 18}


def test_a_scale_that_float16_holds_badly_keeps_its_pair_in_float32(tmp_path: Path) -> None:
    model = linear()
    weight = numpy_helper.to_array(model.graph.initializer[0]) * np.float32(1e-5)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "W"))
    int8 = to_pairs(model, _calibration(feeds(linear())["x"]))
    half, kept = to_half(int8, "fp16")
    assert kept == ("DequantizeLinear_W_dequantized",)
    inputs = feeds(linear())
    with load(save(int8, tmp_path / "m.onnx"), "cpu") as engine:
        wanted = engine(inputs)["y"]
    np.testing.assert_allclose(in_true_halves(half, inputs)[0], wanted, atol=1e-3)
    assert to_half(int8, "bf16")[1] == ()


def test_int8_in_float16_computes_what_int8_in_float32_does(tmp_path: Path) -> None:
    inputs = feeds(mnist_like())
    found = calibrate(save(mnist_like(), tmp_path / "m.onnx"), samples(mnist_like()))
    int8 = to_pairs(mnist_like(), found)
    half, kept = to_half(int8, "fp16", found.ranges)
    assert kept == ()
    assert summarise(half).precision == {"float16": 4, "int8": 3}
    with load(save(int8, tmp_path / "m.onnx"), "cpu") as engine:
        wanted = engine(inputs)["logits"]
    assert sqnr_db(wanted, in_true_halves(half, inputs)[0]) > 30  # INT8's own noise is at 33


def test_a_bfloat16_conv_is_made_below_the_opset_that_defines_it() -> None:
    half, _ = to_half(conv_relu(), "bf16")  # TensorRT takes it; ONNX has it from opset 22 on
    assert summarise(half).precision == {"bfloat16": 2}
    assert summarise(half).opset == {"ai.onnx": 18}


def test_bfloat16_weights_are_rounded_to_nearest_even() -> None:
    values = np.array([1 + 2**-9, 1 + 2**-8, 1 + 3 * 2**-8, -1e-40, np.inf, 3.3e38], np.float32)
    model = make(
        [helper.make_node("Add", ["x", "w"], ["y"], name="add")],
        {"x": ("N", 6)},
        {"y": ("N", 6)},
        {"w": values},
    )
    half, _ = to_half(model, "bf16")
    stored = next(t for t in half.graph.initializer if t.name == "w_bfloat16")
    bits = np.frombuffer(stored.raw_data, np.uint16).astype(np.uint32) << 16
    ml_dtypes = pytest.importorskip("ml_dtypes")
    wanted = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(bits.view(np.float32), wanted)


@pytest.mark.parametrize("to", HALVES)
def test_nodes_named_in_keep_float32_stay_float32_and_are_not_reported(to: str) -> None:
    half, kept = to_half(mnist_like(), to, keep_float32=("conv1", "head"))
    assert kept == ()
    assert summarise(half).precision == {NAMES[to]: 5, "float32": 2}


def _calibration(x: np.ndarray) -> Calibration:
    return calibration({"x": Range(float(x.min()), float(x.max()))})


def test_names_that_clash_are_avoided() -> None:
    half, _ = to_half(scaled(2.0, name="x_float16"))
    onnx.checker.check_model(half, full_check=True)
    assert in_true_halves(half, {"x": np.ones((1, 4), np.float32)})[0].tolist() == [[3.0] * 4]


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # torch's exporter warns of its own internals
def test_an_exported_transformer_layer_becomes_half(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    x = torch.randn(8, 6, 32)
    path = tmp_path / "m.onnx"
    torch.onnx.export(
        layer, (x,), path, dynamo=True, input_names=["x"], output_names=["y"], verbose=False
    )
    model = load_graph(path)
    inputs = {"x": x.numpy()}
    half, kept = to_half(model, ranges=calibrate(path, Samples(inputs, None, "x")).ranges)
    assert kept == ()
    assert summarise(half).precision.keys() == {"float16"}
    with load(save(half, tmp_path / "half.onnx"), "cpu") as engine:
        got = engine(inputs)["y"]
    # the last node normalises: values up to 4, where an ulp is 2^-8
    np.testing.assert_allclose(got, layer(x).detach().numpy(), atol=4 * 2.0**-8, rtol=0)
