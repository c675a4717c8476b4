from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import deploykit as dk
from deploykit.building.onnxruntime import build
from deploykit.building.runtime import actual_shapes
from deploykit.core.errors import BadInput, NotFound, Unsupported
from deploykit.core.tensors import TensorSpec
from deploykit.engines.data.samples import Samples, random_feeds
from deploykit.engines.engine import load
from deploykit.engines.onnxruntime import engine
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
Make = Callable[[], onnx.ModelProto]


def feeds(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return random_feeds(specs(model)[0], {"N": 16})


def int8(model: onnx.ModelProto, tmp_path: Path, runtime: str = "onnxruntime") -> onnx.ModelProto:
    data = Samples(feeds(model), None, "data.npz")
    calibration = calibrate(save(model, tmp_path / "float.onnx"), data)
    return to_pairs(model, calibration, runtime=runtime)


def check_same_outputs(source: Path, out: Path, atol: float) -> None:
    inputs = feeds(load_graph(source))
    with load(source, "cpu") as before, load(out, "cpu") as after:
        assert (after.inputs, after.outputs) == (before.inputs, before.outputs)
        for name, wanted in before(inputs).items():
            np.testing.assert_allclose(after(inputs)[name], wanted, atol=atol, rtol=0)


# Both files run the same kernels, at most in another memory layout: a sum of up to 784 products
# of size 1 in another order.
ATOL_SUMS = 784 * 2.0**-24 * 8


@pytest.mark.parametrize("graph", ZOO)
def test_a_built_file_answers_as_its_source(graph: Make, tmp_path: Path) -> None:
    source = save(graph(), tmp_path / "m.onnx")
    build(source, tmp_path / "built.onnx")
    check_same_outputs(source, tmp_path / "built.onnx", ATOL_SUMS)


@pytest.mark.parametrize("graph", ZOO)
def test_a_built_half_file_answers_as_its_source(graph: Make, tmp_path: Path) -> None:
    source = save(to_half(graph())[0], tmp_path / "half.onnx")
    build(source, tmp_path / "built.onnx")
    check_same_outputs(source, tmp_path / "built.onnx", 2.0**-7)  # outputs below 16: 1 ulp at 8


@pytest.mark.parametrize("graph", [linear, conv_relu, int64_ids, mnist_like])
def test_a_built_int8_file_answers_as_its_source(graph: Make, tmp_path: Path) -> None:
    source = save(int8(graph(), tmp_path), tmp_path / "int8.onnx")
    build(source, tmp_path / "built.onnx")
    check_same_outputs(source, tmp_path / "built.onnx", ATOL_SUMS)


def test_int8_pairs_become_integer_kernels(tmp_path: Path) -> None:
    source = save(int8(mnist_like(), tmp_path), tmp_path / "int8.onnx")
    build(source, tmp_path / "built.onnx")
    summary = summarise(load_graph(tmp_path / "built.onnx"))
    assert (summary.operators["QLinearConv"], summary.operators["QGemm"]) == (2, 1)
    assert "DequantizeLinear" not in summary.operators  # none is left to compute in float
    assert summary.precision == {"int8": 3}


def test_pairs_for_tensorrt_are_reported_as_the_float_they_are_here(tmp_path: Path) -> None:
    source = save(int8(mnist_like(), tmp_path, "tensorrt"), tmp_path / "int8.onnx")
    build(source, tmp_path / "built.onnx")
    summary = summarise(load_graph(tmp_path / "built.onnx"))
    assert summary.operators["FusedConv"] == 2
    assert "int8" not in summary.precision


def test_float_nodes_are_fused(tmp_path: Path) -> None:
    build(save(conv_relu(), tmp_path / "m.onnx"), tmp_path / "built.onnx")
    assert summarise(load_graph(tmp_path / "built.onnx")).operators == {"FusedConv": 1}


def test_a_built_file_is_not_bound_to_this_processor(tmp_path: Path) -> None:
    build(save(mnist_like(), tmp_path / "m.onnx"), tmp_path / "built.onnx")
    domains = {node.domain for node in load_graph(tmp_path / "built.onnx").graph.node}
    assert "com.microsoft.nchwc" not in domains


def test_building_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    source = save(mnist_like(), tmp_path / "m.onnx")
    build(source, tmp_path / "a.onnx")
    build(source, tmp_path / "b.onnx")
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_it_says_what_it_was_built_on(tmp_path: Path) -> None:
    facts = build(save(linear(), tmp_path / "m.onnx"), tmp_path / "built.onnx")
    assert facts == {
        "runtime": f"onnxruntime {onnxruntime.__version__}",
        "device": "cpu",
        "optimisation": "extended",
    }


def test_a_refused_graph_leaves_the_previous_file(tmp_path: Path) -> None:
    out = tmp_path / "built.onnx"
    out.write_bytes(b"previous")
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(mnist_like().SerializeToString()[:-1])
    with pytest.raises(BadInput, match=r"bad\.onnx"):
        build(bad, out)
    assert out.read_bytes() == b"previous"
    assert {file.name for file in tmp_path.iterdir()} == {"bad.onnx", "built.onnx"}


def test_a_missing_model_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"none\.onnx"):
        build(tmp_path / "none.onnx", tmp_path / "built.onnx")


