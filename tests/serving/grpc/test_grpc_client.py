"""The real tritonclient.grpc against the server: sync, async, streaming and aio."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from deploykit.core.tensors import PROTOCOL_NAMES
from tests.support.fake_engine import FakeEngine
from tests.support.serving.grpc_cases import WAIT_S, Echo, Serving, serving

triton = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
import tritonclient.grpc.aio as triton_aio  # noqa: E402
from tritonclient.grpc import service_pb2  # noqa: E402

VALUES = {
    "bool": [True, False, True],
    "float16": [1.5, -2, 65504],
    "bfloat16": [1.5, -2, 256],
    "float32": [1.5, -2.25, 3e38],
    "float64": [1.5, -2.25, 1e300],
    "string": ["", "abc", "ü\0"],
    **{f"int{bits}": [-(1 << (bits - 1)), 0, (1 << (bits - 1)) - 1] for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": [0, 7, (1 << bits) - 1] for bits in (8, 16, 32, 64)},
}


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    models = {"m": FakeEngine(), "wide": FakeEngine(width=2_500_000)}
    models.update({dtype: Echo(dtype) for dtype in PROTOCOL_NAMES})
    with serving(models, max_batch=16, max_body_bytes=12 << 20) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Serving) -> Iterator[Any]:
    with triton.InferenceServerClient(f"127.0.0.1:{served.port}") as client:
        yield client


def rows(count: int, start: float = 0, width: int = 4) -> np.ndarray:
    return np.arange(start, start + count * width, dtype=np.float32).reshape(count, width)


def tensor(array: np.ndarray, datatype: str = "FP32") -> Any:
    made = triton.InferInput("x", list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def sent(dtype: str) -> np.ndarray:
    if dtype == "string":
        return np.array([[text.encode() for text in VALUES[dtype]]], object)
    if dtype == "bfloat16":
        ml_dtypes = pytest.importorskip("ml_dtypes", reason="tritonclient wants it for BF16")
        return np.array([VALUES[dtype]], ml_dtypes.bfloat16)
    return np.array([VALUES[dtype]], dtype)


def test_the_server_and_the_models_are_live_and_ready(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("m")
    assert client.is_model_ready("m", "1")
    assert not client.is_model_ready("other")
    assert not client.is_model_ready("m", "2")


def test_the_client_reads_metadata_config_and_repository_index(
    client: Any, served: Serving
) -> None:
    assert client.get_server_metadata().name == "deploykit"
    metadata = client.get_model_metadata("m")
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [
        ("x", "FP32", [-1, 4])
    ]
    config = client.get_model_config("m", as_json=True)["config"]
    assert config["max_batch_size"] == 16
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": ["4"]}]
    assert "dynamic_batching" in config
    names = [model.name for model in client.get_model_repository_index().models]
    assert names == list(served.repository.models)


@pytest.mark.parametrize("dtype", sorted(PROTOCOL_NAMES))
def test_each_datatype_is_sent_and_returned_as_raw_contents(client: Any, dtype: str) -> None:
    array = sent(dtype)
    answer = client.infer(dtype, [tensor(array, PROTOCOL_NAMES[dtype])], request_id="a7")
    np.testing.assert_array_equal(answer.as_numpy("y"), array)
    assert answer.get_response().id == "a7"
    assert answer.get_output("y").datatype == PROTOCOL_NAMES[dtype]


@pytest.mark.parametrize("dtype", sorted(set(PROTOCOL_NAMES) - {"float16", "bfloat16"}))
def test_each_datatype_is_accepted_as_typed_contents(client: Any, dtype: str) -> None:
    """Clients in other languages send typed contents; the answer is raw."""
    request = service_pb2.ModelInferRequest(model_name=dtype)
    array = sent(dtype)
    item = request.inputs.add(name="x", datatype=PROTOCOL_NAMES[dtype], shape=array.shape)
    kind, bits = dtype.rstrip("0123456789"), dtype.strip("abcdefghijklmnopqrstuvwxyz")
    field = {"bool": "bool", "float": f"fp{bits}", "string": "bytes"}.get(kind)
    field = field or (kind if bits != "64" else dtype)
    values = array.ravel().tolist()
    getattr(item.contents, f"{field}_contents").extend(values)
    answer = triton.InferResult(client._client_stub.ModelInfer(request))
    np.testing.assert_array_equal(answer.as_numpy("y"), array)


def test_a_chosen_output_can_be_classified(client: Any) -> None:
    wanted = triton.InferRequestedOutput("y", class_count=2)
    answer = client.infer("m", [tensor(rows(2))], outputs=[wanted]).as_numpy("y")
    assert answer.tolist() == [
        [b"7.000000:3", b"5.000000:2"],
        [b"15.000000:3", b"13.000000:2"],
    ]


@pytest.mark.parametrize("shape", [(0, 4), (1, 4), (16, 4)])
def test_batches_from_zero_rows_to_max_batch_are_answered(
    client: Any, shape: tuple[int, int]
) -> None:
    array = rows(shape[0])
    answer = client.infer("m", [tensor(array)]).as_numpy("y")
    np.testing.assert_array_equal(answer, array * 2 + 1)


def test_a_tensor_of_10_megabytes_is_sent_and_returned(client: Any) -> None:
    array = rows(1, width=2_500_000)
    answer = client.infer("wide", [tensor(array)]).as_numpy("y")
    np.testing.assert_array_equal(answer, array * 2 + 1)


def test_many_large_requests_at_once_are_all_answered(client: Any) -> None:
    """More bytes than one connection may buffer: flow control lets them in one after another."""
    arrays = [rows(1, number, width=2_500_000) for number in range(10)]
    answers: queue.Queue[Any] = queue.Queue()
    for number, array in enumerate(arrays):
        client.async_infer(
            "wide",
            [tensor(array)],
            lambda result, error, number=number: answers.put((number, result, error)),
        )
    for _ in arrays:
        number, result, error = answers.get(timeout=WAIT_S)
        assert error is None
        np.testing.assert_array_equal(result.as_numpy("y")[0, :5], arrays[number][0, :5] * 2 + 1)


def test_async_requests_get_their_own_answers(client: Any) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    for number in range(200):
        client.async_infer(
            "m",
            [tensor(rows(1 + number % 3, number))],
            lambda result, error, number=number: answers.put((number, result, error)),
        )
    for _ in range(200):
        number, result, error = answers.get(timeout=WAIT_S)
        assert error is None
        np.testing.assert_array_equal(result.as_numpy("y"), rows(1 + number % 3, number) * 2 + 1)


def test_a_stream_answers_requests_and_errors_in_order(served: Serving) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(f"127.0.0.1:{served.port}") as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(300):
            name = "other" if number % 7 == 3 else "m"
            client.async_stream_infer(
                name,
                [tensor(rows(1, number))],
                request_id=str(number),
                enable_empty_final_response=True,
            )
        for number in range(300):
            result, error = answers.get(timeout=WAIT_S)
            if number % 7 == 3:
                assert "there is no model 'other'" in str(error)
            else:
                assert error is None
                assert result.get_response().id == str(number)
                final = result.get_response().parameters["triton_final_response"]
                assert final.bool_param
                np.testing.assert_array_equal(result.as_numpy("y"), rows(1, number) * 2 + 1)
        client.stop_stream()


def test_the_aio_client_infers_and_streams(served: Serving) -> None:
    async def ask() -> None:
        async with triton_aio.InferenceServerClient(f"127.0.0.1:{served.port}") as client:
            assert await client.is_server_ready()
            calls = [client.infer("m", [tensor(rows(1, n))]) for n in range(50)]
            for number, answer in enumerate(await asyncio.gather(*calls)):
                np.testing.assert_array_equal(answer.as_numpy("y"), rows(1, number) * 2 + 1)

            async def requests() -> Any:
                for number in range(20):
                    yield {"model_name": "m", "inputs": [tensor(rows(1, number))]}

            number = 0
            async for result, error in client.stream_infer(requests()):
                assert error is None
                np.testing.assert_array_equal(result.as_numpy("y"), rows(1, number) * 2 + 1)
                number += 1
            assert number == 20

    asyncio.run(asyncio.wait_for(ask(), WAIT_S))


@pytest.mark.parametrize("how", ["gzip", "deflate"])
def test_compressed_messages_are_accepted(client: Any, how: str) -> None:
    array = rows(16)
    answer = client.infer("m", [tensor(array)], compression_algorithm=how).as_numpy("y")
    np.testing.assert_array_equal(answer, array * 2 + 1)


def test_statistics_count_requests_and_rows(client: Any) -> None:
    before = client.get_inference_statistics("int8").model_stats[0]
    for _ in range(3):
        client.infer("int8", [tensor(np.zeros((4, 3), np.int8), "INT8")])
    after = client.get_inference_statistics("int8").model_stats[0]
    assert after.inference_count - before.inference_count == 12
    grown = {
        field.name: getattr(after.inference_stats, field.name).count
        - getattr(before.inference_stats, field.name).count
        for field in after.inference_stats.DESCRIPTOR.fields
    }
    ran = ("success", "queue", "compute_input", "compute_infer", "compute_output")
    assert grown == {**dict.fromkeys(ran, 3), "fail": 0, "cache_hit": 0, "cache_miss": 0}
    names = [each.name for each in client.get_inference_statistics().model_stats]
    assert "m" in names
    assert "int8" in names


@pytest.mark.parametrize(
    ("array", "name", "status", "said"),
    [
        (rows(1), "other", "NOT_FOUND", "there is no model 'other'; served here: m"),
        (rows(1, width=5), "m", "INVALID_ARGUMENT", r"x:float32\[N,4\], got shape \[1, 5\]"),
        (rows(17), "m", "INVALID_ARGUMENT", "`max_batch`"),
        (rows(1), "m:2", "NOT_FOUND", "no version '2'"),
    ],
)
def test_errors_have_the_messages_of_the_http_server(
    client: Any, array: np.ndarray, name: str, status: str, said: str
) -> None:
    with pytest.raises(triton.InferenceServerException, match=said) as caught:
        client.infer(name.partition(":")[0], [tensor(array)], name.partition(":")[2])
    assert caught.value.status() == f"StatusCode.{status}"


def test_methods_that_are_not_offered_are_unimplemented(client: Any) -> None:
    for call in (
        lambda: client.load_model("m"),
        lambda: client.unload_model("m"),
        client.get_trace_settings,
        client.get_log_settings,
        client.get_system_shared_memory_status,
        lambda: client.register_system_shared_memory("r", "/key", 64),
        client.get_cuda_shared_memory_status,
        lambda: client.register_cuda_shared_memory("r", b"", 0, 64),
    ):
        with pytest.raises(triton.InferenceServerException, match="not offered") as caught:
            call()
        assert caught.value.status() == "StatusCode.UNIMPLEMENTED"
