"""Open and save an ONNX model three ways, each in a process of its own: seconds and peak memory.

`protobuf`: `onnx.load`, `onnx.save`; `onnx_ir`: `onnx_ir.load`, `onnx_ir.save`; `graph`: our own
handle, which also checks the model. Run: python benchmarks/onnx_ir_spike.py [FOLDER]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

WAYS = ("protobuf", "onnx_ir", "graph")
REPEATS = 3


def resnet18(path: Path) -> None:
    """ResNet-18's convolutions and classifier, one after the other, with random weights."""
    shapes = [(64, 3, 7, 7), *[(64, 64, 3, 3)] * 4]
    for wide in (128, 256, 512):
        half = wide // 2
        shapes += [(wide, half, 3, 3), *[(wide, wide, 3, 3)] * 3, (wide, half, 1, 1)]
    rng = np.random.default_rng(0)
    nodes, weights = [], []
    for number, shape in enumerate([*shapes, (1000, 512, 1, 1)]):
        values = rng.standard_normal(shape, np.float32)
        weights.append(numpy_helper.from_array(values, f"w{number}"))
        nodes.append(helper.make_node("Conv", ["x", f"w{number}"], [f"y{number}"]))
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", None, None, None])
    outputs = [
        helper.make_tensor_value_info(n.output[0], 1, ["N", None, None, None]) for n in nodes
    ]
    graph = helper.make_graph(nodes, "convolutions", [x], outputs, weights)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path
    )


def linear_layers(path: Path, layers: int = 30, width: int = 2048) -> None:
    """Thirty square layers: 503 MB of weights."""
    rng = np.random.default_rng(0)
    nodes, weights = [], []
    for number in range(layers):
        values = rng.standard_normal((width, width), np.float32) / np.float32(width**0.5)
        weights.append(numpy_helper.from_array(values, f"w{number}"))
        end = f"h{number + 1}" if number < layers - 1 else "y"
        nodes.append(helper.make_node("MatMul", [f"h{number}", f"w{number}"], [f"m{number}"]))
        nodes.append(helper.make_node("Relu", [f"m{number}"], [end]))
    nodes[0].input[0] = "x"
    x, y = (
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", width]) for name in "xy"
    )
    graph = helper.make_graph(nodes, "layers", [x], [y], weights)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path
    )


def once(way: str, path: Path) -> None:
    """Print seconds to open, seconds to save, and the peak of the process above its imports."""
    if way == "onnx_ir":
        import onnx_ir
    elif way == "graph":
        from deploykit.onnx_graph.graph import Graph
    out = path.with_name(f"out.{way}.onnx")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = peak_mib()
    began = time.perf_counter()
    if way == "protobuf":
        model = onnx.load(path)
    elif way == "onnx_ir":
        ir = onnx_ir.load(path)
    else:
        graph = Graph.open(path)
    opened = time.perf_counter()
    if way == "protobuf":
        onnx.save(model, out)
    elif way == "onnx_ir":
        onnx_ir.save(ir, out)
    else:
        graph.save(out)
    saved = time.perf_counter()
    out.unlink()
    print(opened - began, saved - opened, peak_mib() - before)


def peak_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return float(status.split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    if len(sys.argv) == 4:
        once(sys.argv[2], Path(sys.argv[3]))
        return
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        for name, make in (("resnet18", resnet18), ("layers", linear_layers)):
            path = Path(folder) / f"{name}.onnx"
            make(path)
            print(f"{name}, {path.stat().st_size / 1e6:.0f} MB")
            for way in WAYS:
                runs = []
                for _ in range(REPEATS):
                    command = [sys.executable, __file__, "once", way, str(path)]
                    done = subprocess.run(command, check=True, capture_output=True, text=True)
                    runs.append([float(value) for value in done.stdout.split()])
                open_s, save_s, peak = np.median(runs, axis=0)
                print(f"  {way:9} open {open_s:6.3f} s  save {save_s:6.3f} s  {peak:5.0f} MiB")


if __name__ == "__main__":
    main()
