"""`CudaDevice` on a CUDA driver of our own, `fakecuda.c`, and a pipeline on it.

NVIDIA's real bindings call the driver. Nothing on a stream runs until it is waited for, so that a
buffer that is read too early or written too late shows as a wrong answer. Each `FakeCuda` begins as
a new process would: a test has one at a time. Skipped where there are no bindings or no compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploykit.core.tensors import TensorSpec
from deploykit.engines.cuda.execution import Model, Pipeline, Shape, byte_count
from scripts.nvidia import fetch
from tests.support.installed import needs

needs("cuda")

from deploykit.engines.cuda import driver  # noqa: E402
from deploykit.engines.cuda.driver import CudaDevice  # noqa: E402

SOURCE = Path(__file__).with_name("fakecuda.c")

# a call of ours -> the call of CUDA that does it, and which argument is its stream
_CALLS = {
    "use": ("cuCtxSetCurrent", None),
    "allocate": ("cuMemAlloc", None),
    "free": ("cuMemFree", None),
    "pin": ("cuMemHostAlloc", None),
    "unpin": ("cuMemFreeHost", None),
    "device_address": ("cuMemHostGetDevicePointer", None),
    "open_stream": ("cuStreamCreate", None),
    "close_stream": ("cuStreamDestroy", None),
    "wait_stream": ("cuStreamSynchronize", 0),
    "open_event": ("cuEventCreate", None),
    "close_event": ("cuEventDestroy", None),
    "record": ("cuEventRecord", 1),
    "wait": ("cuEventSynchronize", None),
    "copy_in": ("cuMemcpyHtoDAsync", 3),
    "copy_out": ("cuMemcpyDtoHAsync", 3),
    "begin_capture": ("cuStreamBeginCapture", 0),
    "end_capture": ("cuStreamEndCapture", 0),
    "launch": ("cuGraphLaunch", 1),
    "drop_graph": ("cuGraphExecDestroy", None),
}
_KINDS = ("device", "host", "streams", "events", "graphs", "executable graphs")  # of fakecuda.c
_NUMBERS = {"InvalidValue": 1, "InvalidResourceHandle": 400, "IllegalAddress": 700}
_NUMBERS |= {"LaunchFailure": 719, "StreamCaptureUnsupported": 900, "StreamCaptureInvalidated": 901}
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@functools.cache
def library() -> Any:
    """This process's libcuda.so.1: the loader finds ours by its name from here on."""
    folder = Path(tempfile.mkdtemp(prefix="fakecuda-"))
    try:
        fetch.check_machine()
        fetch.library(folder / "libcuda.so.1", SOURCE.read_text(encoding="utf-8"))
    except fetch.Unobtainable as exc:
        pytest.skip(str(exc), allow_module_level=True)
    os.environ["FAKECUDA_DEVICES"] = "2"
    found = ctypes.CDLL(str(folder / "libcuda.so.1"), ctypes.RTLD_GLOBAL)
    shutil.rmtree(folder)
    found.fakecuda_held.restype = ctypes.c_long
    found.fakecuda_used.restype = ctypes.c_size_t
    found.fakecuda_machine.argtypes = [ctypes.c_size_t, ctypes.c_int]
    found.fakecuda_take.argtypes = [ctypes.c_long]
    found.fakecuda_total.argtypes = [ctypes.c_size_t]
    found.fakecuda_known.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    found.cuLaunchHostFunc.argtypes = [ctypes.c_void_p, _HOST_FUNCTION, ctypes.c_void_p]
    return found


_real_init = driver.cuda.cuInit
_there = [False]


@contextlib.contextmanager
def driver_is_there() -> Iterator[None]:
    """Let `CudaDevice` find our driver; else it finds none, as on most machines."""
    library()
    before, _there[0] = _there[0], True
    try:
        yield
    finally:
        _there[0] = before
        driver._primary_context.cache_clear()


def _init(flags: int) -> Any:
    if not _there[0] and library.cache_info().currsize:
        raise RuntimeError("libcuda.so.1 is ours")
    return _real_init(flags)


driver.cuda.cuInit = _init


