"""Open an artefact as an `Engine`: one callable for every runtime.

The file's content decides which runtime opens it; only that runtime is imported.
"""

from __future__ import annotations

import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Protocol, TypeVar

import numpy as np

from deploykit.core.artefact import Artefact, ArtefactLike
from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.evidence import RowIndependence
from deploykit.core.extras import installed
from deploykit.core.json_value import Shown
from deploykit.core.machine import this_machine
from deploykit.core.tensors import Specs, mismatch

Arrays = Mapping[str, np.ndarray]

_MOST_SEEN = 1024
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


class InFlight(Protocol):
    """A call in flight."""

    def result(self) -> dict[str, np.ndarray]:
        """Wait for the outputs. Raises as a call does."""
        ...


_Self = TypeVar("_Self", bound="Closing")


class Closing(ABC):
    """A base class: `close` is called at the end of a `with` block."""

    @abstractmethod
    def close(self) -> object: ...

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_process = [os.getpid()]  # asking the system takes a microsecond
os.register_at_fork(after_in_child=lambda: _process.__setitem__(0, os.getpid()))


class CallGuard:
    """Lets one thread at a time into an engine that keeps state during a call.

    `check_process`, which a `with` block calls first, is for all engines: a forked process has
    none of the library's threads, and a call there may wait for them forever.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._process = _process[0]
        self._lock = threading.Lock()

    def check_process(self) -> None:
        """Raise Unsupported in a process that was forked after the engine was opened."""
        if _process[0] != self._process:
            raise Unsupported(
                f"{self._where}: the engine was opened before this process was forked",
                hint="open it in each process, after the fork",
            )

    def __enter__(self) -> None:
        self.check_process()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Engine(Closing, Shown):
    """A loaded artefact. The caller owns the outputs.

    Any thread may call it, and calls that its library cannot run at once take turns. A process that
    is forked later is refused: it opens the engine itself.

    The defaults suit an engine on a CPU with no limits and nothing to report. `max_batch`: the
    largest axis 0 that it accepts, None for no limit. `limits`: the smallest and largest size by
    dynamic axis, if there are any. `device`: "cpu" or "cuda:0". `runtime`: its name and version
    ("onnxruntime 1.31.1"). `notes`: warnings for the user, such as nodes that run on the CPU.
    `place`: the GPU and the TensorRT that run a plan, for which alone a proof of it holds.
    `steady`: a call's time depends on the shapes of its inputs alone, so no values can make it
    hang. `last_copies_us`: the last call's copies to the device and back. `batching`: whether its
    rows may be joined, as its manifest says. `examples`: inputs that it is known to run. `source`:
    the file that it was loaded from. `slots`: the number of calls that it keeps in flight.
    `options`: the settings of its library, by the library's names.
    """

    in_notebook = ("runtime", "device", "inputs", "outputs", "max_batch", "notes")

    inputs: Specs
    outputs: Specs
    device: str
    runtime: str
    max_batch: int | None = None
    limits: Mapping[str, tuple[int, int | None]] = MappingProxyType({})
    notes: tuple[str, ...] = ()
    place: str = ""
    steady: bool = False
    last_copies_us: tuple[int, int] = (0, 0)
    batching: RowIndependence | None = None
    examples: Arrays | None = None
    source: Artefact | None = None
    slots: int = 1
    options: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        """Run once. Raises BadInput when the feeds do not fit `inputs`."""

    def submit(self, feeds: Arrays) -> InFlight:  # noqa: ARG002 - engines with more slots use it
        """Start a call without waiting for it, if `slots` is above 1. Raises as a call does."""
        raise Unsupported("this engine runs one call at a time")

    def prepare(self, calls: Iterable[Arrays], *, joined: bool) -> None:
        """Allocate the memory for calls like these, the largest first, in every slot.

        `joined`: the rows are independent, so that a smaller call may be padded to one of these.
        Raises OutOfMemory.
        """

    def share(
        self,
        *,
        slots: int | None = None,  # noqa: ARG002 - engines that share weights use it
        graphs: Sequence[int] | None = None,  # noqa: ARG002
    ) -> Engine | None:
        """Open another engine on the same weights, for another thread; None if unsupported.

        `slots`, `graphs` (batch sizes to run as CUDA graphs): None means as this engine has.
        """
        return None

    def trim(self) -> bool:
        """Return whether the next call frees memory that only earlier, larger calls needed."""
        return False

    def close(self) -> None:
        """Release the engine's resources."""


OpenEngine = Callable[[Artefact, str, "int | None", bool], Engine]  # device, threads, trust


