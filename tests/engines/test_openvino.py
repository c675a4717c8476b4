"""What is OpenVINO's own, beyond what the conformance suite asks of every engine."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import onnx
import pytest

from deploykit.core.errors import BadInput, DeploykitError, OutOfMemory, Unsupported
from deploykit.core.tensors import TensorSpec
from tests.support.graphs.small import node, write_graph, write_text
from tests.support.onnx_zoo import save
from tests.support.serving.task_models import write_task_model

ov = pytest.importorskip("openvino", reason="openvino is not installed")

from deploykit.engines.openvino import OpenVinoEngine, open_engine, openvino_errors  # noqa: E402

ADDS = 128  # products of one output: enough to leave 16 bits many times


def product(folder: Path) -> tuple[Path, np.ndarray]:
    """Y = x @ W in float32, and W, whose values a rounding to bfloat16 changes."""
    weight = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    head = "(float[N,64] x) => (float[N,32] y)"
    return write_text(folder, head, "y = MatMul(x, W)", {"W": weight}), weight


def precisions(engine: OpenVinoEngine) -> set[str | None]:
    return {layer.precision for layer in engine.layers}


X = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)


# what a layer computes in


def test_bytes_of_an_image_are_not_counted_as_int8(tmp_path: Path) -> None:
    """OpenVINO names the type of an element-wise layer's inputs, whatever it computes in."""
    with open_engine(write_task_model(tmp_path, "classify")) as engine:
        assert precisions(engine) == {"float32"}


def test_float32_is_not_rounded_to_bfloat16_and_that_is_read_back(tmp_path: Path) -> None:
    """OpenVINO's own default rounds it on a CPU with instructions for bfloat16."""
    path, weight = product(tmp_path)
    with open_engine(path) as engine:
        np.testing.assert_allclose(engine({"x": X})["y"], X @ weight, rtol=1e-4, atol=1e-5)
        assert precisions(engine) == {"float32"}
        assert engine.options["INFERENCE_PRECISION_HINT"] == "f32"
        assert engine.options["layers"] == "1 float32"
        assert engine.steady


