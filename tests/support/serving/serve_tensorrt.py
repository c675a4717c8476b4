"""`deploykit` where `m.onnx` was built for a GPU, for test_serve_tensorrt_life.py.

In: the arguments of deploykit, m.onnx in the working folder, and GPU_TAKES_S for each call, which
does not end while there is a file `hold`. The GPU, its CUDA and its TensorRT are those of
`gpu_machine`. Out: m.trt; a line on standard error for each call that the GPU begins, and at the
end one with what of CUDA is still held.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

import deploykit as dk
from deploykit.building.builder import Shapes
from deploykit.cli.main import main
from tests.support.runtimes.gpu_machine import LAYERS, Cuda, gpu_machine, plan


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


with pytest.MonkeyPatch.context() as patch:
    Path("machine").mkdir()
    with gpu_machine(
        Path("machine").resolve(), patch, content=plan((1, 2, 2), layers=LAYERS)
    ) as does:
        dk.build("m.onnx", "l4", out="m.trt", shapes=Shapes(batch="1,2,2"))
        waited = Cuda.wait

        def wait(self: Cuda, event: int) -> None:
            say("the GPU is busy")
            while Path("hold").exists():
                time.sleep(0.01)
            time.sleep(float(os.environ["GPU_TAKES_S"]))
            waited(self, event)

        patch.setattr(Cuda, "wait", wait)
        try:
            main()
        finally:
            say(f"held: {does.seen['cuda'].held()}")
