"""The one table of precisions: what each is called, and what is done with it.

A new precision is a row here and, where no writer of `quantization/` fits, a writer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from deploykit.core.runtime import RUNTIMES

# how `quantize` writes a precision
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
    onnx_type: str = ""  # of TensorProto.DataType
    tensorrt_type: str = ""  # of tensorrt.DataType
    inspector_names: tuple[str, ...] = ()  # words by which TensorRT's engine inspector calls it
    builder_flag: str = ""  # what allowed it before TensorRT's networks were strongly typed
    max_stored: float = math.inf
    min_opset: int = 1
    max_engine_error: float = 1e-1  # of an engine against its graph: kernels round elsewhere
    # whether a CPU needs help to round as a GPU does, and what a reader of the result must know
    simulated: bool = False
    cpu_note: str = ""
    # the levels of `--to auto`: "cpu" or "gpu" -> what the nodes around it compute in
    auto: Mapping[str, str] = field(default_factory=dict)

    @property
    def guarded(self) -> bool:
        """Whether activations of a float32 model may be too large for it."""
        return self.writer == CAST and self.max_stored < math.inf


ALL = (
    Precision(
        "fp32",
        "float32",
        32,
        onnx_type="FLOAT",
        tensorrt_type="FLOAT",
        inspector_names=("float", "fp32"),
        max_engine_error=1e-2,  # TF32 included
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
        simulated=True,
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
        min_opset=13,  # the first whose Cast has it
        simulated=True,
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
        min_opset=13,  # the first with a scale per channel
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
        min_opset=11,  # the first with DynamicQuantizeLinear
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
        min_opset=19,  # the first with 8-bit floats
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
FLOATS = frozenset(each.dtype for each in ALL if each.bits >= 16)  # computed in as they are
QUANTIZED = tuple(each.name for each in ALL if each.writer)  # what `quantize` writes
CALIBRATED = tuple(each.name for each in ALL if each.writer == PAIRS)  # and needs data for
# what a target computes in
HARDWARE = tuple(each.name for each in ALL if each.writer not in (WEIGHTS, DYNAMIC))
OTHER_NODES = ("fp32", "fp16")  # what the nodes around 8-bit ones and stored weights compute in

_BY_DTYPE = {each.dtype: each for each in reversed(ALL)}
BITS: Mapping[str, int] = {dtype: each.bits for dtype, each in _BY_DTYPE.items()}


def of_dtype(dtype: str) -> Precision | None:
    """The precision that a graph's `dtype` stands for; None for integers of shapes and indices."""
    return _BY_DTYPE.get("float8" if dtype.startswith("float8") else dtype)


def narrowest(dtypes: Iterable[str]) -> str:
    """The name of the narrowest precision of a graph's `dtypes`; "fp32" where none is known."""
    known = [found for found in map(of_dtype, dtypes) if found is not None]
    return min(known, key=lambda each: (each.bits, ALL.index(each))).name if known else "fp32"


def names_of(dtypes: Iterable[str]) -> set[str]:
    """The names of the precisions, float32 apart, that a graph of these `dtypes` asks for."""
    found = {known.name for known in map(of_dtype, dtypes) if known is not None}
    return found - {"fp32"}


def max_engine_error(dtypes: Iterable[str]) -> float:
    """The largest error that an engine of these `dtypes` may have against its graph."""
    fallback = Precision("", "", 64)
    return max((of_dtype(dtype) or fallback).max_engine_error for dtype in ("float32", *dtypes))


def hardware(name: str) -> str:
    """The precision that a target must compute in to run this one: "int8" for "int8-dynamic"."""
    return _BY_DTYPE[BY_NAME[name].dtype].name if BY_NAME[name].writer == DYNAMIC else name


def auto_levels(runtime: str, offered: Collection[str]) -> list[tuple[Precision, str]]:
    """What `--to auto` tries where `offered` is computed in, and of the nodes around; by bits."""
    where = "cpu" if RUNTIMES[runtime].on_cpu else "gpu"
    rows = [row for row in ALL if row.runtime in ("", runtime) and hardware(row.name) in offered]
    fit = [(row, row.auto[where]) for row in rows if where in row.auto]
    return sorted(fit, key=lambda level: level[0].bits)
