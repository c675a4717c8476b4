"""A deterministic Engine with a fixed latency, for tests and benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from deploykit.core.errors import BadInput, DeploykitError
from deploykit.core.evidence import RowIndependence
from deploykit.core.tensors import TensorSpec, parse_spec
from deploykit.engines.engine import Arrays, Engine, check_feeds


class FakeEngine(Engine):
    """y = 2x + 1 over float32 rows of `width` numbers; a call takes `latency_s`."""

    device = "cpu"
    runtime = "fake"
    batching = RowIndependence(True, "by construction", (1 << 20,))  # no run before the first batch

    def __init__(
        self,
        *,
        width: int = 4,
        max_batch: int | None = None,
        latency_s: float = 0.0,
    ) -> None:
        self.inputs = (TensorSpec("x", "float32", ("N", width)),)
        self.outputs = (TensorSpec("y", "float32", ("N", width)),)
        self.max_batch = max_batch
        self.latency_s = latency_s
        self.batches: list[int] = []  # the size of every batch it ran
        self.closed = False

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        if self.closed:
            raise DeploykitError("fake: the engine is closed")
        check_feeds(self.inputs, feeds, "fake")
        rows = len(feeds["x"])
        if self.max_batch is not None and rows > self.max_batch:
            raise BadInput(f"fake: batch {rows} is above {self.max_batch}")
        self.batches.append(rows)
        end = time.perf_counter() + self.latency_s
        outputs = {"y": feeds["x"] * np.float32(2) + np.float32(1)}
        while (left := end - time.perf_counter()) > 0:
            time.sleep(left if left > 2e-3 else 0)
        return outputs

    def close(self) -> None:
        self.closed = True


Outputs = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]


class Function(FakeEngine):
    """A fake engine that computes what a test wants; specs as text."""

    def __init__(self, outputs: Outputs, inputs: str = "x:float32[N,4]", *specs: str) -> None:
        super().__init__()
        self.inputs: tuple[TensorSpec, ...] = (parse_spec(inputs),)
        self.outputs: tuple[TensorSpec, ...] = tuple(
            parse_spec(spec) for spec in specs or ("y:float32[N,4]",)
        )
        self.function = outputs

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        check_feeds(self.inputs, feeds, "function")
        return self.function(feeds)
