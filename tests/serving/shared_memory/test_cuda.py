"""CUDA shared memory: regions on a CUDA made of NumPy, real servers and NVIDIA's own clients."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import Unsupported
from deploykit.serving.models.repository import Service
from tests.serving.conftest import WAIT_S, GatedEngine, running
from tests.support.runtimes.fake_cuda import FakeCuda, machine
from tests.support.runtimes.modules import replaced
from tests.support.serving.grpc_cases import serving

grpcclient = pytest.importorskip("tritonclient.grpc")
httpclient = pytest.importorskip("tritonclient.http")
from tritonclient.utils import InferenceServerException  # noqa: E402

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)
CUDA, SYSTEM = "/v2/cudasharedmemory", "/v2/systemsharedmemory"
PROTOCOLS = ["http", "grpc"]
STATUS = {  # what tritonclient calls a status, over HTTP and gRPC
    400: ("400", "StatusCode.INVALID_ARGUMENT"),
    404: ("404", "StatusCode.NOT_FOUND"),
    500: ("500", "StatusCode.INTERNAL"),
    501: ("501", "StatusCode.UNIMPLEMENTED"),
    503: ("503", "StatusCode.UNAVAILABLE"),
}


@dataclass
class Kit:
    """A server of one protocol, its client library and a client."""

    library: ModuleType
    url: str
    client: Any
    service: Service

    def infer(self, given: Any, wanted: Any = None) -> Any:
        """ROWS' shape from the region that `given` names, to that of `wanted`: name, offset."""
        tensor = self.library.InferInput("x", list(ROWS.shape), "FP32")
        tensor.set_shared_memory(given[0], ROWS.nbytes, given[1])
        output = self.library.InferRequestedOutput("y")
        if wanted is not None:
            output.set_shared_memory(wanted[0], ROWS.nbytes, wanted[1])
        return self.client.infer("m", [tensor], outputs=[output])

    def infer_apart(self, given: Any, wanted: Any) -> Any:
        """`infer` from another thread: a client of HTTP's is its thread's own."""
        with contextlib.closing(self.library.InferenceServerClient(self.url)) as client:
            return replace(self, client=client).infer(given, wanted)

    def register(
        self, name: str, handle: bytes, size: int, device: int = 0, *, text: bytes | None = None
    ) -> None:
        """`text`: what stands for the handle's base64."""
        raw = base64.b64encode(handle) if text is None else text
        self.client.register_cuda_shared_memory(name, raw, device, size)

    def status(self, name: str = "") -> list[dict[str, Any]]:
        found = self.client.get_cuda_shared_memory_status(name)
        if self.library is httpclient:
            return list(found)
        fields = ("name", "device_id", "byte_size")
        return [{key: getattr(each, key) for key in fields} for each in found.regions.values()]

    @contextlib.contextmanager
    def refused(self, status: int, why: str) -> Iterator[None]:
        with pytest.raises(InferenceServerException, match=why) as caught:
            yield
        assert caught.value.status() in STATUS[status]
        assert "0x" not in caught.value.message()  # no address


@contextlib.contextmanager
def kit_of(protocol: str, models: dict[str, Any] | None = None, **options: Any) -> Iterator[Kit]:
    with contextlib.ExitStack() as stack:
        if protocol == "http":
            found = stack.enter_context(running(models, **options))
            service, library = found.server.service, httpclient
        else:
            found = stack.enter_context(serving(models, **options))
            service, library = found.service, grpcclient
        url = f"127.0.0.1:{found.port}"
        client = library.InferenceServerClient(url)
        stack.callback(client.close)
        yield Kit(library, url, client, service)


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def block() -> np.ndarray:
    """256 bytes that a client holds on the device."""
    return np.arange(256, dtype=np.uint8)


@pytest.fixture(params=PROTOCOLS)
def kit(request: pytest.FixtureRequest, cuda: FakeCuda) -> Iterator[Kit]:
    with machine(cuda), kit_of(request.param, shared_memory=True) as kit:
        yield kit
    assert cuda.held() == {}  # whatever a test left registered


