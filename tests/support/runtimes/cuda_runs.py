"""What the tests of the CUDA path share: a pipeline on a CUDA for tests, and its batches.

That is `FakeCuda`, made of NumPy; with DEPLOYKIT_TEST_CUDA=driver it is the real binding on the
driver of `tests/cuda/fakecuda.c`, which `tests/cuda/test_own_driver.py` runs the same tests on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deploykit.core.tensors import TensorSpec
from deploykit.engines.cuda.execution import Pipeline
from tests.support.runtimes.fake_cuda import Affine

if TYPE_CHECKING or os.environ.get("DEPLOYKIT_TEST_CUDA") != "driver":
    from tests.support.runtimes.fake_cuda import FakeCuda
else:
    from tests.support.runtimes.driver_cuda import DriverCuda as FakeCuda

CODES = Path(__file__).with_name("cuda_codes.txt").read_text(encoding="utf-8").split()
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
