"""Models and data that deploykit's own export would not make: right, or refused for the reason."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest

import deploykit as dk
from deploykit.evaluation import feeds
from deploykit.evaluation.feeds import random_inputs
from tests.support.campaign import only_in_a_campaign
from tests.support.graphs.small import parse, write_text
from tests.support.onnx_zoo import save

RNG = np.random.default_rng(0)
W = RNG.standard_normal((4, 4)).astype(np.float32)
SHIFTS = "r = MatMul(x, W) h = Reshape(r, s) y = Reshape(h, t)"  # a state for one row
ONE_ROW = {"W": W, "s": np.array([1, 20]), "t": np.array([1, 5, 4])}


@pytest.mark.parametrize(
    ("head", "body", "constants", "shape"),
    [
        ("(float[4,4] x) => (float[4,4] y)", "y = MatMul(x, W)", {"W": W}, (8, 4)),
        ("(float[N,5,4] x) => (float[N,5,4] y)", SHIFTS, ONE_ROW, (6, 5, 4)),
        ("(float[batch_size,N] x) => (float[batch_size] y)", "y = ReduceMax<axes=[1]>(x)", {}, 0),
        ("(float[B,N,3] x) => (float[B,1,3] y)", "y = ReduceMax<axes=[1]>(x)", {}, (40, 50, 3)),
        ("(float[Batch,T] labels) => (float[Batch,T] y)", "y = Relu(labels)", {}, (5, 3)),
    ],
    ids=["fixed batch", "one row", "N is time", "N is points", "an input named labels"],
)
def test_predict_gives_what_the_model_gives_for_each_sample(
    tmp_path: Path, head: str, body: str, constants: dict[str, np.ndarray], shape: tuple[int, ...]
) -> None:
    path = write_text(tmp_path, head, body, constants)
    x = RNG.standard_normal(shape or (40, 50)).astype(np.float32)
    session = onnxruntime.InferenceSession(path)
    name, rows = session.get_inputs()[0].name, session.get_inputs()[0].shape[0]
    size = rows if isinstance(rows, int) else 1
    wanted = [session.run(None, {name: x[at : at + size]})[0] for at in range(0, len(x), size)]
    np.savez(tmp_path / "x.npz", **{name: x})
    dk.predict(path, tmp_path / "x.npz", tmp_path / "y.npz")
    got = np.load(tmp_path / "y.npz")["y"]
    np.testing.assert_allclose(got.reshape(-1), np.concatenate(wanted).reshape(-1), rtol=1e-5)


def test_samples_that_do_not_fill_a_fixed_batch_are_counted(tmp_path: Path) -> None:
    path = write_text(tmp_path, "(float[4,4] x) => (float[4,4] y)", "y = Relu(x)", {})
    np.save(tmp_path / "x.npy", np.zeros((10, 4), np.float32))
    with pytest.raises(dk.BadInput, match="10 samples, the model takes 4 at a time") as caught:
        dk.predict(path, tmp_path / "x.npy", tmp_path / "y.npz")
    assert caught.value.hint.startswith("add 2 or leave out 2")


GATHER = "(int64[{0}] ids) => (float[{0},4] y)"


@pytest.mark.parametrize("axis", ["N", "3"])
def test_a_model_that_takes_no_random_inputs_asks_for_real_ones(tmp_path: Path, axis: str) -> None:
    path = write_text(tmp_path, GATHER.format(axis), "y = Gather(W, ids)", {"W": W[:2]})
    assert "compared on the integers 0 and 1" in dk.compare(path, path).note
    assert dk.quantize(path, "fp16").evaluation.passed
    path = write_text(tmp_path, GATHER.format(axis), "y = Gather(W, ids)", {"W": W[:1]})
    for run in (lambda: dk.compare(path, path), lambda: dk.quantize(path, "fp16")):
        with pytest.raises(dk.BadInput, match="no random inputs that were tried run") as caught:
            run()
        assert "give real inputs, `data`" in caught.value.hint
    np.save(tmp_path / "x.npy", np.zeros(9, np.int64))
    assert dk.compare(path, path, data=tmp_path / "x.npy").parity.passed


X4 = "(float[N,4] x) => (float[N,4] y)"


@pytest.mark.parametrize(
    ("body", "opset", "to", "why", "hint"),
    [
        ("y = Log(q)", 17, "fp16", "on both sides", "the float32 model itself"),
        (
            "a = Abs(q) s = Neg(a) y = Acosh(s)",
            9,
            "bf16",
            "finite in either",
            "the float32 model itself",
        ),
        ("r = RandomNormalLike(q) y = Add(q, r)", 17, "fp16", "draws", "eval"),
    ],
    ids=["NaN", "NaN in an old opset", "random numbers"],
)
def test_a_gate_that_the_model_itself_fails_says_so(
    tmp_path: Path, body: str, opset: int, to: str, why: str, hint: str
) -> None:
    path = write_text(tmp_path, X4, f"q = MatMul(x, W) {body}", {"W": W}, opset)
    with pytest.raises(dk.GateFailed, match=why) as caught:
        dk.quantize(path, to)
    assert hint in caught.value.hint
    assert "auto" not in caught.value.hint


def test_values_that_int8_loses_ask_for_calibration_samples(tmp_path: Path) -> None:
    body = "q = MatMul(x, W) a = Abs(q) b = Add(a, e) y = Log(b)"
    path = write_text(tmp_path, X4, body, {"W": W, "e": np.array(1e-30, np.float32)})
    x = RNG.standard_normal((64, 4)).astype(np.float32) * np.logspace(-12, 0, 64)[:, None]
    np.savez(tmp_path / "d.npz", x=x.astype(np.float32))
    with pytest.raises(dk.GateFailed, match=r"SQNR .* is below 15 dB") as caught:
        dk.quantize(path, "int8", calib=tmp_path / "d.npz")
    assert caught.value.hint.startswith("calibrate on more samples, of all kinds; precision 'auto'")
    assert caught.value.result.path.name == "m.int8.rejected.onnx"
    assert caught.value.result.path.is_file()
    path = write_text(tmp_path, X4, "q = MatMul(x, W) a = Abs(q) y = Log(a)", {"W": W})
    with pytest.raises(dk.GateFailed, match="NaN or infinity"):  # with each calibrator
        dk.quantize(path, "int8", calib=tmp_path / "d.npz")


@pytest.mark.parametrize("given", ["calib", "data"])
def test_too_few_equal_answers_ask_for_more_samples(tmp_path: Path, given: str) -> None:
    body = "q = MatMul(x, W) y = ArgMax<axis=1, keepdims=0>(q)"
    path = write_text(tmp_path, "(float[N,4] x) => (int64[N] y)", body, {"W": W})
    np.savez(tmp_path / "d.npz", x=RNG.standard_normal((64, 4)).astype(np.float32))
    with pytest.raises(dk.GateFailed, match="samples like these would show it") as caught:
        dk.quantize(path, "fp16", **{given: tmp_path / "d.npz"})
    assert caught.value.hint.startswith("more samples narrow the interval; precision 'auto'")


def test_a_domain_that_a_file_imports_and_does_not_use_excludes_no_target(tmp_path: Path) -> None:
    path = write_text(tmp_path, X4, "y = MatMul(x, W)", {"W": W})
    fits = dk.inspect(path).fits
    model = onnx.load(path)
    model.opset_import.add(domain="ai.onnx.ml", version=2)  # as tf2onnx writes every file
    onnx.save(model, path)
    assert dk.inspect(path).fits == fits
    assert "l4" in fits


def test_a_window_larger_than_an_axis_of_1_has_no_operations(tmp_path: Path) -> None:
    kernel = RNG.standard_normal((2, 1, 9)).astype(np.float32)
    head = "(float[N,1,T] x) => (float[N,2,L] y)"
    mix = dk.inspect(write_text(tmp_path, head, "y = Conv(x, K)", {"K": kernel})).details["mix"]
    assert sum(mix["flops"].values()) >= 0, mix
    assert mix["unknown"], mix


def test_a_build_of_a_model_that_draws_numbers_says_so(tmp_path: Path) -> None:
    path = write_text(tmp_path, X4, "r = RandomUniformLike(x) y = Mul(x, r)", {})
    with pytest.raises(dk.GateFailed, match=r"m\.cpu\.onnx against m\.onnx") as caught:
        dk.build(path, "cpu")
    assert caught.value.hint == "export it without: dropout in eval mode, noise as an input"
    assert any("draws random numbers" in note for note in caught.value.result.notes)


@pytest.mark.parametrize("to", ["int8", "int8-dynamic", "int8-weight-only"])
def test_a_refusal_says_that_the_weights_are_in_the_body_of_an_if(tmp_path: Path, to: str) -> None:
    bodies = "then_branch = t () => (float[N,4] t) { t = MatMul(x, W) }"
    bodies += ", else_branch = e () => (float[N,4] e) { e = Relu(x) }"
    head = "(float[N,4] x, bool c) => (float[N,4] y)"
    path = write_text(tmp_path, head, f"y = If(c) <{bodies}>", {"W": W})
    np.savez(tmp_path / "d.npz", x=RNG.standard_normal((8, 4)).astype(np.float32), c=np.array(True))
    with pytest.raises(dk.BadInput, match="outside the bodies of If, Loop and Scan") as caught:
        dk.quantize(path, to, calib=tmp_path / "d.npz" if to == "int8" else None)
    assert "fp16" not in caught.value.hint


@pytest.mark.parametrize("inner", [False, True])
def test_two_nodes_of_one_name_are_refused(tmp_path: Path, inner: bool) -> None:
    body = "h = Relu(x) y = Neg(h)"
    if inner:
        bodies = "then_branch = t () => (float[N,4] t) { h = Relu(x) t = Neg(h) }"
        bodies += ", else_branch = e () => (float[N,4] e) { e = Relu(x) }"
        body = f"y = If(c) <{bodies}>"
    path = write_text(tmp_path, X4, body, {"c": np.array(True)})
    model = onnx.load(path)
    nodes = model.graph.node[0].attribute[0].g.node if inner else model.graph.node
    for node in nodes:
        node.name = "twin"
    onnx.save(model, path)
    for verb, *arguments in ((dk.load, path), (dk.build, path, "cpu"), (dk.compare, path, path)):
        with pytest.raises(dk.BadInput, match="ONNX Runtime refused it: "):
            verb(*arguments)
    for node in nodes:
        node.name = ""
    onnx.save(model, path)
    assert dk.build(path, "cpu", force=True).parity.passed


@pytest.mark.parametrize(
    ("labels", "noted"),
    [
        (lambda right: right, False),
        (lambda right: (right + 1) % 4, True),
        (lambda right: np.zeros_like(right), True),
    ],
    ids=["right", "numbered otherwise", "one class"],
)
def test_labels_that_a_model_cannot_lose_are_noted(
    tmp_path: Path, labels: Callable[[np.ndarray], np.ndarray], noted: bool
) -> None:
    path = write_text(tmp_path, X4, "y = MatMul(x, W)", {"W": W})
    x = RNG.random((600, 4), "f4") - 0.5
    np.savez(tmp_path / "d.npz", x=x, labels=labels((x @ W).argmax(1)))
    made = dk.quantize(path, "fp16", data=tmp_path / "d.npz", max_drop=0.5)
    assert any("no more than the most frequent label" in note for note in made.notes) == noted


def test_an_operator_that_others_define_in_float32_stays_in_it(tmp_path: Path) -> None:
    body = "r = Relu(x) y = MeanVarianceNormalization(r)"
    head = "(float[N,3,4,4] x) => (float[N,3,4,4] y)"
    made = dk.quantize(write_text(tmp_path, head, body, {}, 11), "fp16")
    assert made.manifest.precision == {"float16": 1, "float32": 1}
    dk.load(made.path).close()


def test_single_random_rows_count_together(tmp_path: Path) -> None:
    """With these weights the outputs of one such row are near 0, and its SQNR is 10 dB."""
    weights = np.random.default_rng(0).standard_normal((512, 4)).astype(np.float32)
    head = "(float[N,512] x) => (float[N,4] y)"
    path = write_text(tmp_path, head, "q = MatMul(x, W) y = Relu(q)", {"W": weights})
    integers = dk.quantize(path, "int8-dynamic").path
    with pytest.raises(dk.BadInput, match="integers that each call scales"):  # not for a GPU
        dk.quantize(integers, "fp16")


def test_strings_are_calibrated_on_recorded_and_replayed(tmp_path: Path) -> None:
    body = "q = MatMul(x, W) y = Softmax(q) w = Identity(words)"
    head = "(float[N,4] x, string[N] words) => (float[N,4] y, string[N] w)"
    path = write_text(tmp_path, head, body, {"W": W})
    words = np.array(["a", "bcd", "ü"] * 20)
    np.savez(tmp_path / "c.npz", x=RNG.standard_normal((60, 4)).astype(np.float32), words=words)
    made = dk.quantize(path, "int8", calib=tmp_path / "c.npz")
    assert dk.compare(made.path).parity.passed
    assert dk.compare(path, path, data=tmp_path / "c.npz").parity.passed
    dk.predict(path, tmp_path / "c.npz", tmp_path / "y.npz", batch=7)
    with np.load(tmp_path / "y.npz") as answers:
        assert answers["w"].tolist() == words.tolist()


def test_a_division_by_zero_that_a_where_leaves_out_is_calibrated(tmp_path: Path) -> None:
    body = "s = Sin(x) d = Div(s, x) z = Equal(x, zero) k = Where(z, one, d) y = MatMul(k, W)"
    constants = {"W": W, "zero": np.float32(0), "one": np.float32(1)}
    path = write_text(tmp_path, X4, body, constants)
    x = RNG.standard_normal((64, 4)).astype(np.float32)
    x[::3, 1] = 0
    np.save(tmp_path / "c.npy", x)
    for to in ("int8", "fp16"):
        made = dk.quantize(path, to, tmp_path / f"{to}.onnx", calib=tmp_path / "c.npy")
        assert made.evaluation.sqnr_db > 20


def test_an_output_whose_rows_are_no_samples_is_replayed_whole(tmp_path: Path) -> None:
    """As of the speech models that declare an answer for each row, and give two for one."""
    head = "(float[N,4] x) => (float[N,4] y)"
    path = write_text(tmp_path, head, "q = MatMul(x, W) y = Concat<axis = 0>(q, q)", {"W": W})
    np.save(tmp_path / "c.npy", RNG.standard_normal((60, 4)).astype(np.float32))
    made = dk.quantize(path, "int8", calib=tmp_path / "c.npy", batch=1)
    assert dk.compare(made.path).parity.passed


COUNT = 16
DATA = {
    "x": RNG.standard_normal((COUNT, 5, 4)).astype(np.float32),
    "h": RNG.standard_normal((2, COUNT, 4)).astype(np.float32),
    "rate": np.array(2, np.float32),
    "bias": RNG.standard_normal(4).astype(np.float32),
}
# the batch's names in x and h
NAMES = {
    "N": ("N", "N"),
    "batch": ("batch", "batch"),
    "two names": ("A", "B"),
    "no names": ("?", "?"),
    "fixed": ("1", "1"),
}


def rename(model: onnx.ModelProto, names: dict[str, str]) -> onnx.ModelProto:
    for value in (*model.graph.input, *model.graph.output):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param in names:
                axis.dim_param = names[axis.dim_param]
    return model


@pytest.fixture(params=NAMES.values(), ids=NAMES)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A state [2,N,4] goes in and comes out, a scalar and a bias are the same for all samples."""
    first, second = request.param
    unnamed = first == "?"
    first, second = ("A", "B") if unnamed else (first, second)
    proto = parse(
        f"(float[2,{second},4] h, float[{first},5,4] x, float rate, float[4] bias)"
        f" => (float[{first},5,4] y, float[{'L' if unnamed else 2},{second},4] after)",
        "q = MatMul(x, W) r = Add(q, bias) s = Mul(r, rate) y = Relu(s) after = Mul(h, rate)",
        W=RNG.standard_normal((4, 4)),
    )
    np.savez(tmp_path / "d.npz", **DATA)
    names = dict.fromkeys("ABL", "?") if unnamed else {}
    return save(rename(proto, names), tmp_path / "m.onnx")


