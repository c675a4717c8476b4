"""CUDA shared-memory regions on a CUDA made of NumPy: bounds, what is closed, whose fault it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest

from deploykit.core.errors import BadInput, DeploykitError, NotFound, TooLarge, Unsupported
from deploykit.runtimes.cuda.errors import DeviceLost
from deploykit.serving.oip.request import Region
from deploykit.serving.shared_memory.cuda import Gpus, find_gpus
from deploykit.serving.shared_memory.system import MAX_REGIONS, SharedMemory
from tests.serving.conftest import WAIT_S
from tests.support.runtimes.fake_cuda import FakeCuda
from tests.support.runtimes.modules import replaced


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def block() -> np.ndarray:
    """256 bytes that a client holds on the device."""
    return np.arange(256, dtype=np.uint8)


@pytest.fixture
def memory(cuda: FakeCuda) -> Iterator[SharedMemory]:
    with SharedMemory(1 << 20, Gpus((0,), {0: cuda}.__getitem__)) as memory:
        yield memory


def test_what_was_read_does_not_change_with_the_clients_memory(
    memory: SharedMemory, cuda: FakeCuda, block: np.ndarray
) -> None:
    memory.register_cuda("frames", cuda.export(block), 0, 64)
    view = memory.read(Region("frames", 8, 16))
    block[:] = 0
    assert bytes(view) == bytes(range(8, 24))
    assert view.readonly
    assert np.frombuffer(view, np.float32).flags.aligned
    assert bytes(memory.read(Region("frames", 64, 0))) == b""


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, 65), (64, 1), (1, 64), (-1, 4), (0, -4), (1 << 62, 1), (4, (1 << 64) - 4)],
)
def test_bounds_are_those_that_were_registered(
    cuda: FakeCuda, block: np.ndarray, offset: int, size: int
) -> None:
    """Not those of the memory, which has 256 bytes."""
    with SharedMemory(1 << 70, Gpus((0,), {0: cuda}.__getitem__)) as memory:
        memory.register_cuda("frames", cuda.export(block), 0, 64)
        for use in (memory.read, lambda at: memory.write(at, b"")):
            with pytest.raises(BadInput, match="region 'frames' is 64 bytes"):
                use(Region("frames", offset, size))
    assert not {"copy_to_host", "copy_to_device"} & set(cuda.names())


def test_an_output_longer_than_its_place_is_refused(
    memory: SharedMemory, cuda: FakeCuda, block: np.ndarray
) -> None:
    memory.register_cuda("frames", cuda.export(block), 0, 64)
    with pytest.raises(BadInput, match="the output is 9 bytes, 8 were given"):
        memory.write(Region("frames", 0, 8), bytes(9))
    memory.write(Region("frames", 0, 8), np.zeros((1, 2), np.float32).data)
    assert np.array_equal(block, [0] * 8 + list(range(8, 256)))


def test_a_read_is_bounded(cuda: FakeCuda) -> None:
    with SharedMemory(100, Gpus((0,), {0: cuda}.__getitem__)) as memory:
        memory.register_cuda("frames", cuda.export(np.zeros(200, np.uint8)), 0, 200)
        with pytest.raises(TooLarge, match="above the limit of 100"):
            memory.read(Region("frames", 0, 101))


def test_regions_of_both_kinds_are_counted_together(
    memory: SharedMemory, cuda: FakeCuda, block: np.ndarray, shared: str
) -> None:
    handle = cuda.export(block)
    for number in range(MAX_REGIONS // 2):
        memory.register(f"s{number}", shared, 0, 1)
        memory.register_cuda(f"c{number}", handle, 0, 1)
    with pytest.raises(BadInput, match=f"{MAX_REGIONS} regions are registered"):
        memory.register_cuda("one-more", handle, 0, 1)
    with pytest.raises(BadInput, match=f"{MAX_REGIONS} regions are registered"):
        memory.register("one-more", shared, 0, 1)
    memory.close()
    assert cuda.held() == {}


def test_memory_whose_size_cuda_does_not_tell_is_taken_at_the_clients_word(
    memory: SharedMemory, cuda: FakeCuda, block: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "bytes_from", lambda _address: None)
    memory.register_cuda("frames", cuda.export(block), 0, 1 << 40)
    assert memory.status(kind="cuda")[0]["byte_size"] == 1 << 40


@pytest.mark.parametrize("code", ["IllegalAddress", "InvalidValue"])
def test_a_registration_that_fails_half_way_closes_its_handle(
    memory: SharedMemory, cuda: FakeCuda, block: np.ndarray, code: str
) -> None:
    cuda.fail["bytes_from"] = code
    with pytest.raises(DeploykitError) as caught:
        memory.register_cuda("frames", cuda.export(block), 0, 64)
    assert not isinstance(caught.value, BadInput)
    assert cuda.held() == {}
    with pytest.raises(NotFound):
        memory.status("frames", kind="cuda")


def test_a_handle_that_does_not_close_keeps_no_other_open(
    memory: SharedMemory, cuda: FakeCuda, block: np.ndarray
) -> None:
    for name in ("a", "b", "c"):
        memory.register_cuda(name, cuda.export(block.copy()), 0, 64)
    cuda.fail["close_ipc"] = "InvalidValue"
    memory.unregister(kind="cuda")
    assert memory.status(kind="cuda") == []
    assert cuda.count["close_ipc"] == 3


def test_a_region_is_not_closed_in_a_copy(cuda: FakeCuda, block: np.ndarray) -> None:
    copying, gate = threading.Event(), threading.Event()
    done: list[str] = []

    class Slow(FakeCuda):
        def copy_to_host(self, host: np.ndarray, address: int) -> None:
            copying.set()
            assert gate.wait(WAIT_S)
            super().copy_to_host(host, address)
            done.append("copied")

        def close_ipc(self, address: int) -> None:
            super().close_ipc(address)
            done.append("closed")

    slow = Slow()
    with (
        SharedMemory(1 << 20, Gpus((0,), {0: slow}.__getitem__)) as memory,
        ThreadPoolExecutor() as pool,
    ):
        memory.register_cuda("frames", slow.export(block), 0, 64)
        reads = pool.submit(memory.read, Region("frames", 0, 64))
        assert copying.wait(WAIT_S)
        closes = pool.submit(memory.unregister, "frames", kind="cuda")
        wait([closes], 0.1)  # it has the time to do what it must not
        gate.set()
        assert bytes(reads.result(WAIT_S)) == bytes(range(64))
        closes.result(WAIT_S)
    assert done == ["copied", "closed"]


def test_a_driver_is_opened_once_and_when_it_is_needed(cuda: FakeCuda, block: np.ndarray) -> None:
    opened: list[int] = []

    def open_driver(number: int) -> FakeCuda:
        opened.append(number)
        return cuda

    with SharedMemory(1 << 20, Gpus((0, 1), open_driver)) as memory:
        assert opened == []
        for number, name in ((1, "a"), (1, "b"), (0, "c")):
            memory.register_cuda(name, cuda.export(block), number, 8)
        with pytest.raises(BadInput, match="no GPU 2"):
            memory.register_cuda("d", cuda.export(block), 2, 8)
    assert opened == [1, 0]


def test_a_lost_gpu_is_no_clients_fault(
    memory: SharedMemory, cuda: FakeCuda, block: np.ndarray
) -> None:
    memory.register_cuda("frames", cuda.export(block), 0, 64)
    cuda.lost = "LaunchFailure"
    uses: list[Callable[[], object]] = [
        lambda: memory.read(Region("frames", 0, 8)),
        lambda: memory.write(Region("frames", 0, 8), bytes(8)),
        lambda: memory.register_cuda("more", cuda.export(block), 0, 8),
    ]
    for use in uses:
        with pytest.raises(DeviceLost):
            use()
    assert memory.gpus.lost
    memory.close()
    assert memory.status(kind="cuda") == []


def test_machine_without_bindings_says_so() -> None:
    with replaced("cuda", None):
        gpus = find_gpus()
    assert not gpus.offered
    with pytest.raises(Unsupported, match="not offered by this server: cuda is ") as caught:
        gpus.check()
    assert "deploykit[tensorrt]" in (caught.value.hint or "")
