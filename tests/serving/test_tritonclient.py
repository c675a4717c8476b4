"""The real tritonclient over HTTP and gRPC: sync, asynchronous, streaming and aio."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.core.tensors import PROTOCOL_NAMES
from deploykit.serving.batching.queue import Pending
from tests.support.fake_engine import FakeEngine, Function
from tests.support.serving.grpc_cases import Echo
from tests.support.serving.running import WAIT_S, Running, running

ml_dtypes = pytest.importorskip("ml_dtypes")
http = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
grpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient[grpc] is not installed")
import tritonclient.grpc.aio as grpc_aio  # noqa: E402
import tritonclient.http.aio as http_aio  # noqa: E402
from tritonclient.grpc import service_pb2  # noqa: E402
from tritonclient.utils import InferenceServerException  # noqa: E402

WEIGHT = np.arange(6, dtype=np.float32).reshape(3, 2)
POISON = 1e9
WIDE = 2_500_000  # of float32: 10 MB
VALUES: dict[str, list[Any]] = {
    "bool": [True, False, True],
    "float16": [-65504, 0.5, 1e-3],
    "bfloat16": [-3, 0.5, 1e30],
    "float32": [-1e38, 0.1, 1e-38],
    "float64": [-1e308, 0.1, 5e-324],
    "string": ["", "nul \0 inside", "größe 漢字"],
    **{f"int{bits}": [-(1 << (bits - 1)), 7, (1 << (bits - 1)) - 1] for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": [0, 7, (1 << bits) - 1] for bits in (8, 16, 32, 64)},
}
DTYPES = sorted(VALUES)


def linear(feeds: Any) -> dict[str, np.ndarray]:
    """Return y = x·W, and the number k of its largest column."""
    if (feeds["x"] == POISON).any():
        raise RuntimeError("/home/someone/secret.py line 3")
    y = feeds["x"] @ WEIGHT
    return {"y": y, "k": y.argmax(1)}


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    models: dict[str, Any] = {dtype: Echo(dtype) for dtype in VALUES}
    models["linear"] = Function(linear, "x:float32[N,3]", "y:float32[N,2]", "k:int64[N]")
    models["wide"] = FakeEngine(width=WIDE)
    with running(models, grpc_port=0, max_body_bytes=12 << 20) as server:
        yield server


@pytest.fixture(params=[http, grpc], ids=["http", "grpc"])
def triton(request: pytest.FixtureRequest) -> Any:
    """The client's module for one protocol."""
    return request.param


@pytest.fixture
def client(served: Running, triton: Any) -> Iterator[Any]:
    with closing(triton.InferenceServerClient(address(served, triton))) as client:
        yield client


def address(server: Running, module: Any) -> str:
    port = server.port if module in (http, http_aio) else server.server.grpc_port
    return f"localhost:{port}"


def read(call: Any, *arguments: str) -> Any:
    """The answer as JSON, which the HTTP client has anyway."""
    return call(*arguments, **({"as_json": True} if "grpc" in call.__module__ else {}))


def values(dtype: str, rows: int = 1) -> np.ndarray:
    array = np.array(
        [VALUES[dtype]], {"string": object, "bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype)
    )
    return np.repeat(array, rows, axis=0)


def tensor(module: Any, array: np.ndarray, **options: Any) -> Any:
    names = {"object": "BYTES", **PROTOCOL_NAMES}
    item = module.InferInput("x", list(array.shape), names[array.dtype.name])
    item.set_data_from_numpy(array, **options)
    return item


def check(dtype: str, found: np.ndarray, rows: int = 1) -> None:
    expected = values(dtype, rows)
    if dtype == "string":
        found = np.array([t.decode() if isinstance(t, bytes) else t for t in found.flat], object)
        found = found.reshape(expected.shape)
    else:
        assert found.dtype == expected.dtype or dtype == "bfloat16"
    np.testing.assert_array_equal(found, expected)


def rows_of(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, 3)).astype(np.float32)


