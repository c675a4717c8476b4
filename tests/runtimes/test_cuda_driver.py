"""CUDA's own bindings, as far as they go without a driver, and a pipeline on the real GPU."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import BadInput, DeploykitError, Unsupported
from deploykit.runtimes.cuda.errors import DeviceLost
from deploykit.runtimes.cuda.execution import Pipeline
from deploykit.runtimes.cuda.memory import Shape, byte_count
from tests.support.runtimes.cuda_runs import CODES, X, Y, rows
from tests.support.runtimes.modules import replaced


def bindings() -> Any:
    pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed")
    from deploykit.runtimes.cuda import driver as cuda_driver

    return cuda_driver


def test_codes_are_those_of_the_bindings() -> None:
    codes = bindings().cudart.cudaError_t
    assert {code.name.removeprefix("cudaError") for code in codes} - {"cudaSuccess"} <= set(CODES)


def test_versions_are_read() -> None:
    assert bindings().cuda_version(12060) == "12.6"


def test_driver_version_is_read_from_the_kernel(tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
        "GCC version:  gcc version 12.2.0\n"
    )
    assert bindings().driver_version(file) == "580.65.06"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n")
    assert bindings().driver_version(file) == "535.104.05"
    assert bindings().driver_version(tmp_path / "none") == ""


def test_memory_that_a_system_can_give_is_read(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:  100 kB\nMemFree:    5 kB\nMemAvailable:      62 kB\n")
    assert bindings().available_bytes(file) == 62 * 1024
    assert bindings().available_bytes(tmp_path / "none") == 0


def test_memory_that_caches_hold_is_free_where_cpu_and_gpu_share_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = bindings()
    cuda = object.__new__(driver.Cudart)  # without a device
    monkeypatch.setattr(cuda, "_all", lambda _call: (10, 1 << 50), raising=False)
    cuda.integrated = False
    assert cuda.memory() == (10, 1 << 50)
    cuda.integrated = True
    assert cuda.memory()[0] > 1 << 20


def test_machine_without_a_driver_is_told_so() -> None:
    driver = bindings()
    if driver.cudart.cudaDriverGetVersion()[1]:
        pytest.skip("this machine has a driver")
    with pytest.raises(Unsupported, match="cuda:0: no NVIDIA driver is loaded") as caught:
        driver.Cudart(0)
    assert "deploykit doctor" in (caught.value.hint or "")


_CODES = {
    "Success": 0,
    "ErrorInvalidValue": 1,
    "ErrorDeviceUninitialized": 201,
    "ErrorMapBufferObjectFailed": 205,
    "ErrorInvalidResourceHandle": 400,
    "ErrorIllegalAddress": 700,
    "ErrorNotSupported": 801,
    "ErrorUnknown": 999,
}
Code = IntEnum("Code", {f"cuda{name}": number for name, number in _CODES.items()})
_OPEN, _INTEGRATED, _SUPPORT = "cudaIpcOpenMemHandle", 18, 125
_VALUES = {
    "cudaError_t": Code,
    "cudaMemcpyKind": SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2),
    "cudaDeviceAttr": SimpleNamespace(
        cudaDevAttrIntegrated=_INTEGRATED, cudaDevAttrIpcEventSupport=_SUPPORT
    ),
    "cudaEventDisableTiming": 2,
    "cudaEventBlockingSync": 1,
    "cudaHostAllocMapped": 2,
    "cudaHostAllocDefault": 0,
    "cudaHostAllocPortable": 1,
    "cudaStreamPerThread": 2,
    "cudaIpcMemLazyEnablePeerAccess": 1,
}


class Handle:
    """Of cudaIpcMemHandle_t, in newer bindings: a pointer to its bytes and nothing else."""

    def __init__(self) -> None:
        self.content = (ctypes.c_uint8 * 64)()

    def getPtr(self) -> int:  # noqa: N802 - as the bindings call it
        return ctypes.addressof(self.content)


class Runtime(ModuleType):
    """As much of cuda.bindings.runtime as other processes' memory needs: one block of 64 bytes."""

    def __init__(self) -> None:
        super().__init__("cuda.bindings.runtime")
        vars(self).update(_VALUES, cudaIpcMemHandle_t=Handle)
        self.block = np.arange(64, dtype=np.uint8)
        self.supports = [1]  # of each device: whether it opens handles
        self.code = Code.cudaSuccess  # what opening a handle answers
        self.calls: list[tuple[Any, ...]] = []
        self.answers = {
            "cudaGetDeviceCount": lambda: (len(self.supports),),
            "cudaDeviceGetAttribute": lambda what, n: (
                self.supports[n] if what == _SUPPORT else 0,
            ),
            "cudaGetErrorString": lambda code: (f"what {code.name} says".encode(),),
            "cudaMemcpyAsync": lambda to, at, count, *_: ctypes.memmove(to, at, count) and (),
            _OPEN: lambda *_: (None if self.code else self.block.ctypes.data,),
        }

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuda"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            shown = [
                bytes(each.content) if isinstance(each, Handle) else each for each in arguments
            ]
            self.calls.append((name, *shown))
            code = self.code if name == _OPEN else Code.cudaSuccess
            return code, *self.answers.get(name, lambda *_: ())(*arguments)

        return call

    @property
    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    """In the place of NVIDIA's; the file under test is imported anew on it."""
    runtime = Runtime()
    base = runtime.block.ctypes.data - 64

    def address_range(address: int) -> tuple[int, int, int]:
        known = base <= address < base + 128
        return (0, base, 128) if known else (1, 0, 0)

    made = {
        "cuda.bindings": ModuleType("cuda.bindings"),
        "cuda.bindings.runtime": runtime,
        "cuda.bindings.driver": SimpleNamespace(
            CUresult=SimpleNamespace(CUDA_SUCCESS=0), cuMemGetAddressRange=address_range
        ),
    }
    before = sys.modules.get("cuda.bindings.driver")
    with replaced("cuda", ModuleType("cuda")):
        sys.modules.update(made)
        yield runtime
    sys.modules.pop("cuda.bindings.driver")
    if before is not None:
        sys.modules["cuda.bindings.driver"] = before


