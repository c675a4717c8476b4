"""Find out which GPU CUDA calls `cuda:N` in this process.

NVML and nvidia-smi order GPUs by their place on the bus. CUDA has the fastest first, unless
CUDA_DEVICE_ORDER says otherwise, and hides those that CUDA_VISIBLE_DEVICES leaves out.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

from deploykit.core.machine import Machine
from deploykit.core.subprocesses import module_command


def cuda_order(uuids: Sequence[str]) -> list[int | None]:
    """Return for each of CUDA's devices in this process its place in `uuids`, those of NVML.

    None: it is none of these, as a part of a GPU (MIG) has a UUID of its own. Without CUDA the
    order is that of `uuids`; there are none if CUDA_VISIBLE_DEVICES is set, as all may be hidden.
    """
    if devices := _ask():
        digits = [uuid.removeprefix("GPU-").replace("-", "").lower() for uuid in uuids]
        return [digits.index(uuid) if uuid in digits else None for uuid, _ in devices]
    return [] if "CUDA_VISIBLE_DEVICES" in os.environ else list(range(len(uuids)))


def with_gpu(machine: Machine, number: int) -> Machine:
    """Return `machine` with the GPU `cuda:number` alone, with none where CUDA has no such GPU.

    A part of a GPU (MIG) has a name of its own, "NVIDIA H100 80GB HBM3 MIG 1g.10gb", with its
    memory.
    """
    gpus = machine.gpus
    if len(gpus) < 2 and (not gpus or "CUDA_VISIBLE_DEVICES" not in os.environ):
        return machine
    if devices := _ask():
        (name,) = [name for _, name in devices[number : number + 1]] or [""]
        found = [gpu for gpu in gpus if gpu.name == name]
        part = re.search(r" MIG .*\.(\d+)gb", name)
        whole = [gpu for gpu in gpus if part and name.startswith(gpu.name)]
        found += [replace(gpu, name=name, memory_bytes=int(part[1]) << 30) for gpu in whole if part]
    else:
        places = cuda_order([""] * len(gpus))
        found = [gpus[place] for place in places[number : number + 1] if place is not None]
    return replace(machine, gpus=tuple(found[:1]))


def _ask() -> tuple[tuple[str, str], ...]:
    """Return UUID, in hexadecimal, and name of each of CUDA's devices; none without CUDA."""
    return _answer(os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER"))


@functools.cache
def _answer(_visible: str | None, _order: str | None) -> tuple[tuple[str, str], ...]:
    """Ask in a process of its own: the forks of a process that has asked cannot use CUDA."""
    try:
        done = subprocess.run(
            module_command(__name__), capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    return tuple((uuid, name) for uuid, _, name in lines)


def _main() -> None:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    count, device = ctypes.c_int(), ctypes.c_int()
    uuid, name = ctypes.create_string_buffer(16), ctypes.create_string_buffer(256)
    if cuda.cuInit(0) == 0 == cuda.cuDeviceGetCount(ctypes.byref(count)):
        for number in range(count.value):
            cuda.cuDeviceGet(ctypes.byref(device), number)
            cuda.cuDeviceGetUuid_v2(uuid, device)
            cuda.cuDeviceGetName(name, len(name), device)
            sys.stdout.write(f"{uuid.raw.hex()} {name.value.decode(errors='replace')}\n")


if __name__ == "__main__":
    _main()
