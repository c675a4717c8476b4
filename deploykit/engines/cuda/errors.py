"""Map CUDA's error codes to our errors, without importing CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from deploykit.core.errors import DeploykitError, OutOfMemory, Unsupported


class DeviceLost(Unsupported):
    """The CUDA context is lost, so that every later call fails: end the process."""

    http_status = 503
    grpc_status = "UNAVAILABLE"


# Source: CUDA Runtime API, "Data types used by CUDA Runtime", enum cudaError; the driver API's
# CUresult has the same numbers.
_BUGS = frozenset((1, 400))  # invalid value, invalid handle: wrong use of CUDA
_MEMORY, _NOT_INITIALIZED, _NO_DEVICE = 2, 3, 101
# Hardware failed, or a kernel did, and the context is gone with it.
_LOST = frozenset((4, 53, 214, 220, 226, 700, 702, 709, 710, *range(714, 720), 721))
_LOST |= {805, 806, 810, 911, 999}
_OTHER_GPU = frozenset((98, 200, 209, 218, 221, 222, 223))  # code of another GPU or newer driver

USE_LESS_MEMORY = (
    "use a smaller batch or `max_batch`, fewer `instances`, or stop other programs that use the GPU"
)
_DOCTOR = "see: deploykit doctor"


def cuda_error(device: str, call: str, code: int, text: str) -> DeploykitError:
    """Return the error for a CUDA `call` that returned `code`, which the library calls `text`.

    A code for wrong use of CUDA, a bug in deploykit, gives a plain DeploykitError.
    """
    failed = f"{device}: {call}: {text} (CUDA error {code})"
    if code == _MEMORY:
        return OutOfMemory(f"{device}: out of memory in {call}", hint=USE_LESS_MEMORY)
    if code in _LOST:
        return DeviceLost(
            f"{device}: the GPU is lost to this process ({call}: {text}, CUDA error {code})",
            hint="restart the process; if it happens again: dmesg | grep Xid; deploykit doctor",
        )
    if code in _OTHER_GPU:
        hint = "the file or package was built for another GPU: build it on this machine"
        return Unsupported(failed, hint=hint)
    if code in _BUGS:
        return DeploykitError(failed)
    if code == _NO_DEVICE:
        return Unsupported(f"{device}: this machine has no such GPU", hint=_DOCTOR)
    if code == _NOT_INITIALIZED:
        fork = "a process that fork() made cannot use CUDA (multiprocessing: use 'spawn')"
        return Unsupported(failed, hint=f"{fork}; {_DOCTOR}")
    return Unsupported(failed, hint=_DOCTOR)


@contextlib.contextmanager
def unless_lost() -> Iterator[None]:
    """Ignore any DeploykitError in the block except DeviceLost."""
    try:
        yield
    except DeviceLost:
        raise
    except DeploykitError:
        return


def out_of_memory(device: str, need_bytes: int, free_bytes: int, total_bytes: int) -> OutOfMemory:
    need, free, total = (
        f"{count / 2**20:,.1f} MiB" for count in (need_bytes, free_bytes, total_bytes)
    )
    return OutOfMemory(
        f"{device}: out of memory: {need} needed, {free} free of {total}", hint=USE_LESS_MEMORY
    )
