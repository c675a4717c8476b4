"""`quantize` as a user calls it: every precision, its evaluation, and the files it writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import deploykit as dk
from deploykit.core.artefact import Artefact
from tests.support.onnx_zoo import linear, make, mnist_like, save

CLASSES = 10


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(mnist_like(), tmp_path / "model.onnx")


def write(path: Path, images: np.ndarray, model: Path | None = None) -> Path:
    """Images, labelled with what `model` answers where one is given."""
    arrays = {"image": images}
    if model is not None:
        with dk.load(model, "cpu") as engine:
            arrays["labels"] = engine(arrays)["logits"].argmax(1)
    np.savez(path, **arrays)
    return path


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((count, 1, 28, 28), dtype=np.float32)


@pytest.fixture
def calib(tmp_path: Path) -> Path:
    return write(tmp_path / "calib.npz", images(120))


@pytest.fixture
def data(tmp_path: Path, model: Path) -> Path:
    return write(tmp_path / "test.npz", images(400, 1), model)


@pytest.mark.parametrize(
    ("to", "rest", "holds"),
    [
        ("fp16", "fp32", {"float16"}),
        ("bf16", "fp32", {"bfloat16"}),
        ("int8", "fp32", {"int8", "float32"}),
        ("int8", "fp16", {"int8", "float16"}),
        ("fp8", "fp32", {"float8", "float32"}),
        ("fp8", "fp16", {"float8", "float16"}),
    ],
)
def test_each_precision_is_in_the_file_and_the_outputs_stay_close(
    model: Path, calib: Path, to: str, rest: str, holds: set[str]
) -> None:
    made = dk.quantize(model, to, calib=calib, other_nodes=rest)
    assert set(made.manifest.precision) == holds
    assert made.evaluation.passed
    assert made.evaluation.sqnr_db > 20
    found = Artefact(made.path).manifest
    assert found is not None
    assert found.evidence.quantize.to == to
    assert found.evidence.quantize.other_nodes == rest


def large_linear() -> onnx.ModelProto:
    weights = np.random.default_rng(0).standard_normal((256, 512), np.float32) / 16
    node = helper.make_node("MatMul", ["x", "W"], ["y"], name="large")
    return make([node], {"x": ("N", 256)}, {"y": ("N", 512)}, {"W": weights})


@pytest.mark.parametrize(
    ("to", "most_bytes"), [("int8-weight-only", 140_000), ("int4-weight-only", 80_000)]
)
def test_weight_only_precisions_shrink_the_file_and_need_no_data(
    tmp_path: Path, to: str, most_bytes: int
) -> None:
    path = save(large_linear(), tmp_path / "large.onnx")
    made = dk.quantize(path, to)
    assert made.path.stat().st_size < most_bytes < path.stat().st_size / 3
    assert made.evaluation.sqnr_db > 15


def test_an_accuracy_drop_is_measured_on_labelled_data(
    model: Path, calib: Path, data: Path
) -> None:
    made = dk.quantize(model, "int8", calib=calib, data=data, max_drop=0.5)
    assert made.drop.n == 400
    assert made.evaluation.max_drop == 0.5
    assert made.manifest.evidence.accuracy.drop.n == 400


def test_without_labels_a_broken_output_is_refused(tmp_path: Path) -> None:
    """One input is so much larger than the others that INT8 rounds these to nothing."""
    weights = np.eye(4, dtype=np.float32)[:, :, None, None] * [[[[0.0]]], *[[[[1.0]]]] * 3]
    node = helper.make_node("Conv", ["x", "W"], ["y"], name="product")
    axes = ("N", 4, 2, 2)
    model = make([node], {"x": axes}, {"y": axes}, {"W": weights.astype(np.float32)})
    path = save(model, tmp_path / "model.onnx")
    x = np.random.default_rng(0).standard_normal((64, 4, 2, 2)).astype(np.float32)
    x[:, 0] *= 1e4
    np.savez(tmp_path / "x.npz", x=x)
    with pytest.raises(dk.GateFailed, match=r"SQNR .* is below 15 dB") as caught:
        dk.quantize(path, "int8", calib=tmp_path / "x.npz")
    assert caught.value.result.path.name == "model.int8.rejected.onnx"
    assert caught.value.result.path.is_file()


def test_fp16_that_overflows_fails_as_on_a_gpu(tmp_path: Path) -> None:
    """Without calibration nothing warns of the overflow; ONNX Runtime's CPU would hide it."""
    from tests.support.onnx_zoo import overflow

    path = save(overflow(), tmp_path / "overflow.onnx")
    big = tmp_path / "big.npz"
    np.savez(big, x=np.full((40, 4), 9.0, np.float32) * np.arange(1, 41, dtype=np.float32)[:, None])
    with pytest.raises(dk.GateFailed, match=r"first node .* 'scale_up' .* in 'product'") as caught:
        dk.quantize(path, "fp16", data=big)
    assert "`calib`" in caught.value.hint
    kept = dk.quantize(path, "fp16", calib=big)
    assert any("kept in float32" in note and "scale_up" in note for note in kept.notes)


