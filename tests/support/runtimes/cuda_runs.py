"""What the tests of the CUDA path share: a pipeline on a CUDA for tests, and its batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from deploykit.core.tensors import TensorSpec
from deploykit.engines.cuda.execution import Pipeline
from tests.support.runtimes.own_cuda import Affine, FakeCuda

runtime = pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed")
CODES = [code.name.removeprefix("cudaError") for code in runtime.cudaError_t if int(code)]
X = TensorSpec("x", "float32", ("N", 4))
Y = TensorSpec("y", "float32", ("N", 4))
ONE_CALL = ["copy_in", "enqueue", "copy_out", "record"]


def rows(count: int, start: float = 0.0) -> np.ndarray:
    return (np.arange(count * 4, dtype=np.float32) + np.float32(start)).reshape(count, 4)


def pipeline(cuda: FakeCuda, made: list[Affine] | None = None, **options: Any) -> Pipeline:
    def make(stream: int, scratch: int) -> Affine:
        work = Affine(cuda, stream, scratch)
        if made is not None:
            made.append(work)
        return work

    return Pipeline(cuda, make, [X], [Y], **options)


def right(answer: Mapping[str, np.ndarray], x: np.ndarray) -> bool:
    return np.array_equal(answer["y"], 2 * x + 1)
