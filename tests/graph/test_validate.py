from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploykit.core.errors import BadInput
from deploykit.engines.onnxruntime.engine import open_engine
from tests.support.graphs.protos import load_graph
from tests.support.onnx_zoo import linear, mnist_like, save

GOOD = mnist_like().SerializeToString()


def change(code: str) -> onnx.ModelProto:
    """The linear model after a statement about `model`, its `graph` and its first `node`."""
    model = linear()
    body = helper.make_graph([helper.make_node("Nope", [], ["n"], name="deep")], "body", [], [])
    names = {
        "choose": helper.make_node("If", ["x"], ["z"], then_branch=body, else_branch=body),
        "removed": helper.make_node("Upsample", ["y", "s"], ["z"], name="up"),
        "own": helper.make_opsetid("my.own", 1),
    }
    exec(code, {"model": model, "graph": model.graph, "node": model.graph.node[0], **names})
    return model


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("node.op_type = 'Gemmm'", ["'gemm'", "Gemmm"]),
        ("node.domain = 'my.own'; model.opset_import.append(own)", ["'gemm'", "my.own"]),
        ("graph.node.append(choose)", ["'deep'"]),
        ("graph.node.append(removed)", ["Upsample"]),
        ("graph.initializer.append(graph.initializer[0])", ["two initializers have the name 'W'"]),
        ("graph.input.append(graph.input[0])", ["two inputs have the name"]),
        ("model.opset_import[0].version = 999", ["opset 999"]),
        ("model.opset_import[0].version = -1", ["opset -1"]),
        ("model.ir_version = 99", ["IR version 99"]),
        ("del model.opset_import[:]", ["no opset"]),
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


def external(folder: Path, location: str, **entries: str) -> Path:
    """The linear model whose W (48 bytes) is said to lie at `location`."""
    model = linear()
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        weight.external_data.add(key=key, value=value)
    return save(model, folder / "m.onnx")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder in a folder with other files."""
    inner = tmp_path / "model"
    inner.mkdir()
    return inner


@pytest.mark.parametrize("beside", [True, False], ids=["of one folder", "of another folder"])
def test_a_model_and_its_data_may_be_links_to_files_of_one_folder(
    folder: Path, beside: bool
) -> None:
    """As every file of a snapshot of Hugging Face's is."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    values = np.arange(12, dtype=np.float32)
    data = (blobs if beside else folder.parent) / "secret.bin"
    data.write_bytes(values.tobytes())
    external(blobs, "w.bin").rename(blobs / "0a1b")
    (folder / "m.onnx").symlink_to("../blobs/0a1b")
    (folder / "w.bin").symlink_to(f"../{data.relative_to(folder.parent)}")
    if not beside:
        with pytest.raises(BadInput, match="symbolic link") as caught:
            load_graph(folder / "m.onnx")
        assert "cp -L" in str(caught.value.hint)
        return
    (tensor,) = load_graph(folder / "m.onnx").graph.initializer[:1]
    np.testing.assert_array_equal(numpy_helper.to_array(tensor).ravel(), values)
    with open_engine(folder / "m.onnx", "cpu") as engine:
        assert engine.inputs[0].name == "x"
