"""Show results as lines and tables for people, with one function per kind of result."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.cli.output import Part
from deploykit.core.task import EMBED
from deploykit.evaluation.formatting import SPACE, Table, number, spread

if TYPE_CHECKING:
    from deploykit.building.tensorrt import BuildCheck
    from deploykit.core.evidence import Evidence, Interval, Parity, ParityRow, SearchRecord
    from deploykit.core.task import Task
    from deploykit.demonstration import DemoResult
    from deploykit.deploying.bundle import Bundled
    from deploykit.evaluation.artefacts import Made
    from deploykit.evaluation.compare import Compared
    from deploykit.evaluation.inspect import Inspection
    from deploykit.evaluation.predict import Answered, Predicted
    from deploykit.evaluation.statistics import Latency
    from deploykit.reporting.compare import ReportComparison
    from deploykit.reporting.report import LoadResult, Report

# Numbers and lists as short strings: sizes, rates, times, intervals.


def latency(value: Latency | None) -> str:
    """Show p50, p90 and p99 in milliseconds, with the number of samples."""
    if value is None:
        return "not measured: no request had a good answer"
    parts, lost = [], 100 * value.lost / (value.samples + value.lost)
    for name, item in percentiles(value):
        needs = value.needs.get(f"{name}_ms")
        none = f"none: {figure(lost)} % had no good answer"
        why = f"too few, needs {needs:,} calls" if needs else none
        parts.append(f"{name} {ms(item) if item else why}")
    return ", ".join(parts) + f" (n = {value.samples:,})"


def percentiles(value: Latency) -> list[tuple[str, Interval | None]]:
    return [("p50", value.p50_ms), ("p90", value.p90_ms), ("p99", value.p99_ms)]


def ms(value: Interval | None, needs: int | None = None) -> str:
    """Show milliseconds, or that the percentile needs at least `needs` calls."""
    few = f"needs {needs:,} calls" if needs else "too few"
    return few if value is None else f"{figure(value.value)} ms"


def figure(value: float | None) -> str:
    """Show three digits without an exponent; "-" for None."""
    return "-" if value is None else number(value).replace(SPACE, ",")


def percent(value: Interval) -> str:
    return f"{value.value * 100:.2f} % ({value.low * 100:.2f} to {value.high * 100:.2f})"


def plain(value: Interval) -> str:
    """Show an interval in its own unit, such as that of perplexity."""
    return f"{value.value:.5g} ({value.low:.5g} to {value.high:.5g})"


def mix(values: Mapping[str, Any], form: str = "{1} {0}") -> str:
    """Show each name and its value by `form`; "-" for none."""
    return ", ".join(form.format(*item) for item in values.items()) or "-"


def size(count: int) -> str:
    power = min((len(str(count)) - 1) // 3, 3)
    return f"{count / 1000**power:.1f} {'kMG'[power - 1]}B" if power else f"{count} B"


def memory(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.0f} GiB"


def rate(value: float | None, unit: float, name: str) -> str:
    return "-" if value is None else f"{value / unit:.4g} {name}"


UNKNOWN = "not known"
VERSIONS, _NODES = "{0} {1}", "{1} nodes in {0}"
_LAYERS, _LONGEST = 10, 48  # number of layers shown, characters of their names
_FITS = 8  # most profiles shown


def made(result: Made) -> list[Part]:
    """Describe a written artefact and its checks."""
    manifest = result.manifest
    lines: list[Part] = [f"wrote {result.path}"]
    if manifest.format != "torch":
        lines += [
            "  inputs     " + ", ".join(map(str, manifest.inputs)),
            "  outputs    " + ", ".join(map(str, manifest.outputs)),
            "  precision  " + mix(manifest.precision, _NODES),
        ]
    made = result.evidence.quantize
    if made and made.to.endswith("-weight-only"):
        lines.append(f"  weights    stored in {made.to.removesuffix('-weight-only')}")
    if manifest.task:
        lines.append("  task       " + purpose(manifest.task))
    lines += calibrated(result.evidence)
    if result.accuracy:
        trained = result.evidence.training
        if trained:
            lines.append(f"  {trained.metric}  {percent(trained.score)}, n = {trained.samples}")
    found = result.evaluation
    if found and found.drop:
        drop, (a, b) = found.drop, (found.parity.a, found.parity.b)
        score = percent if drop.unit == "pp" else plain
        rows = [(a, score(drop.reference), ""), (b, score(drop.candidate), drop.describe())]
        header = (f"{drop.metric}, n = {drop.n}", "value (95 %)", f"against {a}")
        lines += ["", Table("", header, rows)]
    elif found:
        lines += ["", f"checked by {found.describe()}: {found.why}"]
    if result.search:
        lines += ["", *steps(result.search)]
    if result.parity:
        own = found is None or found.parity != result.parity  # else the evaluation decides
        lines += ["", *parity(result.parity, gated=own)]
    lines += [f"note: {text}" for text in result.notes]
    return lines


def bundled(result: Bundled) -> list[Part]:
    """Describe the content of a bundle and the next steps."""
    found = result.bundle
    return [
        f"wrote {result.path}",
        *([f"wrote {result.tar}"] if result.tar else []),
        f"  target     {found.profile} ({found.kind})",
        f"  served as  {found.name}",
        f"  size       {size(result.bytes)} in {len(found.files)} files",
        f"  next       {result.path / 'README.md'}",
        *(f"note: {text}" for text in result.notes),
    ]


def calibrated(evidence: Evidence) -> list[str]:
    """Describe the choice of scales, also for an engine's source graph."""
    found = evidence.calibration or (evidence.source_graph and evidence.source_graph.calibration)
    chosen = found and (found.sqnr_db or found.smoothed)
    return ["  calibrated " + found.describe()] if found and chosen else []


