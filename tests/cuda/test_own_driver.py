"""The CUDA layer through NVIDIA's real cuda-bindings, on a CUDA driver of our own (`fakecuda.c`).

The library is libcuda.so.1 in a process of its own, which runs the tests of the CUDA layer and of
the TensorRT runtime once more, and those of `test_driver_cases.py`. No GPU computes anything: this
shows the calls, their order, threads, memory and errors, not a driver's speed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nvidia import fetch
from tests.support.installed import needs

needs("cuda")

ROOT = Path(__file__).resolve().parents[2]
_NAMES = ("cuda", "cuda_driver", "cuda_errors", "cuda_graphs", "tensorrt", "tensorrt_failures")
SUITE = ["tests/cuda/test_driver_cases.py", *(f"tests/runtimes/test_{name}.py" for name in _NAMES)]


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with our libcuda.so.1, for LD_LIBRARY_PATH."""
    folder = tmp_path_factory.mktemp("cuda")
    try:
        fetch.check_machine()
        source = Path(__file__).with_name("fakecuda.c").read_text(encoding="utf-8")
        fetch.library(folder / "libcuda.so.1", source)
    except fetch.Unobtainable as exc:
        pytest.skip(str(exc))
    return folder


def on_driver(folder: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Python on this driver, with FAKECUDA_ `settings`."""
    given = {key: text for key, text in os.environ.items() if not key.startswith("PYTEST_")}
    ours = {f"FAKECUDA_{key}": text for key, text in settings.items()}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**given, **ours, "LD_LIBRARY_PATH": str(folder), "DEPLOYKIT_TEST_CUDA": "driver"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_the_cuda_layer_passes_its_tests_through_the_real_bindings(driver: Path) -> None:
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-rfE"]
    words += ["-p", "tests.support.runtimes.driver_cuda"]
    done = on_driver(driver, *words, *SUITE, DEVICES="2")
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
    driver: Path, settings: dict[str, str], says: str
) -> None:
    code = (
        "from deploykit.core.errors import DeploykitError\n"
        "from deploykit.runtimes.cuda.driver import CudaDevice\n"
        "try: CudaDevice(0)\n"
        "except DeploykitError as exc: print(exc.exit_code, exc.message)"
    )
    done = on_driver(driver, "-c", code, **settings)
    assert done.stdout.startswith(f"3 {says}"), done.stdout + done.stderr
