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
from deploykit.core.profile import load_profile
from deploykit.graph.graph import Graph
from deploykit.graph.preflight import find_mismatch
from tests.support import onnx_zoo
from tests.support.graphs.protos import unsupported

FLOAT, UINT8, INT64 = TensorProto.FLOAT, TensorProto.UINT8, TensorProto.INT64


NEWEST = load_profile("h100-sxm")


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


@pytest.mark.parametrize(("kind", "found"), [(TensorProto.BFLOAT16, 1), (TensorProto.FLOAT16, 0)])
def test_support_is_asked_by_operator_and_type(kind: int, found: int) -> None:
    both = [node("Relu", out="r"), node("HardSwish", "r")]
    problems = unsupported(graph(*both, read=kind, written=kind), NEWEST)
    assert [each.operator for each in problems] == ["HardSwish"] * found


def test_every_bad_node_is_listed_those_in_bodies_too() -> None:
    body = helper.make_graph(
        [helper.make_node("Unique", ["x"], ["u"], name="inner")],
        "then",
        [],
        [helper.make_tensor_value_info("u", FLOAT, None)],
    )
    condition = ("c", np.array(True))
    both = helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body)
    found = unsupported(graph(node("Det", out="d"), both, weights=[condition]), NEWEST)
    assert [problem.node for problem in found] == ["det", "inner", "inner"]
    assert found[0].to_dict() == {
        "node": "det",
        "operator": "Det",
        "why": "no version of TensorRT imports this operator",
    }


@pytest.mark.parametrize(
    ("domain", "profile", "says"),
    [
        ("com.microsoft", "h100-sxm", "com.microsoft plugin"),
        ("com.microsoft", "cpu", ""),
        ("mine", "cpu", "'mine'"),
    ],
)
def test_an_operator_of_another_domain_is_a_stranger(domain: str, profile: str, says: str) -> None:
    target = load_profile(profile)
    found = unsupported(graph(node("FusedMatMul", "x", "x", domain=domain)), target)
    assert len(found) == bool(says)
    assert all(word in problem.why for problem in found for word in says.split())
    assert profile != "cpu" or unsupported(graph(node("Det")), target) == ()


@pytest.mark.parametrize("profile", ["h100-sxm", "cpu"])
def test_a_function_of_the_models_own_is_no_stranger_and_its_nodes_are_checked(
    profile: str,
) -> None:
    imports = [helper.make_opsetid("", 20)]
    for operator in ("Relu", "Det"):
        model = graph(node("Zap", domain="mine"))
        inside = [helper.make_node(operator, ["a"], ["b"], name="within")]
        model.functions.append(helper.make_function("mine", "Zap", ["a"], ["b"], inside, imports))
        found = [problem.node for problem in unsupported(model, load_profile(profile))]
        assert found == ["within"] * (operator == "Det" and profile != "cpu")


def test_bytes_may_come_in_and_be_cast_but_nothing_else() -> None:
    cast = node("Cast", "x", to=FLOAT)
    assert unsupported(graph(cast, read=UINT8), NEWEST) == ()
    turned = [node("Transpose", out="t"), node("Cast", "t", to=FLOAT)]
    (problem,) = unsupported(graph(*turned, read=UINT8), NEWEST)
    assert (problem.node, "cast it first" in problem.why) == ("transpose", True)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        *((kind, f"no tensors of {kind.lower()}") for kind in ("INT16", "UINT32", "STRING")),
        ("DOUBLE", "float64"),
    ],
)
def test_a_type_that_tensorrt_has_no_tensors_of_is_named(kind: str, says: str) -> None:
    there = node("Cast", out="t", to=getattr(TensorProto, kind))
    found = unsupported(graph(there, node("Cast", "t", to=FLOAT)), NEWEST)
    assert says in found[0].why


@pytest.mark.parametrize(("kind", "words"), [(np.int32, "biases"), (np.uint8, "uint8")])
def test_weights_are_quantized_to_what_tensorrt_takes(kind: type, words: str) -> None:
    model = graph(
        node("DequantizeLinear", "w", "s", out="d"),
        node("Add", "x", "d"),
        weights=[("w", np.ones(8, kind)), ("s", np.float32(1).reshape(()))],
    )
    (problem,) = unsupported(model, NEWEST)
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
    nodes: Sequence[onnx.NodeProto], why: str, tmp_path: Path
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
    error = find_mismatch(Artefact(path), Graph(model), load_profile("jetson-orin-nano-8gb"))
    assert why in str(error)
    assert (error is None) is (why == "")
    assert find_mismatch(Artefact(path), Graph(model), load_profile("cpu")) is None
    if why in ("", "zero point is not 0"):
        found = unsupported(model, NEWEST)
        assert [problem.node for problem in found] == ["quantizelinear", "dequantizelinear"] * bool(
            why
        )
        assert all("zero point" in problem.why for problem in found[:1])
