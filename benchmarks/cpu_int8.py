"""INT8 on a CPU: ours beside float32 and ONNX Runtime's own quantizers, in short slices in turn.

    OMP_NUM_THREADS=1 python benchmarks/cpu_int8.py OUT.md

Seconds and ratios: `slices.py`. The models have seeded weights. `fused`: with the two fusions of
ONNX Runtime's that we switch off. `no shapes`: without the shapes of the tensors inside, which
`quantize_dynamic` does not take (compare with these rows): ONNX Runtime then reuses no buffers, and
is faster. `for TensorRT`: pairs at the inputs and weights alone, where NVIDIA's ModelOpt puts them.
`..., moved`: that file with its pairs placed by `build`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import torch
from quantizers import Encoder, Lstm, Reader, embeddings, evaluate, export, images, outputs, quiet
from slices import cells, main, race, session
from torch import nn

from deploykit.engines.data.samples import Samples
from deploykit.graph.graph import Graph
from deploykit.quantization.calibrate import calibrate
from deploykit.quantization.dynamic import to_dynamic
from deploykit.quantization.moving import move_foreign_pairs
from deploykit.quantization.qdq import to_pairs


def conv(i: int, o: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Module:
    body = nn.Conv2d(i, o, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(body, nn.BatchNorm2d(o), nn.SiLU())


class Csp(nn.Module):
    """A stage of a YOLO: convolutions with SiLU, a sum and a Concat."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 32, 3, 2), conv(32, 64, 3, 2))
        self.left, self.right = conv(64, 32, 1), conv(64, 32, 1)
        self.inner = nn.Sequential(conv(32, 32, 1), conv(32, 32, 3))
        self.end, self.head = nn.Sequential(conv(64, 64, 1), conv(64, 128, 3, 2)), nn.Linear(128, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        left = self.left(x)
        x = self.end(torch.cat([left + self.inner(left), self.right(x)], 1))
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    """Down twice and up again, with transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, wide = nn.MaxPool2d(2), (16, 32, 64)
        self.down = nn.ModuleList([conv(i, o, 3) for i, o in zip((3, *wide), wide, strict=False)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(o, i, 2, 2) for i, o in ((32, 64), (16, 32))])
        self.join = nn.ModuleList([conv(64, 32, 3), conv(32, 16, 3)])
        self.head = nn.Conv2d(16, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for number, down in enumerate(self.down):
            x = down(self.pool(x) if number else x)
            kept.append(x)
        for up, join, skip in zip(self.up, self.join, kept[-2::-1], strict=True):
            x = join(torch.cat([skip, up(x)], 1))
        return self.head(x)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], np.ndarray]]] = {
    "YOLO stage (SiLU)": (Csp, images(3, 160)),
    "U-Net (SiLU)": (UNet, images(3, 64)),
    "encoder, 2 layers": (Encoder, embeddings(64, 128)),
    "LSTM, 2 layers": (Lstm, embeddings(32, 64)),
}


def written(source: Path, data: np.ndarray) -> dict[str, Path]:
    """Each quantizer's file by its name."""
    from onnxruntime import quantization

    graph, paths = Graph.open(source), {"float32": source}

    def place(name: str) -> Path:
        paths[name] = source.with_name(f"{len(paths)}.onnx")
        return paths[name]

    found = calibrate(graph, Samples({"x": data}, None, "data"), method="minmax")
    to_pairs(graph, found, runtime="onnxruntime").save(place("int8"))
    bare = onnx.load(source)  # its quantizers stop at the shapes that an exporter wrote
    del bare.graph.value_info[:]
    onnx.save(bare, source.with_name("bare.onnx"))
    with quiet():
        quantization.quantize_static(
            source.with_name("bare.onnx"),
            place("quantize_static"),
            Reader(data),
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,  # its default finds no kernel on x86
            weight_type=quantization.QuantType.QInt8,
        )
        if any(node.op_type == "Conv" for node in bare.graph.node):
            foreign = to_pairs(graph, found)
            del foreign.model.metadata_props[:]  # what `build` would read of our own
            foreign.save(place("for TensorRT"))
            for each in ("quantize_static", "for TensorRT"):
                moved = move_foreign_pairs(Graph.open(paths[each]), "onnxruntime")
                if moved is not None:
                    moved.graph.save(place(f"{each}, moved"))
            return paths
        to_dynamic(graph).save(place("int8-dynamic"))
        quantization.quantize_dynamic(
            source.with_name("bare.onnx"),
            place("quantize_dynamic"),
            op_types_to_quantize=["MatMul", "Gemm", "LSTM"],
            per_channel=True,
            extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
        )
    return paths


def rows(name: str, folder: Path) -> Iterator[str]:
    build, make = MODELS[name]
    torch.manual_seed(1)
    data, test = make(32), make(64)
    source = folder / "model.onnx"
    export(build, data, source)
    paths, wanted = written(source, data), outputs(source, test)
    for each in [each for each in paths if not each.startswith("quantize")]:
        bare = onnx.load(paths[each])
        del bare.graph.value_info[:]
        paths[f"{each}, no shapes"] = folder / f"bare.{paths[each].name}"
        onnx.save(bare, paths[f"{each}, no shapes"])
    for batch in (1, 8):
        sessions = {each: session(path, fused=False) for each, path in paths.items()}
        for each in ("float32", "int8"):
            sessions[f"{each}, fused"] = session(paths[each], fused=True)
        seconds = race(sessions, {"x": test[:batch]})
        for each in seconds:
            sqnr, _ = evaluate(wanted, outputs(paths[each.removesuffix(", fused")], test))
            yield f"| {name} | {batch} | {each} | {cells(seconds, 'float32', each)} | {sqnr} |"


def every(folder: Path) -> Iterator[str]:
    for name in MODELS:
        (folder / name).mkdir()
        yield from rows(name, folder / name)


HEAD = (
    "| model | batch | by | times float32's speed | ms of one thread | SQNR dB |",
    "| --- | --: | --- | --: | --: | --: |",
)

if __name__ == "__main__":
    main("cpu_int8.py", "INT8 on a CPU", HEAD, every)
