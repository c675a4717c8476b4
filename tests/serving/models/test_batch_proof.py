"""Requests are joined only where their rows were seen not to depend on each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.evidence import RowIndependence
from deploykit.engines.batching import prove_rows
from deploykit.engines.engine import load
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
from tests.support.serving.running import WAIT_S, Raw, infer_json, request, running
from tests.support.serving.scrapes import exposition
from tests.support.serving.warming import warmed

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
