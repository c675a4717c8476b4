"""Compare the calibrators on trained models: `auto` should not lose 0.5 dB to the best other one.

    python benchmarks/calibrators.py OUT.md [FOLDER]

Trains six small networks within minutes, on scikit-learn's handwritten digits and on sentences
that it makes; FOLDER keeps their graphs for the next run. Nothing is downloaded.

`per tensor` is what was tried and not taken: each tensor's calibrator by the error of its own
values, weighted as `mse` does. `auto` takes one for the whole model, by the error at the outputs.

SQNR: 10 log10(signal / error) of the outputs against float32, in dB, on samples that were neither
trained nor calibrated on. Both layouts: TensorRT's (symmetric, inputs alone) and ONNX Runtime's.
"""

from __future__ import annotations

import math
import platform
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch
from sklearn.datasets import load_digits
from torch import nn

import deploykit as dk
from deploykit.engines.data.samples import Samples
from deploykit.graph.edit import Editor, fold
from deploykit.graph.graph import Graph
from deploykit.quantization.calibrate import METHODS, Range, calibrate, importance
from deploykit.quantization.qdq import to_pairs

TRAIN, CALIBRATE = 1077, 180  # of the 1,797 digits; the other 540 test
OUTLIERS = (3, 17, 40)  # channels of a LayerNorm that are large, as in trained ViTs and LLMs
RESCALED = 30.0
WORDS, LENGTH, CLASSES = 48, 20, 10
LAYOUTS = {"tensorrt": "TensorRT", "onnxruntime": "ONNX Runtime"}
BOUND_DB = 0.5


class Residual(nn.Module):
    """ResNet's basic block."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(c_in, c_out, 3, stride),
            nn.ReLU(),
            *_convolution(c_out, c_out, 3),
        )
        plain = stride == 1 and c_in == c_out
        self.short = (
            nn.Identity() if plain else nn.Sequential(*_convolution(c_in, c_out, 1, stride))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.short(x))


class Inverted(nn.Module):
    """MobileNetV2's block: expand, filter each channel, project."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        wide = 4 * c_in
        self.body = nn.Sequential(
            *_convolution(c_in, wide, 1),
            nn.ReLU6(),
            *_convolution(wide, wide, 3, stride, groups=wide),
            nn.ReLU6(),
            *_convolution(wide, c_out, 1),
        )
        self.adds = stride == 1 and c_in == c_out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.adds else self.body(x)


class Encoder(nn.Module):
    """Transformer layers: LayerNorm before each part (ViT) or after it (BERT)."""

    def __init__(self, width: int, layers: int, *, before: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(width, before) for _ in range(layers))
        self.last = nn.LayerNorm(width) if before else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class _Layer(nn.Module):
    def __init__(self, width: int, before: bool) -> None:
        super().__init__()
        self.before, self.heads = before, 4
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.before:
            x = x + self._attend(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self._attend(x))
        return self.norm2(x + self.mlp(x))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.qkv(x).reshape(rows, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(width // self.heads), -1)
        return self.out((weights @ v).transpose(1, 2).reshape(rows, length, width))


class Vit(nn.Module):
    """A ViT on 16 patches of 4x4 pixels. `outliers`: how large some LayerNorm channels start."""

    def __init__(self, outliers: float = 1.0) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 64, 4, 4)
        self.places = nn.Parameter(torch.randn(1, 16, 64) * 0.1)
        self.encoder, self.head = Encoder(64, 4, before=True), nn.Linear(64, 10)
        for norm in self.modules():
            if isinstance(norm, nn.LayerNorm):
                norm.weight.data[list(OUTLIERS)] *= outliers

    def rescale(self, factor: float) -> None:
        """Make channels of each LayerNorm larger and their weights smaller: the same function."""
        for layer in self.encoder.layers:
            for norm, reader in ((layer.norm1, layer.qkv), (layer.norm2, layer.mlp[0])):
                for channel in OUTLIERS:
                    norm.weight.data[channel] *= factor
                    norm.bias.data[channel] *= factor
                    reader.weight.data[:, channel] /= factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.encoder(x).mean(1))


