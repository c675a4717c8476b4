"""The served models: description, readiness, figures, replacement, and what is joined."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from deploykit.core.artefact import Artefact, Manifest
from deploykit.core.errors import BadInput, Overloaded, Unsupported
from deploykit.core.evidence import Evidence, QuantizeRecord, RowIndependence
from deploykit.engines.batching import prove_rows
from deploykit.engines.engine import load
from deploykit.serving.batching.batcher import Loop
from deploykit.serving.batching.queue import BatchRun, Pending, Watcher
from deploykit.serving.models.inference import Inference, ModelRoute
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.oip.request import Request, RequestedOutput
from deploykit.serving.options import ServeOptions
from deploykit.serving.web.page import Address, guide
from tests.support.fake_engine import FakeEngine, Function
from tests.support.graphs.batch_graphs import (
    BATCHED,
    DEPENDENT,
    ROW,
    reverse,
    same_for_all,
    similarity,
)
from tests.support.onnx_zoo import linear, make, save
from tests.support.serving.grpc_cases import frames, infer_bytes
from tests.support.serving.running import WAIT_S, GatedEngine, infer_json, running
from tests.support.serving.scrapes import exposition
from tests.support.serving.warming import Clock, Lengths, TimedEngine, warmed

Make = Callable[[], onnx.ModelProto]


def ask(rows: int = 1, **options: Any) -> Request:
    feeds = {"x": np.full((rows, 4), 3, np.float32)}
    outputs = (RequestedOutput("y", True),)
    return Request(feeds, rows, (("x", "FP32", (4,)),), outputs, **options)


def ignore(_: Pending) -> None:
    """The answer of a request that nobody waits for."""


@contextmanager
def holding(
    models: dict[str, Any], clock: Clock | None = None, **options: Any
) -> Iterator[ModelRepository]:
    """A repository of these models; its clock stands still."""
    repository = ModelRepository(models, ServeOptions(**options), Loop(clock_us=clock or Clock()))
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


# -- Description


def test_the_configuration_shows_the_batching_options_and_the_device() -> None:
    engines = [FakeEngine(), FakeEngine()]
    for engine in engines:
        engine.notes = ("runs on the CPU: requested cuda:0",)  # type: ignore[attr-defined]
    model = warmed(engines, max_batch=8, max_delay_us=500)
    assert model.notes == ("runs on the CPU: requested cuda:0",)  # once
    assert model.config()["dynamic_batching"] == {
        "preferred_batch_size": [],
        "max_queue_delay_microseconds": 500,
        "priority_levels": 3,
        "default_priority_level": 2,
    }
    group = {"name": "m_0", "count": 2, "kind": "KIND_CPU"}
    assert model.config()["instance_group"] == [group]
    engine = FakeEngine()
    engine.device = "cuda:1"
    group = {"name": "m_0", "count": 1, "kind": "KIND_GPU", "gpus": [1]}
    assert warmed(engine).config()["instance_group"] == [group]


INT8_PAIRS: list[tuple[str, str, str, dict[str, Any], bool]] = [
    ("tensorrt", "onnxruntime 1.31.1", "cpu", {}, True),
    ("tensorrt", "openvino 2026.1", "cpu", {}, True),
    ("tensorrt", "onnxruntime 1.31.1", "cuda:0", {}, False),
    ("onnxruntime", "onnxruntime 1.31.1", "cpu", {}, False),
    ("tensorrt", "onnxruntime 1.31.1", "cpu", {"built_on": {"profile": "cpu"}}, False),
    ("tensorrt", "onnxruntime 1.31.1", "cpu", {"precision": {"float16": 3}}, False),
]


def test_int8_pairs_that_the_runtime_computes_in_float32_are_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path, text = tmp_path / "m.int8.onnx", "its INT8 pairs are placed for TensorRT"
    path.write_bytes(b"")
    for made_for, runtime, device, changes, noted in INT8_PAIRS:
        engine = FakeEngine()
        evidence = Evidence(quantize=QuantizeRecord("int8", runtime=made_for))
        about = {"precision": {"int8": 3}, "evidence": evidence, **changes}
        manifest = Manifest("onnx", engine.inputs, engine.outputs, **about)
        engine.source = Artefact.from_manifest(path, manifest)
        engine.runtime, engine.device = runtime, device
        caplog.clear()
        notes = warmed(engine).metadata()["parameters"]["notes"]
        assert (text in notes, text in caplog.text) == (noted, noted)


# -- Readiness and figures


def test_a_hung_engine_is_not_ready_until_it_returns() -> None:
    clock, engine, came = Clock(), GatedEngine(warm=True), threading.Event()
    with holding({"good": FakeEngine(), "m": engine}, clock, timeout_ms=1) as repository:
        model = repository.find("m")
        model.submit(ask(), lambda _: came.set())
        assert engine.entered.acquire(timeout=WAIT_S)
        clock.us = 1000
        repository.expire()
        assert repository.why_not_ready(model) is None
        clock.us = 2000
        assert "does not return" in (repository.why_not_ready() or "")
        assert [entry["state"] for entry in repository.index()] == ["READY", "UNAVAILABLE"]
        assert "1 of 1 engines do not return" in " ".join(model.notes)
        engine.gate.set()
        came.clear()
        model.submit(ask(), lambda _: came.set())
        assert came.wait(WAIT_S)
        assert repository.why_not_ready() is None


def test_each_request_is_charged_the_whole_time_of_its_batch() -> None:
    engine = GatedEngine(warm=True)
    repository = ModelRepository({"m": engine}, ServeOptions())
    model = repository.find("m")
    model.submit(ask(), ignore)
    assert engine.entered.acquire(timeout=WAIT_S)
    for _ in range(3):
        model.submit(ask(2), ignore)
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


OUTCOME = 'deploykit_requests_total{model="m",outcome="%s",version="1"} %d'


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_an_input_above_its_buckets_is_counted_once_as_a_bad_request(protocol: str) -> None:
    with running({"m": Lengths()}, grpc_port=0, buckets={"T": (2,)}) as server:
        if protocol == "http":
            reply = server.ask("POST", "/v2/models/m/infer", infer_json([1] * 4, [1, 4]))
            assert (reply.status, "axis T is 4" in reply.json["error"]) == (400, True)
        else:
            with frames(server.server.grpc_port) as client:
                answer = client.call(1, infer_bytes(width=4))
                assert answer.status == 3
                assert "axis T is 4" in answer.headers["grpc-message"]
        text = server.ask("GET", "/metrics").body.decode()
    assert OUTCOME % ("bad_request", 1) in text
    assert OUTCOME % ("success", 0) in text


# -- Limits of time


def test_with_an_slo_the_batch_limit_follows_from_warm_up_times() -> None:
    clock = Clock()
    with holding({"m": TimedEngine(clock, 1000, 1000)}, clock, slo_ms=20) as repository:
        repository.warm_up()
        policies = [repository.find("m").batcher.policy]
        repository.expire()
        policies.append(repository.find("m").batcher.policy)
        assert [policy.max_batch for policy in policies] == [32, 8]  # 2 x (1 + 8) ms, of 20 ms
        for limit in ("batch", "queue"):
            line = f'deploykit_{limit}_limit_rows{{model="m",version="1"}} 8.0\n'
            assert line in metrics(repository)


def test_a_request_that_cannot_meet_the_slo_is_refused() -> None:
    engine = GatedEngine()
    with holding({"m": engine}, max_batch=1, slo_ms=0.1) as repository:
        model = repository.find("m")
        assert model.batcher.steering is not None
        model.batcher.steering.record_time(1, 10**6)
        repository.expire()
        engine.warm = True
        model.submit(ask(), ignore)
        assert engine.entered.acquire(timeout=WAIT_S)
        model.submit(ask(), ignore)
        with pytest.raises(Overloaded, match="`slo_ms`"):
            model.submit(ask(), ignore)
        engine.gate.set()


def test_once_the_shutdown_begins_only_admitted_requests_are_accepted() -> None:
    with holding({"m": FakeEngine()}) as repository:
        model = repository.find("m")
        repository.drain()
        with pytest.raises(Overloaded, match="shutting down"):
            model.submit(ask(), ignore)
        model.submit(ask(), ignore, admitted=True)


class Plain(Inference):
    """Its source is the request; it sends no reply."""

    def decode(self, source: Request) -> Request:
        return source

    def encode(self) -> tuple[object, ...]:
        return ()

    def fail(self, error: Exception) -> None:
        raise error


def test_priority_trace_and_the_time_on_the_decoding_thread_reach_the_batcher() -> None:
    clock, sent = Clock(), list[Pending]()
    clock.us = 107
    with holding({"m": FakeEngine()}, clock) as repository:
        options = {"trace": "00-ab-cd-01", "started_us": 100}
        found = repository.find("m").submit(ask(priority=3), ignore, **options)
    assert (found.priority, found.trace, found.decode_us) == (3, "00-ab-cd-01", 7)

    repository = ModelRepository({"m": FakeEngine()}, ServeOptions(timeout_ms=2000))
    model = repository.find("m")
    client: Any = SimpleNamespace(about=None, gone=False, peer=None, reply=lambda: None)

    def decode_elsewhere(work: Callable[[], Request], then: Any, **_: object) -> None:
        decoded = work()
        then(lambda: decoded)

    inference = Plain(ModelRoute(repository, model, decode_elsewhere), client, ask(), None)
    inference._started_us -= 1_500_000
    model.batcher.submit = sent.append  # type: ignore[method-assign,assignment]
    inference.set_lane(1, 0)
    inference.start_offloaded()
    repository.close()
    assert 0 < sent[0].deadline_us - sent[0].arrived_us <= 500_000


# -- Replacing engines


class Plus(GatedEngine):
    """Adds `more` to the output of a FakeEngine."""

    def __init__(self, more: float = 0) -> None:
        super().__init__()
        self.more = more

    def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
        return {"y": super().__call__(feeds)["y"] + np.float32(self.more)}


def test_a_replaced_engine_finishes_its_requests_and_is_closed() -> None:
    old, new, notes, seen = Plus(0), Plus(100), Watcher(), list[BatchRun]()
    notes.record_run = seen.append  # type: ignore[method-assign,assignment]
    repository = ModelRepository({"m": old}, ServeOptions(max_batch=2))
    model = repository.find("m")
    model.watch(notes)
    old.warm = True
    before = [model.submit(ask(), ignore)]
    assert old.entered.acquire(timeout=WAIT_S)
    before += [model.submit(ask(), ignore) for _ in range(5)]
    model.replace([new])
    assert not old.closed
    came = threading.Event()
    after = model.submit(ask(), lambda _: came.set())
    assert came.wait(WAIT_S)  # the new one serves while the old one is still busy
    assert model.unanswered == 6
    assert model.batcher.waiting == 5  # they were prepared for the old one: by its task, perhaps
    assert model.batcher.cancel(before[-1])
    old.gate.set()
    repository.close()
    assert [request.error for request in before] == [None] * 6
    answers = [float(request.outputs["y"][0, 0]) for request in (*before[:5], after)]
    assert answers == [*[7] * 5, 107]
    assert old.closed
    assert new.closed
    assert new.batches[:2] == [1, 2]  # warmed up before it served
    assert old.batches == [1, 2, 2]
    assert len(seen) == 4  # a watcher sees the runs of both
    with pytest.raises(Overloaded, match="shutting down"):
        model.replace([FakeEngine()])


def test_a_deadline_applies_to_requests_of_a_replaced_engine() -> None:
    clock, old = Clock(), Plus()
    with holding({"m": old}, clock, timeout_ms=1) as repository:
        old.warm = True
        stuck = repository.find("m").submit(ask(), ignore)
        assert old.entered.acquire(timeout=WAIT_S)
        repository.find("m").replace([Plus()])
        clock.us = 1000
        repository.expire()
        assert stuck.error is not None
        assert repository.find("m").unanswered == 0
        assert repository.why_not_ready() is None
        old.gate.set()


@pytest.mark.parametrize(
    ("engines", "error", "match"),
    [
        ([FakeEngine(width=5)], BadInput, "inputs of one engine"),
        ([FakeEngine(), FakeEngine(width=5)], BadInput, "inputs of one engine"),
        ([FakeEngine(max_batch=2)], BadInput, "batches of 2 at most"),
        ([raises(RuntimeError("boom"))], Unsupported, "boom"),
    ],
    ids=["another shape", "two shapes", "smaller batches", "no warm-up"],
)
def test_replacement_engines_must_accept_the_same_requests(
    engines: list[FakeEngine], error: type[Exception], match: str
) -> None:
    old = FakeEngine()
    with holding({"m": old}) as repository:
        with pytest.raises(error, match=match):
            repository.find("m").replace(engines)
        pending = repository.find("m").submit(ask(), ignore)
    assert pending.error is None
    assert not any(engine.closed for engine in (old, *engines))  # the caller still owns them


def test_a_replacement_that_gets_no_thread_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, start = [FakeEngine(), FakeEngine()], threading.Thread.start
    before = {*threading.enumerate()}

    def start_one(thread: threading.Thread) -> None:
        if thread.name.endswith(" 1"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with holding({"m": FakeEngine()}) as repository:
        monkeypatch.setattr(threading.Thread, "start", start_one)
        with pytest.raises(RuntimeError):
            repository.find("m").replace(engines)
        assert repository.find("m").submit(ask(), ignore)
        assert repository.find("m").in_use.generation == 1
    assert not any(engine.closed for engine in engines)
    started = {*threading.enumerate()} - before
    assert not any(each.name.startswith("engine m") for each in started)


# -- Requests are joined only where their rows were seen not to depend on each other


@contextmanager
def served(model: onnx.ModelProto, folder: Path, **options: Any) -> Iterator[ModelRepository]:
    """A repository of one warm model `m` on ONNX Runtime."""
    path = save(model, folder / "m.onnx")
    with load(path, "cpu", threads=1) as engine, holding({"m": engine}, **options) as repository:
        repository.warm_up()
        yield repository


def answer(repository: ModelRepository, x: np.ndarray) -> np.ndarray:
    """The output of one request to `m`."""
    model, done = repository.find("m"), threading.Event()
    rows = len(x) if model.max_batch else 1
    asked = Request({"x": x}, rows, (("x", "FP32", (4,)),), (RequestedOutput("y", True),))
    pending = model.submit(asked, lambda _: done.set())
    assert done.wait(WAIT_S)
    assert pending.error is None
    return pending.outputs["y"]


@pytest.mark.parametrize("make", DEPENDENT.values(), ids=DEPENDENT)
def test_a_model_whose_rows_depend_on_each_other_is_served_one_request_at_a_time(
    make: Make, tmp_path: Path
) -> None:
    with served(make(), tmp_path) as repository:
        model = repository.find("m")
        config = model.config()["max_batch_size"]
        assert (model.max_batch, model.batcher.policy.max_batch, config) == (0, 0, 0)


@pytest.mark.parametrize("make", BATCHED.values(), ids=BATCHED)
def test_a_model_whose_rows_are_independent_is_batched(make: Make, tmp_path: Path) -> None:
    with served(make(), tmp_path, max_batch=16) as repository:
        model = repository.find("m")
        assert (model.max_batch, model.notes) == (16, ())


def test_log_metadata_metrics_and_docs_say_whether_and_why_requests_are_not_joined(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gauge = 'deploykit_model_batched{model="m",version="1"}'
    x = np.arange(20, dtype=np.float32).reshape(5, 4)
    with served(reverse(), tmp_path, max_batch=2) as repository:
        assert np.array_equal(answer(repository, x), x[::-1])  # of any number of rows
        about = repository.find("m").metadata()["parameters"]
        page = guide(repository, Address("http", "h", None, False))
        assert f"{gauge} 0" in metrics(repository)
    assert about["batching"].startswith("off: output 'y' of a row changes")
    for text in (about["notes"], caplog.text):
        assert "requests are served one at a time: output 'y'" in text
    assert b"not batched: output &#x27;y&#x27; of a row changes" in page
    with served(linear(), tmp_path) as repository:
        assert repository.find("m").metadata()["parameters"]["batching"] == "on"
        assert f"{gauge} 1" in metrics(repository)


def test_a_model_that_is_assumed_to_be_batched_is_batched(tmp_path: Path) -> None:
    for graph, max_batch in ((same_for_all(), 32), (similarity(), 0)):  # [N,N] is never split
        with served(graph, tmp_path, assume_batched=True) as repository:
            assert repository.find("m").max_batch == max_batch


def test_an_output_without_a_shape_is_answered_with_its_own(tmp_path: Path) -> None:
    """ONNX Runtime calls it a scalar: it was the error of an engine that returns another shape."""
    node, where = onnx.helper.make_node, ["where"]
    nodes = [
        node("NonZero", ["x"], ["places"]),
        node("Transpose", ["places"], where),
        node("GatherND", ["x", *where], ["y"]),
    ]
    model = make(nodes, {"x": ROW}, {"y": ("K",)}, {})
    model.graph.output[0].type.tensor_type.ClearField("shape")
    del model.graph.value_info[:]
    with served(model, tmp_path) as repository:
        x = np.array([[1, 0, 2, 0], [0, 0, 0, 3]], np.float32)
        assert answer(repository, x).tolist() == [1, 2, 3]
    model = linear()
    model.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(Unsupported, match="the input 'x' has no shape") as refused:
        load(save(model, tmp_path / "m.onnx"), "cpu")
    assert "a name" in (refused.value.hint or "")


class Counting(FakeEngine):
    """2x + 1, with no evidence that its rows are independent, or that of `rows` rows."""

    def __init__(self, *rows: int, passed: bool = True) -> None:
        super().__init__()
        self.batching = RowIndependence(passed, "seen before", rows) if rows else None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("engine", "max_batch", "batches"),
    [(Counting(2, 8), 8, [1, 8, 2, 4]), (Counting(2, passed=False), 0, [1])],
    ids=["passed", "failed"],
)
def test_evidence_in_the_manifest_replaces_the_runs(
    engine: Counting, max_batch: int, batches: list[int]
) -> None:
    assert warmed(engine, max_batch=8).max_batch == max_batch
    assert engine.batches == batches
    smaller = Counting(2, 4)
    assert warmed(smaller, max_batch=8).max_batch == 8
    assert 3 in smaller.batches  # the proof ran, as it does without evidence


def test_the_proof_and_the_warm_up_take_few_runs() -> None:
    class Slow(Counting):
        def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
            self.latency_s = 0.04 if not self.batches else 0.0  # above what is called quick
            return super().__call__(feeds)

    engine = Slow()
    assert warmed(engine, max_batch=64).max_batch == 64
    assert len(engine.batches) <= 17
    assert engine.batches.count(64) == 2


def test_what_joins_requests_is_refused_for_a_model_with_dependent_rows(tmp_path: Path) -> None:
    other = load(save(reverse(), tmp_path / "other.onnx"), "cpu", threads=1)
    identity = make([onnx.helper.make_node("Identity", ["x"], ["y"])], {"x": ROW}, {"y": ROW}, {})
    with other, served(identity, tmp_path) as repository:
        with pytest.raises(BadInput, match="are joined"):
            repository.find("m").replace([other])
        x = np.ones((2, 4), np.float32)
        assert np.array_equal(answer(repository, x), x)
    shape, node = ("N", "T"), onnx.helper.make_node("Softmax", ["x"], ["y"], axis=0)
    model = make([node], {"x": shape}, {"y": shape}, {})
    with (
        pytest.raises(BadInput, match="`buckets` join requests"),
        served(model, tmp_path, buckets={"T": (8, 16)}),
    ):
        pass


def test_invented_inputs_that_the_model_refuses_are_replaced_by_its_golden_samples() -> None:
    class Picky(Counting):
        def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
            if not (feeds["x"].max() > 5).all():
                raise BadInput("not what it was made for")
            return super().__call__(feeds)

    engine = Picky()
    assert not prove_rows(engine, 8).passed
    found = prove_rows(engine, 8, samples={"x": np.arange(16, dtype=np.float32).reshape(4, 4) + 9})
    assert (found.passed, found.rows) == (True, (2, 3, 4, 8))


def test_rows_of_an_engine_that_rounds_differently_by_batch_size_are_joined() -> None:
    class Rounding(Counting):
        def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
            found = super().__call__(feeds)["y"]
            return {"y": found * np.float32(1 + 1e-3 * (len(found) % 3))}

    assert warmed(Rounding(), max_batch=8).max_batch == 8