# -- through servers and clients


def test_inputs_and_outputs_pass_through_the_gpu(
    kit: Kit, cuda: FakeCuda, block: np.ndarray
) -> None:
    answers = np.zeros(128, np.uint8)
    kit.register("frames", cuda.export(block), 256)
    kit.register("answers", cuda.export(answers), 128)
    for number in range(3):
        block[16 : 16 + ROWS.nbytes] = (ROWS + number).view(np.uint8).ravel()
        kit.infer(("frames", 16), ("answers", 64))
        assert np.array_equal(
            answers[64 : 64 + ROWS.nbytes].view(np.float32), 2 * (ROWS + number).ravel() + 1
        )
        assert not answers[:64].any()
        assert not answers[64 + ROWS.nbytes :].any()
    assert np.array_equal(kit.infer(("frames", 16)).as_numpy("y"), 2 * (ROWS + 2) + 1)
    assert "cuda_shared_memory" in kit.service.metadata()["extensions"]


def test_cuda_and_system_regions_serve_one_request(
    kit: Kit, cuda: FakeCuda, block: np.ndarray, shared: str
) -> None:
    block[: ROWS.nbytes] = ROWS.view(np.uint8).ravel()
    kit.register("frames", cuda.export(block), 256)
    kit.client.register_system_shared_memory("answers", shared, 64)
    kit.infer(("frames", 0), ("answers", 8))
    found = np.frombuffer((Path("/dev/shm") / shared[1:]).read_bytes(), np.float32, 12, 8)
    assert np.array_equal(found, 2 * ROWS.ravel() + 1)


def test_status_and_unregistering(kit: Kit, cuda: FakeCuda, block: np.ndarray) -> None:
    handle = cuda.export(block)
    kit.register("frames", handle, 200)
    kit.register("same", handle, 8)
    assert kit.status("frames") == [{"name": "frames", "device_id": 0, "byte_size": 200}]
    assert {each["name"] for each in kit.status()} == {"frames", "same"}
    kit.client.unregister_cuda_shared_memory("frames")
    kit.client.unregister_cuda_shared_memory("frames")
    assert cuda.held() == {"opened": 1}  # by the other region
    with kit.refused(404, "no CUDA region 'frames'"):
        kit.status("frames")
    with kit.refused(400, "no region 'frames'"):
        kit.infer(("frames", 0))
    kit.client.unregister_cuda_shared_memory()
    assert kit.status() == []
    assert cuda.held() == {}


def test_each_kind_is_asked_for_and_unregistered_apart(
    kit: Kit, cuda: FakeCuda, block: np.ndarray, shared: str
) -> None:
    kit.register("gpu", cuda.export(block), 256)
    kit.client.register_system_shared_memory("host", shared, 64)
    with kit.refused(404, "no CUDA region 'host'"):
        kit.status("host")
    with kit.refused(404, "no region 'gpu'"):
        kit.client.get_system_shared_memory_status("gpu")
    kit.client.unregister_cuda_shared_memory("host")
    kit.client.unregister_system_shared_memory("gpu")
    kit.client.unregister_system_shared_memory()
    assert [each["name"] for each in kit.status()] == ["gpu"]
    kit.client.register_system_shared_memory("host", shared, 64)
    kit.client.unregister_cuda_shared_memory()
    assert kit.client.get_system_shared_memory_status("host")


