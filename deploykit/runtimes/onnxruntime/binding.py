"""Call an ONNX Runtime session through buffers that stay on its device.

`session.run` allocates on the GPU in every call; here each shape keeps its input buffers, and with
a CUDA graph its outputs too. The module is passed in, so that tests can bind a CPU session.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deploykit.core.errors import Unsupported
from deploykit.core.tensors import TensorSpec
from deploykit.runtimes.engine import Arrays

_MOST_SHAPES = 8  # of those without a graph; graphs are kept
_NO_GRAPH = -1  # ONNX Runtime's gpu_graph_id for a run that is not captured

Key = tuple[tuple[int, ...], ...]


class _Bound:
    """Input buffers of one shape; output buffers once a run has shown their shapes."""

    def __init__(self, io: Any, values: list[Any], graph: int | None) -> None:
        self.io, self.values, self.graph = io, values, graph
        self.outputs: list[Any] = []
        self.options: Any = None


class Binding:
    """One session's calls on `device`, such as ("cuda", 0).

    `graphs`: batch sizes to capture, for a session opened with `enable_cuda_graph`.
    """

    def __init__(
        self,
        ort: Any,
        session: Any,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        device: tuple[str, int],
        graphs: Sequence[int] = (),
    ) -> None:
        self._ort, self._session, self._device = ort, session, device
        self._inputs, self._outputs = inputs, outputs
        self._graphs = frozenset(graphs)
        self._batched = next((n for n, spec in enumerate(inputs) if spec.batched), None)
        self._bound: dict[Key, _Bound] = {}
        self._captured = 0
        self.last_copies_us = (0, 0)  # of the last call: to the device, and back

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        """Run once; `feeds` fit the inputs. ONNX Runtime's exceptions propagate."""
        key = tuple(feeds[spec.name].shape for spec in self._inputs)
        bound = self._bound.get(key) or self._bind(key)
        started_ns = time.perf_counter_ns()
        for spec, value in zip(self._inputs, bound.values, strict=True):
            value.update_inplace(np.ascontiguousarray(feeds[spec.name]))
        copied_ns = time.perf_counter_ns()
        self._session.run_with_iobinding(bound.io, bound.options)
        ran_ns = time.perf_counter_ns()
        values = bound.outputs or bound.io.get_outputs()
        answers = {
            spec.name: value.numpy() for spec, value in zip(self._outputs, values, strict=True)
        }
        ended_ns = time.perf_counter_ns()
        self.last_copies_us = ((copied_ns - started_ns) // 1000, (ended_ns - ran_ns) // 1000)
        if bound.graph is not None and not bound.outputs:
            self._keep_outputs(bound, answers)
        return answers

    def close(self) -> None:
        self._bound.clear()
        self._session = None

    def _bind(self, key: Key) -> _Bound:
        plain = [shapes for shapes, bound in self._bound.items() if bound.graph is None]
        if len(plain) >= _MOST_SHAPES:
            del self._bound[plain[0]]
        io = self._session.io_binding()
        values = []
        for spec, shape in zip(self._inputs, key, strict=True):
            values.append(self._value(shape, spec.dtype))
            io.bind_ortvalue_input(spec.name, values[-1])
        for spec in self._outputs:
            io.bind_output(spec.name, *self._device)
        bound = self._bound[key] = _Bound(io, values, self._graph(key))
        if self._graphs:  # a shape's first run shows its output shapes, and is not captured
            bound.options = self._run_options(_NO_GRAPH)
        return bound

    def _graph(self, key: Key) -> int | None:
        """A number for the graph of this shape, or None for no graph."""
        fixed = self._batched is None
        if not self._graphs or not (fixed or key[self._batched or 0][0] in self._graphs):
            return None
        self._captured += 1
        return self._captured

    def _keep_outputs(self, bound: _Bound, answers: Mapping[str, np.ndarray]) -> None:
        """Bind the outputs to fixed memory: a captured graph always writes there."""
        for spec in self._outputs:
            value = self._value(answers[spec.name].shape, spec.dtype)
            bound.io.bind_ortvalue_output(spec.name, value)
            bound.outputs.append(value)
        bound.options = self._run_options(bound.graph or 0)

    def _value(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self._ort.OrtValue.ortvalue_from_shape_and_type(
            list(shape), np.dtype(dtype).type, *self._device
        )

    def _run_options(self, graph: int) -> Any:
        options = self._ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(graph))
        return options


def placement(session: Any) -> dict[str, list[str]] | None:
    """Operators by the provider that runs them; None where this ONNX Runtime cannot report them.

    The session was opened with `session.record_ep_graph_assignment_info`, which came with 1.24.
    """
    read = getattr(session, "get_provider_graph_assignment_info", None)
    if read is None:
        return None
    found: dict[str, list[str]] = {}
    for part in read():
        found.setdefault(part.ep_name, []).extend(node.op_type for node in part.get_nodes())
    return found


def check_placement(path: Path, session: Any, version: str) -> tuple[str, ...]:
    """A note on nodes that run on the CPU, or that this is unknown.

    Raises Unsupported when all of them do.
    """
    placed = placement(session)
    if placed is None:
        return (f"{path}: onnxruntime {version} does not report which nodes run on the CPU",)
    if placed and set(placed) == {"CPUExecutionProvider"}:
        raise Unsupported(f"{path}: `device` is cuda, but every node runs on the CPU")
    note = placement_note(placed)
    return (f"{path}: {note}",) if note else ()


def placement_note(placed: Mapping[str, Sequence[str]]) -> str | None:
    """Which nodes run on the CPU in a CUDA session; None if none does."""
    kept = placed.get("CPUExecutionProvider", ())
    if not kept:
        return None
    total = sum(map(len, placed.values()))
    kinds = sorted(set(kept))
    more = f" and {len(kinds) - 6} kinds more" if len(kinds) > 6 else ""
    return (
        f"{len(kept)} of {total} nodes run on the CPU, with copies between: "
        f"{', '.join(kinds[:6])}{more}"
    )
