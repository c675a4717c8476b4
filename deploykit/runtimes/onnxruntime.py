"""Run an `.onnx` file with ONNX Runtime, on its CPU or CUDA provider.

In: a path and a device. Out: an `Engine`. The provider that really runs is read back after loading:
CUDA asked and CPU given is an error, since ONNX Runtime itself only logs it.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deploykit.core.errors import BadInput, DeploykitError, Unsupported, first_line
from deploykit.core.extras import require
from deploykit.core.machine import default_threads
from deploykit.core.tensors import BATCH, TensorSpec
from deploykit.runtimes.engine import Arrays, Closing, check_feeds

ort = require("onnxruntime")
ort_state = require("onnxruntime.capi.onnxruntime_pybind11_state")

_DTYPES = {
    "tensor(bool)": "bool",
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    **{
        f"tensor({kind}{bits})": f"{kind}{bits}"
        for kind in ("int", "uint")
        for bits in (8, 16, 32, 64)
    },
}


def open_engine(path: Path, device: str = "auto", threads: int | None = None) -> OnnxRuntimeEngine:
    """Open `path`; raises BadInput for what is no valid graph, Unsupported for the device."""
    cuda = "CUDAExecutionProvider" in ort.get_available_providers()
    if device == "auto":
        device = "cuda" if cuda else "cpu"
    if device != "cpu" and not cuda:
        raise Unsupported(
            f"{path}: device '{device}' was asked for, but this onnxruntime has no CUDA provider",
            hint="pip uninstall onnxruntime; pip install 'deploykit[gpu]'; see: deploykit doctor",
        )
    return OnnxRuntimeEngine(path, device, threads)


class OnnxRuntimeEngine(Closing):
    """One InferenceSession. `session` is open to builders and benchmarks."""

    max_batch: int | None = None

    def __init__(self, path: Path, device: str, threads: int | None) -> None:
        self.path = path
        self.runtime = f"onnxruntime {ort.__version__}"
        self.session = _session(path, device, threads)
        self.inputs = tuple(_spec(path, node) for node in self.session.get_inputs())
        self.outputs = tuple(_spec(path, node) for node in self.session.get_outputs())
        self._names = [spec.name for spec in self.outputs]
        self.device = _device_in_use(path, self.session, device)

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        if self.session is None:
            raise DeploykitError(f"{self.path.name}: the engine is closed")
        check_feeds(self.inputs, feeds, self.path.name)
        with onnxruntime_errors(self.path):
            values = self.session.run(self._names, dict(feeds))
        return dict(zip(self._names, values, strict=True))

    def close(self) -> None:
        self.session = None


def session_options(threads: int | None, *, half: bool = False) -> Any:
    """Options of every session we open: no spinning threads, and no output but errors.

    `half`: the graph holds float16. At its default level ONNX Runtime's CPU provider crashes on
    some float16 graphs (seen with a transformer encoder, 1.31.1), so the level below is used.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or default_threads()
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_EXTENDED if half else level.ORT_ENABLE_ALL
    return options


def _session(path: Path, device: str, threads: int | None) -> Any:
    options = session_options(threads, half=holds_half(path))
    providers: list[Any] = ["CPUExecutionProvider"]
    if device != "cpu":
        number = int(device.partition(":")[2] or 0)
        providers.insert(0, ("CUDAExecutionProvider", {"device_id": number}))
        if hasattr(ort, "preload_dlls"):
            with contextlib.redirect_stdout(sys.stderr):  # it prints what it cannot load
                ort.preload_dlls()  # finds CUDA and cuDNN in pip's nvidia-* wheels
    with onnxruntime_errors(path):
        return ort.InferenceSession(
            str(path), sess_options=options, providers=providers, enable_fallback=0
        )


