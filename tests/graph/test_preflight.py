"""What speaks against a graph before a build: by operator, by type, by pair of quantization.

Each refusal here was also seen from the parser of TensorRT 11.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploykit.core.artefact import Artefact
from deploykit.core.profile import Profile, load_profile
from deploykit.graph.graph import Graph
from deploykit.graph.preflight import find_mismatch
from tests.support import onnx_zoo
from tests.support.graphs.protos import unsupported

FLOAT, UINT8, INT64 = TensorProto.FLOAT, TensorProto.UINT8, TensorProto.INT64


@pytest.fixture
def newest() -> Profile:
    return load_profile("h100-sxm")


@pytest.fixture
def orin() -> Profile:
    return load_profile("jetson-orin-nano-8gb")


def graph(
    *nodes: onnx.NodeProto,
    read: int = FLOAT,
    written: int = FLOAT,
    weights: Sequence[tuple[str, np.ndarray]] = (),
) -> onnx.ModelProto:
    """A model x -> y of these nodes; every node is named after its operator."""
    for node in nodes:
        node.name = node.op_type.lower()
    body = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("x", read, ["N", 4, 8, 8])],
        [helper.make_tensor_value_info("y", written, None)],
        [numpy_helper.from_array(array, name) for name, array in weights],
    )
    domains = {node.domain for node in nodes} - {""}
    imports = [helper.make_opsetid("", 20), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(body, opset_imports=imports, ir_version=10)


def node(operator: str, *inputs: str, out: str = "y", **options: object) -> onnx.NodeProto:
    return helper.make_node(operator, list(inputs or ("x",)), [out], **options)


@pytest.mark.parametrize("profile", ["h100-sxm", "jetson-orin-nano-8gb", "v100", "cpu"])
def test_plain_models_have_no_findings(profile: str) -> None:
    target = load_profile(profile)
    for make in (onnx_zoo.linear, onnx_zoo.conv_relu, onnx_zoo.int64_ids, onnx_zoo.mnist_like):
        assert unsupported(make(), target) == ()


def test_an_operator_that_is_never_imported_is_named_with_its_node(newest: Profile) -> None:
    (problem,) = unsupported(graph(node("Det")), newest)
    assert problem.to_dict() == {
        "node": "det",
        "operator": "Det",
        "why": "no version of TensorRT imports this operator",
    }


@pytest.mark.parametrize(("kind", "found"), [(TensorProto.BFLOAT16, 1), (TensorProto.FLOAT16, 0)])
def test_support_is_asked_by_operator_and_type(newest: Profile, kind: int, found: int) -> None:
    both = [node("Relu", out="r"), node("HardSwish", "r")]
    problems = unsupported(graph(*both, read=kind, written=kind), newest)
    assert [each.operator for each in problems] == ["HardSwish"] * found


def test_every_bad_node_is_listed_those_in_bodies_too(newest: Profile) -> None:
    body = helper.make_graph(
        [helper.make_node("Unique", ["x"], ["u"], name="inner")],
        "then",
        [],
        [helper.make_tensor_value_info("u", FLOAT, None)],
    )
    condition = ("c", np.array(True))
    both = helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body)
    found = unsupported(graph(node("Det", out="d"), both, weights=[condition]), newest)
    assert [problem.node for problem in found] == ["det", "inner", "inner"]


def test_an_operator_of_another_domain_needs_a_plugin(newest: Profile) -> None:
    (problem,) = unsupported(graph(node("FusedMatMul", "x", "x", domain="com.microsoft")), newest)
    assert "com.microsoft" in problem.why
    assert "plugin" in problem.why


def test_onnx_runtime_takes_its_own_domain_and_no_strangers() -> None:
    cpu = load_profile("cpu")
    assert unsupported(graph(node("FusedMatMul", "x", "x", domain="com.microsoft")), cpu) == ()
    assert unsupported(graph(node("Det")), cpu) == ()
    (problem,) = unsupported(graph(node("Zap", domain="mine")), cpu)
    assert "'mine'" in problem.why


@pytest.mark.parametrize("profile", ["h100-sxm", "cpu"])
def test_a_function_of_the_models_own_is_no_stranger(profile: str) -> None:
    model = graph(node("Zap", domain="mine"))
    inside = [helper.make_node("Relu", ["a"], ["b"])]
    imports = [helper.make_opsetid("", 20)]
    model.functions.append(helper.make_function("mine", "Zap", ["a"], ["b"], inside, imports))
    assert unsupported(model, load_profile(profile)) == ()


def test_nodes_inside_the_models_own_functions_are_checked(newest: Profile) -> None:
    model = graph(node("Zap", domain="mine"))
    inside = [helper.make_node("Det", ["a"], ["b"], name="within")]
    imports = [helper.make_opsetid("", 20)]
    model.functions.append(helper.make_function("mine", "Zap", ["a"], ["b"], inside, imports))
    assert [problem.node for problem in unsupported(model, newest)] == ["within"]


def test_bytes_may_come_in_and_be_cast_but_nothing_else(newest: Profile) -> None:
    cast = node("Cast", "x", to=FLOAT)
    assert unsupported(graph(cast, read=UINT8), newest) == ()
    turned = [node("Transpose", out="t"), node("Cast", "t", to=FLOAT)]
    (problem,) = unsupported(graph(*turned, read=UINT8), newest)
    assert (problem.node, "cast it first" in problem.why) == ("transpose", True)


@pytest.mark.parametrize("kind", ["INT16", "UINT32", "STRING"])
def test_a_type_that_tensorrt_has_no_tensors_of_is_named(newest: Profile, kind: str) -> None:
    there = node("Cast", out="t", to=getattr(TensorProto, kind))
    found = unsupported(graph(there, node("Cast", "t", to=FLOAT)), newest)
    assert f"no tensors of {kind.lower()}" in found[0].why


def test_float64_is_refused_with_a_hint_at_float32(newest: Profile) -> None:
    model = graph(node("Relu"), read=TensorProto.DOUBLE, written=TensorProto.DOUBLE)
    assert "float64" in unsupported(model, newest)[0].why


def pair(zero: np.ndarray) -> onnx.ModelProto:
    """Quantized and back: x -> QuantizeLinear -> DequantizeLinear -> y."""
    return graph(
        node("QuantizeLinear", "x", "s", "z", out="q"),
        node("DequantizeLinear", "q", "s", "z"),
        weights=[("s", np.float32(1).reshape(())), ("z", zero)],
    )


def test_quantization_is_symmetric(newest: Profile) -> None:
    assert unsupported(pair(np.array(0, np.int8)), newest) == ()
    found = unsupported(pair(np.array(3, np.int8)), newest)
    assert [problem.node for problem in found] == ["quantizelinear", "dequantizelinear"]
    assert "zero point" in found[0].why


@pytest.mark.parametrize(("kind", "words"), [(np.int32, "biases"), (np.uint8, "uint8")])
def test_weights_are_quantized_to_what_tensorrt_takes(
    newest: Profile, kind: type, words: str
) -> None:
    model = graph(
        node("DequantizeLinear", "w", "s", out="d"),
        node("Add", "x", "d"),
        weights=[("w", np.ones(8, kind)), ("s", np.float32(1).reshape(()))],
    )
    (problem,) = unsupported(model, newest)
    assert words in problem.why


def one_pair(zero: str) -> tuple[onnx.NodeProto, onnx.NodeProto]:
    return (
        node("QuantizeLinear", "x", "scale", zero, out="q"),
        node("DequantizeLinear", "q", "scale", zero),
    )


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        (one_pair("zero"), ""),
        (one_pair("three"), "zero point is not 0"),
        ((node("DequantizeLinear", "bias", "scale"),), "dequantizes int32"),
        ((node("MatMulInteger", "steps", "steps"),), "only between Q/DQ pairs"),
        ((node("Gelu", domain="com.microsoft"),), "only ONNX Runtime has this operator"),
    ],
    ids=["symmetric", "asymmetric", "int32 bias", "integers", "foreign operator"],
)
def test_a_graph_shows_that_it_was_made_for_onnxruntime(
    nodes: Sequence[onnx.NodeProto], why: str, orin: Profile, tmp_path: Path
) -> None:
    weights = {
        "scale": np.float32(0.1),
        "zero": np.int8(0),
        "three": np.int8(3),
        "bias": np.ones(4, np.int32),
        "steps": np.ones((4, 4), np.int8),
    }
    arrays = [(name, np.asarray(array)) for name, array in weights.items()]
    model = graph(*nodes, weights=arrays)
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    error = find_mismatch(Artefact(path), Graph(model), orin)
    assert why in str(error)
    assert (error is None) is (why == "")
    assert find_mismatch(Artefact(path), Graph(model), load_profile("cpu")) is None
