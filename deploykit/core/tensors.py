"""Names, dtypes and shapes of a model's inputs and outputs.

Dtypes are numpy's names as strings, so nothing here needs numpy, and two that numpy lacks:
`carrier` names the dtype of their arrays. A named axis is dynamic, and axis 0 named `N` is the
batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deploykit.core.errors import BadInput
from deploykit.core.json_value import Record

BATCH = "N"
# as exporters and their users call it
_BATCH_WORD = re.compile("b|bs|bsz|.*batch.*", re.IGNORECASE)
_UNKNOWN = ("?", "-1", "*", "none", "null", "nan", "unk", "unknown", "dynamic", "any", "dyn")
MOST_STRINGS = 1 << 18  # in one call of ONNX Runtime, which holds the GIL for 0.06 s

Bytes = bytes | memoryview
InputKey = tuple[tuple[str, str, tuple[int, ...]], ...]  # name, datatype, shape without axis 0

# dtype -> bytes of an element, and its name in the Open Inference Protocol ("Tensor Data Types")
_DTYPES: Mapping[str, tuple[int, str]] = {
    "bool": (1, "BOOL"),
    "uint8": (1, "UINT8"),
    "uint16": (2, "UINT16"),
    "uint32": (4, "UINT32"),
    "uint64": (8, "UINT64"),
    "int8": (1, "INT8"),
    "int16": (2, "INT16"),
    "int32": (4, "INT32"),
    "int64": (8, "INT64"),
    "float16": (2, "FP16"),
    "bfloat16": (2, "BF16"),
    "float32": (4, "FP32"),
    "float64": (8, "FP64"),
    "string": (0, "BYTES"),  # strings have no fixed size
}
DTYPE_BYTES: Mapping[str, int] = {dtype: size for dtype, (size, _) in _DTYPES.items() if size}
PROTOCOL_NAMES: Mapping[str, str] = {dtype: name for dtype, (_, name) in _DTYPES.items()}
_CARRIERS: Mapping[str, str] = {"bfloat16": "float32", "string": "object"}

# A name may hold colons, as TensorFlow's do ("x:0"): the last one before the bracket separates.
_SPEC = re.compile(r"(?P<name>\S(?:.*\S)?)\s*:\s*(?P<dtype>\w+)\[(?P<axes>[^\[\]]*)\]")
_AXIS = re.compile(r"[0-9]{1,18}|[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class TensorSpec(Record):
    """One input or output: its name, its dtype, and its shape with dynamic axes as names."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.name}:{self.dtype}[{','.join(str(axis) for axis in self.shape)}]"

    @property
    def batched(self) -> bool:
        """Whether axis 0 is dynamic, so that requests can be joined along it."""
        return bool(self.shape) and isinstance(self.shape[0], str)


Specs = tuple[TensorSpec, ...]


def batch_axes(specs: Sequence[TensorSpec]) -> tuple[str, ...]:
    """Return the names of the batch axis: `N` or a word for it, wherever it is; else of axis 0.

    In [batch,N] or [B,N,3] the `N` counts samples of a sound or points: a word at axis 0 is first.
    """
    first = tuple(dict.fromkeys(str(spec.shape[0]) for spec in specs if spec.batched))
    words = tuple(axis for axis in first if _BATCH_WORD.fullmatch(axis))
    if words and BATCH not in first:
        return words
    named = [axis for spec in specs for axis in spec.shape if isinstance(axis, str)]
    others = (axis for axis in named if _BATCH_WORD.fullmatch(axis) and len(axis) > 1)
    name = BATCH if BATCH in named else next(others, None)
    return first if name is None else (name,)


