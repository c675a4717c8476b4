"""What ONNX Runtime's engine adds to the promises of test_conformance.py.

x86-64 without VNNI adds two products of uint8 and int8 in 16 bits: 2 * 255 * 127 does not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from deploykit.core.errors import BadInput, Unsupported
from deploykit.engines.data.samples import Samples
from deploykit.engines.engine import Engine, load

ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from deploykit.building.onnxruntime import build  # noqa: E402
from deploykit.engines.onnxruntime import file as files  # noqa: E402
from deploykit.engines.onnxruntime.engine import open_as_written, open_engine, session_options  # noqa: E402
from tests.support.graphs.protos import calibrate, to_pairs  # noqa: E402
from tests.support.graphs.small import write_text  # noqa: E402
from tests.support.onnx_zoo import mnist_like, save  # noqa: E402

ONE = {"w": np.ones(4, np.float32)}
LOOP = """y = Loop(count, , x)
<body = b (int64 i, bool go, float[N,4] before) => (bool go_on, float[N,4] after)
 { go_on = Identity(go) after = Identity(before) }>"""
STEADY: dict[str, tuple[str, str, bool]] = {
    "values make it hang": ("(float[N,4] x, int64 count) => (float[N,4] y)", LOOP, False),
    "values set a size": ("(int64 n) => (int64[M] y)", "y = Range(n, n, n)", False),
    "strings of any length": ("(string n) => (string y)", "y = Identity(n)", False),
    "floats": ("(float[N,4] n) => (float[N,4] y)", "y = Identity(n)", True),
    "numbers": ("(int64 n) => (int64 y)", "y = Identity(n)", True),
    "bytes": ("(uint8 n) => (uint8 y)", "y = Identity(n)", True),
}


@pytest.mark.parametrize("case", STEADY)
def test_an_engine_whose_time_or_size_depends_on_values_is_not_steady(
    tmp_path: Path, case: str
) -> None:
    head, body, steady = STEADY[case]
    with open_engine(write_text(tmp_path, head, body, {}), "cpu") as engine:
        assert engine.steady is steady


def moved_weights(folder: Path) -> Path:
    """The weights lie next to the model's folder."""
    (folder / "secret.bin").write_bytes(ONE["w"].tobytes())
    (folder / "models").mkdir()
    path = write_text(folder / "models", "(float[N,4] x) => (float[N,4] y)", "y = Add(x, w)", ONE)
    model = onnx.load(path)
    (tensor,) = model.graph.initializer
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret.bin")
    return save(model, path)


def truncated(folder: Path) -> Path:
    path = write_text(folder, "(float[N,4] x) => (float[N,4] y)", "y = Add(x, w)", ONE)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * 0.99)])
    return path


