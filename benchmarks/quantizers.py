"""Compare our quantization with ONNX Runtime's and modelopt's, our float16 with onnxconverter's.

    python benchmarks/quantizers.py OUT.md [PYTHON]

PYTHON: an interpreter of a venv that has nvidia-modelopt[onnx], which needs one of its own (2 GB,
and importing it breaks ONNX Runtime's quantizer in the same process).

Writes a Markdown table and prints it. The models have seeded weights, normalised as training would
leave them, and inputs with the statistics of images or of embeddings; nothing is downloaded.
Needs torch, onnx and onnxruntime; a row whose tool is not installed is left out.

SQNR: 10 log10(signal / error) of the outputs against float32, in dB, on samples that were not
calibrated on; 20 dB more is a tenth of the error. Agreement: samples whose largest output is the
same one. float16 is run with `simulate`, which rounds as a GPU does, unlike ONNX Runtime's CPU.
"""

from __future__ import annotations

import contextlib
import io
import logging
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch
from torch import nn

from deploykit.engines.data.samples import Samples
from deploykit.engines.onnxruntime.engine import session_options
from deploykit.graph.graph import Graph
from deploykit.quantization.calibrate import METHODS, calibrate
from deploykit.quantization.half_precision import simulate, to_half
from deploykit.quantization.qdq import to_pairs

CALIBRATED, EVALUATED = 64, 128
ORT_METHODS = {"minmax": "MinMax", "percentile": "Percentile", "entropy": "Entropy"}


class Block(nn.Module):
    """ResNet's basic block."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(c_out),
            nn.ReLU(),
            nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(c_out),
        )
        short = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out))
        self.short = short if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.short(x))


def resnet18() -> nn.Module:
    widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
    blocks = [b for i, o, s in widths for b in (Block(i, o, s), Block(o, o, 1))]
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)]
    return nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1), *blocks, *pool)


def small_cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 49, 10)),
    )


class Encoder(nn.Module):
    """Two transformer layers and a head on the first position."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, activation="gelu")
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)[:, 0])


class Lstm(nn.Module):
    """Two layers and a head on the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(64, 128, 2, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x)[0][:, -1])


def images(channels: int, size: int) -> Callable[[int], np.ndarray]:
    """Noise of several scales, as images have, with a few bright pixels."""

    def make(count: int) -> np.ndarray:
        total = torch.zeros(count, channels, size, size)
        for scale in (4, 8, 16):
            coarse = torch.randn(count, channels, max(size // scale, 2), max(size // scale, 2))
            total += nn.functional.interpolate(coarse, size, mode="bilinear")
        spots = torch.rand_like(total) > 0.9995
        return torch.where(spots, total * 4, total).numpy()

    return make


def embeddings(length: int, width: int) -> Callable[[int], np.ndarray]:
    """Normal values, two of whose dimensions are large, as transformers' are."""

    def make(count: int) -> np.ndarray:
        values = torch.randn(count, length, width)
        values[..., :2] *= 6
        return values.numpy()

    return make


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], np.ndarray]]] = {
    "small CNN": (small_cnn, images(1, 28)),
    "ResNet-18": (resnet18, images(3, 128)),
    "encoder, 2 layers": (Encoder, embeddings(16, 128)),
    "LSTM, 2 layers": (Lstm, embeddings(12, 64)),
}