def test_names_are_one_namespace(kit: Kit, cuda: FakeCuda, block: np.ndarray, shared: str) -> None:
    kit.register("gpu", cuda.export(block), 256)
    kit.client.register_system_shared_memory("host", shared, 64)
    for register in (
        lambda: kit.register("host", cuda.export(block), 256),
        lambda: kit.register("gpu", cuda.export(block), 256),
        lambda: kit.client.register_system_shared_memory("gpu", shared, 64),
    ):
        with kit.refused(400, "is registered already"):
            register()
    assert cuda.held() == {"opened": 1}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"handle": bytes(63)}, "must be 64 bytes, got 63"),
        ({"handle": b""}, "must be 64 bytes, got 0"),
        ({"handle": bytes(65)}, "must be 64 bytes, got 65"),
        ({"handle": bytes(64)}, "its CUDA memory cannot be opened"),
        ({"device": 99}, "no GPU 99 of this server"),
        ({"device": -1}, "'device_id' must be a whole number"),
        ({"size": 0}, "'byte_size' must be a whole number from 1"),
        ({"size": (1 << 64) - 1}, "'byte_size' must be a whole number"),
        ({"size": 257}, "it would be 257 bytes, its memory has 256"),
        ({"name": "a b"}, "cannot be the name"),
    ],
)
def test_what_cannot_be_registered_is_the_clients_fault(
    kit: Kit, cuda: FakeCuda, block: np.ndarray, change: dict[str, Any], why: str
) -> None:
    with kit.refused(400, why):
        kit.register(**{"name": "r", "handle": cuda.export(block), "size": 256, **change})
    assert cuda.held() == {}
    assert kit.status() == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        *(
            ({"raw_handle": raw}, "'raw_handle' must be")
            for raw in (
                *(None, "text", 5, [], {}, {"b64": None}, {"b64": 5}, {"b64": ["x"]}),
                *({"b64": "*" * 88}, {"b64": "ä" * 88}, {"b64": "AAAA" * 21 + "AAA"}),
                {"b64": base64.b64encode(b"\xff" * 64).decode() + "\n"},
            )
        ),
        *(({"byte_size": size}, "'byte_size' must be") for size in (-1, 1.5, "8", True, None)),
        *(({"device_id": number}, "'device_id' must be") for number in (-1, 0.0, "0", None)),
    ],
    ids=ascii,
)
def test_a_body_with_something_else_in_it_is_refused(
    cuda: FakeCuda, block: np.ndarray, change: dict[str, Any], why: str
) -> None:
    raw = {"b64": base64.b64encode(cuda.export(block)).decode()}
    body = {"raw_handle": raw, "device_id": 0, "byte_size": 8}
    target = f"{CUDA}/region/r/register"
    with machine(cuda), running(shared_memory=True) as server:
        reply = server.ask("POST", target, json.dumps({**body, **change}).encode())
        assert (reply.status, cuda.held()) == (400, {})
        assert f"region 'r': {why}" in reply.json["error"]
        assert raw["b64"][:20] not in reply.json["error"]
        assert server.ask("POST", target, json.dumps(body).encode()).status == 200


@pytest.mark.parametrize("offset", [209, 224, 1 << 62])
def test_nothing_outside_a_region_is_reached(
    kit: Kit, cuda: FakeCuda, block: np.ndarray, offset: int
) -> None:
    kit.register("frames", cuda.export(block), 256)
    for given, wanted in ((("frames", offset), None), (("frames", 0), ("frames", offset))):
        with kit.refused(400, "lie outside"):
            kit.infer(given, wanted)
    assert np.array_equal(block, np.arange(256, dtype=np.uint8))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_region_may_go_while_a_request_waits(
    protocol: str, cuda: FakeCuda, block: np.ndarray
) -> None:
    """Its input was copied; its output has nowhere to go, and says so."""
    engine = GatedEngine()
    with (
        machine(cuda),
        kit_of(protocol, {"m": engine}, shared_memory=True) as kit,
        ThreadPoolExecutor() as pool,
    ):
        engine.warm = True
        block[: ROWS.nbytes] = ROWS.view(np.uint8).ravel()
        for name in ("frames", "answers"):
            kit.register(name, cuda.export(block.copy()), 256)
        waits = pool.submit(kit.infer_apart, ("frames", 0), ("answers", 0))
        assert engine.entered.acquire(timeout=WAIT_S)
        memory = kit.service.memory
        assert memory is not None
        memory.unregister(kind="cuda")
        assert cuda.held() == {}
        engine.gate.set()
        with kit.refused(400, "no region 'answers'"):
            waits.result(WAIT_S)
        assert engine.fed == [0.0, 4.0, 8.0]
        assert "copy_to_device" not in cuda.names()


