"""Run torch's two ONNX exporters: the current one (`dynamo`) and the older one (`torchscript`).

The graph stays in memory, in onnxscript's form, and its weights still are the module's own tensors:
nothing is copied. Neither exporter writes a line to the terminal.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from deploykit.core.extras import require
from deploykit.core.tensors import TensorSpec, concrete
from deploykit.engines.data.examples import Example
from deploykit.engines.torch.advice import is_users, is_written_for_tracing, source_place
from deploykit.engines.torch.files import quiet
from deploykit.exporting.operators import recurrent_layers_whole, translations
from deploykit.exporting.reasons import CallWatch, Decision, SizeWatch, baked, explain

torch: ModuleType = require("torch")
transformer: Any = require("torch.nn.modules.transformer")
onnxscript: ModuleType = require("onnxscript")
optimizer: ModuleType = require("onnxscript.optimizer")
# private: where another version of onnxscript has none, its own rule for constants stays
matcher: Any = sys.modules.get("onnxscript.rewriter._matcher", SimpleNamespace())

# The sizes are distinct, so that a constant in the graph shows its axis; none is 0 or 1, which
# torch.export takes for constants.
_SMALL, _LARGE, _STEP = 2, 64, 32
_FOLDED_ELEMENTS = 1 << 24  # torch folds to 8192 only, and leaves an LSTM's weights in slices

_GRAPH = onnxscript.ir.AttributeType.GRAPH
_SCRIPTED = (torch.jit.ScriptModule, torch.jit.ScriptFunction)
_FROZEN = "might cause the trace to be incorrect"  # part of a warning of the older exporter

# The user's own code, run by torch, may raise these besides torch's errors.
_RAISED = (
    *(RuntimeError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError),
    *(AssertionError, ImportError, OSError),
)


def example_sizes(
    inputs: Sequence[TensorSpec], sizes: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return a size for every dynamic axis; `sizes` goes first.

    Axes of images and signals (the third or later of an input) get 64, 96, ...: several times
    halved they must still hold a kernel. The others get 2, 3, ...
    """
    given = dict(sizes or {})
    axes = sorted({axis for spec in inputs for axis in spec.shape if isinstance(axis, str)})
    long = {axis for spec in inputs for axis in spec.shape[2:] if isinstance(axis, str)}
    taken = {size for spec in inputs for size in spec.shape if isinstance(size, int)}
    taken |= set(given.values())
    found: dict[str, int] = {}
    for axis in axes:
        size, step = (_LARGE, _STEP) if axis in long else (_SMALL, 1)
        while size in taken:
            size += step
        found[axis] = given.get(axis, size)
        taken.add(found[axis])
    return found


@dataclass(frozen=True)
class ExportJob:
    """A module to export.

    `sizes`: those of its dynamic axes in the example; they may grow. `given`: the user's example.
    `cut`: the lines of the user's code that fixed or cut an axis in the last export.
    """

    module: Any
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    opset: int
    sizes: dict[str, int]
    given: Example = field(default_factory=Example)
    cut: list[str] = field(default_factory=list)

    @property
    def names(self) -> dict[str, list[str]]:
        """Names of inputs and outputs, as torch.onnx.export takes them."""
        return {
            "input_names": [spec.name for spec in self.inputs],
            "output_names": [spec.name for spec in self.outputs],
        }

    def example(self) -> tuple[Any, ...]:
        """Return the user's values, else zeros, valid ids of any vocabulary; masks are ones."""
        if self.given.arrays:
            feeds = self.given.feeds(self.inputs, self.sizes, floats=True)
            return tuple(
                torch.tensor(feeds[spec.name], dtype=getattr(torch, spec.dtype))
                for spec in self.inputs
            )
        return tuple(
            (torch.ones if spec.dtype == "bool" or "mask" in spec.name.lower() else torch.zeros)(
                concrete(spec, self.sizes), dtype=getattr(torch, spec.dtype)
            )
            for spec in self.inputs
        )

    def dynamic_shapes(self, *, named: bool = True) -> tuple[Any, ...]:
        """Return one Dim for each name, so that inputs share their axes; else torch's own names."""
        dims: dict[str, Any] = {}
        free = torch.export.Dim.DYNAMIC
        shapes = tuple(
            {
                at: dims.setdefault(axis, torch.export.Dim(axis)) if named else free
                for at, axis in enumerate(spec.shape)
                if isinstance(axis, str)
            }
            for spec in self.inputs
        )
        kinds = [p.kind for p in inspect.signature(self.module.forward).parameters.values()]
        return (shapes,) if kinds[:1] == [inspect.Parameter.VAR_POSITIONAL] else shapes