def test_sums_of_int8_products_are_exact_and_run_as_int8_where_the_cpu_has_vnni(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = np.full((ADDS, 16), 127, np.int8)
    weight[1::2, ::2] = -127
    body = """
        q = QuantizeLinear(x, one, zero)
        a = DequantizeLinear(q, one, zero)
        b = DequantizeLinear(W, one, none)
        y = MatMul(a, b)
    """
    scales = {"one": np.float32(1), "zero": np.uint8(0), "none": np.int8(0)}
    head = "(float[N,128] x) => (float[N,16] y)"
    path = write_text(tmp_path, head, body, {"W": weight, **scales})
    x = np.full((3, ADDS), 255, np.float32)  # fills uint8
    sums = x @ weight.astype(np.float32)
    with open_engine(path) as engine:
        np.testing.assert_array_equal(engine({"x": x})["y"], sums)
        assert precisions(engine) <= {"int8", "float32"}
        assert ("int8" in precisions(engine)) == (not engine.notes)
    monkeypatch.setattr("deploykit.engines.openvino.adds_exactly", lambda: False)
    with open_engine(path) as engine:
        np.testing.assert_allclose(engine({"x": x})["y"], sums)
        assert "INT8 runs in float32" in engine.notes[0]
        assert not any("I8" in layer.tactic for layer in engine.layers)


# how it runs


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_are_those_asked_for_and_on_any_core(affine_onnx: Path, threads: int) -> None:
    with open_engine(affine_onnx, "auto", threads) as engine:
        assert engine.options["INFERENCE_NUM_THREADS"] == str(threads)
        assert engine.options["ENABLE_CPU_PINNING"] == "False"
        assert (engine.device, engine.slots, engine.max_batch) == ("cpu", 1, None)
        assert engine.runtime == f"openvino {ov.__version__.partition('-')[0]}"
        for batch in (4096, 1):  # trimmed memory comes back with the next call
            x = np.ones((batch, 4), np.float32)
            np.testing.assert_array_equal(engine({"x": x})["y"], 2 * x + 1)
            assert not engine.trim()
    with pytest.raises(Unsupported, match="`device` is cuda:0, but OpenVINO runs on the CPU"):
        open_engine(affine_onnx, "cuda:0")


def test_a_call_that_fails_inside_is_one_line_and_leaves_the_engine_usable(tmp_path: Path) -> None:
    head, shape = "(float[N] x) => (float[M,2] y)", np.array([-1, 2])
    path = write_text(tmp_path, head, "y = Reshape(x, shape)", {"shape": shape})
    with open_engine(path) as engine:
        with pytest.raises(DeploykitError) as raised:
            engine({"x": np.ones(3, np.float32)})
        assert raised.value.message.startswith(f"{path}: OpenVINO failed: [")
        assert "\n" not in raised.value.message
        assert engine({"x": np.ones(4, np.float32)})["y"].shape == (2, 2)
    with pytest.raises(OutOfMemory), openvino_errors(path):
        raise RuntimeError("Exception from src/x.cpp:1:\nstd::bad_alloc")


def test_values_that_set_how_much_is_computed_are_no_steady_time(tmp_path: Path) -> None:
    path = write_text(tmp_path, "(float[N] x) => (int64[1,K] y)", "y = NonZero(x)", {})
    with open_engine(path) as engine:
        assert not engine.steady
        assert engine({"x": np.array([0, 3, 4], np.float32)})["y"].tolist() == [[1, 2]]


def test_a_signal_after_engines_have_closed_ends_no_process(affine_onnx: Path) -> None:
    code = """
        import gc, signal, sys
        from deploykit.engines.openvino import open_engine
        first, second = open_engine(sys.argv[1]), open_engine(sys.argv[1])
        for engine in (first, second):  # not in the opposite order
            engine.close()
        del engine, first, second
        gc.collect()
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            print("interrupted")
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(affine_onnx)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


# its tensors


def test_tensors_are_those_of_the_file_even_where_openvino_drops_them(tmp_path: Path) -> None:
    """An input that no node reads, an initializer that is an input, an output that is an input."""
    head = "(float[?,?] x, int32[M] unused, float two) => (float s, float[?,?] x, float[] y)"
    body = "y = Mul(x, two) s = ReduceSum <keepdims = 0> (y)"
    x = np.array([[1, 2, 3]], np.float32)
    with open_engine(write_text(tmp_path, head, body, {"two": np.float32(2)}, 18)) as engine:
        assert engine.inputs == (
            TensorSpec("x", "float32", ("N", "x_1")),
            TensorSpec("unused", "int32", ("M",)),
        )
        assert [each.shape for each in engine.outputs] == [(), ("N", "x_1"), ("N", "y_1")]
        found = engine({"x": x, "unused": np.zeros(4, np.int32)})
        assert (found["s"].shape, float(found["s"])) == ((), 12.0)
        np.testing.assert_array_equal(found["x"], x)
        np.testing.assert_array_equal(found["y"], 2 * x)


@pytest.mark.parametrize("dtype", ["string", "bfloat16"])
def test_tensors_that_it_cannot_take_are_named(tmp_path: Path, dtype: str) -> None:
    """A tensor of strings ends the process inside OpenVINO 2026.4."""
    path = write_text(tmp_path, f"({dtype}[N] x) => ({dtype}[N] y)", "y = Identity(x)", {})
    with pytest.raises(Unsupported, match=f"tensor 'x' is of {dtype}"):
        open_engine(path)


def test_integers_that_it_would_cut_are_refused_and_float64_is_noted(tmp_path: Path) -> None:
    path = write_text(tmp_path, "(int64[N] x) => (int64[N] y)", "y = Add(x, x)", {})
    with open_engine(path) as engine:
        x = np.array([-5, 2**30 - 1])
        np.testing.assert_array_equal(engine({"x": x})["y"], [-10, 2**31 - 2])
        for value in (2**31, -(2**31) - 1):
            with pytest.raises(BadInput, match="input 'x' holds integers beyond 32 bits"):
                engine({"x": np.array([1, value])})
        assert engine({"x": np.zeros(0, np.int64)})["y"].shape == (0,)
    path = write_text(tmp_path, "(double[N] x) => (double[N] y)", "y = Add(x, x)", {})
    with open_engine(path) as engine:
        assert engine.notes == (f"{path}: OpenVINO computes float64 in float32",)
        assert engine({"x": np.ones(2)})["y"].dtype == np.float64


# files


def test_an_unknown_operator_is_named_in_one_line(tmp_path: Path) -> None:
    nodes = [node(kind, ["x"], ["y"], domain="local") for kind in ("Foo", "Bar")]
    nodes[0].output[0] = nodes[1].input[0] = "a"
    path = write_graph(tmp_path / "m.onnx", nodes)
    with pytest.raises(Unsupported) as raised:
        open_engine(path)
    names = "local.Bar, local.Foo"
    assert raised.value.message == f"{path}: OpenVINO has no operator {names}"
    assert "profile 'cpu'" in str(raised.value.hint)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x08\x0a\x12\x03abc", b"no model at all"],
    ids=["empty", "no graph", "text"],
)
def test_a_file_that_is_not_a_model_is_refused_silently(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], content: bytes
) -> None:
    """OpenVINO would try the readers of six other formats, two of which print."""
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(BadInput, match=r"model\.onnx: (is a truncated|the file is empty)"):
        open_engine(tmp_path / "model.onnx")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("location", "size", "says"),
    [
        ("w.data", 100, "'w.data' has 100 bytes"),
        ("gone.data", 8192, "gone.data"),
        ("../w.data", 8192, r"\.\./w\.data"),
    ],
    ids=["short", "missing", "outside"],
)
def test_external_weights_are_checked_before_openvino_reads_them(
    tmp_path: Path, location: str, size: int, says: str
) -> None:
    path, weight = product(tmp_path)
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location="w.data", size_threshold=0)
    with open_engine(path) as engine:
        np.testing.assert_allclose(engine({"x": X})["y"], X @ weight, rtol=1e-4, atol=1e-4)
    data = (tmp_path / "w.data").read_bytes()
    (tmp_path / "w.data").write_bytes(data[:size])
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].external_data[0].value = location
    with pytest.raises(BadInput, match=says):
        open_engine(save(model, path))
