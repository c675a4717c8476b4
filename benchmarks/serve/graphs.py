"""The models that are served, and what they do without a server.

`tiny`: two small convolutions on 28x28, so that the server is most of what is measured. `mnist`:
the MNIST CNN of models/, with three times as much to compute. `resnet18`: batch norms folded in.
All with seeded weights, float32, input "x", output "y", dynamic batch axis; only their size
matters.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from mnist_graph import Weights, save_graph, write_mnist


@dataclass(frozen=True)
class Model:
    """`batches` and `ceiling_s`: the sizes that the ceiling is taken at, and the time of each."""

    name: str
    shape: tuple[int, ...]
    write: Callable[[Path], Path]
    connections: tuple[int, ...]
    batches: tuple[int, ...]
    ceiling_s: float
    slow: bool  # some dozen requests a second: the edges of a run count

    def rows(self, batch: int = 1) -> np.ndarray:
        """Seeded values with three decimals, so that JSON is as short as it can be."""
        rows = np.random.default_rng(0).random((batch, *self.shape), dtype=np.float32)
        return np.round(rows, 3)


def write_tiny(path: Path) -> Path:
    """Write the graph (opset 17, 9,098 weights) to `path`."""
    weight = Weights()

    def layer(number: int, source: str, fan_in: int, fan_out: int) -> list[onnx.NodeProto]:
        kernel = weight(f"w{number}", fan_out, fan_in, 3, 3)
        bias = weight(f"b{number}", fan_out)
        inner = [f"c{number}", f"r{number}"]
        pool = {"kernel_shape": [2, 2], "strides": [2, 2]}
        return [
            helper.make_node("Conv", [source, kernel, bias], inner[:1], pads=[1] * 4),
            helper.make_node("Relu", inner[:1], inner[1:]),
            helper.make_node("MaxPool", inner[1:], [f"p{number}"], **pool),
        ]

    nodes = [*layer(1, "x", 1, 8), *layer(2, "p1", 8, 16)]
    nodes += [
        helper.make_node("Flatten", ["p2"], ["f"]),
        helper.make_node("Gemm", ["f", weight("w3", 10, 784), weight("b3", 10)], ["y"], transB=1),
    ]
    return save_graph("tiny", nodes, [1, 28, 28], 10, weight, path)


def write_resnet18(path: Path) -> Path:
    """Write the graph (opset 17, 11.7 million weights) to `path`."""
    weight = Weights()
    nodes: list[onnx.NodeProto] = []

    def node(kind: str, inputs: Sequence[str], **attributes: object) -> str:
        out = f"t{len(nodes)}"
        nodes.append(helper.make_node(kind, inputs, [out], **attributes))
        return out

    def conv(source: str, fan_in: int, fan_out: int, size: int, stride: int) -> str:
        name = f"{len(nodes)}"
        kernel = weight(f"w{name}", fan_out, fan_in, size, size)
        bias = weight(f"b{name}", fan_out)
        pads = [size // 2] * 4
        return node("Conv", [source, kernel, bias], strides=[stride, stride], pads=pads)

    top = node("Relu", [conv("x", 3, 64, 7, 2)])
    top = node("MaxPool", [top], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    wide = 64
    for planes in (64, 128, 256, 512):
        for block in range(2):
            stride = 2 if block == 0 and planes > 64 else 1
            path_in = top if wide == planes else conv(top, wide, planes, 1, stride)
            top = node("Relu", [conv(top, wide, planes, 3, stride)])
            top = node("Relu", [node("Add", [conv(top, planes, planes, 3, 1), path_in])])
            wide = planes
    top = node("Flatten", [node("GlobalAveragePool", [top])])
    last = [top, weight("w", 1000, 512), weight("b", 1000)]
    nodes.append(helper.make_node("Gemm", last, ["y"], transB=1))
    return save_graph("resnet18", nodes, [3, 224, 224], 1000, weight, path)


_SMALL = (1, 28, 28), (1, 32, 128), (1, 8, 32, 64)
MODELS = {
    "tiny": Model("tiny", _SMALL[0], write_tiny, *_SMALL[1:], 0.5, slow=False),
    "mnist": Model("mnist", _SMALL[0], write_mnist, *_SMALL[1:], 0.5, slow=False),
    "resnet18": Model(
        "resnet18", (3, 224, 224), write_resnet18, (8, 32), (1, 8, 16, 32), 2.0, slow=True
    ),
}


def ceiling(session: object, model: Model) -> dict[int, float]:
    """Images per second of `session` alone at each batch size, one caller, a warm-up call each."""
    found = {}
    for batch in model.batches:
        feeds = {"x": model.rows(batch)}
        session.run(["y"], feeds)
        begin_s, runs = time.perf_counter(), 0
        while (now_s := time.perf_counter()) < begin_s + model.ceiling_s:
            session.run(["y"], feeds)
            runs += 1
        found[batch] = runs * batch / (now_s - begin_s)
    return found
