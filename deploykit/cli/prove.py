"""`deploykit compare`, `inspect`, `predict` and `bench`: the commands that test and measure."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from deploykit.cli import output, tables
from deploykit.cli.commands import DEVICE, ENGINE, FORCE, JSON, TRUST, api_arguments, described
from deploykit.cli.output import Part, Progress
from deploykit.cli.tables import figure
from deploykit.core.errors import BadInput, GateFailed, NotFound

SUFFIXES = (".py", ".toml")  # suffixes of pipelines, given in place of an engine


def _refuse(
    command: Callable[..., None], given: Mapping[str, Any], names: str, what: str = "a pipeline"
) -> None:
    """Raise BadInput if an option of `command` among `names`, which `what` lacks, was given."""
    for name in names.split():
        usual = signature(command).parameters[name].default
        if given[name] not in (usual, None, []):
            raise BadInput(f"`{name}` has no effect on {what}")


@described(f"FILE  A .pt, {ENGINE}\n{JSON}")
def inspect(path: Path, as_json: bool = False) -> None:
    """Show a model's tensors, precisions, operators and origin.

    Example: deploykit inspect model.int8.onnx
    """
    from deploykit.evaluation import inspect as inspecting

    result = inspecting.inspect(path)
    output.show(result, tables.inspection(result), as_json=as_json)


@described(f"""
A                      The reference: a model, or a report of `bench`
B                      What to compare with it; without B, A is compared with its stored samples
--data FILE.npz|DIR    Inputs to run [random, or the golden samples of INT8 and FP8]
--batch N              Rows of the random inputs [several]
--axis NAME=SIZE       Size of a dynamic axis of the random inputs; may be repeated [several at
        which A runs]
--max-error X          Largest max |a-b| / max |a| [0.001, or as stored with the samples]
--arch MODULE:CALLABLE  What builds the module of a file that holds only weights: pkg.mod:Net or
        ./file.py:Net, or the file of your own recipe
