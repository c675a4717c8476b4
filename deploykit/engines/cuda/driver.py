"""Call CUDA's driver through NVIDIA's cuda-bindings: the `Driver` of a real GPU.

This uses the driver API instead of the runtime API: it loads no second library and no CUDA of its
own version, and uses each device's primary context, as torch, TensorRT and ONNX Runtime do.
cuda-bindings imports faster than cuda-core, and has every call used here from 12.6 to 13.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from deploykit.core.errors import OutOfMemory, Unsupported, cuda_error, out_of_memory, unless_lost
from deploykit.core.extras import require
from deploykit.core.machine import available_bytes, file_text

cuda = require("cuda.bindings.driver")

_SUCCESS = cuda.CUresult.CUDA_SUCCESS
_NON_BLOCKING = int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)  # ignores default streams
_NO_TIMING = int(cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)
_THREAD_LOCAL = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_ATTRIBUTES = cuda.CUdevice_attribute
_MOST_NAME = 256
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def _passing(call: str, *more: Any) -> Callable[..., Any]:
    """Return a method that passes its arguments, and `more`, to `call`; it returns the handle."""

    def method(self: CudaDevice, *arguments: int) -> int | None:
        found = _call(self.device, call, *arguments, *more)
        return int(found[0]) if found else None

    return method


class CudaDevice:
    """CUDA on device `number`; the CPU waits for it by spinning, which is fastest."""

    def __init__(self, number: int) -> None:
        self.number, self.device = number, f"cuda:{number}"
        self._handle, self._context = _primary_context(number)
        self.use()
        self.integrated = bool(self._attribute("INTEGRATED"))
        mapped = cuda.CU_MEMHOSTALLOC_DEVICEMAP if self.integrated else 0
        self._host_flags = cuda.CU_MEMHOSTALLOC_PORTABLE | mapped

    def describe(self) -> dict[str, Any]:
        """Return what CUDA says of the GPU, by the names that `Here` has for it."""
        name = self._of("cuDeviceGetName", _MOST_NAME, self._handle)
        cuda_version = self._of("cuDriverGetVersion")  # 12060 for 12.6
        parts = (self._attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        return {
            "gpu": name.partition(b"\0")[0].decode(errors="replace").strip(),
            "compute_capability": ".".join(map(str, parts)),
            "sm_count": self._attribute("MULTIPROCESSOR_COUNT"),
            "driver": driver_version(),
            "cuda": f"{cuda_version // 1000}.{cuda_version % 1000 // 10}",
        }

    def memory(self) -> tuple[int, int]:
        """Return the (free, total) bytes of the device.

        Where CPU and GPU share memory, CUDA counts the system's caches as used (CUDA for Tegra,
        "Estimating Total Allocatable Device Memory"), so this uses the kernel's figure if larger.
        """
        free, total = self._all("cuMemGetInfo")
        return max(free, available_bytes() or 0) if self.integrated else free, total

    def use(self) -> None:
        self._all("cuCtxSetCurrent", self._context)

    def check(self) -> None:
        """Copy one byte from the device. Raises DeviceLost if its context is lost, else nothing.

        Other libraries report a lost context as a failure of their own, without CUDA's code.
        """
        byte = ctypes.create_string_buffer(1)
        with unless_lost():  # other errors, such as out of memory, leave the context usable
            address = self.allocate(1)
            try:
                self._all("cuMemcpyDtoH", ctypes.addressof(byte), address, 1)
            finally:
                self.free(address)

    def allocate(self, nbytes: int) -> int:
        return self._memory("cuMemAlloc", nbytes)

    def pin(self, nbytes: int) -> int:
        return self._memory("cuMemHostAlloc", nbytes, self._host_flags)

    # of a handle, an address or, to copy, (to, from, bytes, stream)
    free, unpin = _passing("cuMemFree"), _passing("cuMemFreeHost")
    close_stream, wait_stream = _passing("cuStreamDestroy"), _passing("cuStreamSynchronize")
    close_event, wait = _passing("cuEventDestroy"), _passing("cuEventSynchronize")
    record, launch = _passing("cuEventRecord"), _passing("cuGraphLaunch")  # and a stream
    copy_in, copy_out = _passing("cuMemcpyHtoDAsync"), _passing("cuMemcpyDtoHAsync")
    drop_graph = _passing("cuGraphExecDestroy")
    open_stream = _passing("cuStreamCreate", _NON_BLOCKING)
    open_event = _passing("cuEventCreate", _NO_TIMING)
    begin_capture = _passing("cuStreamBeginCapture", _THREAD_LOCAL)  # others may allocate meanwhile
    device_address = _passing("cuMemHostGetDevicePointer", 0)

    def array(self, address: int, nbytes: int) -> np.ndarray:
        return np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)), np.uint8)

    def end_capture(self, stream: int) -> int:
        graph = self._of("cuStreamEndCapture", stream)
        try:
            return int(self._of("cuGraphInstantiate", graph, 0))
        finally:
            self._all("cuGraphDestroy", graph)

    def _attribute(self, name: str) -> int:
        attribute = getattr(_ATTRIBUTES, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._of("cuDeviceGetAttribute", attribute, self._handle))

    def _all(self, call: str, *arguments: Any) -> tuple[Any, ...]:
        return _call(self.device, call, *arguments)

    def _of(self, call: str, *arguments: Any) -> Any:
        return _call(self.device, call, *arguments)[0]

    def _memory(self, call: str, nbytes: int, *flags: int) -> int:
        try:
            return int(self._of(call, nbytes, *flags))
        except OutOfMemory as exc:
            if call != "cuMemAlloc" and not self.integrated:
                raise  # host memory is missing, which the device's figures do not show
            raise out_of_memory(self.device, nbytes, *self.memory()) from exc


@functools.cache
def _primary_context(number: int) -> tuple[Any, Any]:
    """Return (device, its primary context), held until the process ends, as by CUDA's runtime.

    Raises Unsupported if there is no driver or no such device.
    """
    device = f"cuda:{number}"
    try:
        _call(device, "cuInit", 0)
    except RuntimeError as exc:  # the bindings did not find libcuda
        raise Unsupported(
            f"{device}: no NVIDIA driver is loaded",
            hint="in a container, start it with: docker run --gpus all; see: deploykit doctor",
        ) from exc
    (handle,) = _call(device, "cuDeviceGet", number)
    (context,) = _call(device, "cuDevicePrimaryCtxRetain", handle)
    return handle, context


def _call(device: str, call: str, *arguments: Any) -> tuple[Any, ...]:
    """Return the values of `call`. Raises the error for its code."""
    try:
        code, *values = getattr(cuda, call)(*arguments)
    except (KeyError, ValueError) as exc:  # a code that is newer than the bindings is a number
        number = int(re.sub(r"\D", "", str(exc)) or 0)
        raise cuda_error(device, call, number, "unknown to the installed cuda-bindings") from exc
    if code == _SUCCESS:
        return tuple(values)
    text = (cuda.cuGetErrorString(code)[1] or b"").decode(errors="replace")
    raise cuda_error(device, call, int(code), text)


def driver_version(file: Path = _DRIVER_FILE) -> str:
    """Return the kernel module's version, as 580.65.06; empty without such a file (Orin)."""
    match = re.search(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", file_text(file))
    return match[1] if match else ""