def test_the_client_reads_states_metadata_config_and_index(served: Running, client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("linear")
    assert client.is_model_ready("linear", "1")
    assert not client.is_model_ready("linear", "2")
    assert not client.is_model_ready("other")
    assert read(client.get_server_metadata)["name"] == "deploykit"
    outputs = read(client.get_model_metadata, "linear")["outputs"]
    assert [(each["name"], each["datatype"]) for each in outputs] == [("y", "FP32"), ("k", "INT64")]
    assert [list(map(int, each["shape"])) for each in outputs] == [[-1, 2], [-1]]
    config = read(client.get_model_config, "linear")
    config = config.get("config", config)
    assert config["max_batch_size"] == 32
    assert "dynamic_batching" in config
    assert [each["data_type"] for each in config["output"]] == ["TYPE_FP32", "TYPE_INT64"]
    assert [list(map(int, each.get("dims", []))) for each in config["output"]] == [[2], []]
    index = read(client.get_model_repository_index)
    models = index["models"] if isinstance(index, dict) else index
    assert [each["name"] for each in models] == list(served.server.repository.models)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_datatype_is_sent_and_returned(triton: Any, client: Any, dtype: str) -> None:
    """As bytes; over HTTP also as JSON. Other languages' gRPC clients send typed contents."""
    for rows in (1, 3):
        answer = client.infer(dtype, [tensor(triton, values(dtype, rows))], request_id="a7")
        check(dtype, answer.as_numpy("y"), rows)
    response = read(answer.get_response)
    assert (response["id"], response["outputs"][0]["datatype"]) == ("a7", PROTOCOL_NAMES[dtype])
    has_text = dtype not in ("float16", "bfloat16")
    if triton is grpc and has_text:
        check(dtype, triton.InferResult(client._client_stub.ModelInfer(typed(dtype))).as_numpy("y"))
    elif triton is http:
        outputs = [http.InferRequestedOutput("y", binary_data=False)]
        for binary_in in (True, False) if has_text else ():
            item = tensor(http, values(dtype), binary_data=binary_in)
            check(dtype, client.infer(dtype, [item], outputs=outputs).as_numpy("y"))
        if not has_text:
            with pytest.raises(InferenceServerException, match="no JSON form"):
                client.infer(dtype, [tensor(http, values(dtype))], outputs=outputs)


def typed(dtype: str) -> Any:
    array = values(dtype)
    request = service_pb2.ModelInferRequest(model_name=dtype)
    item = request.inputs.add(name="x", datatype=PROTOCOL_NAMES[dtype], shape=array.shape)
    names = {"bool": "bool", "string": "bytes", "float32": "fp32", "float64": "fp64"}
    name = names.get(dtype) or (dtype if "64" in dtype else dtype.rstrip("0123456789"))
    texts = [text.encode() for text in VALUES[dtype]] if dtype == "string" else array[0].tolist()
    getattr(item.contents, f"{name}_contents").extend(texts)
    return request


@pytest.mark.parametrize("how", ["gzip", "deflate"])
def test_requests_and_answers_may_be_compressed(triton: Any, client: Any, how: str) -> None:
    names = ["compression_algorithm"]
    if triton is http:
        names = ["request_compression_algorithm", "response_compression_algorithm"]
    for name in names:
        item = tensor(triton, values("string", 32))
        check("string", client.infer("string", [item], **{name: how}).as_numpy("y"), 32)


def test_outputs_come_in_the_order_and_the_form_that_was_asked_for(served: Running) -> None:
    forms = {"k": False, "y": True}
    outputs = [http.InferRequestedOutput(name, binary_data=form) for name, form in forms.items()]
    with closing(http.InferenceServerClient(address(served, http))) as client:
        answer = client.infer("linear", [tensor(http, rows_of(16))], outputs=outputs)
    found = answer.get_response()["outputs"]
    assert [(each["name"], "data" not in each) for each in found] == list(forms.items())
    np.testing.assert_array_equal(answer.as_numpy("k"), answer.as_numpy("y").argmax(1))


@pytest.mark.parametrize("options", [{}, {"binary_data": False}], ids=["bytes", "json"])
def test_outputs_can_be_classified(triton: Any, client: Any, options: dict[str, bool]) -> None:
    outputs = [
        triton.InferRequestedOutput("y", class_count=2, **(options if triton is http else {}))
    ]
    item = tensor(triton, values("int32", 2))
    found = client.infer("int32", [item], outputs=outputs).as_numpy("y")
    strings = [text.decode() if isinstance(text, bytes) else text for text in found.flat]
    assert strings == [f"{2**31 - 1}:2", "7:1"] * 2
    assert found.shape == (2, 2)


def test_batches_from_zero_rows_to_max_batch_are_answered_and_counted(
    triton: Any, client: Any
) -> None:
    def figures() -> dict[str, Any]:
        found: dict[str, Any] = read(client.get_inference_statistics, "linear")["model_stats"][0]
        return found

    def count(figures: dict[str, Any], name: str) -> int:
        return int(figures["inference_stats"].get(name, {}).get("count", 0))

    before = figures()
    for number in (0, 1, 32):
        array = rows_of(number)
        answer = client.infer("linear", [tensor(triton, array)]).as_numpy("y")
        np.testing.assert_allclose(answer, array @ WEIGHT, rtol=1e-5, atol=1e-6)
    after = figures()
    # before the first inference, the JSON of protobuf has no count
    assert int(after["inference_count"]) - int(before.get("inference_count", 0)) == 33
    ran = ("success", "queue", "compute_input", "compute_infer", "compute_output")
    grown = {name: count(after, name) - count(before, name) for name in after["inference_stats"]}
    assert grown == {**dict.fromkeys(ran, 3), "fail": 0, "cache_hit": 0, "cache_miss": 0}
    assert "wide" in {each["name"] for each in read(client.get_inference_statistics)["model_stats"]}


@pytest.mark.parametrize(("model", "count"), [("linear", 100), ("wide", 10)])
def test_many_requests_at_once_get_their_own_answers(
    served: Running, model: str, count: int
) -> None:
    """Of `wide` more bytes than a connection may buffer: flow control lets in one after another."""
    arrays = [np.full((1, WIDE if model == "wide" else 3), n, np.float32) for n in range(count)]
    answers: queue.Queue[Any] = queue.Queue()
    with closing(grpc.InferenceServerClient(address(served, grpc))) as client:
        for number, array in enumerate(arrays):
            client.async_infer(
                model,
                [tensor(grpc, array)],
                lambda result, error, number=number: answers.put((number, result, error)),
            )
        for _ in arrays:
            number, result, error = answers.get(timeout=WAIT_S)
            assert error is None
            (first, *_) = result.as_numpy("y")[0]
            assert first == (2 * number + 1 if model == "wide" else 6 * number)


def test_a_stream_answers_requests_and_errors_in_order(served: Running) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with grpc.InferenceServerClient(address(served, grpc)) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for number in range(100):
            name = "other" if number % 7 == 3 else "linear"
            item = tensor(grpc, np.full((1, 3), number, np.float32))
            client.async_stream_infer(
                name, [item], request_id=str(number), enable_empty_final_response=True
            )
        for number in range(100):
            result, error = answers.get(timeout=WAIT_S)
            if number % 7 == 3:
                assert "there is no model 'other'" in str(error)
            else:
                assert error is None
                assert result.get_response().id == str(number)
                final = result.get_response().parameters["triton_final_response"]
                assert final.bool_param
                assert result.as_numpy("y")[0, 0] == 6 * number
        client.stop_stream()


STATUSES = {
    "400": "INVALID_ARGUMENT",
    "404": "NOT_FOUND",
    "500": "INTERNAL",
    "501": "UNIMPLEMENTED",
    "504": "DEADLINE_EXCEEDED",
}


def infer(model: str, array: np.ndarray | None = None, **options: Any) -> Any:
    """Return a call that infers `array`, three numbers if it is None, with a client of a module."""
    x = rows_of(1) if array is None else array
    return lambda client, module: client.infer(model, [tensor(module, x)], **options)


def call(name: str, *arguments: Any) -> Any:
    return lambda client, _: getattr(client, name)(*arguments)


@pytest.mark.parametrize(
    ("act", "status", "words"),
    [
        (infer("absent"), "404", "there is no model 'absent'; served here: "),
        (infer("float32", values("float64")), "400", "FP32"),
        (infer("linear", np.zeros((1, 4), "f")), "400", r"x:float32\[N,3\], got shape \[1, 4\]"),
        (infer("linear", rows_of(33)), "400", "`max_batch`"),
        (infer("linear", np.full((1, 3), POISON, "f")), "500", "^(?!.*secret).*the engine failed"),
        (infer("float32", model_version="7"), "404", "no version '7'"),
        (infer("float32", sequence_id=3), "400", "sequence_id"),
        (infer("float32", timeout=1), "504", "past its time limit"),
        (call("get_model_config", "absent"), "404", "there is no model"),
        *((call(f"{what}_model", "linear"), "501", "not offered") for what in ("load", "unload")),
        (call("get_trace_settings", "linear"), "501", "not offered"),
        (call("get_system_shared_memory_status"), "501", "not offered"),
        (call("register_system_shared_memory", "r", "/key", 64), "501", "not offered"),
    ],
)
def test_an_error_has_the_same_message_and_its_status_over_both(
    triton: Any, client: Any, act: Any, status: str, words: str
) -> None:
    with pytest.raises(InferenceServerException, match=words) as caught:
        act(client, triton)
    expected = status if triton is http else f"StatusCode.{STATUSES[status]}"
    assert caught.value.status() == expected


def test_the_client_works_with_tls_and_a_token(triton: Any, pem: tuple[Path, Path]) -> None:
    cert, key = pem
    token = "correct horse battery"
    options = {"tls_cert": cert, "tls_key": key, "token": token, "grpc_port": 0}
    trusted = {"ssl": True, "root_certificates": str(cert)}
    if triton is http:
        trusted = {"ssl": True, "ssl_options": {"ca_certs": str(cert)}}
    with running({"float32": Echo("float32")}, **options) as server:
        with closing(triton.InferenceServerClient(address(server, triton), **trusted)) as client:
            assert client.is_server_ready()
            with pytest.raises(InferenceServerException, match="token"):
                client.infer("float32", [tensor(triton, rows_of(1))])
            headers = {"authorization": f"Bearer {token}"}
            answer = client.infer("float32", [tensor(triton, values("float32"))], headers=headers)
            check("float32", answer.as_numpy("y"))
        refused = pytest.raises(Exception, match=r"(?i)closed|unavailable|reset")
        with closing(triton.InferenceServerClient(address(server, triton))) as plain, refused:
            plain.get_server_metadata()


def test_requests_in_the_queue_know_their_client() -> None:
    """By that clients take turns, over both protocols."""
    peers: list[Any] = []
    with running({"m": FakeEngine(width=3)}, grpc_port=0) as server:
        model = server.server.repository.find("m")
        submit = model.batcher.submit

        def keep(pending: Pending) -> None:
            peers.append(pending.sender.peer)
            submit(pending)

        model.batcher.submit = keep  # type: ignore[method-assign]
        for module in (http, grpc):
            with module.InferenceServerClient(address(server, module)) as client:
                client.infer("m", [tensor(module, rows_of(1))])
    assert [str(peer.address) for peer in peers] == ["127.0.0.1"] * 2


@pytest.mark.parametrize("module", [http_aio, grpc_aio], ids=["http", "grpc"])
def test_the_aio_client_infers(served: Running, module: Any) -> None:
    async def answers() -> list[Any]:
        async with module.InferenceServerClient(address(served, module)) as client:
            calls = (client.infer(dtype, [tensor(module, values(dtype))]) for dtype in DTYPES)
            return await asyncio.gather(*calls)

    for dtype, answer in zip(DTYPES, asyncio.run(answers()), strict=True):
        check(dtype, answer.as_numpy("y"))
