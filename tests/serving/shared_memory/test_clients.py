"""Shared memory used by NVIDIA's clients over HTTP and gRPC, against a real server process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from tests.support.serving.faults import Process, until

grpcclient = pytest.importorskip("tritonclient.grpc")
httpclient = pytest.importorskip("tritonclient.http")
shm = pytest.importorskip("tritonclient.utils.shared_memory")
from tritonclient.utils import InferenceServerException  # noqa: E402

SHARED = Path("/dev/shm")
ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("served")
    options = ("--shared-memory", "--grpc-port", "0")
    with Process(folder, *options, env={"CUDA_VISIBLE_DEVICES": ""}) as server:
        yield server


@pytest.fixture(params=["http", "grpc"])
def kit(request: pytest.FixtureRequest, server: Process) -> Iterator[tuple[ModuleType, Any]]:
    """The client library of a protocol, and a client."""
    kit, url = {
        "http": (httpclient, f"127.0.0.1:{server.port}"),
        "grpc": (grpcclient, server.grpc),
    }[request.param]
    client = kit.InferenceServerClient(url)
    yield kit, client
    client.unregister_system_shared_memory()
    client.close()


@contextlib.contextmanager
def region(client: Any, name: str, size: int) -> Iterator[Any]:
    """A region that the client created and registered."""
    handle = shm.create_shared_memory_region(name, f"/test-{name}-{uuid4().hex}", size)
    try:
        client.register_system_shared_memory(name, handle._shm_key, size)
        yield handle
        client.unregister_system_shared_memory(name)
    finally:
        shm.destroy_shared_memory_region(handle)


def infer_arguments(kit: ModuleType, output: tuple[str, int, int] | None = None) -> dict[str, Any]:
    """Arguments of `infer`: ROWS from region `frames`, the output as `output` says."""
    tensor = kit.InferInput("x", list(ROWS.shape), "FP32")
    tensor.set_shared_memory("frames", ROWS.nbytes)
    wanted = kit.InferRequestedOutput("y")
    if output is not None:
        name, size, offset = output
        wanted.set_shared_memory(name, size, offset)
    return {"model_name": "m", "inputs": [tensor], "outputs": [wanted]}


def test_inputs_and_outputs_pass_through_shared_memory(kit: tuple[ModuleType, Any]) -> None:
    kind, client = kit
    with region(client, "frames", ROWS.nbytes) as frames, region(client, "answers", 256) as answers:
        for number in range(3):
            shm.set_shared_memory_region(frames, [ROWS + number])
            result = client.infer(**infer_arguments(kind, ("answers", ROWS.nbytes, 64)))
            output = result.get_output("y")
            if kind is httpclient:
                assert output.keys() == {"name", "datatype", "shape"}  # as Triton's
            else:
                assert output.parameters["shared_memory_region"].string_param == "answers"
            found = shm.get_contents_as_numpy(answers, np.float32, list(ROWS.shape), 64)
            assert np.array_equal(found, 2 * (ROWS + number) + 1)
            del found  # a view of memory that is unmapped below
        result = client.infer(**infer_arguments(kind))  # only the input in shared memory
        assert np.array_equal(result.as_numpy("y"), 2 * (ROWS + 2) + 1)


def test_a_registered_region_is_listed_until_it_is_unregistered(
    kit: tuple[ModuleType, Any], server: Process
) -> None:
    _, client = kit
    assert client.is_server_live()  # it is connected
    descriptors = server.holds()[0]
    with region(client, "frames", 64) as frames:
        status = client.get_system_shared_memory_status("frames")
        if kit[0] is grpcclient:
            status = [
                {field.name: value for field, value in each.ListFields()}
                for each in status.regions.values()
            ]
        (found,) = status
        assert (found["name"], found["key"], found["byte_size"]) == ("frames", frames._shm_key, 64)
    with pytest.raises(InferenceServerException, match="no region 'frames'"):
        client.get_system_shared_memory_status("frames")
    until(lambda: server.holds()[0] <= descriptors)


@pytest.mark.parametrize(
    ("key", "why"), [("/../etc/passwd", "cannot be the key"), ("/test-not-there", "No such file")]
)
def test_an_invalid_registration_gets_400(kit: tuple[ModuleType, Any], key: str, why: str) -> None:
    _, client = kit
    with pytest.raises(InferenceServerException, match=why) as caught:
        client.register_system_shared_memory("r", key, 1)
    assert caught.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
    assert "/dev/shm" not in caught.value.message()


@pytest.mark.parametrize(
    ("output", "why"),
    [
        (("answers", ROWS.nbytes, 240), "out of bounds"),
        (("answers", ROWS.nbytes - 1, 0), f"the output has {ROWS.nbytes} bytes"),
        (("nobody", ROWS.nbytes, 0), "no region 'nobody'"),
    ],
)
def test_an_output_that_does_not_fit_its_region_gets_400(
    kit: tuple[ModuleType, Any], output: tuple[str, int, int], why: str
) -> None:
    kind, client = kit
    with region(client, "frames", ROWS.nbytes) as frames, region(client, "answers", 256):
        shm.set_shared_memory_region(frames, [ROWS])
        with pytest.raises(InferenceServerException, match=why) as caught:
            client.infer(**infer_arguments(kind, output))
        assert caught.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")


def test_cuda_shared_memory_is_not_offered(kit: tuple[ModuleType, Any]) -> None:
    _, client = kit
    for call in (
        lambda: client.register_cuda_shared_memory("r", b"aGFuZGxl", 0, 64),
        client.get_cuda_shared_memory_status,
    ):
        with pytest.raises(InferenceServerException, match="not offered") as caught:
            call()
        assert caught.value.status() in ("501", "StatusCode.UNIMPLEMENTED")
    client.unregister_cuda_shared_memory()  # NVIDIA's examples begin with this call


def test_shared_memory_is_not_offered_without_the_option(tmp_path: Path) -> None:
    with Process(tmp_path, "--grpc-port", "0") as server:
        for kind, url in ((httpclient, f"127.0.0.1:{server.port}"), (grpcclient, server.grpc)):
            client = kind.InferenceServerClient(url)
            with contextlib.closing(client):
                with pytest.raises(InferenceServerException) as caught:
                    client.register_system_shared_memory("r", "/test-r", 64)
                assert caught.value.status() in ("501", "StatusCode.UNIMPLEMENTED")
                with pytest.raises(InferenceServerException, match="not enabled"):
                    client.infer(**infer_arguments(kind))
