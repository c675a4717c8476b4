"""System shared memory: registration, bounds checks and truncated objects."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import numpy as np
import pytest

from deploykit.core.errors import BadInput, NotFound, Overloaded, TooLarge
from deploykit.serving.shared_memory import MAX_REGIONS, Region, SharedMemory
from tests.support.serving.faults import Process, until

grpcclient = pytest.importorskip("tritonclient.grpc")
httpclient = pytest.importorskip("tritonclient.http")
shm = pytest.importorskip("tritonclient.utils.shared_memory")

from tritonclient.utils import InferenceServerException  # noqa: E402

FOLDER = Path("/dev/shm")


@pytest.fixture
def path(shared: str) -> Path:
    path = FOLDER / shared[1:]
    path.write_bytes(bytes(range(64)))
    return path


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    with SharedMemory(max_bytes=1 << 20) as memory:
        yield memory


def open_objects() -> set[str]:
    """Of shared memory: other threads of this process may open other files."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.add(str(link.readlink()))
        except OSError:
            continue
    return {name for name in found if name.startswith(str(FOLDER))}


def test_a_region_is_a_part_of_its_object(memory: SharedMemory, shared: str, path: Path) -> None:
    memory.register("frame", shared, 16, 32)
    assert bytes(memory.read(Region("frame", 0, 32))) == bytes(range(16, 48))
    assert bytes(memory.read(Region("frame", 31, 1))) == bytes([47])
    assert bytes(memory.read(Region("frame", 32, 0))) == b""
    view = memory.read(Region("frame", 0, 32))
    memory.write(Region("frame", 4, 8), np.frombuffer(b"answer", np.uint8).data)
    assert (bytes(view), view.readonly) == (bytes(range(16, 48)), True)  # it is a copy
    assert path.read_bytes()[16:28] == bytes(range(16, 20)) + b"answer" + bytes([26, 27])
    assert memory.status() == memory.status("frame")
    assert memory.status() == [{"name": "frame", "key": shared, "offset": 16, "byte_size": 32}]


OUTSIDE = [(0, 65), (64, 1), (1, 64), (-1, 4), (0, -4), (1 << 62, 1), (4, (1 << 64) - 4)]


@pytest.mark.parametrize(("offset", "size"), [*OUTSIDE, ((1 << 64) - 1, 2)])
def test_reads_and_writes_outside_a_region_are_refused(
    shared: str, path: Path, offset: int, size: int
) -> None:
    with SharedMemory(max_bytes=1 << 70) as large:
        with pytest.raises(BadInput, match="no region 'frame'"):
            large.read(Region("frame", 0, 1))
        large.register("frame", shared, 0, 64)
        for use in (lambda at: large.read(at), lambda at: large.write(at, b"")):
            with pytest.raises(BadInput, match="region 'frame' has 64 bytes"):
                use(Region("frame", offset, size))
        with pytest.raises(BadInput, match="the output has 9 bytes, the request reserved 8"):
            large.write(Region("frame", 0, 8), bytes(9))
    assert path.read_bytes() == bytes(range(64))


KEYS = [
    *("", "/", "/.", "/..", "/../etc/passwd", "/a/b", "//x", "/a\0", "/a\n", "/" + "x" * 129),
    *("/etc/passwd", "../x", "/dev/shm/x", "/%2e", None, 5, ["/x"], "/ä"),
]
OF_SERVERS = ["deploykit-x", "deploykit_x", "triton_python_backend_x", "sem.x"]
NAMES = ["", "a/b", "a b", "\n", "x" * 129, "é", None, 7, {"a": 1}]
SIZES = [-1, 1.0, "1", True, None, 1 << 62, 1 << 4000]
REFUSED: list[tuple[dict[str, object], str]] = [
    *(({"key": key}, "cannot be the key") for key in [*KEYS, *(f"/{each}" for each in OF_SERVERS)]),
    *(({"name": name}, "cannot be the name") for name in NAMES),
    *(({"offset": value}, "region 'frame': 'offset' must be an integer") for value in SIZES),
    *(({"byte_size": value}, "region 'frame': 'byte_size' must be an int") for value in SIZES),
    *(
        ({"offset": offset, "byte_size": size}, r"would end at byte \d+, the object has 64")
        for offset, size in ((0, 65), (64, 1), (1, 64), ((1 << 62) - 1, 1))
    ),
]


@pytest.mark.parametrize(("change", "reason"), REFUSED, ids=lambda each: f"{each!r:.40}")
def test_a_registration_that_cannot_be_is_refused(
    memory: SharedMemory, shared: str, change: dict[str, object], reason: str
) -> None:
    before = open_objects()
    asked = {"name": "frame", "key": shared, "offset": 0, "byte_size": 1, **change}
    with pytest.raises(BadInput, match=reason) as caught:
        memory.register(**asked)
    assert "/dev/shm" not in caught.value.message.replace(ascii(asked["key"]), "")
    assert open_objects() == before
    assert memory.status() == []


