from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx import helper

from deploykit.core.profile import load_profile
from deploykit.graph import cost as kinds
from deploykit.graph.cost import COMPUTE, LAUNCH, MEMORY, NodeCost
from deploykit.graph.graph import Graph
from deploykit.planning.plan import alignment
from deploykit.planning.predict import (
    COPIES,
    COPY_S,
    LAUNCH_S,
    LINK_BYTES_PER_S,
    REACHED,
    Inferred,
    Target,
    in_precision,
    infer,
    precisions,
    predict_call,
    target_of,
)
from tests.support.calibrations import BYTES_PER_S, CALL_S, OPS_PER_S, round_calibration
from tests.support.calibrations import LAUNCH_S as NODE_S
from tests.support.onnx_zoo import make


def target(name: str, **changes: object) -> Target:
    calibration = round_calibration() if name == "cpu" else None
    found = target_of(replace(load_profile(name), **changes), calibration)  # type: ignore[arg-type]
    assert isinstance(found, Target)
    return found


def product(rows: int, width: int) -> Inferred:
    """One product of (rows, width) by stored weights (width, width)."""
    weights = {"w": np.ones((width, width), np.float32)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")]
    model = make(nodes, {"x": ("N", width)}, {"y": ("N", width)}, weights)
    return infer(Graph(model), rows, {"N": rows})


def test_on_the_cpu_a_product_takes_its_operations_at_the_measured_rate() -> None:
    found = predict_call(product(512, 512), target("cpu"), "fp32")
    seconds = CALL_S + 2 * 512**3 / OPS_PER_S
    assert found.latency_ms == pytest.approx(seconds * 1e3)
    assert found.throughput_per_s == pytest.approx(512 / seconds)
    assert found.limit == COMPUTE


def test_one_row_waits_for_the_weights() -> None:
    found = predict_call(product(1, 1024), target("cpu"), "fp32")
    assert found.latency_ms == pytest.approx((CALL_S + NODE_S + 4 * 1024**2 / BYTES_PER_S) * 1e3)
    assert found.limit == MEMORY


def test_int8_runs_at_its_own_rate_and_its_weights_are_a_quarter() -> None:
    inferred, cpu = product(512, 512), target("cpu")
    fp32, int8 = predict_call(inferred, cpu, "fp32"), predict_call(inferred, cpu, "int8")
    assert int8.weight_bytes == fp32.weight_bytes / 4
    assert int8.latency_ms < fp32.latency_ms / 2


@pytest.mark.parametrize(
    ("name", "precision", "kind", "dtype", "read"),
    [
        ("l4", "int8", kinds.CONVOLUTION, "int8", 25),
        ("l4", "int8", kinds.NORMALISATION, "float16", 50),
        ("cpu", "int8", kinds.CONVOLUTION, "int8", 25),
        ("cpu", "int8", kinds.NORMALISATION, "float32", 100),
        ("l4", "fp16", kinds.NORMALISATION, "float16", 50),
        ("l4", "fp32", kinds.CONVOLUTION, "float32", 100),
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
    inferred, l4 = product(1024, 1024), target("l4")
    ops, moved = 2 * 1024**3, 2 * 3 * 1024**2
    found = predict_call(inferred, l4, "fp16")
    peak = l4.profile.peak_ops_per_s["fp16"] * REACHED
    bandwidth = (l4.profile.bandwidth_bytes_per_s or 0) * REACHED
    seconds = LAUNCH_S + max(ops / peak, moved / bandwidth)
    assert found.compute_ms == pytest.approx(seconds * 1e3)
    assert found.shares[LAUNCH] == pytest.approx(LAUNCH_S * 1e3 / found.latency_ms)


def test_a_call_on_a_gpu_has_its_copies_and_a_small_one_little_else() -> None:
    inferred, l4 = product(1, 32), target("l4")
    found = predict_call(inferred, l4, "fp16")
    copies = 2 * COPY_S + 2 * 32 * 4 / (LINK_BYTES_PER_S * REACHED)
    assert found.latency_ms - found.compute_ms == pytest.approx(copies * 1e3)
    assert found.limit == COPIES
    assert found.throughput_per_s == pytest.approx(1e3 / found.latency_ms)
    cpu = predict_call(inferred, target("cpu"), "fp32")
    assert cpu.latency_ms == cpu.compute_ms


def test_where_memory_is_shared_copies_run_at_its_bandwidth() -> None:
    nano = target("jetson-orin-nano-8gb")
    assert nano.profile.bandwidth_bytes_per_s
    seconds = 2 * COPY_S + 10**9 / (nano.profile.bandwidth_bytes_per_s * REACHED)
    assert nano.copies_s([10**9, 0]) == pytest.approx(seconds)


def test_float32_products_on_a_gpu_run_in_tf32() -> None:
    found = predict_call(product(1024, 1024), target("a100-80gb"), "fp32")
    assert found.compute_ms == pytest.approx((LAUNCH_S + 2 * 1024**3 / (156e12 * REACHED)) * 1e3)


def test_a_power_mode_lowers_the_peaks_by_its_clock_and_multiprocessors() -> None:
    full = target_of(load_profile("jetson-orin-nano-8gb@MAXN_SUPER"), None)
    slow = target_of(load_profile("jetson-orin-nano-8gb@7W"), None)  # 408 MHz, 4 of 8
    assert isinstance(full, Target)
    assert isinstance(slow, Target)
    ratio = slow.ceilings(0).ops_per_s["int8"] / full.ceilings(0).ops_per_s["int8"]
    assert ratio == pytest.approx(408 / 1020.5 / 2, rel=1e-3)
    assert slow.power_w == 7


def test_memory_is_weights_and_activations_and_what_does_not_fit_is_named() -> None:
    inferred = product(1024, 1024)
    found = predict_call(inferred, target("l4"), "fp32")
    assert (found.weight_bytes, found.activation_bytes) == (4 << 20, 8 << 20)
    assert found.fits is True
    assert predict_call(inferred, target("l4"), "fp16").activation_bytes == 4 << 20
    small = target("l4", memory_bytes=11 << 20, workspace_bytes=1)
    assert predict_call(inferred, small, "fp32").fits is False
    assert predict_call(inferred, replace(small), "fp16").fits is True
    unknown = target("l4", memory_bytes=None)
    assert predict_call(inferred, unknown, "fp32").fits is None


def test_energy_is_at_most_the_power_limit_and_unknown_without_one() -> None:
    found = predict_call(product(64, 64), target("l4"), "fp32")
    assert found.joules == pytest.approx(72 * found.latency_ms / 1e3 / 64)
    assert predict_call(product(64, 64), target("cpu"), "fp32").joules is None


def test_a_float32_graph_is_predicted_in_what_the_target_offers() -> None:
    assert precisions(product(1, 8), target("v100")) == ("fp32", "fp16")
    assert precisions(product(1, 8), target("cpu")) == ("fp32", "int8")


def test_a_profile_without_peaks_is_no_target() -> None:
    bare = replace(load_profile("l4"), peak_ops_per_s={}, bandwidth_bytes_per_s=None)
    assert target_of(bare, None) == (
        "the profile has no peak_ops_per_s.fp32 and no bandwidth_bytes_per_s"
    )


def test_sizes_that_leave_tensor_cores_idle_are_named_with_their_share() -> None:
    weights = {
        name: np.ones(shape, np.float32) for name, shape in {"a": (16, 12), "b": (12, 8)}.items()
    }
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["t"], name="odd"),
        helper.make_node("MatMul", ["t", "b"], ["y"], name="odder"),
    ]
    model = make(nodes, {"x": ("N", 16)}, {"y": ("N", 8)}, weights)
    found = infer(Graph(model), 1, {"N": 1})
    first, second = alignment(found)
    assert (first.node, first.size, first.multiple, first.precision) == ("odd", 12, 8, "fp16")
    assert first.share == pytest.approx(16 / 24)
    assert second.node == "odder"
    aligned = product(1, 64)
    assert alignment(aligned) == ()
