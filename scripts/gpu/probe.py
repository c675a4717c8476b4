"""What of CUDA, TensorRT, ONNX Runtime and torch this machine has, each asked in its own process.

    python -m scripts.gpu.probe [--out DIR]

Prints one JSON document, also to DIR/probe.json: versions, places, devices, and the reason of each
that does not load. Exit 1 where CUDA's driver API does not answer; what is only absent is no
failure.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from deploykit.core.machine import this_machine

LIMIT_S = 120
QUESTIONS = {
    "cuda": """
from importlib.metadata import version
from deploykit.engines.cuda.driver import CudaDevice
device = CudaDevice(0)
free, total = device.memory()
answer = {**device.describe(), "free_bytes": free, "total_bytes": total,
          "bindings": version("cuda-bindings")}
""",
    "tensorrt": """
import tensorrt as trt
from deploykit.engines.tensorrt.compatibility import tensorrt_cuda
from deploykit.engines.tensorrt.compatibility import logger
builder = trt.Builder(logger(trt))
answer = {"version": trt.__version__, "file": trt.__file__, "cuda": tensorrt_cuda(),
          "dla_cores": builder.num_DLA_cores, "runtime": trt.Runtime(logger(trt)) is not None}
""",
    "onnxruntime": """
import onnxruntime as ort
from deploykit.engines.onnxruntime.engine import preload
preload(ort)
answer = {"version": ort.__version__, "file": ort.__file__,
          "providers": ort.get_available_providers(), "cuda": getattr(ort, "cuda_version", "")}
""",
    "torch": """
import torch
answer = {"version": torch.__version__, "file": torch.__file__, "cuda": torch.version.cuda,
          "sees": torch.cuda.device_count(), "sum": float(torch.ones(8, device="cuda").sum())}
""",
    "nvml": """
import pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
answer = {"driver": str(pynvml.nvmlSystemGetDriverVersion()),
          "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)}
""",
}
_SAY = "\nimport json; print('\\n' + json.dumps(answer))"


def ask(code: str) -> dict[str, Any]:
    """`answer` of the code, or "error": its last line, or how it ended."""
    command = [sys.executable, "-c", code + _SAY]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {LIMIT_S} s"}
    lines = (done.stderr if done.returncode else done.stdout).splitlines()
    if done.returncode == 0:
        return dict(json.loads(lines[-1]))
    return {"error": (lines or [f"exit {done.returncode}"])[-1][:300], "code": done.returncode}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    found: dict[str, Any] = {"machine": this_machine().to_dict()}
    for name, code in QUESTIONS.items():
        found[name] = ask(code)
        if out is not None:
            (out / "probe.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    sys.stdout.write(json.dumps(found) + "\n")
    if "error" in found["cuda"]:
        sys.stderr.write(f"error: {found['cuda']['error']}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
