"""Models and data that deploykit's own export would not make: right, or refused for the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import deploykit as dk
from tests.support.graphs.small import write_text

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
def test_small_integers_are_tried_where_larger_ones_do_not_run(tmp_path: Path, axis: str) -> None:
    path = write_text(tmp_path, GATHER.format(axis), "y = Gather(W, ids)", {"W": W[:2]})
    assert "compared on the integers 0 and 1" in dk.compare(path, path).note
    assert dk.quantize(path, "fp16").evaluation.passed


@pytest.mark.parametrize("axis", ["N", "3"])
def test_a_model_that_takes_no_random_inputs_asks_for_real_ones(tmp_path: Path, axis: str) -> None:
    path = write_text(tmp_path, GATHER.format(axis), "y = Gather(W, ids)", {"W": W[:1]})
    for run in (lambda: dk.compare(path, path), lambda: dk.quantize(path, "fp16")):
        with pytest.raises(dk.BadInput, match="no random inputs that were tried run") as caught:
            run()
        assert "give real inputs, `data`" in caught.value.hint
    np.save(tmp_path / "x.npy", np.zeros(9, np.int64))
    assert dk.compare(path, path, data=tmp_path / "x.npy").parity.passed


def test_golden_samples_do_for_a_model_that_takes_no_random_inputs(tmp_path: Path) -> None:
    head = "(float[N,4] x, int64[N] ids) => (float[N,4] y)"
    body = "a = Gather(T, ids) s = Add(x, a) y = MatMul(s, W)"
    path = write_text(tmp_path, head, body, {"T": W[:1], "W": W})
    x, ids = RNG.standard_normal((60, 4)).astype(np.float32), np.zeros(60, np.int64)
    np.savez(tmp_path / "c.npz", x=x, ids=ids)
    integers = dk.quantize(path, "int8", calib=tmp_path / "c.npz").path
    found = dk.compare(path, integers)
    assert found.parity.passed
    assert found.note == f"the inputs are the golden samples of {integers.name}"
    with pytest.raises(dk.BadInput, match="no random inputs"):
        dk.compare(path, integers, batch=3)


X4 = "(float[N,4] x) => (float[N,4] y)"


@pytest.mark.parametrize(
    ("body", "opset", "to", "why", "hint"),
    [
        ("y = Log(q)", 17, "fp16", "on both sides", "the float32 model itself"),
        ("y = Acosh(q)", 9, "bf16", "finite in either", "the float32 model itself"),
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
def test_two_nodes_of_one_name_are_refused_with_the_cure(tmp_path: Path, inner: bool) -> None:
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
        with pytest.raises(dk.BadInput, match="ONNX Runtime refused it: two nodes") as caught:
            verb(*arguments)
        assert "set each `node.name` to ''" in caught.value.hint
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


def test_a_model_of_another_domain_has_nothing_to_cast(tmp_path: Path) -> None:
    path = write_text(tmp_path, X4, "y = ai.onnx.ml.Binarizer(x)", {})
    model = onnx.load(path)
    model.opset_import[0].CopyFrom(onnx.helper.make_opsetid("ai.onnx.ml", 1))
    onnx.save(model, path)
    with pytest.raises(dk.BadInput, match="no node of it would compute in float16"):
        dk.quantize(path, "fp16")


def test_an_operator_that_others_define_in_float32_stays_in_it(tmp_path: Path) -> None:
    body = "r = Relu(x) y = MeanVarianceNormalization(r)"
    head = "(float[N,3,4,4] x) => (float[N,3,4,4] y)"
    made = dk.quantize(write_text(tmp_path, head, body, {}, 11), "fp16")
    assert made.manifest.precision == {"float16": 1, "float32": 1}
    dk.load(made.path).close()


def test_sums_of_integers_are_scaled_in_float32(tmp_path: Path) -> None:
    """As ONNX Runtime's dynamic quantizer leaves them; as float16 they would be infinite."""
    weights = RNG.standard_normal((512, 4)).astype(np.float32)
    head = "(float[N,512] x) => (float[N,4] y)"
    path = write_text(tmp_path, head, "q = MatMul(x, W) y = Relu(q)", {"W": weights})
    integers = dk.quantize(path, "int8-dynamic").path
    assert dk.quantize(integers, "fp16").evaluation.sqnr_db > 40


def test_strings_are_calibrated_on_recorded_and_replayed(tmp_path: Path) -> None:
    body = "q = MatMul(x, W) y = Softmax(q) w = Identity(words)"
    head = "(float[N,4] x, string[N] words) => (float[N,4] y, string[N] w)"
    path = write_text(tmp_path, head, body, {"W": W})
    words = np.array(["a", "bcd", "ü"] * 20)
    np.savez(tmp_path / "c.npz", x=RNG.standard_normal((60, 4)).astype(np.float32), words=words)
    made = dk.quantize(path, "int8", calib=tmp_path / "c.npz")
    assert dk.compare(made.path).parity.passed


def test_a_division_by_zero_that_a_where_leaves_out_is_calibrated(tmp_path: Path) -> None:
    """sin(x) / x, as resamplers have it."""
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