def cudart(number: int = 0) -> Any:
    from deploykit.runtimes.cuda.driver import Cudart

    return Cudart(number)


def test_memory_of_another_process_is_opened_copied_and_closed(runtime: Runtime) -> None:
    cuda, handle = cudart(), bytes(range(192, 256))
    address = cuda.open_ipc(handle)
    assert runtime.calls[-1] == (_OPEN, handle, 1)
    host = np.zeros(8, np.uint8)
    cuda.copy_to_host(host, address + 8)
    assert list(host) == list(range(8, 16))
    cuda.copy_to_device(address + 4, np.full(4, 255, np.uint8))
    assert list(runtime.block[2:10]) == [2, 3, 255, 255, 255, 255, 8, 9]
    assert runtime.calls[-1] == ("cudaStreamSynchronize", 2)  # it has arrived
    cuda.close_ipc(address)
    assert runtime.calls[-1] == ("cudaIpcCloseMemHandle", address)


def test_every_use_of_it_names_the_device(runtime: Runtime) -> None:
    """CUDA's current device is each thread's own, and other regions may lie on another."""
    runtime.supports = [1, 1, 1]
    cuda = cudart(2)
    address, host = cuda.open_ipc(bytes(64)), np.zeros(1, np.uint8)
    uses = {
        "open": lambda: cuda.open_ipc(bytes(64)),
        "size": lambda: cuda.bytes_from(address),
        "in": lambda: cuda.copy_to_device(address, host),
        "out": lambda: cuda.copy_to_host(host, address),
        "close": lambda: cuda.close_ipc(address),
    }
    for name, use in uses.items():
        runtime.calls.clear()
        use()
        assert runtime.calls[0] == ("cudaSetDevice", 2), name


