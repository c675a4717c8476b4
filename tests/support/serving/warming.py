"""Engines whose time and shapes a test knows, and a model that was warmed up."""

from __future__ import annotations

from typing import Any

import numpy as np

from deploykit.core.errors import BadInput
from deploykit.core.tensors import TensorSpec
from deploykit.serving.batching.batcher import Loop
from deploykit.serving.models.model import ServedModel
from deploykit.serving.models.repository import ModelRepository
from deploykit.serving.options import ServeOptions
from tests.support.fake_engine import FakeEngine
from tests.support.serving.loops import Clock


class TimedEngine(FakeEngine):
    """Each batch moves its clock on."""

    def __init__(self, clock: Clock, us: int, row_us: int, **options: Any) -> None:
        super().__init__(**options)
        self.clock, self.us, self.row_us = clock, us, row_us

    def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
        self.clock.us += self.us + self.row_us * len(feeds["x"])
        return super().__call__(feeds)


class Lengths(FakeEngine):
    """x [N,T] -> y [N,T]; notes the shapes it ran, refuses what is shorter than `least`."""

    def __init__(self, least: int = 0) -> None:
        super().__init__()
        self.inputs = (TensorSpec("x", "float32", ("N", "T")),)
        self.outputs = (TensorSpec("y", "float32", ("N", "T")),)
        self.least = least
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, feeds: Any) -> dict[str, np.ndarray]:
        if feeds["x"].shape[1] < self.least:
            raise BadInput("too short")
        self.shapes.append(feeds["x"].shape)
        return super().__call__(feeds)


def warmed(engine: FakeEngine | list[FakeEngine], **options: Any) -> ServedModel:
    """By a clock that stands still: how many sizes run depends on their time."""
    repository = ModelRepository({"m": engine}, ServeOptions(**options), Loop(clock_us=Clock()))
    try:
        repository.warm_up()
    finally:
        repository.close()
    return repository.find("m")
