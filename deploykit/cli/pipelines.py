"""`deploykit predict` and `bench` of a pipeline, and what they print."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.cli import output, tables
from deploykit.cli.format import figure
from deploykit.cli.output import Part
from deploykit.cli.progress import Progress
from deploykit.core.errors import BadInput

if TYPE_CHECKING:
    from deploykit.pipelines.files import AnsweredFiles

SUFFIXES = (".py", ".toml")  # of a pipeline, in the place of an engine


def predict(path: Path, data: list[Path], options: dict[str, Any], as_json: bool) -> None:
    """Answer files. `options`: of the command; those that are for models alone are refused."""
    _refuse(options, text=[], restart=False, on="local")
    from deploykit.api.pipeline import predict_files

    names = ("out", "device", "batch", "trust", "force")
    with Progress("predict") as progress:
        result = predict_files(
            path, data, **{name: options[name] for name in names},
            on_progress=progress, on_note=_note,
        )  # fmt: skip
    output.show(result, answered(result), as_json=as_json)


def find_bench(engines: list[Path] | None) -> Callable[[dict[str, Any], bool], None] | None:
    """What times them, where a pipeline is among them."""
    return bench if any(each.suffix in SUFFIXES for each in engines or ()) else None


def bench(options: dict[str, Any], as_json: bool) -> None:
    """Time a pipeline. `options`: of the command."""
    from deploykit.cli.prove import sizes

    engines, batches = options["engines"], sizes("batches", options["batches"] or "1")
    if len(engines) > 1:
        raise BadInput("a pipeline is measured by itself")
    _refuse(
        options, baseline=None, axis=None, slo_ms=None, price=None, processes=None, scenario=None,
        strict=False, settings_of=None, fail_on_regression=None,
    )  # fmt: skip
    if options["data"] is None:
        raise BadInput("a pipeline is measured on files", hint="`data` FILE or `data` DIR")
    from deploykit.api.pipeline_bench import bench_pipeline

    usual_s = (1.0, 1.5) if options["quick"] else (10.0, 60.0)
    warmup_s, seconds = options["warmup_s"], options["seconds"]
    with Progress("bench") as progress, redirect_stdout(sys.stderr):  # what stages print
        result = bench_pipeline(
            engines[0], options["data"], batches=batches, device=options["device"],
            warmup_s=usual_s[0] if warmup_s is None else warmup_s,
            seconds=usual_s[1] if seconds is None else seconds,
            trust=options["trust"], out=options["out"], force=options["force"],
            command=shlex.join(["deploykit", *sys.argv[1:]]), on_progress=progress, on_note=_note,
        )  # fmt: skip
    output.show(result, tables.report(result, options["out"]), as_json=as_json)


def _note(text: str) -> None:
    output.note(f"note: {output.one_line(text)}")


def _refuse(options: dict[str, Any], **usual: Any) -> None:
    wrong = [name for name, value in usual.items() if options[name] not in (value, None)]
    if wrong:
        raise BadInput(f"`{wrong[0]}` has no effect on a pipeline")


def answered(result: AnsweredFiles) -> list[Part]:
    """The answers as JSON, with the file's name where there are several."""
    if result.path is not None:
        per_s = figure(result.files / result.seconds)
        what = f"{result.files} files on {result.device}, {per_s} per second"
        return [f"wrote {result.path}: {what}"]
    several = len(result.answers) > 1
    found = {name: json.dumps(each, ensure_ascii=False) for name, each in result.answers.items()}
    return [f"{name}: {text}" if several else text for name, text in found.items()]
