"""The zoo's bounds on time and memory: each function measures one and returns its Markdown.

`benchmarks/zoo.py --speed` and `--huge` call them. What is compared runs in turn, in one session,
and the ratio is taken round by round; absolute figures belong to their machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from child import ROOT, Ran, deploykit, file_bytes, run

HERE = Path(__file__).resolve().parent
RESNET = "image:float32[N,3,224,224]"
CALIBRATION_IMAGES = 256
GIB = 2**30

Measure = Callable[[Path, int], str]

# What a user would write without us: the same model, the same exporter, one file.
_EXPORTER_ALONE = """
import sys, torch
from safetensors.torch import load_file
from deploykit.core.files import import_object
weights, arch, out = sys.argv[1:]
module = import_object(arch)()
module.load_state_dict(load_file(weights))
torch.onnx.export(
    module.eval(), (torch.zeros(2, 3, 224, 224),), out, dynamo=True, external_data=False,
    input_names=["image"], dynamic_shapes=({0: torch.export.Dim("N")},), opset_version=20,
    verbose=False,
)
"""
# 0.7 G normal numbers, layer by layer, into a state dict: no more than one layer in memory twice.
WRITE_HUGE = """
import sys, numpy, torch
from pathlib import Path
from safetensors.torch import save_file
from tests.support.zoo.models import LinearStack
folder = Path(sys.argv[1])
module = LinearStack()
with torch.no_grad():
    for seed, layer in enumerate(module.layers):
        random = torch.Generator().manual_seed(seed)
        layer.weight.normal_(std=(2 / layer.in_features) ** 0.5, generator=random)
save_file(module.state_dict(), folder / "huge.safetensors")
x = numpy.random.default_rng(0).standard_normal((8, 8192)).astype("float32")
numpy.savez(folder / "huge.npz", x=x)
"""
# Seconds of `repeats` calls of each file in turn, a line of JSON per round.
_RACE = """
import json, sys, time
import deploykit as dk
from deploykit.engines.data.samples import random_feeds
batch, rounds, repeats, *paths = sys.argv[1:]
engines = [dk.load(path, "cpu") for path in paths]
feeds = random_feeds(engines[0].inputs, {"N": int(batch)}, 0)
for number in range(int(rounds) + 1):
    seconds = []
    for engine in engines if number % 2 else engines[::-1]:
        started = time.perf_counter()
        for _ in range(int(repeats)):
            engine(feeds)
        seconds.append(time.perf_counter() - started)
    if number:
        print(json.dumps(seconds if number % 2 else seconds[::-1]), flush=True)