def test_samples_are_read_and_answers_joined_along_the_batch(model: Path, tmp_path: Path) -> None:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    alone = [
        session.run(None, {**DATA, "x": DATA["x"][n : n + 1], "h": DATA["h"][:, n : n + 1]})
        for n in range(COUNT)
    ]
    y, after = zip(*alone, strict=True)
    assert dk.predict(model, tmp_path / "d.npz", tmp_path / "p.npz", batch=7).samples == COUNT
    got = np.load(tmp_path / "p.npz")
    np.testing.assert_allclose(got["y"], np.concatenate(y), rtol=1e-5)
    np.testing.assert_allclose(got["after"], np.concatenate(after, 1), rtol=1e-5)


def test_they_calibrate_evaluate_compare_and_replay(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "d.npz"
    made = dk.quantize(model, "int8", calib=data)
    assert made.evidence.calibration.samples == COUNT
    assert made.evaluation.samples == COUNT
    assert dk.compare(model, made.path, data=data, max_error=0.1).parity.passed
    assert dk.compare(made.path).parity.passed
    for given in ({}, {"data": data}, {"precision": "int8", "calib": data}):
        assert dk.build(model, "cpu", out=tmp_path / "b.onnx", **given).parity.passed


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"h": DATA["h"][:, :15]}, r"its arrays have \[15, 16\] samples"),
        ({"rate": np.ones(COUNT, np.float32)}, r"input 'rate' is float32\[\], got float32\[16\]"),
        ({"bias": np.ones(3, np.float32)}, r"input 'bias' is float32\[4\], got float32\[3\]"),
    ],
)
@pytest.mark.parametrize("model", [("N", "N")], indirect=True)
def test_arrays_that_do_not_fit_are_refused(
    model: Path, tmp_path: Path, wrong: dict[str, np.ndarray], reason: str
) -> None:
    np.savez(tmp_path / "d.npz", **{**DATA, **wrong})
    with pytest.raises(dk.BadInput, match=reason):
        dk.predict(model, tmp_path / "d.npz", tmp_path / "p.npz")


