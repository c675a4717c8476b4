"""Our own operators, for what torch's exporters cannot put into a graph of any size.

Each is one operator in PyTorch, with a translation into ONNX's own:

- `recurrent`: `nn.LSTM`, `nn.GRU` and `nn.RNN`. torch.export takes such a layer apart into as many
  steps as the example has. While a model is exported, torch's functions for these layers call this
  operator instead; for a packed sequence it takes the length of each row, as ONNX's does.
- `suppress`: non-maximum suppression. ONNX lists the boxes that are kept, as many as the data give;
  here the scores of all others become 0, so that a batch has one shape.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from deploykit.core.extras import require
from deploykit.exporting.reasons import FINAL, NotExported

torch: ModuleType = require("torch")
onnxscript: ModuleType = require("onnxscript")

op: Any = onnxscript.opset18
VALUE: Any = onnxscript.FLOAT
INDICES: Any = onnxscript.INT64
_LAYERS = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN", "rnn_relu": "RNN"}
_GATES = {"lstm": [0, 3, 1, 2], "gru": [1, 0, 2]}  # torch's i f g o and r z n in ONNX's order

_PROJECTION_HINT = (
    "train an LSTM without `proj_size`; or step over a fixed length with nn.LSTMCell's formula and "
    "a Linear on h"
)
_library: Any = torch.library.Library("deploykit", "FRAGMENT")
_library.define(
    "recurrent(Tensor x, Tensor[] states, Tensor[] weights, str kind, int layers, bool both,"
    " Tensor? lengths) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "suppress(Tensor boxes, Tensor scores, Tensor classes, int count, float iou, int most)"
    " -> Tensor"
)


def translations() -> Mapping[Any, Callable[..., Any]]:
    """Return the translations for torch.onnx.export's `custom_translation_table`."""
    ours = torch.ops.deploykit
    return {ours.recurrent.default: _translate_recurrent, ours.suppress.default: _translate_nms}


@torch.library.register_fake("deploykit::recurrent", lib=_library)  # type: ignore[untyped-decorator]
def _recurrent_shapes(x: Any, states: Sequence[Any], *options: Any) -> tuple[Any, Any, Any]:
    _weights, _kind, _layers, both, *_ = options
    y = x.new_empty((*x.shape[:2], states[0].shape[2] * (2 if both else 1)))
    return y, torch.empty_like(states[0]), torch.empty_like(states[-1])


def _translate_recurrent(
    x: VALUE,
    states: Sequence[VALUE],
    weights: Sequence[VALUE],
    kind: str,
    layers: int,
    both: bool,
    lengths: VALUE | None = None,
) -> Any:
    ways = 2 if both else 1
    each = len(weights) // (layers * ways)  # 4 with biases, 2 without
    options: dict[str, Any] = {
        "direction": "bidirectional" if both else "forward",
        "hidden_size": weights[1].shape[1],
    }
    if kind == "gru":
        options["linear_before_reset"] = 1  # torch defines its GRU so
    elif kind == "rnn_relu":
        options["activations"] = ["Relu"] * ways
    if lengths is not None:
        lengths = op.Cast(lengths, to=onnxscript.INT32.dtype)
    ends: list[list[Any]] = []
    for layer in range(layers):
        of_layer = [weights[(layer * ways + way) * each :][:each] for way in range(ways)]
        w, r = (_join([_in_order(one[at], kind) for one in of_layer]) for at in (0, 1))
        b = None
        if each == 4:
            both_b = [[_in_order(one[at], kind) for at in (2, 3)] for one in of_layer]
            b = _join([op.Concat(*pair, axis=0) for pair in both_b])
        at = layer * ways
        begins = [
            op.Slice(state, [at], [at + ways], [0]) if layers > 1 else state for state in states
        ]
        y, *found = getattr(op, _LAYERS[kind])(x, w, r, b, lengths, *begins, **options)
        ends.append(found)
        x = op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), op.Constant(value_ints=[0, 0, -1]))
    states = [op.Concat(*one, axis=0) if layers > 1 else one[0] for one in zip(*ends, strict=True)]
    return x, states[0], states[-1]


def _in_order(weight: Any, kind: str) -> Any:
    """Return the gates of a weight or bias as ONNX has them."""
    gates = _GATES.get(kind)
    if gates is None:
        return weight
    rows = weight.shape[0] // len(gates)
    order = [gate * rows + row for gate in gates for row in range(rows)]
    return op.Gather(weight, op.Constant(value_ints=order), axis=0)


def _join(weights: Sequence[Any]) -> Any:
    """Return one weight for each direction, with these as a first axis."""
    wide = [op.Unsqueeze(weight, op.Constant(value_ints=[0])) for weight in weights]
    return op.Concat(*wide, axis=0) if len(wide) > 1 else wide[0]


