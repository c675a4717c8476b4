"""Results as text for people: one function per kind of result, lines in, nothing printed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.cli.output import table

if TYPE_CHECKING:
    from deploykit.api.artefacts import Made
    from deploykit.api.build_tensorrt import CheckResult
    from deploykit.api.compare import Compared, Inspection, Predicted
    from deploykit.api.demo import Toured
    from deploykit.api.doctor import Health
    from deploykit.core.profile import Profile
    from deploykit.measure.evaluate.parity import Parity
    from deploykit.measure.load.generator import LoadResult
    from deploykit.measure.report.report import Report
    from deploykit.measure.statistics import Interval, Latency
    from deploykit.quantization.search import Outcome

UNKNOWN = "not known"


def made(result: Made) -> str:
    """An artefact that was written: what it is, then what was checked."""
    manifest = result.manifest
    lines = [f"wrote {result.path}"]
    if manifest.format != "torch":
        lines += [
            "  inputs     " + ", ".join(map(str, manifest.inputs)),
            "  outputs    " + ", ".join(map(str, manifest.outputs)),
            "  precision  " + mix(manifest.precision),
        ]
    if result.accuracy:
        test = manifest.checks["test"]
        lines.append(f"  {test['metric']}  {percent(result.accuracy)}, n = {test['n']}")
    if result.drop:
        drop = result.drop
        names = (result.parity.a, result.parity.b) if result.parity else ("reference", "this file")
        rows = [
            (names[0], percent(drop.reference), ""),
            (names[1], percent(drop.candidate), drop.describe()),
        ]
        lines += [
            "",
            table((f"{drop.metric}, n = {drop.n}", "value (95 %)", f"against {names[0]}"), rows),
        ]
    if result.judgement and not result.drop:
        lines += ["", f"judged by {result.judgement.describe()}: {result.judgement.reason}"]
    if result.search:
        lines += ["", steps(result.search)]
    if result.parity:
        lines += ["", parity(result.parity, gated=result.judgement is None)]
    lines += [f"note: {text}" for text in result.notes]
    return "\n".join(lines)


def built(result: Made | CheckResult) -> str:
    """What a build that failed its gate left."""
    from deploykit.api.artefacts import Made

    return made(result) if isinstance(result, Made) else checked(result)


def checked(result: CheckResult) -> str:
    """What NVIDIA's builder said of a file."""
    found = result.checked
    word = "accepted" if found.accepted else "refused"
    library = "TensorRT for RTX" if found.flavour == "rtx" else "TensorRT"
    lines = [f"{result.path} for {result.profile}: {word} by {library}; no engine was kept"]
    if found.accepted:
        size_text = f"{found.layers} layers, a plan of {size(found.plan_bytes)}"
        lines.append(f"  built      {size_text} in {found.build_s:.1f} s")
    lines += [f"  refused    {text}" for text in found.problems]
    lines += [f"note: {text}" for text in found.notes]
    return "\n".join(lines)


def steps(result: Outcome[Any]) -> str:
    """What `--to auto` tried, in order."""
    rows = [
        (
            step.precision,
            str(len(step.wide)),
            "-" if math.isinf(step.cost_s) else f"{step.cost_s * 1e3:.3g}",
            f"{step.elapsed_s:.1f}",
            "pass" if step.passed else "fail",
            step.text,
        )
        for step in result.steps
    ]
    header = ("tried", "left wide", "cost ms", "after s", "gate", "result")
    return "\n".join([f"search: {result.text}", table(header, rows)])


def compared(result: Compared) -> str:
    lines = [parity(result.parity)]
    if result.builds:
        lines.append(result.builds.text)
    if result.divergence:
        lines.append(result.divergence.text)
    return "\n".join(lines)


def parity(result: Parity, *, gated: bool = True) -> str:
    """A table of errors; `gated`: say whether the bound was met."""
    rows = [
        (
            row.output,
            str(row.batch),
            f"{row.error:.3g}",
            f"{row.max_abs:.3g}",
            "inf" if row.sqnr_db == float("inf") else f"{row.sqnr_db:.1f}",
            "-" if row.agreement is None else f"{row.agreement * 100:.2f} %",
        )
        for row in result.rows
    ]
    verdict = f": {'within' if result.passed else 'NOT within'} {result.max_error:g}"
    return "\n".join(
        [
            f"{result.b} against {result.a}{verdict if gated else ''}",
            table(("output", "batch", "error", "max |a-b|", "SQNR dB", "same top-1"), rows),
        ]
    )


