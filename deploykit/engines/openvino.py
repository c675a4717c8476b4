"""Run an `.onnx` file on the CPU with OpenVINO.

By default OpenVINO rounds a float32 graph to bfloat16 silently on CPUs with instructions for it.
This engine keeps the graph's precision: it asks for float32, which leaves bfloat16 and INT8 nodes
as they are, and reads back the precision that each layer runs in.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from deploykit.core.artefact import ArtefactLike
from deploykit.core.errors import BadInput, DeploykitError, Unsupported
from deploykit.core.evidence import Layer
from deploykit.core.extras import require
from deploykit.core.machine import default_threads, memory_errors
from deploykit.core.tensors import PROTOCOL_NAMES, TensorSpec, name_axes
from deploykit.engines.engine import Arrays, CallGuard, Engine, FeedCheck
from deploykit.engines.onnxruntime.file import adds_exactly, external_weights
from deploykit.graph.parse import Value, damaged, read_facts

ov = require("openvino")
frontend = require("openvino.frontend")


_OF_READERS = [each for name, each in vars(frontend).items() if name.endswith("Failure")]
_FAILURES = (*_OF_READERS, RuntimeError, TypeError, ValueError)
_PLACES = re.compile(r"Exception from src/\S+:\d+:\s*|Check '.*?' failed at src/\S+:\d+:\s*")
_UNKNOWN = re.compile(r"No conversion rule found for operations?: ([^\n]+)")
_CANNOT = re.compile(r"FrontEnd API failed with \w+:\s*")
_NOT_READ = ("can't be parsed", "Unable to read the model")
OTHER_RUNTIME = "ONNX Runtime may run it: build it with the profile 'cpu'"


@contextlib.contextmanager
def openvino_errors(path: Path) -> Iterator[None]:
    """Turn exceptions of OpenVINO into ours that name the file, in one line."""
    try:
        with memory_errors(path, [path]):
            yield
    except _FAILURES as exc:
        raise _error(path, str(exc)) from exc


def _error(path: Path, text: str) -> DeploykitError:
    if unknown := _UNKNOWN.search(text):
        names = ", ".join(name.strip() for name in unknown[1].split(","))
        return Unsupported(f"{path}: OpenVINO has no operator {names}", hint=OTHER_RUNTIME)
    if any(each in text for each in _NOT_READ):
        return damaged(path)
    lines = [line.strip() for line in _CANNOT.sub("", _PLACES.sub("", text)).splitlines()]
    reason = next((line for line in lines if line), "no reason given")
    if "externally stored data" in text:
        return BadInput(f"{path}: its weights cannot be read: {reason}")
    return Unsupported(f"{path}: OpenVINO failed: {reason}", hint=OTHER_RUNTIME)


_TAKES = PROTOCOL_NAMES.keys() - {"bfloat16", "string"}
_DTYPES: Mapping[str, str] = {  # OpenVINO's name of a precision -> ours
    "f32": "float32",
    "f64": "float64",
    "f16": "float16",
    "bf16": "bfloat16",
    "u8": "int8",
    "i8": "int8",
    "u4": "int4",
    "i4": "int4",
}
# These layers compute nothing: they hold, move or convert data.
_NO_WORK = frozenset(("Input", "Output", "Const", "Reorder", "Reshape", "Convert", "Transpose"))
_NO_WORK |= {"ShapeOf", "GatherND"}
_TYPE_OF_INPUTS = ("Eltwise", "Subgraph")  # OpenVINO reports the type of their inputs
_WIDE = ("int64", "uint64", "uint32")  # OpenVINO computes these as int32


@cache
def _core(_process: int) -> Any:
    """Return OpenVINO's Core, one per process, which lives until the process ends.

    A Core sets its thread's signal stack and restores the previous one when it ends. If two do not
    end in reverse order, that stack is gone, and the next signal is a segmentation fault.
    """
    return ov.Core()


def open_engine(
    source: ArtefactLike,
    device: str = "auto",
    threads: int | None = None,
    trust: bool = False,  # noqa: ARG001 - a graph runs no code of its own
) -> OpenVinoEngine:
    """Open an ONNX file; raises BadInput for an invalid graph, Unsupported for the device."""
    path = Path(source)
    if device not in ("auto", "cpu"):
        raise Unsupported(
            f"{path}: `device` is {device}, but OpenVINO runs on the CPU here",
            hint="build the model for the GPU: deploykit build MODEL.onnx --profile auto",
        )
    return OpenVinoEngine(path, threads)


class OpenVinoEngine(Engine):
    """One compiled model and its request. `notes`: differences between execution and graph.

    `layers`: the layers that the CPU executes, with the precision of each.
    """

    device = "cpu"

    def __init__(self, path: Path, threads: int | None) -> None:
        self.path = path
        self.runtime = f"openvino {str(ov.__version__).partition('-')[0]}"  # drop the build
        facts = read_facts(path)  # OpenVINO drops names of dynamic axes, and inputs that none reads
        for each in (*facts.inputs, *facts.outputs):
            if each.dtype not in _TAKES:
                what = f"tensor '{each.name}' is of {each.dtype}, which OpenVINO does not take here"
                raise Unsupported(f"{path}: {what}", hint=OTHER_RUNTIME)
        self.inputs = tuple(
            TensorSpec(each.name, each.dtype, name_axes(each.name, each.shape or ()))
            for each in facts.inputs
        )
        external_weights(path)  # checks that the files are in the folder and long enough
        with openvino_errors(path):
            reader = frontend.FrontEndManager().load_by_framework("onnx")
            # do not map the file: truncating a mapped file would end the process
            model = reader.convert(reader.load(str(path), enable_mmap=False))
            exact: dict[str, Any] = {} if adds_exactly() else {"LP_TRANSFORMS_MODE": False}
            config = {**_config(threads), **exact}  # no inexact INT8 kernels
            self._compiled: Any = _core(os.getpid()).compile_model(model, "CPU", config)
            self._request: Any = self._compiled.create_infer_request()
            self.layers = tuple(_layers(self._compiled))
        ports = {name: n for n, port in enumerate(self._compiled.inputs) for name in port.names}
        # OpenVINO has no port for an input that no node reads
        self._ports = [(ports[each.name], each.name) for each in self.inputs if each.name in ports]
        self.outputs = tuple(
            _output(*pair) for pair in zip(self._compiled.outputs, facts.outputs, strict=True)
        )
        self._wide = [each.name for each in self.inputs if each.dtype in _WIDE]
        self._check, self._guard = FeedCheck(self.inputs, path.name), CallGuard(path.name)
        self.steady = not facts.slowed_by_values
        executed = Counter(layer.precision for layer in self.layers if layer.precision)
        self.options = {
            **{name: _text(self._compiled.get_property(name)) for name in _config(threads)},
            "layers": ", ".join(f"{count} {name}" for name, count in executed.most_common()),
        }
        notes = []
        if "float64" in {each.dtype for each in (*self.inputs, *self.outputs)}:
            notes.append("OpenVINO computes float64 in float32")
        if exact and "QuantizeLinear" in facts.operators:
            notes.append(
                "INT8 runs in float32: without VNNI, OpenVINO would cut the sums of its products"
            )
        self.notes = tuple(f"{path}: {note}" for note in notes)

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        if self._request is None:
            raise DeploykitError(f"{self.path.name}: the engine is closed")
        self._check(feeds)
        for name in self._wide:
            array = feeds[name]
            if array.size and (array.max() > 2**31 - 1 or array.min() < -(2**31)):
                text = "holds integers beyond 32 bits, which OpenVINO cuts off"
                raise BadInput(f"{self.path.name}: input '{name}' {text}", hint=OTHER_RUNTIME)
        arrays = {port: feeds[name] for port, name in self._ports}
        with self._guard, openvino_errors(self.path):
            found = self._request.infer(arrays, share_inputs=True)
        return {spec.name: found[number] for number, spec in enumerate(self.outputs)}

    def trim(self) -> bool:
        self._compiled.release_memory()
        return False

    def close(self) -> None:
        self._request = self._compiled = None


def _config(threads: int | None) -> dict[str, Any]:
    """Return the options of an engine, which has its own threads, on any core."""
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": threads or default_threads(),
        "INFERENCE_PRECISION_HINT": "f32",
        "EXECUTION_MODE_HINT": "ACCURACY",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,  # only INT8 pairs round activations
        "ENABLE_CPU_PINNING": False,  # it would pin two processes to the same cores
        "ENABLE_HYPER_THREADING": True,  # else it uses fewer threads than requested
    }


def _layers(compiled: Any) -> Iterator[Layer]:
    """Yield the layers that compute, as the CPU runs them after fusion."""
    for node in compiled.get_runtime_model().get_ops():
        info = {key: str(value.value) for key, value in node.get_rt_info().items()}
        kind = info.get("layerType", "")
        if kind in _NO_WORK:
            continue
        runs = info.get("runtimePrecision", "")
        if kind in _TYPE_OF_INPUTS and runs in ("u8", "i8"):
            runs = info.get("outputPrecisions", "").partition(",")[0]
        names = tuple(filter(None, info.get("originalLayersNames", "").split(",")))
        kernel = info.get("primitiveType", "")
        yield Layer(node.get_friendly_name(), kind, _DTYPES.get(runs), names, kernel)


def _output(port: Any, value: Value) -> TensorSpec:
    """Return the output's spec from the file, with sizes that it lacks as OpenVINO infers them."""
    shape: Any = value.shape
    if port.partial_shape.rank.is_static:
        sizes = [each.get_length() if each.is_static else None for each in port.partial_shape]
        if shape is None or len(shape) != len(sizes):
            shape = sizes
        shape = [axis if n is None else n for axis, n in zip(shape, sizes, strict=True)]
    return TensorSpec(value.name, value.dtype, name_axes(value.name, shape or ()))


def _text(value: Any) -> str:
    named = getattr(value, "get_type_name", None) or getattr(value, "name", None)
    return str(named() if callable(named) else named if named is not None else value)
