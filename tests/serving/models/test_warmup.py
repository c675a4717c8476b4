"""The warm-up before a server is ready, and the batch times measured in it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import DeploykitError, DeviceLost, OutOfMemory, Unsupported
from deploykit.core.tensors import TensorSpec
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.models.warmup import BETWEEN_US, SHORT_US, WarmUp
from deploykit.serving.options import ServeOptions
from tests.support.fake_engine import FakeEngine, Function
from tests.support.serving.warming import Clock, Lengths, TimedEngine, warmed


@pytest.mark.parametrize(
    ("max_batch", "batches"),
    [(1, [1]), (16, [1, 16, 2, 4, 8]), (24, [1, 24, 2, 4, 8, 16])],  # the largest first
)
def test_expected_batch_sizes_are_warmed_up_on_every_engine(
    max_batch: int, batches: list[int]
) -> None:
    engines = [FakeEngine(), FakeEngine()]
    warmed(engines, max_batch=max_batch)
    assert [engine.batches for engine in engines] == [batches, batches]


@pytest.mark.parametrize("max_batch", [1, 4])
def test_the_last_run_of_an_engine_that_keeps_memory_is_the_smallest(max_batch: int) -> None:
    class Keeps(FakeEngine):
        trimmed = 0

        def trim(self) -> bool:
            self.trimmed = len(self.batches)
            return True

    engine = Keeps()
    warmed(engine, max_batch=max_batch)
    assert engine.trimmed == len(engine.batches) - 1
    assert engine.batches[-1] == 1


def test_intermediate_sizes_are_warmed_up_only_while_they_are_quick() -> None:
    clock, row_us = Clock(), BETWEEN_US // 8
    times = WarmUp("m", TimedEngine(clock, 0, row_us), clock, max_batch=64).run()
    assert (list(times), times[64]) == ([1, 64, 2, 4], 64 * row_us)


class Faster(TimedEngine):
    """Takes `us` in its first run, and less in the next ones."""

    steady = True

    def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
        outputs = super().__call__(feeds)
        self.us = 1000
        return outputs


@pytest.mark.parametrize(
    ("first_us", "again_us", "us"), [(40_000, 0, 40_000), (40_000, 50_000, 1000)]
)
def test_with_an_slo_times_are_taken_from_a_second_run(
    first_us: int, again_us: int, us: int
) -> None:
    clock = Clock()
    warm = WarmUp("m", Faster(clock, first_us, 0), clock, max_batch=1)
    assert warm.run(again_us=again_us) == {1: us}


class Steady(TimedEngine):
    """`us` per row, and `steady` like a CPU engine whose graph has no loop."""

    steady = True


@pytest.mark.parametrize(
    ("kind", "options", "loop", "rows"),
    [
        (Steady, {}, True, 8),
        (Steady, {"max_batch": 8}, True, math.inf),
        (Steady, {}, False, 0),
        (Steady, {"max_delay_us": 100}, True, 0),
        (Steady, {"slo_ms": 50}, True, 0),
        (TimedEngine, {}, True, 0),
    ],
    ids=["some", "all", "no loop", "a delay", "an SLO", "an engine that may hang"],
)
def test_short_batches_of_a_steady_engine_run_inline(
    kind: type[TimedEngine], options: dict[str, Any], loop: bool, rows: float
) -> None:
    clock = Clock()
    repository = ModelRepository(
        {"m": kind(clock, 0, SHORT_US // 8)},
        ServeOptions(**options),
        clock_us=clock,
        call_soon=(lambda _: None) if loop else None,
    )
    repository.warm_up()
    assert repository.find("m").batcher.inline_max_rows == rows
    repository.find("m").replace([kind(clock, 0, SHORT_US // 4)])
    assert repository.find("m").batcher.inline_max_rows == (rows and 4)
    repository.close()


def test_one_run_made_long_by_other_programs_does_not_keep_a_batch_from_the_loop() -> None:
    clock = Clock()
    engine = Faster(clock, 6 * SHORT_US, 0)
    repository = ModelRepository(
        {"m": engine}, ServeOptions(max_batch=8), clock_us=clock, call_soon=lambda _: None
    )
    repository.warm_up()
    assert repository.find("m").batcher.inline_max_rows == math.inf
    repository.close()


def test_every_bucket_is_warmed_up() -> None:
    engine = Lengths()
    warmed(engine, max_batch=4, buckets={"T": (8, 16)})
    ran = set(engine.shapes)
    assert {(n, length) for n in (1, 2, 4) for length in (8, 16)} <= ran


@pytest.mark.parametrize(("least", "shapes"), [(0, [(1, 1)]), (20, [])])
def test_an_axis_of_unknown_size_is_warmed_up_at_size_1_if_that_runs(
    least: int, shapes: list[tuple[int, int]]
) -> None:
    engine = Lengths(least)
    warmed(engine)
    assert engine.shapes == shapes


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (OutOfMemory("cuda:0: 9 MiB needed"), OutOfMemory),
        (RuntimeError("boom"), Unsupported),
        (DeviceLost("gone"), DeviceLost),
    ],
)
def test_a_batch_that_fails_in_the_warm_up_is_named(
    problem: Exception, kind: type[DeploykitError]
) -> None:
    def fail(feeds: Any) -> dict[str, np.ndarray]:
        if len(feeds["x"]) == 8:
            raise problem
        return {"y": feeds["x"]}

    with pytest.raises(kind, match=r"model 'm' cannot run x \[8, 4\]"):
        warmed(Function(fail), max_batch=8)


def test_an_output_of_another_type_than_declared_is_refused_and_another_shape_is_served() -> None:
    engine = FakeEngine()
    engine.outputs = (TensorSpec("y", "float32", ("N", 5)),)
    warmed(engine)
    engine.outputs = (TensorSpec("y", "int64", ("N", 4)),)
    with pytest.raises(DeploykitError, match=r"returned float32 for output 'y' \(int64\)"):
        warmed(engine)