@pytest.mark.parametrize(
    ("call", "code", "status"),
    [
        ("copy_to_host", "MemoryAllocation", 503),
        ("copy_to_device", "InvalidValue", 500),
        ("open_ipc", "MemoryAllocation", 503),
        ("open_ipc", "Unknown", 503),
    ],
)
def test_what_is_not_the_clients_fault_is_not_called_so(
    kit: Kit, cuda: FakeCuda, block: np.ndarray, call: str, code: str, status: int
) -> None:
    handle = cuda.export(block)
    cuda.fail[call] = code
    with kit.refused(status, "cuda:0"):
        kit.register("frames", handle, 256)
        kit.infer(("frames", 0), ("frames", 0))
    assert kit.service.fatal is None  # a handle may bring CUDA to answer with an unknown error
    kit.client.unregister_cuda_shared_memory()
    kit.register("frames", handle, 256)
    kit.infer(("frames", 0), ("frames", 0))


@pytest.mark.parametrize(
    ("call", "wanted"), [("copy_to_host", None), ("copy_to_device", ("frames", 0))]
)
def test_a_gpu_lost_in_a_copy_ends_the_server(
    cuda: FakeCuda, block: np.ndarray, call: str, wanted: Any
) -> None:
    with machine(cuda), kit_of("grpc", shared_memory=True) as kit:
        kit.register("frames", cuda.export(block), 256)
        assert kit.service.fatal is None
        cuda.fail[call] = "IllegalAddress"
        with kit.refused(503, "the GPU is lost to this process"):
            kit.infer(("frames", 0), wanted)
        assert kit.service.fatal == "CUDA shared memory: the GPU is lost to this process"
        assert kit.service.why_not_ready() == kit.service.fatal


# -- where it is not offered


def no_gpu() -> tuple[int, ...]:
    raise Unsupported("cuda: no NVIDIA driver is loaded", hint="see: deploykit doctor")


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("module", "stands", "why"),
    [
        ("cuda", None, "not offered by this server: cuda is .*; pip install"),
        (
            "deploykit.runtimes.cuda.driver",
            SimpleNamespace(Cudart=None, ipc_devices=no_gpu),
            "not offered by this server: cuda: no NVIDIA driver is loaded",
        ),
    ],
    ids=["no bindings", "no driver"],
)
def test_without_cuda_only_system_shared_memory_is_offered(
    protocol: str, module: str, stands: Any, why: str, shared: str
) -> None:
    with replaced(module, stands), kit_of(protocol, shared_memory=True) as kit:
        for call in (
            lambda: kit.register("r", bytes(64), 8),
            lambda: kit.register("r", bytes(3), -1 if protocol == "http" else 1),
        ):
            with kit.refused(501, why):
                call()
        kit.client.unregister_cuda_shared_memory()  # as NVIDIA's examples begin
        assert kit.status() == []
        kit.client.register_system_shared_memory("r", shared, 64)
        extensions = kit.service.metadata()["extensions"]
    assert "system_shared_memory" in extensions
    assert "cuda_shared_memory" not in extensions


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_without_the_option_cuda_is_not_even_asked(protocol: str, cuda: FakeCuda) -> None:
    with machine(cuda), kit_of(protocol) as kit:
        for call in (lambda: kit.register("r", bytes(64), 8), kit.status):
            with kit.refused(501, "this extension is not offered by this server"):
                call()
        assert "cuda_shared_memory" not in kit.service.metadata()["extensions"]
    assert cuda.calls == []


@pytest.mark.parametrize(
    "path", [f"{CUDA}/region/r/else", f"{CUDA}/region//status", f"{CUDA}else/status", f"{CUDA}/r"]
)
def test_other_paths_are_not_offered(cuda: FakeCuda, path: str) -> None:
    with machine(cuda), running(shared_memory=True) as server:
        assert server.ask("GET", path).status == 501
        assert server.ask("POST", f"{CUDA}/register", b"{}").status == 400  # it has no name
        assert server.ask("GET", f"{CUDA}/region/r/register").status == 405
