"""System shared memory: registration, bounds checks and truncated objects."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from deploykit.core.errors import BadInput, NotFound, Overloaded, TooLarge
from deploykit.serving.shared_memory import MAX_REGIONS, Region, SharedMemory

FOLDER = Path("/dev/shm")


class Shared:
    """An object in shared memory, as a client creates it."""

    def __init__(self, content: bytes, prefix: str = "test-") -> None:
        self.path = FOLDER / f"{prefix}{uuid4().hex}"
        self.path.write_bytes(content)
        self.key = f"/{self.path.name}"


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    with SharedMemory(max_bytes=1 << 20) as memory:
        yield memory


@pytest.fixture
def shared() -> Iterator[Shared]:
    shared = Shared(bytes(range(64)))
    yield shared
    shared.path.unlink(missing_ok=True)


def open_objects() -> set[str]:
    """Of shared memory: other threads of this process may open other files."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.add(str(link.readlink()))
        except OSError:
            continue
    return {name for name in found if name.startswith(str(FOLDER))}


def test_a_region_is_a_part_of_its_object(memory: SharedMemory, shared: Shared) -> None:
    memory.register("frame", shared.key, 16, 32)
    assert bytes(memory.read(Region("frame", 0, 32))) == bytes(range(16, 48))
    assert bytes(memory.read(Region("frame", 31, 1))) == bytes([47])
    assert bytes(memory.read(Region("frame", 32, 0))) == b""
    memory.write(Region("frame", 4, 8), b"answer")
    assert shared.path.read_bytes()[16:28] == bytes(range(16, 20)) + b"answer" + bytes([26, 27])
    assert memory.status() == memory.status("frame")
    assert memory.status() == [{"name": "frame", "key": shared.key, "offset": 16, "byte_size": 32}]


def test_a_read_is_a_copy(memory: SharedMemory, shared: Shared) -> None:
    memory.register("frame", shared.key, 0, 64)
    view = memory.read(Region("frame", 0, 64))
    shared.path.write_bytes(bytes(64))
    assert bytes(view) == bytes(range(64))
    assert view.readonly
    assert np.frombuffer(view, np.float32).flags.aligned


def test_an_array_is_written_as_its_bytes(memory: SharedMemory, shared: Shared) -> None:
    memory.register("frame", shared.key, 0, 64)
    values = np.arange(4, dtype=np.float32).reshape(2, 2)
    memory.write(Region("frame", 0, 16), values.data)
    assert shared.path.read_bytes()[:16] == values.tobytes()


@pytest.mark.parametrize(
    ("offset", "size"),
    [
        (0, 65),
        (64, 1),
        (1, 64),
        (-1, 4),
        (0, -4),
        (1 << 62, 1),
        (4, (1 << 64) - 4),
        ((1 << 64) - 1, 2),
    ],
)
def test_reads_and_writes_outside_a_region_are_refused(
    memory: SharedMemory, shared: Shared, offset: int, size: int
) -> None:
    with SharedMemory(max_bytes=1 << 70) as large:
        large.register("frame", shared.key, 0, 64)
        for use in (lambda at: large.read(at), lambda at: large.write(at, b"")):
            with pytest.raises(BadInput, match="region 'frame' has 64 bytes"):
                use(Region("frame", offset, size))
    with pytest.raises(BadInput, match="no region 'frame'"):
        memory.read(Region("frame", 0, 1))
    assert shared.path.read_bytes() == bytes(range(64))


def test_an_output_longer_than_reserved_is_rejected(memory: SharedMemory, shared: Shared) -> None:
    memory.register("frame", shared.key, 0, 64)
    with pytest.raises(BadInput, match="the output has 9 bytes, the request reserved 8"):
        memory.write(Region("frame", 0, 8), bytes(9))
    assert shared.path.read_bytes() == bytes(range(64))


@pytest.mark.parametrize(
    "key",
    [
        *("", "/", "/.", "/..", "/../etc/passwd", "/a/b", "//x", "/a\0", "/a\n", "/" + "x" * 129),
        *("/etc/passwd", "../x", "/dev/shm/x", "/%2e", None, 5, ["/x"], "/ä"),
    ],
    ids=ascii,
)
def test_a_key_that_is_not_a_plain_name_is_refused(memory: SharedMemory, key: object) -> None:
    with pytest.raises(BadInput, match="cannot be the key") as caught:
        memory.register("frame", key, 0, 1)
    assert "/dev/shm" not in caught.value.message.replace(ascii(key), "")


@pytest.mark.parametrize("prefix", ["deploykit-", "deploykit_", "triton_python_backend_", "sem."])
def test_objects_of_servers_cannot_be_registered(memory: SharedMemory, prefix: str) -> None:
    shared = Shared(b"secret", prefix)
    try:
        with pytest.raises(BadInput, match="cannot be the key"):
            memory.register("frame", shared.key, 0, 6)
    finally:
        shared.path.unlink()


