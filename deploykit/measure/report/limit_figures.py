"""Charts of what limits an engine: where its time goes, the roofline, and the state of its GPU."""

from __future__ import annotations

from collections.abc import Sequence

from deploykit.measure.report.chart import BOUND, Bars, Chart, Mark, Series
from deploykit.measure.report.formatting import SPACE, count, number
from deploykit.measure.report.rows import (
    Json,
    after_setups,
    at_smallest,
    by_label,
    load_label,
    looks,
    value,
)

GPU_ROOFLINE = "gpu_roofline"
_TRACES = (
    ("clock_mhz", "GPU clock", "clock (MHz)"),
    ("power_w", "GPU power", "power (W)"),
    ("temperature_c", "GPU temperature", "temperature (°C)"),
)


def waterfall(document: Json) -> Bars | None:
    """What a call is made of at the smallest batch, for setups whose compute was timed alone."""
    bars, rows = [], []
    for label, chosen in by_label(at_smallest(document["points"])).items():
        whole = value(chosen[0]["latency"]["p50_ms"])
        compute = value((chosen[0].get("compute") or {}).get("p50_ms"))
        if whole is None or compute is None:
            continue
        rest = max(whole - compute, 0.0)
        bars.append((label, (compute, rest)))
        rows.append((label, count(chosen[0]["batch"]), *map(number, (compute, rest, whole))))
    if not bars:
        return None
    look = looks(document)
    label, (compute, rest) = max(bars, key=lambda bar: bar[1][1])
    share = f"{100 * rest / (compute + rest):.0f}{SPACE}%"
    return Bars(
        name="waterfall",
        title="Where the time of a call goes",
        finding=f"{label} spends {share} of a call outside of its kernels: copies to and from the "
        "GPU, launches, and the call itself. Medians at the smallest batch.",
        x_label="time of one call (ms)",
        parts=("compute", "copies and launches"),
        bars=tuple(bars),
        look=after_setups(document),
        looks=tuple(look[name] for name, _ in bars),
        columns=("setup", "batch", "compute (ms)", "copies and launches (ms)", "whole (ms)"),
        rows=tuple(rows),
    )


def request_waterfall(document: Json) -> Bars | None:
    """What a request is made of at each load, where the server reports its own times."""
    served = [result for result in document["serving"] if result["stages_ms"]]
    if not served:
        return None
    parts = tuple(dict.fromkeys(name for result in served for name in result["stages_ms"]))
    bars = [
        (load_label(result), tuple(float(result["stages_ms"].get(name, 0.0)) for name in parts))
        for result in served
    ]
    sentences = []
    for label, values in bars:
        most = max(range(len(parts)), key=values.__getitem__)
        share = 100 * values[most] / max(sum(values), 1e-12)
        sentences.append(f"{label}: {parts[most]} takes {share:.0f}{SPACE}%")
    return Bars(
        name="request",
        title="Where the time of a request goes",
        finding="; ".join(sentences) + ". Means of all answers; decode to encode by the server's "
        "own statistics, wire is the rest: network, kernel, and the wait for a connection.",
        x_label="time of one request (ms)",
        parts=parts,
        bars=tuple(bars),
        look=after_setups(document),
        columns=("load", *(f"{name} (ms)" for name in parts), "whole (ms)"),
        rows=tuple((label, *map(number, (*values, sum(values)))) for label, values in bars),
    )


def roofline(document: Json, name: str = "roofline") -> Chart | None:
    """What each setup reaches under what was measured of the machine (Williams et al., 2009)."""
    found = document.get(name) or {}
    points = [p for p in found.get("points") or [] if p["intensity"] > 0 and p["gflops"] > 0]
    ceilings = found.get("ceilings") or {}
    most, fastest = (float(ceilings.get(key, 0)) for key in ("gflops", "gbytes_per_s"))
    if not points or not (most > 0 and fastest > 0):
        return None
    ridge = most / fastest
    xs = [float(point["intensity"]) for point in points]
    low, high = min(*xs, ridge) / 2, max(*xs, ridge) * 2
    roof = tuple(Mark(x, min(most, x * fastest)) for x in (low, ridge, high))
    look, series, rows = looks(document), list[Series](), []
    shares: list[tuple[float, str, str, str]] = []
    for label, chosen in by_label(points).items():
        marks = tuple(
            Mark(float(p["intensity"]), float(p["gflops"]), text=str(p["batch"])) for p in chosen
        )
        series.append(Series(label, marks, look.get(label, len(look))))
        for mark in marks:
            bound = "memory" if mark.x < ridge else "arithmetic"
            shares.append((mark.y / min(most, mark.x * fastest), label, mark.text, bound))
            of_it = f"{100 * shares[-1][0]:.0f}{SPACE}%"
            rows.append((label, mark.text, number(mark.x), number(mark.y), bound, of_it))
    share, label, batch, bound = max(shares)
    return Chart(
        name=name,
        title="Roofline: what limits the speed" + " on the GPU" * (name == GPU_ROOFLINE),
        finding=f"{label} at batch {batch} comes closest to the limit of its {bound}: "
        f"{100 * share:.0f}{SPACE}% of it. Left of the bend memory is the limit, right of it "
        "arithmetic; far below the line it is neither, but launches and calls. The figures at the "
        "marks are batch sizes.",
        x_label="operations per byte that is moved (FLOP/byte)",
        y_label="speed (GFLOP/s)",
        series=(Series("measured limit", roof, BOUND, plain=True), *series),
        x_log=True,
        y_log=True,
        zero=False,
        columns=("setup", "batch", "FLOP/byte", "GFLOP/s", "bound by", "of the limit"),
        rows=tuple(rows),
    )


def gpu_charts(document: Json) -> list[Chart]:
    """Clock, power and temperature of the GPUs over the run, where they were recorded."""
    found = []
    first = after_setups(document)
    for key, title, y_label in _TRACES:
        gpus = [
            each for each in document["conditions"] if _known((each.get("trace") or {}).get(key))
        ]
        if gpus:
            found.append(_trace(key, title, y_label, gpus, first))
    return found


def _known(values: Sequence[float | None] | None) -> list[float]:
    return [each for each in values or () if each is not None]


def _trace(key: str, title: str, y_label: str, gpus: Sequence[Json], first: int) -> Chart:
    series, rows, sentences = [], [], []
    for index, gpu in enumerate(gpus):
        values, name = gpu["trace"][key], gpu["name"] + f" {index + 1}" * (len(gpus) > 1)
        last = max(len(values) - 1, 1)
        marks = [Mark(100 * i / last, y) for i, y in enumerate(values) if y is not None]
        series.append(Series(name, tuple(marks), first + index, plain=True))
        low, high = min(_known(values)), max(_known(values))
        rows.append((name, number(low), number(high), count(len(values))))
        sentences.append(f"{name}: {number(low)} to {number(high)}")
    why = [reason for gpu in gpus for reason in gpu["throttled"] or ()]
    throttled = f"; THROTTLED ({', '.join(dict.fromkeys(why))})" if why else "; not throttled"
    unit = y_label.partition("(")[2].rstrip(")")
    return Chart(
        name=key,
        title=f"{title} over the run",
        finding="; ".join(sentences) + f"{SPACE}{unit}{throttled}.",
        x_label="share of the run (%)",
        y_label=y_label,
        series=tuple(series),
        zero=False,
        columns=("GPU", f"lowest, {y_label}", "highest", "samples"),
        rows=tuple(rows),
    )