def test_links_fifos_and_folders_are_not_opened(memory: SharedMemory, tmp_path: Path) -> None:
    """Neither are objects that do not exist."""
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(64))
    names = {kind: FOLDER / f"test-{kind}-{uuid4().hex}" for kind in ("link", "fifo", "folder")}
    try:
        names["link"].symlink_to(secret)
        os.mkfifo(names["fifo"])
        names["folder"].mkdir()
        for path in (*names.values(), FOLDER / "test-not-there"):
            with pytest.raises(BadInput, match=r"region 'frame': it(s| would) ") as caught:
                memory.register("frame", f"/{path.name}", 0, 1)
            assert "/dev" not in caught.value.message
            assert path.name not in caught.value.message
    finally:
        names["folder"].rmdir()
        for kind in ("link", "fifo"):
            names[kind].unlink()


def test_a_name_can_be_reused_after_unregistering(
    memory: SharedMemory, shared: str, path: Path
) -> None:
    memory.register("frame", shared, 0, 64)
    with pytest.raises(BadInput, match="already registered"):
        memory.register("frame", shared, 0, 8)
    memory.register("other", shared, 8, 8)
    memory.unregister("frame")
    memory.unregister("frame")
    assert [region["name"] for region in memory.status()] == ["other"]
    with pytest.raises(NotFound, match="no region 'frame'"):
        memory.status("frame")
    memory.register("frame", shared, 0, 8)
    memory.unregister()
    assert memory.status() == []
    assert str(path) not in open_objects()


def test_the_number_of_regions_is_limited_and_closing_unmaps_them(shared: str, path: Path) -> None:
    with SharedMemory() as memory:
        for number in range(MAX_REGIONS):
            memory.register(f"r{number}", shared, 0, 1)
        with pytest.raises(BadInput, match=f"{MAX_REGIONS} regions are registered"):
            memory.register("one-more", shared, 0, 1)
        assert str(path) in open_objects()
    assert str(path) not in open_objects()


def test_the_size_of_a_read_is_limited(shared: str, path: Path) -> None:
    os.truncate(path, 1 << 40)  # sparse: it takes no memory
    with SharedMemory(max_bytes=1 << 20) as memory:
        memory.register("huge", shared, 0, 1 << 40)
        with pytest.raises(TooLarge, match="above the limit of 1048576"):
            memory.read(Region("huge", 0, 1 << 40))
        assert len(memory.read(Region("huge", (1 << 40) - 4, 4))) == 4


def test_a_truncated_object_is_rejected_and_not_extended(
    memory: SharedMemory, shared: str, path: Path
) -> None:
    memory.register("frame", shared, 0, 64)
    os.truncate(path, 10)
    assert bytes(memory.read(Region("frame", 0, 10))) == bytes(range(10))
    for use in (
        lambda: memory.read(Region("frame", 0, 11)),
        lambda: memory.write(Region("frame", 8, 4), b"abcd"),
    ):
        with pytest.raises(BadInput, match="smaller than when it was registered"):
            use()
    assert path.stat().st_size == 10
    path.unlink()
    assert bytes(memory.read(Region("frame", 0, 4))) == bytes(range(4))  # until unregistered


def test_what_the_system_lacks_is_the_servers_problem(
    memory: SharedMemory, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.register("r", shared, 0, 64)
    for function, code, reason, use in (
        ("open", errno.EMFILE, "Too many", lambda: memory.register("other", shared, 0, 4)),
        ("pwrite", errno.ENOSPC, "'r': No space", lambda: memory.write(Region("r", 0, 4), b"abcd")),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, Mock(side_effect=OSError(code, os.strerror(code))))
            with pytest.raises(Overloaded, match=reason) as caught:
                use()
        assert caught.value.http_status == 503


# -- NVIDIA's clients over HTTP and gRPC, against a real server process


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
    client.unregister_cuda_shared_memory()  # NVIDIA's examples begin with this call
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


def test_what_does_not_fit_its_region_or_object_gets_400(kit: tuple[ModuleType, Any]) -> None:
    kind, client = kit
    size = ROWS.nbytes
    with region(client, "frames", size) as frames, region(client, "answers", 256):
        shm.set_shared_memory_region(frames, [ROWS])
        infer, register = client.infer, client.register_system_shared_memory
        for ask, words in (
            (lambda: register("r", "/../etc/passwd", 1), "cannot be the key"),
            (lambda: register("r", "/test-not-there", 1), "No such file"),
            (lambda: infer(**infer_arguments(kind, ("answers", size, 240))), "out of bounds"),
            (lambda: infer(**infer_arguments(kind, ("answers", size - 1, 0))), f"has {size} bytes"),
            (lambda: infer(**infer_arguments(kind, ("nobody", size, 0))), "no region 'nobody'"),
        ):
            with pytest.raises(InferenceServerException, match=words) as caught:
                ask()
            assert caught.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
            assert "/dev/shm" not in caught.value.message()
