"""Read a parsed network: its inputs, element types and memory need; add its size ranges."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.builders.tensorrt.memory import activation_bytes, weight_bytes
from deploykit.builders.tensorrt.module import maybe
from deploykit.builders.tensorrt.shapes import AxisRange, ShapeRange
from deploykit.core.errors import Unsupported
from deploykit.core.memory import BuildMemory
from deploykit.core.precision import ALL, Precision
from deploykit.core.tensors import TensorSpec
from deploykit.onnx_graph.graph import Graph

if TYPE_CHECKING:
    import tensorrt as trt

_BY_TYPE: Mapping[str, Precision] = {each.tensorrt_type: each for each in ALL if each.tensorrt_type}


def inputs_of(network: trt.INetworkDefinition, model: Path) -> list[TensorSpec]:
    """The network's inputs, dynamic axes by the names that the graph has for them.

    Raises Unsupported for an input whose values set a shape: that needs ranges of values.
    """
    named = {each.name: each.shape for each in Graph.open(model).inputs}
    found: list[TensorSpec] = []
    for number in range(network.num_inputs):
        tensor = network.get_input(number)
        if tensor.is_shape_tensor:
            raise Unsupported(
                f"{model}: input '{tensor.name}' determines a shape inside the graph by its values",
                hint="export the model again with that value as a constant",
            )
        kind = tensor.dtype.name
        dtype = _BY_TYPE[kind].dtype if kind in _BY_TYPE else kind.lower()
        axes = zip(_shape(tensor), named[tensor.name], strict=False)  # () for an unknown rank
        shape = tuple(size if size >= 0 else name for size, name in axes)
        found.append(TensorSpec(tensor.name, dtype, shape))
    return found


def element_types(network: trt.INetworkDefinition) -> set[str]:
    """Names of the TensorRT DataTypes of all tensors, such as {"FLOAT", "HALF"}."""
    inputs = (network.get_input(number) for number in range(network.num_inputs))
    return {tensor.dtype.name for tensor in (*inputs, *_tensors(network))}


def precision_flags(dtypes: Iterable[str]) -> tuple[str, ...]:
    """Names of the builder flags that a weakly typed network of these element types needs."""
    present = set(dtypes)
    needed = (each for kind, each in _BY_TYPE.items() if kind in present)
    return tuple(each.builder_flag for each in needed if each.builder_flag)


def memory_need(
    network: trt.INetworkDefinition,
    model: Path,
    workspace_bytes: int,
    batch: AxisRange,
    axes: Mapping[str, AxisRange],
    shared: bool = False,
) -> BuildMemory:
    """A lower bound of the memory, at the largest sizes of the build."""
    others = max((axis.maximum for axis in axes.values()), default=1)
    shapes = (_shape(tensor) for tensor in _tensors(network))
    activations = activation_bytes(shapes, batch.maximum, others)
    return BuildMemory(weight_bytes(model), workspace_bytes, activations, shared)


def pin_linear(nv: Any, network: trt.INetworkDefinition) -> None:
    """Inputs and outputs in row-major order, as our buffers are; TensorRT may choose another."""
    linear = 1 << int(nv.TensorFormat.LINEAR)
    tensors = [network.get_input(number) for number in range(network.num_inputs)]
    tensors += [network.get_output(number) for number in range(network.num_outputs)]
    with contextlib.suppress(NotImplementedError):  # of TensorRT's bindings on the library of RTX
        for tensor in tensors:
            tensor.allowed_formats = linear


def add_profile(
    builder: trt.Builder,
    config: trt.IBuilderConfig,
    inputs: Sequence[TensorSpec],
    sizes: Mapping[str, ShapeRange],
) -> None:
    """Add an optimisation profile with the sizes of the inputs that have a dynamic axis."""
    dynamic = [given for given in inputs if any(isinstance(axis, str) for axis in given.shape)]
    if not dynamic:
        return
    profile = builder.create_optimization_profile()
    for given in dynamic:
        profile.set_shape(given.name, *sizes[given.name])
    config.add_optimization_profile(profile)  # a refused one fails the build, with a reason


def _tensors(network: trt.INetworkDefinition) -> Iterator[trt.ITensor]:
    """Outputs of every layer; TensorRT gives None for an unused one."""
    for number in range(network.num_layers):
        layer = network.get_layer(number)
        for place in range(layer.num_outputs):
            tensor = maybe(layer.get_output(place))
            if tensor is not None:
                yield tensor


def _shape(tensor: trt.ITensor) -> tuple[int, ...]:
    """-1 where dynamic; empty for a tensor of unknown rank."""
    try:
        return tuple(int(size) for size in tensor.shape)
    except ValueError:  # the bindings raise it for a rank of -1
        return ()