def holds_half(path: Path) -> bool:
    """Whether the graph holds float16: in a tensor, an input or output, or the type of a Cast.

    Reads the protobuf's field headers only, as the onnx package is slow to import and loads the
    weights. False for a file that cannot be read: loading it then says what is wrong.
    """
    try:
        with (
            path.open("rb") as handle,
            mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _half_in(data, "model", 0, len(data))
    except (OSError, ValueError, IndexError, RecursionError):
        return False


# Where float16 can stand, by the field numbers of onnx.proto: message -> {field: its message}.
_MEMBERS: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 11: "value", 12: "value", 13: "value"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph"},
    "value": {2: "type"},
    "type": {1: "tensor_type"},
}
_DATA_TYPE = {"tensor": 2, "tensor_type": 1}  # the field that holds a TensorProto.DataType
_TYPE_NAMES = (b"to", b"dtype")  # attributes whose number is one: of Cast, and of generators
_FLOAT16 = 10


def _half_in(data: mmap.mmap, message: str, begin: int, end: int) -> bool:
    """Whether the protobuf `message` in data[begin:end] speaks of float16."""
    members = _MEMBERS.get(message, {})
    name = b""
    for number, at, stop in _fields(data, begin, end):
        if stop == -1:
            if at == _FLOAT16 and number == _DATA_TYPE.get(message):
                return True
            if at == _FLOAT16 and message == "attribute" and number == 3 and name in _TYPE_NAMES:
                return True
        elif message == "attribute" and number == 1:
            name = data[at:stop]
        elif number in members and _half_in(data, members[number], at, stop):
            return True
    return False


def _fields(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Protobuf fields in data[at:end]: (number, begin, end), or (number, value, -1) of a varint.

    Raises ValueError, or IndexError at the end of the file, for what is no protobuf.
    """
    while at < end:
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value, -1
        elif wire == 2:
            size, at = _varint(data, at)
            if at + size > end:
                raise ValueError("not a protobuf")
            yield number, at, at + size
            at += size
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            raise ValueError("not a protobuf")


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("not a protobuf")


def _device_in_use(path: Path, session: Any, asked: str) -> str:
    first = session.get_providers()[0]
    if asked == "cpu" and first == "CPUExecutionProvider":
        return "cpu"
    if asked != "cpu" and first == "CUDAExecutionProvider":
        return asked if ":" in asked else "cuda:0"
    raise Unsupported(
        f"{path}: device '{asked}' was asked for, but ONNX Runtime chose {first}",
        hint="its CUDA and cuDNN libraries did not load; see: deploykit doctor",
    )


def _spec(path: Path, node: Any) -> TensorSpec:
    """ONNX Runtime gives an unnamed dynamic axis as None; it gets a name of its own here."""
    dtype = _DTYPES.get(node.type)
    if dtype is None:
        raise Unsupported(f"{path}: tensor '{node.name}' is a {node.type}, which is not offered")
    shape: list[int | str] = []
    for number, axis in enumerate(node.shape):
        unnamed = BATCH if number == 0 else f"{node.name}_{number}"
        shape.append(axis if isinstance(axis, (int, str)) and axis != "" else unnamed)
    return TensorSpec(node.name, dtype, tuple(shape))


@contextlib.contextmanager
def onnxruntime_errors(path: Path) -> Iterator[None]:
    """Turn ONNX Runtime's exceptions into ours, naming the file."""
    try:
        yield
    except (ort_state.InvalidProtobuf, ort_state.NoModel) as exc:
        raise BadInput(f"{path}: is a truncated or damaged ONNX file") from exc
    except ort_state.NoSuchFile as exc:
        raise BadInput(f"{path}: {first_line(exc)}") from exc
    except ort_state.NotImplemented as exc:
        raise Unsupported(f"{path}: {first_line(exc)}", hint="see: deploykit doctor") from exc
    except (ort_state.InvalidGraph, ort_state.InvalidArgument, ort_state.Fail) as exc:
        raise BadInput(f"{path}: ONNX Runtime refused it: {first_line(exc)}") from exc
    except (ort_state.RuntimeException, ort_state.EPFail, RuntimeError, ValueError) as exc:
        raise Unsupported(f"{path}: ONNX Runtime failed: {first_line(exc)}") from exc


def providers() -> tuple[str, ...]:
    """The execution providers of the installed ONNX Runtime, most specific first."""
    return tuple(ort.get_available_providers())