@pytest.mark.parametrize("name", ["?", "-1", "None", "unknown", ""])
def test_axes_of_no_known_size_have_a_size_each(name: str, tmp_path: Path) -> None:
    """PaddlePaddle calls each of them "?"; height and width are not one axis for that."""
    body = "c = Conv(x, K) p = GlobalAveragePool(c) y = Flatten(p)"
    kernel = RNG.standard_normal((4, 3, 3, 3))
    proto = parse("(float[A,3,H,W] x) => (float[N,4] y)", body, K=kernel)
    path = save(rename(proto, dict.fromkeys("AHW", name)), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=RNG.standard_normal((COUNT, 3, 12, 40)).astype(np.float32))
    assert dk.inspect(path).inputs[0].shape == ("N", 3, "x_2", "x_3")
    assert dk.quantize(path, "int8", calib=tmp_path / "d.npz").evaluation.passed
    with dk.load(path, "cpu") as engine:
        assert engine({"x": np.zeros((1, 3, 12, 40), np.float32)})["y"].shape == (1, 4)


CONV = "c = Conv(x, K) "
PRODUCT = "f = Flatten(x) m = MatMul(f, L) "
NORM = CONV + "b = BatchNormalization(c, S, B, B, S) y = Relu(b)"
BOUNDS = CONV + "y = Clip<min = 0.0, max = 6.0>(c)"
MAXIMUM = PRODUCT + "y = ReduceMax<axes = [1]>(m)"
# name -> opset, precision, body from x [N,3,8,8] to y, the axes of y, and the new opset
MODELS = {
    "product": (9, "bf16", "f = Flatten(x) y = MatMul(f, L)", "N,512", 13),
    "batch norm": (9, "int8", NORM, "N,4,6,6", 13),
    "bounds": (9, "int8", BOUNDS, "N,4,6,6", 13),
    "axes": (11, "int8", CONV + "g = GlobalMaxPool(c) y = Squeeze<axes = [2, 3]>(g)", "N,4", 13),
    "softmax": (11, "int8", CONV + "y = Softmax<axis = 1>(c)", "N,4,6,6", 13),
    "upsample": (9, "int8", CONV + 'y = Upsample<mode = "nearest">(c, U)', "N,4,12,12", 13),
    "maximum": (15, "fp8", MAXIMUM, "N,1", 19),
    "pairs": (15, "int8 fp16", CONV + "y = ReduceMean<axes = [2]>(c)", "N,4,1,6", 19),
    "parts": (17, "int4-weight-only", PRODUCT + "y, z = Split<axis = 1>(m)", "N,256", 21),
}


