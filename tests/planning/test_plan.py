"""What a model takes on a target: the probe of this machine, each prediction, and the plan."""

from __future__ import annotations

import heapq
import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import deploykit as dk
from deploykit.core.errors import BadInput, GateFailed, NotFound
from deploykit.core.machine import default_threads, this_machine
from deploykit.core.profile import load_profile, profile_names
from deploykit.graph import cost as kinds
from deploykit.graph.cost import COMPUTE, LAUNCH, MEMORY, NodeCost
from deploykit.graph.graph import Graph
from deploykit.planning import probe
from deploykit.planning.plan import QUEUE, ReplicaModel, capacity, latencies_s, p99_s
from deploykit.planning.predict import (
    COPIES,
    COPY_S,
    LAUNCH_S,
    LINK_BYTES_PER_S,
    REACHED,
    Inferred,
    Prediction,
    Target,
    in_precision,
    infer,
    predict_call,
    target_of,
)
from deploykit.planning.probe import CpuCalibration, cpu_calibration, measure_cpu, store_calibration
from deploykit.serving.batching.queue import BatchPolicy, Pending, RequestQueue
from deploykit.serving.options import ServeOptions
from tests.support.calibrations import (
    BYTES_PER_S,
    CALL_S,
    OPS_PER_S,
    keep_round_calibration,
    round_calibration,
)
from tests.support.calibrations import LAUNCH_S as NODE_S
from tests.support.graphs.data import samples
from tests.support.graphs.protos import calibrate, to_pairs
from tests.support.onnx_zoo import make, mnist_like, save


