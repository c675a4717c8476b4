"""Read a TensorRT engine's inputs, outputs and optimisation profiles, without running it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.core.errors import BadInput, Unsupported
from deploykit.core.manifest import Manifest
from deploykit.core.tensors import TensorSpec, axis_name
from deploykit.runtimes.cuda.memory import Shape
from deploykit.runtimes.engine import Arrays

if TYPE_CHECKING:
    import tensorrt as trt

# NumPy has no BF16, FP8, INT4 and FP4
_DTYPES: Mapping[str, str] = {
    "FLOAT": "float32",
    "HALF": "float16",
    "INT8": "int8",
    "UINT8": "uint8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
}

Ranges = Mapping[str, tuple[Shape, Shape, Shape]]  # input -> smallest, optimum, largest shape


def specs(
    engine: trt.ICudaEngine, path: Path, manifest: Manifest | None
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs; dynamic axes have their names from the manifest.

    Raises Unsupported for a type that NumPy lacks, or a tensor that is not linear device memory.
    """
    known = {spec.name: spec for spec in (*manifest.inputs, *manifest.outputs)} if manifest else {}
    found: dict[str, list[TensorSpec]] = {"INPUT": [], "OUTPUT": []}
    for number in range(engine.num_io_tensors):
        name = engine.get_tensor_name(number)
        kind = engine.get_tensor_dtype(name).name
        if kind not in _DTYPES:
            raise Unsupported(
                f"{path}: tensor '{name}' is {kind}, which is not supported for inputs and outputs",
                hint="build it from a model whose inputs and outputs are float32 or float16",
            )
        if engine.is_shape_inference_io(name) or engine.get_tensor_location(name).name != "DEVICE":
            raise Unsupported(f"{path}: tensor '{name}' is a shape tensor, which is not supported")
        if engine.get_tensor_format(name).name != "LINEAR":
            raise Unsupported(
                f"{path}: tensor '{name}' has a vectorised memory format; a linear one is needed"
            )
        sizes = tuple(engine.get_tensor_shape(name))
        names: Sequence[int | str] = known[name].shape if name in known else ()
        if len(names) != len(sizes):
            names = [axis_name(name, place) for place in range(len(sizes))]
        shape = tuple(
            size if size >= 0 else own if isinstance(own, str) else f"{name}_{axis}"
            for axis, (size, own) in enumerate(zip(sizes, names, strict=True))
        )
        found[engine.get_tensor_mode(name).name].append(TensorSpec(name, _DTYPES[kind], shape))
    return tuple(found["INPUT"]), tuple(found["OUTPUT"])


def optimisation_profiles(
    engine: trt.ICudaEngine, path: Path, inputs: Sequence[TensorSpec]
) -> tuple[Ranges, ...]:
    """Smallest, optimum and largest shape of each input, for each optimisation profile.

    Raises BadInput for shapes that are no range: a damaged plan may be opened on trust.
    """

    def shapes(spec: TensorSpec, profile: int) -> tuple[Shape, Shape, Shape]:
        fixed = tuple(size for size in spec.shape if isinstance(size, int))
        if len(fixed) == len(spec.shape):
            return fixed, fixed, fixed
        sizes = [tuple(s) for s in engine.get_tensor_profile_shape(spec.name, profile)]
        ranks = {len(spec.shape), *map(len, sizes)}
        if len(sizes) != 3 or len(ranks) > 1 or not all(map(_rises, *sizes)):
            raise BadInput(
                f"{path}: input '{spec.name}' has no range of sizes in optimisation profile "
                f"{profile}: {', '.join(map(str, sizes))}",
                hint="build the engine again",
            )
        low, best, high = sizes
        return low, best, high

    count = engine.num_optimization_profiles
    if not count:
        raise BadInput(f"{path}: has no optimisation profile", hint="build the engine again")
    return tuple({spec.name: shapes(spec, number) for spec in inputs} for number in range(count))


def _rises(low: int, best: int, high: int) -> bool:
    return 0 <= low <= best <= high


def max_batch(profiles: Sequence[Ranges], inputs: Sequence[TensorSpec]) -> int | None:
    batched = [spec.name for spec in inputs if spec.batched]
    if not batched:
        return None
    return max(min(ranges[name][2][0] for name in batched) for ranges in profiles)


def axis_limits(
    profiles: Sequence[Ranges], inputs: Sequence[TensorSpec]
) -> dict[str, tuple[int, int]]:
    """Smallest and largest size of each dynamic axis in the first optimisation profile."""
    return {
        axis: (low, high)
        for spec in inputs
        for axis, low, high in zip(
            spec.shape, profiles[0][spec.name][0], profiles[0][spec.name][2], strict=True
        )
        if isinstance(axis, str)
    }


def choose_shapes(profiles: Sequence[Ranges], shapes: Mapping[str, Shape]) -> int | None:
    """The profile that accepts `shapes`; of several, the one tuned for the nearest sizes."""
    fitting = [
        (sum(_distance(shape, ranges[name][1]) for name, shape in shapes.items()), number)
        for number, ranges in enumerate(profiles)
        if all(_within(shape, ranges[name]) for name, shape in shapes.items())
    ]
    return min(fitting)[1] if fitting else None


def _distance(shape: Shape, best: Shape) -> int:
    return sum(abs(n - b) for n, b in zip(shape, best, strict=True))


def _within(shape: Shape, span: tuple[Shape, Shape, Shape]) -> bool:
    low, _, high = span
    return len(shape) == len(low) and all(
        a <= n <= b for a, n, b in zip(low, shape, high, strict=True)
    )


def describe_mismatch(
    profiles: Sequence[Ranges], inputs: Sequence[TensorSpec], feeds: Arrays
) -> str:
    """Which axis is out of the range that the engine was built for."""
    for spec in inputs:
        for axis, size in enumerate(feeds[spec.name].shape):
            spans = [(p[spec.name][0][axis], p[spec.name][2][axis]) for p in profiles]
            if not any(low <= size <= high for low, high in spans):
                allowed = " or ".join(f"{low} to {high}" for low, high in dict.fromkeys(spans))
                return (
                    f"input '{spec.name}': axis {spec.shape[axis]} is {size}, built for {allowed}"
                )
    return "the sizes fit none of the engine's optimisation profiles together"
