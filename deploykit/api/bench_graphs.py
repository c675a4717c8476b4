"""The columns of a TensorRT engine: CUDA graphs, and calls in flight, on the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deploykit.measure.timing.sweep import Setup
    from deploykit.runtimes.engine import Engine


def with_graphs(plain: Setup, batches: Sequence[int]) -> list[Setup]:
    """With and without CUDA graphs, with one call and with two in flight; the weights once."""
    shared = _Shared(plain)
    return [
        replace(
            plain,
            label=plain.label + ", CUDA graphs" * bool(graphs) + ", overlap" * (slots > 1),
            engines=partial(shared.open, slots, graphs),
            in_flight=slots,
        )
        for slots in (1, 2)
        for graphs in ((), tuple(batches))
    ]


class _Shared:
    """Engines on the weights of the first one that was opened."""

    def __init__(self, plain: Setup) -> None:
        self._plain = plain
        self._opened: list[Engine] = []

    def open(self, slots: int, graphs: Sequence[int]) -> Engine:
        shared = self._opened[0].share(slots=slots, graphs=graphs) if self._opened else None
        self._opened.append(shared or self._plain.engines())
        return self._opened[-1]