def write(folder: Path, body: str, shape: str, opset: int) -> Path:
    np.savez(folder / "d.npz", x=RNG.standard_normal((32, 3, 8, 8)).astype(np.float32))
    constants = {
        "K": RNG.standard_normal((4, 3, 3, 3)),
        "L": RNG.standard_normal((192, 512)),
        "S": np.ones(4),
        "B": np.zeros(4),
        "U": np.array([1.0, 1.0, 2.0, 2.0]),
    }
    head = f"(float[N,3,8,8] x) => (float[{shape}] y)"
    return write_text(folder, head, body, constants, opset)


@pytest.mark.parametrize("case", MODELS)
def test_an_old_opset_is_converted_proven_and_reported(case: str, tmp_path: Path) -> None:
    opset, to, body, shape, least = MODELS[case]
    path, data = write(tmp_path, body, shape, opset), tmp_path / "d.npz"
    to, _, rest = to.partition(" ")
    made = dk.quantize(path, to, calib=data, other_nodes=rest or "fp32")
    assert made.evaluation.passed
    assert dk.inspect(made.path).details["opset"]["ai.onnx"] >= least
    assert any(f"opset {opset}, converted to {least}: " in note for note in made.notes)
    if to != "bf16":  # ONNX Runtime's CPU does not run it
        assert dk.compare(path, made.path, data=data, max_error=0.3).parity.passed


