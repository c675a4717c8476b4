"""A process ends while a daemon thread is inside CUDA or another native library.

Our driver's destructor ends the process by a signal where a thread is inside, as TensorRT for RTX
1.7 does; torch does the same by itself.
"""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.support.runtimes import own_cuda

ENDING = """
import sys, threading, time
from deploykit.core import subprocesses as ending
ending.LIMIT_S = {limit_s}
inside = threading.Event()
def start(work):
    def loop():
        while True:
            inside.set()
            work()
    threading.Thread(target=loop, daemon=True).start()
    inside.wait()
    time.sleep(0.05)
"""
A_PIPELINE = """
from deploykit.engines.cuda.execution import Pipeline
from tests.support.runtimes.cuda_runs import pipeline, rows, FakeCuda
run = pipeline(FakeCuda())
run({"x": rows(1)})
run.driver.library.fakecuda_wait_ms(%s)
start(lambda: run({"x": rows(1)}))
sys.exit(3)
"""
AN_ENGINE_OF_THE_SERVER = """
from deploykit.serving.batching.batcher import Batcher
from deploykit.serving.batching.queue import BatchPolicy, Pending
NEVER_US = 1 << 62
from tests.support.fake_engine import FakeEngine
from tests.support.runtimes.cuda_runs import rows
from tests.support.runtimes.own_cuda import library
class Slow(FakeEngine):
    def __call__(self, feeds):
        inside.set()
        library().fakecuda_stay(%s)
        return super().__call__(feeds)
batcher = Batcher([Slow()], BatchPolicy(max_batch=1))
for n in range(100):
    batcher.submit(Pending({"x": rows(1)}, 1, (), print, 0, NEVER_US, NEVER_US))
inside.wait()
sys.exit(3)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python with `code` on our driver."""
    own_cuda.library()  # skips where there is none
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("code", [A_PIPELINE, AN_ENGINE_OF_THE_SERVER], ids=["pipeline", "server"])
def test_a_call_under_way_is_waited_for_and_no_other_begins(code: str) -> None:
    done = run(ENDING.format(limit_s=60) + code % 100)
    assert (done.returncode, done.stderr) == (3, "")


def test_a_call_that_hangs_is_left_behind() -> None:
    started = time.monotonic()
    done = run(ENDING.format(limit_s=0.1) + A_PIPELINE % 120_000)
    assert (done.returncode, done.stderr) == (3, "")
    assert time.monotonic() - started < 100
