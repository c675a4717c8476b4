"""Modules for the exporter's tests: what a graph cannot hold, and what only one exporter can do.

The tests look for the lines of this file in error messages; `line_of` finds their numbers.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

SOURCE = Path(__file__)


def line_of(code: str) -> int:
    """The number of the first line of this file that is `code`."""
    lines = [line.strip() for line in SOURCE.read_text(encoding="utf-8").splitlines()]
    return lines.index(code) + 1


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        if x.sum() > 0:
            return (x + 1,)
        return (x - 1,)


class Unit(nn.Module):
    """Divides a row by its norm and a small number: 0 for a row of zeros."""

    def __init__(self, small: float) -> None:
        super().__init__()
        self.small = small

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        norm = x.pow(2).sum(-1, keepdim=True).sqrt()
        return ((x + 0) * 1 / (norm + self.small) * 1.000004,)


class Listed(nn.Module):
    """Gives a function a list of tensors, which torch writes as a sequence."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        (x,) = torch.atleast_1d([x])
        return (x.unsqueeze(1).expand(-1, 3, -1) + 1,)


class BranchesByATensor(nn.Module):
    """Branches by a tensor that no input changes, where torch stops, then by the input's values."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        if torch.tensor([1.0, 2.0]).sum() > 2:
            x = x + 1
        if x.max() > 1:
            x = x + 1
        return (x,)


class ChosenColumns(nn.Module):
    """Branches by a tensor that no input changes, and picks columns by their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.order = torch.tensor([3, 0, 2, 1])
        self.kept = torch.tensor([True, False, True, True])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        x = x[..., self.order]
        return (torch.stack([x[..., at] for at, kept in enumerate(self.kept) if kept], -1),)


class Repeat(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        while (x < 10).all():
            x = x + 4
        return (x,)


class PerStep(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        for step in range(x.shape[1]):
            x = x + step
        return (x,)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(7, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x + self.table,)


class TwoRows(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x.reshape(2, -1),)


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x + self.absent,)


class Svd(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.linalg.svd(x)[1],)


class Address(nn.Module):
    """Only the older exporter runs it: torch.export has tensors without memory."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        aligned = x.data_ptr() % 4 == 0
        return (x * 3 if aligned else x * 2,)


class AddressAndBranch(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        if x.data_ptr() % 4 == 0 and bool(x.sum() > -1):
            return (x * 3,)
        return (x * 2,)


class Kinds(nn.Module):
    """ids int64, keep bool, half float16, bytes_ uint8, all (N, T) -> float32 (N, T)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 1)

    def forward(
        self, ids: torch.Tensor, keep: torch.Tensor, half: torch.Tensor, bytes_: torch.Tensor
    ) -> tuple[torch.Tensor]:
        known = torch.where(keep, self.embedding(ids)[:, :, 0], 0.0)
        return (known + half.float() + bytes_.float(),)


class Window(nn.Module):
    """x (N, T) -> (N, T - 8): takes T from 9 on."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 9)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.conv(x[:, None])[:, 0],)


class Outputs(nn.Module):
    """x -> x itself, and one tensor twice."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        twice = x * 2
        return x, twice, twice


class Wrapper(nn.Module):
    """As deploykit wraps a user's module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.module(*inputs)
        return found if isinstance(found, tuple) else (found,)


class Gate(nn.Module):
    """TorchScript keeps both branches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if bool(x.sum() > 0) else x - 1
