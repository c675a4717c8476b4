"""The real tritonclient.http, sync and aio: datatypes, several outputs, compression, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.core.tensors import TensorSpec
from deploykit.serving.batching.queue import Pending
from tests.support.fake_engine import FakeEngine
from tests.support.serving.running import Running, running

triton = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
aio = pytest.importorskip("tritonclient.http.aio")
ml_dtypes = pytest.importorskip("ml_dtypes")

KINDS: dict[str, tuple[str, Any]] = {
    "BOOL": ("bool", np.array([[True, False, True]])),
    "UINT8": ("uint8", np.array([[0, 7, 255]], np.uint8)),
    "UINT16": ("uint16", np.array([[0, 7, 65535]], np.uint16)),
    "UINT32": ("uint32", np.array([[0, 7, 2**32 - 1]], np.uint32)),
    "UINT64": ("uint64", np.array([[0, 7, 2**64 - 1]], np.uint64)),
    "INT8": ("int8", np.array([[-128, 7, 127]], np.int8)),
    "INT16": ("int16", np.array([[-(2**15), 7, 2**15 - 1]], np.int16)),
    "INT32": ("int32", np.array([[-(2**31), 7, 2**31 - 1]], np.int32)),
    "INT64": ("int64", np.array([[-(2**63), 7, 2**63 - 1]], np.int64)),
    "FP16": ("float16", np.array([[-65504, 0.5, 1e-3]], np.float16)),
    "BF16": ("bfloat16", np.array([[-3, 0.5, 1e30]], ml_dtypes.bfloat16)),
    "FP32": ("float32", np.array([[-1e38, 0.1, 1e-38]], np.float32)),
    "FP64": ("float64", np.array([[-1e308, 0.1, 5e-324]], np.float64)),
    "BYTES": ("string", np.array([["", "nul \0 inside", "größe 漢字"]], object)),
}
WEIGHT = np.arange(6, dtype=np.float32).reshape(3, 2)
JSON_KINDS = [kind for kind in KINDS if kind not in ("FP16", "BF16")]


class Echo(FakeEngine):
    """Returns its input."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.inputs = (TensorSpec("x", dtype, ("N", 3)),)
        self.outputs = (TensorSpec("y", dtype, ("N", 3)),)

    def __call__(self, feeds):
        return {"y": np.array(feeds["x"])}


