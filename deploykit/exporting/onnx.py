"""Export a torch module to ONNX: torch's current exporter first, the older one where that fails.

The tensors are named as the specs say and dynamic axes are dynamic; `Exported` says which exporter
wrote the file and why. A graph that would silently be wrong is refused: one that keeps a single
branch of an `if` on the data, or a single size of a dynamic axis. The graph stays in memory, its
weights are the module's own tensors, and no exporter writes a line to the terminal.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import math
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from deploykit.core.errors import BadInput, GateFailed, Unsupported
from deploykit.core.extras import require
from deploykit.core.tensors import TensorSpec, concrete
from deploykit.engines.data.examples import Example
from deploykit.engines.torch.files import (
    is_users,
    is_written_for_tracing,
    quiet,
    rewrite_for,
    source_place,
)
from deploykit.engines.torch.loaded import Loaded
from deploykit.exporting.operators import recurrent_layers_whole, translations
from deploykit.exporting.reasons import (
    BY_DATA,
    BY_DATA_HINT,
    CAPTURED,
    DECIDES,
    FINAL,
    FIXED,
    FREE_HINT,
    CallWatch,
    Decision,
    NotExported,
    SizeWatch,
    baked,
    check_layers,
    explain,
    hint_for,
)

ir: ModuleType = require("onnxscript.ir")
common: ModuleType = require("onnxscript.ir.passes.common")
optimizer: ModuleType = require("onnxscript.optimizer")
torch: ModuleType = require("torch")
transformer: Any = require("torch.nn.modules.transformer")
# private: where another version of onnxscript has none, its own rule for constants stays
matcher: Any = sys.modules.get("onnxscript.rewriter._matcher", SimpleNamespace())

# The sizes are distinct, so that a constant in the graph shows its axis; none is 0 or 1, which
# torch.export takes for constants.
_SMALL, _LARGE, _STEP = 2, 64, 32
_FOLDED_ELEMENTS = 1 << 24  # torch folds to 8192 only, and leaves an LSTM's weights in slices

_ALONE = threading.RLock()  # what an export changes in torch and Python all threads see
_GRAPH = ir.AttributeType.GRAPH
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
        free = itertools.count(_LARGE, _STEP) if axis in long else itertools.count(_SMALL)
        found[axis] = given.get(axis) or next(size for size in free if size not in taken)
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

    def run(self, module: Any, *arguments: Any, **options: Any) -> Any:
        """Call torch.onnx.export with the names of inputs and outputs, and the opset."""
        return torch.onnx.export(
            module,
            *arguments,
            input_names=[spec.name for spec in self.inputs],
            output_names=[spec.name for spec in self.outputs],
            opset_version=self.opset,
            verbose=False,
            **options,
        )

    def example(self) -> tuple[Any, ...]:
        """Return the user's values, else zeros, valid ids of any vocabulary; masks are ones."""
        if self.given.arrays:
            feeds = self.given.feeds(self.inputs, self.sizes, floats=True)
        else:
            ones = {x.name for x in self.inputs if x.dtype == "bool" or "mask" in x.name.lower()}
            feeds = {x.name: np.full(concrete(x, self.sizes), x.name in ones) for x in self.inputs}
        return tuple(
            torch.tensor(feeds[x.name], dtype=getattr(torch, x.dtype)) for x in self.inputs
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
    with _ALONE, _exporting(), recurrent_layers_whole(), SizeWatch() as watch:
        try:
            options = {"dynamic_shapes": shapes, "custom_translation_table": translations()}
            graph = job.run(job.module, example, dynamo=True, **options).model
            # torch silently makes an axis a constant, or ties it to another, where the model works
            # at no other size
            axes: dict[str, str] = {}  # of torch's names, where these are not ours
            for value, spec in zip(graph.graph.inputs, job.inputs, strict=True):
                for at, (axis, dim) in enumerate(zip(spec.shape, value.shape, strict=True)):
                    size = dim if isinstance(dim, int) else str(dim.value)
                    own = str(size) if named else axes.setdefault(str(size), str(axis))
                    if isinstance(axis, str) and (own != axis or isinstance(size, int)):
                        raise baked(spec, at, size, watch.place(job.sizes[axis]))
            return _fold(graph), watch.decisions(job.sizes)
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
    with _ALONE, _exporting() as warned, _no_output():
        try:
            module, example = job.module, job.example()
            if is_scripted(module) and not isinstance(module, _SCRIPTED):
                module = torch.jit.trace(module, example, check_trace=False)  # keeps inner scripts
            job.run(module, example, str(file), dynamo=False, dynamic_axes=axes)
            graph = _fold(ir.load(file))
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


def _fold(graph: Any) -> Any:
    # torch writes the sizes of the first round into and after a loop, and the optimizer would keep
    # them: a tensor that grows, as Mask R-CNN's masks do, would have one row
    for node in graph.graph.all_nodes():
        if node.op_type in ("Loop", "Scan"):
            bodies = [x.as_graph() for x in node.attributes.values() if x.type == _GRAPH]
            inner = [value for each in bodies for at in each.all_nodes() for value in at.outputs]
            ends = [value for each in bodies for value in (*each.inputs, *each.outputs)]
            for value in (*node.outputs, *inner, *ends):
                if value.shape is not None:
                    value.shape = ir.Shape([None] * len(value.shape))
    return optimizer.optimize(graph, input_size_limit=_FOLDED_ELEMENTS)


def watch_calls(job: ExportJob) -> CallWatch:
    """Run the module, and return which line of the user's code called which operator."""
    watch = CallWatch(job.module)
    example = job.example()
    with _ALONE, _exporting(), contextlib.suppress(*_RAISED), watch.of(example):
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
    try:
        with (
            torch.no_grad(),
            warnings.catch_warnings(record=True) as warned,
            contextlib.redirect_stdout(silent := io.StringIO()),
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


# torch's exporter transposes the key of `scaled_dot_product_attention` in three nodes, and with a
# boolean mask it looks for NaN in all weights, though the masks that it writes are finite. On a CPU
# these steps, which change no value, cost a transformer up to a quarter of its time:
# benchmarks/README.md.

_LARGEST = float(np.finfo(np.float32).max)


def simplify(model: Any) -> None:
    """Remove attention steps that change no value, in place; results stay the same to the bit.

    log(sigmoid(x)) is written so that it stays finite. Masks of Attention nodes that are broadcast
    along queries or keys are expanded. Scores that are NaN, through a NaN in an input, now give
    NaN, as in PyTorch, in place of 0.
    """
    changed = False
    for node in list(model.graph):
        if node.op_type == "Attention" and node.domain == "":
            _expand_mask(node)
        elif node.op_type == "SequenceMap":  # gives a list, typed like one of its elements
            node.outputs[0].type = node.outputs[0].shape = None
        elif node.op_type == "Where":
            changed |= _drop_guard(node)
        elif node.op_type == "Reshape":
            changed |= _transpose_once(node)
        elif (made := _maker(node.inputs[0] if node.inputs else None, "Sigmoid")) and (
            node.op_type == "Log" and node.domain == ""
        ):  # ONNX Runtime's Sigmoid is 0 from -18 on; this is -log(1 + exp(-x))
            changed = True
            minus = ir.node("Neg", [made.inputs[0]])
            soft = ir.node("Softplus", [minus.outputs[0]])
            last = ir.node("Neg", [soft.outputs[0]], name=node.name)
            ir.convenience.replace_nodes_and_values(
                node.graph, node, [node], [minus, soft, last], node.outputs, last.outputs
            )
    if changed:
        common.RemoveUnusedNodesPass()(model)


def _drop_guard(node: Any) -> bool:
    """Let what reads Where(IsNaN(p), 0, p), p = Softmax(scores + finite mask), read p."""
    test, zero, kept = node.inputs
    softmax, found = _maker(kept, "Softmax"), _maker(test, "IsNaN")
    made = node.outputs[0]
    if softmax is None or found is None or found.inputs[0] is not kept or made.is_graph_output():
        return False
    added = _maker(softmax.inputs[0], "Add")
    if added is None or _held(zero) != (0.0, 0.0):
        return False
    scores, mask = added.inputs
    where = _maker(mask, "Where")
    held = [_held(each) for each in (where.inputs[1:] if where is not None else (mask,))]
    if _maker(scores, "MatMul") is None or not all(
        each is not None and max(map(abs, each)) <= _LARGEST for each in held
    ):
        return False
    ir.convenience.replace_all_uses_with(made, kept)
    return True


def _transpose_once(node: Any) -> bool:
    """Replace Reshape, Transpose, Reshape that swap the last two axes by one Transpose."""
    turn = _maker(node.inputs[0], "Transpose")
    merge = _maker(turn.inputs[0], "Reshape") if turn is not None else None
    if merge is None or list(turn.attributes["perm"].as_ints()) != [0, 2, 1]:
        return False
    key, made = merge.inputs[0], node.outputs[0]
    before, between, after = map(_axes, (key, merge.outputs[0], made))
    rank = len(before)
    swapped = [*before[:-2], *before[:-3:-1]]
    if rank < 3 or None in before or between[1:] != before[-2:] or after != swapped:
        return False
    perm = [*range(rank - 2), rank - 1, rank - 2]
    once = ir.node("Transpose", [key], {"perm": perm}, name=node.name)
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], [once], [made], once.outputs)
    return True


