"""Open an artefact as an `Engine`: one callable for every runtime.

In: a path and a device. Out: an `Engine` that takes and returns arrays by tensor name. The file's
content decides which runtime opens it; the import of that runtime happens here, when it is needed.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

import numpy as np

from deploykit.core.artefact import sniff
from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.tensors import TensorSpec, mismatch

Arrays = Mapping[str, np.ndarray]

# format -> "module:function"; the function is (path, device, threads) -> Engine
RUNTIMES: Mapping[str, str] = {
    "onnx": "deploykit.runtimes.onnxruntime.engine:open_engine",
    "torch": "deploykit.runtimes.torch.engine:open_engine",
    "safetensors": "deploykit.runtimes.torch.engine:open_engine",
    "tensorrt": "deploykit.runtimes.tensorrt.open:open_engine",
}
_MOST_SEEN = 1024
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


class Engine(Protocol):
    """A loaded artefact. One thread at a time calls it; outputs are arrays of the caller's own.

    `max_batch` is the largest axis 0 it takes, None for no limit. `device` is what really runs it
    ("cpu", "cuda:0"), `runtime` its name and version ("onnxruntime 1.31.1").
    """

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def max_batch(self) -> int | None: ...
    @property
    def device(self) -> str: ...
    @property
    def runtime(self) -> str: ...

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        """Run once. Raises BadInput when the feeds do not fit `inputs`."""
        ...

    def close(self) -> None: ...
    def __enter__(self) -> Engine: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


_Self = TypeVar("_Self", bound="Closing")


class Closing(ABC):
    """What is closed at the end of a `with` block."""

    @abstractmethod
    def close(self) -> object: ...

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


OpenEngine = Callable[..., Engine]  # (path, device, threads)


def load(
    path: Path | str, device: str = "auto", *, threads: int | None = None, trust: bool = False
) -> Engine:
    """Open the artefact at `path`. `threads`: CPU threads of one call, None for one a core.

    `trust`: also a TensorRT engine that has no manifest, with a note of the engine's.

    `device`: "cpu", "cuda", "cuda:N", or "auto" for a GPU where the runtime has one. A device that
    was asked for and cannot be had raises Unsupported; nothing falls back in silence.
    """
    path = Path(path)
    if not _DEVICE.fullmatch(device):
        raise BadInput(f"unknown device '{device}'", hint="one of: auto, cpu, cuda, cuda:N")
    if threads is not None and threads < 1:
        raise BadInput(f"threads must be 1 or more, got {threads}")
    kind = sniff(path)
    if kind not in RUNTIMES:
        raise Unsupported(f"{path}: no runtime for {kind} files in this version of deploykit")
    module, _, function = RUNTIMES[kind].partition(":")
    open_engine: OpenEngine = getattr(import_module(module), function)
    more = {"trust": True} if trust and kind == "tensorrt" else {}
    return open_engine(path, device, threads, **more)


class FeedCheck:
    """`check_feeds` of one artefact that does not look twice at shapes it has found right."""

    def __init__(self, specs: tuple[TensorSpec, ...], where: str) -> None:
        self._specs = specs
        self._where = where
        self._right: set[tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]] = set()

    def __call__(self, feeds: Arrays) -> None:
        """Raises BadInput."""
        seen = None
        if not set(map(type, feeds.values())) - {np.ndarray}:
            seen = tuple([(name, array.dtype, array.shape) for name, array in feeds.items()])
            if seen in self._right:
                return
        check_feeds(self._specs, feeds, self._where)
        if seen is not None:
            if len(self._right) >= _MOST_SEEN:
                self._right.clear()
            self._right.add(seen)


def check_feeds(specs: tuple[TensorSpec, ...], feeds: Arrays, where: str) -> int | None:
    """Check names, dtypes and shapes before a native library sees them; `where` names the artefact.

    Returns the batch size, None when no input has a dynamic axis 0. Raises BadInput.
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
        if not array.dtype.isnative:  # native libraries would read its bytes the wrong way round
            raise BadInput(
                f"{where}: input '{name}' is not in this machine's byte order",
                hint="array.astype(array.dtype.newbyteorder('='))",
            )
        problem = mismatch(spec, array.dtype.name, array.shape)
        if problem is not None:
            raise BadInput(f"{where}: {problem}")
        for axis, size in zip(spec.shape, array.shape, strict=True):
            if isinstance(axis, str) and sizes.setdefault(axis, size) != size:
                raise BadInput(f"{where}: axis {axis} is {sizes[axis]} and {size} in the same call")
    batched = [spec for spec in specs if spec.batched]
    return int(feeds[batched[0].name].shape[0]) if batched else None
