from __future__ import annotations

from dataclasses import replace

import pytest

from deploykit.graph import cost as kinds
from deploykit.graph.cost import COMPUTE, LAUNCH, MEMORY, Ceilings, Curve, NodeCost, node_time

CURVE = Curve((10.0, 1000.0), (1e-6, 1e-5))
PLAIN = Ceilings({"fp32": 1e9, "int8": 4e9}, 1e9, launch_s=1e-6)


def conv(
    flops: int = 0, moved: int = 0, weights: int = 0, kind: str = kinds.CONVOLUTION
) -> NodeCost:
    return NodeCost("n", "Conv", "float32", flops, moved, weights, 0, kind=kind)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [(0, 0.0), (1, 1e-7), (10, 1e-6), (100, 10**-5.5), (1000, 1e-5), (5000, 5e-5)],
)
def test_a_curve_is_straight_in_logarithms_and_proportional_outside(
    work: float, seconds: float
) -> None:
    assert CURVE.at(work) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("cost", "limit"),
    [(conv(10**6, 10), COMPUTE), (conv(10, 10**6), MEMORY), (conv(10, 10), LAUNCH)],
)
def test_a_node_is_limited_by_what_takes_most_of_its_time(cost: NodeCost, limit: str) -> None:
    assert node_time(cost, PLAIN).limit == limit


def test_a_node_inside_another_kernel_is_not_launched() -> None:
    assert node_time(conv(100, 0), PLAIN).launch_s == 0
    assert node_time(conv(100, 1), PLAIN).launch_s == 1e-6


def test_a_measured_curve_replaces_the_peak_and_counts_only_weights_as_traffic() -> None:
    measured = replace(PLAIN, curves={"fp32 convolution": Curve((1e6,), (2e-3,))})
    time = node_time(conv(10**6, 10**9), measured)
    assert time.seconds == pytest.approx(2e-3)
    assert node_time(conv(10**6, 1, weights=10**7), measured).memory_s == pytest.approx(1e-2)


def test_a_precision_without_a_curve_of_its_own_takes_that_of_fp32() -> None:
    measured = replace(
        PLAIN,
        curves={
            "fp32 convolution": Curve((1.0,), (1.0,)),
            "int8 convolution": Curve((1.0,), (0.5,)),
        },
    )
    int8, half = (replace(conv(1, 1), precision=name) for name in ("int8", "float16"))
    assert node_time(int8, measured).seconds == pytest.approx(0.5)
    assert node_time(half, measured).seconds == pytest.approx(1.0)


def test_a_recurrent_node_takes_each_step_after_the_other() -> None:
    measured = replace(PLAIN, launch_s=0.0, curves={"fp32 recurrent": CURVE})
    cost = replace(conv(1000, 1, kind=kinds.RECURRENT), steps=100)
    assert node_time(cost, measured).seconds == pytest.approx(100 * 1e-6)


def test_what_moves_data_follows_its_bytes() -> None:
    measured = replace(PLAIN, curves={"fp32 movement": CURVE})
    time = node_time(conv(0, 1000, kind=kinds.MOVEMENT), measured)
    assert time.seconds == pytest.approx(1e-5)
    assert time.limit == MEMORY