def test_constants_that_are_listed_as_inputs_are_constants(tmp_path: Path) -> None:
    """Files of before IR version 4 list them so."""
    path = write(tmp_path, NORM, "N,4,6,6", 9)
    model = onnx.load(path)
    model.ir_version = 3
    for tensor in model.graph.initializer:
        model.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, 1, tensor.dims))
    onnx.save(model, path)
    made = dk.quantize(path, "int8", calib=tmp_path / "d.npz")
    assert made.manifest.precision["int8"] == 1
    assert [spec.name for spec in made.manifest.inputs] == ["x"]


@pytest.mark.parametrize(
    ("raises", "reason"),
    [
        (False, r"opset 9, converted to 13, does not compute the same: against m.onnx"),
        (True, r"opset 9 cannot be converted to 13, which this precision needs: no adapter"),
    ],
)
def test_a_conversion_that_fails_or_changes_the_model_is_refused(
    raises: bool, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = onnx.version_converter.convert_version

    def convert(model: onnx.ModelProto, least: int) -> onnx.ModelProto:
        if raises:
            raise RuntimeError("no adapter")
        found = real(model, least)
        found.graph.node[-1].op_type = "Max"  # the bounds are values then
        return found

    monkeypatch.setattr(onnx.version_converter, "convert_version", convert)
    path = write(tmp_path, BOUNDS, "N,4,6,6", 9)
    with pytest.raises(dk.BadInput, match=reason) as caught:
        dk.quantize(path, "int8", calib=tmp_path / "d.npz")
    assert caught.value.hint == "export it again with opset 13"


def test_auto_tries_what_needs_a_newer_opset_too(tmp_path: Path) -> None:
    path = write(tmp_path, MAXIMUM, "N,1", 11)
    made = dk.quantize(path, "auto", calib=tmp_path / "d.npz", runtime="onnxruntime")
    assert any("opset 11, converted to 13" in note for note in made.notes)


@only_in_a_campaign
@pytest.mark.filterwarnings("ignore")  # onnx's own cases overflow on purpose
def test_each_operator_is_cast_or_refused_and_computes_the_same(tmp_path: Path) -> None:
    from onnx.backend.test.case.node import collect_testcases

    path, seen, wrong = tmp_path / "m.onnx", set[str](), []
    for case in collect_testcases(None):
        model = case.model
        if model is None or not case.data_sets or model.graph.node[0].op_type in seen:
            continue
        inputs = zip(model.graph.input, case.data_sets[0][0], strict=False)
        feeds = {value.name: array for value, array in inputs}
        for each in model.opset_import:
            each.version = each.version if each.domain else min(each.version, 21)
        model.ir_version = min(10, model.ir_version)
        onnx.save(model, path)
        try:
            onnx.checker.check_model(path, full_check=True)
            expected = onnxruntime.InferenceSession(path).run(None, feeds)
        except Exception:  # noqa: BLE001 - not of that opset, or not ONNX Runtime's
            continue
        seen.add(model.graph.node[0].op_type)
        dk.inspect(path)
        try:
            made = dk.quantize(path, "fp16", force=True)
        except (dk.BadInput, dk.GateFailed, dk.Unsupported):
            continue
        answers = onnxruntime.InferenceSession(made.path).run(None, feeds)
        for want, got in zip(expected, answers, strict=True):
            if isinstance(want, np.ndarray) and want.dtype.kind == "f" and want.size:
                noise = np.square(want.astype(np.float64) - got).sum()
                if noise > np.square(want.astype(np.float64)).sum() * 10**-1.5:  # 15 dB
                    wrong.append(model.graph.name)
    assert len(seen) >= 150
    assert wrong == []


def wide(path: Path, side: int, weight: float = 0.0) -> Path:
    """A convolution to 64 channels, 67 MB for each row of 512 x 512, and the channels' maxima."""
    head = f"(float[N,1,{side},{side}] x) => (float[N,64,1,1] z)"
    body = "y = Conv(x, w) z = GlobalMaxPool(y)"
    return save(parse(head, body, w=np.full((64, 1, 1, 1), weight)), path)


@pytest.mark.parametrize("given", [False, True])
def test_compare_and_bench_use_as_many_rows_as_fit_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, onnxruntime_alone: None, given: bool
) -> None:
    first, second, third = (
        wide(tmp_path / f"{name}.onnx", 32, weight)
        for name, weight in (("a", 1.0), ("b", 1.0001), ("c", 1.5))
    )
    whole = dk.compare(first, first)
    assert (max(row.batch for row in whole.parity.rows), whole.note) == (32, "")
    monkeypatch.setattr(feeds, "MOST_CALL_BYTES", 2 << 20)
    data = tmp_path / "data.npz" if given else None
    if data:
        np.savez(data, x=RNG.random((11, 1, 32, 32), np.float32))
    note = "compared at batches of up to 8: larger ones take too much memory"
    found = dk.compare(first, second, data=data)
    batches = [row.batch for row in found.parity.rows]
    assert (batches, found.note) == ([8, 3] if given else [1, 2, 7, 8], note)
    if data is None:
        far = dk.compare(first, third).divergence
        assert (far.operator, far.tensor) == ("Conv", "y")
        options = {"out": tmp_path, "device": "cpu", "batches": (1,), "seconds": 0.02}
        report = dk.bench([first, second], **options)
        assert max(row["batch"] for row in report.parity[0]["rows"]) == 8
        assert f"parity: {note}" in report.notes
        monkeypatch.setattr(feeds, "MOST_CALL_BYTES", 1)
        assert max(row.batch for row in dk.compare(first, first).parity.rows) == 2


