"""Run torch's two ONNX exporters: the current one (`dynamo`) and the older one (`torchscript`).

The graph stays in memory, in onnxscript's form, and its weights still are the module's own tensors:
nothing is copied. Neither exporter writes a line to the terminal.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from deploykit.core.extras import require
from deploykit.core.tensors import TensorSpec, concrete
from deploykit.engines.torch.advice import is_users, is_written_for_tracing, source_place
from deploykit.exporting import heads as nms
from deploykit.exporting.reasons import CallWatch, NotExported, SizeWatch, baked, explain

torch: ModuleType = require("torch")
transformer: Any = require("torch.nn.modules.transformer")
onnxscript: ModuleType = require("onnxscript")
optimizer: ModuleType = require("onnxscript.optimizer")


# Export `nn.LSTM`, `nn.GRU` and `nn.RNN` as one operator each, of any length.
#
# torch.export takes such a layer apart into its steps, as many as the example has, or keeps it
# with
# the example's length in all that follows. So while a model is exported, torch's functions for
# these
# layers are one operator, whose output has the input's length as a symbol and which becomes
# ONNX's
# operator, which also takes a length for each row where torch has a packed sequence.

op: Any = onnxscript.opset18
VALUE: Any = onnxscript.FLOAT
_LAYERS = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN", "rnn_relu": "RNN"}
_GATES = {"lstm": [0, 3, 1, 2], "gru": [1, 0, 2]}  # torch's i f g o and r z n in ONNX's order

_PROJECTION_HINT = (
    "train an LSTM without `proj_size`; or step over a fixed length with nn.LSTMCell's formula and "
    "a Linear on h"
)
_SCHEMA = (
    "recurrent(Tensor x, Tensor[] states, Tensor[] weights, str kind, bool biases, int layers,"
    " bool both, bool batch_first, Tensor? lengths) -> (Tensor, Tensor, Tensor)"
)
_library: Any = torch.library.Library("deploykit", "FRAGMENT")
_library.define(_SCHEMA)


@torch.library.register_fake("deploykit::recurrent", lib=_library)  # type: ignore[untyped-decorator]
def _shapes(x: Any, states: Sequence[Any], *options: Any) -> tuple[Any, Any, Any]:
    """Of the outputs, (T, N, width) as `x` is laid out, and of the states, as they are given."""
    _weights, _kind, _biases, _layers, both, *_ = options
    y = x.new_empty((*x.shape[:2], states[0].shape[2] * (2 if both else 1)))
    return y, torch.empty_like(states[0]), torch.empty_like(states[-1])


def _translate(
    x: VALUE,
    states: Sequence[VALUE],
    weights: Sequence[VALUE],
    kind: str,
    biases: bool,
    layers: int,
    both: bool,
    batch_first: bool,
    lengths: VALUE | None = None,
) -> Any:
    ways = 2 if both else 1
    each = 4 if biases else 2
    options: dict[str, Any] = {
        "direction": "bidirectional" if both else "forward",
        "hidden_size": weights[1].shape[1],
    }
    if kind == "gru":
        options["linear_before_reset"] = 1  # as torch's GRU is defined
    elif kind == "rnn_relu":
        options["activations"] = ["Relu"] * ways
    if batch_first:
        x = op.Transpose(x, perm=[1, 0, 2])
    if lengths is not None:
        lengths = op.Cast(lengths, to=onnxscript.INT32.dtype)
    ends: list[list[Any]] = []
    for layer in range(layers):
        of_layer = [weights[(layer * ways + way) * each :][:each] for way in range(ways)]
        w, r = (_join([_in_order(one[at], kind) for one in of_layer]) for at in (0, 1))
        b = None
        if biases:
            both_b = [[_in_order(one[at], kind) for at in (2, 3)] for one in of_layer]
            b = _join([op.Concat(*pair, axis=0) for pair in both_b])
        at = layer * ways
        begins = [
            op.Slice(state, [at], [at + ways], [0]) if layers > 1 else state for state in states
        ]
        y, *found = getattr(op, _LAYERS[kind])(x, w, r, b, lengths, *begins, **options)
        ends.append(found)
        x = op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), op.Constant(value_ints=[0, 0, -1]))
    if batch_first:
        x = op.Transpose(x, perm=[1, 0, 2])
    states = [op.Concat(*one, axis=0) if layers > 1 else one[0] for one in zip(*ends, strict=True)]
    return x, states[0], states[-1]


def _in_order(weight: Any, kind: str) -> Any:
    """The gates of a weight or bias as ONNX has them."""
    gates = _GATES.get(kind)
    if gates is None:
        return weight
    rows = weight.shape[0] // len(gates)
    order = [gate * rows + row for gate in gates for row in range(rows)]
    return op.Gather(weight, op.Constant(value_ints=order), axis=0)


def _join(weights: Sequence[Any]) -> Any:
    """One weight for each direction, with these as a first axis."""
    wide = [op.Unsqueeze(weight, op.Constant(value_ints=[0])) for weight in weights]
    return op.Concat(*wide, axis=0) if len(wide) > 1 else wide[0]


def translations() -> dict[Any, Callable[..., Any]]:
    """For torch.onnx.export's `custom_translation_table`."""
    return {torch.ops.deploykit.recurrent.default: _translate}


