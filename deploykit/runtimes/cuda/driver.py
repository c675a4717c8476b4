"""Call CUDA through NVIDIA's cuda-bindings: the `Driver` of a real GPU.

cuda-bindings rather than cuda-core: it has every call used here (pinned and mapped memory, capture)
from 12.6 to 13, imports faster and returns CUDA's own error codes. It brings CUDA's runtime, so the
machine only needs a driver.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deploykit.core.errors import DeploykitError, Unsupported
from deploykit.core.extras import require
from deploykit.core.machine import file_text
from deploykit.core.memory import available_bytes
from deploykit.runtimes.cuda.errors import cuda_error, out_of_memory

cudart = require("cuda.bindings.runtime")

_SUCCESS = cudart.cudaError_t.cudaSuccess
_IN = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
_OUT = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Device:
    """One GPU as CUDA describes it."""

    name: str
    compute_capability: str  # "9.0"
    sm_count: int
    integrated: bool
    driver: str  # "580.65.06"; empty where the kernel does not report it
    cuda: str  # the newest CUDA that the driver runs, "13.0"


class Cudart:
    """CUDA on device `number`; `spin`: wait with a busy core (fastest), else asleep."""

    def __init__(self, number: int, *, spin: bool = True) -> None:
        self.number, self.device = number, f"cuda:{number}"
        _check_driver(self.device)
        self.use()
        attribute = cudart.cudaDeviceAttr.cudaDevAttrIntegrated
        self.integrated = bool(self._of("cudaDeviceGetAttribute", attribute, number))
        flags = cudart.cudaEventDisableTiming
        self._event_flags = flags if spin else flags | cudart.cudaEventBlockingSync
        mapped = cudart.cudaHostAllocMapped if self.integrated else cudart.cudaHostAllocDefault
        self._host_flags = cudart.cudaHostAllocPortable | mapped

    def describe(self) -> Device:
        found = self._of("cudaGetDeviceProperties", self.number)
        version = self._of("cudaDriverGetVersion")
        name = found.name.decode(errors="replace") if isinstance(found.name, bytes) else found.name
        return Device(
            name.strip("\0"),
            f"{found.major}.{found.minor}",
            found.multiProcessorCount,
            self.integrated,
            driver_version(),
            cuda_version(version),
        )

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the device.

        Where CPU and GPU share memory, CUDA counts the system's caches as used (CUDA for Tegra,
        "Estimating Total Allocatable Device Memory"), so the kernel's figure is used if larger.
        """
        free, total = self._all("cudaMemGetInfo")
        return max(free, available_bytes() or 0) if self.integrated else free, total

    def use(self) -> None:
        self._all("cudaSetDevice", self.number)

    def allocate(self, nbytes: int) -> int:
        return self._memory("cudaMalloc", nbytes)

    def free(self, address: int) -> None:
        self._all("cudaFree", address)

    def pin(self, nbytes: int) -> int:
        return self._memory("cudaHostAlloc", nbytes, self._host_flags)

    def unpin(self, address: int) -> None:
        self._all("cudaFreeHost", address)

    def device_address(self, address: int) -> int:
        return int(self._of("cudaHostGetDevicePointer", address, 0))

    def array(self, address: int, nbytes: int) -> np.ndarray:
        return np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)), np.uint8)

    def open_stream(self) -> int:
        flags = cudart.cudaStreamNonBlocking  # does not wait for the default stream
        return int(self._of("cudaStreamCreateWithFlags", flags))

    def close_stream(self, stream: int) -> None:
        self._all("cudaStreamDestroy", stream)

    def wait_stream(self, stream: int) -> None:
        self._all("cudaStreamSynchronize", stream)

    def open_event(self) -> int:
        return int(self._of("cudaEventCreateWithFlags", self._event_flags))

    def close_event(self, event: int) -> None:
        self._all("cudaEventDestroy", event)

    def record(self, event: int, stream: int) -> None:
        self._all("cudaEventRecord", event, stream)

    def wait(self, event: int) -> None:
        self._all("cudaEventSynchronize", event)

    def copy_in(self, device: int, host: int, nbytes: int, stream: int) -> None:
        self._all("cudaMemcpyAsync", device, host, nbytes, _IN, stream)

    def copy_out(self, host: int, device: int, nbytes: int, stream: int) -> None:
        self._all("cudaMemcpyAsync", host, device, nbytes, _OUT, stream)

    def begin_capture(self, stream: int) -> None:
        # thread-local: other threads may allocate meanwhile
        mode = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._all("cudaStreamBeginCapture", stream, mode)

    def end_capture(self, stream: int) -> int:
        graph = self._of("cudaStreamEndCapture", stream)
        try:
            return int(self._of("cudaGraphInstantiate", graph, 0))
        finally:
            self._all("cudaGraphDestroy", graph)

    def launch(self, graph: int, stream: int) -> None:
        self._all("cudaGraphLaunch", graph, stream)

    def drop_graph(self, graph: int) -> None:
        self._all("cudaGraphExecDestroy", graph)

    def _all(self, call: str, *arguments: Any) -> tuple[Any, ...]:
        """The return values of `call`. Raises the error for its code."""
        code, *values = getattr(cudart, call)(*arguments)
        if code != _SUCCESS:
            raise _error(self.device, call, code)
        return tuple(values)

    def _of(self, call: str, *arguments: Any) -> Any:
        return self._all(call, *arguments)[0]

    def _memory(self, call: str, nbytes: int, *flags: int) -> int:
        code, address = getattr(cudart, call)(nbytes, *flags)
        if code == cudart.cudaError_t.cudaErrorMemoryAllocation:
            error = _error(self.device, call, code)
            if call != "cudaMalloc" and not self.integrated:
                raise error  # host memory: the device's figures do not explain it
            raise out_of_memory(self.device, nbytes, *self.memory()) from error
        if code != _SUCCESS:
            raise _error(self.device, call, code)
        return int(address)


