"""The CUDA shared-memory extension: tensors in a client's GPU memory instead of in messages.

In: CUDA IPC handles that clients on this machine registered. Out: copies of what lies there, in
host memory of our own, and outputs written there. The one copy also keeps a client from changing
an input after it was checked. Error texts name regions, never a handle or an address. CUDA itself
is behind `Driver`: the file that owns it is imported only where this extension was asked for.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from deploykit.core.errors import BadInput, DeploykitError, Unsupported
from deploykit.runtimes.cuda.errors import DeviceLost
from deploykit.serving.oip.tensors import show

log = logging.getLogger(__name__)

HANDLE_BYTES = 64  # of a cudaIpcMemHandle_t
_MAKE = "give the handle that cudaIpcGetMemHandle made in a process that still holds the memory"


class Driver(Protocol):
    """CUDA on one device, from any thread. All may raise DeviceLost; `open_ipc` BadInput."""

    def open_ipc(self, handle: bytes) -> int: ...
    def close_ipc(self, address: int) -> None: ...
    def bytes_from(self, address: int) -> int | None: ...
    def copy_to_host(self, host: np.ndarray, address: int) -> None: ...
    def copy_to_device(self, address: int, host: np.ndarray) -> None: ...


class Gpus:
    """The devices that can open handles, by CUDA's numbers; a driver is opened when first used.

    None of them: the extension is not offered, and `why` and `hint` tell clients the reason.
    `lost` turns true when a copy found a GPU lost to this process; not when an opening did, as a
    client's handle can bring about the same code.
    """

    def __init__(
        self,
        numbers: Sequence[int] = (),
        open_driver: Callable[[int], Driver] | None = None,
        why: str = "this extension is not offered by this server",
        hint: str | None = None,
    ) -> None:
        self._numbers = numbers
        self._open_driver = open_driver
        self._why, self._hint = why, hint
        self._drivers: dict[int, Driver] = {}
        self.lost = False

    @property
    def offered(self) -> bool:
        return self._open_driver is not None and bool(self._numbers)

    def check(self) -> None:
        """Raises Unsupported where the extension is not offered."""
        if not self.offered:
            raise Unsupported(self._why, hint=self._hint)

    def open(self, where: str, raw: object, number: int, byte_size: int) -> CudaRegion:
        """The region whose handle is `raw`: 64 bytes, or `{"b64": their base64}`.

        Raises BadInput, beginning with `where`, and then holds nothing of it.
        """
        handle = _handle(where, raw)
        driver = self._driver(where, number)
        try:
            address = driver.open_ipc(handle)
        except BadInput as exc:
            raise BadInput(
                f"{where}: its CUDA memory cannot be opened: {exc.message}", hint=_MAKE
            ) from exc
        region = CudaRegion(self, driver, address, number, byte_size)
        try:
            held = driver.bytes_from(address)
            if held is not None and byte_size > held:
                raise BadInput(f"{where}: it would be {byte_size} bytes, its memory has {held}")
        except BaseException:
            region.close()
            raise
        return region

    def _driver(self, where: str, number: int) -> Driver:
        if self._open_driver is None or number not in self._numbers:
            raise BadInput(
                f"{where}: no GPU {number} of this server can open CUDA memory",
                hint=f"'device_id' may be: {', '.join(map(str, self._numbers))}",
            )
        if number not in self._drivers:
            self._drivers[number] = self._open_driver(number)
        return self._drivers[number]


@dataclass(frozen=True, eq=False)
class CudaRegion:
    """One region: `byte_size` bytes at `address` of the device, mapped until `close`.

    Bounds are the caller's to check.
    """

    kind: ClassVar[str] = "cuda"
    gpus: Gpus
    driver: Driver
    address: int
    device_id: int
    byte_size: int

    def status(self) -> dict[str, Any]:
        return {"device_id": self.device_id, "byte_size": self.byte_size}

    def read(self, _name: str, at: int, into: np.ndarray) -> None:
        """Fill `into`, bytes, from offset `at`."""
        if into.nbytes:
            self._copy(lambda: self.driver.copy_to_host(into, self.address + at))

    def write(self, _name: str, at: int, data: memoryview) -> None:
        """Put `data`, bytes, at offset `at`; they have arrived when this returns."""
        if data.nbytes:
            host = np.frombuffer(data, np.uint8)
            self._copy(lambda: self.driver.copy_to_device(self.address + at, host))

    def close(self) -> None:
        try:
            self.driver.close_ipc(self.address)
        except DeploykitError as exc:  # the other regions are to be closed all the same
            log.warning("a CUDA shared-memory region could not be closed: %s", exc.message)

    def _copy(self, copy: Callable[[], None]) -> None:
        try:
            copy()
        except DeviceLost:
            self.gpus.lost = True
            raise


def find_gpus() -> Gpus:
    """What this machine has. Never raises: a server without a GPU offers the rest."""
    try:
        from deploykit.runtimes.cuda.driver import Cudart, ipc_devices

        return Gpus(ipc_devices(), Cudart)
    except DeploykitError as exc:
        log.info("no CUDA shared memory: %s", exc.message)
        why = f"CUDA shared memory is not offered by this server: {exc.message}"
        return Gpus(why=why, hint=exc.hint)


def _handle(where: str, raw: object) -> bytes:
    """The bytes of a handle. Raises BadInput, without showing them."""
    if isinstance(raw, dict):  # as HTTP's JSON has it
        text = raw.get("b64")
        try:
            raw = base64.b64decode(text, validate=True) if type(text) is str else None
        except ValueError:
            raw = None
    if type(raw) is not bytes:
        raise BadInput(
            f"{where}: 'raw_handle' must be {{\"b64\": TEXT}}, TEXT in base64", hint=_MAKE
        )
    if len(raw) != HANDLE_BYTES:
        raise BadInput(
            f"{where}: 'raw_handle' must be {HANDLE_BYTES} bytes, got {show(len(raw))}", hint=_MAKE
        )
    return raw