def inspection(result: Inspection) -> str:
    lines = [
        f"{result.path}: {result.format}, {size(result.size_bytes)}",
        f"  sha256     {result.sha256}",
        "  inputs     " + (", ".join(map(str, result.inputs)) or UNKNOWN),
        "  outputs    " + (", ".join(map(str, result.outputs)) or UNKNOWN),
    ]
    if result.precision:
        lines.append("  precision  " + mix(result.precision))
    for key, value in result.details.items():
        if key == "mix":
            lines += [f"  {what:<10} {text}" for what, text in shares(value)]
            continue
        shown = mix(value) if isinstance(value, dict) else str(value)
        lines.append(f"  {key.replace('_', ' '):<10} {shown}")
    if result.fits:
        lines.append("  fits       " + ", ".join(result.fits) + " (by precision; not tried there)")
    manifest = result.manifest
    if manifest is None:
        lines.append("  manifest   none: where it comes from is not known")
    else:
        lines.append("  made with  " + versions(manifest.made_with))
        lines.append("  made from  " + (", ".join(item[:12] for item in manifest.made_from) or "-"))
        if manifest.built_on:
            lines.append("  built on   " + versions(manifest.built_on))
    return "\n".join(lines)


def shares(value: dict[str, Any]) -> list[tuple[str, str]]:
    """How operations, weights and their bytes divide by precision."""
    rows = []
    for key, what in (("flops", "operations"), ("weights", "weights"), ("weight_bytes", "bytes")):
        parts = value["shares"][key]
        if parts:
            text = ", ".join(f"{name} {share * 100:.1f} %" for name, share in parts.items())
            total = sum(value[key].values())
            rows.append((what, f"{total:,}: {text}" + (" (batch 1)" if key == "flops" else "")))
    if value["unknown"]:
        rows.append(("not counted", ", ".join(value["unknown"][:10])))
    return rows


def predicted(result: Predicted) -> str:
    rate = result.samples / result.seconds if result.seconds else float("inf")
    lines = [
        f"wrote {result.path}: {result.samples} samples on {result.device}, {rate:,.0f} per second"
    ]
    if result.accuracy:
        lines.append(f"  top-1 accuracy  {percent(result.accuracy)}, n = {result.samples}")
    return "\n".join(lines)


def load(result: LoadResult) -> str:
    asked = (
        f"{result.concurrency} connections"
        if result.mode == "closed"
        else f"{result.rate_per_s:g}/s"
    )
    rate = result.achieved_per_s
    lines = [
        f"{result.model} at {result.url}: {result.mode} loop, {asked}, {result.duration_s:g} s",
        f"  answered   {rate.value:,.0f} requests/s (95 %: {rate.low:,.0f} to {rate.high:,.0f})",
        f"  latency    {latency(result.latency)}",
    ]
    counts = {"refused (503)": result.refused, "expired (504)": result.expired}
    counts |= {"failed": result.failed}
    lines.append(f"  requests   {result.sent} sent, {result.ok} ok, {mix(counts)}")
    if result.lag_p99_ms is not None:
        lines.append(f"  generator  p99 lag {result.lag_p99_ms:.2f} ms")
    if result.generator_limited:
        lines.append("note: the generator was the limit: these figures say nothing of the server")
    if result.first_error:
        lines.append(f"note: first error: {result.first_error}")
    return "\n".join(lines)


def latency(value: Latency | None) -> str:
    """p50, p90 and p99 in milliseconds, with how many samples they are of."""
    if value is None:
        return "not measured: no request was answered"
    parts = [f"{name} {ms(item)}" for name, item in percentiles(value)]
    return ", ".join(parts) + f" (n = {value.samples})"


def percentiles(value: Latency) -> list[tuple[str, Interval | None]]:
    return [("p50", value.p50_ms), ("p90", value.p90_ms), ("p99", value.p99_ms)]


def ms(value: Interval | None) -> str:
    return "too few" if value is None else f"{value.value:.3g} ms"


def percent(value: Interval) -> str:
    return f"{value.value * 100:.2f} % ({value.low * 100:.2f} to {value.high * 100:.2f})"


def mix(values: dict[str, Any] | Any) -> str:
    return ", ".join(f"{count} {name}" for name, count in values.items()) or "-"


def versions(values: dict[str, str] | Any) -> str:
    return ", ".join(f"{name} {version}" for name, version in values.items()) or "-"


def size(count: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count} B" if unit == "B" else f"{count:.1f} {unit}"
        count = count / 1000  # type: ignore[assignment]
    return ""