class Bert(nn.Module):
    """Names the word after the marker, as a head on the first position."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 64), nn.Embedding(LENGTH, 64)
        self.norm = nn.LayerNorm(64)
        self.encoder, self.head = Encoder(64, 3, before=False), nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words(x) + self.places.weight)
        return self.head(self.encoder(x)[:, 0])


def resnet() -> nn.Module:
    blocks = [Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return nn.Sequential(*_convolution(1, 16, 3), nn.ReLU(), *blocks, *head)


def mobilenet() -> nn.Module:
    sizes = [(16, 16, 1), (16, 24, 2), (24, 24, 1), (24, 40, 2), (40, 40, 1), (40, 40, 1)]
    head = (*_convolution(40, 128, 1), nn.ReLU6())
    head = (*head, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    return nn.Sequential(
        *_convolution(1, 16, 3), nn.ReLU6(), *(Inverted(*size) for size in sizes), *head
    )


def _convolution(
    c_in: int, c_out: int, size: int, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    kernel = nn.Conv2d(c_in, c_out, size, stride, size // 2, groups=groups, bias=False)
    return [kernel, nn.BatchNorm2d(c_out)]


def digits() -> tuple[np.ndarray, np.ndarray]:
    """All handwritten digits, 16x16, and their labels."""
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    small = torch.from_numpy(found.images[order].astype(np.float32) / 16)[:, None]
    large = nn.functional.interpolate(small, 16, mode="bilinear", align_corners=False)
    return large.numpy(), found.target[order].astype(np.int64)


def sentences() -> tuple[np.ndarray, np.ndarray]:
    """Random words, one of them the marker 0; the label is the class of the word after it."""
    random = np.random.default_rng(0)
    words = random.integers(1, WORDS, (TRAIN * 8 + CALIBRATE + 540, LENGTH))
    place = random.integers(1, LENGTH - 1, len(words))
    rows = np.arange(len(words))
    words[rows, place] = 0
    return words.astype(np.int64), (words[rows, place + 1] % CLASSES).astype(np.int64)


Make = Callable[[], nn.Module]
MODELS: dict[str, tuple[Make, Callable[[], tuple[np.ndarray, np.ndarray]], int]] = {
    "ViT": (Vit, digits, 14),
    "ViT, outliers trained": (lambda: Vit(20.0), digits, 14),
    "ViT, outliers rescaled": (Vit, digits, 14),
    "MobileNet-like": (mobilenet, digits, 8),
    "ResNet-like": (resnet, digits, 6),
    "BERT-like": (Bert, sentences, 8),
}


def train(make: Make, x: np.ndarray, labels: np.ndarray, epochs: int) -> nn.Module:
    torch.manual_seed(0)
    model = make().train()
    steps = epochs * math.ceil(len(x) / 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            loss = nn.functional.cross_entropy(
                model(torch.from_numpy(x[rows])), torch.from_numpy(labels[rows])
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def prepare(name: str, folder: Path) -> tuple[Path, np.ndarray, np.ndarray, float]:
    """The graph, the samples to calibrate and to test on, and the accuracy on the latter."""
    make, data, epochs = MODELS[name]
    x, labels = data()
    path = folder / f"{name.replace(' ', '-')}.onnx"
    calib, test = x[-540 - CALIBRATE : -540], x[-540:]
    if not path.exists():
        model = train(make, x[: -540 - CALIBRATE], labels[: -540 - CALIBRATE], epochs)
        if "rescaled" in name:
            model.rescale(RESCALED)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model,
                (torch.from_numpy(x[:2]),),
                path,
                dynamo=True,
                external_data=False,
                opset_version=20,
                input_names=["x"],
                output_names=["y"],
                dynamic_shapes=({0: torch.export.Dim("N")},),
                verbose=False,
            )
    right = outputs(path, test).argmax(1) == labels[-540:]
    return path, calib, test, float(right.mean())


def outputs(path: Path, data: np.ndarray) -> np.ndarray:
    providers = ["CPUExecutionProvider"]
    session = ort.InferenceSession(str(path), session_options(), providers=providers)
    return session.run(None, {"x": data})[0]


def session_options() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def sqnr_db(wanted: np.ndarray, got: np.ndarray) -> float:
    error = float(np.sum((wanted - got) ** 2, dtype=np.float64))
    return 10 * math.log10(float(np.sum(wanted**2, dtype=np.float64)) / max(error, 1e-30))


def per_tensor(path: Path, calib: np.ndarray, runtime: str, out: Path) -> None:
    """INT8 with the calibrator of each tensor that loses least of the tensor itself."""
    source = Graph.open(path)
    found = calibrate(source, Samples({"x": calib}, None, "data"))
    editor = Editor(source)
    fold(editor)
    weights = importance(editor)
    model = onnx.load(path)
    there = {value.name for value in model.graph.output}
    names = list(found.cut[METHODS[0]])
    for name in set(names) - there:
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, 1, None))
    session = ort.InferenceSession(
        model.SerializeToString(), session_options(), providers=["CPUExecutionProvider"]
    )
    best = {}
    for name, values in zip(names, session.run(names, {"x": calib}), strict=True):
        errors = {
            method: local_error(values, found.cut[method][name], runtime, weights.get(name))
            for method in METHODS
        }
        best[name] = found.cut[min(errors, key=lambda method: errors[method])][name]
    chosen = replace(found, clipped={**found.ranges, **best})
    to_pairs(source, chosen, runtime=runtime).save(out)


def local_error(values: np.ndarray, kept: Range, runtime: str, weights: np.ndarray | None) -> float:
    low, high, steps = -kept.peak, kept.peak, 254
    if runtime == "onnxruntime":
        low, high, steps = min(kept.low, 0.0), max(kept.high, 0.0), 255
    step = max(high - low, 1e-30) / steps
    stored = np.clip(np.rint(values / step), round(low / step), round(high / step)) * step
    squared = (values - stored).astype(np.float64) ** 2
    return float(np.mean(squared if weights is None else squared * weights))


def row(name: str, runtime: str, folder: Path) -> tuple[list[str], float]:
    """One line of the table, and what `auto` loses to the best single calibrator, in dB."""
    path, calib, test, accuracy = prepare(name, folder)
    wanted, out, data = outputs(path, test), folder / "out.onnx", folder / "calib.npz"
    np.savez(data, x=calib)

    source = Graph.open(path)
    ranges = calibrate(source, Samples({"x": calib}, None, "data"))
    alone = []
    for method in METHODS:
        to_pairs(source, ranges.using(method), runtime=runtime).save(out)
        alone.append(sqnr_db(wanted, outputs(out, test)))
    try:
        made = dk.quantize(path, "int8", out, calib=data, runtime=runtime, force=True)
    except dk.GateFailed as exc:
        made = exc.result
    record = made.evidence.calibration
    assert record is not None
    chosen, method = sqnr_db(wanted, outputs(made.path, test)), record.method
    smooth = "yes" if record.smoothed else "-"
    per_tensor(path, calib, runtime, out)
    cells = [*alone, sqnr_db(wanted, outputs(out, test)), chosen]
    lost = max(alone) - chosen
    texts = [f"{cell:.1f}" for cell in cells]
    head = [f"{name} ({accuracy * 100:.1f} %)", LAYOUTS[runtime]]
    return [*head, *texts, method, f"{-lost:+.1f}", smooth], lost


def made_with(script: str = "calibrators.py") -> str:
    cpu = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return (
        f"`python benchmarks/{script} OUT.md`; {cpu[1] if cpu else 'unknown CPU'}, "
        f"Python {platform.python_version()}, onnx {onnx.__version__}, onnxruntime "
        f"{ort.__version__}, torch {torch.__version__}."
    )


def folder_of(arguments: list[str], scratch: str) -> Path:
    """Where the graphs are kept: the second argument, else `scratch`."""
    if len(arguments) not in (2, 3):
        sys.exit(f"usage: python {arguments[0]} OUT.md [FOLDER]")
    torch.set_num_threads(1)
    folder = Path(arguments[2] if len(arguments) == 3 else scratch)
    folder.mkdir(exist_ok=True)
    return folder


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = folder_of(sys.argv, scratch)
        table(Path(sys.argv[1]), folder)


def table(out: Path, folder: Path) -> None:
    columns = ["model (top-1)", "layout", *METHODS, "per tensor", "auto", "it took"]
    columns += ["to the best", "smoothed"]
    lines = [
        "# Calibrators compared",
        "",
        f"{made_with()} SQNR in dB on 540 samples, {CALIBRATE} others to calibrate on.",
        "",
        "| " + " | ".join(columns) + " |",
        "| --- | --- |" + " --: |" * (len(columns) - 2),
    ]
    worst = -math.inf
    for name in MODELS:
        for runtime in LAYOUTS:
            cells, lost = row(name, runtime, folder)
            worst = max(worst, lost)
            lines.append("| " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    lines += [
        "",
        f"`auto` is at most {worst:.2f} dB below the best other one (bound: {BOUND_DB}).",
    ]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(lines[-1])
    sys.exit(worst > BOUND_DB)


if __name__ == "__main__":
    main()