def checked(found: BuildCheck) -> list[Part]:
    """Show the report of NVIDIA's builder on a file."""
    word = "accepted" if found.accepted else "refused"
    library = "TensorRT for RTX" if found.flavour == "rtx" else "TensorRT"
    lines: list[Part] = [
        f"{found.path} for {found.profile}: {word} by {library}; no engine was kept"
    ]
    if found.accepted:
        size_text = f"{found.layers} layers, a plan of {size(found.plan_bytes)}"
        lines.append(f"  built      {size_text} in {found.build_s:.1f} s")
    lines += [f"  refused    {text}" for text in found.problems]
    lines += [f"note: {text}" for text in found.notes]
    return lines


def steps(result: SearchRecord) -> list[Part]:
    """Show the trials of `--to auto`, in order."""
    rows = [
        (
            step.precision,
            str(len(step.float32_nodes)),
            "-" if math.isinf(step.cost_s) else f"{step.cost_s * 1e3:.3g}",
            f"{step.elapsed_s:.1f}",
            "pass" if step.passed else "fail",
            step.why,
        )
        for step in result.steps
    ]
    header = ("tried", "kept float32", "cost ms", "after s", "gate", "result")
    return [f"search: {result.why}", Table("", header, rows)]


def compared(result: Compared) -> list[Part]:
    return [*parity(result.parity), *([f"note: {result.note}"] if result.note else [])]


def parity(result: Parity, *, gated: bool = True) -> list[Part]:
    """Show a table of errors; with `gated`, also whether the bounds were met."""

    def bounds(row: ParityRow) -> tuple[str, ...]:
        own = "-" if row.float32_error is None else f"{row.float32_error:.3g}"
        return (f"{result.bound(row):.3g}", own)[: 2 * gated]

    shared = any(row.mean_iou is not None for row in result.rows)
    rows = [
        (
            *(row.output, str(row.batch), f"{row.error:.3g}"),
            *bounds(row),
            f"{row.max_abs:.3g}",
            "-" if row.zero else "inf" if row.sqnr_db == math.inf else f"{row.sqnr_db:.1f}",
            "-"
            if row.agreement is None
            else f"{row.agreement * 100:.2f} %" + " of boxes" * (row.answers == "boxes"),
            *(["-" if row.mean_iou is None else f"{row.mean_iou:.4f}"] if shared else []),
        )
        for row in result.rows
    ]
    verdict = f": {'within' if result.passed else 'NOT within'} {result.bound(result.worst):.3g}"
    header = ("output", "batch", "error", *("bound", "float32")[: 2 * gated], "max |a-b|")
    header += ("SQNR dB", "same top-1", *("mean IoU",) * shared)
    title = f"{result.b} against {result.a}{verdict if gated else ''}"
    return [title, Table("", header, rows), *(f"warning: {text}" for text in result.warnings)]


def inspection(result: Inspection) -> list[Part]:
    lines: list[Part] = [
        f"{result.path}: {result.format}, {size(result.size_bytes)}",
        f"  sha256     {result.sha256}",
        "  inputs     " + (", ".join(map(str, result.inputs)) or UNKNOWN),
        "  outputs    " + (", ".join(map(str, result.outputs)) or UNKNOWN),
    ]
    if result.precision:
        lines.append("  precision  " + mix(result.precision, _NODES))
    for key, value in result.details.items():
        if key == "mix":
            lines += [f"  {what:<10} {text}" for what, text in shares(value)]
            continue
        shown = mix(value) if isinstance(value, dict) else str(value)
        lines.append(f"  {key.replace('_', ' '):<10} {shown}")
    if result.manifest and result.manifest.task:
        lines.append("  task       " + purpose(result.manifest.task))
    if result.fits:
        others = len(result.fits) - _FITS
        more = f" and {others} more, see --json" if others > 0 else ""
        named = ", ".join(result.fits[:_FITS]) + more
        lines.append(f"  fits       {named} (by precision; not tried there)")
    manifest = result.manifest
    if manifest is None:
        lines.append("  manifest   none: where it comes from is not known")
    else:
        lines.append("  made with  " + mix(manifest.made_with, VERSIONS))
        lines.append("  made from  " + (", ".join(item[:12] for item in manifest.made_from) or "-"))
        if manifest.built_on:
            lines.append("  built on   " + mix(manifest.built_on, VERSIONS))
        lines += calibrated(manifest.evidence)
    return lines


