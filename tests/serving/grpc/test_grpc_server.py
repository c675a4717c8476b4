"""The gRPC server: token, deadlines, cancelled calls, health, reflection, end, lack of files."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from deploykit.engines.oip import MESSAGES
from deploykit.serving.http2 import Http2Limits
from tests.support.serving.faults import Process, until
from tests.support.serving.grpc_cases import (
    LIVE,
    SERVICE,
    STREAM,
    WAIT_S,
    Frames,
    Serving,
    first_value,
    frames,
    infer_bytes,
    serving,
)
from tests.support.serving.running import GatedEngine, Raw

grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
TOKEN = "a token of some length"
HEALTH = "/grpc.health.v1.Health"
DEADLINE_EXCEEDED = 4


@dataclass
class Busy:
    """A server whose engine has call 1 of `client`, and waits for its gate."""

    server: Serving
    engine: GatedEngine
    client: Frames

    @property
    def waiting(self) -> int:
        return self.server.repository.models["m"].batcher.waiting

    @property
    def unanswered(self) -> int:
        return self.server.see(lambda: self.server.grpc.unanswered)


@contextmanager
def run_busy(
    path: str = f"{SERVICE}/ModelInfer", limits: Http2Limits | None = None, **options: Any
) -> Iterator[Busy]:
    engine, options = GatedEngine(), {"queue": 2, "timeout_ms": 600_000, **options}
    with serving({"m": engine}, limits, max_batch=1, **options) as server:
        engine.warm = True
        try:
            with frames(server.port) as client:
                client.start(1, infer_bytes(value=1), path, end=path != STREAM)
                assert engine.entered.acquire(timeout=WAIT_S)
                yield Busy(server, engine, client)
        finally:
            engine.gate.set()


@pytest.fixture
def busy() -> Iterator[Busy]:
    with run_busy() as found:
        yield found


def ask(channel: Any, name: str, answer: str, timeout: float = WAIT_S, **options: Any) -> Any:
    """One unary call by path with our own messages."""
    path = name if name.startswith("/") else f"{SERVICE}/{name}"
    call = channel.unary_unary(path, None, MESSAGES[answer].FromString)
    return call(options.pop("data", b""), timeout=timeout, **options)


@contextmanager
def channel_to(server: Serving) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel


def test_every_method_but_health_requires_the_token() -> None:
    with serving(token=TOKEN) as server, channel_to(server) as channel:
        assert ask(channel, "ServerLive", "ServerLiveResponse").live
        assert ask(channel, "ServerReady", "ServerReadyResponse").ready
        assert ask(channel, f"{HEALTH}/Check", "HealthCheckResponse").status == 1
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


@pytest.mark.parametrize("how", ["deadline", "parameter"])
def test_a_call_that_expires_in_the_queue_is_not_run(busy: Busy, how: str) -> None:
    client = busy.client
    busy.server.grpc.tick = lambda _: None  # type: ignore[method-assign]  # which would end it later
    if how == "deadline":
        client.start(3, infer_bytes(value=2), grpc_timeout="30m")
    else:
        client.start(3, infer_bytes(value=2, parameters={"timeout": {"int64_param": 30_000}}))
    assert client.answer(3).status == DEADLINE_EXCEEDED
    busy.engine.gate.set()
    assert first_value(client.answer(1)) == 3
    assert first_value(client.call(5, infer_bytes(value=4))) == 9
    assert busy.engine.fed == [1, 4]


def test_a_call_ends_at_its_deadline_even_while_it_runs() -> None:
    engine = GatedEngine()
    with serving({"m": engine}) as server, frames(server.port) as client:
        engine.warm = True
        client.start(1, infer_bytes(), grpc_timeout="50m")
        assert client.answer(1).status == DEADLINE_EXCEEDED
        assert server.see(lambda: server.grpc.unanswered) == 0
        engine.gate.set()


def test_a_deadline_counts_from_the_call_not_from_the_last_tick() -> None:
    with serving() as server, frames(server.port) as client:
        server.grpc.tick = lambda _: None  # type: ignore[method-assign]

        def an_hour_ago() -> None:
            server.grpc.now_s -= 3600

        server.see(an_hour_ago)
        client.start(1, infer_bytes(), grpc_timeout="600S")
        assert client.answer(1).status == 0


@pytest.mark.parametrize("how", ["cancelled", "closed"])
def test_calls_of_a_client_that_gives_up_are_removed_from_the_queue(
    busy: Busy, eventually: Any, how: str
) -> None:
    client = busy.client
    client.start(3, infer_bytes(value=2))
    client.start(5, infer_bytes(value=3), STREAM, end=False)
    eventually(lambda: busy.waiting == 2)
    if how == "closed":
        client.close()
    else:
        for stream in (3, 5, 1):  # 1 while it runs: the result is dropped
            client.cancel(stream)
        client.settle()
    eventually(lambda: busy.waiting == 0)
    eventually(lambda: busy.unanswered == 0)
    busy.engine.gate.set()
    if how == "cancelled":
        assert first_value(client.call(7, infer_bytes(value=5))) == 11
        assert client.answers.keys() == {7}
    assert busy.engine.fed == [1, 5][: 1 + (how == "cancelled")]


def test_a_half_closed_stream_stays_open_until_all_answers_are_sent() -> None:
    """The client has closed its side; a request beyond the queue is refused in its turn."""
    with run_busy(STREAM) as busy:
        for value in (2, 3, 4):
            busy.client.message(1, infer_bytes(value=value), end=value == 4)
        busy.client.call(3, b"", LIVE)
        assert 1 not in busy.client.answers
        busy.engine.gate.set()
        answer = busy.client.answer(1)
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
    with run_busy(STREAM, Http2Limits(outstanding=4), queue=1024) as busy:
        for value in range(2, 13):
            busy.client.message(1, infer_bytes(value=value), end=value == 12)
        eventually(lambda: busy.waiting == 3)
        busy.client.settle()
        assert busy.waiting == 3
        busy.engine.gate.set()
        assert busy.client.answer(1).status == 0
        assert busy.engine.fed == list(range(1, 13))


def test_at_the_end_open_connections_are_answered_and_new_ones_refused(
    busy: Busy, eventually: Any
) -> None:
    client, server = busy.client, busy.server
    with frames(server.port) as other:
        server.server.stop()
        eventually(lambda: server.repository.leaving)
        live = other.call(1, b"", LIVE)
        assert MESSAGES["ServerLiveResponse"].FromString(live.data[5:]).live
        ready = other.call(3, b"", f"{SERVICE}/ServerReady")
        assert not MESSAGES["ServerReadyResponse"].FromString(ready.data[5:]).ready
        other.start(5, infer_bytes(value=2))
        other.settle()
        busy.engine.gate.set()
        assert first_value(client.answer(1)) == 3
        assert first_value(other.answer(5)) == 5
        assert client.closed()
        assert client.goaway == 0
        assert server.stop() == 0
        with pytest.raises(ConnectionRefusedError), frames(server.port):
            pass


def test_an_old_connection_is_asked_to_leave_and_its_calls_are_answered() -> None:
    with run_busy(limits=Http2Limits(max_age_s=3600)) as busy:
        client, server = busy.client, busy.server
        (link,) = server.see(lambda: list(server.grpc.connections))
        server.see(lambda: link.check(server.grpc.now_s + 3200))
        client.settle()
        assert client.goaway is None
        server.see(lambda: link.check(server.grpc.now_s + 4000))
        client.until(lambda: client.goaway == 0)
        client.start(3, infer_bytes(value=2))  # it was on its way
        busy.engine.gate.set()
        assert [first_value(client.answer(stream)) for stream in (1, 3)] == [3, 5]
        server.see(lambda: link.check(server.grpc.now_s + 4010))  # it has read the GOAWAY
        assert client.closed()


def test_shutdown_waits_no_longer_than_grace_s(busy: Busy) -> None:
    assert busy.server.stop(grace_s=0.05) == 1
    assert busy.client.closed()


def test_health_can_be_checked_and_watched() -> None:
    with serving() as server, channel_to(server) as channel:
        check = MESSAGES["HealthCheckRequest"]
        for name in ("", "m", SERVICE[1:]):
            data = check(service=name).SerializeToString()
            assert ask(channel, f"{HEALTH}/Check", "HealthCheckResponse", data=data).status == 1
        with pytest.raises(grpc.RpcError) as caught:
            ask(channel, f"{HEALTH}/Check", "HealthCheckResponse", data=b"\n\5other")
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        watch = channel.unary_stream(
            f"{HEALTH}/Watch", None, MESSAGES["HealthCheckResponse"].FromString
        )
        seen = watch(b"", timeout=WAIT_S)
        assert next(seen).status == 1
        assert next(watch(b"\n\5other", timeout=WAIT_S)).status == 3
        assert server.see(lambda: server.grpc.unanswered) == 0
        server.repository.drain()
        assert next(seen).status == 2
        assert ("", 2) in server.see(lambda: [*server.grpc._watching.values()])  # sent once
        seen.cancel()


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_tools_learn_the_services_by_reflection(version: str) -> None:
    ask_, answer = MESSAGES["ServerReflectionRequest"], MESSAGES["ServerReflectionResponse"]
    service = "GRPCInferenceService"
    names = (service, f"{service}.ModelInfer", "ModelInferRequest.InferInputTensor", "Nothing")
    questions = [
        ask_(list_services=""),
        ask_(file_by_filename="health.proto"),
        *(ask_(file_containing_symbol=f"inference.{name}") for name in names),
        ask_(all_extension_numbers_of_type="inference.ModelInferRequest"),
    ]
    method = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    with serving() as server, channel_to(server) as channel:
        call = channel.stream_stream(method, ask_.SerializeToString, answer.FromString)
        listed, *files, nothing, extension = call(iter(questions), timeout=WAIT_S)
        unreadable = channel.stream_stream(method)(iter([b"\xff" * 9]), timeout=WAIT_S)
        assert unreadable.code() is grpc.StatusCode.INVALID_ARGUMENT
    services = {service.name for service in listed.list_services_response.service}
    assert {SERVICE[1:], HEALTH[1:]} < services
    for found, name in zip(files, ["health.proto", *["grpc_service.proto"] * 3], strict=True):
        (file,) = found.file_descriptor_response.file_descriptor_proto
        assert FileDescriptorProto.FromString(file).name == name
    assert nothing.error_response.error_code == extension.error_response.error_code == 5
    assert nothing.original_request == questions[-2]


# -- A process that has run out of file descriptors

FILES = 64


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))

    with Process(tmp_path, "--grpc-port", "0", before=limit) as process:
        yield process
    assert not [line for line in process.log_lines() if "Traceback" in line]


def crowd(process: Process, kind: str) -> list[Frames | Raw]:
    """More connections than the process may have; returns when it cannot accept another."""
    port = int(process.grpc.rpartition(":")[2])
    found = [Frames(port) if kind == "grpc" else Raw(process.port) for _ in range(2 * FILES)]
    until(lambda: any("connections cannot be accepted" in line for line in process.log_lines()))
    return found


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_without_file_descriptors_open_connections_are_served_and_new_ones_accepted_later(
    process: Process, kind: str
) -> None:
    with frames(int(process.grpc.rpartition(":")[2])) as first:
        assert first_value(first.call(1, infer_bytes(value=3))) == 7
        clients = crowd(process, kind)
        began_s = process.cpu_s()
        threading.Event().wait(1.0)  # the CPU time of this second is measured
        assert process.cpu_s() - began_s < 0.5
        assert first_value(first.call(3, infer_bytes(value=4))) == 9
        with frames(int(process.grpc.rpartition(":")[2])) as last:
            for client in clients:
                client.close()
            assert first_value(last.call(1, infer_bytes(value=5))) == 11
    assert process.infer(1) == (200, [3.0])
    until(lambda: process.gauge("deploykit_held_bytes") == 0)


def test_a_server_without_file_descriptors_can_be_shut_down(process: Process) -> None:
    clients = crowd(process, "grpc")
    process.popen.terminate()
    for client in clients:
        client.close()
    assert process.wait() == 0