def by_dynamo(job: ExportJob, *, named: bool = True) -> tuple[Any, tuple[Decision, ...]]:
    """Run torch's current exporter; return the graph and the sizes that the model branched on.

    Where the axes are not `named`, torch goes on to its stricter way of tracing if the first one
    makes a size a constant, as `len(x)` does. Raises NotExported.
    """
    example, shapes = job.example(), job.dynamic_shapes(named=named)
    with _exporting(), recurrent_layers_whole(), SizeWatch() as watch:
        try:
            program = torch.onnx.export(
                job.module,
                example,
                dynamo=True,
                dynamic_shapes=shapes,
                opset_version=job.opset,
                custom_translation_table=translations(),
                verbose=False,
                **job.names,
            )
            graph = program.model
            # torch silently makes an axis a constant, or ties it to another, where the model works
            # at no other size
            axes: dict[str, str] = {}  # of torch's names, where these are not ours
            for value, spec in zip(graph.graph.inputs, job.inputs, strict=True):
                for at, (axis, dim) in enumerate(zip(spec.shape, value.shape, strict=True)):
                    size = dim if isinstance(dim, int) else str(dim.value)
                    own = str(size) if named else axes.setdefault(str(size), str(axis))
                    if isinstance(axis, str) and (own != axis or isinstance(size, int)):
                        raise baked(spec, at, size, watch.place(job.sizes[axis]))
            return _simplify(graph), watch.decisions(job.sizes)
        except (torch.onnx.OnnxExporterError, *_RAISED) as exc:
            raise explain(exc, job.inputs, job.sizes) from exc
        finally:
            job.cut[:] = filter(None, map(watch.place, job.sizes.values()))


def by_torchscript(job: ExportJob, folder: Path) -> tuple[Any, tuple[Decision, ...]]:
    """Run torch's older exporter; return the graph and the lines whose branch it froze.

    `folder`: where its file and, past 2 GiB, one file for each weight may lie as long as the graph
    is used. Raises NotExported.
    """
    axes = {
        spec.name: {at: axis for at, axis in enumerate(spec.shape) if isinstance(axis, str)}
        for spec in (*job.inputs, *job.outputs)
    }
    file = Path(tempfile.mkdtemp(dir=folder)) / "model.onnx"
    with _exporting() as warned, _no_output():
        try:
            module, example = job.module, job.example()
            if is_scripted(module) and not isinstance(module, _SCRIPTED):
                module = torch.jit.trace(module, example, check_trace=False)  # keeps inner scripts
            torch.onnx.export(
                module,
                example,
                str(file),
                dynamo=False,
                dynamic_axes=axes,
                opset_version=job.opset,
                verbose=False,
                **job.names,
            )
            graph = _simplify(onnxscript.ir.load(file))
        except (torch.onnx.OnnxExporterError, *_RAISED) as exc:
            raise explain(exc, job.inputs, job.sizes) from exc
    frozen = [
        Decision("", source_place(item.filename, item.lineno))
        for item in warned
        if issubclass(item.category, torch.jit.TracerWarning)
        and _FROZEN in str(item.message)
        and is_users(item.filename)
        and not is_written_for_tracing(item.filename)
    ]
    return graph, tuple(dict.fromkeys(frozen))


def is_scripted(module: Any) -> bool:
    """Return whether `module` is TorchScript, or a wrapper of some."""
    while module is not None:
        if isinstance(module, _SCRIPTED):
            return True
        module = getattr(module, "module", None)
    return False


def _simplify(graph: Any) -> Any:
    # torch writes the sizes of the first round into and after a loop, and the optimizer would keep
    # them: a tensor that grows, as Mask R-CNN's masks do, would have one row
    for node in graph.graph.all_nodes():
        if node.op_type in ("Loop", "Scan"):
            bodies = [x.as_graph() for x in node.attributes.values() if x.type == _GRAPH]
            inner = [value for each in bodies for at in each.all_nodes() for value in at.outputs]
            ends = [value for each in bodies for value in (*each.inputs, *each.outputs)]
            for value in (*node.outputs, *inner, *ends):
                if value.shape is not None:
                    value.shape = onnxscript.ir.Shape([None] * len(value.shape))
    return optimizer.optimize(graph, input_size_limit=_FOLDED_ELEMENTS)


def watch_calls(job: ExportJob) -> CallWatch:
    """Run the module, and return which line of the user's code called which operator."""
    watch = CallWatch(job.module)
    example = job.example()
    with _exporting(), contextlib.suppress(*_RAISED), watch.of(example):
        job.module(*example)
        watch.ended = True
    return watch


@contextlib.contextmanager
def _exporting() -> Iterator[list[warnings.WarningMessage]]:
    """Set torch up for export, keep it off the user's terminal, and yield its warnings."""
    # transformer layers look at a mask's values to choose a kernel, for which "no" is always right;
    # their fast path is one operator that ONNX does not have
    detect = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = lambda _, is_causal=None, _size=None: is_causal is True
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    # the optimizer takes 1e-8 for 0 and removes it: x / (norm + 1e-8) would be NaN where x is 0
    matcher.math = SimpleNamespace(isclose=lambda value, constant, **_: value == constant)
    silent = io.StringIO()
    try:
        with (
            torch.no_grad(),
            warnings.catch_warnings(record=True) as warned,
            contextlib.redirect_stdout(silent),
            contextlib.redirect_stderr(silent),
            quiet("torch", "onnxscript", "onnx_ir"),
        ):
            warnings.simplefilter("always")
            yield warned
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        transformer._detect_is_causal_mask = detect
        matcher.math = math


@contextlib.contextmanager
def _no_output() -> Iterator[None]:
    """Silence standard output for C++ too: a failing older exporter writes the graph there."""
    sys.stdout.flush()
    kept = os.dup(1)
    with Path(os.devnull).open("wb") as sink:
        os.dup2(sink.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