def dynamic_sizes(
    specs: Sequence[TensorSpec], shapes: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """Return the size of each dynamic axis where the tensors have these shapes."""
    known = [(spec.shape, shapes[spec.name]) for spec in specs if spec.name in shapes]
    pairs = [pair for axes, sizes in known for pair in zip(axes, sizes, strict=False)]
    return {axis: size for axis, size in pairs if isinstance(axis, str)}


def batch_places(specs: Sequence[TensorSpec], batch: Sequence[str] | None = None) -> dict[str, int]:
    """Return the place of the batch axis by tensor, of those that have it.

    `batch`: its names, by default those of these specs.
    """
    names = batch_axes(specs) if batch is None else batch
    places = {
        spec.name: [n for n, axis in enumerate(spec.shape) if axis in names] for spec in specs
    }
    return {name: found[0] for name, found in places.items() if found}


def axis_name(tensor: str, place: int, own: str | None = None) -> str:
    """Return the name of a dynamic axis: its `own`, else `N` at place 0 and `TENSOR_PLACE` behind.

    A word for "unknown" is no name: two axes that PaddlePaddle calls "?" have a size each.
    """
    if own and own.lower() not in _UNKNOWN:
        return own
    return f"{tensor}_{place}" if place else BATCH


def name_axes(tensor: str, axes: Iterable[int | str | None]) -> tuple[int | str, ...]:
    """Return the shape of `axes`, the sizes, names and unknown ones (None) of a file."""
    return tuple(
        axis if isinstance(axis, int) else axis_name(tensor, n, axis) for n, axis in enumerate(axes)
    )


def carrier(dtype: str) -> str:
    """Return numpy's dtype for `dtype`: float32 for bfloat16, object for strings."""
    return _CARRIERS.get(dtype, dtype)


def parse_spec(text: str) -> TensorSpec:
    """Read `name:dtype[axis,axis,...]`; an empty bracket is a scalar. Raises BadInput."""
    match = _SPEC.fullmatch(text.strip())
    if match is None:
        raise BadInput(
            f"'{text}' is not an input specification",
            hint="write it as NAME:DTYPE[AXES], for example 'x:float32[N,3,224,224]'",
        )
    if match["dtype"] == "string":
        raise BadInput(f"'{text}': PyTorch has no tensors of strings")
    axes = [axis.strip() for axis in match["axes"].split(",")] if match["axes"].strip() else []
    for axis in axes:
        if not _AXIS.fullmatch(axis):
            raise BadInput(
                f"'{text}': axis '{axis}' is neither a size nor a name",
                hint="a size is an integer, a dynamic axis is a name such as N or T",
            )
    shape = [int(axis) if axis[0].isdigit() else axis for axis in axes]
    return make_spec(match["name"], match["dtype"], shape)


def make_spec(name: str, dtype: str, shape: Sequence[int | str]) -> TensorSpec:
    """Build a TensorSpec; raises BadInput on an unknown dtype or a negative size."""
    if dtype not in PROTOCOL_NAMES:
        names = ", ".join(PROTOCOL_NAMES)
        raise BadInput(f"{name}: unknown dtype '{dtype}'", hint=f"one of: {names}")
    for axis in shape:
        if isinstance(axis, int) and axis < 0:
            raise BadInput(f"{name}: axis size {axis} is negative")
    return TensorSpec(name, dtype, tuple(shape))


def mismatch(spec: TensorSpec, dtype: str, shape: Sequence[int]) -> str | None:
    """Return why an array of numpy's `dtype` and `shape` does not fit `spec`; None if it fits."""
    if dtype == carrier(spec.dtype) and fits_shape(spec.shape, shape):
        return None
    got = f"{dtype}[{','.join(str(size) for size in shape)}]"
    want = str(spec)[len(spec.name) + 1 :]
    return f"input '{spec.name}' is {want}, got {got}{without_batch(spec, shape)}"


def fits_shape(axes: Sequence[int | str], shape: Sequence[int]) -> bool:
    """Return whether an array of `shape` has these axes, of which named ones have any size."""
    return len(axes) == len(shape) and all(
        isinstance(want, str) or want == got for want, got in zip(axes, shape, strict=True)
    )


def without_batch(spec: TensorSpec, shape: Sequence[int]) -> str:
    """Return an addition to the error if `shape` is that of a single sample, else ""."""
    fits = spec.shape[:1] in ((BATCH,), (1,)) and fits_shape(spec.shape[1:], shape)
    return ": one sample without its batch axis, which x[None] adds" if fits else ""


def concrete(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape with each dynamic axis replaced by its size in `sizes`, by default 1."""
    return tuple(sizes.get(axis, 1) if isinstance(axis, str) else axis for axis in spec.shape)


def steps_counted(
    spec: TensorSpec, specs: Sequence[TensorSpec], sizes: Mapping[str, int]
) -> int | None:
    """Return T, the steps of the rows, if `spec` holds the rows' lengths; None for other inputs.

    Packed sequences need such an input: integers of shape (N), with "length" in the name, for
    another input of shape (N, T, ...) or (T, N, ...).
    """
    name = spec.name.lower()
    named = "length" in name or name.endswith(("lens", "_len"))
    if not named or "int" not in spec.dtype or len(spec.shape) != 1:
        return None
    row = spec.shape[0]
    pairs = [other.shape[:2] for other in specs if len(other.shape) > 1 and row in other.shape[:2]]
    steps = [axis for pair in pairs for axis in pair if axis != row]
    return min(
        (sizes.get(str(axis), 1) if isinstance(axis, str) else axis for axis in steps), default=None
    )