# name -> head, body, and the sizes that must be among those that run
SIZED = {
    "least": (  # an audio front end: 65 samples or more
        "(float[N,T] x) => (float[N,1,L] y)",
        'p = Pad<mode = "reflect">(x, pads) u = Unsqueeze(p, one) y = Conv(u, K)',
        {"N": 32, "T": 80},
    ),
    "step": (
        "(float[N,T] x) => (float[N,K,160] y)",
        "r = Relu(x) y = Reshape(r, s)",
        {"N": 32, "T": 160},
    ),
    "batch of 1": (  # a state for one row
        "(float[N,5,4] x) => (float[N,5,4] y)",
        "r = MatMul(x, W) h = Reshape(r, row) y = Reshape(h, back)",
        {"N": 1},
    ),
    "a long row": (
        "(float[N,T] x) => (float[L] y)",
        'p = Pad<mode = "reflect">(x, pads) y = Squeeze(p, zero)',
        {"N": 1, "T": 80},
    ),
    "a state": (  # whose batch has no name
        "(float[N,T] x, float[2,K,4] h) => (float[N,4] y)",
        """p = Pad<mode = "reflect">(x, pads) m = ReduceMax<axes = [1]>(p)
           i = ReduceSum<keepdims = 0>(h, zero) y = Add(i, m)""",
        {"N": 2, "T": 80, "K": 2},
    ),
    "relation": (
        "(float[N,T] x, float[N,U] z) => (float[M,T] y)",
        "d = Concat<axis = 1>(z, z, z) c = Concat<axis = 0>(x, d) y = Relu(c)",
        None,
    ),
}
CONSTANTS = {
    "pads": np.array([0, 64, 0, 64]),
    "one": np.array([1]),
    "zero": np.array([0]),
    "s": np.array([0, -1, 160]),
    "row": np.array([1, 20]),
    "back": np.array([1, 5, 4]),
    "W": np.eye(4),
    "K": RNG.standard_normal((1, 1, 33)),
}


