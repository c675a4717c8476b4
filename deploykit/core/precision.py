"""The one table of precisions: the names of each, and how it is written and run.

A new precision is a row here and, where no writer of `quantization/` fits, a writer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from deploykit.core.runtime import RUNTIMES

# the ways in which `quantize` writes a precision
CAST, PAIRS, WEIGHTS, DYNAMIC = "cast", "pairs", "weights", "dynamic"


@dataclass(frozen=True)
class Precision:
    """One row. `name` is what users, profiles and reports say, `dtype` what graphs say.

    `writer`: "cast" (the tensors change their type), "pairs" (QuantizeLinear and DequantizeLinear,
    scaled by calibration data), "weights" (only stored so), "dynamic" (scaled in each call), or ""
    where `quantize` does not offer it. `runtime`: the only one that runs it. `max_stored`: the
    largest magnitude that is stored. `min_opset`: the first that can express what is written.
    """

    name: str
    dtype: str
    bits: int
    writer: str = ""
    runtime: str = ""
    onnx_type: str = ""  # a name of TensorProto.DataType
    tensorrt_type: str = ""  # a name of tensorrt.DataType
    inspector_names: tuple[str, ...] = ()  # its names in TensorRT's engine inspector
    builder_flag: str = ""  # enables it where TensorRT's networks are not strongly typed
    max_stored: float = math.inf
    min_opset: int = 1
    max_engine_error: float = 1e-1  # engine against graph: kernels round elsewhere
    cpu_note: str = ""  # warns the reader of a result that was measured on a CPU
    # the levels of `--to auto`: "cpu" or "gpu" -> the precision of the other nodes
    auto: Mapping[str, str] = field(default_factory=dict)

    @property
    def guarded(self) -> bool:
        """Whether activations of a float32 model may overflow in it."""
        return self.writer == CAST and self.max_stored < math.inf


ALL = (
    Precision(
        "fp32",
        "float32",
        32,
        onnx_type="FLOAT",
        tensorrt_type="FLOAT",
        inspector_names=("float", "fp32"),
        max_engine_error=1e-2,  # this includes TF32
    ),
    Precision("tf32", "float32", 32),
    Precision(
        "fp16",
        "float16",
        16,
        CAST,
        onnx_type="FLOAT16",
        tensorrt_type="HALF",
        inspector_names=("half", "fp16"),
        builder_flag="FP16",
        max_stored=65504.0,
        auto={"gpu": "fp32"},
    ),
    Precision(
        "bf16",
        "bfloat16",
        16,
        CAST,
        onnx_type="BFLOAT16",
        tensorrt_type="BF16",
        inspector_names=("bfloat16", "bf16"),
        builder_flag="BF16",
        min_opset=13,  # the first opset whose Cast has it
        cpu_note="ONNX Runtime's CPU provider does not run bfloat16: evaluated by rounding",
        auto={"gpu": "fp32"},
    ),
    Precision(
        "int8",
        "int8",
        8,
        PAIRS,
        onnx_type="INT8",
        tensorrt_type="INT8",
        inspector_names=("int8",),
        builder_flag="INT8",
        max_stored=127,
        min_opset=13,  # the first opset with a scale per channel
        auto={"gpu": "fp16", "cpu": "fp32"},
    ),
    Precision(
        "int8-dynamic",
        "int8",
        8,
        DYNAMIC,
        "onnxruntime",
        onnx_type="INT8",
        max_stored=127,
        min_opset=11,  # the first opset with DynamicQuantizeLinear
        auto={"cpu": "fp32"},
    ),
    Precision(
        "fp8",
        "float8",
        8,
        PAIRS,
        onnx_type="FLOAT8E4M3FN",
        tensorrt_type="FP8",
        inspector_names=("fp8",),
        builder_flag="FP8",
        max_stored=448.0,
        min_opset=19,  # the first opset with 8-bit floats
        auto={"gpu": "fp16"},
    ),
    Precision("fp4", "float4", 4, onnx_type="FLOAT4E2M1", inspector_names=("fp4",)),
    Precision(
        "int8-weight-only", "int8", 8, WEIGHTS, onnx_type="INT8", max_stored=127, min_opset=13
    ),
    Precision(
        "int4-weight-only",
        "int4",
        4,
        WEIGHTS,
        onnx_type="INT4",
        tensorrt_type="INT4",
        inspector_names=("int4",),
        builder_flag="INT4",
        max_stored=7,
        min_opset=21,
    ),
)

BY_NAME: Mapping[str, Precision] = {each.name: each for each in ALL}
HALVES = tuple(each for each in ALL if each.writer == CAST)
FLOATS = frozenset(each.dtype for each in ALL if each.bits >= 16)  # nodes compute in these directly
QUANTIZED = tuple(each.name for each in ALL if each.writer)  # `quantize` writes these
CALIBRATED = tuple(each.name for each in ALL if each.writer == PAIRS)  # these need calibration data
# the precisions that a target may compute in
HARDWARE = tuple(each.name for each in ALL if each.writer not in (WEIGHTS, DYNAMIC))
OTHER_NODES = ("fp32", "fp16")  # precisions of the nodes around 8-bit ones and stored weights

_BY_DTYPE = {each.dtype: each for each in reversed(ALL)}
BITS: Mapping[str, int] = {dtype: each.bits for dtype, each in _BY_DTYPE.items()}


def of_dtype(dtype: str) -> Precision | None:
    """Return the precision of a graph's `dtype`; None for integers of shapes and indices."""
    return _BY_DTYPE.get("float8" if dtype.startswith("float8") else dtype)


def narrowest(dtypes: Iterable[str]) -> str:
    """Return the name of the narrowest precision of `dtypes`; "fp32" if none is known."""
    known = [found for found in map(of_dtype, dtypes) if found is not None]
    return min(known, key=lambda each: (each.bits, ALL.index(each))).name if known else "fp32"


def names_of(dtypes: Iterable[str]) -> set[str]:
    """Return the names of the precisions, except float32, that a graph of these `dtypes` uses."""
    return {known.name for known in map(of_dtype, dtypes) if known is not None} - {"fp32"}


def max_engine_error(dtypes: Iterable[str]) -> float:
    """Return the largest error that an engine of these `dtypes` may have against its graph."""
    fallback = Precision("", "", 64)
    return max((of_dtype(dtype) or fallback).max_engine_error for dtype in ("float32", *dtypes))


def hardware(name: str) -> str:
    """Return the precision that a target needs to run this one: "int8" for "int8-dynamic"."""
    return _BY_DTYPE[BY_NAME[name].dtype].name if BY_NAME[name].writer == DYNAMIC else name


def auto_levels(runtime: str, offered: Collection[str]) -> list[tuple[Precision, str]]:
    """Return the precisions that `--to auto` tries, and those of the other nodes, by bits.

    `offered`: the precisions that the target computes in.
    """
    where = "cpu" if RUNTIMES[runtime].on_cpu else "gpu"
    rows = [row for row in ALL if row.runtime in ("", runtime) and hardware(row.name) in offered]
    fit = [(row, row.auto[where]) for row in rows if where in row.auto]
    return sorted(fit, key=lambda level: level[0].bits)