@pytest.fixture(autouse=True)
def _round_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_round_calibration(tmp_path / "cache", monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(mnist_like(), tmp_path / "model.onnx")


@pytest.fixture
def sequence(tmp_path: Path) -> Path:
    """X float32[N,T,4] times a stored (4, 4)."""
    return saved(tmp_path, "MatMul", ("N", "T", 4), weights=np.ones((4, 4), np.float32))


def saved(folder: Path, op: str, *shapes: Any, weights: np.ndarray | None = None) -> Path:
    """A file of one node; the shapes of its input and output, where they differ."""
    stored = {} if weights is None else {"w": weights}
    nodes = [helper.make_node(op, ["x", *stored], ["y"], name="node")]
    integers = ("y",) if op == "NonZero" else ()
    graph = make(nodes, {"x": shapes[0]}, {"y": shapes[-1]}, stored, integers=integers)
    return save(graph, folder / "m.onnx")


def on(profile: str, path: Path, **options: Any) -> Any:
    (target,) = dk.plan(path, profiles=[profile], **options).targets
    return target


def test_every_profile_has_predictions(model: Path) -> None:
    found = dk.plan(model, batches=[1])
    assert [target.profile for target in found.targets] == profile_names()
    without = [target.profile for target in found.targets if not target.predictions]
    assert without == ["cpu-openvino"]  # the probe is of ONNX Runtime
    assert {target.profile for target in found.targets if target.checked} == {"cpu"}
    assert any("not yet checked" in note for note in found.notes)
    json.dumps(found.to_dict(), allow_nan=False)
    l4 = on("l4", model, batches=[1, 8, 8]).predictions
    kinds = ("fp32", "fp16", "bf16", "fp8", "int8")
    assert [(each.precision, each.batch) for each in l4] == [(p, b) for p in kinds for b in (1, 8)]
    assert {each.precision for each in on("v100", model).predictions} == {"fp32", "fp16"}


def test_the_probe_runs_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kept one, and without a profile that needs it, nothing is measured."""

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
    quiet = keep_round_calibration(tmp_path / "cache", monkeypatch)
    store_calibration(replace(quiet, spread=2.0))
    monkeypatch.setattr(probe, "measure_cpu", lambda *_, **__: replace(quiet, spread=again))
    assert "calls took 2.0 times their least" in replace(quiet, spread=2.0).doubt
    notes = dk.plan(model, profiles=["cpu"]).notes
    assert sum("calls took" in note for note in notes) == (kept > 1)
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


def test_sizes_come_from_what_the_model_takes(tmp_path: Path) -> None:
    """An audio front end that takes 65 samples or more."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[N,T] x) => (float[N,L] y) <int64[4] pads = {0, 64, 0, 64}> {
            p = Pad<mode = "reflect">(x, pads) y = Relu(p) }""")
    onnx.save(model, tmp_path / "m.onnx")
    found = dk.plan(tmp_path / "m.onnx", profiles=["l4"])
    assert found.axes == {"T": 80}
    assert found.notes[0].startswith("axis T is taken as 80, at which the model runs")


def test_batches_are_those_of_the_model(tmp_path: Path) -> None:
    found = dk.plan(saved(tmp_path, "Relu", ("size", 4)), profiles=["l4"], batches=[2, 4])
    assert (found.batches, found.flops, found.notes[:-1]) == ((2, 4), 8, ())
    path = saved(tmp_path, "Relu", (3, 4))
    assert dk.plan(path, profiles=["l4"]).batches == (3,)
    load = on("cpu", path, slo_ms=50, rate_per_s=100).capacity
    assert load.max_batch == 1  # a fixed batch is never joined


def test_of_those_that_meet_the_latency_the_one_with_most_throughput(model: Path) -> None:
    target = on("l4", model, batches=[1, 8, 4096], slo_ms=1.0)
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
    load = on("cpu", model, slo_ms=50, rate_per_s=1e6).capacity
    assert (load.replicas - 1) * load.rate_each_per_s < 1e6 <= load.replicas * load.rate_each_per_s
    assert load.p99_ms <= 50
    l4 = on("l4", model, slo_ms=50, rate_per_s=1e6)
    assert l4.capacity.server_busy == pytest.approx(1, abs=0.05)
    assert l4.best.throughput_per_s > 2 * l4.capacity.rate_each_per_s


def test_a_batch_that_is_too_slow_is_not_queued_for(model: Path) -> None:
    """Of 4096 alone, a call is later than the bound; one request is not."""
    cpu = on("cpu", model, batches=[4096], slo_ms=5, rate_per_s=100)
    assert {each.batch for each in cpu.predictions} == {4096}
    assert cpu.best is None
    assert (cpu.capacity.replicas, cpu.capacity.max_batch) == (1, 1)


def test_a_graph_in_a_precision_that_the_target_lacks_has_no_prediction(tmp_path: Path) -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 18]>
        g (float[N,4] x) => (float[N,4] y) {
            h = Cast<to = 16>(x) e = Exp(h) y = Cast<to = 1>(e) }""")
    path = save(model, tmp_path / "half.onnx")
    t4, a10 = (on(name, path, batches=[1]) for name in ("t4", "a10"))
    assert t4.predictions == ()
    assert t4.why == "it does not run bf16 natively, and the graph is in bf16"
    assert [each.precision for each in a10.predictions] == ["bf16"]


def test_operators_without_a_formula_are_named_and_count_by_their_bytes(tmp_path: Path) -> None:
    found = dk.plan(saved(tmp_path, "NonZero", ("N", 4), (2, "M")), profiles=["l4"])
    assert found.unknown == ("NonZero",)
    notes = " ".join(found.notes)
    assert "no formula for NonZero" in notes
    assert "sizes of 1 node depend" in notes