def test_the_users_own_metric_decides(model: Path, calib: Path, data: Path, tmp_path: Path) -> None:
    metric = tmp_path / "metric.py"
    metric.write_text(
        "def margin(outputs, labels):\n"
        "    logits = outputs['logits']\n"
        "    return logits[range(len(labels)), labels]\n"
    )
    made = dk.quantize(
        model, "int8", calib=calib, data=data, metric=f"{metric}:margin", max_drop=0.5
    )
    assert made.drop.metric == f"{metric}:margin"
    assert made.drop.unit == ""
    assert abs(made.drop.drop.value) < 0.1


def test_perplexity_is_a_metric(model: Path, calib: Path, data: Path) -> None:
    made = dk.quantize(model, "fp16", calib=calib, data=data, metric="perplexity")
    assert made.drop.unit == "%"
    assert abs(made.drop.drop.value) < 0.01


def test_test_samples_that_also_calibrated_are_reported(model: Path, calib: Path) -> None:
    made = dk.quantize(model, "int8", calib=calib, data=calib)
    assert any("120 of the 120 samples" in note and "looks too good" in note for note in made.notes)


def test_golden_samples_of_a_quantized_file_come_from_the_data(model: Path, calib: Path) -> None:
    made = dk.quantize(model, "int8", calib=calib)
    with np.load(f"{made.path}.golden.npz") as arrays:
        np.testing.assert_array_equal(arrays["inputs/image"], images(120)[:4])
    replayed = dk.compare(made.path)
    assert replayed.parity.passed
    assert 0 < replayed.parity.worst.error <= replayed.parity.max_error < 0.2


@pytest.mark.parametrize("runtime", ["tensorrt", "onnxruntime"])
def test_auto_keeps_what_passes_and_logs_its_steps(
    model: Path, calib: Path, data: Path, runtime: str, tmp_path: Path
) -> None:
    made = dk.quantize(
        model,
        "auto",
        tmp_path / "auto.onnx",
        calib=calib,
        data=data,
        max_drop=0.5,
        runtime=runtime,
    )
    assert made.search.steps
    assert all(step.why for step in made.search.steps)
    assert made.manifest.evidence.search.steps[0].precision.startswith("int8")
    where = "predicted for l4" if runtime == "tensorrt" else "measured on this machine"
    assert any(where in note for note in made.notes)


def test_auto_refuses_too_few_samples_before_the_search(
    model: Path, calib: Path, tmp_path: Path
) -> None:
    few = write(tmp_path / "few.npz", images(50, 2), model)
    with pytest.raises(dk.BadInput, match=r"50 samples cannot show .* 276 are needed"):
        dk.quantize(model, "auto", calib=calib, data=few, max_drop=0.01)


def test_ctrl_c_in_auto_keeps_the_best_so_far(model: Path, calib: Path, tmp_path: Path) -> None:
    def interrupt(step: str, _share: float) -> None:
        if "passes" in step:
            raise KeyboardInterrupt

    out = tmp_path / "auto.onnx"
    made = dk.quantize(model, "auto", out, calib=calib, on_progress=interrupt)
    assert made.search.stopped == "interrupted"
    assert len(made.search.steps) == 1
    assert made.manifest.precision["int8"] > 0
    assert out.is_file()
    assert any("interrupted" in note for note in made.notes)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"to": "fp8", "profile": "t4"}, "`profile` t4 does not run fp8"),
        ({"to": "fp12"}, "`to` 'fp12' is unknown"),
        ({"to": "fp16", "other_nodes": "fp16"}, "`other_nodes` fp16"),
        ({"to": "int8", "other_nodes": "fp16", "runtime": "onnxruntime"}, "`other_nodes` fp16"),
        ({"to": "int8", "other_nodes": "fp64"}, "`other_nodes` 'fp64'"),
        ({"to": "int8", "max_drop": 0.0}, "`max_drop` must be"),
        ({"to": "int8", "max_drop": float("nan")}, "`max_drop` must be"),
    ],
    ids=str,
)
def test_contradictory_options_are_refused(
    model: Path, calib: Path, options: dict[str, object], reason: str
) -> None:
    before = sorted(model.parent.iterdir())
    with pytest.raises(dk.BadInput, match=reason):
        dk.quantize(model, calib=calib, **options)  # type: ignore[arg-type]
    assert sorted(model.parent.iterdir()) == before