@contextlib.contextmanager
def kept_whole() -> Iterator[None]:
    """Let recurrent layers call our operator, for the time of an export."""
    functions, layers = torch._VF, (torch.nn.RNNBase, torch.nn.LSTM)
    checks = [layer.check_forward_args for layer in layers]
    for kind in _LAYERS:
        setattr(functions, kind, _calling(kind))
    functions._pack_padded_sequence = _pack
    functions._pad_packed_sequence = _unpack
    for layer in layers:  # they make a number of how many rows there are
        layer.check_forward_args = lambda *_: None
    try:
        yield
    finally:
        for name in (*_LAYERS, "_pack_padded_sequence", "_pad_packed_sequence"):
            delattr(functions, name)
        for layer, check in zip(layers, checks, strict=True):
            layer.check_forward_args = check


def _calling(kind: str) -> Callable[..., Any]:
    def call(x: Any, *given: Any) -> Any:
        packed = given[0] if isinstance(given[0], _Packed) else None
        hx, weights, biases, layers, _dropout, _train, both, *first = given[packed is not None :]
        states = list(hx) if kind == "lstm" else [hx]
        if states[0].shape[2] != states[-1].shape[2]:
            raise NotExported(
                "ONNX's LSTM has no projection (`proj_size`)", hint=_PROJECTION_HINT, final=True
            )
        if packed is not None:
            x = x.unflatten(0, (packed.steps, packed.rows))
        lengths = packed.lengths if packed is not None else None
        y, h, c = torch.ops.deploykit.recurrent(
            x, states, weights, kind, biases, layers, both, bool(first and first[0]), lengths
        )
        if packed is not None:
            y = y.flatten(0, 1)
        return (y, h, c) if kind == "lstm" else (y, h)

    return call


class _Packed:
    """Stands for the batch sizes of a packed sequence whose rows still have their padding.

    ONNX's operators take padded rows and the length of each.
    """

    device = torch.device("cpu")

    def __init__(self, lengths: Any, steps: Any, rows: Any) -> None:
        self.lengths, self.steps, self.rows = lengths, steps, rows

    def __getitem__(self, step: int) -> Any:
        return self.rows

    def size(self, _axis: int) -> _Longest:
        return _Longest()


class _Longest:
    """The length of the longest row, which torch compares with the `total_length` asked for."""

    def __gt__(self, total: object) -> bool:
        return False


def _pack(x: Any, lengths: Any, batch_first: bool) -> tuple[Any, _Packed]:
    x = x.transpose(0, 1) if batch_first else x
    return x.flatten(0, 1), _Packed(lengths, *x.shape[:2])


def _unpack(
    x: Any, packed: _Packed, batch_first: bool, padding: float, total: Any
) -> tuple[Any, Any]:
    lengths, steps = packed.lengths, packed.steps
    x = x.unflatten(0, (steps, packed.rows))
    padded = torch.arange(steps).unsqueeze(1) >= lengths
    x = x.masked_fill(padded.reshape(*padded.shape, *[1] * (x.dim() - 2)), padding)
    if isinstance(total, _Longest):
        longest = lengths.max().item()
        torch._check(longest >= 0)
        torch._check(longest <= steps)
        x = x.narrow(0, 0, longest)
    elif total is not steps:
        more = [0, 0] * (x.dim() - 1) + [0, total - steps]
        x = torch.nn.functional.pad(x, more, value=padding)
    return (x.transpose(0, 1) if batch_first else x), lengths


# Distinct, so that a constant in the graph tells which axis it was; none is 0 or 1, which
# torch.export takes for constants.
_SMALL, _LARGE, _STEP = 2, 64, 32
_FOLDED_ELEMENTS = 1 << 24  # torch folds to 8192 only, and leaves an LSTM's weights in slices

_GRAPH = onnxscript.ir.AttributeType.GRAPH
_SCRIPTED = (torch.jit.ScriptModule, torch.jit.ScriptFunction)
_FROZEN = "might cause the trace to be incorrect"  # of the older exporter's warnings

# What the user's own code, run by torch, may raise besides torch's errors.
_RAISED = (
    *(RuntimeError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError),
    *(AssertionError, ImportError, OSError),
)