def load(
    source: ArtefactLike,
    device: str = "auto",
    *,
    threads: int | None = None,
    trust: bool = False,
    cuda_graphs: Sequence[int] = (),
    overlap: bool = True,
    shared: Path | None = None,
) -> Engine:
    """Open an artefact. `threads`: CPU threads of one call, None for one per core.

    `device`: "cpu", "cuda", "cuda:N", or "auto" for a GPU if the runtime uses one. `trust`: open a
    TensorRT engine also without a manifest, with a note, or with code from elsewhere.
    `cuda_graphs`: batch sizes that a TensorRT engine runs as CUDA graphs; `overlap`: it may have
    two calls of `submit` in flight. Other runtimes ignore both. `shared`: a folder through which
    processes share one copy of an ONNX model's weights on a CPU. Raises Unsupported if the named
    device is not available, as nothing falls back silently. Raises BadInput for a file whose
    manifest has another SHA-256.
    """
    check_device(device)
    if threads is not None and threads < 1:
        raise BadInput(f"`threads` must be 1 or more, got {threads}")
    if any(size < 1 for size in cuda_graphs):
        raise BadInput(f"`cuda_graphs` are batch sizes of 1 or more, got {list(cuda_graphs)}")
    artefact = Artefact.open(source)
    artefact.manifest  # noqa: B018 - raises for a file that is not the one it describes
    if not artefact.runtime.on_cpu:
        _check_gpu(artefact)
    opener = resolve_name(artefact.runtime.engine)
    if artefact.runtime.overlaps:
        opener = partial(opener, slots=2 if overlap else 1, graphs=cuda_graphs)
    if artefact.runtime.shares and shared is not None:
        opener = partial(opener, shared=shared)
    open_engine: OpenEngine = opener
    return open_engine(artefact, device, threads, trust)


def check_device(device: str) -> None:
    """Raise BadInput if `device` is not auto, cpu, cuda or cuda:N."""
    if not _DEVICE.fullmatch(device):
        raise BadInput(
            f"`device`: unknown value '{device}'", hint="one of: auto, cpu, cuda, cuda:N"
        )


def _check_gpu(artefact: Artefact) -> None:
    """Report a missing GPU first: else a hint would say to install gigabytes of packages."""
    if all(map(installed, artefact.runtime.modules)):
        return
    machine = this_machine()
    if not machine.gpus and not machine.l4t:
        raise Unsupported(
            f"{artefact}: is a {artefact.runtime.title} engine, and this machine has no NVIDIA GPU",
            hint="for this machine's CPU: deploykit build MODEL.onnx --profile cpu",
        )


class FeedCheck:
    """Calls `check_feeds` for one artefact, except for shapes that it has accepted before."""

    def __init__(self, specs: Specs, where: str) -> None:
        self._specs, self._where = specs, where
        self._right: set[tuple[tuple[object, ...], ...]] = set()

    def __call__(self, feeds: Arrays) -> None:
        """Raise BadInput as `check_feeds` does."""
        try:
            key = tuple([(name, type(a), a.dtype, a.shape) for name, a in feeds.items()])
        except AttributeError:  # not an array
            return check_feeds(self._specs, feeds, self._where)
        if key not in self._right:
            check_feeds(self._specs, feeds, self._where)
            if len(self._right) >= _MOST_SEEN:
                self._right.clear()
            self._right.add(key)
        return None


def check_feeds(specs: Specs, feeds: Arrays, where: str) -> None:
    """Raise BadInput unless names, dtypes and shapes fit; `where` names the artefact.

    Call it before a native library sees the arrays.
    """
    expected = {spec.name: spec for spec in specs}
    unknown = [name for name in feeds if name not in expected]
    missing = [name for name in expected if name not in feeds]
    if unknown or missing:
        got = f"unknown input '{unknown[0]}'" if unknown else f"missing input '{missing[0]}'"
        raise BadInput(f"{where}: {got}", hint="the inputs are: " + ", ".join(map(str, specs)))
    sizes: dict[str, int] = {}
    for name, spec in expected.items():
        array = feeds[name]
        if not isinstance(array, np.ndarray):
            raise BadInput(
                f"{where}: input '{name}' is a {type(array).__name__}, not a NumPy array"
            )
        if not array.dtype.isnative:  # native libraries would misread its bytes
            raise BadInput(
                f"{where}: input '{name}' has the other byte order than this machine",
                hint="array.astype(array.dtype.newbyteorder('='))",
            )
        if (problem := mismatch(spec, array.dtype.name, array.shape)) is not None:
            raise BadInput(f"{where}: {problem}")
        for axis, size in zip(spec.shape, array.shape, strict=True):
            if isinstance(axis, str) and sizes.setdefault(axis, size) != size:
                raise BadInput(f"{where}: axis {axis} is {sizes[axis]} and {size} in the same call")


class RecordedEngine(Engine):
    """Returns the outputs that were recorded for the inputs that it is called with."""

    device = "recorded"

    def __init__(self, inputs: Specs, outputs: Specs, values: Arrays, runtime: str) -> None:
        self.inputs, self.outputs, self.runtime = inputs, outputs, runtime
        self._values = values

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        check_feeds(self.inputs, feeds, self.runtime)
        return {name: array.copy() for name, array in self._values.items()}
