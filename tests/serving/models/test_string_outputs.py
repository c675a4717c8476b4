"""A real classifier whose `label` is one string per row: each request gets its own label."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
