"""`CudaDevice` on the CUDA driver of `tests/cuda/fakecuda.c`, with what `FakeCuda` shows to tests.

In: a process whose libcuda.so.1 is that library. Each instance begins as a new process would, so
one test has one instance at a time. A plugin of pytest, for the same with other instances.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import DeploykitError
from deploykit.engines.cuda.driver import CudaDevice
from deploykit.engines.cuda.memory import CODES
from tests.support.runtimes.fake_cuda import CallLog

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
_NUMBERS = {name: number for number, name in CODES.items()}
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def library() -> Any:
    """The library that this process has as libcuda.so.1. Raises OSError, AttributeError."""
    found = ctypes.CDLL("libcuda.so.1")
    found.fakecuda_held.restype = ctypes.c_long
    found.fakecuda_machine.argtypes = [ctypes.c_size_t, ctypes.c_int]
    found.fakecuda_take.argtypes = [ctypes.c_long]
    found.fakecuda_total.argtypes = [ctypes.c_size_t]
    found.cuLaunchHostFunc.argtypes = [ctypes.c_void_p, _HOST_FUNCTION, ctypes.c_void_p]
    return found


@pytest.fixture(autouse=True)
def _as_in_a_new_process() -> None:
    """For each test of a run with `-p tests.support.runtimes.driver_cuda`."""
    library().fakecuda_machine(1 << 30, 0)


class DriverCuda(CallLog, CudaDevice):
    """Device 0 of a machine with `total_bytes`; `fail` and `lost` as `FakeCuda` has them."""

    def __init__(self, *, total_bytes: int = 1 << 30, integrated: bool = False) -> None:
        CallLog.__init__(self)
        self.library = library()
        self.library.fakecuda_machine(total_bytes, int(integrated))
        self.device_blocks: dict[int, int] = {}  # address -> bytes
        self.host_blocks: dict[int, np.ndarray] = {}
        self.streams: set[int] = set()
        self.graphs: set[int] = set()
        self.capturing: set[int] = set()
        self._kept: list[Any] = []  # callbacks, which CUDA does not hold
        self._raised: BaseException | None = None
        CudaDevice.__init__(self, 0)
        self.calls, self.count = [], Counter()

    @property
    def fail(self) -> dict[str, str]:
        return {}

    @fail.setter
    def fail(self, codes: Mapping[str, str]) -> None:
        texts = [f"{_CALLS[call][0]}:{_NUMBERS[name]}" for call, name in codes.items()]
        self.library.fakecuda_fail(",".join(texts).encode())

    @property
    def lost(self) -> str:
        raise AttributeError

    @lost.setter
    def lost(self, name: str) -> None:
        self.library.fakecuda_lose(0, _NUMBERS[name])

    @property
    def total_bytes(self) -> int:
        return self.memory()[1]

    @total_bytes.setter
    def total_bytes(self, nbytes: int) -> None:
        self.library.fakecuda_total(nbytes)

    @property
    def used_bytes(self) -> int:
        free, total = self.memory()
        return total - free

    def held(self) -> dict[str, int]:
        """What was not given back; a lost context takes all that it holds with it."""
        if self.library.fakecuda_lost(0):
            return {}
        counts = {name: self.library.fakecuda_held(n) for n, name in enumerate(_KINDS)}
        return {name: count for name, count in counts.items() if count}

    def take(self, nbytes: int) -> bool:
        """Device memory of a library; negative: given back. False: too little is free."""
        return bool(self.library.fakecuda_take(nbytes))

    def at(self, address: int, nbytes: int) -> np.ndarray:
        blocks = dict(self.device_blocks)
        if self.integrated:
            blocks |= {base: block.nbytes for base, block in self.host_blocks.items()}
        for base, size in blocks.items():
            if base <= address and address + nbytes <= base + size:
                return self.array(address, nbytes)
        raise AssertionError(f"illegal address {address:#x}, {nbytes} bytes")

    def push(self, stream: int, name: str, op: Callable[[], None]) -> None:
        """Enqueue `op`, as a kernel."""
        self.log(name, stream)

        def run(_data: int | None) -> None:
            try:
                op()
            except BaseException as exc:  # noqa: BLE001 - raised by the next wait
                self._raised = exc

        callback = _HOST_FUNCTION(run)
        self._kept.append(callback)
        assert self.library.cuLaunchHostFunc(stream, callback, None) == 0

    def done(self, name: str, arguments: tuple[int, ...], result: Any) -> None:
        """Note what `name` changed; raise what a kernel raised."""
        if name == "allocate":
            self.device_blocks[result] = arguments[0]
        elif name == "pin":
            self.host_blocks[result] = self.array(result, arguments[0])
        elif name in _SETS:
            which, adds = _SETS[name]
            handle = arguments[0] if arguments else result
            (set.add if adds else set.discard)(getattr(self, which), handle)
        elif name in ("free", "unpin"):
            blocks: dict[int, Any] = self.device_blocks if name == "free" else self.host_blocks
            blocks.pop(arguments[0])
            self.scratch_of.pop(arguments[0], None)
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised


# a call -> the set that it changes, and whether it adds
_SETS = {
    "open_stream": ("streams", True),
    "close_stream": ("streams", False),
    "drop_graph": ("graphs", False),
    "begin_capture": ("capturing", True),
}


def _logged(name: str, stream: int | None) -> Callable[..., Any]:
    original = getattr(CudaDevice, name)

    def call(self: DriverCuda, *arguments: int) -> Any:
        self.log(name, 0 if stream is None else arguments[stream])
        try:
            result = original(self, *arguments)
        except DeploykitError:
            if name == "end_capture":
                self.capturing.discard(arguments[0])
            raise
        if name == "end_capture":
            self.capturing.discard(arguments[0])
            self.graphs.add(result)
        self.done(name, arguments, result)
        return result

    return call


for _name, (_, _stream) in _CALLS.items():
    setattr(DriverCuda, _name, _logged(_name, _stream))