def test_what_is_mapped_from_an_address_on_is_told(runtime: Runtime) -> None:
    cuda = cudart()
    address = cuda.open_ipc(bytes(64))
    assert cuda.bytes_from(address) == 64  # of 128, 64 before it
    assert cuda.bytes_from(address + 60) == 4
    assert cuda.bytes_from(address + 64) is None


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (Code.cudaErrorInvalidValue, BadInput),
        (Code.cudaErrorInvalidResourceHandle, BadInput),
        (Code.cudaErrorMapBufferObjectFailed, BadInput),
        (Code.cudaErrorDeviceUninitialized, BadInput),
        (Code.cudaErrorNotSupported, Unsupported),
        (Code.cudaErrorUnknown, DeviceLost),
        (Code.cudaErrorIllegalAddress, DeviceLost),
    ],
)
def test_handle_that_is_not_opened_has_its_error(
    runtime: Runtime, code: Any, kind: type[DeploykitError]
) -> None:
    cuda, runtime.code = cudart(), code
    with pytest.raises(DeploykitError, match=f"cuda:0.*{code.name}") as caught:
        cuda.open_ipc(bytes(64))
    assert type(caught.value) is kind
    assert "cudaGetLastError" in runtime.names


@pytest.mark.parametrize("size", [0, 63, 65])
def test_handle_of_another_size_is_never_read(runtime: Runtime, size: int) -> None:
    cuda = cudart()
    with pytest.raises(BadInput, match=f"64 bytes, got {size}"):
        cuda.open_ipc(bytes(size))
    assert _OPEN not in runtime.names


def test_bindings_that_raise_without_a_driver_are_understood(runtime: Runtime) -> None:
    """As those of CUDA 12.8 do; later ones answer with a code."""
    from deploykit.runtimes.cuda.driver import ipc_devices

    def no_driver() -> tuple[int, int]:
        raise RuntimeError('Function "cuInit" not found')

    runtime.answers["cudaGetDeviceCount"] = no_driver
    for use in (ipc_devices, cudart):
        with pytest.raises(Unsupported, match="no NVIDIA driver is loaded"):
            use()


def test_devices_that_open_handles_are_found_without_a_context(runtime: Runtime) -> None:
    from deploykit.runtimes.cuda.driver import ipc_devices

    runtime.supports = [1, 0, 1]
    assert ipc_devices() == (0, 2)
    runtime.supports = [0]
    with pytest.raises(Unsupported, match="no GPU here can open memory of other processes"):
        ipc_devices()
    assert "cudaSetDevice" not in runtime.names


@pytest.mark.gpu
def test_affine_on_the_real_gpu() -> None:
    """Memory, streams, events, graphs of the real driver; the work is a copy on the device."""
    driver = bindings()
    if not driver.cudart.cudaDriverGetVersion()[1]:
        pytest.skip("no NVIDIA driver")
    cuda = driver.Cudart(0)
    free = cuda.memory()[0]

    class Copy:
        def __init__(self, _stream: int, _scratch: int) -> None: ...

        def shapes(self, inputs: Mapping[str, Shape]) -> Mapping[str, Shape | None]:
            self.nbytes = byte_count("float32", inputs["x"])
            return {"y": inputs["x"]}

        def bind(self, addresses: Mapping[str, int]) -> None:
            self.addresses = dict(addresses)

        def enqueue(self, stream: int) -> None:
            kind = driver.cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice
            y, x = self.addresses["y"], self.addresses["x"]
            cuda._all("cudaMemcpyAsync", y, x, self.nbytes, kind, stream)

        def late(self, name: str) -> tuple[int, Shape]:
            raise AssertionError(name)

        def close(self) -> None: ...

    with Pipeline(cuda, Copy, [X], [Y], graphs=[2], slots=2) as run:
        batches = [{"x": rows(1 + n % 3, start=n)} for n in range(200)]
        for feeds, answer in zip(batches, run.map(batches), strict=True):
            np.testing.assert_array_equal(answer["y"], feeds["x"])
        assert run.notes == ()
    assert abs(cuda.memory()[0] - free) < 64 << 20