def example_sizes(
    inputs: Sequence[TensorSpec], sizes: Mapping[str, int] | None = None
) -> dict[str, int]:
    """A size for every dynamic axis; `sizes` goes first.

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


def by_dynamo(
    module: Any,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    opset: int,
    sizes: Mapping[str, int],
) -> tuple[Any, tuple[str, ...]]:
    """The graph that torch's current exporter makes, and by which sizes the model decided.

    Raises NotExported.
    """
    example, shapes = _example(inputs, sizes), _dynamic_shapes(module, inputs)
    with _exporting(), kept_whole(), SizeWatch() as watch:
        try:
            program = torch.onnx.export(
                module,
                example,
                dynamo=True,
                dynamic_shapes=shapes,
                input_names=[spec.name for spec in inputs],
                output_names=[spec.name for spec in outputs],
                opset_version=opset,
                custom_translation_table={**translations(), **nms.onnx_forms()},
                verbose=False,
            )
            graph = program.model
            _check_inputs(graph, module, inputs, sizes)
            return _simplify(lambda: graph), watch.decisions(sizes)
        except (torch.onnx.OnnxExporterError, *_RAISED) as exc:
            raise explain(exc, inputs, sizes) from exc


def by_torchscript(
    module: Any,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    opset: int,
    sizes: Mapping[str, int],
    folder: Path,
) -> tuple[Any, tuple[str, ...]]:
    """The graph that torch's older exporter makes, and the lines whose decision it froze.

    `folder`: where its file and, past 2 GiB, one file for each weight may lie as long as the graph
    is used. Raises NotExported.
    """
    axes = {
        spec.name: {at: axis for at, axis in enumerate(spec.shape) if isinstance(axis, str)}
        for spec in (*inputs, *outputs)
    }
    file = Path(tempfile.mkdtemp(dir=folder)) / "model.onnx"
    with _exporting() as warned, _no_output():
        try:
            example = _example(inputs, sizes)
            if is_scripted(module) and not isinstance(module, _SCRIPTED):
                module = torch.jit.trace(module, example, check_trace=False)  # keeps what is inside
            torch.onnx.export(
                module,
                example,
                str(file),
                dynamo=False,
                dynamic_axes=axes,
                input_names=[spec.name for spec in inputs],
                output_names=[spec.name for spec in outputs],
                opset_version=opset,
                verbose=False,
            )
            graph = _simplify(lambda: onnxscript.ir.load(file))
        except (torch.onnx.OnnxExporterError, *_RAISED) as exc:
            raise explain(exc, inputs, sizes) from exc
    frozen = [
        source_place(item.filename, item.lineno)
        for item in warned
        if issubclass(item.category, torch.jit.TracerWarning)
        and _FROZEN in str(item.message)
        and is_users(item.filename)
        and not is_written_for_tracing(item.filename)
    ]
    return graph, tuple(dict.fromkeys(frozen))


def is_scripted(module: Any) -> bool:
    """Whether `module` is TorchScript, or a wrapper of some."""
    while module is not None:
        if isinstance(module, _SCRIPTED):
            return True
        module = getattr(module, "module", None)
    return False


def _simplify(load: Callable[[], Any]) -> Any:
    """The graph that `load` gives with its constants folded.

    With shape inference the optimizer may remove a constant that is still read: without it, then.
    """
    for infer in (True, False):
        graph = load()
        _forget_sizes_in_loops(graph)
        graph = optimizer.optimize(
            graph, input_size_limit=_FOLDED_ELEMENTS, onnx_shape_inference=infer
        )
        if not _reads_nothing(graph.graph, set()):
            break
    return graph


def _forget_sizes_in_loops(model: Any) -> None:
    """Make every axis in and after a loop free.

    torch writes the sizes of the first round there, and the optimizer would make them constants: a
    tensor that grows, as Mask R-CNN's masks do, would keep one row.
    """
    for node in model.graph.all_nodes():
        if node.op_type in ("Loop", "Scan"):
            bodies = [each.as_graph() for each in node.attributes.values() if each.type == _GRAPH]
            inner = [value for each in bodies for at in each.all_nodes() for value in at.outputs]
            ends = [value for each in bodies for value in (*each.inputs, *each.outputs)]
            for value in (*node.outputs, *inner, *ends):
                if value.shape is not None:
                    value.shape = onnxscript.ir.Shape([None] * len(value.shape))


def _reads_nothing(graph: Any, known: set[int]) -> bool:
    """Whether a node reads a value that nothing gives."""
    known = known | {id(value) for value in (*graph.inputs, *graph.initializers.values())}
    for node in graph:
        for value in node.inputs:
            if value is not None and value.producer() is None and id(value) not in known:
                return True
        inner = [item.as_graph() for item in node.attributes.values() if item.type == _GRAPH]
        if any(_reads_nothing(each, known) for each in inner):
            return True
    return False


def _check_inputs(
    graph: Any, module: Any, inputs: Sequence[TensorSpec], sizes: Mapping[str, int]
) -> None:
    """Raise NotExported if torch made an axis of an input a constant, or tied it to another.

    torch does so of itself, without a word, where the model works at no other size.
    """
    for value, spec in zip(graph.graph.inputs, inputs, strict=True):
        for at, (axis, dim) in enumerate(zip(spec.shape, value.shape, strict=True)):
            if not isinstance(axis, str):
                continue
            size = dim if isinstance(dim, int) else str(dim.value)
            if size != axis:
                place = _where_fixed(module, inputs, sizes, sizes[axis])
                raise baked(spec, at, size, place)


def _where_fixed(
    module: Any, inputs: Sequence[TensorSpec], sizes: Mapping[str, int], size: int
) -> str:
    """The line of the user's code that fixed an axis at `size`; "" if torch does not tell."""
    with SizeWatch() as watch:
        _capture_alone(module, inputs, sizes)
    return watch.place(size)