def _expand_mask(node: Any) -> None:
    """Expand the mask of an Attention along queries and keys: ONNX Runtime does not broadcast."""
    names = [*node.inputs, None, None, None]
    mask, past = names[3], names[4]
    if mask is None or mask.shape is None or any(len(_axes(x)) != 4 for x in names[:2]):
        return
    queries, keys = _axes(names[0])[2], _axes(names[1])[2]
    own = [1, 1, *_axes(mask)][-2:]
    narrow = own[1] == 1 and keys != 1 and past is None
    if own[0] is not None and own[0] == queries and len(mask.shape) > 1 and not narrow:
        return
    sizes = [ir.node("Shape", [names[0]], {"start": 2, "end": 3})]
    if narrow:
        sizes.append(ir.node("Shape", [names[1]], {"start": 2, "end": 3}))
    else:
        one = ir.tensor(np.ones(1, np.int64))
        sizes.append(ir.node("Constant", [], {"value": one}))
    shape = ir.node("Concat", [each.outputs[0] for each in sizes], {"axis": 0})
    expand = ir.node("Expand", [mask, shape.outputs[0]])
    node.graph.insert_before(node, [*sizes, shape, expand])
    node.replace_input_with(3, expand.outputs[0])


def _axes(value: Any) -> list[int | str | None]:
    return [dim if isinstance(dim, int) else dim.value for dim in value.shape or ()]


