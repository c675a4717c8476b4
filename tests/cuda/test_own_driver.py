"""The CUDA layer through NVIDIA's real cuda-bindings, on a CUDA driver of our own (`fakecuda.c`).

The library is libcuda.so.1 in a process of its own, which runs the tests of the CUDA layer and of
the TensorRT runtime once more, and those of `test_driver_cases.py`. No GPU computes anything: this
shows the calls, their order, threads, memory and errors, not a driver's speed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.installed import needs

needs("cuda")

_NAMES = ("cuda", "cuda_driver", "cuda_errors", "cuda_graphs", "tensorrt", "tensorrt_failures")
SUITE = ["tests/cuda/test_driver_cases.py", *(f"tests/engines/test_{name}.py" for name in _NAMES)]


def test_the_cuda_layer_passes_its_tests_through_the_real_bindings(
    on_driver: Callable[..., Any],
) -> None:
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-rfE"]
    words += ["-p", "tests.support.runtimes.driver_cuda"]
    done = on_driver(*words, *SUITE, DEVICES="2")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 250


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"DEVICES": "0"}, "cuda:0: no usable GPU: cudaErrorNoDevice: no CUDA-capable device"),
        ({"FAIL": "cuDevicePrimaryCtxRetain:2"}, "cuda:0: out of memory in cuDevicePrimaryCtxRet"),
        ({"FAIL": "cuInit:803"}, "cuda:0: no usable GPU: cudaErrorSystemDriverMismatch"),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else "",
)
def test_a_gpu_that_cannot_be_used_is_named_at_the_start(
    on_driver: Callable[..., Any], settings: dict[str, str], says: str
) -> None:
    code = (
        "from deploykit.core.errors import DeploykitError\n"
        "from deploykit.engines.cuda.driver import CudaDevice\n"
        "try: CudaDevice(0)\n"
        "except DeploykitError as exc: print(exc.exit_code, exc.message)"
    )
    done = on_driver("-c", code, **settings)
    assert done.stdout.startswith(f"3 {says}"), done.stdout + done.stderr