REFUSED: dict[str, tuple[Callable[[Path], Path], type[Exception], str]] = {
    "truncated": (truncated, BadInput, "is a truncated or damaged ONNX file"),
    "an unknown operator": (
        lambda f: write_text(f, "(float[N] x) => (float[N] y)", "y = Nonsense(x)", {}),
        BadInput,
        "Nonsense",
    ),
    "bfloat16": (
        lambda f: write_text(f, "(bfloat16[N] x) => (bfloat16[N] y)", "y = Identity(x)", {}),
        Unsupported,
        r"tensor 'x' is a tensor\(bfloat16\)",
    ),
    "weights elsewhere": (moved_weights, BadInput, "its weights: .* outside the model's folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_cannot_be_opened_is_refused_by_name(tmp_path: Path, case: str) -> None:
    make, kind, reason = REFUSED[case]
    with pytest.raises(kind, match=rf"m\.onnx: .*{reason}"):
        open_engine(make(tmp_path), "cpu")


def test_the_hint_for_bfloat16_names_types_that_are_taken(tmp_path: Path) -> None:
    with pytest.raises(Unsupported) as caught:
        open_engine(REFUSED["bfloat16"][0](tmp_path), "cpu")
    assert "float32" in caught.value.hint


def test_a_failure_inside_the_graph_names_the_file(tmp_path: Path) -> None:
    head, shape = "(float[N,4] x) => (float[8] y)", {"s": np.array([8], np.int64)}
    with open_engine(write_text(tmp_path, head, "y = Reshape(x, s)", shape), "cpu") as engine:
        assert engine({"x": np.zeros((2, 4), np.float32)})["y"].shape == (8,)
        with pytest.raises((BadInput, Unsupported), match=r"m\.onnx: .*Reshape"):
            engine({"x": np.zeros((3, 4), np.float32)})


def test_cuda_that_is_not_there_is_never_replaced_by_the_cpu(affine_onnx: Path) -> None:
    if "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("this onnxruntime has a CUDA provider")
    with pytest.raises(Unsupported, match=r"affine\.onnx: `device` is cuda.*no CUDA"):
        open_engine(affine_onnx, "cuda")
    with open_engine(affine_onnx, "auto") as engine:
        assert engine.device == "cpu"


def test_unnamed_axes_get_names_and_strings_are_objects(tmp_path: Path) -> None:
    head = "(string[?,4,?] x) => (string[?,4,?] y)"
    x = np.array([[["a"], [""], ["\u00e9"], ["dd"]]], object)
    with open_engine(write_text(tmp_path, head, "y = Identity(x)", {}), "cpu") as engine:
        assert [str(spec) for spec in engine.inputs] == ["x:string[N,4,x_2]"]
        np.testing.assert_array_equal(engine({"x": x})["y"], x)


def test_half_graphs_are_not_optimised_to_the_last_level() -> None:
    level = ort.GraphOptimizationLevel
    assert session_options(1, half=True).graph_optimization_level == level.ORT_ENABLE_EXTENDED
    assert session_options(3).graph_optimization_level == level.ORT_ENABLE_ALL
    assert session_options(3).intra_op_num_threads == 3


def test_float8_answers_as_the_graph_says(tmp_path: Path) -> None:
    """Optimised, ONNX Runtime 1.31 refuses such a graph, or answers otherwise."""
    images = np.random.default_rng(0).random((64, 1, 28, 28), dtype=np.float32)
    source = save(mnist_like(), tmp_path / "m.onnx")
    found = calibrate(source, Samples({"image": images}, None, "random"))
    path = save(to_pairs(mnist_like(), found, "fp8"), tmp_path / "f8.onnx")
    with open_engine(path, "cpu") as engine, open_as_written(path) as plain:
        expected = plain({"image": images})["logits"]
        np.testing.assert_array_equal(engine({"image": images})["logits"], expected)


# --- integer sums ---

DEPTH, WIDTH = 64, 16
LARGEST = DEPTH * 255 * 127  # of one sum
INTEGERS = np.full((DEPTH, WIDTH), 127, np.int8)
SCALES = {
    "one": np.float32(1),
    "down": np.float32(LARGEST / 250),
    "zero": np.uint8(0),
    "zero_w": np.int8(0),
    "kernel": INTEGERS.T.reshape(WIDTH, DEPTH, 1, 1).copy(),
    "weights": INTEGERS,
}
# operator: its inputs, its output's type and largest value
OPERATORS = {
    "QLinearMatMul": ("x, one, zero, weights, one, zero_w, down, zero", "uint8", 250),
    "com.microsoft.QGemm": ("x, one, zero, weights, one, zero_w, , down, zero", "uint8", 250),
    "MatMulInteger": ("x, weights, zero, zero_w", "int32", LARGEST),
    "com.microsoft.MatMulIntegerToFloat": (
        "x, weights, one, one, zero, zero_w",
        "float",
        LARGEST,
    ),
    "QLinearConv": ("x, one, zero, kernel, one, zero_w, down, zero", "uint8", 250),
    "ConvInteger": ("x, kernel, zero, zero_w", "int32", LARGEST),
}


def one_operator(name: str, folder: Path) -> Path:
    inputs, kind, _ = OPERATORS[name]
    end = ",4,4" if "Conv" in name else ""
    head = f"(uint8[3,{DEPTH}{end}] x) => ({kind}[3,{WIDTH}{end}] y)"
    constants = {key: np.asarray(SCALES[key]) for key in SCALES if key in inputs.split(", ")}
    path = write_text(folder, head, f"y = {name}({inputs})", constants)
    model = onnx.load(path)
    model.opset_import.add(domain="com.microsoft", version=1)
    return save(model, path)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("opened", [load, open_as_written])
def test_the_largest_sum_is_exact(
    name: str, opened: Callable[[Path], Engine], tmp_path: Path
) -> None:
    if name in ("MatMulInteger", "ConvInteger") and files.cuts_sums(ort.__version__):
        pytest.skip("this ONNX Runtime cuts sums on a CPU without VNNI: refused")
    with opened(one_operator(name, tmp_path)) as engine:
        values = engine({"x": np.full(engine.inputs[0].shape, 255, np.uint8)})["y"]
    assert set(values.flat) == {OPERATORS[name][2]}


@pytest.fixture(params=[("avx2",), ("avx2", "avx512_vnni")], ids=" ".join)
def features(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """A CPU of which deploykit reads these; ONNX Runtime has the real one."""
    if "avx512_vnni" in request.param and not files.adds_exactly():
        pytest.skip("this CPU has no VNNI")
    monkeypatch.setattr(files, "cpu_features", lambda _: request.param)
    monkeypatch.setattr(files.platform, "machine", lambda: "x86_64")
    return tuple(request.param)


def test_only_a_cpu_without_vnni_stores_other_weights(features: tuple[str, ...]) -> None:
    """With VNNI sums are exact without, and ONNX Runtime 1.32 takes up to twice the time."""
    cuts = "avx512_vnni" not in features
    options, loose = session_options(1), session_options(1, exact=False)
    assert options.get_session_config_entry(files.EXACT_INTEGERS) == str(int(cuts))
    assert (files.rounds_sums(options), files.rounds_sums(loose)) == (False, cuts)


def test_a_built_file_keeps_the_weights_as_they_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A CPU with VNNI would be slower with weights stored for one without it."""
    build(one_operator("QLinearMatMul", tmp_path), tmp_path / "built.onnx")
    found = onnx.load(tmp_path / "built.onnx").graph.initializer
    assert [each.data_type for each in found if len(each.dims) == 2] == [TensorProto.INT8]
    assert capfd.readouterr() == ("", "")  # ONNX Runtime warns of an option that is set twice


SHARED = """<ir_version: 9, opset_import: ["" : 17]>
g (float[N,8] x) => (float[N,8] y)
<float s = {0.5}, uint8 zero = {128}, int8 zero_w = {0}>
{
  q = QuantizeLinear(x, s, zero)
  d = DequantizeLinear(q, s, zero)
  weights = DequantizeLinear(w, s, zero_w)
  a = MatMul(d, weights)
  r = QuantizeLinear(a, s, zero)
  e = DequantizeLinear(r, s, zero)
  y = MatMul(e, weights)
}"""


@pytest.mark.usefixtures("features")
@pytest.mark.parametrize("opened", [load, open_as_written])
def test_weights_that_two_nodes_share_open_on_every_cpu_and_stay_exact(
    opened: Callable[[Path], Engine], tmp_path: Path
) -> None:
    """ONNX Runtime 1.32 gives up where it makes them exact for a CPU without VNNI."""
    model = onnx.parser.parse_model(SHARED)
    model.graph.initializer.append(numpy_helper.from_array(np.full((8, 8), 127, np.int8), "w"))
    with opened(save(model, tmp_path / "m.onnx")) as engine:
        found = engine({"x": np.full((2, 8), 1, np.float32)})["y"]
    np.testing.assert_allclose(found, 8 * 63.5 * 63.5)


@pytest.mark.parametrize(
    ("version", "features", "name"),
    [
        ("1.29.0", "avx2", "MatMulInteger"),
        ("1.30.0", "avx2", "MatMulInteger"),
        ("1.23.2", "avx2 avx_vnni", "MatMulInteger"),
        ("1.23.2", "avx2", "QLinearConv"),
    ],
)
def test_an_onnx_runtime_that_cuts_sums_is_refused_where_it_would(
    version: str, features: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort, "__version__", version)
    monkeypatch.setattr(files, "cpu_features", lambda _: features.split())
    monkeypatch.setattr(files.platform, "machine", lambda: "x86_64")
    path = one_operator(name, tmp_path)
    if version == "1.29.0":
        with pytest.raises(Unsupported, match="cuts the sums of this model's INT8 products"):
            load(path)
    else:
        load(path).close()
