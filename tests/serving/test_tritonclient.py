"""The real tritonclient.http against a served .onnx file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.engines.engine import load
from tests.support.serving.running import Running, running

triton = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
onnx = pytest.importorskip("onnx")

WEIGHT = np.arange(6, dtype=np.float32).reshape(3, 2)


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Y = x·W and the largest column's number k, for rows of 3."""
    helper, kind = onnx.helper, onnx.TensorProto
    nodes = [
        helper.make_node("MatMul", ["x", "W"], ["y"]),
        helper.make_node("ArgMax", ["y"], ["k"], axis=1, keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "linear",
        [helper.make_tensor_value_info("x", kind.FLOAT, ["N", 3])],
        [
            helper.make_tensor_value_info("y", kind.FLOAT, ["N", 2]),
            helper.make_tensor_value_info("k", kind.INT64, ["N"]),
        ],
        [onnx.numpy_helper.from_array(WEIGHT, "W")],
    )
    opset = [helper.make_opsetid("", 17)]
    path = tmp_path_factory.mktemp("served") / "linear.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    return path


@pytest.fixture(scope="module")
def served(linear: Path) -> Iterator[Running]:
    with load(linear, "cpu") as engine, running({"linear": engine}, max_batch=16) as server:
        yield server


@pytest.fixture
def client(served: Running) -> Iterator[Any]:
    client = triton.InferenceServerClient(f"127.0.0.1:{served.port}", concurrency=4)
    yield client
    client.close()


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, 3)).astype(np.float32)


def input_x(array: np.ndarray, *, binary: bool = True) -> Any:
    tensor = triton.InferInput("x", list(array.shape), "FP32")
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def test_the_server_and_the_model_are_live_and_ready(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("linear")
    assert client.is_model_ready("linear", "1")
    assert not client.is_model_ready("other")


def test_the_client_reads_metadata_and_config(client: Any) -> None:
    assert client.get_server_metadata()["name"] == "deploykit"
    metadata = client.get_model_metadata("linear")
    assert metadata["platform"] == "onnxruntime_onnx"
    assert [(t["name"], t["datatype"], t["shape"]) for t in metadata["outputs"]] == [
        ("y", "FP32", [-1, 2]),
        ("k", "INT64", [-1]),
    ]
    config = client.get_model_config("linear")
    assert config["max_batch_size"] == 16
    assert [t["data_type"] for t in config["output"]] == ["TYPE_FP32", "TYPE_INT64"]
    assert [t["dims"] for t in config["output"]] == [[2], []]


@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.parametrize("binary_in", [True, False], ids=["bytes in", "json in"])
@pytest.mark.parametrize("binary_out", [True, False], ids=["bytes out", "json out"])
def test_infer_takes_and_returns_binary_and_json(
    client: Any, count: int, binary_in: bool, binary_out: bool
) -> None:
    array = rows(count)
    outputs = [triton.InferRequestedOutput(name, binary_data=binary_out) for name in ("k", "y")]
    answer = client.infer("linear", [input_x(array, binary=binary_in)], outputs=outputs)
    np.testing.assert_allclose(answer.as_numpy("y"), array @ WEIGHT, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(answer.as_numpy("k"), (array @ WEIGHT).argmax(1))
    assert [output["name"] for output in answer.get_response()["outputs"]] == ["k", "y"]


def test_json_and_binary_outputs_can_be_mixed(client: Any) -> None:
    outputs = [
        triton.InferRequestedOutput("y", binary_data=False),
        triton.InferRequestedOutput("k", binary_data=True),
    ]
    answer = client.infer("linear", [input_x(rows(2))], outputs=outputs, request_id="abc")
    response = answer.get_response()
    assert response["id"] == "abc"
    assert ["data" in output for output in response["outputs"]] == [True, False]
    np.testing.assert_array_equal(answer.as_numpy("k"), answer.as_numpy("y").argmax(1))


def test_async_requests_get_their_own_answers(client: Any) -> None:
    arrays = [rows(count) for count in range(1, 9)]
    waiting = [client.async_infer("linear", [input_x(array)]) for array in arrays]
    for array, request in zip(arrays, waiting, strict=True):
        np.testing.assert_allclose(
            request.get_result().as_numpy("y"), array @ WEIGHT, rtol=1e-5, atol=1e-6
        )


def test_statistics_count_requests_and_rows(client: Any) -> None:
    before = client.get_inference_statistics("linear")["model_stats"][0]
    for _ in range(3):
        client.infer("linear", [input_x(rows(4))])
    after = client.get_inference_statistics("linear")["model_stats"][0]
    assert after["inference_count"] - before["inference_count"] == 12
    grown = {
        name: after["inference_stats"][name]["count"] - before["inference_stats"][name]["count"]
        for name in after["inference_stats"]
    }
    ran = ("success", "queue", "compute_input", "compute_infer", "compute_output")
    assert grown == {**dict.fromkeys(ran, 3), "fail": 0, "cache_hit": 0, "cache_miss": 0}


def test_the_repository_index_lists_the_model(client: Any) -> None:
    assert [model["name"] for model in client.get_model_repository_index()] == ["linear"]


@pytest.mark.parametrize(
    ("model", "shape", "said"),
    [
        ("other", (1, 3), "there is no model 'other'"),
        ("linear", (1, 4), r"x:float32\[N,3\], got shape \[1, 4\]"),
        ("linear", (17, 3), "`max_batch`"),
    ],
)
def test_an_error_names_its_cause(
    client: Any, model: str, shape: tuple[int, int], said: str
) -> None:
    with pytest.raises(triton.InferenceServerException, match=said) as caught:
        client.infer(model, [input_x(np.zeros(shape, np.float32))])
    assert caught.value.status() == ("404" if model == "other" else "400")


def test_shared_memory_and_loading_are_not_offered(client: Any) -> None:
    with pytest.raises(triton.InferenceServerException, match="not offered"):
        client.register_system_shared_memory("region", "/key", 64)
    with pytest.raises(triton.InferenceServerException, match="not offered"):
        client.load_model("linear")
