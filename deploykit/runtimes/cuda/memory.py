"""The calls that a pipeline makes to CUDA (`Driver`), and pinned plus device memory (`Buffer`)."""

from __future__ import annotations

import contextlib
import math
from typing import Protocol

import numpy as np

from deploykit.core.errors import DeploykitError

Shape = tuple[int, ...]


class Driver(Protocol):
    """CUDA on one device. Addresses and handles are integers.

    Each method raises the error that `cuda_error` makes of CUDA's code.
    """

    @property
    def device(self) -> str: ...  # "cuda:0"
    @property
    def integrated(self) -> bool: ...  # it shares the host's memory: nothing needs copying
    def memory(self) -> tuple[int, int]: ...  # (free, total) bytes of the device
    def use(self) -> None: ...  # make it the calling thread's device
    def check(self) -> None: ...  # raises DeviceLost where the context is lost, else nothing
    def allocate(self, nbytes: int) -> int: ...  # device memory
    def free(self, address: int) -> None: ...
    def pin(self, nbytes: int) -> int: ...  # page-locked host memory
    def unpin(self, address: int) -> None: ...
    def device_address(self, address: int) -> int: ...  # the device's address of pinned memory
    def array(self, address: int, nbytes: int) -> np.ndarray: ...  # pinned memory as uint8
    def open_stream(self) -> int: ...
    def close_stream(self, stream: int) -> None: ...
    def wait_stream(self, stream: int) -> None: ...
    def open_event(self) -> int: ...
    def close_event(self, event: int) -> None: ...
    def record(self, event: int, stream: int) -> None: ...
    def wait(self, event: int) -> None: ...
    def copy_in(self, device: int, host: int, nbytes: int, stream: int) -> None: ...
    def copy_out(self, host: int, device: int, nbytes: int, stream: int) -> None: ...
    def begin_capture(self, stream: int) -> None: ...
    def end_capture(self, stream: int) -> int: ...  # an executable graph
    def launch(self, graph: int, stream: int) -> None: ...
    def drop_graph(self, graph: int) -> None: ...


class Buffer:
    """Memory for one tensor of one slot: pinned, and on the device unless `host_only`."""

    def __init__(self, driver: Driver, *, host_only: bool = False) -> None:
        self.driver, self.host_only = driver, host_only
        self.host = self.device = self.size = 0

    def fits(self, nbytes: int) -> bool:
        return 0 < self.size >= nbytes

    def reserve(self, nbytes: int) -> None:
        """Grow to at least `nbytes`, losing the content. Raises OutOfMemory, and is then empty."""
        if self.fits(nbytes):
            return
        self.release()  # first: the old and the new together may not fit
        size = round_up(nbytes)
        try:
            self.host = self.driver.pin(size)
            if not self.host_only:
                zero_copy = self.driver.integrated
                self.device = (
                    self.driver.device_address(self.host)
                    if zero_copy
                    else self.driver.allocate(size)
                )
        except DeploykitError:
            self.release()
            raise
        self.size = size

    def view(self, dtype: str, shape: Shape) -> np.ndarray:
        nbytes = byte_count(dtype, shape)
        return self.driver.array(self.host, self.size)[:nbytes].view(dtype).reshape(shape)

    def release(self) -> None:
        host, device = self.host, self.device
        self.host = self.device = self.size = 0
        with contextlib.suppress(DeploykitError):  # a lost device takes its memory with it
            if device and not self.driver.integrated:
                self.driver.free(device)
        with contextlib.suppress(DeploykitError):
            if host:
                self.driver.unpin(host)


def round_up(nbytes: int) -> int:
    """A size to allocate, at most a quarter more, so that small growth needs no new block."""
    step = max(512, 1 << max(0, nbytes.bit_length() - 3))
    return max(1, -(-nbytes // step)) * step


def byte_count(dtype: str, shape: Shape) -> int:
    return math.prod(shape, start=np.dtype(dtype).itemsize)
