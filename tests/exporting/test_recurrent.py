"""Recurrent layers of any length: stacked, vanilla, packed; their last states as outputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.support.installed import needs

torch = pytest.importorskip("torch", reason="torch is not installed")
needs("onnxscript")

from torch import nn  # noqa: E402
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence  # noqa: E402

from deploykit.core.tensors import TensorSpec, parse_spec  # noqa: E402
from deploykit.engines.engine import load  # noqa: E402
from deploykit.exporting.onnx import export_module  # noqa: E402

pytestmark = pytest.mark.torch

SHAPES = ((1, 1), (5, 2), (3, 17))  # T and N: neither of the example's


class Stacks(nn.Module):
    """Layers one after the other, attention over what they return, and their last states."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.LSTM(4, 6, batch_first=True, bidirectional=True, num_layers=2)
        self.gru = nn.GRU(12, 5, batch_first=True)
        self.plain = nn.RNN(4, 3, batch_first=True, nonlinearity="relu", bias=False)
        self.last = nn.RNN(3, 5, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, (h, c) = self.wide(x)
        y, g = self.gru(y)
        y = (y @ y.transpose(1, 2)).softmax(-1) @ y
        z, p = self.plain(x)
        z, q = self.last(z)
        return (y + z.reshape(z.shape[0], z.shape[1], 2, 5).sum(2), h, c, g, p, q)


class Packed(nn.Module):
    """Rows of their own lengths, back to the longest of them and to two steps more than T."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(4, 3, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(6, 5, batch_first=True)
        self.plain = nn.RNN(4, 5)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        packed, state = self.gru(self.lstm(packed)[0])
        y, _ = pad_packed_sequence(packed, batch_first=True, padding_value=-2.0)
        packed = pack_padded_sequence(x.transpose(0, 1), lengths, enforce_sorted=False)
        packed, last = self.plain(packed)
        z, counts = pad_packed_sequence(packed, total_length=x.shape[1] + 2)
        return y, state, z.transpose(0, 1), last, counts


def answers(module: nn.Module, steps: int, rows: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Inputs, with no row as long as T where there are several, and PyTorch's outputs for them."""
    generator = torch.Generator().manual_seed(steps)
    lengths = (torch.arange(rows) * 5 % steps).clamp(1, max(1, steps - 1))
    given = [torch.randn(rows, steps, 4, generator=generator), lengths]
    given = given if type(module) is Packed else given[:1]
    with torch.inference_mode():
        return [each.numpy() for each in given], [each.numpy() for each in module(*given)]


@pytest.mark.parametrize("make", [Stacks, Packed])
def test_recurrent_layers_are_one_operator_each_and_take_any_length(
    tmp_path: Path, make: type[nn.Module]
) -> None:
    module, out = make().eval(), tmp_path / "m.onnx"
    inputs = [parse_spec("x:float32[N,T,4]"), parse_spec("lengths:int64[N]")]
    inputs = inputs if make is Packed else inputs[:1]
    names = {7: "N", 11: "T", 10: "U", 13: "V"}
    outputs = [
        TensorSpec(f"y{at}", str(y.dtype), tuple(names.get(size, size) for size in y.shape))
        for at, y in enumerate(answers(module, 11, 7)[1])
    ]
    export_module(module, inputs, outputs, out)
    kinds = {node.op_type for node in onnx.load(out).graph.node}
    assert kinds & {"LSTM", "GRU", "RNN", "Loop", "Scan"} == {"LSTM", "GRU", "RNN"}
    with load(out, "cpu") as engine:
        for steps, rows in SHAPES:
            given, expected = answers(module, steps, rows)
            feeds = {spec.name: array for spec, array in zip(inputs, given, strict=True)}
            for value, got in zip(expected, engine(feeds).values(), strict=True):
                np.testing.assert_allclose(got, value, atol=1e-5)