@pytest.mark.parametrize("name", ["", "a/b", "a b", "\n", "x" * 129, "é", None, 7, {"a": 1}])
def test_a_region_name_that_is_not_plain_is_refused(
    memory: SharedMemory, shared: Shared, name: object
) -> None:
    with pytest.raises(BadInput, match="cannot be the name"):
        memory.register(name, shared.key, 0, 1)
    assert memory.status() == []


@pytest.mark.parametrize("field", ["offset", "byte_size"])
@pytest.mark.parametrize("value", [-1, 1.0, "1", True, None, 1 << 62, 1 << 4000], ids=repr)
def test_offsets_and_sizes_that_are_not_integers_are_refused(
    memory: SharedMemory, shared: Shared, field: str, value: object
) -> None:
    with pytest.raises(BadInput, match=f"region 'frame': '{field}' must be an integer"):
        memory.register("frame", shared.key, **{"offset": 0, "byte_size": 1, field: value})


@pytest.mark.parametrize(("offset", "size"), [(0, 65), (64, 1), (1, 64), ((1 << 62) - 1, 1)])
def test_a_region_must_lie_inside_its_object(
    memory: SharedMemory, shared: Shared, offset: int, size: int
) -> None:
    before = open_objects()
    with pytest.raises(BadInput, match=r"it would end at byte \d+, the object has 64"):
        memory.register("frame", shared.key, offset, size)
    assert open_objects() == before
    assert memory.status() == []


def test_links_fifos_and_folders_are_not_opened(
    memory: SharedMemory, shared: Shared, tmp_path: Path
) -> None:
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


def test_a_name_can_be_reused_after_unregistering(memory: SharedMemory, shared: Shared) -> None:
    memory.register("frame", shared.key, 0, 64)
    with pytest.raises(BadInput, match="already registered"):
        memory.register("frame", shared.key, 0, 8)
    memory.register("other", shared.key, 8, 8)
    memory.unregister("frame")
    memory.unregister("frame")
    assert [region["name"] for region in memory.status()] == ["other"]
    with pytest.raises(NotFound, match="no region 'frame'"):
        memory.status("frame")
    memory.register("frame", shared.key, 0, 8)
    memory.unregister()
    assert memory.status() == []
    assert str(shared.path) not in open_objects()


def test_the_number_of_regions_is_limited(memory: SharedMemory, shared: Shared) -> None:
    for number in range(MAX_REGIONS):
        memory.register(f"r{number}", shared.key, 0, 1)
    with pytest.raises(BadInput, match=f"{MAX_REGIONS} regions are registered"):
        memory.register("one-more", shared.key, 0, 1)


def test_the_size_of_a_read_is_limited(shared: Shared) -> None:
    os.truncate(shared.path, 1 << 40)  # sparse: it takes no memory
    with SharedMemory(max_bytes=1 << 20) as memory:
        memory.register("huge", shared.key, 0, 1 << 40)
        with pytest.raises(TooLarge, match="above the limit of 1048576"):
            memory.read(Region("huge", 0, 1 << 40))
        assert len(memory.read(Region("huge", (1 << 40) - 4, 4))) == 4


def test_closing_unmaps_every_object(shared: Shared) -> None:
    with SharedMemory() as memory:
        memory.register("frame", shared.key, 0, 64)
        assert str(shared.path) in open_objects()
    assert str(shared.path) not in open_objects()


def test_a_removed_object_stays_readable_until_it_is_unregistered(
    memory: SharedMemory, shared: Shared
) -> None:
    memory.register("frame", shared.key, 0, 64)
    shared.path.unlink()
    assert bytes(memory.read(Region("frame", 0, 4))) == bytes(range(4))


def test_a_truncated_object_is_rejected_and_not_extended(
    memory: SharedMemory, shared: Shared
) -> None:
    memory.register("frame", shared.key, 0, 64)
    os.truncate(shared.path, 10)
    assert bytes(memory.read(Region("frame", 0, 10))) == bytes(range(10))
    with pytest.raises(BadInput, match="smaller than when it was registered"):
        memory.read(Region("frame", 0, 11))
    with pytest.raises(BadInput, match="smaller than when it was registered"):
        memory.write(Region("frame", 8, 4), b"abcd")
    assert shared.path.stat().st_size == 10


def test_a_region_that_finds_no_descriptor_left_is_the_servers_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", full)
    with SharedMemory() as memory, pytest.raises(Overloaded, match="Too many open files") as caught:
        memory.register("r", "/some", 0, 4)
    assert caught.value.http_status == 503


def test_shared_memory_that_is_full_is_the_servers_problem(
    memory: SharedMemory, shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    memory.register("r", shared.key, 0, 64)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(Overloaded, match="region 'r': No space left on device") as caught:
        memory.write(Region("r", 0, 4), b"abcd")
    assert caught.value.http_status == 503
