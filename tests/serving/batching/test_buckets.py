"""Inputs of variable length, padded to the lengths of `buckets`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx.numpy_helper
import onnx.parser
import pytest

from deploykit.core.errors import BadInput, DeviceLost
from deploykit.core.tensors import TensorSpec
from deploykit.engines.engine import Engine, load
from deploykit.serving.batching.buckets import Buckets, relative_errors
from deploykit.serving.batching.queue import Pending
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.oip.request import Request, RequestedOutput
from deploykit.serving.options import ServeOptions
from tests.support.fake_engine import Function
from tests.support.serving.running import WAIT_S, GatedEngine
from tests.support.serving.warming import Lengths

LENGTHS = {"T": (4, 8)}


def text_model(folder: Path, *, masked: bool) -> Path:
    """ids, mask [N,T] -> the mean of their embeddings [N,3], and each of them [N,T,3].

    Without `masked` the mean is over all of T, so filling T up changes it.
    """
    mean = ["mean = ReduceMean <keepdims = 0> (each, one)", "mean = Div (sum, count)"][masked]
    model = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["" : 18]>
        text (int64[N,T] ids, int64[N,T] mask) => (float[N,3] mean, float[N,T,3] each)
        <int64[1] last = {{-1}}, int64[1] one = {{1}}> {{
            each = Gather (table, ids)
            ones = Cast <to = 1> (mask)
            ones3 = Unsqueeze (ones, last)
            kept = Mul (each, ones3)
            sum = ReduceSum <keepdims = 0> (kept, one)
            count = ReduceSum <keepdims = 0> (ones3, one)
            {mean}
        }}"""
    )
    table = np.random.default_rng(0).standard_normal((10, 3)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    path = folder / f"text-{masked}.onnx"
    onnx.save(model, path)
    return path


def buckets(engine: Engine, lengths: Mapping[str, tuple[int, ...]] = LENGTHS) -> Buckets:
    return Buckets("m", engine.inputs, engine.outputs, lengths, {})


def ids(length: int, rows: int = 1, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed + length)
    return {
        "ids": random.integers(0, 10, (rows, length)),
        "mask": np.ones((rows, length), np.int64),
    }


def ask(feeds: dict[str, np.ndarray]) -> Request:
    key = tuple((name, "INT64", array.shape[1:]) for name, array in feeds.items())
    return Request(feeds, len(feeds["ids"]), key, (RequestedOutput("mean", True),))


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    pytest.importorskip("onnxruntime")
    return load(text_model(tmp_path, masked=True), "cpu")


def test_requests_of_different_lengths_share_a_batch_and_get_unpadded_outputs(
    engine: Engine,
) -> None:
    """A real engine behind a real queue: batches form while the engine is blocked."""

    class Blocking(GatedEngine):
        inputs = engine.inputs

        def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
            if self.warm:
                self.batches.append(feeds["ids"].shape)
                self.entered.release()
                assert self.gate.wait(WAIT_S)
            return engine(feeds)

    blocked = Blocking()
    blocked.inputs, blocked.outputs = engine.inputs, engine.outputs
    repository = ModelRepository({"m": blocked}, ServeOptions(buckets={"T": (16, 8)}))
    repository.warm_up()
    blocked.warm = True
    model = repository.find("m")
    first = model.submit(ask(ids(16)), lambda _: None)
    assert blocked.entered.acquire(timeout=WAIT_S)
    sent = [
        model.submit(ask(ids(length, rows)), lambda _: None)
        for length, rows in [(3, 1), (8, 2), (5, 1), (9, 1), (1, 3)]
    ]
    blocked.gate.set()
    repository.close()
    assert blocked.batches == [(1, 16), (7, 8), (1, 16)]
    for request in [first, *sent]:
        alone = engine(request.feeds)
        for name, want in alone.items():
            assert request.outputs[name].shape == want.shape
            np.testing.assert_allclose(request.outputs[name], want, rtol=1e-6, atol=1e-6)


def test_a_model_without_a_mask_is_refused_at_start(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    engine = load(text_model(tmp_path, masked=False), "cpu")
    repository = ModelRepository({"bert": engine}, ServeOptions(buckets=LENGTHS))
    with pytest.raises(BadInput, match=r"model 'bert': output 'mean' at T=\d changes by [0-9.]+"):
        repository.warm_up()
    repository.close()


def test_the_check_skips_lengths_that_the_engine_refuses() -> None:
    buckets(Lengths(3)).check(Lengths(3), 8)
    with pytest.raises(BadInput, match="too short"):
        buckets(Lengths(9)).check(Lengths(9), 8)


def full(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    if feeds["x"].shape[1] not in (4, 8):
        raise BadInput("not a full length")
    return {"y": feeds["x"] + feeds["x"].shape[1]}


TEXT, SAME = "x:float32[N,T]", "y:float32[N,T]"


def lost(feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    if len(feeds["x"]) == 1:
        raise DeviceLost("gone")
    return {"y": feeds["x"]}


@pytest.mark.parametrize(
    ("engine", "error", "words"),
    [
        # rows that affect each other
        (Function(lambda x: {"y": x["x"] + x["x"].sum()}, TEXT, SAME), BadInput, "output 'y'"),
        # as long as T, but not by name: its padding cannot be removed
        (Function(lambda x: {"y": x["x"]}, TEXT, "y:float32[N,M]"), BadInput, "changes by inf"),
        (Function(lost, TEXT, SAME), DeviceLost, "gone"),  # no refused length
        # it runs at the buckets alone: what is padded has nothing to be compared with
        (Function(full, TEXT, SAME), BadInput, "no length below the bucket of T=4 runs"),
    ],
    ids=["rows", "uncut", "lost", "full"],
)
def test_a_model_whose_padding_changes_its_outputs_is_refused(
    engine: Engine, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        buckets(engine).check(engine, 8)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"buckets": {"S": (4,)}}, "`buckets` S: no served model"),
        ({"buckets": {"T": (0, 4)}}, "lengths are 1 or more"),
        ({"buckets": LENGTHS, "pad": {"ids": 0.5}}, r"`pad` ids=0\.5: the input is int64"),
    ],
)
def test_impossible_bucket_options_are_refused_at_start(
    engine: Engine, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(BadInput, match=match):
        ModelRepository({"m": engine}, ServeOptions(**options))


def test_each_input_is_padded_with_its_own_value() -> None:
    specs = (TensorSpec("a", "int64", ("N", "T")), TensorSpec("b", "float32", ("N", 2, "T")))
    found = Buckets("m", specs, specs, LENGTHS, {"a": 7, "b": -1.5})
    feeds = {"a": np.zeros((1, 3), np.int64), "b": np.zeros((1, 2, 3), np.float32)}
    key = tuple((name, "", array.shape[1:]) for name, array in feeds.items())
    request = Pending(feeds, 1, found.key(key), lambda _: None, 0, 0, 0)
    stacked = found.stack([request])
    assert stacked["a"].tolist() == [[0, 0, 0, 7]]
    assert stacked["b"].tolist() == [[[0, 0, 0, -1.5]] * 2]
    cut = found.cut(request, dict(stacked))
    assert (cut["a"].shape, cut["b"].shape) == ((1, 3), (1, 2, 3))


def test_a_request_that_fits_its_bucket_is_copied_only_to_align_it(engine: Engine) -> None:
    found, feeds = buckets(engine), ids(4)
    request = Pending(feeds, 1, found.key(ask(feeds).key), lambda _: None, 0, 0, 0)
    whole = feeds["ids"]
    assert found.stack([request])["ids"] is whole
    feeds["ids"] = np.ndarray(whole.shape, whole.dtype, b"?" + whole.tobytes(), 1)
    stacked = found.stack([request])["ids"]
    assert stacked.flags.aligned
    np.testing.assert_array_equal(stacked, whole, strict=True)


AB = np.array([["a", "b"]], object)


@pytest.mark.parametrize(
    ("got", "want", "error"),
    [
        ([[1.0, 2.2]], [[1.0, 2.0]], 0.1),
        ([[np.nan]], [[np.nan]], 0),
        ([[np.nan]], [[1.0]], np.inf),
        ([[1.0]], [[np.inf]], np.inf),
        ([[]], [[]], 0),
        ([[1e-9]], [[0.0]], 1e291),
        (AB, AB.copy(), 0),
        (AB, AB[:, ::-1], np.inf),
    ],
    ids=str,
)
def test_relative_error_of_floats_nan_infinity_and_strings(
    got: Any, want: Any, error: float
) -> None:
    assert relative_errors(np.array(got), np.array(want))[0] == pytest.approx(error)