"""


class Failed(Exception):  # noqa: N818 - named as our errors are
    """A step of a measurement failed; the message says why."""


def chosen(*, speed: bool, huge: bool) -> list[tuple[str, Measure]]:
    """Titles and measurements, each of which turns a failed step into its text."""
    every: list[tuple[str, Measure, bool]] = [
        ("ResNet-18: export against the exporter alone", export_ratio, speed),
        ("ResNet-18: INT8 with 256 images, and its speed on this CPU", int8_resnet, speed),
        ("VGG-16: peak memory of quantize", lambda folder, _: vgg_memory(folder), speed),
        ("A 2.7 GB model", lambda folder, _: huge_model(folder), huge),
    ]
    return [(title, _reporting(measure)) for title, measure, wanted in every if wanted]


def _reporting(measure: Measure) -> Measure:
    def call(folder: Path, rounds: int) -> str:
        try:
            return measure(folder, rounds)
        except Failed as exc:
            return f"**Failed**: {exc}"

    return call


def export_ratio(folder: Path, rounds: int) -> str:
    """Fresh processes in turn, imports included, `rounds` of each after one that warms the disk."""
    files = prepared("resnet18", folder, samples=8)
    ours, alone = [], []
    for number in range(rounds + 1):
        first = _export(files, folder / "resnet18.onnx")
        command = [sys.executable, "-c", _EXPORTER_ALONE, files["model"], files["arch"]]
        second = _passed(run([*command, folder / "alone.onnx"]), "the exporter alone")
        if number:
            ours.append(first.seconds)
            alone.append(second.seconds)
    return (
        f"`deploykit export` with parity at every batch takes **{_times(ours, alone)}** the time "
        f"of `torch.onnx.export` alone (bound: 1.5), {rounds} rounds of fresh processes in turn: "
        f"median {_median(ours):.1f} s against {_median(alone):.1f} s."
    )


def int8_resnet(folder: Path, rounds: int) -> str:
    """Seconds of `quantize --to int8` on 256 images, then INT8 against float32 in one process."""
    files = prepared("resnet18", folder, samples=CALIBRATION_IMAGES)
    source = folder / "resnet18.onnx"
    _export(files, source)
    lines = []
    for runtime in ("tensorrt", "onnxruntime"):
        ran = _quantized(source, "int8", files["calib"], folder, "--runtime", runtime)
        lines.append(
            f"- `quantize --to int8 --runtime {runtime}` with {CALIBRATION_IMAGES} images: "
            f"**{ran.seconds:.1f} s** (bound: 60), peak {ran.peak_bytes / GIB:.2f} GiB"
        )
    for batch, repeats in ((1, 20), (8, 4)):
        command = [sys.executable, "-c", _RACE, batch, max(rounds, 15), repeats]
        race = _passed(run([*command, source, folder / "resnet18.int8.onnx"]), "the race")
        wide, narrow = zip(*(json.loads(line) for line in race.out.splitlines()), strict=True)
        calls_ms = [_median(list(side)) * 1e3 / repeats for side in (wide, narrow)]
        lines.append(
            f"- batch {batch}: INT8 for ONNX Runtime runs **{_times(wide, narrow)}** as fast as "
            f"float32 (bound: 2 with VNNI), {len(wide)} interleaved rounds of {repeats} calls: "
            f"{calls_ms[1]:.1f} ms against {calls_ms[0]:.1f} ms a call"
        )
    return "\n".join(lines)


def vgg_memory(folder: Path) -> str:
    """Peak RSS of each `quantize` against the float32 file."""
    files = prepared("vgg16", folder, samples=32)
    source = folder / "vgg16.onnx"
    _export(files, source)
    return _memory(source, files["calib"], folder, ("fp16", "int8", "int8-weight-only"))


def huge_model(folder: Path) -> str:
    """A generated stack of Linear layers past the 2 GiB of one file: export, then quantize."""
    _passed(run([sys.executable, "-c", WRITE_HUGE, folder]), "writing the weights")
    files: dict[str, Any] = {
        "model": str(folder / "huge.safetensors"),
        "arch": f"{ROOT / 'tests' / 'support' / 'zoo' / 'models.py'}:LinearStack",
        "inputs": ["x:float32[N,8192]"],
    }
    source = folder / "huge.onnx"
    ran = _export(files, source)
    first = (
        f"Weights {file_bytes(Path(files['model'])) / 1e9:.2f} GB. Export: {ran.seconds:.0f} s, "
        f"peak {ran.peak_bytes / GIB:.1f} GiB (bound for every step: 24), "
        f"file with its external data {file_bytes(source) / 1e9:.2f} GB.\n\n"
    )
    to = ("fp16", "int8", "int8-weight-only", "int4-weight-only")
    return first + _memory(source, str(folder / "huge.npz"), folder, to)


def _memory(source: Path, calib: str, folder: Path, precisions: tuple[str, ...]) -> str:
    """A table of time and peak memory, against 4 times the file and 1 GiB."""
    size = file_bytes(source)
    bound = 4 * size + GIB
    lines = [
        f"Float32 file {size / 1e6:,.0f} MB; bound 4x + 1 GiB = {bound / GIB:.2f} GiB.\n",
        "| to | s | peak RSS GiB | share of the bound | file MB | result |",
        "| --- | --: | --: | --: | --: | --- |",
    ]
    for to in precisions:
        out = folder / f"{source.stem}.{to}.onnx"
        ran = deploykit("quantize", source, "--to", to, "-o", out, "--calib", calib, "--json")
        result = ran.error.replace("|", "\\|") or "passed"
        lines.append(
            f"| {to} | {ran.seconds:.1f} | {ran.peak_bytes / GIB:.2f} | "
            f"{ran.peak_bytes / bound * 100:.0f} % | {file_bytes(out) / 1e6:,.0f} | {result} |"
        )
        for path in folder.glob(f"{source.stem}.{to}*"):
            path.unlink()
    return "\n".join(lines)


def prepared(name: str, folder: Path, *, samples: int) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "tests.support.zoo.members",
        name,
        folder,
        "--samples",
        samples,
    ]
    files = _passed(run(command), f"making {name}").document
    if "model" not in files:
        raise Failed(f"{name}: {files.get('missing', 'no files')}")
    return files


def _export(files: dict[str, Any], out: Path) -> Ran:
    inputs = [word for spec in files["inputs"] for word in ("--input", spec)]
    words = ["export", files["model"], "-o", out, "--arch", files["arch"], *inputs, "--json"]
    return _passed(deploykit(*words), f"exporting {out.stem}")


def _quantized(source: Path, to: str, calib: str, folder: Path, *more: object) -> Ran:
    out = folder / f"{source.stem}.{to}.onnx"
    words = ["quantize", source, "--to", to, "-o", out, "--calib", calib, *more, "--json"]
    return _passed(deploykit(*words), f"{source.stem} --to {to}")


def _passed(ran: Ran, what: str) -> Ran:
    if ran.code != 0:
        raise Failed(f"{what}: {ran.error}")
    return ran


def _times(over: Any, under: Any) -> str:
    from deploykit.evaluation.statistics import ratio

    found = ratio(over, under)
    return f"{found.value:.2f}x ({found.low:.2f} to {found.high:.2f})"


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