--allow-pickle         Run code that a PyTorch file contains. Only if you trust it
{DEVICE}
{TRUST}
--fail-on-regression SHARE%  Exit 1 if a figure of report B is certainly slower by more than this
{JSON}""")
def compare(
    a: Path,
    b: Path | None = None,
    data: Path | None = None,
    batch: int | None = None,
    axis: list[str] | None = None,
    max_error: float | None = None,
    arch: str | None = None,
    allow_pickle: bool = False,
    device: str = "cpu",
    trust: bool = False,
    fail_on_regression: str | None = None,
    as_json: bool = False,
) -> None:
    """Compare the outputs of two models; exit 1 if they differ too much.

    Also compares the figures of two reports that `bench` wrote, files or folders.

    Example: deploykit compare model.pt model.onnx
    """
    given = api_arguments(locals())
    bound = given.pop("fail_on_regression")
    from deploykit.reporting.report import is_report

    if is_report(a) or (b is not None and is_report(b)):
        others = "data batch axis max_error arch allow_pickle device trust"
        _refuse(compare, given, others, "two reports")
        from deploykit.reporting.compare import compare_reports

        if b is None:
            raise BadInput(f"{a}: is a report; which report is compared with it?")
        slower = None if bound is None else share("fail_on_regression", bound)
        found = compare_reports(a, b, fail_on_regression=slower)
        output.show(found, tables.report_comparison(found), as_json=as_json)
        found.raise_if_slower()
        return
    if bound is not None:
        raise BadInput("`fail_on_regression` is for two reports")
    from deploykit.evaluation import compare as proof

    given["axis"] = axis_sizes("axis", ",".join(axis or ()))
    with redirect_stdout(sys.stderr):  # what `arch` names may print
        result = proof.compare(**given)
    output.show(result, tables.compared(result), as_json=as_json)
    result.raise_if_over()


@described(f"""
ENGINE                 A .pt, {ENGINE}, or the .py or .toml file of a pipeline
DATA                   Images to answer; with --out the inputs: an .npz file or a folder
--text TEXT            A sentence to answer; may be repeated
-o --out FILE          answers.jsonl or .csv: the answers, one for each image, text or box; an .npz:
        the model's outputs for all samples of DATA
{FORCE}
--batch N              Size of the batch axis in each call
--on                   This machine, or a Ray cluster: that of $RAY_ADDRESS
{DEVICE}
{TRUST}
{JSON}""")
def predict(
    engine: Path,
    data: list[Path] | None = None,
    text: list[str] | None = None,
    out: Path | None = None,
    force: bool = False,
    batch: int = 32,
    on: Literal["local", "ray"] = "local",
    device: str = "auto",
    trust: bool = False,
    as_json: bool = False,
) -> None:
    """Answer images or text, or write the outputs for all samples.

    A model with a task answers with labels, boxes, the parts of a mask or an embedding. Any model
    writes its outputs into an .npz; they are kept in OUT.parts until all are there: after a run
    that was stopped, the same command goes on where that was; with --force it begins anew.

    Example: deploykit predict model.onnx cat.jpg
    """
    given, files = api_arguments(locals()), data or []
    shared: dict[str, Any] = {name: given[name] for name in ("out", "device", "trust", "force")}
    shared["on_note"] = output.note_line
    if engine.suffix in SUFFIXES:
        _refuse(predict, given, "text on")
        from deploykit.pipelines.pipeline import predict_files

        with Progress("predict") as progress:
            found = predict_files(engine, files, batch=batch, **shared, on_progress=progress)
        several = len(found.answers) > 1
        lines: list[Part] = [
            f"{name}: " * several + json.dumps(answer, ensure_ascii=False)
            for name, answer in found.answers.items()
        ]
        if found.path is not None:
            lines = [_wrote(found.path, found.files, "files", found)]
        output.show(found, lines, as_json=as_json)
        return
    from deploykit.evaluation import predict as predicting

    if out is None or out.suffix.lower() in (".jsonl", ".csv"):
        _refuse(predict, given, "batch on", "answers")
        if any(each.suffix in (".npz", ".npy") for each in files):
            raise BadInput(f"{files[0]}: holds samples; `out` names the file for their outputs")
        for each in files:
            if " " in str(each) and not each.exists():
                raise NotFound(f"{each}: no such file", hint="a sentence goes with `text`")
        with Progress("predict") as progress:
            shared["on_progress"] = progress if out else lambda *_: None
            answered = predicting.predict_items(engine, files, text=text or [], **shared)
        count = len(answered.items)
        shown = [_wrote(out, count, "items", answered)] if out else tables.answered(answered)
        output.show(answered, shown, as_json=as_json)
        return
    if len(files) != 1 or text:
        raise BadInput("`out` is for the outputs of one file or folder of samples")
    with Progress("predict") as progress:
        result = predicting.predict(
            engine, files[0], batch=batch, on=on, **shared, on_progress=progress
        )
    output.show(result, tables.predicted(result), as_json=as_json)


def _wrote(path: Path, count: int, what: str, result: Any) -> Part:
    per_s = figure(count / max(result.seconds, 1e-9))
    return f"wrote {path}: {count} {what} on {result.device}, {per_s} per second"


@described(f"""
ENGINE                 {ENGINE}s to measure; a .pt checkpoint too; or a pipeline
--against --baseline FILE|REPORT  What to compare with: the float32 .onnx file, an engine in the
        same run, or a report, whose settings of the CPU are taken; may be repeated [the first
        ENGINE]
