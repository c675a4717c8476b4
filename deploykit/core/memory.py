"""Measure the free memory, and name the sizes in the error for data that do not fit."""

from __future__ import annotations

import contextlib
import re
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from deploykit.core.errors import OutOfMemory, first_line
from deploykit.core.machine import file_text, natural_number

USE_LESS = (
    "use a smaller or a quantised model or a smaller batch, stop other programs, or allow more "
    "memory (`ulimit -v`, a container's limit)"
)
# messages about missing memory: of C++, ONNX Runtime, PyTorch, and of starting a thread
_NO_MEMORY = re.compile(
    "bad_alloc|[Ff]ailed to allocate memory|not enough memory|can't allocate memory"
    "|Cannot allocate memory|unable to mmap|Resource temporarily unavailable|can't start new thread"
)
_LARGE_BYTES = 1 << 28  # smaller arrays are not compared with the free memory
# Where CPU and GPU share memory, the parser, the builder and the plan each hold the weights, and
# the builder loads libraries ("Init builder kernel library: CPU +666 MiB", TensorRT 8.6).
_COPIES, _BUILDER_BYTES = 3, 1 << 30
_NUMPY_ASKED = re.compile(r"Unable to allocate ([\d.]+ \w+)")
ASKED_BYTES = re.compile(r"(?:requested buffer of size|smaller than requested bytes of) (\d+)")


@dataclass(frozen=True)
class BuildMemory:
    """Bytes on the device that a TensorRT build takes; `activations`: the tensors between layers.

    `shared`: the CPU's memory is the GPU's, so what the builder holds there counts too.
    """

    weights: int
    workspace: int
    activations: int
    shared: bool = False

    @property
    def held(self) -> int:
        """Bytes for all copies of the weights, and for the builder."""
        return _COPIES * self.weights + _BUILDER_BYTES if self.shared else self.weights

    @property
    def total(self) -> int:
        return self.held + self.workspace + self.activations


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory a process can still get without swapping, within a cgroup v2 limit."""
    text = file_text(root / "proc/meminfo")
    match = re.search(r"^MemAvailable:\s*([0-9]{1,15}) kB", text, re.MULTILINE)
    available = int(match[1]) * 1024 if match else None
    group = root / "sys/fs/cgroup"
    read = (file_text(group / f"memory.{name}") for name in ("max", "current"))
    limit, used = map(natural_number, read)
    if available is None or limit is None or used is None:
        return available
    stat = file_text(group / "memory.stat")
    cache = re.search(r"^inactive_file ([0-9]{1,18})$", stat, re.MULTILINE)
    free = limit - used + (int(cache[1]) if cache else 0)
    return min(available, max(0, free))


def free_bytes() -> int | None:
    """Return the memory this process can still get: the system's, or by its limits (`ulimit`)."""
    status = file_text(Path("/proc/self/status"))
    found = [available_bytes()]
    for field, which in (("VmSize", resource.RLIMIT_AS), ("VmData", resource.RLIMIT_DATA)):
        limit, used = resource.getrlimit(which)[0], re.search(rf"{field}:\s*(\d+) kB", status)
        if limit != resource.RLIM_INFINITY and used:
            found.append(max(0, limit - int(used[1]) * 1024))
    return min((each for each in found if each is not None), default=None)


def does_not_fit(where: object, what: str = "", files: Iterable[Path] = ()) -> OutOfMemory:
    """Return the error for missing memory; `where` begins it, `what` is a library's message."""
    asked = ASKED_BYTES.search(what)
    sizes = [f"{int(asked[1]) / 2**20:,.1f} MiB were needed at once"] if asked else []
    sizes += [f"{size} were needed at once" for size in _NUMPY_ASKED.findall(what)]
    if held := sum(each.stat().st_size for each in files if each.is_file()):
        sizes.append(f"{held / 2**20:,.1f} MiB are in its files, to load it takes up to twice that")
    if (free := free_bytes()) is not None:
        sizes.append(f"{free / 2**20:,.1f} MiB are free")
    text = f"{where}: does not fit into memory" if str(where) else "not enough memory"
    return OutOfMemory(f"{text}: {'; '.join(sizes)}", hint=USE_LESS)


def check_fits(what: str, nbytes: int) -> None:
    """Raise OutOfMemory for arrays that the free memory cannot hold."""
    if nbytes > _LARGE_BYTES and nbytes > (free_bytes() or nbytes):
        raise does_not_fit(f"{what} of {nbytes / 2**20:,.0f} MiB")


def lacks_memory(exc: BaseException) -> bool:
    """Return whether `exc` is a MemoryError, or what a library raises in its place."""
    return isinstance(exc, MemoryError) or bool(_NO_MEMORY.search(str(exc)))


@contextlib.contextmanager
def memory_errors(where: object, files: Iterable[Path] = ()) -> Iterator[None]:
    """Turn MemoryError, and what libraries raise in its place, into OutOfMemory."""
    try:
        yield
    except Exception as exc:
        if isinstance(exc, OutOfMemory) or not lacks_memory(exc):
            raise
        raise does_not_fit(where, first_line(exc), files) from exc
