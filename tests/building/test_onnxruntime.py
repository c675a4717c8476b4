"""Builds for a CPU: the graph that ONNX Runtime optimised, and the sizes that prove it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import deploykit as dk
import deploykit.building.build as building
from deploykit.building.builder import Shapes
from deploykit.building.onnxruntime import build
from deploykit.core.errors import BadInput, NotFound, Unsupported
from deploykit.core.profile import load_profile
from deploykit.engines.data.samples import Samples, random_feeds
from deploykit.engines.engine import Engine, load
from deploykit.engines.onnxruntime import engine
from tests.support.graphs.protos import calibrate, load_graph, specs, summarise, to_half, to_pairs
from tests.support.graphs.small import write_text
from tests.support.installed import needs
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

Make = Callable[[], onnx.ModelProto]


def feeds(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return random_feeds(specs(model)[0], {"N": 16})


def int8(model: onnx.ModelProto, tmp_path: Path, runtime: str = "onnxruntime") -> onnx.ModelProto:
    data = Samples(feeds(model), None, "data.npz")
    calibration = calibrate(save(model, tmp_path / "float.onnx"), data)
    return to_pairs(model, calibration, runtime=runtime)


# Both files run the same kernels, at most in another memory layout: a sum of up to 784 products
# of size 1 in another order. In half precision outputs are below 16: 1 ulp at 8.
ATOL = {"fp32": 784 * 2.0**-24 * 8, "fp16": 2.0**-7, "int8": 784 * 2.0**-24 * 8}


@pytest.mark.parametrize("kind", ATOL)
@pytest.mark.parametrize("graph", [linear, conv_relu, two_inputs, overflow, int64_ids, mnist_like])
def test_a_built_file_answers_as_its_source(graph: Make, kind: str, tmp_path: Path) -> None:
    model = graph()
    if kind == "int8":
        if graph in (two_inputs, overflow):
            pytest.skip("nothing to quantize")
        model = int8(model, tmp_path)
    source = save(to_half(model)[0] if kind == "fp16" else model, tmp_path / "m.onnx")
    out = tmp_path / "built.onnx"
    build(source, out)
    inputs = feeds(load_graph(source))
    with load(source, "cpu") as before, load(out, "cpu") as after:
        assert (after.inputs, after.outputs) == (before.inputs, before.outputs)
        for name, wanted in before(inputs).items():
            np.testing.assert_allclose(after(inputs)[name], wanted, atol=ATOL[kind], rtol=0)


@pytest.mark.parametrize(
    ("runtime", "counts", "precision"),
    [
        # no pair is left to compute in float
        ("onnxruntime", {"QLinearConv": 2, "QGemm": 1, "DequantizeLinear": 0}, {"int8": 3}),
        ("tensorrt", {"FusedConv": 2}, {"float32": 3}),  # reported as the float they are here
    ],
)
def test_int8_pairs_become_integer_kernels_where_they_stand_for_this_runtime(
    tmp_path: Path, runtime: str, counts: dict[str, int], precision: dict[str, int]
) -> None:
    source = save(int8(mnist_like(), tmp_path, runtime), tmp_path / "int8.onnx")
    build(source, tmp_path / "built.onnx")
    summary = summarise(load_graph(tmp_path / "built.onnx"))
    assert {name: summary.operators.get(name, 0) for name in counts} == counts
    assert {name: summary.precision.get(name) for name in precision} == precision
    assert ("int8" in summary.precision) is ("int8" in precision)


def test_a_built_file_is_fused_the_same_each_time_and_not_bound_to_this_processor(
    tmp_path: Path,
) -> None:
    source, a, b = (tmp_path / name for name in ("m.onnx", "a.onnx", "b.onnx"))
    save(mnist_like(), source)
    assert build(source, a) == {
        "runtime": f"onnxruntime {onnxruntime.__version__}",
        "device": "cpu",
        "optimisation": "extended",
    }
    build(source, b)
    assert a.read_bytes() == b.read_bytes()
    nodes = load_graph(a).graph.node
    assert "FusedConv" in {node.op_type for node in nodes}
    assert "com.microsoft.nchwc" not in {node.domain for node in nodes}


@pytest.mark.parametrize(
    ("content", "out", "error", "says"),
    [
        (mnist_like().SerializeToString()[:-1], "built.onnx", BadInput, r"m\.onnx"),
        (None, "built.onnx", NotFound, r"m\.onnx"),
        (mnist_like().SerializeToString(), "none/built.onnx", BadInput, "does not exist"),
    ],
)
def test_what_cannot_be_built_leaves_the_previous_file(
    tmp_path: Path, content: bytes | None, out: str, error: type[Exception], says: str
) -> None:
    (tmp_path / "built.onnx").write_bytes(b"previous")
    if content is not None:
        (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(error, match=says):
        build(tmp_path / "m.onnx", tmp_path / out)
    assert (tmp_path / "built.onnx").read_bytes() == b"previous"
    assert {file.name for file in tmp_path.iterdir()} <= {"m.onnx", "built.onnx"}


def test_fusions_that_are_slower_on_a_cpu_are_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = "(float[N,4,8] x, float[N,4,8] s) => (float[N,4,8] y)"
    body, ones = "a = Add(x, s) y = LayerNormalization(a, g, b)", np.ones(8, np.float32)
    path = write_text(tmp_path, head, body, {"g": ones, "b": ones})
    build(path, tmp_path / "built.onnx")
    asked = engine.session_options(1)
    asked.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    monkeypatch.setattr(engine, "session_options", lambda *_, **__: asked)
    engine.open_engine(path, "cpu")
    for name in ("loaded.onnx", "built.onnx"):
        kinds = {node.op_type for node in onnx.load(tmp_path / name).graph.node}
        assert "LayerNormalization" in kinds, kinds


ROWS = "(float[N,4,8] x) => (float[N,4,8] y)"
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


@pytest.mark.parametrize("opset", [11, 16])
@pytest.mark.parametrize("operator", NORMS)
def test_operators_that_the_optimizer_writes_at_any_opset_are_those_of_the_runtime(
    tmp_path: Path, operator: str, opset: int
) -> None:
    """ONNX has LayerNormalization from opset 17 on, and the other one not at all."""
    body = f"{NORMS[operator]}\n a = Add(v, e)\n r = Sqrt(a)\n n = Div(d, r)\n y = Mul(n, g)"
    path = write_text(tmp_path, ROWS, body, {"e": 1e-5, "two": 2.0, "g": np.arange(1.0, 9)}, opset)
    made = dk.build(path, "cpu")
    kinds = {(node.domain, node.op_type) for node in onnx.load(made.path).graph.node}
    assert ("", "SimplifiedLayerNormalization") in kinds or ("", "LayerNormalization") in kinds
    assert dk.inspect(made.path).precision["float32"] >= 1
    assert dk.compare(path, made.path).parity.passed


@pytest.mark.parametrize("profile", ["cpu", "cpu-openvino"])
@pytest.mark.parametrize("declared", [[], [1], [4], ["N", 1], ["N"]], ids=str)
def test_an_output_that_is_declared_wrongly_is_corrected_with_a_note(
    tmp_path: Path, declared: list[int | str], profile: str
) -> None:
    """ONNX Runtime only warns; whoever reads the metadata of a server would be misled."""
    needs(load_profile(profile).runtime)
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


# sizes and samples of the proof, for files that run at few sizes only

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.fixture
def audio(tmp_path: Path) -> Path:
    """A file that takes no fewer than 65 steps, as one for speech."""
    body = 'p = Pad<mode="reflect">(x, pads) u = Unsqueeze(p, ax) c = Conv(u, K) y = Squeeze(c, ax)'
    weights = {"pads": np.array([0, 64, 0, 64]), "ax": np.array([1]), "K": normal(1, 1, 33)}
    np.savez(tmp_path / "d.npz", x=normal(40, 512))
    return write_text(tmp_path, "(float[N,T] x) => (float[N,L] y)", body, weights)


def batches(made: dk.Made) -> list[int]:
    assert made.parity is not None
    assert made.parity.passed
    return [row.batch for row in made.parity.rows]


@pytest.mark.parametrize("profile", ["cpu", "cpu-openvino"])
def test_a_file_with_a_least_size_is_compared_at_sizes_that_run(audio: Path, profile: str) -> None:
    needs(load_profile(profile).runtime)
    assert {1, 2, 7, 32} <= set(batches(dk.build(audio, profile)))


@pytest.mark.parametrize(
    ("shapes", "options", "compared"),
    [
        (Shapes(axes=["T=512"]), {}, [1, 2, 7, 32]),
        (Shapes(axes=["T=100,512,600"], batch="1,3,7"), {}, [3, 1, 7]),
        (Shapes(batch="4", axes=["T=70"]), {}, [4]),
        (None, {"data": True}, [1, 2, 32]),
        (None, {"precision": "int8", "calib": True}, [1, 2, 32]),
    ],
    ids=["an axis", "ranges", "one size", "samples", "calibration"],
)
def test_named_sizes_or_given_samples_are_those_of_the_comparison(
    audio: Path, shapes: Shapes | None, options: dict[str, Any], compared: list[int]
) -> None:
    data = audio.with_name("d.npz")
    given = {key: data if value is True else value for key, value in options.items()}
    assert batches(dk.build(audio, "cpu", shapes=shapes, **given))[: len(compared)] == compared


def test_samples_on_another_axis_are_compared(tmp_path: Path) -> None:
    head = "(float[S,N,5] x, float[2,N,8] h) => (float[S,2,N,8] y)"
    body = 'y = GRU<hidden_size=8, direction="bidirectional">(x, W, R, B, , h)'
    weights = {"W": normal(2, 24, 5), "R": normal(2, 24, 8), "B": normal(2, 48)}
    path = write_text(tmp_path, head, body, weights)
    np.savez(tmp_path / "d.npz", x=normal(7, 12, 5), h=normal(2, 12, 8))
    assert batches(dk.build(path, "cpu", data=tmp_path / "d.npz")) == [1, 2, 12]


def test_a_build_is_compared_on_samples_from_first_to_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = write_text(tmp_path, "(float[N,4] x) => (float[N,4] y)", "y = Relu(x)", {}), []
    np.savez(tmp_path / "d.npz", x=np.repeat(np.arange(200, dtype=np.float32)[:, None], 4, axis=1))
    feeds = building.comparison_feeds

    def seen(first: Engine, second: Engine, samples: Samples, *rest: Any) -> Any:
        data.extend(samples.inputs["x"][:, 0])
        return feeds(first, second, samples, *rest)

    monkeypatch.setattr(building, "comparison_feeds", seen)
    assert batches(dk.build(path, "cpu", data=tmp_path / "d.npz")) == [1, 2, 32]
    assert (len(data), data[0], data[-1]) == (32, 0, 199)
    assert np.diff(data).max() < 8


@pytest.mark.parametrize(
    ("shapes", "options", "says"),
    [
        (Shapes(axes=["Q=5"]), {}, "no input has a dynamic axis 'Q'"),
        (Shapes(axes=["T"]), {}, "names no axis"),
        (Shapes(batch="0"), {}, "OPT 1 or more"),
        (Shapes(axes=["T=8"]), {}, r"no random inputs (of any size )?that w.+ tried run"),
        (Shapes(axes=["T=512"]), {"data": True}, "sizes of random inputs"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    audio: Path, shapes: Shapes, options: dict[str, Any], says: str
) -> None:
    data = audio.with_name("d.npz")
    with pytest.raises(dk.BadInput, match=says):
        dk.build(audio, "cpu", shapes=shapes, **dict.fromkeys(options, data))
