"""One model: its description, and engines that are replaced while it serves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from deploykit.core.artefact import Artefact
from deploykit.core.errors import BadInput, Overloaded, Unsupported
from deploykit.core.evidence import Evidence, QuantizeRecord, RowIndependence
from deploykit.core.manifest import Manifest
from deploykit.engines.batching import prove_rows
from deploykit.engines.engine import load
from deploykit.serving.batching.queue import Pending, Watcher
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.oip.request import Request, RequestedOutput
from deploykit.serving.options import ServeOptions
from deploykit.serving.web.page import Address, guide
from tests.support.fake_engine import FakeEngine, Function
from tests.support.graphs.batch_graphs import (
    BATCHED,
    DEPENDENT,
    ROW,
    attention,
    reverse,
    same_for_all,
    similarity,
)
from tests.support.onnx_zoo import linear, make, save
from tests.support.serving.grpc_cases import frames, infer_bytes
from tests.support.serving.running import WAIT_S, GatedEngine, Raw, infer_json, request, running
from tests.support.serving.scrapes import exposition
from tests.support.serving.warming import Clock, Lengths, TimedEngine, warmed


def ask(rows: int = 1) -> Request:
    feeds = {"x": np.full((rows, 4), 3, np.float32)}
    return Request(feeds, rows, (("x", "FP32", (4,)),), (RequestedOutput("y", True),))


def ignore(_: Pending) -> None:
    """The answer of a request that nobody waits for."""


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


@pytest.mark.parametrize(
    ("made_for", "runs", "device", "changes", "noted"),
    [
        ("tensorrt", "onnxruntime 1.31.1", "cpu", {}, True),
        ("tensorrt", "openvino 2026.1", "cpu", {}, True),
        ("tensorrt", "onnxruntime 1.31.1", "cuda:0", {}, False),
        ("onnxruntime", "onnxruntime 1.31.1", "cpu", {}, False),
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


def test_a_watcher_added_later_sees_the_runs_of_replaced_engines() -> None:
    seen: list[object] = []

    class Notes(Watcher):
        def record_run(self, run: object) -> None:
            seen.append(run)

    repository = ModelRepository({"m": FakeEngine()}, ServeOptions())
    model = repository.find("m")
    model.watch(Notes())
    model.replace([FakeEngine()])
    model.submit(ask(), ignore)
    repository.close()
    assert len(seen) == 1
    assert repository.statistics()["model_stats"][0]["inference_count"] == 1
    with pytest.raises(Overloaded, match="shutting down"):
        model.replace([FakeEngine()])


def test_with_an_slo_the_batch_limit_follows_from_warm_up_times() -> None:
    clock = Clock()
    engine, options = TimedEngine(clock, 1000, 1000), ServeOptions(slo_ms=20)
    repository = ModelRepository({"m": engine}, options, clock_us=clock)
    repository.warm_up()
    policies = [repository.find("m").batcher.policy]
    repository.expire()
    policies.append(repository.find("m").batcher.policy)
    assert [policy.max_batch for policy in policies] == [32, 8]  # 2 x (1 + 8) ms, of 20 ms
    shown = exposition(repository.samples())[0].decode()
    repository.close()
    for limit in ("batch", "queue"):
        assert f'deploykit_{limit}_limit_rows{{model="m",version="1"}} 8.0\n' in shown


def test_a_request_that_cannot_meet_the_slo_is_refused() -> None:
    clock, engine = Clock(), GatedEngine()
    options = ServeOptions(max_batch=1, slo_ms=0.1)
    repository = ModelRepository({"m": engine}, options, clock_us=clock)
    model = repository.find("m")
    assert model._steering is not None
    model._steering.record_time(1, 10**6, 0)
    repository.expire()
    engine.warm = True
    model.submit(ask(), ignore)
    assert engine.entered.acquire(timeout=WAIT_S)
    model.submit(ask(), ignore)
    with pytest.raises(Overloaded, match="`slo_ms`"):
        model.submit(ask(), ignore)
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
    before = [model.submit(ask(), ignore)]
    assert old.entered.acquire(timeout=WAIT_S)
    before += [model.submit(ask(), ignore) for _ in range(5)]
    model.replace([new])
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
    stuck = repository.find("m").submit(ask(), ignore)
    assert old.entered.acquire(timeout=WAIT_S)
    repository.find("m").replace([Plus()])
    clock.us = 1000
    repository.expire()
    assert stuck.error is not None
    assert repository.unanswered == 0
    assert repository.why_not_ready() is None
    old.gate.set()
    repository.close()


def boom(_feeds: object) -> dict[str, np.ndarray]:
    raise RuntimeError("boom")


@pytest.mark.parametrize(
    ("engines", "error", "match"),
    [
        ([FakeEngine(width=5)], BadInput, "inputs of one engine"),
        ([FakeEngine(), FakeEngine(width=5)], BadInput, "inputs of one engine"),
        ([FakeEngine(max_batch=2)], BadInput, "batches of 2 at most"),
        ([Function(boom)], Unsupported, "boom"),
        ([], BadInput, "no engine"),
    ],
    ids=["another shape", "two shapes", "smaller batches", "no warm-up", "none"],
)
def test_replacement_engines_must_accept_the_same_requests(
    engines: list[FakeEngine], error: type[Exception], match: str
) -> None:
    old = FakeEngine()
    repository = ModelRepository({"m": old}, ServeOptions())
    with pytest.raises(error, match=match):
        repository.find("m").replace(engines)
    pending = repository.find("m").submit(ask(), ignore)
    repository.close()
    assert pending.error is None
    assert not any(engine.closed for engine in (old, *engines))  # the caller still owns them


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
            sent.append(model.submit(ask(), ignore))

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


# -- The inference path that HTTP and gRPC share: each outcome is counted once


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
        metrics = server.ask("GET", "/metrics").body.decode()
    assert OUTCOME % ("bad_request", 1) in metrics
    assert OUTCOME % ("success", 0) in metrics


# -- Requests are joined only where their rows were seen not to depend on each other


Make = Callable[[], onnx.ModelProto]


@contextmanager
def served(model: onnx.ModelProto, folder: Path, **options: Any) -> Iterator[ModelRepository]:
    """A repository of one warm model `m` on ONNX Runtime."""
    with load(save(model, folder / "m.onnx"), "cpu", threads=1) as engine:
        repository = ModelRepository({"m": engine}, ServeOptions(**options))
        try:
            repository.warm_up()
            yield repository
        finally:
            repository.close()


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
    with served(reverse(), tmp_path) as repository:
        about = repository.find("m").metadata()["parameters"]
        metrics = exposition(repository.samples())[0].decode()
        page = guide(repository, Address("http", "h", None, False))
    assert about["batching"].startswith("off: output 'y' of a row changes")
    for text in (about["notes"], caplog.text):
        assert "requests are served one at a time: output 'y'" in text
    assert f"{gauge} 0" in metrics
    assert b"not batched: output &#x27;y&#x27; of a row changes" in page
    with served(linear(), tmp_path) as repository:
        assert repository.find("m").metadata()["parameters"]["batching"] == "on"
        assert f"{gauge} 1" in exposition(repository.samples())[0].decode()


@pytest.mark.parametrize("max_batch", [1, 2, 32])
def test_a_dependent_model_takes_requests_of_any_number_of_rows(
    tmp_path: Path, max_batch: int
) -> None:
    with served(reverse(), tmp_path, max_batch=max_batch) as repository:
        x = np.arange(20, dtype=np.float32).reshape(5, 4)
        assert np.array_equal(answer(repository, x), x[::-1])


def test_a_model_that_is_assumed_to_be_batched_is_batched(tmp_path: Path) -> None:
    with served(same_for_all(), tmp_path, assume_batched=True) as repository:
        assert repository.find("m").max_batch == 32
    with served(similarity(), tmp_path, assume_batched=True) as repository:  # [N,N] is never split
        assert repository.find("m").max_batch == 0


def test_an_output_without_a_shape_is_answered_with_its_own(tmp_path: Path) -> None:
    """ONNX Runtime calls it a scalar: it was the error of an engine that returns another shape."""
    nodes = [
        onnx.helper.make_node("NonZero", ["x"], ["places"]),
        onnx.helper.make_node("Transpose", ["places"], ["where"]),
        onnx.helper.make_node("GatherND", ["x", "where"], ["y"]),
    ]
    model = make(nodes, {"x": ROW}, {"y": ("K",)}, {})
    model.graph.output[0].type.tensor_type.ClearField("shape")
    del model.graph.value_info[:]
    with served(model, tmp_path) as repository:
        x = np.array([[1, 0, 2, 0], [0, 0, 0, 3]], np.float32)
        assert answer(repository, x).tolist() == [1, 2, 3]


def test_an_input_without_a_shape_is_refused_by_name(tmp_path: Path) -> None:
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


def test_the_proof_takes_few_runs_and_the_warm_up_does_not_repeat_the_largest() -> None:
    class Slow(Counting):
        def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
            self.latency_s = 0.04 if not self.batches else 0.0  # above what is called quick
            return super().__call__(feeds)

    engine = Slow()
    assert warmed(engine, max_batch=64).max_batch == 64
    assert len(engine.batches) <= 16
    assert engine.batches.count(64) == 1


def test_a_model_with_dependent_rows_cannot_replace_a_batched_one(tmp_path: Path) -> None:
    other = load(save(reverse(), tmp_path / "other.onnx"), "cpu", threads=1)
    identity = make([onnx.helper.make_node("Identity", ["x"], ["y"])], {"x": ROW}, {"y": ROW}, {})
    with other, served(identity, tmp_path) as repository:
        with pytest.raises(BadInput, match="are joined"):
            repository.find("m").replace([other])
        x = np.ones((2, 4), np.float32)
        assert np.array_equal(answer(repository, x), x)


def test_buckets_are_refused_for_a_model_with_dependent_rows(tmp_path: Path) -> None:
    shape = ("N", "T")
    node = onnx.helper.make_node("Softmax", ["x"], ["y"], axis=0)
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


def test_four_clients_get_the_values_of_their_own_rows(tmp_path: Path) -> None:
    """The whole way, over HTTP: 600 answers of an unbatched attention model."""
    path = save(attention(), tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(path)

    def client(raw: Raw) -> None:
        random = np.random.default_rng(raw.socket.fileno())
        for _ in range(150):
            x = random.standard_normal((int(random.integers(1, 6)), 4)).astype(np.float32)
            body = infer_json(x.ravel().tolist(), [*x.shape])
            reply = raw.ask(request("POST", "/v2/models/m/infer", body))
            assert reply.status == 200, reply.body
            got = np.array(reply.json["outputs"][0]["data"], np.float32).reshape(len(x), -1)
            np.testing.assert_array_equal(got, session.run(None, {"x": x})[0])

    with (
        load(path, "cpu", threads=1) as engine,
        running({"m": engine}) as server,
        ThreadPoolExecutor(4) as pool,
    ):
        list(pool.map(client, [server.connect() for _ in range(4)]))
