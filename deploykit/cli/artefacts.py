"""The commands that make artefacts and look into them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploykit.cli import output, texts
from deploykit.cli.types import Device, Json

Model = Annotated[Path, typer.Argument(help="The .onnx file.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="The file to write.")]
Calib = Annotated[Path | None, typer.Option(help="Calibration data: .npz of the inputs.")]
Labelled = Annotated[Path | None, typer.Option(help="Labelled .npz to measure accuracy on.")]
MaxDrop = Annotated[float, typer.Option(help="Largest accuracy drop; 0.01 is one point.")]


def register(app: typer.Typer) -> None:
    for command in (export, quantize, build, inspect, compare, predict):
        app.command()(command)


def export(
    model: Annotated[Path, typer.Argument(help="A .pt or .pth file.")],
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
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Run code in the file: only if you trust it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Export a PyTorch model to ONNX and prove that both compute the same."""
    from deploykit.api import making

    with output.shown_on_failure(as_json, texts.made):
        result = making.export(
            model,
            out,
            arch=arch,
            inputs=input_ or (),
            batch=batch,
            opset=opset,
            allow_pickle=allow_pickle,
        )
    output.show(result, texts.made(result), as_json=as_json)


def quantize(
    model: Model,
    to: Annotated[str, typer.Option(help="fp16 or int8.")],
    out: Out = None,
    calib: Calib = None,
    data: Labelled = None,
    max_drop: MaxDrop = 0.01,
    runtime: Annotated[
        str, typer.Option(help="tensorrt or onnxruntime: where INT8's Q/DQ pairs go.")
    ] = "tensorrt",
    as_json: Json = False,
) -> None:
    """Put FP16 or INT8 into an ONNX graph and gate what it costs in accuracy."""
    from deploykit.api import precision

    with output.shown_on_failure(as_json, texts.made):
        result = precision.quantize(
            model, to, out, calib=calib, data=data, max_drop=max_drop, runtime=runtime
        )
    output.show(result, texts.made(result), as_json=as_json)


def build(
    model: Model,
    profile: Annotated[str, typer.Option(help="A name, NAME@MODE, ./mine.toml or auto.")] = "auto",
    precision: Annotated[str | None, typer.Option(help="fp32, fp16 or int8.")] = None,
    calib: Calib = None,
    data: Labelled = None,
    max_drop: MaxDrop = 0.01,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Build a model for a hardware profile."""
    from deploykit.api import making

    with output.shown_on_failure(as_json, texts.made):
        result = making.build(
            model, profile, precision=precision, calib=calib, data=data, max_drop=max_drop, out=out
        )
    output.show(result, texts.made(result), as_json=as_json)


def inspect(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Any artefact.")],
    as_json: Json = False,
) -> None:
    """Show an artefact's tensors, precision mix, operators and provenance."""
    from deploykit.api import proof

    result = proof.inspect(path)
    output.show(result, texts.inspection(result), as_json=as_json)


def compare(
    a: Annotated[Path, typer.Argument(help="The reference.")],
    b: Annotated[Path, typer.Argument(help="What is compared with it.")],
    data: Annotated[Path | None, typer.Option(help=".npz of inputs; else seeded random.")] = None,
    max_error: Annotated[float, typer.Option(help="Of max |a-b| / max(1, max |a|).")] = 1e-3,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Compare the outputs of two artefacts on the same inputs; exit 1 past the bound."""
    from deploykit.api import proof

    result = proof.compare(a, b, data=data, max_error=max_error, device=device)
    output.show(result, texts.parity(result), as_json=as_json)
    result.raise_if_over(max_error)


def predict(
    engine: Annotated[Path, typer.Argument(help="A .onnx or .pt file.")],
    data: Annotated[Path, typer.Argument(help=".npz of the inputs.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The .npz of outputs to write.")],
    batch: Annotated[int, typer.Option(help="Samples per call.")] = 32,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Run every sample of a file through an engine."""
    from deploykit.api import proof

    with output.Progress("predict") as progress:
        result = proof.predict(engine, data, out, batch=batch, device=device, on_progress=progress)
    output.show(result, texts.predicted(result), as_json=as_json)
