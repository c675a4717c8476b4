"""The gRPC server: token, TLS, deadlines, cancelled calls, health and shutdown."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from deploykit.core.errors import BadInput
from deploykit.engines.oip.protobuf import MESSAGES
from deploykit.serving.http2.connection import Http2Limits
from tests.support.serving.grpc_cases import (
    SERVICE,
    STREAM,
    WAIT_S,
    Serving,
    first_value,
    frames,
    infer_bytes,
    serving,
)
from tests.support.serving.running import GatedEngine

grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
TOKEN = "a token of some length"


@pytest.fixture
def gated() -> Iterator[tuple[Serving, GatedEngine]]:
    """A server whose engine waits for its gate; the queue holds 2."""
    engine = GatedEngine()
    with serving({"m": engine}, max_batch=1, queue=2) as running:
        engine.warm = True
        try:
            yield running, engine
        finally:
            engine.gate.set()


def ask(channel: Any, name: str, answer: str, timeout: float = WAIT_S, **options: Any) -> Any:
    """One unary call by path with our own messages."""
    path = name if name.startswith("/") else f"{SERVICE}/{name}"
    call = channel.unary_unary(path, None, MESSAGES[answer].FromString)
    return call(options.pop("data", b""), timeout=timeout, **options)


def test_a_port_in_use_is_named_with_its_parameter() -> None:
    with serving() as running:
        said = pytest.raises(BadInput, match=f"`grpc_port` {running.port}: already in use")
        with said, serving(grpc_port=running.port):
            pass


def test_every_method_but_health_requires_the_token() -> None:
    with (
        serving(token=TOKEN) as running,
        grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel,
    ):
        assert ask(channel, "ServerLive", "ServerLiveResponse").live
        assert ask(channel, "ServerReady", "ServerReadyResponse").ready
        health = ask(channel, "/grpc.health.v1.Health/Check", "HealthCheckResponse")
        assert health.status == 1
        for given in (None, "Bearer another token, also long", TOKEN):
            metadata = [] if given is None else [("authorization", given)]
            for name in ("ServerMetadata", "ModelInfer", "RepositoryIndex", "NoSuchMethod"):
                with pytest.raises(grpc.RpcError) as caught:
                    ask(channel, name, "ServerMetadataResponse", metadata=metadata)
                assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
                assert "Bearer" in caught.value.details()
        metadata = [("authorization", f"Bearer {TOKEN}")]
        answer = ask(channel, "ServerMetadata", "ServerMetadataResponse", metadata=metadata)
        assert answer.name == "deploykit"


def test_a_tls_server_answers_tls_clients_only(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += [
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=DNS:localhost",
        "-keyout",
        str(key),
        "-out",
        str(cert),
    ]
    subprocess.run(command, check=True, capture_output=True)
    with serving(tls_cert=cert, tls_key=key) as running:
        credentials = grpc.ssl_channel_credentials(cert.read_bytes())
        with grpc.secure_channel(f"localhost:{running.port}", credentials) as channel:
            data = infer_bytes(value=3)
            answer = ask(channel, "ModelInfer", "ModelInferResponse", data=data)
            assert np.frombuffer(answer.raw_output_contents[0], np.float32)[0] == 7
        with grpc.insecure_channel(f"localhost:{running.port}") as channel:
            with pytest.raises(grpc.RpcError) as caught:
                ask(channel, "ServerLive", "ServerLiveResponse")
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def waiting(running: Serving) -> int:
    return running.repository.models["m"].waiting


@pytest.mark.parametrize("how", ["deadline", "parameter"])
def test_a_call_that_expires_in_the_queue_is_not_run(
    gated: tuple[Serving, GatedEngine], how: str
) -> None:
    running, engine = gated
    running.grpc.tick = lambda _: None  # type: ignore[method-assign]  # which would end the call, but later than this
    with frames(running.port) as client:
        client.start(1, infer_bytes(value=1))
        assert engine.entered.acquire(timeout=WAIT_S)
        if how == "deadline":
            client.start(3, infer_bytes(value=2), grpc_timeout="30m")
        else:
            client.open(3)
            parameters = {"timeout": {"int64_param": 30_000}}
            client.message(3, infer_bytes(value=2, parameters=parameters))
        late = client.answer(3)
        assert late.status == 4  # DEADLINE_EXCEEDED
        engine.gate.set()
        assert first_value(client.answer(1)) == 3
        assert first_value(client.call(5, infer_bytes(value=4))) == 9
    assert engine.fed == [1, 4]


def test_a_deadline_counts_from_the_call_not_from_the_last_tick() -> None:
    with serving() as running, frames(running.port) as client:
        running.grpc.tick = lambda _: None  # type: ignore[method-assign]

        def an_hour_ago() -> None:
            running.grpc.now_s -= 3600

        running.see(an_hour_ago)
        client.start(1, infer_bytes(), grpc_timeout="600S")
        assert client.answer(1).status == 0


def test_a_call_ends_at_its_deadline_even_while_it_runs(
    gated: tuple[Serving, GatedEngine],
) -> None:
    running, _ = gated
    with frames(running.port) as client:
        client.start(1, infer_bytes(), grpc_timeout="50m")
        assert client.answer(1).status == 4
        assert running.see(lambda: running.grpc.unanswered) == 0


def test_a_cancelled_call_is_removed_from_the_queue(
    gated: tuple[Serving, GatedEngine], eventually: Any
) -> None:
    running, engine = gated
    with frames(running.port) as client:
        for stream in (1, 3):
            client.start(stream, infer_bytes(value=stream))
        eventually(lambda: waiting(running) == 1)
        client.cancel(3)
        eventually(lambda: waiting(running) == 0)
        client.cancel(1)  # while it runs: the result is dropped
        client.settle()
        engine.gate.set()
        assert first_value(client.call(5, infer_bytes(value=5))) == 11
        assert 1 not in client.answers
        assert 3 not in client.answers
    assert engine.fed == [1, 5]


def test_calls_of_a_closed_connection_are_removed_from_the_queue(
    gated: tuple[Serving, GatedEngine], eventually: Any
) -> None:
    running, engine = gated
    with frames(running.port) as client:
        client.start(1, infer_bytes(value=1))
        assert engine.entered.acquire(timeout=WAIT_S)
        client.start(3, infer_bytes(value=2))
        client.start(5, infer_bytes(value=3), STREAM, end=False)
        eventually(lambda: waiting(running) == 2)
    eventually(lambda: waiting(running) == 0)
    assert running.see(lambda: running.grpc.unanswered) == 0
    engine.gate.set()
    assert engine.fed == [1]


def test_a_full_queue_answers_unavailable(gated: tuple[Serving, GatedEngine]) -> None:
    running, engine = gated
    with frames(running.port) as client:
        client.start(1, infer_bytes(value=1))
        assert engine.entered.acquire(timeout=WAIT_S)
        for stream in (3, 5, 7):
            client.start(stream, infer_bytes(value=stream))
        refused = client.answer(7)
        assert refused.status == 14
        assert "`queue`" in refused.headers["grpc-message"]
        engine.gate.set()
        assert [client.answer(stream).status for stream in (1, 3, 5)] == [0, 0, 0]


def test_a_half_closed_stream_stays_open_until_all_answers_are_sent(
    gated: tuple[Serving, GatedEngine],
) -> None:
    """The client has closed its side; a request beyond the queue is refused in its turn."""
    running, engine = gated
    with frames(running.port) as client:
        client.start(1, infer_bytes(value=1), STREAM, end=False)
        assert engine.entered.acquire(timeout=WAIT_S)
        for value in (2, 3):
            client.message(1, infer_bytes(value=value), end=False)
        client.message(1, infer_bytes(value=4))
        client.call(3, b"", f"{SERVICE}/ServerLive")
        assert 1 not in client.answers
        engine.gate.set()
        answer = client.answer(1)
    kinds = []
    data = answer.data
    while data:
        size = int.from_bytes(data[1:5], "big")
        message = MESSAGES["ModelStreamInferResponse"].FromString(data[5 : 5 + size])
        kinds.append(bool(message.error_message))
        data = data[5 + size :]
    assert kinds == [False, False, False, True]
    assert answer.status == 0


def test_a_stream_with_too_many_outstanding_requests_is_not_read(eventually: Any) -> None:
    engine = GatedEngine()
    with serving({"m": engine}, Http2Limits(outstanding=4), max_batch=1) as running:
        engine.warm = True
        with frames(running.port) as client:
            client.open(1, STREAM)
            for value in range(12):
                client.message(1, infer_bytes(value=value), end=value == 11)
            assert engine.entered.acquire(timeout=WAIT_S)
            eventually(lambda: waiting(running) == 3)
            client.settle()
            assert waiting(running) == 3
            engine.gate.set()
            assert client.answer(1).status == 0
        assert engine.fed == list(range(12))


def test_at_the_end_open_connections_are_answered_and_new_ones_refused(
    gated: tuple[Serving, GatedEngine], eventually: Any
) -> None:
    running, engine = gated
    with frames(running.port) as client, frames(running.port) as other:
        client.start(1, infer_bytes(value=1))
        assert engine.entered.acquire(timeout=WAIT_S)
        running.server.stop()
        eventually(lambda: running.repository.leaving)
        live = other.call(1, b"", f"{SERVICE}/ServerLive")
        assert MESSAGES["ServerLiveResponse"].FromString(live.data[5:]).live
        ready = other.call(3, b"", f"{SERVICE}/ServerReady")
        assert not MESSAGES["ServerReadyResponse"].FromString(ready.data[5:]).ready
        other.start(5, infer_bytes(value=2))
        other.settle()
        engine.gate.set()
        assert first_value(client.answer(1)) == 3
        assert first_value(other.answer(5)) == 5
        assert client.closed()
        assert client.goaway == 0
        assert running.stop() == 0
        with pytest.raises(ConnectionRefusedError), frames(running.port):
            pass


def test_an_old_connection_is_asked_to_leave_and_its_calls_are_answered(eventually: Any) -> None:
    engine = GatedEngine()
    with (
        serving({"m": engine}, Http2Limits(max_age_s=3600)) as running,
        frames(running.port) as client,
    ):
        engine.warm = True
        client.start(1, infer_bytes(value=1))
        assert engine.entered.acquire(timeout=WAIT_S)
        (link,) = running.see(lambda: list(running.grpc.connections))
        running.see(lambda: link.check(running.grpc.now_s + 3200))
        client.settle()
        assert client.goaway is None
        running.see(lambda: link.check(running.grpc.now_s + 4000))
        client.until(lambda: client.goaway == 0)
        client.start(3, infer_bytes(value=2))  # it was on its way
        engine.gate.set()
        assert [first_value(client.answer(stream)) for stream in (1, 3)] == [3, 5]
        client.send(6, 1, 0, b"retiring")  # the answer to the PING: it has read the GOAWAY
        assert client.closed()


def test_shutdown_waits_no_longer_than_grace_s(gated: tuple[Serving, GatedEngine]) -> None:
    running, engine = gated
    with frames(running.port) as client:
        client.start(1, infer_bytes(value=1))
        assert engine.entered.acquire(timeout=WAIT_S)
        assert running.stop(grace_s=0.05) == 1
        assert client.closed()


def test_health_can_be_checked_and_watched() -> None:
    with serving() as running, grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        check = MESSAGES["HealthCheckRequest"]
        path = "/grpc.health.v1.Health"
        for name, status in (("", 1), ("m", 1), (SERVICE[1:], 1)):
            data = check(service=name).SerializeToString()
            answer = ask(channel, f"{path}/Check", "HealthCheckResponse", data=data)
            assert answer.status == status
        with pytest.raises(grpc.RpcError) as caught:
            ask(channel, f"{path}/Check", "HealthCheckResponse", data=b"\n\5other")
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        watch = channel.unary_stream(
            f"{path}/Watch", None, MESSAGES["HealthCheckResponse"].FromString
        )
        seen = watch(b"", timeout=WAIT_S)
        assert next(seen).status == 1
        assert next(watch(b"\n\5other", timeout=WAIT_S)).status == 3
        assert running.see(lambda: running.grpc.unanswered) == 0
        running.repository.drain()
        assert next(seen).status == 2
        seen.cancel()


def test_large_typed_contents_of_the_wrong_size_are_refused(
    gated: tuple[Serving, GatedEngine],
) -> None:
    running, engine = gated
    engine.gate.set()
    request = MESSAGES["ModelInferRequest"](model_name="m")
    item = request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    item.contents.fp32_contents.extend([1.0] * 100_000)
    with frames(running.port) as client:
        refused = client.call(1, request.SerializeToString())
        assert refused.status == 3
        assert "has 4 elements, 'data' has 100000" in refused.headers["grpc-message"]


def test_an_engine_error_is_internal_and_shows_no_file_path() -> None:
    class Failing(GatedEngine):
        def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
            if self.warm:
                raise RuntimeError("/home/someone/secret.py line 3")
            return super().__call__(feeds)

    engine = Failing()
    with serving({"m": engine}) as running, frames(running.port) as client:
        engine.warm = True
        answer = client.call(1, infer_bytes())
        assert answer.status == 13
        assert "secret" not in answer.headers["grpc-message"]


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_tools_learn_the_services_by_reflection(version: str) -> None:
    ask_, answer = MESSAGES["ServerReflectionRequest"], MESSAGES["ServerReflectionResponse"]
    questions = [
        ask_(list_services=""),
        ask_(file_containing_symbol="inference.GRPCInferenceService"),
        ask_(file_containing_symbol="inference.GRPCInferenceService.ModelInfer"),
        ask_(file_containing_symbol="inference.ModelInferRequest.InferInputTensor"),
        ask_(file_by_filename="health.proto"),
        ask_(file_containing_symbol="inference.Nothing"),
        ask_(all_extension_numbers_of_type="inference.ModelInferRequest"),
    ]
    with serving() as running, grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        call = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            ask_.SerializeToString, answer.FromString,
        )  # fmt: skip
        listed, *files, nothing, extension = call(iter(questions), timeout=WAIT_S)
    names = {service.name for service in listed.list_services_response.service}
    assert {SERVICE[1:], "grpc.health.v1.Health"} < names
    for found, name in zip(files, ["grpc_service.proto"] * 3 + ["health.proto"], strict=True):
        (file,) = found.file_descriptor_response.file_descriptor_proto
        assert FileDescriptorProto.FromString(file).name == name
    assert nothing.error_response.error_code == extension.error_response.error_code == 5
    assert nothing.original_request == questions[-2]


def test_a_question_of_reflection_that_cannot_be_read_is_refused() -> None:
    method = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    with serving() as running, grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        call = channel.stream_stream(method)(iter([b"\xff" * 9]), timeout=WAIT_S)
        assert call.code() is grpc.StatusCode.INVALID_ARGUMENT