def profiles(found: Sequence[Profile]) -> str:
    rows = [
        (
            profile.name,
            profile.runtime,
            memory(profile.memory_bytes),
            rate(profile.bandwidth_bytes_per_s, 1e9, "GB/s"),
            rate(profile.peak_ops_per_s.get("fp16"), 1e12, "T"),
            rate(profile.peak_ops_per_s.get("int8"), 1e12, "T"),
            " ".join(profile.precisions),
        )
        for profile in found
    ]
    header = ("profile", "runtime", "memory", "bandwidth", "fp16/s", "int8/s", "precisions")
    return table(header, rows) + "\n\nPeaks are dense. One profile in full: deploykit profiles NAME"


def memory(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.0f} GiB"


def rate(value: float | None, unit: float, name: str) -> str:
    return "-" if value is None else f"{value / unit:.4g} {name}"


def profile(found: Profile) -> str:
    lines = [f"{found.name}: {found.summary}"]
    for key, value in found.to_dict().items():
        if key in (
            "name",
            "summary",
            "notes",
            "sources",
            "power_modes",
            "unverified",
            "peak_ops_per_s",
        ):
            continue
        if value not in (None, [], {}):
            shown = " ".join(map(str, value)) if isinstance(value, list) else value
            mark = "  (not verified)" if key in found.unverified else ""
            lines.append(f"  {key:<22} {shown}{mark}")
    for name, peak in found.peak_ops_per_s.items():
        mark = "  (not verified)" if f"peak_ops_per_s.{name}" in found.unverified else ""
        lines.append(f"  {'peak ' + name:<22} {peak / 1e12:.4g} T/s{mark}")
    for mode in found.power_modes:
        facts = {"W": mode.watts, "MHz": mode.gpu_mhz, "SMs": mode.sms}
        known = ", ".join(f"{value:g} {unit}" for unit, value in facts.items() if value is not None)
        lines.append(f"  {'power mode ' + mode.name:<22} {known or '-'}")
    lines += [f"  note: {text}" for text in found.notes]
    lines += [f"  source: {text}" for text in found.sources]
    return "\n".join(lines)


def health(result: Health) -> str:
    machine = result.machine
    lines = [
        f"machine    {machine.cpu}, {memory(machine.memory_bytes)}",
        f"cores      {machine.physical_cores} physical, {machine.usable_cores} usable",
        f"system     {machine.system}, {machine.architecture}, Python {machine.python}",
        f"features   {' '.join(machine.cpu_features) or UNKNOWN}",
    ]
    for gpu in machine.gpus:
        lines.append(
            f"gpu        {gpu.name}, {memory(gpu.memory_bytes)}, driver {gpu.driver}, "
            f"compute capability {gpu.compute_capability or UNKNOWN}"
        )
    if not machine.gpus:
        lines.append("gpu        none found (no nvidia-smi, or it lists none)")
    if machine.board or machine.l4t:
        lines.append(
            f"jetson     {machine.board or UNKNOWN}, L4T {machine.l4t or UNKNOWN}, "
            f"power mode {machine.power_mode or UNKNOWN}"
        )
    lines.append(f"packages   {versions(machine.packages)}")
    lines.append(f"providers  {' '.join(result.providers) or 'none: onnxruntime is not installed'}")
    lines.append("")
    rows = [
        (check.command, "works" if check.works else "does not work", check.why)
        for check in result.checks
    ]
    width = max(len(row[0]) for row in rows)
    lines += [f"{name:<{width}}  {state:<13}  {why}".rstrip() for name, state, why in rows]
    lines += [f"warning: {text}" for text in result.warnings]
    return "\n".join(lines)


def report(result: Report, folder: Path) -> str:
    rows = [
        (
            point.label,
            str(point.batch),
            ms(point.latency.p50_ms),
            ms(point.latency.p90_ms),
            ms(point.latency.p99_ms),
            f"{point.throughput_per_s.value:,.0f}",
        )
        for point in result.points
    ]
    header = ("setup", "batch", "p50", "p90", "p99", "inferences/s")
    lines = [table(header, rows), "", *result.verdict, "", f"report: {folder / 'report.html'}"]
    return "\n".join(lines)


def demo(result: Toured) -> str:
    header = ("", "accuracy", "p50 at batch 1", "throughput")
    lines = [
        "",
        table(header, result.rows),
        "",
        *result.report.verdict,
        "",
        f"report: {result.page}",
    ]
    return "\n".join(lines)
