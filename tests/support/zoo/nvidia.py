"""Ask NVIDIA's own ONNX parser and builder whether they take a file.

    python -m tests.support.zoo.nvidia MODEL.onnx      prints {"accepted": ..., "why": ..., ...}

The dynamic axes are the batch (axis 0) and, in sequences, the steps: it builds a strongly typed
network for batches of 1, 4 and 8.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import tensorrt as trt

BATCHES, OTHERS = (1, 4, 8), (2, 24, 32)
_NO_DRIVER = "cudaError 35"  # follows every other error where there is no GPU


@dataclass(frozen=True)
class Verdict:
    accepted: bool
    why: str  # the first error; empty if accepted
    layers: int = 0
    build_s: float = 0.0
    plan_bytes: int = 0
    library: str = ""  # what wrote the plan; the bindings of one can stand before the other


class _Log(trt.ILogger):  # type: ignore[misc]
    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.errors: list[str] = []

    def log(self, severity: trt.ILogger.Severity, text: str) -> None:
        if severity in (self.INTERNAL_ERROR, self.ERROR) and _NO_DRIVER not in text:
            self.errors.append(text.splitlines()[0])


_LOG = _Log()  # TensorRT keeps the first logger of a process and ignores every other


def verdict(path: Path) -> Verdict:
    """Parse and build `path`; what the builder says is in `why`."""
    _LOG.errors.clear()
    started = time.perf_counter()
    builder = trt.Builder(_LOG)
    typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(typed)
    parser = trt.OnnxParser(network, _LOG)
    if not parser.parse_from_file(str(path)):
        first = parser.get_error(0)
        return Verdict(False, f"{first.node_operator()} '{first.node_name()}': {first.desc()}")
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    for number in range(network.num_inputs):
        given = network.get_input(number)
        sizes = [
            [size] * 3 if size >= 0 else (OTHERS if axis else BATCHES)
            for axis, size in enumerate(given.shape)
        ]
        profile.set_shape(given.name, *zip(*sizes, strict=True))
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    taken = time.perf_counter() - started
    if plan is None:
        why = next(iter(_LOG.errors), "no plan, and no error in the log")
        return Verdict(False, why, network.num_layers, taken)
    content = memoryview(plan)
    library = "TensorRT for RTX" if bytes(content[:4]) == b"vtrt" else "TensorRT"
    return Verdict(True, "", network.num_layers, taken, content.nbytes, library)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(verdict(Path(sys.argv[1])))) + "\n")
