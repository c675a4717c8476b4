from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploykit.core.errors import BadInput
from deploykit.core.tensors import TensorSpec
from deploykit.engines.engine import load
from deploykit.engines.onnxruntime.engine import open_engine
from deploykit.graph.graph import Graph, name_nodes
from tests.support.graphs.data import feeds, samples
from tests.support.graphs.protos import (
    calibrate,
    load_graph,
    save_graph,
    specs,
    summarise,
    to_half,
    to_pairs,
)
from tests.support.graphs.small import parse
from tests.support.onnx_zoo import conv_relu, linear, mnist_like, save, two_inputs

ROWS = "(float[N,4] x) => (float[] y)"
LIMIT = 20_000  # of the 31 KB of mnist_like's head, say: one file "cannot hold" it


@pytest.mark.parametrize("limit_bytes", [LIMIT, 1 << 31])
def test_a_saved_graph_loads_back_equal_and_saving_again_gives_the_same_bytes(
    tmp_path: Path, limit_bytes: int
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        saved = Graph(mnist_like()).save(tmp_path / folder / "m.onnx", limit_bytes=limit_bytes)
    written = sorted((tmp_path / "b").iterdir())
    assert len(written) == (2 if limit_bytes == LIMIT else 1)
    for file in written:
        assert file.read_bytes() == (tmp_path / "a" / file.name).read_bytes()
    loaded = load_graph(tmp_path / "a" / "m.onnx")  # which checks external data
    for ours, theirs in zip(loaded.graph.initializer, mnist_like().graph.initializer, strict=True):
        array = numpy_helper.to_array(ours)
        np.testing.assert_array_equal(array, numpy_helper.to_array(theirs), strict=True)
        np.testing.assert_array_equal(saved.array(ours.name), array)
    assert loaded.graph.node == mnist_like().graph.node


def test_unnamed_dynamic_axes_are_named_as_the_runtime_names_them(tmp_path: Path) -> None:
    head = "(float[a,b,3] x, float[1] w) => (float[a,b,3] y)"
    model = parse(head, "y = Relu(x) unused = Neg(w)", w=np.ones(1))
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].Clear()
        value.type.tensor_type.shape.dim[1].dim_value = -1
    path = save(model, tmp_path / "m.onnx")
    with load(path, "cpu") as engine:
        assert specs(model) == (engine.inputs, engine.outputs)
    assert specs(model)[0] == (TensorSpec("x", "float32", ("N", "x_1", 3)),)  # without a weight
    path.write_bytes(linear().SerializeToString().replace(b"\x12\x01N", b"\x12\x01\xff"))
    assert Graph.open(path).inputs[0].shape == ("\N{REPLACEMENT CHARACTER}", 4)  # not UTF-8


def test_summary_counts_nodes_operators_parameters_and_bytes() -> None:
    summary = summarise(conv_relu())
    assert summary.operators == {"Conv": 1, "Relu": 1}
    assert (summary.nodes, summary.parameters, summary.weight_bytes) == (2, 4 * 9 + 4, 160)
    assert (summary.opset, summary.ir_version, summary.producer) == ({"ai.onnx": 18}, 10, "zoo")
    assert summary.to_dict()["inputs"] == [
        {"name": "x", "dtype": "float32", "shape": ["N", 1, 8, 8]}
    ]


def test_precision_leaves_data_movement_and_casts_out() -> None:
    assert summarise(mnist_like()).precision == {"float32": 7}  # 8 nodes, one is Flatten
    half, _ = to_half(two_inputs())
    assert summarise(half).operators["Cast"] == 4
    assert summarise(half).precision == {"float16": 2}
    half, _ = to_half(mnist_like())
    del half.graph.value_info[:]
    assert summarise(half).precision == {"float16": 7}  # inferred where the file has no types


