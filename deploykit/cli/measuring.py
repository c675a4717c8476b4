"""`deploykit bench` and `deploykit load`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from deploykit.cli import output, texts
from deploykit.cli.types import Device, Json, Trust
from deploykit.core.errors import BadInput, GateFailed


def register(app: typer.Typer) -> None:
    app.command()(bench)
    app.command()(load)


def bench(
    engine: Annotated[list[Path], typer.Argument(help="One or more .onnx or .trt files.")],
    baseline: Annotated[
        Path | None, typer.Option(help="The float32 .onnx that all are compared with.")
    ] = None,
    batches: Annotated[str, typer.Option(help="Batch sizes.")] = "1,2,4,8,16,32",
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the report.")] = Path(
        "report"
    ),
    data: Annotated[Path | None, typer.Option(help="Labelled .npz: measure accuracy too.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="2 s + 5 s a point, marked so.")] = False,
    warmup: Annotated[float | None, typer.Option(help="Seconds of warm-up a point.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Seconds timed a point.")] = None,
    device: Device = "auto",
    trust: Trust = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 1 if the GPU was held back meanwhile.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure latency and throughput against the CPU baseline, into a report."""
    from deploykit.api import bench as figures

    with output.Progress("bench") as progress:
        result = figures.bench(
            engine,
            baseline=baseline,
            batches=_sizes(batches),
            out=out,
            data=data,
            device=device,
            quick=quick,
            warmup_s=warmup,
            seconds=seconds,
            trust=trust,
            command=shlex.join(["deploykit", *sys.argv[1:]]),
            on_progress=progress,
            on_note=lambda text: output.note(f"warning: {output.one_line(text)}"),
        )
    output.show(result, texts.report(result, out), as_json=as_json)
    if result.throttled:
        held = f"the GPU was held back while it was timed: {', '.join(result.throttled)}"
        if strict:
            raise GateFailed(held, hint="the report is written, without a speed-up")
        output.note(f"warning: {held}")


def load(
    url: Annotated[str, typer.Argument(help="http://HOST:PORT")],
    model: Annotated[str | None, typer.Option(help="Needed if the server has several.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second (open loop).")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Connections (closed loop).")] = None,
    duration: Annotated[float, typer.Option(help="Seconds measured.")] = 10.0,
    batch: Annotated[int, typer.Option(help="Rows per request.")] = 1,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for a report.")] = None,
    as_json: Json = False,
) -> None:
    """Load a running server, open or closed loop."""
    from deploykit.api import bench as figures

    result = figures.load_test(
        url,
        model=model,
        rate=rate,
        concurrency=concurrency,
        duration_s=duration,
        batch=batch,
        out=out,
        command=shlex.join(["deploykit", *sys.argv[1:]]),
    )
    output.show(result, texts.load(result), as_json=as_json)


def _sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise BadInput(f"--batches {text}: sizes of 1 or more, separated by commas, are needed")
    return [int(part) for part in parts]
