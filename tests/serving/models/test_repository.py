"""The repository: names, options, readiness, statistics and metrics of the served models."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import BadInput, Overloaded, Unsupported
from deploykit.engines.cuda.errors import DeviceLost
from deploykit.serving.batching.queue import Pending
from deploykit.serving.models.inference import Inference, ModelRoute
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.observe.prometheus import Sample
from deploykit.serving.oip.request import Request, RequestedOutput
from deploykit.serving.options import ServeOptions
from tests.support.fake_engine import FakeEngine, Function
from tests.support.serving.running import WAIT_S, GatedEngine
from tests.support.serving.scrapes import exposition
from tests.support.serving.warming import Clock


def ask(rows: int = 1, **more: Any) -> Request:
    feeds = {"x": np.ones((rows, 4), np.float32)}
    return Request(feeds, rows, (("x", "FP32", (4,)),), (RequestedOutput("y", True),), **more)


@contextmanager
def holding(models: dict[str, Any], clock: Clock | None = None, **options: Any) -> Iterator[Any]:
    """A repository of these models; its clock stands still."""
    repository = ModelRepository(models, ServeOptions(**options), clock_us=clock or Clock())
    try:
        yield repository
    finally:
        repository.close()


def metrics(repository: ModelRepository) -> str:
    return exposition(repository.samples())[0].decode()


def raises(error: Exception) -> FakeEngine:
    def fail(_feeds: object) -> dict[str, np.ndarray]:
        raise error

    return Function(fail)


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        *((name, False) for name in ["", "a/b", "..", "stats", " ", "é", "a" * 129, "a\n"]),
        *((name, True) for name in ["m", "resnet-18_v1.5", "..m", "a" * 128]),
    ],
)
def test_a_name_that_could_be_a_path_is_refused(name: str, taken: bool) -> None:
    if taken:
        with holding({name: FakeEngine()}) as repository:
            assert repository.find(name).name == name
    else:
        with pytest.raises(BadInput, match="cannot be the name of a model"):
            ModelRepository({name: FakeEngine()}, ServeOptions())


def test_a_model_without_inputs_is_refused_and_leaves_no_thread() -> None:
    engine = FakeEngine()
    engine.inputs = ()
    before = set(threading.enumerate())
    with pytest.raises(Unsupported, match="without inputs"):
        ModelRepository({"good": FakeEngine(), "m": engine}, ServeOptions())
    assert set(threading.enumerate()) <= before
    for name, value in {"http_port": 65536, "max_batch": 0, "timeout_ms": 0}.items():
        with pytest.raises(BadInput, match=f"`{name}`"):
            ServeOptions(**{name: value})


def test_a_draining_repository_refuses_requests_and_is_not_ready() -> None:
    with holding({"m": FakeEngine()}) as repository:
        assert repository.why_not_ready() is None
        repository.drain()
        with pytest.raises(Overloaded, match="shutting down"):
            repository.find("m").submit(ask(), lambda _: None)
        why = "the server is shutting down"
        index = [{"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": why}]
        assert repository.index() == index
        assert repository.why_not_ready(repository.find("m")) == why
        assert 'outcome="rejected",version="1"} 1.0\n' in metrics(repository)


def test_priority_trace_and_decode_time_reach_the_batcher() -> None:
    clock = Clock()
    clock.us = 107
    with holding({"m": FakeEngine()}, clock) as repository:
        model, options = repository.find("m"), {"trace": "00-ab-cd-01", "started_us": 100}
        pending = model.submit(ask(priority=3), lambda _: None, **options)
    assert (pending.priority, pending.trace, pending.decode_us) == (3, "00-ab-cd-01", 7)


def test_a_lost_gpu_is_fatal_and_not_ready() -> None:
    came = threading.Event()
    lost = raises(DeviceLost("/home/me/m.trt: cuda:0: the GPU is lost"))
    with holding({"good": FakeEngine(), "m": lost}) as repository:
        assert repository.fatal is None
        repository.find("m").submit(ask(), lambda _: came.set())
        assert came.wait(WAIT_S)
        assert repository.fatal == "model 'm': the GPU is lost to this process"
        assert repository.why_not_ready() == repository.fatal
        assert [entry["state"] for entry in repository.index()] == ["UNAVAILABLE"] * 2


def test_a_hung_engine_is_not_ready_until_it_returns() -> None:
    clock, engine, came = Clock(), GatedEngine(warm=True), threading.Event()
    with holding({"good": FakeEngine(), "m": engine}, clock, timeout_ms=1) as repository:
        model = repository.find("m")
        pending = model.submit(ask(), lambda _: came.set())
        assert engine.entered.acquire(timeout=WAIT_S)
        clock.us = 1000
        repository.expire()
        assert pending.error is not None
        assert pending.error.http_status == 504
        assert repository.why_not_ready(model) is None
        clock.us = 2000
        assert "does not return" in (repository.why_not_ready(model) or "")
        assert repository.why_not_ready() == repository.why_not_ready(model)
        assert [entry["state"] for entry in repository.index()] == ["READY", "UNAVAILABLE"]
        assert "1 of 1 engines do not return" in " ".join(model.notes)
        assert 'deploykit_engines_hung{model="m",version="1"} 1.0\n' in metrics(repository)
        engine.gate.set()
        came.clear()
        model.submit(ask(), lambda _: came.set())
        assert came.wait(WAIT_S)
        assert repository.why_not_ready() is None


def test_each_request_is_charged_the_whole_time_of_its_batch() -> None:
    engine = GatedEngine(warm=True)
    repository = ModelRepository({"m": engine}, ServeOptions())
    model = repository.find("m")
    model.submit(ask(), lambda _: None)
    assert engine.entered.acquire(timeout=WAIT_S)
    for _ in range(3):
        model.submit(ask(2), lambda _: None)
    engine.gate.set()
    repository.close()
    stats = repository.statistics()["model_stats"][0]
    assert (stats["inference_count"], stats["execution_count"]) == (7, 2)
    ran = ("success", "queue", "compute_input", "compute_infer", "compute_output")
    assert {stats["inference_stats"][part]["count"] for part in ran} == {4}
    by_rows = {batch["batch_size"]: batch["compute_infer"] for batch in stats["batch_stats"]}
    assert {rows: batch["count"] for rows, batch in by_rows.items()} == {1: 1, 6: 1}
    charged_ns = by_rows[1]["ns"] + 3 * by_rows[6]["ns"]
    assert stats["inference_stats"]["compute_infer"]["ns"] == charged_ns


def test_failures_are_counted_by_outcome_in_declared_families() -> None:
    with holding({"m": raises(RuntimeError("broken")), "b": FakeEngine()}) as repository:
        repository.add_metrics(lambda: [Sample("deploykit_held_bytes", {}, 1)])
        model = repository.find("m")
        model.submit(ask(), lambda _: None)
        model.metrics.count("bad_request")
    text = metrics(repository)
    for outcome, count in {"failed": 1, "bad_request": 1, "success": 0, "expired": 0}.items():
        labels = f'model="m",outcome="{outcome}",version="1"'
        assert f"deploykit_requests_total{{{labels}}} {count}.0\n" in text
    assert 'nv_inference_request_failure{model="m",reason="BACKEND",version="1"} 1.0\n' in text
    assert repository.statistics()["model_stats"][0]["inference_stats"]["fail"]["count"] == 2
    families = [line.split()[2] for line in text.splitlines() if "# TYPE" in line]
    assert "deploykit_held_bytes" in families
    assert len(families) == len(set(families))
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if not line.startswith("#"):
            assert float(value) >= 0
            assert any(name.startswith(family) for family in families)


class Plain(Inference):
    """Its source is the request; it sends no reply."""

    def decode(self, source: Request) -> Request:
        return source

    def decoded_bytes(self) -> int:
        return 0

    def encode(self) -> tuple[object, ...]:
        return ()

    def fail(self, error: Exception) -> None:
        raise error


def test_the_time_on_the_decoding_thread_counts_towards_the_limit() -> None:
    repository = ModelRepository({"m": FakeEngine()}, ServeOptions(timeout_ms=2000))
    model = repository.find("m")
    client: Any = SimpleNamespace(about=None, gone=False, peer=None, reply=lambda: None)

    def decode_elsewhere(work: Callable[[], Request], then: Any, **_: object) -> None:
        decoded = work()
        then(lambda: decoded)

    inference = Plain(ModelRoute(repository, model, decode_elsewhere), client, ask(), None)
    inference._started_us -= 1_500_000
    sent: list[Pending] = []
    model.enqueue = sent.append  # type: ignore[method-assign,assignment]
    inference.set_lane(1, 0)
    inference.start_offloaded()
    (pending,) = sent
    repository.close()
    assert 0 < pending.deadline_us - pending.arrived_us <= 500_000