def _error(device: str, call: str, code: Any) -> DeploykitError:
    text = cudart.cudaGetErrorString(code)[1]
    cudart.cudaGetLastError()  # clears the thread's error state for other libraries
    message = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
    return cuda_error(device, call, getattr(code, "name", f"error {code}"), message)


def _check_driver(device: str) -> None:
    """Raise Unsupported where there is no driver, or one too old for these bindings."""
    none = Unsupported(
        f"{device}: no NVIDIA driver is loaded",
        hint="in a container, start it with: docker run --gpus all; see: deploykit doctor",
    )
    try:
        code, count = cudart.cudaGetDeviceCount()
    except RuntimeError as exc:  # bindings of CUDA 12 raise it where there is no libcuda
        raise none from exc
    if code == _SUCCESS and count:
        return
    known = cudart.cudaDriverGetVersion()[1] or 0
    needed = cudart.cudaRuntimeGetVersion()[1]
    if known and known // 1000 < needed // 1000:
        raise Unsupported(
            f"{device}: the driver runs CUDA {cuda_version(known)}, the installed cuda-bindings "
            f"needs CUDA {needed // 1000}",
            hint=f"pip install 'cuda-bindings=={known // 1000}.*', or update the driver",
        )
    if not known:
        raise none
    raise _error(device, "cudaGetDeviceCount", code)


def error_names() -> dict[str, str]:
    """Names of CUDA's codes by error message, which is what other libraries report."""
    return {cudart.cudaGetErrorString(code)[1].decode(): code.name for code in cudart.cudaError_t}


def cuda_version(number: int) -> str:
    """CUDA's 12060 is 12.6."""
    return f"{number // 1000}.{number % 1000 // 10}"


def driver_version(file: Path = _DRIVER_FILE) -> str:
    """The kernel module's version, as 580.65.06; empty where it has no such file (Orin)."""
    match = re.search(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", file_text(file))
    return match[1] if match else ""