def test_external_weights_are_not_read(tmp_path: Path) -> None:
    """4 GiB of weights, of which the file system holds no byte."""
    width = 1 << 15
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 18]>
        g (float[N,{width}] x) => (float[N,{width}] y) {{ y = MatMul(x, w) }}""")
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[width, width])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": "w.bin", "offset": "0", "length": str(4 * width**2)}.items():
        tensor.external_data.add(key=key, value=value)
    model.graph.initializer.append(tensor)
    path = save(model, tmp_path / "m.onnx")
    with (tmp_path / "w.bin").open("wb") as handle:
        handle.truncate(4 * width**2)
    found = dk.plan(
        path, profiles=["jetson-orin-nano-4gb"], batches=[1], slo_ms=1e6, rate_per_s=1.0
    )
    assert found.weight_bytes == 4 << 30
    (target,) = found.targets
    assert [each.fits for each in target.predictions] == [False] * 4
    load = target.capacity
    assert (load.replicas, load.why) == (None, "it does not fit into the memory")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slo_ms": float("nan")}, "`slo_ms` must be 1e-09 to 1e+15, got nan"),
        ({"rate_per_s": 5.0}, "`rate_per_s` needs the latency"),
        ({"slo_ms": 5.0, "rate_per_s": 1e300}, "`rate_per_s` must be 1e-09 to 1e+15, got 1e+300"),
        ({"batches": []}, "`batches` must be"),
        ({"batches": [1 << 40]}, "`batches` must be"),
        ({"axes": {"D": 4}}, "no dynamic axis 'D'; it has: T"),
        ({"axes": {"T": 0}}, "`axes` T=0: must be 1 or more"),
        ({"profiles": ["l44"]}, "no profile 'l44'"),
    ],
    ids=str,
)
def test_bad_options_are_refused(sequence: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises((BadInput, NotFound), match=re.escape(message)):
        dk.plan(sequence, **{"profiles": ["l4"], **options})
    (sequence.parent / "m.trt").write_bytes(b"ftrt" + bytes(100))
    with pytest.raises(BadInput, match="is a TensorRT engine, an ONNX file is needed"):
        dk.plan(sequence.parent / "m.trt")


def test_without_any_prediction_no_latency_is_missed(model: Path) -> None:
    found = dk.plan(model, profiles=["cpu-openvino"], slo_ms=1e6, rate_per_s=10)
    assert found.targets[0].capacity is None
    with pytest.raises(GateFailed, match="nothing is predicted, on no target"):
        found.raise_if_none_meets()


def test_int8_placed_for_tensorrt_is_predicted_as_the_cpu_runs_it(tmp_path: Path) -> None:
    path = save(mnist_like(), tmp_path / "m.onnx")
    ranges, latency = calibrate(path, samples(mnist_like())), {}
    for runtime in ("tensorrt", "onnxruntime"):
        pairs = save(to_pairs(mnist_like(), ranges, runtime=runtime), tmp_path / f"{runtime}.onnx")
        found = dk.plan(pairs, profiles=["cpu"], batches=[8])
        latency[runtime] = found.targets[0].predictions[0].latency_ms
    float32 = dk.plan(path, profiles=["cpu"], batches=[8]).targets[0].predictions[0].latency_ms
    assert latency["tensorrt"] > float32 > latency["onnxruntime"]


def target(name: str, **changes: object) -> Target:
    calibration = round_calibration() if name == "cpu" else None
    found = target_of(replace(load_profile(name), **changes), calibration)  # type: ignore[arg-type]
    assert isinstance(found, Target)
    return found


def product(rows: int, width: int) -> Inferred:
    """One product of (rows, width) by stored weights (width, width)."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")]
    weights = {"w": np.ones((width, width), np.float32)}
    model = make(nodes, {"x": ("N", width)}, {"y": ("N", width)}, weights)
    return infer(Graph(model), rows, {"N": rows})


def predicted(rows: int, width: int, name: str, precision: str = "fp32") -> Prediction:
    return predict_call(product(rows, width), target(name), precision)


def test_on_the_cpu_a_product_takes_its_operations_or_its_weights_at_the_measured_rate() -> None:
    found = predicted(512, 512, "cpu")
    seconds = CALL_S + 2 * 512**3 / OPS_PER_S
    assert found.latency_ms == pytest.approx(seconds * 1e3)
    assert found.throughput_per_s == pytest.approx(512 / seconds)
    assert (found.limit, found.joules) == (COMPUTE, None)
    int8 = predicted(512, 512, "cpu", "int8")
    assert int8.weight_bytes == found.weight_bytes / 4
    assert int8.latency_ms < found.latency_ms / 2
    row = predicted(1, 1024, "cpu")
    assert row.latency_ms == pytest.approx((CALL_S + NODE_S + 4 * 1024**2 / BYTES_PER_S) * 1e3)
    assert (row.limit, row.latency_ms) == (MEMORY, row.compute_ms)


@pytest.mark.parametrize(
    ("name", "precision", "kind", "dtype", "read"),
    [
        ("l4", "int8", kinds.CONVOLUTION, "int8", 25),
        ("l4", "int8", kinds.NORMALISATION, "float16", 50),
        ("cpu", "int8", kinds.NORMALISATION, "float32", 100),
        ("l4", "fp16", kinds.NORMALISATION, "float16", 50),
    ],
)
def test_what_a_conversion_makes_of_a_node(
    name: str, precision: str, kind: str, dtype: str, read: int
) -> None:
    before = NodeCost("n", "Conv", "float32", 1000, 100, 40, 100, kind=kind)
    after = in_precision(before, precision, "fp32", target(name))
    assert (after.precision, after.read_bytes, after.flops) == (dtype, read, 1000)
    assert in_precision(before, precision, "int8", target(name)) == before  # as it is


