"""INT8 on a CPU: ours beside float32 and ONNX Runtime's own quantizers, in short slices in turn.

    OMP_NUM_THREADS=1 python benchmarks/cpu_int8.py OUT.md

Seconds are of the calling thread's processor (`time.thread_time`; sessions have one thread), so
that other work on the machine counts little; ratios are taken slice by slice, and the middle one is
printed with the range of three quarters of them. The models have seeded weights. `fused`: with the
two fusions of ONNX Runtime's that we switch off. `no shapes`: without the shapes of the tensors
inside, which `quantize_dynamic` does not take (compare with these rows): ONNX Runtime then reuses
no buffers, and is faster.
"""

from __future__ import annotations

import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch
from quantizers import Encoder, Reader, embeddings, evaluate, export, images, outputs, quiet
from torch import nn

from deploykit.onnx_graph.graph import Graph
from deploykit.quantization.calibrate import calibrate
from deploykit.quantization.dynamic import to_dynamic
from deploykit.quantization.qdq import to_pairs
from deploykit.runtimes.data.samples import Samples
from deploykit.runtimes.onnxruntime.engine import SLOWER_ON_CPU, session_options

SLICES, SLICE_S = 21, 0.08


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
            return paths
        to_dynamic(graph).save(place("int8-dynamic"))
        quantization.quantize_dynamic(
            source.with_name("bare.onnx"),
            place("quantize_dynamic"),
            per_channel=True,
            extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
        )
    return paths


def session(path: Path, *, fused: bool) -> ort.InferenceSession:
    off = () if fused else SLOWER_ON_CPU
    return ort.InferenceSession(
        str(path), session_options(1), providers=["CPUExecutionProvider"], disabled_optimizers=off
    )


def race(sessions: Mapping[str, ort.InferenceSession], feeds: Mapping[str, np.ndarray]) -> dict:
    """Seconds of each slice, by name; every slice runs all of them, in turn and back."""
    first = next(iter(sessions.values()))
    for each in sessions.values():
        each.run(None, feeds)
    started = time.thread_time()
    first.run(None, feeds)
    calls = max(1, round(SLICE_S / max(time.thread_time() - started, 1e-6)))
    seconds: dict[str, list[float]] = {name: [] for name in sessions}
    for number in range(SLICES):
        for name in list(sessions)[:: 1 if number % 2 else -1]:
            started = time.thread_time()
            for _ in range(calls):
                sessions[name].run(None, feeds)
            seconds[name].append((time.thread_time() - started) / calls)
    return seconds


def rows(name: str, folder: Path) -> list[str]:
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
    lines = []
    for batch in (1, 8):
        sessions = {each: session(path, fused=False) for each, path in paths.items()}
        for each in ("float32", "int8"):
            sessions[f"{each}, fused"] = session(paths[each], fused=True)
        seconds = race(sessions, {"x": test[:batch]})
        for each, mine in seconds.items():
            ratios = sorted(a / b for a, b in zip(seconds["float32"], mine, strict=True))
            edge, middle = len(ratios) // 8, ratios[len(ratios) // 2]
            sqnr, _ = evaluate(wanted, outputs(paths[each.removesuffix(", fused")], test))
            lines.append(
                f"| {name} | {batch} | {each} | {middle:.2f} ({ratios[edge]:.2f} to "
                f"{ratios[-1 - edge]:.2f}) | {sorted(mine)[len(mine) // 2] * 1e3:.2f} | {sqnr} |"
            )
    return lines


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/cpu_int8.py OUT.md")
    torch.set_num_threads(1)
    made_with = (
        "`OMP_NUM_THREADS=1 python benchmarks/cpu_int8.py OUT.md`; Python "
        f"{platform.python_version()}, onnx {onnx.__version__}, onnxruntime {ort.__version__}, "
        f"torch {torch.__version__}. {SLICES} slices in turn in one process, processor seconds of "
        "one thread; the machine had other work."
    )
    head = "| model | batch | by | times float32's speed | ms of one thread | SQNR dB |"
    lines = [
        "# INT8 on a CPU",
        "",
        made_with,
        "",
        head,
        "| --- | --: | --- | --: | --: | --: |",
    ]
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            lines += rows(name, Path(folder))
            print("\n".join(lines[-20:]), flush=True)
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