def cutting_line(module: Any, inputs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> str:
    """The line of the user's code that a graph exported at `sizes` is wrong by; "" if unknown.

    The older exporter does not tell, so torch.export runs once more for it.
    """
    if is_scripted(module):
        return ""
    with _exporting(), kept_whole(), SizeWatch() as watch:
        _capture_alone(module, inputs, sizes)
    return watch.suspect(sizes)


def watch_calls(module: Any, inputs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> CallWatch:
    """Which line of the user's code called which operator, in a run of `module` at `sizes`."""
    watch = CallWatch(module)
    with _exporting(), contextlib.suppress(*_RAISED), watch:
        module(*_example(inputs, sizes))
    return watch


def _capture_alone(module: Any, inputs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> None:
    """Run torch.export, whose log a SizeWatch reads; it may fail, as it did the first time."""
    with contextlib.suppress(torch.onnx.OnnxExporterError, *_RAISED):
        example, shapes = _example(inputs, sizes), _dynamic_shapes(module, inputs)
        torch.export.export(module, example, dynamic_shapes=shapes, strict=False)


def _example(inputs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> tuple[Any, ...]:
    """Zeros, which are valid ids of any vocabulary; masks are ones: nothing is left out."""
    return tuple(
        (torch.ones if spec.dtype == "bool" or "mask" in spec.name.lower() else torch.zeros)(
            concrete(spec, sizes), dtype=getattr(torch, spec.dtype)
        )
        for spec in inputs
    )


def _dynamic_shapes(module: Any, inputs: Sequence[TensorSpec]) -> tuple[Any, ...]:
    """One Dim for each name, so that inputs share their axes."""
    dims: dict[str, Any] = {}
    shapes = tuple(
        {
            at: dims.setdefault(axis, torch.export.Dim(axis))
            for at, axis in enumerate(spec.shape)
            if isinstance(axis, str)
        }
        for spec in inputs
    )
    kinds = [p.kind for p in inspect.signature(module.forward).parameters.values()]
    return (shapes,) if kinds[:1] == [inspect.Parameter.VAR_POSITIONAL] else shapes


@contextlib.contextmanager
def _exporting() -> Iterator[list[warnings.WarningMessage]]:
    """Torch set up for export, and kept off the user's terminal; gives the warnings it had.

    The fast path of torch's transformer layers is one operator that ONNX does not have. Whether a
    mask is causal they find out by its values; that only chooses a kernel, and no answer is right.
    """
    detect = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = _is_causal
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    silent = io.StringIO()
    try:
        with (
            torch.no_grad(),
            warnings.catch_warnings(record=True) as warned,
            contextlib.redirect_stdout(silent),
            contextlib.redirect_stderr(silent),
            _mute_loggers("torch", "onnxscript", "onnx_ir"),
        ):
            warnings.simplefilter("always")
            yield warned
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        transformer._detect_is_causal_mask = detect


def _is_causal(_mask: Any, is_causal: bool | None = None, _size: int | None = None) -> bool:
    return is_causal is True


@contextlib.contextmanager
def _no_output() -> Iterator[None]:
    """Keep this process's standard output silent, below Python's too.

    Where the older exporter fails it writes the whole graph there, from C++.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    with Path(os.devnull).open("wb") as sink:
        os.dup2(sink.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def _mute_loggers(*names: str) -> Iterator[None]:
    """Keep what these libraries log from reaching a handler."""
    known = [
        logging.getLogger(name)
        for name in (*names, *logging.root.manager.loggerDict)
        if name.partition(".")[0] in names
    ]
    before = [(logger, logger.handlers, logger.propagate) for logger in known]
    for logger in known:
        logger.handlers = [logging.NullHandler()]
        logger.propagate = False
    try:
        yield
    finally:
        for logger, handlers, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
