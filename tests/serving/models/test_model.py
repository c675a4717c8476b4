"""One model: its description, and engines that are replaced while it serves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput, Overloaded, Unsupported
from deploykit.core.evidence import Evidence, QuantizeRecord
from deploykit.core.manifest import Manifest
from deploykit.serving.batching.queue import Pending, Watcher
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.oip.request import Request, RequestedOutput
from deploykit.serving.options import ServeOptions
from tests.support.fake_engine import FakeEngine
from tests.support.serving.running import WAIT_S, GatedEngine
from tests.support.serving.scrapes import exposition
from tests.support.serving.warming import Clock, TimedEngine, warmed


def ask(rows: int = 1) -> Request:
    feeds = {"x": np.full((rows, 4), 3, np.float32)}
    return Request(feeds, rows, (("x", "FP32", (4,)),), (RequestedOutput("y", True),))


def test_the_configuration_shows_the_batching_options() -> None:
    repository = ModelRepository(
        {"m": [FakeEngine(), FakeEngine()]},
        ServeOptions(max_batch=8, max_delay_us=500),
    )
    config = repository.find("m").config()
    repository.close()
    assert config["dynamic_batching"] == {
        "preferred_batch_size": [],
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


def test_equal_notes_of_two_engines_are_shown_once() -> None:
    engines = [FakeEngine(), FakeEngine()]
    for engine in engines:
        engine.notes = ("runs on the CPU: requested cuda:0",)  # type: ignore[attr-defined]
    repository = ModelRepository({"m": engines}, ServeOptions())
    assert repository.find("m").notes == ("runs on the CPU: requested cuda:0",)
    repository.close()


@pytest.mark.parametrize(
    ("made_for", "runs", "device", "changes", "noted"),
    [
        ("tensorrt", "onnxruntime 1.31.1", "cpu", {}, True),
        ("tensorrt", "openvino 2026.1", "cpu", {}, True),
        ("tensorrt", "onnxruntime 1.31.1", "cuda:0", {}, False),
        ("tensorrt", "tensorrt 11.0", "cuda:0", {}, False),
        ("onnxruntime", "onnxruntime 1.31.1", "cpu", {}, False),
        ("openvino", "onnxruntime 1.31.1", "cpu", {}, False),
        ("tensorrt", "onnxruntime 1.31.1", "cpu", {"built_on": {"profile": "cpu"}}, False),
        ("tensorrt", "onnxruntime 1.31.1", "cpu", {"precision": {"float16": 3}}, False),
    ],
)
def test_int8_pairs_that_the_runtime_computes_in_float32_are_noted(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    made_for: str,
    runs: str,
    device: str,
    changes: dict[str, Any],
    noted: bool,
) -> None:
    engine, path = FakeEngine(), tmp_path / "m.int8.onnx"
    path.write_bytes(b"")
    evidence = Evidence(quantize=QuantizeRecord("int8", runtime=made_for))
    about = {"precision": {"int8": 3}, "evidence": evidence, **changes}
    manifest = Manifest("onnx", engine.inputs, engine.outputs, **about)
    engine.source = Artefact.from_manifest(path, manifest)
    engine.runtime, engine.device = runs, device
    caplog.set_level("INFO")
    model = warmed(engine)
    text = "its INT8 pairs are placed for TensorRT"
    assert (text in model.metadata()["parameters"]["notes"]) is noted
    assert (text in caplog.text) is noted


def test_engines_of_one_model_must_have_the_same_inputs() -> None:
    with pytest.raises(BadInput, match="the inputs of one engine are"):
        ModelRepository({"m": [FakeEngine(), FakeEngine(width=5)]}, ServeOptions())


def test_a_watcher_added_later_sees_the_runs_of_replaced_engines() -> None:
    seen: list[object] = []

    class Notes(Watcher):
        def record_run(self, run: object) -> None:
            seen.append(run)

    repository = ModelRepository({"m": FakeEngine()}, ServeOptions())
    repository.find("m").watch(Notes())
    repository.find("m").replace([FakeEngine()])
    repository.find("m").submit(ask(), lambda _: None)
    repository.close()
    assert len(seen) == 1
    assert repository.statistics()["model_stats"][0]["inference_count"] == 1


def test_with_an_slo_the_batch_limit_follows_from_warm_up_times() -> None:
    clock = Clock()
    repository = ModelRepository(
        {"m": TimedEngine(clock, 1000, 1000)}, ServeOptions(slo_ms=20), clock_us=clock
    )
    repository.warm_up()
    model = repository.find("m")
    assert model.batcher.policy.max_batch == 32
    repository.expire()
    assert model.batcher.policy.max_batch == 8  # 2 x (1 + 8) ms, within 95 % of 20 ms
    shown = exposition(repository.samples())[0].decode()
    repository.close()
    assert 'deploykit_batch_limit_rows{model="m",version="1"} 8.0\n' in shown
    assert 'deploykit_queue_limit_rows{model="m",version="1"} 8.0\n' in shown


def test_a_request_that_cannot_meet_the_slo_is_refused() -> None:
    clock, engine = Clock(), GatedEngine()
    repository = ModelRepository(
        {"m": engine}, ServeOptions(max_batch=1, slo_ms=0.1), clock_us=clock
    )
    model = repository.find("m")
    assert model._steering is not None
    model._steering.record_time(1, 10**6, 0)
    repository.expire()
    engine.warm = True
    model.submit(ask(), lambda _: None)
    assert engine.entered.acquire(timeout=WAIT_S)
    assert model.batcher.policy.queue_rows == 1
    model.submit(ask(), lambda _: None)
    with pytest.raises(Overloaded, match="`slo_ms`"):
        model.submit(ask(), lambda _: None)
    engine.gate.set()
    repository.close()


# -- replacing engines --------------------------------------------------------------------------


class Plus(GatedEngine):
    """Adds `more` to the output of a FakeEngine."""

    def __init__(self, more: float = 0, **options: Any) -> None:
        super().__init__(**options)
        self.more = more

    def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
        return {"y": super().__call__(feeds)["y"] + np.float32(self.more)}


def test_a_replaced_engine_finishes_its_requests_and_is_closed() -> None:
    old, new = Plus(0), Plus(100)
    repository = ModelRepository({"m": old}, ServeOptions(max_batch=2))
    model = repository.find("m")
    old.warm = True
    before = [model.submit(ask(), lambda _: None)]
    assert old.entered.acquire(timeout=WAIT_S)
    before += [model.submit(ask(), lambda _: None) for _ in range(5)]
    repository.find("m").replace([new])
    assert not old.closed
    came = threading.Event()
    after = model.submit(ask(), lambda _: came.set())
    assert came.wait(WAIT_S)  # the new one serves while the old one is still busy
    assert repository.unanswered == model.unanswered == 6
    assert model.cancel(before[-1])
    old.gate.set()
    repository.close()
    assert [request.error for request in before] == [None] * 6
    assert [float(request.outputs["y"][0, 0]) for request in before[:5]] == [7] * 5
    assert float(after.outputs["y"][0, 0]) == 107
    assert old.closed
    assert new.closed
    assert new.batches[:2] == [1, 2]  # warmed up before it served
    assert old.batches == [1, 2, 2]


def test_a_deadline_applies_to_requests_of_a_replaced_engine() -> None:
    clock, old = Clock(), Plus()
    repository = ModelRepository({"m": old}, ServeOptions(timeout_ms=1), clock_us=clock)
    old.warm = True
    stuck = repository.find("m").submit(ask(), lambda _: None)
    assert old.entered.acquire(timeout=WAIT_S)
    repository.find("m").replace([Plus()])
    clock.us = 1000
    repository.expire()
    assert stuck.error is not None
    assert repository.unanswered == 0
    assert repository.why_not_ready() is None
    old.gate.set()
    repository.close()


@pytest.mark.parametrize(
    ("engine", "match"),
    [
        (FakeEngine(width=5), "inputs of one engine"),
        (FakeEngine(max_batch=2), "batches of 2 at most"),
        (None, "no engine"),
    ],
    ids=["another shape", "smaller batches", "none"],
)
def test_replacement_engines_must_accept_the_same_requests(
    engine: FakeEngine | None, match: str
) -> None:
    old = FakeEngine()
    repository = ModelRepository({"m": old}, ServeOptions())
    with pytest.raises(BadInput, match=match):
        repository.find("m").replace([engine] if engine else [])
    pending = repository.find("m").submit(ask(), lambda _: None)
    repository.close()
    assert pending.error is None
    assert not old.closed  # the caller still owns it
    assert engine is None or not engine.closed


def test_engines_that_fail_to_warm_up_do_not_replace_the_old_ones() -> None:
    class Broken(FakeEngine):
        def __call__(self, _feeds: Any) -> dict[str, np.ndarray]:
            raise RuntimeError("boom")

    repository = ModelRepository({"m": FakeEngine()}, ServeOptions())
    with pytest.raises(Unsupported, match="boom"):
        repository.find("m").replace([Broken()])
    pending = repository.find("m").submit(ask(), lambda _: None)
    repository.close()
    assert pending.error is None


def test_replacing_engines_after_close_is_refused() -> None:
    repository = ModelRepository({"m": FakeEngine()}, ServeOptions())
    repository.close()
    with pytest.raises(Overloaded, match="shutting down"):
        repository.find("m").replace([FakeEngine()])


def test_replacing_engines_under_load_fails_no_request(
    eventually: Callable[[Callable[[], bool]], None],
) -> None:
    """Requests from another thread all the while engines are replaced again and again."""
    repository = ModelRepository({"m": Plus()}, ServeOptions(queue=1 << 20))
    model = repository.find("m")
    sent: list[Pending] = []
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            sent.append(model.submit(ask(), lambda _: None))

    sender = threading.Thread(target=send)
    sender.start()
    engines = [Plus() for _ in range(20)]
    for engine in engines:
        before = len(sent)
        repository.find("m").replace([engine])
        eventually(lambda before=before: len(sent) > before)
    stop.set()
    sender.join(WAIT_S)
    assert repository.close() == 0
    assert [request.error for request in sent if request.error] == []
    assert all(float(request.outputs["y"][0, 0]) == 7 for request in sent)
    assert all(engine.closed for engine in engines)