def export(build: Callable[[], nn.Module], data: np.ndarray, path: Path) -> None:
    torch.manual_seed(0)
    module = build().train()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = None  # the plain mean of what it sees
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.normal_(part.bias, 0, 0.2)
    with torch.no_grad():
        for start in range(0, 32, 16):
            module(torch.from_numpy(data[start : start + 16]))
    with quiet():
        torch.onnx.export(
            module.eval(),
            (torch.from_numpy(data[:2]),),
            path,
            dynamo=True,
            external_data=False,
            opset_version=20,
            input_names=["x"],
            output_names=["y"],
            dynamic_shapes=({0: torch.export.Dim("N")},),
            verbose=False,
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        yield
        logging.disable(logging.NOTSET)


class Reader:
    """What ONNX Runtime's quantizer reads its calibration data from."""

    def __init__(self, data: np.ndarray) -> None:
        self.batches = iter([{"x": data[i : i + 8]} for i in range(0, len(data), 8)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.batches, None)


def theirs(path: Path, data: np.ndarray, method: str, out: Path) -> None:
    """quantize_static with the options that TensorRT's parser accepts."""
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = out.with_suffix(".prepared.onnx")
    quant_pre_process(str(path), str(prepared), skip_symbolic_shape=True)
    quantization.quantize_static(
        str(prepared),
        str(out),
        Reader(data),
        quant_format=quantization.QuantFormat.QDQ,
        op_types_to_quantize=["Conv", "MatMul", "Gemm"],
        per_channel=True,
        activation_type=quantization.QuantType.QInt8,
        weight_type=quantization.QuantType.QInt8,
        calibrate_method=getattr(quantization.CalibrationMethod, ORT_METHODS[method]),
        extra_options={
            "ActivationSymmetric": True,
            "WeightSymmetric": True,
            "QuantizeBias": False,
            "OpTypesToExcludeOutputQuantization": ["Conv", "MatMul", "Gemm"],
        },
    )


MODELOPT = """
import sys
import numpy as np
from modelopt.onnx.quantization import quantize
model, data, out, method = sys.argv[1:]
quantize(model, quantize_mode="int8", calibration_data={"x": np.load(data)},
         calibration_method=method, output_path=out, high_precision_dtype="fp32")
"""


def modelopts(path: Path, data: np.ndarray, method: str, out: Path) -> str:
    """Run modelopt in a process of its own; "" or why it failed."""
    stored = out.with_suffix(".npy")
    np.save(stored, data)
    words = [sys.argv[2], "-c", MODELOPT, str(path), str(stored), str(out), method]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1][:120]


def outputs(path: Path, data: np.ndarray) -> np.ndarray:
    options = session_options(2)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return np.concatenate(
        [session.run(None, {"x": data[i : i + 16]})[0] for i in range(0, len(data), 16)]
    )


def evaluate(wanted: np.ndarray, got: np.ndarray) -> tuple[str, str]:
    error = float(np.sum((wanted - got) ** 2, dtype=np.float64))
    sqnr = 10 * np.log10(float(np.sum(wanted**2, dtype=np.float64)) / max(error, 1e-30))
    return f"{sqnr:.1f}", f"{np.mean(wanted.argmax(1) == got.argmax(1)) * 100:.1f} %"


def rows(name: str, folder: Path) -> Iterator[tuple[str, ...]]:
    build, make = MODELS[name]
    torch.manual_seed(1)
    data, test = make(CALIBRATED), make(EVALUATED)
    path, out = folder / "model.onnx", folder / "out.onnx"
    export(build, data, path)
    wanted = outputs(path, test)
    samples = Samples({"x": data}, None, "data")
    for method in ("minmax", *METHODS):
        for who in ("deploykit", *(["onnxruntime"] if method in ORT_METHODS else [])):
            start = time.perf_counter()
            if who == "deploykit":
                source = Graph.open(path)
                found = calibrate(source, samples, method=method)
                to_pairs(source, found).save(out)
            else:
                with quiet():
                    theirs(path, data, method, out)
            seconds = time.perf_counter() - start
            yield (
                name,
                f"int8 {method}",
                who,
                *evaluate(wanted, outputs(out, test)),
                f"{seconds:.1f}",
            )
    for method in ("max", "entropy") if len(sys.argv) > 2 else ():
        start = time.perf_counter()
        why = modelopts(path, data, method, out)
        seconds = time.perf_counter() - start
        found = (why, "") if why else evaluate(wanted, outputs(out, test))
        yield name, f"int8 {method}", "modelopt, its process", *found, f"{seconds:.1f}"
    for who in ("deploykit", "onnxconverter-common"):
        start = time.perf_counter()
        if who == "deploykit":
            source = Graph.open(path)
            half, _ = to_half(source, "fp16", calibrate(source, samples).ranges)
        else:
            try:
                from onnxconverter_common import float16
            except ImportError:
                continue
            with quiet():
                theirs_half = float16.convert_float_to_float16(onnx.load(path), keep_io_types=True)
            half = Graph(theirs_half)
        seconds = time.perf_counter() - start
        simulate(half).save(out)
        yield name, "fp16", who, *evaluate(wanted, outputs(out, test)), f"{seconds:.1f}"


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python benchmarks/quantizers.py OUT.md [PYTHON]")
    torch.set_num_threads(2)
    made_with = (
        f"`python benchmarks/quantizers.py OUT.md{' PYTHON' * (len(sys.argv) > 2)}`; "
        f"Python {platform.python_version()}, onnx {onnx.__version__}, "
        f"onnxruntime {ort.__version__}, torch {torch.__version__}. "
        f"{CALIBRATED} samples to calibrate on, {EVALUATED} to evaluate on; TensorRT's layout."
    )
    head = "| model | precision | by | SQNR dB | agreement | s |"
    lines = [
        "# Quantizers compared",
        "",
        made_with,
        "",
        head,
        "| --- | --- | --- | --: | --: | --: |",
    ]
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            for row in rows(name, Path(folder)):
                lines.append("| " + " | ".join(row) + " |")
                print(lines[-1], flush=True)
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
