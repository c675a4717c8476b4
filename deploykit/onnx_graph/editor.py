"""Turn a graph into another one without copying its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from deploykit.onnx_graph import storage
from deploykit.onnx_graph.graph import Graph
from deploykit.onnx_graph.skeleton import all_nodes, read_names


class Editor:
    """A graph while it is rewritten: functions inlined, every node named.

    `graph`: its nodes, which may be changed at will. `constants`: the tensors that no caller can
    feed, by name. Those of the source are shared with it and must not be changed: a changed one
    gets a new name.
    """

    def __init__(self, source: Graph) -> None:
        self.path = source.path
        self.model = onnx.ModelProto()
        self.model.CopyFrom(source.skeleton)
        self.graph = self.model.graph
        self.inputs = {value.name for value in source.model.graph.input}
        stored = source.initializers
        self.constants = {name: t for name, t in stored.items() if name not in self.inputs}
        self._defaults = [t for name, t in stored.items() if name in self.inputs]
        nodes = list(all_nodes(self.graph))
        self._taken = self.inputs | set(self.constants)
        self._taken.update(name for node in nodes for name in (*node.input, *node.output))
        self._named = {node.name for node in nodes}

    def array(self, name: str) -> np.ndarray:
        """The values of a constant; read only."""
        return storage.tensor_array(self.constants[name], self.path.parent)

    def store(self, name: str, values: np.ndarray | np.generic) -> str:
        """Add a constant under `name`, or one like it that is free; returns the name."""
        name = self.fresh(name)
        self.constants[name] = numpy_helper.from_array(np.asarray(values), name)
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

    def finish(self, nodes: Sequence[onnx.NodeProto]) -> Graph:
        """The graph of `nodes` and of the constants that they read. The editor is spent."""
        graph = self.graph
        replace(graph.node, list(nodes))
        replace(graph.input, [value for value in graph.input if value.name in self.inputs])
        made = {name for node in graph.node for name in node.output}
        replace(graph.value_info, [value for value in graph.value_info if value.name in made])
        used = {value.name for value in graph.output} | set(read_names(graph))
        del graph.initializer[:]
        graph.initializer.extend(self._defaults)
        for name in list(self.constants):  # one by one: protobuf copies, and frees what was copied
            tensor = self.constants.pop(name)
            if name in used:
                graph.initializer.add().CopyFrom(tensor)
        return Graph(self.model, self.path)


def replace(field: Any, values: list[Any]) -> None:
    """Let a repeated field of protobuf hold `values`."""
    del field[:]
    field.extend(values)
