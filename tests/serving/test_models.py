"""One model: its warm-up, its description, and engines that are replaced while it serves."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import BadInput, DeploykitError, Overloaded, Unsupported
from deploykit.core.tensors import TensorSpec
from deploykit.runtimes.cuda_errors import DeviceLost, OutOfMemory
from deploykit.runtimes.fake import FakeEngine
from deploykit.serving.models import ServedModel
from deploykit.serving.policy import Pending, Watcher
from deploykit.serving.request import Request, Wanted
from deploykit.serving.service import ServeOptions, Service
from deploykit.serving.warm import BETWEEN_US, SHORT_US, WarmUp, short_rows
from tests.serving.conftest import WAIT_S, GatedEngine


class Clock:
    """Each batch of a TimedEngine moves it on."""

    def __init__(self) -> None:
        self.us = 0

    def __call__(self) -> int:
        return self.us


class TimedEngine(FakeEngine):
    def __init__(self, clock: Clock, us: int, row_us: int, **options: Any) -> None:
        super().__init__(**options)
        self.clock, self.us, self.row_us = clock, us, row_us

    def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
        self.clock.us += self.us + self.row_us * len(feeds["x"])
        return super().__call__(feeds)


class Lengths(FakeEngine):
    """x [N,T] -> y [N,T]; notes the shapes it ran, refuses what is shorter than `least`."""

    def __init__(self, least: int = 0) -> None:
        super().__init__()
        self.inputs = (TensorSpec("x", "float32", ("N", "T")),)
        self.outputs = (TensorSpec("y", "float32", ("N", "T")),)
        self.least = least
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
        if feeds["x"].shape[1] < self.least:
            raise BadInput("too short")
        self.shapes.append(feeds["x"].shape)
        return super().__call__(feeds)


def ask(rows: int = 1) -> Request:
    feeds = {"x": np.full((rows, 4), 3, np.float32)}
    return Request(feeds, rows, (("x", "FP32", (4,)),), (Wanted("y", True),))


def warmed(engine: FakeEngine, **options: Any) -> ServedModel:
    service = Service({"m": engine}, ServeOptions(**options))
    service.warm_up()
    service.close()
    return service.find("m")


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({"max_batch": 1}, [1]),
        ({"max_batch": 16}, [1, 16, 2, 4, 8]),
        ({"max_batch": 24, "preferred": (6, 12)}, [1, 6, 12, 24, 2, 4, 8, 16]),
    ],
    ids=["one row", "powers of two", "preferred sizes first"],
)
def test_every_foreseen_batch_is_warmed_up(options: dict[str, Any], batches: list[int]) -> None:
    engine = FakeEngine()
    warmed(engine, **options)
    assert engine.batches == batches


def test_every_engine_is_warmed_up() -> None:
    engines = [FakeEngine(), FakeEngine()]
    service = Service({"m": engines}, ServeOptions(max_batch=2))
    service.warm_up()
    service.close()
    assert [engine.batches for engine in engines] == [[1, 2], [1, 2]]


def test_sizes_nobody_asked_for_are_warmed_up_only_while_that_is_quick() -> None:
    clock = Clock()
    row_us = BETWEEN_US // 8
    warm = WarmUp("m", TimedEngine(clock, 0, row_us), clock, max_batch=64)
    times, notes = warm.run()
    assert list(times) == [1, 64, 2, 4]
    assert times[64] == 64 * row_us
    assert notes == ()


def test_times_that_count_are_taken_from_a_second_run() -> None:
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
    late = WarmUp("m", Slower(clock, 40_000, 0), clock, max_batch=1)
    assert late.run(again_us=40_000)[0] == {1: 40_000}


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
def test_short_batches_are_known_by_their_rows(times: dict[int, int], rows: float) -> None:
    assert short_rows(times) == rows


class Steady(TimedEngine):
    """`us` for a row, `steady` as an engine on a CPU whose graph has no loop."""

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
def test_short_batches_of_a_steady_engine_are_run_by_the_event_loop(
    kind: type[TimedEngine], options: dict[str, Any], rows: float
) -> None:
    clock = Clock()
    engine = kind(clock, 0, SHORT_US // 8)
    service = Service({"m": engine}, ServeOptions(**options), clock_us=clock, later=lambda _: None)
    service.warm_up()
    assert service.find("m").batcher.here_rows == rows
    service.replace("m", [kind(clock, 0, SHORT_US // 4)])
    assert service.find("m").batcher.here_rows == (4 if rows == 8 else rows and 4)
    service.close()


def test_without_an_event_loop_nothing_is_run_by_it() -> None:
    model = warmed(Steady(Clock(), 0, 1))
    assert model.batcher.here_rows == 0


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


def test_an_axis_of_which_no_size_works_is_noted() -> None:
    assert warmed(Lengths(10_000)).notes == ("not warmed up: no size of T is known to work",)


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (OutOfMemory("cuda:0: 9 MiB needed"), OutOfMemory),
        (RuntimeError("boom"), Unsupported),
        (DeviceLost("gone"), DeviceLost),
    ],
)
def test_a_batch_that_fails_is_named_at_start(
    problem: Exception, kind: type[DeploykitError]
) -> None:
    class Failing(FakeEngine):
        def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
            if len(feeds["x"]) == 8:
                raise problem
            return super().__call__(feeds)

    service = Service({"m": Failing()}, ServeOptions(max_batch=8))
    with pytest.raises(kind, match=r"model 'm' cannot run x \[8, 4\]"):
        service.warm_up()
    service.close()


def test_an_engine_that_breaks_its_promise_is_found_at_start() -> None:
    engine = FakeEngine()
    engine.outputs = (TensorSpec("y", "float32", ("N", 5)),)
    service = Service({"m": engine}, ServeOptions())
    with pytest.raises(DeploykitError, match=r"returned shape \[1, 4\] for output 'y'"):
        service.warm_up()
    service.close()


def test_the_configuration_shows_how_batches_are_formed() -> None:
    service = Service(
        {"m": [FakeEngine(), FakeEngine()]},
        ServeOptions(max_batch=8, max_delay_us=500, preferred=(8, 4)),
    )
    config = service.find("m").config()
    service.close()
    assert config["dynamic_batching"] == {
        "preferred_batch_size": [4, 8],
        "max_queue_delay_microseconds": 500,
        "priority_levels": 3,
        "default_priority_level": 2,
    }
    assert config["instance_group"] == [{"name": "m_0", "count": 2, "kind": "KIND_CPU"}]


def test_the_configuration_names_the_gpu() -> None:
    engine = FakeEngine()
    engine.device = "cuda:1"
    model = warmed(engine)
    assert model.config()["instance_group"][0] == {
        "name": "m_0",
        "count": 1,
        "kind": "KIND_GPU",
        "gpus": [1],
    }


def test_what_an_engine_notes_is_shown_once() -> None:
    engines = [FakeEngine(), FakeEngine()]
    for engine in engines:
        engine.notes = ("runs on the CPU: asked for cuda:0",)  # type: ignore[attr-defined]
    service = Service({"m": engines}, ServeOptions())
    assert service.find("m").notes == ("runs on the CPU: asked for cuda:0",)
    service.close()


def test_engines_of_one_model_must_be_alike() -> None:
    with pytest.raises(BadInput, match="the inputs of one engine are"):
        Service({"m": [FakeEngine(), FakeEngine(width=5)]}, ServeOptions())


def test_an_input_above_its_buckets_is_counted_as_a_bad_request() -> None:
    service = Service({"m": Lengths()}, ServeOptions(buckets={"T": (2,)}))
    with pytest.raises(BadInput, match="axis T is 4"):
        service.infer(service.find("m"), ask(), lambda _: None)
    service.close()
    assert 'outcome="bad_request"} 1\n' in service.prometheus()


def test_a_watcher_that_comes_later_is_told_too_also_of_new_engines() -> None:
    seen: list[object] = []

    class Notes(Watcher):
        def ran(self, run: object) -> None:
            seen.append(run)

    service = Service({"m": FakeEngine()}, ServeOptions())
    service.find("m").watch(Notes())
    service.replace("m", [FakeEngine()])
    service.infer(service.find("m"), ask(), lambda _: None)
    service.close()
    assert len(seen) == 1
    assert service.statistics()["model_stats"][0]["inference_count"] == 1


def test_with_an_slo_the_batch_is_steered_from_what_the_warm_up_took() -> None:
    clock = Clock()
    service = Service(
        {"m": TimedEngine(clock, 1000, 1000)}, ServeOptions(slo_ms=20), clock_us=clock
    )
    service.warm_up()
    model = service.find("m")
    assert model.batcher.policy.max_batch == 32
    service.expire()
    assert model.batcher.policy.max_batch == 8  # 2 x (1 + 8) ms, within 95 % of 20 ms
    shown = service.prometheus()
    service.close()
    assert 'deploykit_batch_limit_rows{model="m",version="1"} 8\n' in shown
    assert 'deploykit_queue_limit_rows{model="m",version="1"} 8\n' in shown


def test_what_cannot_meet_the_slo_is_refused_with_a_reason() -> None:
    clock, engine = Clock(), GatedEngine()
    service = Service({"m": engine}, ServeOptions(max_batch=1, slo_ms=0.1), clock_us=clock)
    model = service.find("m")
    assert model._steering is not None
    model._steering.measured(1, 10**6, 0)
    service.expire()
    engine.warm = True
    service.infer(model, ask(), lambda _: None)
    assert engine.entered.acquire(timeout=WAIT_S)
    assert model.batcher.policy.queue_rows == 1
    service.infer(model, ask(), lambda _: None)
    with pytest.raises(Overloaded, match="--slo-ms"):
        service.infer(model, ask(), lambda _: None)
    engine.gate.set()
    service.close()


# -- replacing engines --------------------------------------------------------------------------


class Plus(GatedEngine):
    """Adds `more` to what a FakeEngine answers."""

    def __init__(self, more: float = 0, **options: Any) -> None:
        super().__init__(**options)
        self.more = more

    def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
        return {"y": super().__call__(feeds)["y"] + np.float32(self.more)}


def test_what_was_taken_is_finished_by_the_old_engine_which_is_then_closed() -> None:
    old, new = Plus(0), Plus(100)
    service = Service({"m": old}, ServeOptions(max_batch=2))
    model = service.find("m")
    old.warm = True
    before = [service.infer(model, ask(), lambda _: None)]
    assert old.entered.acquire(timeout=WAIT_S)
    before += [service.infer(model, ask(), lambda _: None) for _ in range(5)]
    service.replace("m", [new])
    assert not old.closed
    came = threading.Event()
    after = service.infer(model, ask(), lambda _: came.set())
    assert came.wait(WAIT_S)  # the new one serves while the old one is still busy
    assert service.unanswered == model.unanswered == 6
    assert model.cancel(before[-1])
    old.gate.set()
    service.close()
    assert [request.error for request in before] == [None] * 6
    assert [float(request.outputs["y"][0, 0]) for request in before[:5]] == [7] * 5
    assert float(after.outputs["y"][0, 0]) == 107
    assert old.closed
    assert new.closed
    assert new.batches[:2] == [1, 2]  # warmed up before it served
    assert old.batches == [1, 2, 2]


def test_a_deadline_holds_for_what_an_old_engine_has() -> None:
    clock, old = Clock(), Plus()
    service = Service({"m": old}, ServeOptions(timeout_ms=1), clock_us=clock)
    old.warm = True
    stuck = service.infer(service.find("m"), ask(), lambda _: None)
    assert old.entered.acquire(timeout=WAIT_S)
    service.replace("m", [Plus()])
    clock.us = 1000
    service.expire()
    assert stuck.error is not None
    assert service.unanswered == 0
    assert service.why_not_ready() is None
    old.gate.set()
    service.close()


@pytest.mark.parametrize(
    ("engine", "match"),
    [
        (FakeEngine(width=5), "inputs of one engine"),
        (FakeEngine(max_batch=2), "batches of 2 at most"),
        (None, "no engine"),
    ],
    ids=["another shape", "smaller batches", "none"],
)
def test_engines_that_clients_would_notice_are_refused(
    engine: FakeEngine | None, match: str
) -> None:
    old = FakeEngine()
    service = Service({"m": old}, ServeOptions())
    with pytest.raises(BadInput, match=match):
        service.replace("m", [engine] if engine else [])
    pending = service.infer(service.find("m"), ask(), lambda _: None)
    service.close()
    assert pending.error is None
    assert not old.closed  # it is still the caller's
    assert engine is None or not engine.closed


def test_engines_that_fail_to_warm_up_change_nothing() -> None:
    class Broken(FakeEngine):
        def __call__(self, _feeds: Any) -> dict[str, np.ndarray]:
            raise RuntimeError("boom")

    service = Service({"m": FakeEngine()}, ServeOptions())
    with pytest.raises(Unsupported, match="boom"):
        service.replace("m", [Broken()])
    pending = service.infer(service.find("m"), ask(), lambda _: None)
    service.close()
    assert pending.error is None


def test_no_engines_are_taken_after_the_end() -> None:
    service = Service({"m": FakeEngine()}, ServeOptions())
    service.close()
    with pytest.raises(Overloaded, match="shutting down"):
        service.replace("m", [FakeEngine()])


def test_replacing_under_load_fails_no_request() -> None:
    """Requests from another thread all the while engines are replaced again and again."""
    service = Service({"m": Plus()}, ServeOptions(queue=1 << 20))
    model = service.find("m")
    sent: list[Pending] = []
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            sent.append(service.infer(model, ask(), lambda _: None))

    sender = threading.Thread(target=send)
    sender.start()
    engines = [Plus() for _ in range(20)]
    for engine in engines:
        service.replace("m", [engine])
    stop.set()
    sender.join(WAIT_S)
    assert service.close() == 0
    assert len(sent) > 20
    assert [request.error for request in sent if request.error] == []
    assert all(float(request.outputs["y"][0, 0]) == 7 for request in sent)
    assert all(engine.closed for engine in engines)
