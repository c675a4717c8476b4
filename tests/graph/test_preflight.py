"""What speaks against a graph before a build: by operator, by type, by pair of quantization.

Each refusal here was also seen from the parser of TensorRT 11.4.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from deploykit.core.artefact import Artefact
from deploykit.core.profile import load_profile
from deploykit.graph.graph import Graph
from deploykit.graph.preflight import find_mismatch
from tests.support import onnx_zoo
from tests.support.graphs.protos import unsupported
from tests.support.graphs.small import parse

NEWEST = load_profile("h100-sxm")


def graph(body: str, kind: str = "float", out: str = "float", **weights: Any) -> onnx.ModelProto:
    """A model x -> y of these nodes, in which `com.microsoft` and `mine` are domains too."""
    model = parse(f"({kind}[N,4,8,8] x) => ({out}[] y)", body, opset=20, **weights)
    model.opset_import.extend(helper.make_opsetid(d, 1) for d in ("com.microsoft", "mine"))
    return model


@pytest.mark.parametrize("profile", ["h100-sxm", "jetson-orin-nano-8gb", "v100", "cpu"])
def test_plain_models_have_no_findings(profile: str) -> None:
    target = load_profile(profile)
    for make in (onnx_zoo.linear, onnx_zoo.conv_relu, onnx_zoo.int64_ids, onnx_zoo.mnist_like):
        assert unsupported(make(), target) == ()


@pytest.mark.parametrize(("kind", "found"), [("bfloat16", 1), ("float16", 0)])
def test_support_is_asked_by_operator_and_type(kind: str, found: int) -> None:
    problems = unsupported(graph("r = Relu(x) y = HardSwish(r)", kind, kind), NEWEST)
    assert [each.operator for each in problems] == ["HardSwish"] * found


def test_every_bad_node_is_listed_those_in_bodies_too() -> None:
    branch = "() => (float[] u) { [inner] u = Unique(x) }"
    both = f"y = If <then_branch = t {branch}, else_branch = e {branch}> (c)"
    found = unsupported(graph(f"[det] d = Det(x) {both}", c=np.array(True)), NEWEST)
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
        ("mine", "h100-sxm", "'mine' plugin"),
        ("mine", "cpu", ""),
    ],
)
def test_an_operator_of_another_domain_is_a_stranger(domain: str, profile: str, says: str) -> None:
    target = load_profile(profile)
    found = unsupported(graph(f"y = {domain}.FusedMatMul(x, x)"), target)
    assert len(found) == bool(says)
    assert all(word in problem.why for problem in found for word in says.split())
    assert profile != "cpu" or unsupported(graph("y = Det(x)"), target) == ()


@pytest.mark.parametrize("profile", ["h100-sxm", "cpu"])
def test_a_function_of_the_models_own_is_no_stranger_and_its_nodes_are_checked(
    profile: str,
) -> None:
    imports = [helper.make_opsetid("", 20)]
    for operator in ("Relu", "Det"):
        model = graph("y = mine.Zap(x)")
        inside = [helper.make_node(operator, ["a"], ["b"], name="within")]
        model.functions.append(helper.make_function("mine", "Zap", ["a"], ["b"], inside, imports))
        found = [problem.node for problem in unsupported(model, load_profile(profile))]
        assert found == ["within"] * (operator == "Det" and profile != "cpu")


def test_bytes_may_come_in_and_be_cast_but_nothing_else() -> None:
    assert unsupported(graph("y = Cast <to = 1> (x)", "uint8"), NEWEST) == ()
    (problem,) = unsupported(graph("t = Transpose(x) y = Cast <to = 1> (t)", "uint8"), NEWEST)
    assert (problem.node, "cast it first" in problem.why) == ("t", True)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        *((kind, f"no tensors of {kind.lower()}") for kind in ("INT16", "UINT32", "STRING")),
        ("DOUBLE", "float64"),
    ],
)
def test_a_type_that_tensorrt_has_no_tensors_of_is_named(kind: str, says: str) -> None:
    there = f"t = Cast <to = {getattr(TensorProto, kind)}> (x)"
    assert says in unsupported(graph(f"{there} y = Cast <to = 1> (t)"), NEWEST)[0].why


@pytest.mark.parametrize(("kind", "words"), [(np.int32, "biases"), (np.uint8, "uint8")])
def test_weights_are_quantized_to_what_tensorrt_takes(kind: type, words: str) -> None:
    model = graph("d = DequantizeLinear(w, s) y = Add(x, d)", w=np.ones(8, kind), s=1.0)
    (problem,) = unsupported(model, NEWEST)
    assert words in problem.why


PAIR = "q = QuantizeLinear(x, scale, {0}) y = DequantizeLinear(q, scale, {0})"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (PAIR.format("zero"), ""),
        (PAIR.format("three"), "zero point is not 0"),
        ("y = DequantizeLinear(bias, scale)", "dequantizes int32"),
        ("y = MatMulInteger(steps, steps)", "only between Q/DQ pairs"),
        ("y = com.microsoft.Gelu(x)", "only ONNX Runtime has this operator"),
    ],
)
def test_a_graph_shows_that_it_was_made_for_onnxruntime(
    body: str, why: str, tmp_path: Path
) -> None:
    weights = {"scale": 0.1, "zero": np.int8(0), "three": np.int8(3), "bias": np.ones(4, np.int32)}
    model = graph(body, **weights, steps=np.ones((4, 4), np.int8))
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    error = find_mismatch(Artefact(path), Graph(model), load_profile("jetson-orin-nano-8gb"))
    assert why in str(error)
    assert (error is None) is (why == "")
    assert find_mismatch(Artefact(path), Graph(model), load_profile("cpu")) is None
    if body.startswith("q = "):
        found = unsupported(model, NEWEST)
        assert [problem.node for problem in found] == ["q", "y"] * bool(why)
        assert all("zero point" in problem.why for problem in found[:1])