--batches N,N,...      Batch sizes to measure [1,2,4,8,16,32, or 1,8,32 with --quick]
-o --out DIR           Folder of the report
{FORCE}
--data FILE.npz|DIR    Time these inputs; with labels, measure accuracy too
--axis NAME=SIZE       Size of another dynamic axis; may be repeated [the data's]
--arch MODULE:CALLABLE  What builds the module of an ENGINE that holds only weights
{DEVICE}
{TRUST}
Timing:
--quick                Measure briefly; a report of less than 60 s for each point says so
--seconds SECONDS      Length of each point [60, or 1.5 with --quick]
--slo-ms MS            The wanted p99: report the highest throughput within it
--scenario NAME,...    Run scenarios of MLPerf too: offline, single-stream, multi-stream, server
--layers               Show where the time of a call goes, layer by layer, in a separate run
{JSON}""")
def bench(
    engines: list[Path],
    against: list[Path] | None = None,
    batches: str | None = None,
    out: Path = Path("report"),
    force: bool = False,
    data: Path | None = None,
    axis: list[str] | None = None,
    arch: str | None = None,
    device: str = "auto",
    trust: bool = False,
    quick: bool = False,
    seconds: float | None = None,
    slo_ms: float | None = None,
    scenario: str | None = None,
    layers: bool = False,
    as_json: bool = False,
) -> None:
    """Measure latency and throughput against the float32 model on the CPU.

    Example: deploykit bench model.int8.onnx --against model.onnx --quick
    """
    given = api_arguments(locals())
    if any(each.suffix in SUFFIXES for each in engines):
        _bench_pipeline(given, as_json)
        return
    from deploykit.benchmarking import bench as figures

    given["against"] = against or ()
    given["batches"] = None if batches is None else sizes("batches", batches)
    given["axis"] = axis_sizes("axis", ",".join(axis or ()))
    names = given.pop("scenario")
    with Progress("bench") as progress:
        result = figures.bench(
            **given,
            scenarios=[each.strip() for each in names.split(",")] if names else (),
            command=output.command_line(),
            on_progress=progress,
            on_note=lambda text: output.note(f"warning: {output.one_line(text)}"),
        )
    output.show(result, tables.report(result, out), as_json=as_json)
    for gate in result.gates:
        if not gate.passed:
            raise GateFailed(f"{gate.name}: {gate.detail}", hint="its speed is in no comparison")
    if result.throttled:
        why = ", ".join(result.throttled)
        output.note(f"warning: the GPU lowered its clocks during the measurement: {why}")


def _bench_pipeline(options: dict[str, Any], as_json: bool) -> None:
    """Time a pipeline with the `options` of the command."""
    engines, batches = options["engines"], sizes("batches", options["batches"] or "1")
    if len(engines) > 1:
        raise BadInput("a pipeline is measured by itself")
    _refuse(bench, options, "against axis slo_ms scenario layers arch")
    if options["data"] is None:
        raise BadInput("a pipeline is measured on files", hint="`data` FILE or `data` DIR")
    from deploykit.benchmarking.bench import QUICK_S, bench_pipeline
    from deploykit.benchmarking.timing import FULL_S, Timing
    from deploykit.evaluation.artefacts import claim_report
    from deploykit.pipelines.file import input_files
    from deploykit.pipelines.pipeline import pipeline
    from deploykit.reporting.report import write

    path, data, seconds = engines[0], options["data"], options["seconds"]
    usual_s = QUICK_S if options["quick"] else FULL_S
    timing = Timing.lasting(usual_s if seconds is None else seconds)
    files = input_files([data])
    folder = claim_report(options["out"], (path, data), force=options["force"])
    opening = {"device": options["device"], "trust": options["trust"], "batch": max(batches)}
    with (
        Progress("bench") as progress,
        pipeline(path, **opening, on_note=output.note_line) as opened,
    ):
        result = bench_pipeline(opened, path, files, batches, timing, progress)
    result = replace(result, command=output.command_line())
    write(result, folder)
    output.show(result, tables.report(result, options["out"]), as_json=as_json)


def share(parameter: str, text: str) -> float:
    """Parse `5%` as 0.05. Raises BadInput."""
    number = text.removesuffix("%").strip()
    try:
        if number != text.strip() and number.isascii():
            return float(number) / 100
    except ValueError:
        pass
    raise BadInput(f"`{parameter}` {text}: must be a percentage", hint=f"`{parameter}` 5%")


def sizes(parameter: str, text: str) -> list[int]:
    """Parse batch sizes such as `1,8,32`. Raises BadInput."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise BadInput(
            f"`{parameter}` {text}: must be sizes of at least 1", hint=f"`{parameter}` 1,8,32"
        )
    return [int(part) for part in parts]


def axis_sizes(parameter: str, text: str) -> dict[str, int]:
    """Parse sizes by name such as `T=128,H=224`; "" gives none. Raises BadInput."""
    found: dict[str, int] = {}
    for part in text.split(",") if text else ():
        name, _, size = (each.strip() for each in part.partition("="))
        if not name or name in found or not (size.isascii() and size.isdigit()):
            raise BadInput(
                f"`{parameter}` {text}: must be names of axes with a size each",
                hint=f"`{parameter}` T=128,H=224",
            )
        found[name] = int(size[:20])  # any longer size is too large
    return found