def write_sized(folder: Path, name: str) -> Path:
    return write_text(folder, *SIZED[name][:2], CONSTANTS)


@pytest.mark.parametrize("name", ["least", "step", "batch of 1", "a long row", "a state"])
def test_sizes_at_which_a_model_runs_are_found_and_named(name: str, tmp_path: Path) -> None:
    path = write_sized(tmp_path, name)
    with dk.load(path, "cpu") as engine:
        sizes, notes, _ = random_inputs(engine, {})
        assert SIZED[name][2] in sizes
        assert "at other sizes it does not run: " in notes[0]
    found = dk.compare(path, path)
    assert found.parity.passed
    assert "at other sizes" in found.note
    for made in (dk.quantize(path, "fp16"), dk.build(path, "cpu", out=tmp_path / "b.onnx")):
        assert any("at other sizes" in note for note in made.notes)


def test_a_busy_machine_searches_as_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hours = itertools.count(0.0, 3600.0)
    clock = SimpleNamespace(monotonic=lambda: next(hours), thread_time=time.thread_time)
    monkeypatch.setattr(feeds, "time", clock)
    with dk.load(write_sized(tmp_path, "least"), "cpu") as engine:
        assert random_inputs(engine, {}).sizes


def test_the_reason_of_a_failed_run_is_that_of_the_innermost_node(tmp_path: Path) -> None:
    body = "then_branch = t () => (float t) "
    body += '{ p = Pad<mode = "reflect">(x, pads) t = ReduceMax<keepdims=0>(p) }'
    body += ", else_branch = e () => (float e) { e = ReduceMax<keepdims=0>(x) }"
    constants = {**CONSTANTS, "c": np.array(True)}
    path = write_text(tmp_path, "(float[N,T] x) => (float y)", f"y = If(c) <{body}>", constants)
    with dk.load(path, "cpu") as engine, pytest.raises(dk.BadInput) as caught:
        engine({"x": np.zeros((1, 5), np.float32)})
    assert "refused it: node '" in caught.value.message
    assert "(Pad): Pad reflect" in caught.value.message
    assert "Status Message" not in caught.value.message


