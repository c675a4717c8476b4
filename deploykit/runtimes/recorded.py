"""An Engine that returns recorded outputs, computed before by another runtime."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from deploykit.core.errors import BadInput
from deploykit.core.tensors import TensorSpec
from deploykit.runtimes.engine import Arrays, BaseEngine, check_feeds


class RecordedEngine(BaseEngine):
    """Returns the recorded outputs for the recorded inputs; refuses any others."""

    device = "recorded"

    def __init__(
        self,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        recorded: tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]],
        runtime: str,
    ) -> None:
        self.inputs, self.outputs, self.runtime = inputs, outputs, runtime
        self._feeds, self._values = recorded

    def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
        check_feeds(self.inputs, feeds, self.runtime)
        for name, array in self._feeds.items():
            if not np.array_equal(feeds[name], array, equal_nan=array.dtype.kind == "f"):
                raise BadInput(
                    f"{self.runtime}: has no recorded outputs for this value of input '{name}'"
                )
        return {name: array.copy() for name, array in self._values.items()}

    def close(self) -> None:
        """Nothing to close."""
