"""The warm-up before a server is ready, and the batch times measured in it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import DeploykitError, OutOfMemory, Unsupported
from deploykit.core.tensors import TensorSpec
from deploykit.engines.cuda.errors import DeviceLost
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.models.warmup import BETWEEN_US, SHORT_US, WarmUp, short_rows
from deploykit.serving.options import ServeOptions
from tests.support.fake_engine import FakeEngine
from tests.support.serving.warming import Clock, Lengths, TimedEngine, warmed


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({"max_batch": 1}, [1]),
        ({"max_batch": 16}, [1, 16, 2, 4, 8]),
        ({"max_batch": 24}, [1, 24, 2, 4, 8, 16]),
    ],
    ids=["one row", "powers of two", "the largest first"],
)
def test_expected_batch_sizes_are_warmed_up(options: dict[str, Any], batches: list[int]) -> None:
    engine = FakeEngine()
    warmed(engine, **options)
    assert engine.batches == batches


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


def test_every_engine_is_warmed_up() -> None:
    engines = [FakeEngine(), FakeEngine()]
    repository = ModelRepository({"m": engines}, ServeOptions(max_batch=2))
    repository.warm_up()
    repository.close()
    assert [engine.batches for engine in engines] == [[1, 2], [1, 2]]


def test_intermediate_sizes_are_warmed_up_only_while_they_are_quick() -> None:
    clock = Clock()
    row_us = BETWEEN_US // 8
    warm = WarmUp("m", TimedEngine(clock, 0, row_us), clock, max_batch=64)
    times, notes = warm.run()
    assert list(times) == [1, 64, 2, 4]
    assert times[64] == 64 * row_us
    assert notes == ()


def test_with_an_slo_times_are_taken_from_a_second_run() -> None:
    clock = Clock()
    engine = TimedEngine(clock, 5000, 0)
    first = WarmUp("m", engine, clock, max_batch=1)
    engine.us = 40_000

    class Slower(TimedEngine):
        def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
            outputs = super().__call__(feeds)
            self.us = 5000
            return outputs

    assert first.run()[0] == {1: 40_000}
    again = WarmUp("m", Slower(clock, 40_000, 0), clock, max_batch=1)
    assert again.run(again_us=50_000)[0] == {1: 5000}
    late = WarmUp("m", Slower(clock, 120_000, 0), clock, max_batch=1)
    assert late.run(again_us=40_000)[0] == {1: 120_000}


@pytest.mark.parametrize(
    ("times", "rows"),
    [
        ({}, 0),
        ({1: SHORT_US + 1}, 0),
        ({1: 10, 4: SHORT_US, 16: SHORT_US + 1}, 4),
        ({1: 10, 16: SHORT_US}, math.inf),
    ],
    ids=["unknown", "none", "some", "all"],
)
def test_short_rows_is_the_largest_batch_below_the_time_limit(
    times: dict[int, int], rows: float
) -> None:
    assert short_rows(times) == rows


class Steady(TimedEngine):
    """`us` per row, and `steady` like a CPU engine whose graph has no loop."""

    steady = True


@pytest.mark.parametrize(
    ("kind", "options", "rows"),
    [
        (Steady, {}, 8),
        (Steady, {"max_batch": 8}, math.inf),
        (Steady, {"max_delay_us": 100}, 0),
        (Steady, {"slo_ms": 50}, 0),
        (TimedEngine, {}, 0),
    ],
    ids=["some", "all", "a delay", "an SLO", "an engine that may hang"],
)
def test_short_batches_of_a_steady_engine_run_inline(
    kind: type[TimedEngine], options: dict[str, Any], rows: float
) -> None:
    clock = Clock()
    engine = kind(clock, 0, SHORT_US // 8)
    repository = ModelRepository(
        {"m": engine}, ServeOptions(**options), clock_us=clock, call_soon=lambda _: None
    )
    repository.warm_up()
    assert repository.find("m").batcher.inline_max_rows == rows
    repository.find("m").replace([kind(clock, 0, SHORT_US // 4)])
    assert repository.find("m").batcher.inline_max_rows == (4 if rows == 8 else rows and 4)
    repository.close()


def test_one_run_made_long_by_other_programs_does_not_keep_a_batch_from_the_loop() -> None:
    class Disturbed(Steady):
        """Its first run takes longer than those that were repeated."""

        def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
            outputs = super().__call__(feeds)
            self.us = 0
            return outputs

    clock = Clock()
    engine = Disturbed(clock, 6 * SHORT_US, SHORT_US // 8)
    repository = ModelRepository(
        {"m": engine}, ServeOptions(max_batch=8), clock_us=clock, call_soon=lambda _: None
    )
    repository.warm_up()
    assert repository.find("m").batcher.inline_max_rows == math.inf
    repository.close()


def test_without_an_event_loop_no_batch_runs_inline() -> None:
    model = warmed(Steady(Clock(), 0, 1))
    assert model.batcher.inline_max_rows == 0


def test_every_bucket_is_warmed_up() -> None:
    engine = Lengths()
    warmed(engine, max_batch=4, buckets={"T": (8, 16)})
    ran = set(engine.shapes)
    assert {(n, length) for n in (1, 2, 4) for length in (8, 16)} <= ran


@pytest.mark.parametrize(("least", "size"), [(0, 1), (20, 32)])
def test_an_unknown_axis_is_warmed_up_at_the_smallest_size_that_works(
    least: int, size: int
) -> None:
    engine = Lengths(least)
    model = warmed(engine)
    assert engine.shapes == [(1, size)]
    assert model.notes == ()


def test_an_axis_without_a_working_size_is_a_note() -> None:
    assert warmed(Lengths(10_000)).notes == ("not warmed up: no size of T is known to work",)


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
    class Failing(FakeEngine):
        def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
            if len(feeds["x"]) == 8:
                raise problem
            return super().__call__(feeds)

    repository = ModelRepository({"m": Failing()}, ServeOptions(max_batch=8))
    with pytest.raises(kind, match=r"model 'm' cannot run x \[8, 4\]"):
        repository.warm_up()
    repository.close()


def test_an_output_whose_shape_is_declared_wrongly_is_served_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeEngine()
    engine.outputs = (TensorSpec("y", "float32", ("N", 5)),)
    repository = ModelRepository({"m": engine}, ServeOptions())
    repository.warm_up()
    repository.close()
    assert "output 'y' is [1, 4], not ['N', 5] as declared" in caplog.text
    engine.outputs = (TensorSpec("y", "int64", ("N", 4)),)
    repository = ModelRepository({"m": engine}, ServeOptions())
    with pytest.raises(DeploykitError, match=r"returned float32 for output 'y' \(int64\)"):
        repository.warm_up()
    repository.close()
