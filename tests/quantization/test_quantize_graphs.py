"""`quantize` on graphs of unusual form: a file that passes, or one line that is true.

Each row stood for a traceback, or for a line that blamed something else.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import deploykit as dk

HEAD = (
    '<ir_version: 8, opset_import: ["" : {opset}, "ai.onnx.ml" : 3]> g ({x}[N,8] x) => ({x}[N,8] y)'
)
GRAPHS = {
    "empty weights": """<float[8,8] w, float[8,0] none> {
        a = MatMul(x, w)
        b = MatMul(x, none)
        y = Concat<axis = 1>(a, b) }""",
    "one matrix for three products": """<float[8,8] w> {
        a = MatMul(x, w)
        b = Gemm<transB = 1>(a, w)
        y = MatMul(b, w) }""",
    "an operator of unknown type": """<float[8,8] w> {
        a = ai.onnx.ml.Scaler<offset = [0.0], scale = [1.0]>(x)
        y = MatMul(a, w) }""",
    "no arithmetic": "{ y = Identity(x) }",
    "a product": "<float[8,8] w> { y = MatMul(x, w) }",
    "integers": "<int64 one = {1}> { y = Add(x, one) }",
    "float16": "<float16[8,8] w> { y = MatMul(x, w) }",
}


def write(folder: Path, graph: str, kind: str = "float", opset: int = 17) -> tuple[Path, Path]:
    """The model, its weights drawn at random, and samples for it."""
    model = onnx.parser.parse_model(HEAD.format(opset=opset, x=kind) + GRAPHS[graph])
    rng = np.random.default_rng(0)
    half = np.float16 if kind == "float16" else np.float32
    for name, columns in (("w", 8), ("none", 0)):
        if f" {name}" in GRAPHS[graph].partition("{")[0]:
            weights = rng.standard_normal((8, columns)).astype(half) / 3
            stored = onnx.numpy_helper.from_array(weights.astype(half), name)
            kept = [each for each in model.graph.initializer if each.name != name]
            del model.graph.initializer[:]
            model.graph.initializer.extend([*kept, stored])
            values = [each for each in model.graph.value_info if each.name != name]
            del model.graph.value_info[:]
            model.graph.value_info.extend(values)
    onnx.save(model, folder / "m.onnx")
    samples = rng.standard_normal((16, 8)) * 3
    np.savez(folder / "c.npz", x=samples.astype(np.int64 if kind == "int64" else half))
    return folder / "m.onnx", folder / "c.npz"


@pytest.mark.parametrize("runtime", ["tensorrt", "onnxruntime"])
@pytest.mark.parametrize("graph", list(GRAPHS)[:3])
def test_what_can_be_quantized_is(tmp_path: Path, graph: str, runtime: str) -> None:
    model, calib = write(tmp_path, graph)
    made = dk.quantize(model, "int8", calib=calib, runtime=runtime)
    assert made.manifest.precision["int8"] >= (3 if "one" in graph else 1)
    assert made.evaluation.sqnr_db > 25


def test_auto_keeps_float32_where_nothing_is_computed(tmp_path: Path) -> None:
    model, calib = write(tmp_path, "no arithmetic")
    made = dk.quantize(model, "auto", calib=calib, profile="l4")
    assert made.search.precision == "float32"


@pytest.mark.parametrize("to", ["int8", "fp16", "auto"])
@pytest.mark.parametrize(("graph", "kind"), [("integers", "int64"), ("float16", "float16")])
def test_a_model_without_float32_is_refused(tmp_path: Path, graph: str, kind: str, to: str) -> None:
    model, calib = write(tmp_path, graph, kind)
    with pytest.raises(dk.BadInput, match=r"m\.onnx: has no float32 tensor: nothing to quantize"):
        dk.quantize(model, to, calib=calib)


def test_a_classifier_that_ends_in_labels_is_gated_on_them(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[N,8] x) => (int64[N] label, float[N,4] shares) {
            q = MatMul(x, w) shares = Softmax(q) label = ArgMax<axis = 1, keepdims = 0>(shares)
        }""")
    rng = np.random.default_rng(0)
    weights, x = rng.standard_normal((8, 4)), rng.standard_normal((2000, 8)).astype(np.float32)
    array = onnx.numpy_helper.from_array(weights.astype(np.float32), "w")
    model.graph.initializer.append(array)
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=x, labels=(x @ weights).argmax(1))
    data = tmp_path / "d.npz"
    made = dk.quantize(tmp_path / "m.onnx", "int8", calib=data, data=data, max_drop=0.05)
    assert made.drop.n == 2000
    assert made.drop.reference.value == 1.0


@pytest.mark.parametrize("to", ["fp16", "int8", "int8-dynamic", "auto"])
def test_an_output_that_is_no_tensor_is_described_and_refused_by_its_name(
    tmp_path: Path, to: str
) -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[N,8] x) => (float[N,8] y, seq(float[N,1]) parts) {
            y = Relu(x) parts = SplitToSequence<axis = 1>(y) }""")
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "c.npz", x=np.random.default_rng(0).random((16, 8), np.float32))
    assert dk.inspect(tmp_path / "m.onnx").outputs[1].dtype == "seq(float32)"
    with pytest.raises(dk.Unsupported, match=r"m\.onnx: 'parts' is a seq\(float32\)"):
        dk.quantize(tmp_path / "m.onnx", to, calib=tmp_path / "c.npz")


def test_an_empty_cache_gives_no_range_and_no_error_elsewhere(tmp_path: Path) -> None:
    """The first step of a decoder."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[N,1,8] x, float[N,P,8] past) => (float[N,1,8] y, float[N,Q,8] present) {
            k = MatMul(x, w) present = Concat<axis = 1>(past, k)
            t = Transpose<perm = [0, 2, 1]>(present) s = MatMul(x, t) y = MatMul(s, present) }""")
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((8, 8)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    path, data = tmp_path / "m.onnx", tmp_path / "d.npz"
    onnx.save(model, path)
    x = rng.standard_normal((16, 1, 8)).astype(np.float32)
    np.savez(data, x=x, past=np.zeros((16, 0, 8), np.float32))
    assert dk.compare(path, path, data=data).parity.passed
    assert dk.quantize(path, "fp16", data=data).evaluation.passed
    with pytest.raises(dk.BadInput, match="input 'past' is empty in all samples") as caught:
        dk.quantize(path, "int8", calib=data)
    assert "later steps" in caught.value.hint
