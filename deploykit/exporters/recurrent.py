"""Export `nn.LSTM`, `nn.GRU` and `nn.RNN` as one operator each, of any length.

torch.export takes such a layer apart into its steps, as many as the example has, or keeps it with
the example's length in all that follows. So while a model is exported, torch's functions for these
layers are one operator, whose output has the input's length as a symbol and which becomes ONNX's
operator, which also takes a length for each row where torch has a packed sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from deploykit.core.extras import require
from deploykit.exporters.reasons import NotExported

torch: ModuleType = require("torch")
onnxscript: ModuleType = require("onnxscript")

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
