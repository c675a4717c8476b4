"""One model: its description, and engines that are replaced while it serves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
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
from deploykit.serving.web import examples as guide
from deploykit.serving.web.examples import Address
from tests.support.fake_engine import FakeEngine
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
        assert model.max_batch == 0
        assert model.batcher.policy.max_batch == 0
        assert model.config()["max_batch_size"] == 0


@pytest.mark.parametrize("make", BATCHED.values(), ids=BATCHED)
def test_a_model_whose_rows_are_independent_is_batched(make: Make, tmp_path: Path) -> None:
    with served(make(), tmp_path, max_batch=16) as repository:
        model = repository.find("m")
        assert (model.max_batch, model.notes) == (16, ())


def test_log_metadata_metrics_and_docs_say_why_requests_are_not_joined(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with served(reverse(), tmp_path) as repository:
        model = repository.find("m")
        metadata, metrics = model.metadata(), exposition(repository.samples())[0]
        page = guide.page(repository, Address("http", "h", None, False))
    assert metadata["parameters"]["batching"].startswith("off: output 'y' of a row changes")
    assert "requests are served one at a time: output 'y'" in metadata["parameters"]["notes"]
    assert 'deploykit_model_batched{model="m",version="1"} 0' in metrics.decode()
    assert "requests are served one at a time: output 'y'" in caplog.text
    assert b"not batched: output &#x27;y&#x27; of a row changes" in page


def test_metadata_and_metrics_show_a_batched_model(tmp_path: Path) -> None:
    with served(linear(), tmp_path) as repository:
        assert repository.find("m").metadata()["parameters"]["batching"] == "on"
        metrics = exposition(repository.samples())[0]
        assert b'deploykit_model_batched{model="m",version="1"} 1' in metrics


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
    """2x + 1, with no evidence that its rows are independent."""

    batching = None


def proof(*rows: int, passed: bool = True) -> RowIndependence:
    return RowIndependence(passed, "seen before", rows)


@pytest.mark.parametrize(
    ("known", "batches", "max_batch"),
    [
        (proof(2, 8), [1, 8, 2, 4], 8),
        (proof(2, passed=False), [1], 0),
    ],
    ids=["passed", "failed"],
)
def test_evidence_in_the_manifest_replaces_the_runs(
    known: RowIndependence, batches: list[int], max_batch: int
) -> None:
    engine = Counting()
    engine.batching = known  # type: ignore[assignment]
    model = warmed(engine, max_batch=8)
    assert (engine.batches, model.max_batch) == (batches, max_batch)


def test_evidence_for_smaller_batches_is_not_enough() -> None:
    engine = Counting()
    engine.batching = proof(2, 4)  # type: ignore[assignment]
    assert warmed(engine, max_batch=8).max_batch == 8
    assert 3 in engine.batches  # the proof ran, as it does without evidence


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
    import onnxruntime as ort

    path = save(attention(), tmp_path / "m.onnx")
    session = ort.InferenceSession(path)
    wrong: list[str] = []

    def client(seed: int, port: int) -> None:
        random, raw = np.random.default_rng(seed), Raw(port)
        for _ in range(150):
            rows = int(random.integers(1, 6))
            x = random.standard_normal((rows, 4)).astype(np.float32)
            raw.send(
                request("POST", "/v2/models/m/infer", infer_json(x.ravel().tolist(), [rows, 4]))
            )
            reply = raw.reply()
            if reply.status != 200:
                wrong.append(reply.body.decode())
                continue
            got = np.array(reply.json["outputs"][0]["data"], np.float32).reshape(rows, -1)
            if not np.array_equal(got, session.run(None, {"x": x})[0]):
                wrong.append(f"{rows} rows")
        raw.close()

    with load(path, "cpu", threads=1) as engine, running({"m": engine}) as server:
        threads = [threading.Thread(target=client, args=(n, server.port)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
