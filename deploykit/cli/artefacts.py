"""The commands that make artefacts and look into them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploykit.cli import output, texts
from deploykit.cli.types import Device, Json, Trust

Model = Annotated[Path, typer.Argument(help="The .onnx file.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="The file to write.")]
Calib = Annotated[
    Path | None, typer.Option(help="Calibration data: .npz of the inputs, or a folder.")
]
Labelled = Annotated[
    Path | None, typer.Option(help="Labelled data to measure accuracy on: .npz or a folder.")
]
MetricOption = Annotated[
    str | None, typer.Option(help="top1, perplexity, pkg.mod:callable or ./file.py:callable.")
]
MaxDrop = Annotated[
    float | None, typer.Option(help="Largest accuracy drop; 0.01, the default, is one point.")
]


def register(app: typer.Typer) -> None:
    for command in (export, quantize, build, inspect, compare, predict):
        app.command()(command)


def export(
    model: Annotated[
        Path, typer.Argument(help="A .pt, .pth, .pt2, .safetensors or TorchScript file.")
    ],
    out: Out = None,
    arch: Annotated[
        str | None, typer.Option(help="pkg.mod:callable or ./file.py:callable.")
    ] = None,
    input_: Annotated[
        list[str] | None,
        typer.Option("--input", help="'x:float32[N,3,224,224]', for each input."),
    ] = None,
    batch: Annotated[str, typer.Option(help="'dynamic', or a fixed size.")] = "dynamic",
    opset: Annotated[int | None, typer.Option(help="ONNX operator set.")] = None,
    profile: Annotated[
        str | None, typer.Option(help="The target: its opset, and a preflight of the operators.")
    ] = None,
    exporter: Annotated[
        str, typer.Option(help="auto, dynamo, or torchscript, the older one.")
    ] = "auto",
    preprocess: Annotated[
        str | None, typer.Option(help="imagenet or FILE.toml: the graph takes uint8 images.")
    ] = None,
    samples: Annotated[
        Path | None, typer.Option(help="Real inputs to compare and record; else seeded random.")
    ] = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Run code in the file: only if you trust it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Export a PyTorch model to ONNX and prove that both compute the same."""
    from deploykit.api import export as exporting

    with output.shown_on_failure(as_json, texts.made):
        result = exporting.export(
            model,
            out,
            arch=arch,
            inputs=input_ or (),
            batch=batch,
            opset=opset,
            profile=profile,
            exporter=exporter,
            preprocess=preprocess,
            samples=samples,
            allow_pickle=allow_pickle,
        )
    output.show(result, texts.made(result), as_json=as_json)