class Linear(FakeEngine):
    """y = x·W, and the number k of its largest column."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = (TensorSpec("x", "float32", ("N", 3)),)
        self.outputs = (TensorSpec("y", "float32", ("N", 2)), TensorSpec("k", "int64", ("N",)))

    def __call__(self, feeds):
        y = feeds["x"] @ WEIGHT
        return {"y": y, "k": y.argmax(1)}


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    models = {kind.lower(): Echo(dtype) for kind, (dtype, _) in KINDS.items()}
    with running({**models, "linear": Linear()}) as server:
        yield server


@pytest.fixture
def client(served: Running) -> Iterator[Any]:
    client = triton.InferenceServerClient(f"127.0.0.1:{served.port}")
    yield client
    client.close()


def input_of(kind: str, *, binary: bool = True, rows: int = 1, module: Any = triton) -> Any:
    array = np.repeat(KINDS[kind][1], rows, axis=0)
    tensor = module.InferInput("x", list(array.shape), kind)
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


def check(kind: str, found: Any, rows: int = 1) -> None:
    expected = np.repeat(KINDS[kind][1], rows, axis=0)
    if kind == "BYTES":
        strings = [t.decode() if isinstance(t, bytes) else t for t in found.reshape(-1)]
        assert strings == list(expected.reshape(-1))
        assert found.shape == expected.shape
    else:
        np.testing.assert_array_equal(found.astype(np.float64), expected.astype(np.float64))
        assert found.dtype.itemsize == expected.dtype.itemsize or kind == "BF16"


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_datatype_is_sent_and_returned_as_binary(client: Any, kind: str, rows: int) -> None:
    answer = client.infer(kind.lower(), [input_of(kind, rows=rows)])
    check(kind, answer.as_numpy("y"), rows)


@pytest.mark.parametrize("kind", JSON_KINDS)
def test_every_datatype_with_a_json_form_is_sent_and_returned(client: Any, kind: str) -> None:
    for binary_in, binary_out in ((False, False), (True, False), (False, True)):
        outputs = [triton.InferRequestedOutput("y", binary_data=binary_out)]
        answer = client.infer(kind.lower(), [input_of(kind, binary=binary_in)], outputs=outputs)
        check(kind, answer.as_numpy("y"))


@pytest.mark.parametrize("kind", ["FP16", "BF16"])
def test_float16_and_bfloat16_have_no_json_form(client: Any, kind: str) -> None:
    outputs = [triton.InferRequestedOutput("y", binary_data=False)]
    with pytest.raises(triton.InferenceServerException, match="no JSON form"):
        client.infer(kind.lower(), [input_of(kind)], outputs=outputs)


@pytest.mark.parametrize("response", [None, "gzip", "deflate"])
@pytest.mark.parametrize("request_", [None, "gzip", "deflate"])
@pytest.mark.parametrize("kind", ["FP32", "BYTES"])
def test_requests_and_answers_may_be_compressed(
    client: Any, kind: str, request_: str | None, response: str | None
) -> None:
    for binary in (True, False):
        answer = client.infer(
            kind.lower(),
            [input_of(kind, binary=binary, rows=32)],
            outputs=[triton.InferRequestedOutput("y", binary_data=binary)],
            request_compression_algorithm=request_,
            response_compression_algorithm=response,
        )
        check(kind, answer.as_numpy("y"), 32)


def test_an_answer_is_compressed_only_when_the_client_accepts_it(served: Running) -> None:
    from tests.support.serving.running import infer_json

    body = infer_json([0.5] * 96, [32, 3])
    target = "/v2/models/fp32/infer"
    plain = served.ask("POST", target, body)
    assert "content-encoding" not in plain.headers
    small = served.ask("POST", target, body, Accept_Encoding="gzip")
    assert small.headers["content-encoding"] == "gzip"
    assert len(small.body) < len(plain.body)
    assert "content-encoding" not in served.ask("POST", target, body, Accept_Encoding="br").headers


@pytest.mark.parametrize("binary", [True, False])
def test_outputs_can_be_classified(client: Any, binary: bool) -> None:
    outputs = [triton.InferRequestedOutput("y", binary_data=binary, class_count=2)]
    answer = client.infer("int32", [input_of("INT32", rows=2)], outputs=outputs)
    strings = answer.as_numpy("y")
    assert strings.shape == (2, 2)
    first = strings[0][0]
    assert (first.decode() if isinstance(first, bytes) else first) == f"{2**31 - 1}:2"


def rows_of(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, 3)).astype(np.float32)


def input_x(array: np.ndarray) -> Any:
    tensor = triton.InferInput("x", list(array.shape), "FP32")
    tensor.set_data_from_numpy(array)
    return tensor


def test_the_client_reads_metadata_and_config(client: Any) -> None:
    assert client.is_model_ready("linear", "1")
    assert not client.is_model_ready("other")
    metadata = client.get_model_metadata("linear")
    assert [(t["name"], t["datatype"], t["shape"]) for t in metadata["outputs"]] == [
        ("y", "FP32", [-1, 2]),
        ("k", "INT64", [-1]),
    ]
    config = client.get_model_config("linear")
    assert config["max_batch_size"] == 32
    assert [t["data_type"] for t in config["output"]] == ["TYPE_FP32", "TYPE_INT64"]
    assert [t["dims"] for t in config["output"]] == [[2], []]


@pytest.mark.parametrize("binary", [(True, True), (False, False), (False, True)], ids=str)
def test_outputs_come_in_the_order_and_the_form_that_was_asked_for(
    client: Any, binary: tuple[bool, bool]
) -> None:
    outputs = [
        triton.InferRequestedOutput(name, binary_data=each)
        for name, each in zip(("k", "y"), binary, strict=True)
    ]
    array = rows_of(16)
    answer = client.infer("linear", [input_x(array)], outputs=outputs, request_id="abc")
    response = answer.get_response()
    assert (response["id"], [each["name"] for each in response["outputs"]]) == ("abc", ["k", "y"])
    assert ["data" not in output for output in response["outputs"]] == list(binary)
    np.testing.assert_allclose(answer.as_numpy("y"), array @ WEIGHT, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(answer.as_numpy("k"), answer.as_numpy("y").argmax(1))


def test_async_requests_get_their_own_answers_and_are_counted(served: Running) -> None:
    client = triton.InferenceServerClient(f"127.0.0.1:{served.port}", concurrency=4)
    before = client.get_inference_statistics("linear")["model_stats"][0]
    arrays = [rows_of(count) for count in range(1, 9)]
    waiting = [client.async_infer("linear", [input_x(array)]) for array in arrays]
    for array, request in zip(arrays, waiting, strict=True):
        found = request.get_result().as_numpy("y")
        np.testing.assert_allclose(found, array @ WEIGHT, rtol=1e-5, atol=1e-6)
    after = client.get_inference_statistics("linear")["model_stats"][0]
    assert after["inference_count"] - before["inference_count"] == 36
    grown = {
        name: after["inference_stats"][name]["count"] - before["inference_stats"][name]["count"]
        for name in after["inference_stats"]
    }
    ran = ("success", "queue", "compute_input", "compute_infer", "compute_output")
    assert grown == {**dict.fromkeys(ran, 8), "fail": 0, "cache_hit": 0, "cache_miss": 0}
    client.close()


def test_errors_have_a_status_and_a_message(client: Any) -> None:
    cases = [
        (lambda: client.infer("absent", [input_of("FP32")]), "404", "there is no model"),
        (lambda: client.infer("fp32", [input_of("FP64")]), "400", "FP32"),
        (lambda: client.infer("linear", [input_x(np.zeros((1, 4), "f"))]), "400", r"\[1, 4\]"),
        (lambda: client.infer("linear", [input_x(rows_of(33))]), "400", "`max_batch`"),
        (lambda: client.infer("fp32", [input_of("FP32")], "7"), "404", "no version"),
        (lambda: client.infer("fp32", [input_of("FP32")], sequence_id=3), "400", "sequence_id"),
        (lambda: client.get_model_config("absent"), "404", "there is no model"),
        (lambda: client.load_model("fp32"), "501", "not offered"),
        (lambda: client.unload_model("fp32"), "501", "not offered"),
        (lambda: client.get_trace_settings("fp32"), "501", "not offered"),
        (lambda: client.get_log_settings(), "501", "not offered"),
        (lambda: client.get_system_shared_memory_status(), "501", "not offered"),
        (lambda: client.get_cuda_shared_memory_status(), "501", "not offered"),
        (lambda: client.register_system_shared_memory("r", "/key", 64), "501", "not offered"),
    ]
    for call, status, words in cases:
        with pytest.raises(triton.InferenceServerException, match=words) as caught:
            call()
        assert caught.value.status() == status


def test_a_request_past_its_timeout_gets_504(served: Running, client: Any) -> None:
    with pytest.raises(triton.InferenceServerException) as caught:
        client.infer("fp32", [input_of("FP32")], timeout=1)
    assert caught.value.status() == "504"


def test_the_aio_client_infers_and_reads_metadata(served: Running) -> None:
    async def use_client() -> None:
        client = aio.InferenceServerClient(f"127.0.0.1:{served.port}")
        try:
            assert await client.is_server_live()
            assert await client.is_server_ready()
            assert await client.is_model_ready("fp32")
            assert (await client.get_server_metadata())["name"] == "deploykit"
            assert (await client.get_model_metadata("fp32"))["inputs"][0]["datatype"] == "FP32"
            assert (await client.get_model_config("fp32"))["max_batch_size"] == 32
            assert len(await client.get_model_repository_index()) == len(KINDS) + 1
            names = [kind for kind in KINDS for _ in range(3)]
            answers = await asyncio.gather(
                *(client.infer(kind.lower(), [input_of(kind, module=aio)]) for kind in names)
            )
            for kind, answer in zip(names, answers, strict=True):
                check(kind, answer.as_numpy("y"))
            for name in ("gzip", "deflate"):
                answer = await client.infer(
                    "fp32",
                    [input_of("FP32", rows=8, module=aio)],
                    request_compression_algorithm=name,
                    response_compression_algorithm=name,
                )
                check("FP32", answer.as_numpy("y"), 8)
            statistics = await client.get_inference_statistics("fp32")
            assert statistics["model_stats"][0]["inference_count"] > 0
            with pytest.raises(triton.InferenceServerException, match="there is no model"):
                await client.infer("absent", [input_of("FP32", module=aio)])
        finally:
            await client.close()

    asyncio.run(use_client())


def test_the_client_works_with_tls_and_a_token(pem: tuple[Path, Path]) -> None:
    cert, key = pem
    token = "correct horse battery"
    with running({"fp32": Echo("float32")}, token=token, tls_cert=cert, tls_key=key) as server:
        client = triton.InferenceServerClient(
            f"localhost:{server.port}", ssl=True, ssl_options={"ca_certs": str(cert)}
        )
        assert client.is_server_ready()
        with pytest.raises(triton.InferenceServerException, match="token"):
            client.infer("fp32", [input_of("FP32")])
        headers = {"Authorization": f"Bearer {token}"}
        answer = client.infer("fp32", [input_of("FP32")], headers=headers)
        check("FP32", answer.as_numpy("y"))
        client.close()


def test_requests_in_the_queue_know_their_client() -> None:
    """By that clients take turns, over both protocols."""
    grpc = pytest.importorskip("tritonclient.grpc")
    peers: list[Any] = []
    with running({"m": Linear()}, grpc_port=0) as server:
        model = server.server.repository.find("m")
        enqueue = model.enqueue

        def keep(pending: Pending) -> Pending:
            peers.append(pending.sender.peer)
            return enqueue(pending)

        model.enqueue = keep  # type: ignore[method-assign]
        for kind, port in ((triton, server.port), (grpc, server.server.grpc_port)):
            with kind.InferenceServerClient(f"127.0.0.1:{port}") as client:
                x = kind.InferInput("x", [1, 3], "FP32")
                x.set_data_from_numpy(np.ones((1, 3), np.float32))
                client.infer("m", [x])
    assert [str(peer.address) for peer in peers] == ["127.0.0.1"] * 2