@pytest.mark.parametrize("to", ["int8", "fp8", "auto"])
def test_int8_scales_need_calibration_data(model: Path, to: str) -> None:
    with pytest.raises(dk.BadInput, match=f"`calib` is missing: {to} needs calibration data"):
        dk.quantize(model, to)


@pytest.mark.parametrize("to", ["fp16", "bf16"])
def test_a_model_that_no_half_precision_can_reach_is_refused(
    to: str, model: Path, calib: Path, tmp_path: Path
) -> None:
    integers = dk.build(model, profile="cpu", precision="int8", calib=calib, max_drop=1.0).path
    with pytest.raises(dk.BadInput, match=r"no node of it would compute in b?float16"):
        dk.quantize(integers, to, out=tmp_path / "half.onnx")
    assert not (tmp_path / "half.onnx").exists()


def test_an_unknown_metric_is_refused(model: Path, data: Path) -> None:
    with pytest.raises(dk.BadInput, match="'f1' is not a metric"):
        dk.quantize(model, "fp16", data=data, metric="f1")


def test_the_model_is_not_overwritten(model: Path) -> None:
    with pytest.raises(dk.BadInput, match="is an input of this command"):
        dk.quantize(model, "fp16", model)


def test_inspect_shows_the_share_of_each_precision(model: Path, calib: Path) -> None:
    made = dk.quantize(model, "int8", calib=calib)
    mix = dk.inspect(made.path).details["mix"]
    assert mix["shares"]["flops"]["int8"] > 0.9
    assert mix["shares"]["weights"]["int8"] > 0.9
    assert mix["unknown"] == []


def test_compare_names_the_first_node_that_differs(tmp_path: Path) -> None:
    changed = mnist_like()
    (weights,) = (t for t in changed.graph.initializer if t.name == "w2")
    weights.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weights) * 1.1, "w2"))
    a = save(mnist_like(), tmp_path / "a.onnx")
    found = dk.compare(a, save(changed, tmp_path / "b.onnx"))
    assert found.divergence.node == "conv2"
    with pytest.raises(dk.GateFailed) as caught:
        found.raise_if_over()
    assert "'conv2'" in caught.value.hint


def test_equal_graphs_have_no_divergence(tmp_path: Path) -> None:
    path = save(linear(), tmp_path / "a.onnx")
    found = dk.compare(path, path)
    assert found.divergence is None
    found.raise_if_over()


def test_low_argmax_agreement_is_a_warning(tmp_path: Path) -> None:
    """Two outputs so close that rounding decides between them."""
    from onnx import helper

    node = helper.make_node("MatMul", ["x", "W"], ["y"], name="twins")
    random = np.random.default_rng(0)
    weights = random.standard_normal((64, 1), np.float32)
    twins = weights + random.standard_normal((64, 2), np.float32) * np.float32(3e-3)
    path = save(
        make([node], {"x": ("N", 64)}, {"y": ("N", 2)}, {"W": twins}), tmp_path / "twins.onnx"
    )
    data = tmp_path / "x.npz"
    np.savez(data, x=np.random.default_rng(1).standard_normal((200, 64)).astype(np.float32))
    made = dk.quantize(path, "int8", calib=data)
    assert made.evaluation.agreement.value < 0.9
    assert any("change their answer" in note for note in made.notes)


def test_auto_without_a_profile_tries_what_every_target_runs(
    model: Path, calib: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    made = dk.quantize(
        model,
        "auto",
        tmp_path / "everywhere.onnx",
        calib=calib,
        on_progress=lambda what, _: said.append(what),
    )
    assert made.search is not None
    assert {step.precision.partition("+")[0] for step in made.search.steps} <= {"int8", "fp16"}
    announced = "no `profile` was named: tried what every target runs (fp32, fp16, int8)"
    assert any(announced in text for text in said)
    assert any(announced in text for text in made.notes)