def test_on_a_gpu_the_longer_of_arithmetic_and_traffic_after_the_launch() -> None:
    l4, found = target("l4"), predicted(1024, 1024, "l4", "fp16")
    moved_s = 2 * 3 * 1024**2 / (l4.profile.bandwidth_bytes_per_s * REACHED)
    seconds = LAUNCH_S + max(2 * 1024**3 / (l4.profile.peak_ops_per_s["fp16"] * REACHED), moved_s)
    assert found.compute_ms == pytest.approx(seconds * 1e3)
    assert found.shares[LAUNCH] == pytest.approx(LAUNCH_S * 1e3 / found.latency_ms)
    assert found.joules == pytest.approx(72 * found.latency_ms / 1e3 / 1024)  # at most its limit
    tf32 = predicted(1024, 1024, "a100-80gb")
    assert tf32.compute_ms == pytest.approx((LAUNCH_S + 2 * 1024**3 / (156e12 * REACHED)) * 1e3)


def test_a_call_on_a_gpu_has_its_copies_and_a_small_one_little_else() -> None:
    found = predicted(1, 32, "l4", "fp16")
    copies = 2 * COPY_S + 2 * 32 * 4 / (LINK_BYTES_PER_S * REACHED)
    assert found.latency_ms - found.compute_ms == pytest.approx(copies * 1e3)
    assert found.limit == COPIES
    nano = target("jetson-orin-nano-8gb")  # whose memory is shared
    seconds = 2 * COPY_S + 10**9 / (nano.profile.bandwidth_bytes_per_s * REACHED)
    assert nano.copies_s([10**9, 0]) == pytest.approx(seconds)


def test_a_power_mode_lowers_the_peaks_by_its_clock_and_multiprocessors() -> None:
    full, slow = (target(f"jetson-orin-nano-8gb@{mode}") for mode in ("MAXN_SUPER", "7W"))
    ratio = slow.ceilings(0).ops_per_s["int8"] / full.ceilings(0).ops_per_s["int8"]
    assert ratio == pytest.approx(408 / 1020.5 / 2, rel=1e-3)  # 408 MHz, 4 of 8
    assert slow.power_w == 7


def test_memory_is_weights_and_activations_and_what_does_not_fit_is_named() -> None:
    inferred = product(1024, 1024)
    found = predict_call(inferred, target("l4"), "fp32")
    assert (found.weight_bytes, found.activation_bytes, found.fits) == (4 << 20, 8 << 20, True)
    assert predict_call(inferred, target("l4"), "fp16").activation_bytes == 4 << 20
    small = target("l4", memory_bytes=11 << 20, workspace_bytes=1)
    assert predict_call(inferred, small, "fp32").fits is False
    assert predict_call(inferred, small, "fp16").fits is True
    assert predict_call(inferred, target("l4", memory_bytes=None), "fp32").fits is None


def test_a_profile_without_peaks_is_no_target() -> None:
    bare = replace(load_profile("l4"), peak_ops_per_s={}, bandwidth_bytes_per_s=None)
    assert target_of(bare, None) == (
        "the profile has no peak_ops_per_s.fp32 and no bandwidth_bytes_per_s"
    )


def test_sizes_that_leave_tensor_cores_idle_are_named_with_their_share(tmp_path: Path) -> None:
    weights = {"a": np.ones((16, 12), np.float32), "b": np.ones((12, 8), np.float32)}
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["t"], name="odd"),
        helper.make_node("MatMul", ["t", "b"], ["y"], name="odder"),
    ]
    path = save(make(nodes, {"x": ("N", 16)}, {"y": ("N", 8)}, weights), tmp_path / "m.onnx")
    first, second = [n for n in dk.plan(path, profiles=["l4"]).notes if n.startswith("hint:")]
    assert "odd (MatMul, 67% of the operations) has a size of 12: Tensor Cores want" in first
    assert "odder (" in second
    assert not any("hint:" in note for note in dk.plan(path, profiles=["cpu"]).notes)