def _maker(value: Any, kind: str) -> Any:
    """Return the node of operator `kind` that makes `value`; None for any other."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == kind and node.domain == "" else None


def _held(value: Any) -> tuple[float, float] | None:
    """Return the least and largest value of a float32 constant; None for others."""
    tensor = value.const_value if value is not None and not value.is_graph_input() else None
    if tensor is None or tensor.dtype != ir.DataType.FLOAT or not tensor.size:
        return None
    array = tensor.numpy()
    return float(array.min()), float(array.max())


# Notes on where a node came from are removed: they hold paths of the machine, and the same model
# must give the same bytes.

_ONNX_NAMES = {"float32": "FLOAT", "float64": "DOUBLE"}
_BY_DATA = ("NonMaxSuppression", "NonZero", "Unique", "Compress")  # the data give the size
_WRAPPER = "module."  # attribute of a wrapper that gives the user's module the signature we need


def finish(model: Any, job: ExportJob) -> None:
    """Name and clean `model` in place. Raises BadInput where it is not what the specs say."""
    doubtful = [  # torch writes the example's length into an LSTM's output, which takes any length
        value
        for node in model.graph.all_nodes()
        for value in node.outputs
        if value.shape is not None and any(dim in job.sizes.values() for dim in value.shape)
    ]
    for value in doubtful:
        value.shape = None
    if doubtful:
        common.ShapeInferencePass()(model)
    simplify(model)
    graph = model.graph
    names = {value.name for value in graph.inputs}
    if names < {spec.name for spec in job.inputs}:  # the older exporter leaves out unread ones
        for at, spec in enumerate(job.inputs):
            if spec.name not in names:
                kind = ir.DataType[_ONNX_NAMES.get(spec.dtype, spec.dtype.upper())]
                graph.inputs.insert(at, ir.Value(name=spec.name, type=ir.TensorType(kind)))
    _fit("inputs", graph.inputs, job.inputs)
    nodes = list(graph.all_nodes())
    _fit("outputs", graph.outputs, job.outputs, any(node.op_type in _BY_DATA for node in nodes))
    made = (value for node in nodes for value in node.outputs)
    given = (*graph.inputs, *graph.initializers.values())
    for part in (model, graph, *graph.subgraphs(), *nodes, *made, *given):
        part.metadata_props.clear()
        part.doc_string = None
    weights = job.module.named_parameters() if isinstance(job.module, torch.nn.Module) else ()
    parameters = [name for name, _ in weights]  # a TorchScript function has none
    while parameters and all(name.startswith(_WRAPPER) for name in parameters):
        parameters = [name.removeprefix(_WRAPPER) for name in parameters]
        for old in [name for name in graph.initializers if name.startswith(_WRAPPER)]:
            if (new := old.removeprefix(_WRAPPER)) not in graph.initializers:
                value = graph.initializers.pop(old)
                value.name = new
                graph.initializers[new] = value
    common.RemoveUnusedOpsetsPass()(model)


def _fit(
    what: str, values: Sequence[Any], specs: Sequence[TensorSpec], sized_by_data: bool = False
) -> None:
    """Give the graph's inputs or outputs the names and axes of `specs`.

    `sized_by_data`: an axis whose size torch does not know is free, though the trials had one size.
    """
    if len(values) != len(specs):
        raise BadInput(
            f"torch exported {len(values)} {what}, the model has {len(specs)}: "
            + ", ".join(spec.name for spec in specs)
        )
    for value, spec in zip(values, specs, strict=True):
        value.name = spec.name
        known = value.shape if value.shape is not None else ()  # torch may not have inferred it
        shape = list(spec.shape)
        for at, (dim, axis) in enumerate(zip(known, spec.shape, strict=False)):
            if isinstance(axis, str) and isinstance(dim, int):
                raise BadInput(
                    f"the exporter fixed axis {at} ({axis}) of {what[:-1]} '{spec.name}' at {dim}: "
                    "something in the model reads that size as a constant",
                    hint="export with a fixed size for that axis, or change the model",
                )
            if sized_by_data and isinstance(axis, int) and not isinstance(dim, int):
                shape[at] = f"{spec.name}_{at}"
        value.shape = ir.Shape(shape)


DEFAULT_OPSET = 20  # torch's exporter writes it by default; NVIDIA's parsers take it
OPSETS = range(18, 24)  # older ones torch's current exporter does not write
TORCHSCRIPT_OPSETS = range(18, 21)  # the older exporter stopped at 20
_WRONG_TYPE = "TypeInferenceError"  # onnx's name for a type that torch wrote: no size's fault
_BRANCH_HINT = (
    "torch.where computes both branches and torch.cond keeps both; else give the axis a fixed size "
    "in `inputs`"
)
MAX_BYTES = (1 << 31) - (1 << 25)  # protobuf's 2 GiB, less room for the graph itself


@dataclass(frozen=True)
class Exported:
    """The exporter that wrote the file, "dynamo" or "torchscript", and the file's opset.

    `fallback`: why it was not torch's current exporter; empty if it was. `decided`: lines of the
    user's code that branch on a size, whose branch the graph keeps, and for which sizes.
    """

    exporter: str
    opset: int
    fallback: str
    decided: tuple[Decision, ...]
    job: ExportJob


def export_module(
    loaded: Loaded,
    out: Path,
    *,
    opset: int = DEFAULT_OPSET,
    sizes: Mapping[str, int] | None = None,
    max_bytes: int = MAX_BYTES,
) -> Exported:
    """Write a module to `out`; past `max_bytes` of weights, these to OUT.data next to it.

    TorchScript goes through torch's older exporter; so does a module that the current one fails on,
    where the reason does not make the older one's graph wrong. `sizes`: the size to export at, by
    axis.

    Raises BadInput when torch cannot export the model, naming the reason and the line of the user's
    code that it comes from.
    """
    older = is_scripted(loaded.module)
    offered = TORCHSCRIPT_OPSETS if older else OPSETS
    if opset not in offered:
        which = " for TorchScript" if older else ""
        raise BadInput(
            f"opset {opset} is not offered{which}", hint=f"{offered[0]} to {offered[-1]}"
        )
    sizes = example_sizes(loaded.inputs, sizes)
    job = ExportJob(loaded.module, loaded.inputs, loaded.outputs, opset, sizes, loaded.example)
    decided: tuple[Decision, ...] = ()
    why = "the file is TorchScript" if older else ""
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".export-") as folder:
        if not older:
            try:
                model, decided = _keep_axes(job)
            except NotExported as first:
                if first.cause in (FINAL, FIXED):
                    raise _add_advice(first, job) from first.__cause__
                model, why = _fall_back(job, Path(folder), first), first.message
        else:
            model, decided = by_torchscript(job, Path(folder))
            if decided:
                why += f"; it keeps what the example decided at {', '.join(map(str, decided))}"
        try:
            finish(model, job)
        except BadInput as exc:
            add_cause(exc, job)
            raise
        graphs = (model.graph, *model.graph.subgraphs())
        values = [value.const_value for each in graphs for value in each.initializers.values()]
        stored = sum(value.nbytes for value in values if value is not None)
        data = f"{out.name}.data" if stored > max_bytes else None
        ir.save(model, out, external_data=data)
    written = model.opset_imports[""]
    if written > opset:
        raise BadInput(f"torch wrote opset {written}, {opset} was asked for")
    return Exported("torchscript" if why else "dynamo", written, why, decided, job)


def add_cause(
    error: BadInput | GateFailed | Unsupported, job: ExportJob, decided: tuple[Decision, ...] = ()
) -> None:
    """Name in `error` the lines by which the graph of `job` is wrong, and the rewrite."""
    watch = watch_calls(job)
    if isinstance(error, Unsupported):  # ONNX Runtime has no kernel for it
        kinds = {"float64", "bfloat16"} & watch.types
        if kinds:
            error.message = f"the model computes in {min(kinds)}, which ONNX Runtime's CPU cannot"
            error.hint = "export it in float32, `model.float()` and without torch.autocast"
            if "bfloat16" in kinds:
                error.hint += "; then quantize the graph to bf16"
        return
    if isinstance(error, GateFailed) and watch.add_to(error):
        return
    if watch.suspects:
        place, (what, hint) = next(iter(watch.suspects.items()))
        error.message += f"; torch's exporter writes {what} unlike PyTorch ({place})"
        error.hint = hint
        return
    if decided:
        error.message += f"; the graph keeps what was decided at {', '.join(map(str, decided))}"
        error.hint = _BRANCH_HINT
    elif job.cut and _WRONG_TYPE not in error.message and job.cut[0] not in error.message:
        error.message += f"; a size decides at {job.cut[0]}"
        error.hint = hint_for(job.cut[0], FREE_HINT)


def _keep_axes(job: ExportJob) -> tuple[Any, tuple[Decision, ...]]:
    """Run `by_dynamo`; where it fixes an axis, once more without names, and at larger sizes."""
    first: NotExported | None = None
    limits = job.given.most
    base, larger = (
        {axis: min(size, limits.get(axis, size)) for axis, size in sizes.items()}
        for sizes in (job.sizes, {axis: 2 * size + 1 for axis, size in job.sizes.items()})
    )
    for named, sizes in ((True, base), (False, base), (True, larger)):
        try:
            found = by_dynamo(replace(job, sizes=sizes), named=named)
            job.sizes.update(sizes)
            return found
        except NotExported as exc:
            first = first or exc
            if first.cause != FIXED:
                raise
    raise first or BadInput("no sizes to try")


def _fall_back(job: ExportJob, folder: Path, first: NotExported) -> Any:
    """Return the older exporter's graph; raises `first` where that fails as well."""
    if job.opset not in TORCHSCRIPT_OPSETS:
        raise _add_advice(first, job)
    if first.cause == BY_DATA:
        watch = watch_calls(job)
        if watch.reads_inputs:
            stopped = first.message.removesuffix(DECIDES)  # maybe at a size in a tensor
            if watch.reads and stopped in watch.fixed - set(watch.reads):
                first.message = f"{watch.reads[0]}{DECIDES}"
                first.hint = hint_for(watch.reads[0], BY_DATA_HINT)
            raise first
        first.message = first.message.replace(DECIDES, " decides by tensors that no input changes")
        first.hint = "keep them as Python numbers: .item() or .tolist() in __init__"
    try:
        model, frozen = by_torchscript(job, folder)
    except NotExported:
        raise _add_advice(first, job) from None
    if frozen and first.cause not in (CAPTURED, BY_DATA):
        what = _add_advice(first, job).message
        raise NotExported(
            f"{what}; and torch's older exporter would keep one branch at {frozen[0]}",
            hint=first.hint,
            cause=FINAL,
        )
    return model


def _add_advice(error: NotExported, job: ExportJob) -> NotExported:
    """Add to `error` the line that calls an operator which ONNX lacks, and what to do."""
    if error.operator:
        watch_calls(job).add_operator(error, error.operator)
    error.hint = error.hint or rewrite_for(error.message)
    check_layers(error, job.module)
    return error
