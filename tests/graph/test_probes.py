from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from tests.support.graphs.data import feeds, samples
from tests.support.graphs.protos import calibrate, expose, shared, simulate, to_half, to_pairs
from tests.support.graphs.small import parse
from tests.support.onnx_zoo import int64_ids, mnist_like, overflow, save, two_inputs

ROWS = "(float[N] x) => (float[N] y)"


def nodes_of(pairs: dict[str, tuple[str, onnx.NodeProto]]) -> list[str]:
    return [node.name for _, node in pairs.values()]


def test_exposed_tensors_are_added_to_the_outputs_of_a_copy_and_bfloat16_comes_out_as_float32() -> (
    None
):
    model, inputs = mnist_like(), dict(feeds(mnist_like(), 3))
    tapped, shown = expose(model, ["r1", "flat", "logits", "r1"])
    assert shown == ["r1", "flat", "logits", "r1"]
    assert [output.name for output in tapped.graph.output] == ["logits", "r1", "flat"]
    wanted = ReferenceEvaluator(model).run(shown, inputs)
    for array, other in zip(wanted, ReferenceEvaluator(tapped).run(shown, inputs), strict=True):
        np.testing.assert_array_equal(array, other)
    assert model == mnist_like()
    for to, name, kind in (("fp16", "sum_float16", "FLOAT16"), ("bf16", "sum_bfloat16", "FLOAT")):
        half = to_half(two_inputs(), to)[0]
        tapped, (shown_as,) = expose(simulate(half) if to == "bf16" else half, [name])
        types = {value.name: value.type.tensor_type.elem_type for value in tapped.graph.output}
        assert types[shown_as] == getattr(TensorProto, kind)


NODES = [node.name for node in mnist_like().graph.node]


@pytest.mark.parametrize("to", ["", "fp16", "bf16", "simulated fp16", "simulated bf16"])
def test_a_graph_shares_every_tensor_with_itself_and_its_halves(to: str) -> None:
    precision = to.rpartition(" ")[2]
    other = to_half(mnist_like(), precision)[0] if to else mnist_like()
    pairs = shared(mnist_like(), simulate(other) if "simulated" in to else other)
    suffix = {"": "", "fp16": "_float16", "bf16": "_bfloat16"}[precision]
    assert nodes_of(pairs) == NODES
    twins = [other for other, _ in pairs.values()]
    assert (twins[:3], twins[-1]) == ([f"{name}{suffix}" for name in ("c1", "r1", "p1")], "logits")
    assert shared(other, mnist_like())[f"c1{suffix}"][0] == "c1"


def test_of_a_tensor_and_its_copy_the_one_that_a_node_computes_is_compared() -> None:
    a, b = (
        parse(ROWS, f"[relu] {made} = Relu(x) {cast} = Cast <to = 1> ({made}) y = Neg({cast})")
        for made, cast in (("r_float16", "r_dequantized"), ("r_bfloat16", "r_float16_"))
    )
    assert shared(a, b)["r_float16"][0] == "r_bfloat16"


@pytest.mark.parametrize("runtime", ["tensorrt", "onnxruntime"])
def test_a_quantized_graph_shares_what_its_nodes_make(tmp_path: Path, runtime: str) -> None:
    path = save(mnist_like(), tmp_path / "m.onnx")
    model = to_pairs(mnist_like(), calibrate(path, samples(mnist_like())), runtime=runtime)
    pairs = shared(mnist_like(), model)
    assert {"conv1", "conv2", "head"} <= set(nodes_of(pairs))
    assert all(name == twin for name, (twin, _) in pairs.items())
    if runtime == "tensorrt":
        assert shared(mnist_like(), to_half(model)[0])["c2"][0] == "c2_float16"
        kinds = {node.op_type for _, node in shared(model, model).values()}
        assert "DequantizeLinear" in kinds
        assert "QuantizeLinear" not in kinds


def test_two_exports_share_nothing_and_one_name_for_two_operators_is_chance() -> None:
    renamed = mnist_like()
    for node in renamed.graph.node:
        node.input[:] = [name if name in ("image",) else f"v_{name}" for name in node.input]
        node.output[:] = [f"v_{name}" for name in node.output]
    renamed.graph.output[0].name = "v_logits"
    assert shared(mnist_like(), renamed) == {}
    other = two_inputs()
    other.graph.node[0].CopyFrom(helper.make_node("Sub", ["a", "b"], ["sum"], name="subtract"))
    assert nodes_of(shared(two_inputs(), other)) == ["mul"]


def test_a_normalisation_folded_into_its_convolution_is_still_the_same_tensor() -> None:
    head = "(float[N,1,8,8] x) => (float[N,4,8,8] y)"
    conv, weights = (
        "Conv <pads = [1, 1, 1, 1]> (x, W)",
        {"W": np.ones((4, 1, 3, 3)), "s": np.ones(4)},
    )
    both = f"[conv] c = {conv} [norm] y = BatchNormalization(c, s, s, s, s)"
    folded = parse(head, f"[conv] y = {conv}", **weights)
    assert nodes_of(shared(parse(head, both, **weights), folded)) == ["norm"]


def test_integer_tensors_are_pairs_and_constants_and_strings_are_not() -> None:
    model = overflow()
    model.graph.node.insert(0, helper.make_node("Constant", [], ["one"], value_float=1.0))
    assert nodes_of(shared(model, model)) == ["scale_up", "scale_down", "add_one"]
    assert nodes_of(shared(int64_ids(), int64_ids())) == ["embed", "project"]
    for kind, names in (("int64", ["y"]), ("string", [])):
        model = parse(f"({kind}[N] x) => ({kind}[N] y)", "y = Identity(x)")
        assert nodes_of(shared(model, model)) == names