def test_a_probe_measures_every_kind_below_its_ceilings() -> None:
    measured = measure_cpu(threads=1, budget_s=0.0)
    fp32 = {f"fp32 {kind}" for kind in kinds.KINDS if kind != kinds.OTHER}
    assert fp32 < set(measured.curves)
    assert {"int8 convolution", "int8 matrix product"} < set(measured.curves)
    assert (measured.cpu, measured.threads) == (this_machine().cpu, 1)
    assert measured.runtime.startswith("onnxruntime ")
    for name, curve in (*measured.curves.items(), ("stream", measured.stream)):
        assert list(curve.seconds) == sorted(curve.seconds)  # more work never takes less time
        assert list(curve.work) == sorted(set(curve.work))
        assert min(curve.seconds) > 0
        precision, _, kind = name.partition(" ")
        if kind in kinds.ARITHMETIC and kind != kinds.RECURRENT:
            points = zip(curve.work, curve.seconds, strict=True)
            rates = [work / (seconds + measured.call_s) for work, seconds in points]
            assert max(rates) <= measured.ops_per_s[precision]
    assert measured.spread >= 1
    assert 0 < measured.bytes_per_s <= measured.cache_bytes_per_s


def test_a_point_that_other_work_disturbed_takes_no_longer_than_more_work() -> None:
    assert probe._curve({4.0: 8.0, 1.0: 5.0, 2.0: 3.0}) == kinds.Curve((1, 2, 4), (3, 3, 8))


def kept(threads: int | None = None) -> CpuCalibration | None:
    found, _ = cpu_calibration(threads=threads, only_kept=True)
    return found


def test_a_calibration_is_kept_for_the_same_cpu_threads_and_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = keep_round_calibration(tmp_path, monkeypatch)
    assert kept() == found
    assert kept(threads=found.threads + 1) is None
    for other in ({"cpu": "another"}, {"runtime": "onnxruntime 0.1"}, {"version": 0}):
        store_calibration(replace(found, **other))  # type: ignore[arg-type]
        assert kept() is None
    for damaged in ("", "[]", '{"version": 1}'):
        (tmp_path / f"cpu-calibration-{default_threads()}.json").write_text(damaged)
        assert kept() is None


def test_an_unwritable_cache_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DEPLOYKIT_CACHE", str(tmp_path / "file"))
    (note,) = store_calibration(round_calibration())
    assert note.startswith("the calibration is measured again next time: ")


SERVICE_S = 0.01
GROWING = tuple(0.004 + 0.002 * size for size in range(1, 9))


class Event:
    """Servers with their real queues, and the clock as a heap of events; none of the model's code.

    Each arrival goes to the replica named in `to`.
    """

    def __init__(self, replica: ReplicaModel, replicas: int) -> None:
        policy = BatchPolicy(max_batch=len(replica.service_s), queue=replica.queue)
        self.replica, self.queues = replica, [RequestQueue(policy) for _ in range(replicas)]
        self.busy = [False] * replicas
        self.server_s = [0.0] * replicas
        self.taken_s: dict[int, float] = {}
        self.heap: list[tuple[float, int, int, str, int]] = []
        self.order = itertools.count()

    def run(self, arrivals_s: Sequence[float], to: Sequence[int]) -> list[float]:
        for number, at_s in enumerate(arrivals_s):
            self._push(at_s, 0, "arrives", number)
        while self.heap:
            now_s, _, _, what, number = heapq.heappop(self.heap)
            if what == "arrives":
                queue = self.queues[to[number]]
                ns = int(now_s * 1e9)
                request = Pending({}, 1, (), lambda _: None, ns, 1 << 62, 1 << 62, decode_us=number)
                if queue.add(request) is None:
                    self.taken_s[number] = math.inf
                self._push(now_s, 2, "looks", to[number])
            elif what == "ends":
                self.busy[number] = False
                self._push(now_s, 2, "looks", number)
            elif not self.busy[number] and (batch := self.queues[number].take(int(now_s * 1e9))):
                self._start(now_s, number, [request.decode_us for request in batch], arrivals_s)
        return [self.taken_s[number] for number in range(len(arrivals_s))]

    def _start(
        self, now_s: float, server: int, batch: Sequence[int], arrivals_s: Sequence[float]
    ) -> None:
        """Answers are written after the engine, by a thread that may have others to write."""
        replica = self.replica
        engine_s = now_s + replica.service_s[len(batch) - 1]
        ready_s = max(self.server_s[server], engine_s) + len(batch) * replica.request_s
        self.server_s[server], self.busy[server] = ready_s, True
        for number in batch:
            self.taken_s[number] = ready_s - arrivals_s[number]
        self._push(engine_s if replica.overlaps else ready_s, 1, "ends", server)

    def _push(self, at_s: float, rank: int, what: str, number: int) -> None:
        """At one time arrivals come first: an engine that is free takes all that is there."""
        heapq.heappush(self.heap, (at_s, rank, next(self.order), what, number))


