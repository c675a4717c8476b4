"""Run an `.onnx` file with ONNX Runtime, on its CPU or CUDA provider.

In: a path and a device. Out: an `Engine`. The provider that really runs is read back after loading:
CUDA asked and CPU given is an error, since ONNX Runtime itself only logs it.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from deploykit.core.errors import BadInput, Unsupported, first_line
from deploykit.core.extras import require
from deploykit.core.machine import usable_cores
from deploykit.core.tensors import BATCH, TensorSpec
from deploykit.runtimes.engine import Arrays, check_feeds

ort = require("onnxruntime")
ort_state = require("onnxruntime.capi.onnxruntime_pybind11_state")

_DTYPES = {
    "tensor(bool)": "bool",
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(bfloat16)": "bfloat16",
    **{
        f"tensor({kind}{bits})": f"{kind}{bits}"
        for kind in ("int", "uint")
        for bits in (8, 16, 32, 64)
    },
}


def open_engine(path: Path, device: str = "auto", threads: int | None = None) -> OnnxRuntimeEngine:
    """Open `path`; raises BadInput for a file that is no valid graph, Unsupported for the device."""
    cuda = "CUDAExecutionProvider" in ort.get_available_providers()
    if device == "auto":
        device = "cuda" if cuda else "cpu"
    if device != "cpu" and not cuda:
        raise Unsupported(
            f"{path}: device '{device}' was asked for, but this onnxruntime has no CUDA provider",
            hint="pip uninstall onnxruntime; pip install 'deploykit[gpu]'; see: deploykit doctor",
        )
    return OnnxRuntimeEngine(path, device, threads)


class OnnxRuntimeEngine:
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
        check_feeds(self.inputs, feeds, self.path.name)
        with onnxruntime_errors(self.path):
            values = self.session.run(self._names, dict(feeds))
        return dict(zip(self._names, values, strict=True))

    def close(self) -> None:
        self.session = None

    def __enter__(self) -> OnnxRuntimeEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def session_options(threads: int | None, *, half: bool = False) -> Any:
    """Options of every session we open: no spinning threads, and no output but errors.

    `half`: the graph holds float16. At its default level ONNX Runtime's CPU provider crashes on
    some float16 graphs (seen with a transformer encoder, 1.31.1), so the level below is used.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or usable_cores()
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
            ort.preload_dlls()  # finds CUDA and cuDNN in pip's nvidia-* wheels
    with onnxruntime_errors(path):
        return ort.InferenceSession(str(path), sess_options=options, providers=providers)


def holds_half(path: Path) -> bool:
    """Whether the graph holds float16: in an initializer, an input or output, or the type of a Cast.

    Reads the protobuf's field headers only (onnx.proto: ModelProto.graph is 7; GraphProto.node 1,
    initializer 5, input 11, output 12; FLOAT16 is 10), as the onnx package is slow to import and
    loads the weights. False for a file that cannot be read: loading it then says what is wrong.
    """
    try:
        with (
            path.open("rb") as handle,
            mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return any(
                _half_in(data, kind, begin, end)
                for number, graph_begin, graph_end in _fields(data, 0, len(data))
                if number == 7
                for kind, begin, end in _fields(data, graph_begin, graph_end)
            )
    except (OSError, ValueError, IndexError):
        return False


_FLOAT16 = 10


def _half_in(data: mmap.mmap, kind: int, begin: int, end: int) -> bool:
    """Whether one member of a GraphProto, by its field number, mentions float16."""
    if kind == 5:  # TensorProto.data_type is 2
        return any(n == 2 and value == _FLOAT16 for n, value, _ in _fields(data, begin, end))
    if kind == 1:  # NodeProto.attribute is 5; AttributeProto.name is 1, i is 3
        return any(
            n == 5 and data[a : a + 4] == b"\x0a\x02to" and (3, _FLOAT16, -1) in _fields(data, a, b)
            for n, a, b in _fields(data, begin, end)
        )
    if kind in (11, 12):  # ValueInfoProto.type is 2, its tensor_type 1, its elem_type 1
        return any(
            (1, _FLOAT16, -1) in _fields(data, c, d)
            for n, a, b in _fields(data, begin, end)
            if n == 2
            for m, c, d in _fields(data, a, b)
            if m == 1
        )
    return False


def _fields(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Protobuf fields in data[at:end]: (number, begin, end) for bytes, (number, value, -1) for a varint."""
    while at < end:
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value, -1
        elif wire == 2:
            size, at = _varint(data, at)
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
    except ort_state.RuntimeException as exc:
        raise Unsupported(f"{path}: ONNX Runtime failed: {first_line(exc)}") from exc
