"""What ONNX Runtime's engine adds to the promises of test_conformance.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploykit.core.errors import BadInput, Unsupported

ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from deploykit.engines.onnxruntime.engine import open_engine, session_options  # noqa: E402
from deploykit.engines.onnxruntime.file import (  # noqa: E402
    external_files,
    slowed_by_values,
    small_floats,
)

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16
Value = onnx.ValueInfoProto


def value(name: str, kind: int = FLOAT, shape: list[int | str | None] | None = None) -> Value:
    return helper.make_tensor_value_info(name, kind, ["N", 4] if shape is None else shape)


def write(
    path: Path,
    nodes: list[onnx.NodeProto],
    inputs: list[Value],
    outputs: list[Value],
    weights: dict[str, np.ndarray] | None = None,
    functions: list[onnx.FunctionProto] | None = None,
) -> Path:
    tensors = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs, tensors),
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("local", 1)],
        functions=functions or [],
        ir_version=10,
    )
    path.write_bytes(model.SerializeToString())
    return path


node = helper.make_node
ADD = node("Add", ["x", "w"], ["y"])
IDENTITY = node("Identity", ["x"], ["y"])
CAST_BACK = node("Cast", ["h"], ["y"], to=FLOAT)


def test_float32_graph_holds_no_half(tmp_path: Path) -> None:
    path = write(tmp_path / "m", [ADD], [value("x")], [value("y")], {"w": np.ones(4, np.float32)})
    assert not small_floats(path)


def test_half_initializer_is_seen(tmp_path: Path) -> None:
    weights = {"a": np.ones(4, np.float32), "w": np.ones(4, np.float16)}
    assert small_floats(write(tmp_path / "m", [ADD], [value("x")], [value("y")], weights))


def test_half_input_is_seen(tmp_path: Path) -> None:
    cast = node("Cast", ["x"], ["y"], to=FLOAT)
    assert small_floats(write(tmp_path / "m", [cast], [value("x", HALF)], [value("y")]))


def test_half_output_is_seen(tmp_path: Path) -> None:
    assert small_floats(write(tmp_path / "m", [IDENTITY], [value("x")], [value("y", HALF)]))


def test_cast_to_half_is_seen(tmp_path: Path) -> None:
    cast = node("Cast", ["x"], ["h"], to=HALF)
    assert small_floats(write(tmp_path / "m", [cast, CAST_BACK], [value("x")], [value("y")]))


def test_half_constant_is_seen(tmp_path: Path) -> None:
    constant = node("Constant", [], ["w"], value=numpy_helper.from_array(np.ones(4, np.float16)))
    assert small_floats(write(tmp_path / "m", [constant, ADD], [value("x")], [value("y")]))


def test_half_inside_a_branch_is_seen(tmp_path: Path) -> None:
    cast = node("Cast", ["x"], ["h"], to=HALF)
    branch = helper.make_graph([cast, CAST_BACK], "branch", [], [value("y")])
    choose = node("If", ["flag"], ["y"], then_branch=branch, else_branch=branch)
    flag = value("flag", TensorProto.BOOL, [])
    assert small_floats(write(tmp_path / "m", [choose], [value("x"), flag], [value("y")]))


def test_half_inside_a_function_is_seen(tmp_path: Path) -> None:
    cast = node("Cast", ["x"], ["h"], to=HALF)
    opsets = [helper.make_opsetid("", 18)]
    function = helper.make_function("local", "Halve", ["x"], ["y"], [cast, CAST_BACK], opsets)
    call = node("Halve", ["x"], ["y"], domain="local")
    path = write(tmp_path / "m", [call], [value("x")], [value("y")], functions=[function])
    assert small_floats(path)


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
    looped = write(tmp_path / "a.onnx", [looping()], [value("x"), count], [value("y")])
    plain = write(tmp_path / "b.onnx", [IDENTITY], [value("x")], [value("y")])
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
    with open_engine(write(tmp_path / "m.onnx", nodes, inputs, [out]), "cpu") as engine:
        assert engine.steady is steady


@pytest.mark.parametrize(
    ("source", "steady"),
    [("ReduceMax", False), ("Shape", True)],
    ids=["from a float", "from a shape"],
)
def test_a_size_from_a_float_is_not_steady_and_one_from_a_shape_is(
    tmp_path: Path, source: str, steady: bool
) -> None:
    """The nodes stand in reverse order, which ONNX Runtime accepts."""
    limit = helper.make_node("Constant", [], ["limit"], value_int=1)
    how_many = [
        node("ReduceMax", ["x"], ["most"], keepdims=0),
        node("Cast", ["most"], ["count"], to=TensorProto.INT64),
    ]
    if source == "Shape":
        how_many = [node("Shape", ["x"], ["shape"], end=1), node("Squeeze", ["shape"], ["count"])]
    nodes = [
        limit,
        *how_many,
        node("Range", ["limit", "count", "limit"], ["y"]),
    ]
    out = value("y", TensorProto.INT64, ["M"])
    path = write(tmp_path / "m.onnx", nodes[::-1], [value("x")], [out])
    assert slowed_by_values(path) is not steady


@pytest.mark.parametrize("operator", ["If", "NonZero", "Compress"])
def test_work_that_follows_from_values_is_not_steady(tmp_path: Path, operator: str) -> None:
    branch = helper.make_graph([node("Identity", ["x"], ["r"])], "branch", [], [value("r")])
    first: dict[str, list[Any]] = {
        "If": [node("If", ["flag"], ["y"], then_branch=branch, else_branch=branch)],
        "NonZero": [node("NonZero", ["x"], ["y"])],
        "Compress": [node("Compress", ["x", "flag"], ["y"])],
    }
    flag = node("Cast", ["x"], ["flag"], to=TensorProto.BOOL)
    path = write(tmp_path / "m.onnx", [flag, *first[operator]], [value("x")], [value("y")])
    assert slowed_by_values(path)


def test_loop_inside_a_branch_or_a_function_is_seen(tmp_path: Path) -> None:
    branch = helper.make_graph([looping()], "branch", [], [value("y")])
    choose = node("If", ["flag"], ["y"], then_branch=branch, else_branch=branch)
    inputs = [
        value("x"),
        value("count", TensorProto.INT64, []),
        value("flag", TensorProto.BOOL, []),
    ]
    assert slowed_by_values(write(tmp_path / "m", [choose], inputs, [value("y")]))
    opsets = [helper.make_opsetid("", 18)]
    names = ["x", "count"]
    function = helper.make_function("local", "Repeat", names, ["y"], [looping()], opsets)
    call = node("Repeat", names, ["y"], domain="local")
    path = write(tmp_path / "m", [call], inputs, [value("y")], functions=[function])
    assert slowed_by_values(path)


def test_a_tensor_or_node_named_loop_is_not_a_loop(tmp_path: Path) -> None:
    named = node("Identity", ["x"], ["Loop"], name="Loop", doc_string="Loop")
    out = node("Identity", ["Loop"], ["y"])
    path = write(tmp_path / "m", [named, out], [value("x")], [value("y")])
    assert not slowed_by_values(path)


def test_file_that_cannot_be_read_may_hold_a_loop(tmp_path: Path) -> None:
    assert slowed_by_values(tmp_path / "nothing")
    (tmp_path / "m").write_bytes(b"\x3a\xff\xff\xff\xff\x0f")
    assert slowed_by_values(tmp_path / "m")


def test_the_number_ten_outside_types_is_not_float16(tmp_path: Path) -> None:
    """FLOAT16 is 10 in ONNX; so are these, which are not types."""
    concat = node("Concat", ["x"], ["y"], axis=10)
    ten = np.full((10,), 10, np.int64)
    assert not small_floats(
        write(tmp_path / "m", [concat], [value("x", FLOAT, [10, 10])], [value("y")], {"t": ten})
    )


@pytest.mark.parametrize("keep", [0.3, 0.9])
def test_truncated_file_holds_no_half_and_does_not_open(affine_onnx: Path, keep: float) -> None:
    content = affine_onnx.read_bytes()
    affine_onnx.write_bytes(content[: int(len(content) * keep)])
    assert not small_floats(affine_onnx)
    with pytest.raises(BadInput, match=r"affine\.onnx: is a truncated or damaged ONNX file"):
        open_engine(affine_onnx, "cpu")


def test_noise_holds_no_half_and_does_not_open(tmp_path: Path) -> None:
    path = tmp_path / "noise.onnx"
    path.write_bytes(b"\x08\x0a" + np.random.default_rng(1).bytes(100_000))
    assert not small_floats(path)
    with pytest.raises(BadInput, match=r"noise\.onnx"):
        open_engine(path, "cpu")


def test_deeply_nested_file_does_not_overflow_the_stack(tmp_path: Path) -> None:
    """A graph in an attribute in a node in a graph ...: 3000 messages deep."""
    body = b""
    for _ in range(1000):
        for number in (6, 5, 1):  # AttributeProto.g, NodeProto.attribute, GraphProto.node
            body = bytes([number << 3 | 2]) + _varint(len(body)) + body
    path = tmp_path / "deep.onnx"
    path.write_bytes(b"\x08\x0a\x3a" + _varint(len(body)) + body)
    assert not small_floats(path)


def test_message_that_runs_out_of_its_parent_is_not_followed(tmp_path: Path) -> None:
    """Else n small nodes that each claim the rest of the file take n^2 steps."""
    graph = b"\x2a\x7f"  # a tensor of 127 bytes, in a graph of 2
    path = tmp_path / "m.onnx"
    path.write_bytes(b"\x08\x0a\x3a\x02" + graph + b"\x10\x0a" * 100)  # as a tensor: float16
    assert not small_floats(path)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def test_half_graph_runs(tmp_path: Path) -> None:
    cast = node("Cast", ["x"], ["h"], to=HALF)
    double = node("Add", ["h", "h"], ["h2"])
    back = node("Cast", ["h2"], ["y"], to=FLOAT)
    path = write(tmp_path / "m", [cast, double, back], [value("x")], [value("y")])
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
    path = write(tmp_path / "two.onnx", [add], [value("a"), value("b")], [value("y")])
    feeds = {"a": np.zeros((3, 4), np.float32), "b": np.zeros((1, 4), np.float32)}
    with open_engine(path, "cpu") as engine, pytest.raises(BadInput, match="axis N is 3 and 1"):
        engine(feeds)


def test_unnamed_axes_get_names(tmp_path: Path) -> None:
    shape = [None, 4, None]
    path = write(tmp_path / "m", [IDENTITY], [value("x", FLOAT, shape)], [value("y", FLOAT, shape)])
    with open_engine(path, "cpu") as engine:
        assert [str(spec) for spec in engine.inputs] == ["x:float32[N,4,x_2]"]


def test_strings_are_object_arrays(tmp_path: Path) -> None:
    kind = TensorProto.STRING
    path = write(tmp_path / "m", [IDENTITY], [value("x", kind)], [value("y", kind)])
    x = np.array([["a", "", "\u00e9", "dd"]], object)
    with open_engine(path, "cpu") as engine:
        assert engine.inputs[0].dtype == "string"
        np.testing.assert_array_equal(engine({"x": x})["y"], x)


def test_type_that_numpy_cannot_carry_is_unsupported(tmp_path: Path) -> None:
    kind = TensorProto.BFLOAT16
    path = write(tmp_path / "m", [IDENTITY], [value("x", kind)], [value("y", kind)])
    with pytest.raises(Unsupported, match=r"tensor 'x' is a tensor\(bfloat16\)"):
        open_engine(path, "cpu")


def test_unknown_operator_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", [node("Nonsense", ["x"], ["y"])], [value("x")], [value("y")])
    with pytest.raises(BadInput, match=r"m\.onnx: .*Nonsense"):
        open_engine(path, "cpu")


def test_weights_outside_the_models_folder_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret.bin").write_bytes(np.full(4, 7, np.float32).tobytes())
    folder = tmp_path / "models"
    folder.mkdir()
    path = write(
        folder / "m.onnx", [ADD], [value("x")], [value("y")], {"w": np.ones(4, np.float32)}
    )
    model = onnx.load(path)
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret.bin")
    path.write_bytes(model.SerializeToString())
    assert external_files(path) == ["../secret.bin"]
    with pytest.raises(BadInput, match=r"m\.onnx: its weights: .* outside the model's folder"):
        open_engine(path, "cpu")


def test_failure_inside_the_graph_names_the_file(tmp_path: Path) -> None:
    """A Reshape that fits no batch but 2: only running it shows."""
    path = write(
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