class FakeCuda(CudaDevice):
    """Device 0 of a machine with `total_bytes`.

    `fail`: by call the code that it answers once; `lose`: all answer one from now on.
    """

    def __init__(
        self, *, total_bytes: int = 1 << 30, integrated: bool = False, new_machine: bool = True
    ) -> None:
        self.fail: dict[str, str] = {}
        self.calls: list[tuple[str, int]] = []  # (name, stream; 0 for none), in their order
        self.count: Counter[str] = Counter()
        self.scratch_of: dict[int, int] = {}  # memory -> the stream whose calls work in it
        self.library = library()
        if new_machine:
            self.library.fakecuda_machine(total_bytes, int(integrated))
        else:  # others are in use
            self.library.fakecuda_lose(0, 0)
            self.total_bytes = total_bytes
        self.library_bytes = self.most_library_bytes = 0  # taken by a library, as for weights
        self.streams: set[int] = set()
        self._callbacks: list[Any] = []  # CUDA does not hold them
        self._captured: dict[int, list[list[Callable[[], None]]]] = {}  # by stream, then by graph
        self._raised: BaseException | None = None
        with driver_is_there():
            CudaDevice.__init__(self, 0)
        self.calls, self.count = [], Counter()

    def log(self, name: str, stream: int) -> None:
        self.calls.append((name, stream))
        self.count[name] += 1

    def names(self, *wanted: str) -> list[str]:
        return [name for name, _ in self.calls if not wanted or name in wanted]

    def on(self, stream: int) -> list[str]:
        return [name for name, at in self.calls if at == stream]

    @property
    def capturing(self) -> set[int]:
        return self.streams & set(self._captured)

    def lose(self, name: str) -> None:
        self.library.fakecuda_lose(0, _NUMBERS[name])

    @property
    def total_bytes(self) -> int:
        return self.memory()[1]

    @total_bytes.setter
    def total_bytes(self, nbytes: int) -> None:
        self.library.fakecuda_total(nbytes)

    @property
    def used_bytes(self) -> int:
        return int(self.library.fakecuda_used())

    def held(self) -> dict[str, int]:
        """What was not given back; a lost context takes all that it holds with it."""
        if self.library.fakecuda_lost(0):
            return {}
        counts = {name: self.library.fakecuda_held(n) for n, name in enumerate(_KINDS)}
        held = {name: count for name, count in counts.items() if count}
        return {**held, "library": self.library_bytes} if self.library_bytes else held

    def take(self, nbytes: int) -> bool:
        """Device memory of a library; negative: given back. False: too little is free."""
        if not self.library.fakecuda_take(nbytes):
            return False
        self.library_bytes += nbytes
        self.most_library_bytes = max(self.most_library_bytes, self.library_bytes)
        return True

    def at(self, address: int, nbytes: int) -> np.ndarray:
        assert self.library.fakecuda_known(address, nbytes), f"illegal: {address:#x}, {nbytes}"
        return self.array(address, nbytes)

    def push(self, stream: int, name: str, op: Callable[[], None]) -> None:
        """Enqueue `op`, as a kernel, which is kept until it ran or its graph is dropped."""
        self.log(name, stream)
        kernel, captured = [op], self._captured.get(stream)
        if captured is not None:
            captured.append(kernel)

        def run(_data: int | None) -> None:
            try:
                (kernel[0] if captured is not None else kernel.pop())()
            except BaseException as exc:  # noqa: BLE001 - raised by the next wait
                self._raised = exc

        callback = _HOST_FUNCTION(run)
        self._callbacks.append(callback)
        assert self.library.cuLaunchHostFunc(stream, callback, None) == 0

    def done(self, name: str, arguments: tuple[int, ...], result: Any) -> None:
        """Note what `name` changed; raise what a kernel raised."""
        if name == "open_stream":
            self.streams.add(result)
        elif name == "close_stream":
            self.streams.discard(arguments[0])
        elif name == "free":
            self.scratch_of.pop(arguments[0], None)
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised


def _logged(name: str, stream: int | None) -> Callable[..., Any]:
    original = getattr(CudaDevice, name)

    def call(self: FakeCuda, *arguments: int) -> Any:
        self.log(name, 0 if stream is None else arguments[stream])
        if name in self.fail:
            fault = f"{_CALLS[name][0]}:{_NUMBERS[self.fail.pop(name)]}"
            self.library.fakecuda_fail(fault.encode())
        if name == "begin_capture":
            self._captured[arguments[0]] = []
        ends = name in ("end_capture", "drop_graph")
        captured = self._captured.pop(arguments[0], []) if ends else []
        result = original(self, *arguments)
        if name == "end_capture":
            self._captured[result] = captured
        else:
            for kernel in captured:
                kernel.clear()
        self.done(name, arguments, result)
        return result

    return call


for _name, (_, _stream) in _CALLS.items():
    setattr(FakeCuda, _name, _logged(_name, _stream))


class Copy:
    """Work: y = x, by a copy on the device."""

    def __init__(self, cuda: CudaDevice, _stream: int, _scratch: int) -> None:
        self.cuda = cuda

    def shapes(self, inputs: Mapping[str, Shape]) -> Mapping[str, Shape | None]:
        self.nbytes = byte_count("float32", inputs["x"])
        return {"y": inputs["x"]}

    def bind(self, addresses: Mapping[str, int]) -> None:
        self.addresses = dict(addresses)

    def enqueue(self, stream: int) -> None:
        y, x = self.addresses["y"], self.addresses["x"]
        self.cuda._all("cuMemcpyDtoDAsync", y, x, self.nbytes, stream)

    def close(self) -> None: ...


X = TensorSpec("x", "float32", ("N", 4))
Y = TensorSpec("y", "float32", ("N", 4))


def rows(count: int, start: float = 0.0) -> np.ndarray:
    return (np.arange(count * 4, dtype=np.float32) + np.float32(start)).reshape(count, 4)


def pipeline(cuda: CudaDevice, **options: Any) -> Pipeline:
    """Y = x on float32[N,4]."""
    return Pipeline(Model(cuda, functools.partial(Copy, cuda), (X,), (Y,)), **options)
