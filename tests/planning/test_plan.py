from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import deploykit as dk
from deploykit.core.errors import BadInput, GateFailed, NotFound
from deploykit.core.profile import profile_names
from deploykit.planning.probe import store_calibration
from tests.support.calibrations import CALL_S, keep_round_calibration, round_calibration
from tests.support.graphs.data import samples
from tests.support.graphs.protos import calibrate, to_pairs
from tests.support.onnx_zoo import linear, make, mnist_like, save


@pytest.fixture(autouse=True)
def _round_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_round_calibration(tmp_path / "cache", monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(mnist_like(), tmp_path / "model.onnx")


@pytest.fixture
def sequence(tmp_path: Path) -> Path:
    """X float32[N,T,4] times a stored (4, 4)."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")]
    weights = {"w": np.ones((4, 4), np.float32)}
    shape = ("N", "T", 4)
    return save(make(nodes, {"x": shape}, {"y": shape}, weights), tmp_path / "sequence.onnx")


def test_every_profile_has_predictions(model: Path) -> None:
    found = dk.plan(model, batches=[1])
    assert [target.profile for target in found.targets] == profile_names()
    without = [target.profile for target in found.targets if not target.predictions]
    assert without == ["cpu-openvino"]  # the probe is of ONNX Runtime
    assert {target.profile for target in found.targets if target.checked} == {"cpu"}
    assert any("not yet checked" in note for note in found.notes)
    json.dumps(found.to_dict(), allow_nan=False)


def test_every_precision_at_every_batch(model: Path) -> None:
    (target,) = dk.plan(model, profiles=["l4"], batches=[1, 8, 8]).targets
    asked = [(each.precision, each.batch) for each in target.predictions]
    assert asked == [(p, b) for p in ("fp32", "fp16", "bf16", "fp8", "int8") for b in (1, 8)]


def test_the_probe_runs_once_and_is_kept(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the kept one, and without a profile that needs it, nothing is measured."""
    from deploykit.planning import probe

    def fail(*_args: object, **_more: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(probe, "measure_cpu", fail)
    dk.plan(model, profiles=["cpu"])
    monkeypatch.setenv("DEPLOYKIT_CACHE", str(tmp_path / "other"))
    dk.plan(model, profiles=["l4"])
    with pytest.raises(AssertionError, match="measured"):
        dk.plan(model, profiles=["cpu"])


@pytest.mark.parametrize(("again", "kept"), [(3.0, 2.0), (1.5, 1.5), (1.0, 1.0)])
def test_a_doubtful_probe_is_noted_and_measured_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: float, kept: float
) -> None:
    from deploykit.planning import probe

    quiet = keep_round_calibration(tmp_path / "cache", monkeypatch)
    store_calibration(replace(quiet, spread=2.0))
    monkeypatch.setattr(probe, "measure_cpu", lambda *_, **__: replace(quiet, spread=again))
    notes = dk.plan(model, profiles=["cpu"]).notes
    assert ["calls took" in note for note in notes] == [True] * (kept > 1)
    calibration, _ = probe.cpu_calibration(only_kept=True)
    assert calibration is not None
    assert calibration.spread == kept


def test_an_axis_takes_its_size_and_one_without_is_reported_as_1(sequence: Path) -> None:
    one = dk.plan(sequence, profiles=["l4"])
    assert one.axes == {"T": 1}
    assert "axis T is taken as 1" in one.notes[0]
    many = dk.plan(sequence, profiles=["l4"], axes={"T": 128})
    assert not any("axis T" in note for note in many.notes)
    assert many.flops == 128 * one.flops


def test_sizes_come_from_data_and_from_what_the_model_takes(tmp_path: Path) -> None:
    """An audio front end that takes 65 samples or more."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[N,T] x) => (float[N,L] y) <int64[4] pads = {0, 64, 0, 64}> {
            p = Pad<mode = "reflect">(x, pads) y = Relu(p) }""")
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.zeros((8, 512), np.float32))
    given = dk.plan(tmp_path / "m.onnx", profiles=["l4"], data=tmp_path / "d.npz")
    assert given.axes == {"T": 512}
    found = dk.plan(tmp_path / "m.onnx", profiles=["l4"])
    assert found.axes == {"T": 80}
    assert found.notes[0].startswith("axis T is taken as 80, at which the model runs")