def test_sizes_that_the_user_gives_are_those_that_are_compared(tmp_path: Path) -> None:
    path = write_sized(tmp_path, "relation")
    with pytest.raises(dk.BadInput, match=r"no random inputs .* run: .*m\.onnx") as caught:
        dk.compare(path, path)
    assert "`axis` T=SIZE" in caught.value.hint
    found = dk.compare(path, path, axis={"T": 6, "U": 2}, batch=4)
    assert [(row.batch, row.values) for row in found.parity.rows] == [(4, 48)]
    assert dk.quantize(path, "fp16", axis={"T": 6, "U": 2}).evaluation.passed


def test_samples_are_run_one_at_a_time_where_a_model_takes_no_more(tmp_path: Path) -> None:
    path, data = write_sized(tmp_path, "batch of 1"), tmp_path / "d.npz"
    np.savez(data, x=RNG.standard_normal((16, 5, 4)).astype(np.float32))
    for to, given in (("int8", {"calib": data}), ("fp16", {"data": data})):
        made = dk.quantize(path, to, tmp_path / f"{to}.onnx", **given)
        assert made.evaluation.samples == 16
        assert any(note.startswith("run one sample at a time") for note in made.notes)
        assert dk.compare(made.path).parity.passed
    assert dk.compare(path, path, data=data).note.startswith("run one sample at a time")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"axis": {"Z": 3}}, "no input has a dynamic axis 'Z'"),
        ({"axis": {"T": 0}}, "`axis` T must be 1 or more"),
        ({"batch": 0}, "`batch` must be 1 or more"),
        ({"axis": {"N": 3}, "batch": 2}, "`batch` is the size of `axis` N: give one"),
    ],
)
def test_sizes_of_no_input_are_refused(tmp_path: Path, given: dict[str, object], why: str) -> None:
    path = write_sized(tmp_path, "step")
    with pytest.raises(dk.BadInput, match=why):
        dk.compare(path, path, **given)
    with pytest.raises(dk.BadInput, match=why):
        dk.quantize(path, "fp16", **given)
    data = tmp_path / "d.npz"
    np.savez(data, x=RNG.standard_normal((16, 320)).astype(np.float32))
    with pytest.raises(dk.BadInput, match="have theirs"):
        dk.compare(path, path, data=data, axis={"T": 160})
    assert dk.quantize(path, "fp16", data=data, batch=4).evaluation.samples == 16