@contextlib.contextmanager
def recurrent_layers_whole() -> Iterator[None]:
    """Let recurrent layers call our operator, for the time of an export."""
    functions, layers = torch._VF, (torch.nn.RNNBase, torch.nn.LSTM)
    checks = [layer.check_forward_args for layer in layers]
    for kind in _LAYERS:
        setattr(functions, kind, _calling(kind))
    functions._pack_padded_sequence = _pack
    functions._pad_packed_sequence = _unpack
    for layer in layers:  # they make a constant of the number of rows
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
        hx, weights, _biases, layers, _dropout, _train, both, *first = given[packed is not None :]
        states = list(hx) if kind == "lstm" else [hx]
        if states[0].shape[2] != states[-1].shape[2]:
            raise NotExported(
                "ONNX's LSTM has no projection (`proj_size`)", hint=_PROJECTION_HINT, cause=FINAL
            )
        batch_first = bool(first and first[0])
        if packed is not None:
            x = x.unflatten(0, (packed.steps, packed.rows))
        elif batch_first:
            x = x.transpose(0, 1)
        lengths = packed.lengths if packed is not None else None
        y, h, c = torch.ops.deploykit.recurrent(x, states, weights, kind, layers, both, lengths)
        if packed is not None:
            y = y.flatten(0, 1)
        elif batch_first:
            y = y.transpose(0, 1)
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

    def size(self, _axis: int) -> float:
        return -math.inf  # no `total_length` is below it; `_unpack` gets it where there is none


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
    if isinstance(total, float):  # the longest row decides
        longest = lengths.max().item()
        torch._check(longest >= 0)
        torch._check(longest <= steps)
        x = x.narrow(0, 0, longest)
    elif total is not steps:
        more = [0, 0] * (x.dim() - 1) + [0, total - steps]
        x = torch.nn.functional.pad(x, more, value=padding)
    return (x.transpose(0, 1) if batch_first else x), lengths


def suppress(
    boxes_NA4: Any, scores_NA: Any, classes_NA: Any, count: int, iou: float, most: int
) -> Any:
    """Return scores [N,A], 0 for a box that overlaps a better one of its class above `iou`.

    Boxes [N,A,4] are corners, classes [N,A] below `count`. The best `most` of each row are kept;
    others may be, too.
    """
    return torch.ops.deploykit.suppress(boxes_NA4, scores_NA, classes_NA, count, iou, most)


@torch.library.impl(_library, "suppress", "CompositeExplicitAutograd")  # type: ignore[untyped-decorator]
def _suppress(
    boxes_NA4: Any, scores_NA: Any, classes_NA: Any, _: int, iou: float, most: int
) -> Any:
    kept_NA = torch.zeros_like(scores_NA)
    rows = zip(boxes_NA4, scores_NA, classes_NA, kept_NA, strict=True)
    for boxes, scores, classes, kept in rows:
        order = scores.argsort(descending=True, stable=True)
        order = order[scores[order] > 0]
        for _ in range(most):
            if not len(order):
                break
            best, order = order[0], order[1:]
            kept[best] = scores[best]
            other = classes[order] != classes[best]
            order = order[other | (_iou(boxes[best], boxes[order]) <= iou)]
    return kept_NA


@torch.library.register_fake("deploykit::suppress", lib=_library)  # type: ignore[untyped-decorator]
def _suppress_shape(_boxes: Any, scores: Any, *_options: Any) -> Any:
    return torch.empty_like(scores)


def _translate_nms(
    boxes: VALUE, scores: VALUE, classes: INDICES, count: int, iou: float, most: int
) -> Any:
    """Give each class a row of scores of its own, 0 for boxes of the others."""
    one = op.Constant(value_ints=[1])
    each = op.Constant(value_ints=list(range(count)))
    own = op.Equal(op.Unsqueeze(classes, one), op.Reshape(each, op.Constant(value_ints=[1, -1, 1])))
    by_class = op.Where(own, op.Unsqueeze(scores, one), op.Constant(value_float=0.0))
    selected = op.NonMaxSuppression(
        boxes,
        by_class,
        op.Constant(value_ints=[most]),
        op.Constant(value_floats=[iou]),
        op.Constant(value_floats=[0.0]),
    )
    places = op.Gather(selected, op.Constant(value_ints=[0, 2]), axis=1)  # image and box
    nothing = op.Mul(scores, op.Constant(value_float=0.0))
    return op.ScatterND(nothing, places, op.GatherND(scores, places))


def _iou(box_4: Any, others_M4: Any) -> Any:
    low = torch.maximum(box_4[:2], others_M4[:, :2])
    high = torch.minimum(box_4[2:], others_M4[:, 2:])
    shared = (high - low).clamp(min=0).prod(1)
    areas = (others_M4[:, 2:] - others_M4[:, :2]).prod(1)
    whole = (box_4[2:] - box_4[:2]).prod() + areas - shared
    return torch.where(shared > 0, shared / whole, torch.zeros_like(shared))
