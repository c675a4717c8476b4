"""A real classifier whose `label` is one string per row: each request gets its own label."""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import TooLarge, quote
from deploykit.core.tensors import MOST_STRINGS, TensorSpec
from deploykit.serving.batching.batcher import monotonic_us
from deploykit.serving.batching.queue import Pending
from deploykit.serving.batching.runner import Runner, Splitter, stack
from deploykit.serving.oip import tensors
from deploykit.serving.oip.request import Binary, InputData, plan, signature
from deploykit.serving.oip.tensors import array_bytes
from tests.support.serving.grpc_cases import Echo
from tests.support.serving.loops import KEY

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from deploykit.core.errors import Unsupported
from deploykit.engines.engine import load
from tests.support.serving.grpc_cases import serving
from tests.support.serving.running import Running, running
from tests.support.string_labels import labels_of, samples, write_classifier

INFER = "/v2/models/m/infer"
X = samples(48)


@pytest.fixture(name="served", scope="module")
def served_fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = write_classifier(tmp_path_factory.mktemp("classifier") / "m.onnx")
    with load(path, "cpu") as engine, running({"m": engine}) as server:
        yield server


def infer(served: Running, x: np.ndarray) -> Any:
    item = {"name": "X", "datatype": "FP32", "shape": list(x.shape), "data": x.ravel().tolist()}
    reply = served.ask("POST", INFER, json.dumps({"inputs": [item]}).encode())
    assert reply.status == 200, reply.body
    return {output["name"]: output for output in reply.json["outputs"]}


def test_labels_are_answered_as_json(served: Running) -> None:
    found = infer(served, X[:5])["label"]
    assert (found["datatype"], found["shape"]) == ("BYTES", [5])
    assert found["data"] == labels_of(X[:5])


def test_each_of_many_concurrent_requests_gets_its_own_labels(served: Running) -> None:
    parts = [X[at : at + 1 + at % 3] for at in range(40)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda part: infer(served, part)["label"]["data"], parts))
    assert answers == [labels_of(part) for part in parts]


def test_requests_for_labels_are_joined(served: Running) -> None:
    assert served.ask("GET", "/v2/models/m/config").json["max_batch_size"] == 32


def label(module: Any, port: int) -> list[str]:
    tensor = module.InferInput("X", [5, 4], "FP32")
    tensor.set_data_from_numpy(X[:5])
    with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
        return [each.decode() for each in client.infer("m", [tensor]).as_numpy("label")]


def test_labels_are_answered_in_binary_over_http(served: Running) -> None:
    http = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
    assert label(http, served.port) == labels_of(X[:5])


def test_labels_are_answered_over_grpc(tmp_path: Path) -> None:
    grpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
    path = write_classifier(tmp_path / "m.onnx")
    with load(path, "cpu") as engine, serving({"m": engine}) as server:
        assert label(grpc, server.port) == labels_of(X[:5])


def test_the_probabilities_of_zipmap_are_refused_with_the_way_to_write_them(tmp_path: Path) -> None:
    import onnx

    model = onnx.load(write_classifier(tmp_path / "m.onnx"))
    names = {"classlabels_strings": ["setosa", "versicolor", "virginica"]}
    scores = model.graph.output[1].name
    zipped = onnx.helper.make_node("ZipMap", [scores], ["maps"], domain="ai.onnx.ml", **names)
    model.graph.node.append(zipped)
    kind = onnx.TypeProto()
    kind.sequence_type.elem_type.map_type.key_type = onnx.TensorProto.STRING
    value = kind.sequence_type.elem_type.map_type.value_type.tensor_type
    value.elem_type = onnx.TensorProto.FLOAT
    model.graph.output[1].CopyFrom(onnx.helper.make_value_info("maps", kind))
    onnx.save(model, tmp_path / "zip.onnx")
    with pytest.raises(Unsupported) as refused:
        load(tmp_path / "zip.onnx", "cpu")
    assert "options={'zipmap': False}" in (refused.value.hint or "")


# -- Strings are handled in parts: one call of C for a million of them would stop the event loop


SPECS = [TensorSpec("x", "string", ("N", "W"))]


def test_strings_are_measured_and_encoded_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_BLOCK", 4)
    array = np.array([["a" * n for n in range(5)], [b"\xff", "é", 1, "", "z"]], object)
    assert [block.size for block in tensors.string_blocks(array)] == [4, 4, 2]
    wanted = b"".join(
        len(data).to_bytes(4, "little") + data
        for data in (b"", b"a", b"aa", b"aaa", b"aaaa", b"\xff", "é".encode(), b"1", b"", b"z")
    )
    assert tensors.to_bytes(array, "BYTES") == wanted
    assert array_bytes(array) == array.nbytes + sum(map(sys.getsizeof, array.flat))


@pytest.mark.parametrize("count", [MOST_STRINGS, MOST_STRINGS + 1])
def test_the_strings_of_an_input_are_bounded(count: int) -> None:
    model = signature(SPECS, SPECS, 32, 1 << 30)
    item = InputData("x", "BYTES", [1, count], Binary(None, 0, 4 * count))
    if count > MOST_STRINGS:
        with pytest.raises(TooLarge, match="more than 262144 strings"):
            plan([item], None, {}, None, model)
    else:
        assert plan([item], None, {}, None, model).parts[0].elements == count


@pytest.mark.parametrize(("width", "batches"), [(3, [4]), (MOST_STRINGS // 2, [1, 1, 1, 1])])
def test_the_strings_of_a_batch_are_bounded(width: int, batches: list[int]) -> None:
    engine, rows = Echo("string", "W"), list[int]()

    def join(batch: list[Pending]) -> dict[str, np.ndarray]:
        rows.append(len(batch))
        return dict(stack(batch))

    runner = Runner(engine, "m", join, Splitter(engine.outputs, joined=True), monotonic_us)  # type: ignore[arg-type]
    array = np.full((1, width), "a", object)
    requests = [Pending({"x": array}, 1, KEY, lambda _: None, 0, 0, 0) for _ in range(4)]
    assert runner.finish(runner.start(requests, 0), []) == [None] * 4
    assert rows == batches
    assert all(request.outputs["y"].shape == (1, width) for request in requests)


@pytest.mark.parametrize("value", ["é" * 5_000_000, b"\xff" * 5_000_000, [10**9] * 1_000_000])
def test_a_long_value_is_cut_before_it_is_quoted(value: object) -> None:
    short = quote(value[:200])  # type: ignore[index]
    tracemalloc.start()
    try:
        assert quote(value) == short
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
