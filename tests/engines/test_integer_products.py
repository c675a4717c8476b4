"""Sums of 8-bit products are exact on every CPU.

x86-64 without VNNI adds two products of uint8 and int8 in 16 bits: 2 * 255 * 127 does not fit.
There these tests fail on wrong sums; elsewhere the one that reads the session's options can.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from deploykit.building.onnxruntime import build
from deploykit.core.errors import Unsupported
from deploykit.engines.engine import Engine, load
from deploykit.engines.onnxruntime import file as sums
from deploykit.engines.onnxruntime.engine import open_as_written, session_options
from tests.support.onnx_zoo import save

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
MICROSOFT = "com.microsoft"
# operator: its inputs (two blanks: none between), its domain, its output's type and largest value
OPERATORS = {
    "QLinearMatMul": ("x one zero weights one zero_w down zero", "", TensorProto.UINT8, 250),
    "QGemm": ("x one zero weights one zero_w  down zero", MICROSOFT, TensorProto.UINT8, 250),
    "MatMulInteger": ("x weights zero zero_w", "", TensorProto.INT32, LARGEST),
    "MatMulIntegerToFloat": (
        "x weights one one zero zero_w",
        MICROSOFT,
        TensorProto.FLOAT,
        LARGEST,
    ),
    "QLinearConv": ("x one zero kernel one zero_w down zero", "", TensorProto.UINT8, 250),
    "ConvInteger": ("x kernel zero zero_w", "", TensorProto.INT32, LARGEST),
}


def one_operator(name: str) -> onnx.ModelProto:
    text, domain, kind, _ = OPERATORS[name]
    inputs = text.split(" ")
    node = helper.make_node(name, inputs, ["y"], domain=domain)
    end = [4, 4] if "Conv" in name else []
    x = helper.make_tensor_value_info("x", TensorProto.UINT8, [3, DEPTH, *end])
    y = helper.make_tensor_value_info("y", kind, [3, WIDTH, *end])
    held = [
        numpy_helper.from_array(np.asarray(SCALES[key]), key) for key in inputs if key in SCALES
    ]
    graph = helper.make_graph([node], "g", [x], [y], {each.name: each for each in held}.values())
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("opened", [load, open_as_written])
def test_the_largest_sum_is_exact(
    name: str, opened: Callable[[Path], Engine], tmp_path: Path
) -> None:
    if name in ("MatMulInteger", "ConvInteger") and sums.cuts_sums(ort.__version__):
        pytest.skip("this ONNX Runtime cuts sums on a CPU without VNNI: refused")
    path = save(one_operator(name), tmp_path / "m.onnx")
    with opened(path) as engine:
        values = engine({"x": np.full(engine.inputs[0].shape, 255, np.uint8)})["y"]
    assert set(values.flat) == {OPERATORS[name][3]}


def pretend(features: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "cpu_features", lambda _: features)
    monkeypatch.setattr(sums.platform, "machine", lambda: "x86_64")


@pytest.fixture(params=[("avx2",), ("avx2", "avx512_vnni")], ids=" ".join)
def features(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """A CPU of which deploykit reads these; ONNX Runtime has the real one."""
    if "avx512_vnni" in request.param and not sums.adds_exactly():
        pytest.skip("this CPU has no VNNI")
    pretend(request.param, monkeypatch)
    return tuple(request.param)


def test_only_a_cpu_without_vnni_stores_other_weights(features: tuple[str, ...]) -> None:
    """With VNNI sums are exact without, and ONNX Runtime 1.32 takes up to twice the time."""
    cuts = "avx512_vnni" not in features
    options, loose = session_options(1), session_options(1, exact=False)
    assert options.get_session_config_entry(sums.EXACT_INTEGERS) == str(int(cuts))
    assert (sums.rounds_sums(options), sums.rounds_sums(loose)) == (False, cuts)


def test_a_built_file_keeps_the_weights_as_they_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A CPU with VNNI would be slower with weights stored for one without it."""
    source = save(one_operator("QLinearMatMul"), tmp_path / "m.onnx")
    build(source, tmp_path / "built.onnx")
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
    """As tied layers; ONNX Runtime 1.32 gives up where it makes them exact without VNNI."""
    model = onnx.parser.parse_model(SHARED)
    every = numpy_helper.from_array(np.full((8, 8), 127, np.int8), "w")
    model.graph.initializer.append(every)
    with opened(save(model, tmp_path / "m.onnx")) as engine:
        found = engine({"x": np.full((2, 8), 1, np.float32)})["y"]
    np.testing.assert_allclose(found, 8 * 63.5 * 63.5)


@pytest.mark.parametrize(
    ("version", "features", "name", "refused"),
    [
        ("1.29.0", ("avx2",), "MatMulInteger", True),
        ("1.30.0", ("avx2",), "MatMulInteger", False),
        ("1.23.2", ("avx2", "avx_vnni"), "MatMulInteger", False),
        ("1.23.2", ("avx2",), "QLinearConv", False),
    ],
)
def test_an_onnx_runtime_that_cuts_sums_is_refused_where_it_would(
    version: str,
    features: tuple[str, ...],
    name: str,
    refused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = save(one_operator(name), tmp_path / "m.onnx")
    monkeypatch.setattr(ort, "__version__", version)
    pretend(features, monkeypatch)
    if refused:
        with pytest.raises(Unsupported, match="cuts the sums of this model's INT8 products"):
            load(path)
    else:
        load(path).close()