def test_an_output_folder_that_is_not_there_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not exist"):
        build(save(linear(), tmp_path / "m.onnx"), tmp_path / "none" / "built.onnx")


def test_fusions_that_are_slower_on_a_cpu_are_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ones = np.ones(8, np.float32)
    nodes = [
        helper.make_node("Add", ["x", "s"], ["a"], "sum"),
        helper.make_node("LayerNormalization", ["a", "g", "b"], ["y"], "norm"),
    ]
    row = ("N", 4, 8)
    model = make(nodes, {"x": row, "s": row}, {"y": row}, {"g": ones, "b": ones})
    path = save(onnx.shape_inference.infer_shapes(model), tmp_path / "m.onnx")
    asked = engine.session_options(1)
    asked.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    monkeypatch.setattr(engine, "session_options", lambda *_, **__: asked)
    engine.open_engine(path, "cpu")
    monkeypatch.undo()
    build(path, tmp_path / "built.onnx")
    for name in ("loaded.onnx", "built.onnx"):
        kinds = {node.op_type for node in onnx.load(tmp_path / name).graph.node}
        assert "LayerNormalization" in kinds, kinds


SPREAD = """agraph (float[N, 4, 8] x) => (float[N, 4, 8] y)
    <float e = {0.00001}, float two = {2}, float[8] g = {1, 2, 3, 4, 5, 6, 7, 8}> {"""
NORMS = {  # as exporters write them below the opset that has the operator
    "LayerNormalization": """
        m = ReduceMean <axes = [-1]> (x)
        d = Sub(x, m)
        s = Pow(d, two)
        v = ReduceMean <axes = [-1]> (s)""",
    "RMSNormalization": """
        d = Identity(x)
        s = Pow(d, two)
        v = ReduceMean <axes = [-1]> (s)""",
}


@pytest.mark.parametrize("opset", [11, 13, 14, 16])
@pytest.mark.parametrize("operator", NORMS)
def test_operators_that_the_optimizer_writes_at_any_opset_are_those_of_the_runtime(
    tmp_path: Path, operator: str, opset: int
) -> None:
    """ONNX has LayerNormalization from opset 17 on, and the other one not at all."""
    body = f"{NORMS[operator]}\n a = Add(v, e)\n r = Sqrt(a)\n n = Div(d, r)\n y = Mul(n, g) }}"
    head = f'<ir_version: 8, opset_import: ["" : {opset}]>\n'
    path = tmp_path / "m.onnx"
    onnx.save(onnx.parser.parse_model(head + SPREAD + body), path)
    made = dk.build(path, "cpu")
    kinds = {(node.domain, node.op_type) for node in onnx.load(made.path).graph.node}
    assert ("", "SimplifiedLayerNormalization") in kinds or ("", "LayerNormalization") in kinds
    feeds = {"x": np.random.default_rng(0).random((3, 4, 8), dtype=np.float32)}
    wanted = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(
        None, feeds
    )[0]
    with dk.load(made.path, "cpu") as opened:
        np.testing.assert_allclose(opened(feeds)["y"], wanted, rtol=1e-4, atol=1e-5)
    assert dk.inspect(made.path).precision["float32"] >= 1
    assert dk.compare(path, made.path).parity.passed