def quantize(
    model: Model,
    to: Annotated[
        str,
        typer.Option(help="fp16, bf16, int8, fp8, int8-weight-only, int4-weight-only or auto."),
    ],
    out: Out = None,
    calib: Calib = None,
    data: Labelled = None,
    metric: MetricOption = None,
    max_drop: MaxDrop = None,
    min_sqnr: Annotated[
        float | None,
        typer.Option(help="dB that every output must keep where there are no labels; 15 without."),
    ] = None,
    rest: Annotated[
        str, typer.Option(help="fp32 or fp16: the nodes around int8, fp8 or stored weights.")
    ] = "fp32",
    calibrator: Annotated[
        str | None, typer.Option(help="minmax, percentile or entropy: how scales are chosen.")
    ] = None,
    runtime: Annotated[
        str, typer.Option(help="tensorrt or onnxruntime: where INT8's Q/DQ pairs go.")
    ] = "tensorrt",
    profile: Annotated[
        str | None, typer.Option(help="The target: its precisions, and auto's predicted cost.")
    ] = None,
    budget: Annotated[float, typer.Option(help="Seconds that auto may search.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Put a lower precision into an ONNX graph and gate what it costs."""
    from deploykit.api import quantize as precision

    with (
        output.shown_on_failure(as_json, texts.made),
        output.Progress(f"quantize --to {to}") as progress,
    ):
        result = precision.quantize(
            model,
            to,
            out,
            calib=calib,
            data=data,
            metric=metric,
            max_drop=max_drop,
            min_sqnr_db=min_sqnr,
            rest=rest,
            calibrator=calibrator,
            runtime=runtime,
            profile=profile,
            budget_s=budget,
            on_progress=progress,
        )
    output.show(result, texts.made(result), as_json=as_json)
    if result.search is not None and result.search.interrupted:
        raise KeyboardInterrupt  # what had passed is kept, but the search was cut short


def build(
    model: Model,
    profile: Annotated[str, typer.Option(help="A name, NAME@MODE, ./mine.toml or auto.")] = "auto",
    precision: Annotated[
        str | None, typer.Option(help="fp32, or what quantize --to takes.")
    ] = None,
    calib: Calib = None,
    data: Labelled = None,
    metric: MetricOption = None,
    max_drop: MaxDrop = None,
    batch: Annotated[
        str | None, typer.Option(help="MIN,OPT,MAX of a TensorRT engine; 1,8,32 without.")
    ] = None,
    axis: Annotated[
        list[str] | None, typer.Option(help="NAME=MIN,OPT,MAX, for each other dynamic axis.")
    ] = None,
    level: Annotated[int | None, typer.Option(help="TensorRT's builder optimisation, 0-5.")] = None,
    dla: Annotated[int | None, typer.Option(help="A DLA core, with the GPU as fallback.")] = None,
    version_compatible: Annotated[
        bool, typer.Option("--version-compatible", help="For later TensorRT of the same major.")
    ] = False,
    hardware_compatible: Annotated[
        str | None,
        typer.Option(help="For other GPUs too: ampere-plus or same-compute-capability."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Parse and build with the builder here; keep nothing.")
    ] = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Build a model for a hardware profile."""
    from deploykit.api import build as making
    from deploykit.api import build_tensorrt

    shapes = build_tensorrt.Shapes(
        batch, tuple(axis or ()), level, version_compatible, hardware_compatible, dla
    )
    with (
        output.shown_on_failure(as_json, texts.built),
        output.Progress(f"build for {profile}") as progress,
    ):
        if check:
            checked = making.check(model, profile, shapes=shapes, on_progress=progress)
            checked.raise_if_refused()
            output.show(checked, texts.checked(checked), as_json=as_json)
            return
        result = making.build(
            model,
            profile,
            precision=precision,
            calib=calib,
            data=data,
            metric=metric,
            max_drop=max_drop,
            shapes=shapes,
            out=out,
            on_progress=progress,
        )
    output.show(result, texts.made(result), as_json=as_json)


def inspect(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Any artefact.")],
    as_json: Json = False,
) -> None:
    """Show an artefact's tensors, precision mix, operators and provenance."""
    from deploykit.api import compare as proof

    result = proof.inspect(path)
    output.show(result, texts.inspection(result), as_json=as_json)


def compare(
    a: Annotated[Path, typer.Argument(help="The reference, or the one whose samples to replay.")],
    b: Annotated[
        Path | None, typer.Argument(help="What is compared with it; without: A's golden samples.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help=".npz of inputs or a folder; else seeded random.")
    ] = None,
    max_error: Annotated[
        float | None,
        typer.Option(help="Of max |a-b| / max(1, max |a|); 0.001, or as the samples say."),
    ] = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Compare two artefacts on the same inputs, or one with its golden samples; exit 1 past it."""
    from deploykit.api import compare as proof

    result = proof.compare(a, b, data=data, max_error=max_error, device=device)
    output.show(result, texts.compared(result), as_json=as_json)
    result.raise_if_over()


def predict(
    engine: Annotated[Path, typer.Argument(help="A .onnx, .trt or .pt file.")],
    data: Annotated[Path, typer.Argument(help=".npz of the inputs, or a folder.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The .npz of outputs to write.")],
    batch: Annotated[int, typer.Option(help="Samples per call.")] = 32,
    device: Device = "auto",
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Run every sample of a file through an engine."""
    from deploykit.api import compare as proof

    with output.Progress("predict") as progress:
        result = proof.predict(
            engine, data, out, batch=batch, device=device, trust=trust, on_progress=progress
        )
    output.show(result, texts.predicted(result), as_json=as_json)