def test_precision_of_a_quantized_graph_counts_nodes_as_int8_whose_inputs_all_are(
    tmp_path: Path,
) -> None:
    path = save(mnist_like(), tmp_path / "m.onnx")
    summary = summarise(to_pairs(mnist_like(), calibrate(path, samples(mnist_like()))))
    assert summary.precision == {"float32": 4, "int8": 3}
    assert summary.parameters == summarise(mnist_like()).parameters  # scales are none
    weights = {"w": np.ones((4, 3), np.int8), "scale": 0.1, "zero": np.int8(0)}
    pair = "q = QuantizeLinear(x, scale, zero) d = DequantizeLinear(q, scale, zero)"
    for body in ("d = DequantizeLinear(w, scale) y = MatMul(x, d)", f"{pair} y = Add(d, x)"):
        assert summarise(parse(ROWS, body, **weights)).precision == {"float32": 1}


def test_nodes_in_bodies_are_counted() -> None:
    branch = "() => (float[] n) { n = Neg(x) }"
    body = f"y = If <then_branch = t {branch}, else_branch = e {branch}> (c)"
    assert summarise(parse(ROWS, body, c=np.array(True))).operators == {"If": 1, "Neg": 2}


def test_weights_above_the_limit_are_external_aligned_and_used(tmp_path: Path) -> None:
    out = tmp_path / "m.onnx"
    save_graph(mnist_like(), out, limit_bytes=LIMIT)
    light = onnx.load(out, load_external_data=False)
    outside = {t.name: t for t in light.graph.initializer if t.external_data}
    assert set(outside) == {"w2", "w3"}  # the others are below 1 KiB
    for tensor in outside.values():
        fields = {entry.key: entry.value for entry in tensor.external_data}
        assert fields["location"] == "m.onnx.data"
        assert int(fields["offset"]) % 4096 == 0
    assert out.stat().st_size < LIMIT
    whole = save(mnist_like(), tmp_path / "whole.onnx")
    inputs = feeds(mnist_like())
    with load(whole, "cpu") as one, load(out, "cpu") as parts:
        np.testing.assert_array_equal(parts(inputs)["logits"], one(inputs)["logits"])
    found = calibrate(out, samples(mnist_like()))
    assert found == calibrate(whole, samples(mnist_like()))
    assert to_pairs(load_graph(out), found) == to_pairs(mnist_like(), found)