def test_a_batch_axis_of_any_name(tmp_path: Path) -> None:
    shape = ("batch_size", 4)
    nodes = [helper.make_node("Relu", ["x"], ["y"], name="relu")]
    path = save(make(nodes, {"x": shape}, {"y": shape}, {}), tmp_path / "m.onnx")
    found = dk.plan(path, profiles=["l4"], batches=[2, 4])
    assert (found.batches, found.flops, found.notes[:-1]) == ((2, 4), 8, ())


def test_a_fixed_batch_is_the_only_one(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"], name="relu")]
    path = save(make(nodes, {"x": (3, 4)}, {"y": (3, 4)}, {}), tmp_path / "m.onnx")
    assert dk.plan(path, profiles=["l4"]).batches == (3,)


def test_of_those_that_meet_the_latency_the_one_with_most_throughput(model: Path) -> None:
    (target,) = dk.plan(model, profiles=["l4"], batches=[1, 8, 4096], slo_ms=1.0).targets
    meet = [each for each in target.predictions if each.latency_ms <= 1.0]
    assert 0 < len(meet) < len(target.predictions)
    assert target.best in meet
    assert target.best.throughput_per_s == max(each.throughput_per_s or 0 for each in meet)


def test_a_latency_that_no_target_meets_fails_after_the_answer(model: Path) -> None:
    dk.plan(model, profiles=["cpu"], slo_ms=1e6).raise_if_none_meets()
    found = dk.plan(model, profiles=["cpu", "l4"], slo_ms=1e-6)
    with pytest.raises(GateFailed, match="no target is predicted to answer within") as failed:
        found.raise_if_none_meets()
    assert failed.value.result is found


def test_a_rate_is_carried_by_replicas(model: Path) -> None:
    (cpu,) = dk.plan(model, profiles=["cpu"], slo_ms=50, rate_per_s=1e6).targets
    load = cpu.capacity
    assert load is not None
    assert load.replicas is not None
    assert load.replicas > 1
    assert load.p99_ms is not None
    assert load.p99_ms <= 50


def test_batches_that_are_too_slow_are_not_queued_for(model: Path) -> None:
    (cpu,) = dk.plan(
        model, profiles=["cpu"], batches=[1, 1 << 12], slo_ms=5, rate_per_s=100
    ).targets
    assert cpu.capacity is not None
    assert cpu.capacity.max_batch == 1


def test_requests_of_a_fixed_batch_are_never_joined(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"], name="relu")]
    path = save(make(nodes, {"x": (3, 4)}, {"y": (3, 4)}, {}), tmp_path / "m.onnx")
    (cpu,) = dk.plan(path, profiles=["cpu"], slo_ms=50, rate_per_s=100).targets
    assert cpu.capacity is not None
    assert cpu.capacity.max_batch == 1


def test_a_lone_request_is_a_batch_of_one_whatever_batches_are_shown(model: Path) -> None:
    """Of 4096 alone, a call is later than the bound; one request is not."""
    (cpu,) = dk.plan(model, profiles=["cpu"], batches=[4096], slo_ms=5, rate_per_s=100).targets
    assert [each.batch for each in cpu.predictions] == [4096] * len(cpu.predictions)
    assert cpu.best is None
    assert cpu.capacity is not None
    assert (cpu.capacity.replicas, cpu.capacity.max_batch) == (1, 1)


def test_a_graph_in_a_precision_that_the_target_lacks_has_no_prediction(tmp_path: Path) -> None:
    shape = ("N", 4)
    half = make(
        [
            helper.make_node("Cast", ["x"], ["h"], name="in", to=TensorProto.BFLOAT16),
            helper.make_node("Exp", ["h"], ["e"], name="exp"),
            helper.make_node("Cast", ["e"], ["y"], name="out", to=TensorProto.FLOAT),
        ],
        {"x": shape},
        {"y": shape},
        {},
    )
    path = save(half, tmp_path / "half.onnx")
    t4, a10 = dk.plan(path, profiles=["t4", "a10"], batches=[1]).targets
    assert t4.predictions == ()
    assert t4.why == "it does not run bf16 natively, and the graph is in bf16"
    assert [each.precision for each in a10.predictions] == ["bf16"]


def test_operators_without_a_formula_are_named_and_count_by_their_bytes(tmp_path: Path) -> None:
    nodes = [helper.make_node("NonZero", ["x"], ["y"], name="places")]
    model = make(nodes, {"x": ("N", 4)}, {"y": (2, "M")}, {}, integers=("y",))
    found = dk.plan(save(model, tmp_path / "m.onnx"), profiles=["l4"])
    assert found.unknown == ("NonZero",)
    notes = " ".join(found.notes)
    assert "no formula for NonZero" in notes
    assert "sizes of 1 node depend" in notes


def test_external_weights_are_not_read(tmp_path: Path) -> None:
    """4 GiB of weights, of which the file system holds no byte."""
    width = 1 << 15
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[width, width])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": "w.bin", "offset": "0", "length": str(4 * width**2)}.items():
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ("N", width)) for n in "xy")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")]
    graph = helper.make_graph(nodes, "g", [x], [y], [tensor])
    save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10),
        tmp_path / "m.onnx",
    )
    with (tmp_path / "w.bin").open("wb") as handle:
        handle.truncate(4 * width**2)
    nano, options = ["jetson-orin-nano-4gb"], {"slo_ms": 1e6, "rate_per_s": 1.0}
    found = dk.plan(tmp_path / "m.onnx", profiles=nano, batches=[1], **options)
    assert found.weight_bytes == 4 << 30
    (target,) = found.targets
    assert [each.fits for each in target.predictions] == [False, False, False, False]
    assert target.capacity is not None
    assert (target.capacity.replicas, target.capacity.why) == (
        None,
        "it does not fit into the memory",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slo_ms": float("nan")}, "`slo_ms` must be 1e-09 to 1e+15, got nan"),
        ({"slo_ms": 0.0}, "`slo_ms`"),
        ({"rate_per_s": 5.0}, "`rate_per_s` needs the latency"),
        ({"slo_ms": 5.0, "rate_per_s": float("inf")}, "`rate_per_s` must be"),
        ({"slo_ms": 5.0, "rate_per_s": 1e300}, "`rate_per_s` must be 1e-09 to 1e+15, got 1e+300"),
        ({"slo_ms": 1e-300}, "`slo_ms` must be 1e-09 to 1e+15"),
        ({"batches": []}, "`batches` must be"),
        ({"batches": [1 << 40]}, "`batches` must be"),
        ({"axes": {"D": 4}}, "no dynamic axis 'D'; it has: T"),
        ({"axes": {"N": 4}}, "no dynamic axis 'N'"),
        ({"axes": {"T": 0}}, "`axes` T=0: must be 1 or more"),
        ({"axes": {"T": 1 << 40}}, "must be 1 or more, and fit into 31 bits"),
    ],
)
def test_options_out_of_range_are_bad_input(
    sequence: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(BadInput, match=re.escape(message)):
        dk.plan(sequence, profiles=["l4"], **options)  # type: ignore[arg-type]


def test_other_files_and_profiles_are_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(NotFound, match="no profile 'l44'"):
        dk.plan(model, profiles=["l44"])
    engine = tmp_path / "m.trt"
    engine.write_bytes(b"ftrt" + bytes(100))
    with pytest.raises(BadInput, match="is a TensorRT engine, an ONNX file is needed"):
        dk.plan(engine)


def test_a_graph_without_nodes_and_axes_of_size_zero_take_a_call(tmp_path: Path) -> None:
    shape = ("N", 0)
    nodes = [helper.make_node("Relu", ["x"], ["y"], name="relu")]
    path = save(make(nodes, {"x": shape}, {"y": shape}, {}), tmp_path / "m.onnx")
    cpu, l4 = dk.plan(path, profiles=["cpu", "l4"], batches=[1]).targets
    assert cpu.predictions[0].latency_ms == pytest.approx(CALL_S * 1e3)
    assert l4.predictions[0].compute_ms == 0
    json.dumps(l4.to_dict(), allow_nan=False)


def test_without_any_prediction_no_latency_is_missed(model: Path) -> None:
    found = dk.plan(model, profiles=["cpu-openvino"], slo_ms=1e6, rate_per_s=10)
    assert found.targets[0].capacity is None
    with pytest.raises(GateFailed, match="nothing is predicted, on no target"):
        found.raise_if_none_meets()


def test_where_the_server_is_the_limit_it_says_so(model: Path) -> None:
    (l4,) = dk.plan(model, profiles=["l4"], slo_ms=50, rate_per_s=1e6).targets
    assert l4.capacity is not None
    assert l4.capacity.server_busy == pytest.approx(1, abs=0.05)
    assert l4.best is not None
    assert (l4.best.throughput_per_s or 0) > 2 * (l4.capacity.rate_each_per_s or 0)


def test_linear_counts(tmp_path: Path) -> None:
    found = dk.plan(save(linear(), tmp_path / "m.onnx"), profiles=["l4"], batches=[1])
    assert (found.flops, found.parameters, found.weight_bytes) == (24, 15, 60)
    assert [node.name for node in found.nodes] == ["gemm"]


@pytest.mark.parametrize(("gain", "told"), [(4.0, True), (1.2, False)])
def test_precisions_that_predictions_cannot_tell_apart_are_named(
    gain: float, told: bool, tmp_path: Path
) -> None:
    """A product so large that all else is nothing, `gain` times as fast in INT8."""
    weights = {"w": np.ones((512, 512), np.float32)}
    product = helper.make_node("MatMul", ["x", "w"], ["y"])
    shape = (1024, 512)
    path = save(make([product], {"x": shape}, {"y": shape}, weights), tmp_path / "m.onnx")
    found = round_calibration()
    slow = found.curves["fp32 matrix product"]
    fast = replace(slow, seconds=tuple(each / gain for each in slow.seconds))
    curves = {**found.curves, "int8 matrix product": fast}
    assert store_calibration(replace(found, curves=curves)) == []
    notes = dk.plan(path, profiles=["cpu", "l4"]).notes
    named = [each for each in notes if "int8 at batch 1024 may be faster or slower" in each]
    assert len(named) == (not told)


def test_int8_placed_for_tensorrt_is_predicted_as_the_cpu_runs_it(tmp_path: Path) -> None:
    path = save(mnist_like(), tmp_path / "m.onnx")
    ranges, latency = calibrate(path, samples(mnist_like())), {}
    for runtime, noted in (("tensorrt", True), ("onnxruntime", False)):
        pairs = save(to_pairs(mnist_like(), ranges, runtime=runtime), tmp_path / f"{runtime}.onnx")
        found = dk.plan(pairs, profiles=["cpu"], batches=[8])
        assert any("INT8 nodes of this file in float32" in note for note in found.notes) == noted
        latency[runtime] = found.targets[0].predictions[0].latency_ms
    float32 = dk.plan(path, profiles=["cpu"], batches=[8]).targets[0].predictions[0].latency_ms
    assert latency["tensorrt"] > float32 > latency["onnxruntime"]
