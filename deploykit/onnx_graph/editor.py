"""A graph on its way to another precision, its weights held once.

In: a model. Out: a `Draft`, whose nodes may be changed at will and whose weights are still the
source's own; `finish` copies those that are read into the new model. Python's protobuf frees
nothing before the whole message goes, so weights are put into a model once or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx.inliner
from onnx import TensorProto, helper, numpy_helper

from deploykit.onnx_graph.graph import name_nodes
from deploykit.onnx_graph.skeleton import light_model, read_names
from deploykit.onnx_graph.validate import all_nodes


class Draft:
    """A model on its way to another one: functions inlined, every node named.

    `constants`: the tensors that no caller can feed, by name. Those of the source are shared with
    it and must not be changed; a changed one gets a new name.
    """

    def __init__(self, source: onnx.ModelProto) -> None:
        model = light_model(source)
        if model.functions:
            model = onnx.inliner.inline_local_functions(model)
        name_nodes(model)
        self.model = model
        self.graph = model.graph
        self.inputs = {value.name for value in source.graph.input}
        stored = source.graph.initializer
        self.constants = {t.name: t for t in stored if t.name not in self.inputs}
        self._defaults = [t for t in stored if t.name in self.inputs]
        nodes = list(all_nodes(self.graph))
        self._taken = self.inputs | set(self.constants)
        self._taken.update(name for node in nodes for name in (*node.input, *node.output))
        self._named = {node.name for node in nodes}

    def array(self, name: str) -> np.ndarray:
        """The values of a constant; read only."""
        return numpy_helper.to_array(self.constants[name])

    def store(self, name: str, values: np.ndarray | np.generic) -> str:
        """Add a constant under `name`, or one like it that is free; returns the name."""
        values = np.asarray(values)
        kind = helper.np_dtype_to_tensor_dtype(values.dtype)
        return self.store_bytes(name, kind, values.shape, values.tobytes())

    def store_bytes(self, name: str, kind: int, dims: Sequence[int], data: bytes) -> str:
        """As `store`, for element types that numpy lacks."""
        name = self.fresh(name)
        self.constants[name] = TensorProto(name=name, data_type=kind, dims=dims, raw_data=data)
        return name

    def fresh(self, name: str) -> str:
        """A tensor name that nothing has."""
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name

    def node(
        self, kind: str, inputs: Sequence[str], output: str, **attributes: Any
    ) -> onnx.NodeProto:
        """A new node of one output; attributes that are None are left out."""
        name = f"{kind}_{output}"
        while name in self._named:
            name += "_"
        self._named.add(name)
        return helper.make_node(kind, inputs, [output], name=name, **attributes)

    def finish(self, nodes: Sequence[onnx.NodeProto]) -> onnx.ModelProto:
        """The model of `nodes` and of the constants that they read. The draft is spent."""
        graph = self.graph
        replace(graph.node, list(nodes))
        replace(graph.input, [value for value in graph.input if value.name in self.inputs])
        made = {name for node in graph.node for name in node.output}
        replace(graph.value_info, [value for value in graph.value_info if value.name in made])
        used = {value.name for value in graph.output} | set(read_names(graph))
        del graph.initializer[:]
        graph.initializer.extend(self._defaults)
        for name in list(self.constants):  # one by one: what was made here is held once
            tensor = self.constants.pop(name)
            if name in used:
                graph.initializer.add().CopyFrom(tensor)
        return self.model


def replace(field: Any, values: list[Any]) -> None:
    """Let a repeated field of protobuf hold `values`."""
    del field[:]
    field.extend(values)