def test_weights_stored_as_numbers_are_written_as_bytes(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((4, 300)).astype(np.float32)
    tensor = helper.make_tensor("W", TensorProto.FLOAT, (4, 300), weight.ravel().tolist())
    model = parse("(float[N,4] x) => (float[N,300] y)", "y = MatMul(x, W)", W=weight)
    model.graph.initializer[0].CopyFrom(tensor)
    save_graph(model, tmp_path / "m.onnx", limit_bytes=1000)
    (read,) = load_graph(tmp_path / "m.onnx").graph.initializer
    np.testing.assert_array_equal(numpy_helper.to_array(read), weight)


def test_nodes_without_a_name_or_with_anothers_get_one_of_their_own() -> None:
    model = mnist_like()
    model.graph.node[0].name = ""
    model.graph.node[3].name = "relu1"
    model.graph.node[4].name = "Conv_0"  # what the first would be called
    names = [node.name for node in model.graph.node]
    name_nodes(model)
    renamed = [node.name for node in model.graph.node]
    assert renamed == ["Conv_0_", *names[1:3], "Conv_3", "Conv_0", *names[5:]]
    name_nodes(model)
    assert [node.name for node in model.graph.node] == renamed


GOOD = mnist_like().SerializeToString()


def change(code: str) -> onnx.ModelProto:
    """The linear model after a statement about `model`, its `graph` and its first `node`."""
    model = linear()
    body = helper.make_graph([helper.make_node("Nope", [], ["n"], name="deep")], "body", [], [])
    names = {
        "choose": helper.make_node("If", ["x"], ["z"], then_branch=body, else_branch=body),
        "removed": helper.make_node("Upsample", ["y", "W"], ["z"], name="up"),
        "own": helper.make_opsetid("my.own", 1),
    }
    exec(code, {"model": model, "graph": model.graph, "node": model.graph.node[0], **names})
    return model


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("node.op_type = 'Gemmm'", ["Name: gemm", "Gemmm"]),
        ("node.domain = 'my.own'; model.opset_import.append(own)", ["'gemm'", "my.own"]),
        ("graph.node.append(choose)", ["Nope", "OpType: If"]),
        ("graph.node.append(removed)", ["Upsample"]),
        ("graph.initializer.append(graph.initializer[0])", ["W", "not unique"]),
        ("graph.input.append(graph.input[0])", ["'x'", "multiple times"]),
        ("graph.output.append(graph.output[0])", ["two outputs have the name 'y'"]),
        ("model.opset_import[0].version = 999", ["opset 999"]),
        ("model.opset_import[0].version = -1", ["-1"]),
        ("model.ir_version = 99", ["ir_version 99"]),
        ("del model.opset_import[:]", ["No opset import"]),
        ("node.input[0] = 'phantom'", ["phantom"]),
        ("graph.initializer[0].dims[:] = [-4]", ["tensor 'W'"]),
        ("graph.initializer[0].dims[:] = [2**62, 8]", ["tensor 'W'"]),
        ("graph.initializer[0].dims[:] = [5, 3]", ["tensor 'W'"]),
        ("graph.initializer[0].data_type = 99", ["element type 99"]),
    ],
)
def test_an_invalid_model_is_bad_input_naming_the_culprit(
    tmp_path: Path, code: str, words: list[str]
) -> None:
    path = save(change(code), tmp_path / "bad.onnx")
    with pytest.raises(BadInput) as caught:
        load_graph(path)
    message = f"{caught.value.message} {caught.value.hint}"
    assert all(word in message for word in ("bad.onnx", *words))


def test_an_engine_refuses_two_initializers_of_one_name_too(tmp_path: Path) -> None:
    path = save(change("graph.initializer.append(graph.initializer[0])"), tmp_path / "m.onnx")
    with pytest.raises(BadInput, match="two initializers have the name 'W'"):
        open_engine(path, "cpu")


def test_domains_that_onnxruntime_writes_are_accepted(tmp_path: Path) -> None:
    model = linear()
    model.graph.node[0].op_type = "FusedGemm"
    model.graph.node[0].domain = "com.microsoft"
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    assert load_graph(save(model, tmp_path / "m.onnx")) == model


@pytest.mark.parametrize("beside", [True, False], ids=["of one folder", "of another folder"])
def test_a_model_and_its_data_may_be_links_to_files_of_one_folder(
    tmp_path: Path, beside: bool
) -> None:
    """As every file of a snapshot of Hugging Face's is."""
    folder, blobs = tmp_path / "model", tmp_path / "blobs"
    folder.mkdir()
    blobs.mkdir()
    values = np.arange(12, dtype=np.float32)
    data = (blobs if beside else tmp_path) / "secret.bin"
    data.write_bytes(values.tobytes())
    model = linear()
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="w.bin")
    save(model, blobs / "0a1b")
    (folder / "m.onnx").symlink_to("../blobs/0a1b")
    (folder / "w.bin").symlink_to(f"../{data.relative_to(tmp_path)}")
    if not beside:
        with pytest.raises(BadInput, match="symbolic link") as caught:
            load_graph(folder / "m.onnx")
        assert "cp -L" in str(caught.value.hint)
        return
    (tensor,) = load_graph(folder / "m.onnx").graph.initializer[:1]
    np.testing.assert_array_equal(numpy_helper.to_array(tensor).ravel(), values)
    with open_engine(folder / "m.onnx", "cpu") as engine:
        assert engine.inputs[0].name == "x"
