"""What ONNX Runtime's engine adds to the promises of test_conformance.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from deploykit.core.errors import BadInput, Unsupported

ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from deploykit.engines.onnxruntime.engine import open_engine, session_options  # noqa: E402
from tests.support.graphs.small import node, value, write_graph  # noqa: E402

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16
ADD = node("Add", ["x", "w"], ["y"])
IDENTITY = node("Identity", ["x"], ["y"])


def looping() -> onnx.NodeProto:
    """Answers y = x, taken over as many times as the input `count` says."""
    body = helper.make_graph(
        [node("Identity", ["go"], ["go_on"]), node("Identity", ["before"], ["after"])],
        "body",
        [value("i", TensorProto.INT64, []), value("go", TensorProto.BOOL, []), value("before")],
        [value("go_on", TensorProto.BOOL, []), value("after")],
    )
    return node("Loop", ["count", "", "x"], ["y"], body=body)


def test_engine_that_values_can_make_hang_is_not_steady(tmp_path: Path) -> None:
    count = value("count", TensorProto.INT64, [])
    looped = write_graph(tmp_path / "a.onnx", [looping()], [value("x"), count], [value("y")])
    plain = write_graph(tmp_path / "b.onnx", [IDENTITY], [value("x")], [value("y")])
    with open_engine(looped, "cpu") as engine:
        found = engine({"x": np.ones((1, 4), np.float32), "count": np.array(3)})
        assert found["y"].tolist() == [[1] * 4]
        assert not engine.steady
    with open_engine(plain, "cpu") as engine:
        assert engine.steady


@pytest.mark.parametrize(
    ("dtype", "operator", "steady"),
    [
        (TensorProto.INT64, "Range", False),
        (TensorProto.INT64, "Identity", True),
        (TensorProto.UINT8, "Identity", True),
        (TensorProto.STRING, "Identity", False),
    ],
    ids=["a size from values", "numbers", "bytes", "strings of any length"],
)
def test_engine_whose_values_set_a_size_is_not_steady(
    tmp_path: Path, dtype: int, operator: str, steady: bool
) -> None:
    inputs = [value("n", dtype, [])]
    if operator == "Range":
        names = ["n", "n", "n"]
        nodes, out = [node("Range", names, ["y"])], value("y", dtype, ["M"])
    else:
        nodes, out = [node("Identity", ["n"], ["y"])], value("y", dtype, [])
    with open_engine(write_graph(tmp_path / "m.onnx", nodes, inputs, [out]), "cpu") as engine:
        assert engine.steady is steady


@pytest.mark.parametrize("keep", [0.3, 0.9])
def test_truncated_file_does_not_open(affine_onnx: Path, keep: float) -> None:
    content = affine_onnx.read_bytes()
    affine_onnx.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(BadInput, match=r"affine\.onnx: is a truncated or damaged ONNX file"):
        open_engine(affine_onnx, "cpu")


def test_half_graph_runs(tmp_path: Path) -> None:
    cast = node("Cast", ["x"], ["h"], to=HALF)
    double = node("Add", ["h", "h"], ["h2"])
    back = node("Cast", ["h2"], ["y"], to=FLOAT)
    path = write_graph(tmp_path / "m", [cast, double, back], [value("x")], [value("y")])
    with open_engine(path, "cpu") as engine:
        y = engine({"x": np.ones((2, 4), np.float32)})["y"]
    np.testing.assert_array_equal(y, np.full((2, 4), 2, np.float32))


def test_cuda_that_is_not_there_is_never_replaced_by_the_cpu(affine_onnx: Path) -> None:
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("this onnxruntime has a CUDA provider")
    with pytest.raises(Unsupported, match=r"affine\.onnx: `device` is cuda.*no CUDA") as caught:
        open_engine(affine_onnx, "cuda")
    assert caught.value.exit_code == 3
    assert caught.value.hint is not None


def test_auto_without_cuda_is_the_cpu(affine_onnx: Path) -> None:
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("this onnxruntime has a CUDA provider")
    with open_engine(affine_onnx, "auto") as engine:
        assert engine.device == "cpu"


def test_two_inputs_must_agree_on_the_batch(tmp_path: Path) -> None:
    add = node("Add", ["a", "b"], ["y"])
    path = write_graph(tmp_path / "two.onnx", [add], [value("a"), value("b")], [value("y")])
    feeds = {"a": np.zeros((3, 4), np.float32), "b": np.zeros((1, 4), np.float32)}
    with open_engine(path, "cpu") as engine, pytest.raises(BadInput, match="axis N is 3 and 1"):
        engine(feeds)


def test_unnamed_axes_get_names(tmp_path: Path) -> None:
    shape = [None, 4, None]
    path = write_graph(
        tmp_path / "m", [IDENTITY], [value("x", FLOAT, shape)], [value("y", FLOAT, shape)]
    )
    with open_engine(path, "cpu") as engine:
        assert [str(spec) for spec in engine.inputs] == ["x:float32[N,4,x_2]"]


def test_strings_are_object_arrays(tmp_path: Path) -> None:
    kind = TensorProto.STRING
    path = write_graph(tmp_path / "m", [IDENTITY], [value("x", kind)], [value("y", kind)])
    x = np.array([["a", "", "\u00e9", "dd"]], object)
    with open_engine(path, "cpu") as engine:
        assert engine.inputs[0].dtype == "string"
        np.testing.assert_array_equal(engine({"x": x})["y"], x)


def test_type_that_numpy_cannot_carry_is_unsupported(tmp_path: Path) -> None:
    kind = TensorProto.BFLOAT16
    path = write_graph(tmp_path / "m", [IDENTITY], [value("x", kind)], [value("y", kind)])
    with pytest.raises(Unsupported, match=r"tensor 'x' is a tensor\(bfloat16\)"):
        open_engine(path, "cpu")


def test_unknown_operator_is_named(tmp_path: Path) -> None:
    path = write_graph(
        tmp_path / "m.onnx", [node("Nonsense", ["x"], ["y"])], [value("x")], [value("y")]
    )
    with pytest.raises(BadInput, match=r"m\.onnx: .*Nonsense"):
        open_engine(path, "cpu")


def test_weights_outside_the_models_folder_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret.bin").write_bytes(np.full(4, 7, np.float32).tobytes())
    folder = tmp_path / "models"
    folder.mkdir()
    path = write_graph(
        folder / "m.onnx", [ADD], [value("x")], [value("y")], {"w": np.ones(4, np.float32)}
    )
    model = onnx.load(path)
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret.bin")
    path.write_bytes(model.SerializeToString())
    with pytest.raises(BadInput, match=r"m\.onnx: its weights: .* outside the model's folder"):
        open_engine(path, "cpu")


def test_failure_inside_the_graph_names_the_file(tmp_path: Path) -> None:
    """A Reshape that fits no batch but 2: only running it shows."""
    path = write_graph(
        tmp_path / "m.onnx",
        [node("Reshape", ["x", "s"], ["y"])],
        [value("x")],
        [value("y", FLOAT, [8])],
        {"s": np.array([8], np.int64)},
    )
    with open_engine(path, "cpu") as engine:
        assert engine({"x": np.zeros((2, 4), np.float32)})["y"].shape == (8,)
        with pytest.raises((BadInput, Unsupported), match=r"m\.onnx: .*Reshape"):
            engine({"x": np.zeros((3, 4), np.float32)})


def test_the_thread_count_is_the_requested_one() -> None:
    assert session_options(3).intra_op_num_threads == 3


def test_half_graphs_are_not_optimised_to_the_last_level() -> None:
    level = ort.GraphOptimizationLevel
    assert session_options(1, half=True).graph_optimization_level == level.ORT_ENABLE_EXTENDED
    assert session_options(1).graph_optimization_level == level.ORT_ENABLE_ALL


def test_float8_answers_as_the_graph_says(tmp_path: Path) -> None:
    """Optimised, ONNX Runtime 1.31 refuses such a graph, or answers otherwise."""
    from deploykit.engines.data.samples import Samples
    from deploykit.engines.onnxruntime.engine import open_as_written
    from tests.support.graphs.protos import calibrate, to_pairs
    from tests.support.onnx_zoo import mnist_like, save

    images = np.random.default_rng(0).random((64, 1, 28, 28), dtype=np.float32)
    source = save(mnist_like(), tmp_path / "m.onnx")
    found = calibrate(source, Samples({"image": images}, None, "random"))
    path = save(to_pairs(mnist_like(), found, "fp8"), tmp_path / "f8.onnx")
    with open_engine(path, "cpu") as engine, open_as_written(path) as plain:
        np.testing.assert_array_equal(
            engine({"image": images})["logits"], plain({"image": images})["logits"]
        )