def poisson(rate_per_s: float, count: int, seed: int = 1) -> list[float]:
    gaps = np.random.default_rng(seed).exponential(1 / rate_per_s, count)
    return [float(each) for each in np.cumsum(gaps)]


@pytest.mark.parametrize(
    "replica",
    [
        ReplicaModel((SERVICE_S,)),
        ReplicaModel(GROWING),
        ReplicaModel(GROWING, 1e-3),
        ReplicaModel(GROWING, 1e-3, overlaps=True),
        ReplicaModel(GROWING, 1e-3, overlaps=True, queue=12),
        ReplicaModel((SERVICE_S, SERVICE_S), queue=3),
    ],
    ids=["single", "batches", "own time", "overlaps", "overlaps, short queue", "short queue"],
)
@pytest.mark.parametrize("load", [0.5, 0.95, 1.3])
def test_requests_wait_as_in_the_server_s_own_queue(replica: ReplicaModel, load: float) -> None:
    arrivals_s = poisson(load * replica.most_per_s, 1000)
    expected = Event(replica, 1).run(arrivals_s, [0] * len(arrivals_s))
    assert latencies_s(arrivals_s, replica) == pytest.approx(expected)
    if replica.queue < 20 and load > 1:
        assert math.inf in expected


def test_two_replicas_behind_a_random_spread_hold_the_bound_at_twice_the_rate() -> None:
    bound_s = 0.06
    found = capacity(1.0, bound_s, dict(enumerate(GROWING, start=1)), request_s=1e-3)
    assert found.rate_each_per_s is not None
    replica = ReplicaModel(GROWING[: found.max_batch], 1e-3)
    for share, holds in ((0.9, True), (1.1, False)):
        arrivals_s = poisson(2 * share * found.rate_each_per_s, 20_000)
        to = np.random.default_rng(2).integers(2, size=len(arrivals_s)).tolist()
        taken_s = Event(replica, 2).run(arrivals_s, to)
        assert (float(np.quantile(taken_s, 0.99)) <= bound_s) is holds


def test_a_bound_near_the_service_time_leaves_no_room_for_a_queue() -> None:
    assert p99_s(1e-3, ReplicaModel((SERVICE_S,))) == pytest.approx(SERVICE_S)
    found = capacity(10, SERVICE_S * 1.0000001, {1: SERVICE_S})
    assert found.replicas is None or found.rate_each_per_s < 2
    late = capacity(1, 0.01, {1: 0.00995}, request_s=1e-4)
    assert (late.replicas, late.why) == (None, "a request alone takes 10.1 ms")


def test_the_largest_batch_is_the_one_that_carries_most() -> None:
    service_s = {1: 0.001, 8: 0.004, 32: 0.04}
    assert capacity(1, 0.05, service_s).max_batch == 8
    assert capacity(1, 0.05, service_s | {32: 0.01}).max_batch == 32
    assert capacity(1, 0.005, service_s | {32: 0.01}).max_batch == 8  # 32 are too late at once


def test_the_server_s_own_time_bounds_a_fast_engine() -> None:
    for overlaps, rate in ((False, 1 / 1.01e-4), (True, 1e4)):
        found = capacity(1, 0.01, {1: 1e-6}, request_s=1e-4, overlaps=overlaps)
        assert found.rate_each_per_s == pytest.approx(rate, rel=0.05)
    assert ServeOptions().queue == QUEUE