def purpose(task: Task) -> str:
    """Describe a model's task, its input and its number of labels in one line."""
    count = f"{len(task.labels)} labels" if task.labels else "labels without names"
    taken = ""
    if task.image is not None:
        image = task.image
        edge = f" {image.resize_to}" if image.resize_to else ""
        size = f"to {image.width}x{image.height}" if image.height else "of any ratio to"
        taken = f"images {size} {image.colours} ({image.resize}{edge}, {image.interpolation})"
    elif task.text is not None:
        taken = f"text of up to {task.text.max_length} tokens ({task.text.tokenizer})"
    parts = (task.kind, taken, "" if task.kind == EMBED else count, task.source)
    return ", ".join(filter(None, parts))


def shares(value: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the shares of operations, weights and their bytes by precision."""
    rows = []
    for key, what in (("flops", "operations"), ("weights", "weights"), ("weight_bytes", "bytes")):
        parts = value["shares"][key]
        if parts:
            text = ", ".join(f"{name} {share * 100:.1f} %" for name, share in parts.items())
            total = sum(value[key].values())
            rows.append((what, f"{total:,}: {text}" + (" (batch 1)" if key == "flops" else "")))
    if unknown := value["unknown"]:
        names = ", ".join(unknown[:10]) + (f" and {len(unknown) - 10} more" * (len(unknown) > 10))
        why = f"operations of {len(unknown)} nodes whose operator or shapes are unknown"
        rows.append(("left out", f"{why}: {names}"))
    return rows


def predicted(result: Predicted) -> list[Part]:
    now = result.samples - result.resumed
    rate = f", {figure(now / max(result.seconds, 1e-9))} per second" * (now > 0)
    lines: list[Part] = [f"wrote {result.path}: {result.samples} samples on {result.device}{rate}"]
    if result.accuracy:
        lines.append(f"  top-1 accuracy  {percent(result.accuracy)}, n = {result.samples}")
    return lines + [f"note: {result.note}"] * bool(result.note)


def load(result: LoadResult) -> list[Part]:
    asked = f"{result.concurrency} connections"
    if result.rate_per_s is not None:
        asked = f"{figure(result.rate_per_s)}/s"
    if result.capacity_per_s is not None:
        asked += f", half of the {figure(result.capacity_per_s)}/s that it can do"
    shapes = ", ".join(f"{n} {list(shape)}" for n, shape in result.shapes.items())
    sends = result.sends or shapes or "no inputs"
    head = f"{result.model} at {result.url}: {result.mode} loop, {asked}"
    lines: list[Part] = [
        f"{head}, {figure(result.duration_s)} s",
        f"  sends      {sends}",
        f"  answered   {_rate(result.achieved_per_s)}",
    ]
    if result.goodput_per_s and result.slo_ms:
        within = f"within {figure(result.slo_ms)} ms"
        lines.append(f"  {within:<9}  {_rate(result.goodput_per_s)}")
    lines.append(f"  latency    {latency(result.latency)}")
    counts = {"refused (503, 429)": result.refused, "expired (504)": result.expired}
    counts |= {"failed": result.failed}
    counts |= {"never sent": result.unsent} if result.unsent else {}
    lines.append(f"  requests   {result.sent} sent, {result.ok} ok, {mix(counts)}")
    if result.lag_p99_ms is not None:
        lines.append(f"  generator  p99 lag {result.lag_p99_ms:.2f} ms")
    if result.limits:
        lines.append("note: the generator was the limit: these figures do not describe the server")
        lines += [f"note: {text}" for text in result.limits]
        lines.append("note: give it a machine or a core of its own")
    lines += [f"note: no verdict: {'; '.join(result.marks)}"] * bool(result.marks)
    lines += [f"note: {text}" for text in result.notes]
    if result.first_error:
        lines.append(f"note: first error: {result.first_error}")
    return lines


def _rate(value: Interval) -> str:
    between = " to ".join(map(figure, (value.low, value.high)))
    return f"{figure(value.value)} requests/s (95 %: {between})"


def report(result: Report, folder: Path) -> list[Part]:
    from deploykit.reporting.page import CONCLUSIONS

    marked = [each for each in result.points if each.marks and not result.invalid]
    marked = marked if len(marked) < len(result.points) else []  # else a sentence says it of all
    doubtful = marked + [each for each in result.points if each.label in result.wrong]
    rows = [
        (
            "✗ " * (point in doubtful) + point.label,
            str(point.batch),
            *(
                ms(item, point.latency.needs.get(f"{name}_ms"))
                for name, item in percentiles(point.latency)
            ),
            figure(point.throughput_per_s.value),
        )
        for point in sorted(result.points, key=lambda p: (p.label in result.wrong, bool(p.marks)))
    ]
    header = ("setup", "batch", "p50", "p90", "p99", "inferences/s")
    return [
        Table("", header, rows),
        *["✗: no verdict, for the reason below"] * bool(doubtful),
        "",
        *_layers(result),
        *(
            "warning: " * (each.startswith("The machine was busy") or " give no verdict: " in each)
            + each
            for each in result.verdict[: 1 + CONCLUSIONS]
        ),
        *["more conclusions are in the report"] * (len(result.verdict) > 1 + CONCLUSIONS),
        "",
        f"report: {folder / 'report.html'}",
    ]


def _layers(result: Report) -> Iterator[Part]:
    from deploykit.reporting.tables import layers_table

    for each in result.layers:
        table = layers_table(each.to_dict(), _LAYERS)
        rows = [(name[:_LONGEST], *rest) for name, *rest in table.rows]
        yield from (Table("", table.columns, rows, (0, 1)), table.note, "")


def report_comparison(result: ReportComparison) -> list[Part]:
    several = len({row.scenario for row in result.rows}) > 1
    rows = [
        (
            row.label,
            *([row.scenario] if several else []),
            str(row.batch),
            each.figure + ("/s" if each.figure == "throughput" else " ms"),
            spread(each.ratio.to_dict()),
            each.finding,
            number(each.a),
            number(each.b),
            " × ".join(str(n) for n in (row.sessions, row.threads) if n is not None),
        )
        for row in result.rows
        for each in row.figures
    ]
    counts = Counter(each.finding for row in result.rows for each in row.figures)
    found = ", ".join(f"{count} {finding}" for finding, count in counts.most_common())
    header = ("setup", *["scenario"] * several, "batch", "figure", "B / A", "finding")
    more = ("A", "B", "sessions × threads")
    table = Table("", (*header, *more), rows, (0, *[1] * several, len(header) - 1))
    return [
        f"{result.b} (B) against {result.a} (A): {found}",
        table,
        f"The intervals of all {len(rows)} ratios hold together, in 95 % of all cases.",
        *(f"note: only in A: {name}" for name in result.only_a),
        *(f"note: only in B: {name}" for name in result.only_b),
        *([f"note: not known: {', '.join(result.not_known)}"] if result.not_known else []),
        *(f"note: {text}" for text in result.notes),
    ]


def demo(result: DemoResult) -> list[Part]:
    header = ("", "accuracy", "p50 at batch 1", "throughput")
    from deploykit.reporting.page import CONCLUSIONS

    verdict = result.report.verdict[: 1 + CONCLUSIONS]
    return ["", Table("", header, result.rows), "", *verdict, "", f"report: {result.page}"]


# Answers of a model with a task, as lines for people.

_SHOWN_VALUES = 8  # values of an embedding


def answered(result: Answered) -> list[Part]:
    """Show a line for each item or box, with the item's name if there are several."""
    several = len(result.items) > 1
    lines: list[Part] = []
    for name, answer in zip(result.items, result.answers, strict=True):
        found = _answer_lines(answer)
        lines += [f"{name}: {line}" for line in found] if several else found
    return lines


def _answer_lines(answer: dict[str, Any]) -> list[str]:
    if "label" in answer:
        return [f"{answer['label']} {_share(answer['score'])}"]
    if "embedding" in answer:
        values = answer["embedding"]
        shown = " ".join(f"{value:.4g}" for value in values[:_SHOWN_VALUES])
        return [f"{len(values)} numbers: {shown}{' ...' * (len(values) > _SHOWN_VALUES)}"]
    if "boxes" in answer:
        named = [(f"{b['label']} {_share(b['score'])}", b["box"]) for b in answer["boxes"]]
        at = [f"{text} at {x:.0f},{y:.0f} to {u:.0f},{v:.0f}" for text, (x, y, u, v) in named]
        return at or ["no boxes"]
    if "segments" in answer:
        size = answer["width"] * answer["height"]
        parts = sorted(answer["segments"], key=lambda each: -int(each["pixels"]))
        return [", ".join(f"{each['label']} {_share(each['pixels'] / size)}" for each in parts)]
    return [", ".join(f"{name} {value}" for name, value in answer.items())]


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"