@pytest.mark.parametrize("profile", ["cpu", "cpu-openvino"])
@pytest.mark.parametrize("declared", [[], [1], [4], ["N", 1], ["N"]], ids=str)
def test_an_output_that_is_declared_wrongly_is_corrected_with_a_note(
    tmp_path: Path, declared: list[int | str], profile: str
) -> None:
    """ONNX Runtime only warns; whoever reads the metadata of a server would be misled."""
    weights = {"w": np.ones((4, 1), np.float32), "s": np.array([-1])}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], "product"),
        helper.make_node("Reshape", ["m", "s"], ["y"], "flat"),
    ]
    model = make(nodes, {"x": ("N", 4)}, {"y": ("N",)}, weights)
    output = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, declared)
    model.graph.output[0].CopyFrom(output)
    made = dk.build(save(model, tmp_path / "m.onnx"), profile)
    assert [str(each) for each in made.manifest.outputs] == ["y:float32[N]"]
    notes = [note for note in made.notes if "corrected" in note]
    assert len(notes) == (declared != ["N"])
    assert made.manifest.evidence.batching is not None
    assert made.manifest.evidence.batching.passed
    with dk.load(made.path, "cpu") as opened:
        assert [str(each) for each in opened.outputs] == ["y:float32[N]"]
        assert opened({"x": np.ones((3, 4), np.float32)})["y"].tolist() == [4] * 3
    assert dk.compare(tmp_path / "m.onnx", made.path).parity.passed


def test_the_sizes_of_several_runs_tell_a_fixed_axis_from_one_of_an_input() -> None:
    pairs = ((1, 7), (2, 7), (5, 9))
    runs = [({"N": n, "T": t}, {"y": (n, t, 3), "z": (5,), "a": (n * t,)}) for n, t in pairs]
    specs = [TensorSpec(name, "float32", shape) for name, shape in DECLARED.items()]
    assert actual_shapes(specs, runs) == {"y": ("N", "T", 3), "z": (5,), "a": ("a_0",)}
    alike = actual_shapes(specs, runs[:2])  # samples of one length do not show what depends on it
    assert alike == {"y": ("N", "T", "y_2"), "z": ("z_0",), "a": ("a_0",)}


DECLARED: dict[str, tuple[int | str, ...]] = {"y": (), "z": (4,), "a": (1,)}


def test_weights_above_two_gib_do_not_fit_into_a_build(tmp_path: Path) -> None:
    model = linear()
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="weights")
    with (tmp_path / "weights").open("wb") as file:
        file.truncate(1 << 31)  # sparse
    path, out = save(model, tmp_path / "m.onnx"), tmp_path / "out.onnx"
    with pytest.raises(Unsupported, match="bytes with its weights"):
        build(path, out)
    assert not out.exists()


def test_a_model_without_inputs_is_built_and_takes_no_images(tmp_path: Path) -> None:
    """It computes one answer, from its weights alone."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    weights = {"w": np.arange(8, dtype=np.float32).reshape(2, 4) - 3}
    model = make([helper.make_node("Relu", ["w"], ["y"])], {}, {"y": (2, 4)}, weights)
    made = dk.build(save(model, tmp_path / "m.onnx"), "cpu", out=tmp_path / "b.onnx")
    assert made.parity is not None
    assert made.parity.passed
    images = tmp_path / "images"
    images.mkdir()
    (images / "a.png").write_bytes(b"")
    with pytest.raises(dk.BadInput, match="its inputs are: none"):
        dk.predict(made.path, images, out=tmp_path / "p.npz")
