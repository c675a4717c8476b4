"""Tables of scenarios, of what a plan predicts, and of energy, as the arguments of `Table`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deploykit.measure.report.formatting import MISSING, SPACE, count, number, spread
from deploykit.measure.report.rows import by_label, why_not

Json = Mapping[str, Any]
# title, columns, rows, the columns without figures, note
Parts = tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...], tuple[int, ...], str]


def limit_tables(document: Json) -> list[Parts]:
    """Those that the report has rows for."""
    makers = (_memory_and_cost, _compute, _scenarios, _predicted, _energy)
    found = [make(document) for make in makers]
    return [parts for parts in found if parts[2]]


def _memory_and_cost(document: Json) -> Parts:
    """Of each setup at the batch of its highest throughput."""
    price = document.get("price")
    peaks = {each["label"]: each for each in document.get("memory") or ()}
    rows = []
    for label, chosen in by_label(document["points"]).items():
        best = max(chosen, key=lambda point: float(point["throughput_per_s"]["value"]))
        rate, peak = float(best["throughput_per_s"]["value"]), peaks.get(label)
        memory = number(peak["peak_bytes"] / 1e6) if peak else "not measured"
        cost = "price not given" if price is None else "no verdict"
        if price is not None and rate > 0 and not why_not(document, best):
            cost = number(price / 3600 / rate * 1e6)
        at = count(peak["batch"]) if peak else MISSING
        rows.append((label, memory, at, cost, count(best["batch"])))
    columns = ("setup", "peak memory (MB)", "at batch", "cost of a million", "at its best batch")
    note = "Memory: the most that a fresh process had resident, with Python and the libraries. "
    note += "Cost: the price of an hour by the best throughput, in the currency of the price."
    return "Memory and cost", columns, tuple(rows), (0,), note


def _compute(document: Json) -> Parts:
    """Compute alone next to the whole call, where a copy happens."""
    rows = tuple(
        (
            str(point["label"]),
            count(point["batch"]),
            *(spread(point["compute"][key]) for key in ("p50_ms", "p90_ms", "p99_ms")),
            spread(point["latency"]["p50_ms"]),
        )
        for chosen in by_label(document["points"]).values()
        for point in chosen
        if point.get("compute")
    )
    names = (f"compute {name} (ms)" for name in ("p50", "p90", "p99"))
    columns = ("setup", "batch", *names, "end to end p50 (ms)")
    note = "Compute: further calls, less the copies to the GPU and back that the runtime timed."
    return "Compute alone", columns, rows, (0,), note


def _scenarios(document: Json) -> Parts:
    columns = ("scenario", "setup", "settings", "batch", "queries", "value", "of", "note")
    note = "As MLPerf defines them, but shorter; percentiles by its rule of early stopping, 99 %."
    rows = tuple(
        (
            row["scenario"],
            row["label"],
            row["settings"] or row["device"],
            count(row["batch"]),
            count(row["queries"]),
            MISSING if row["value"] is None else number(row["value"]),
            row["metric"] + (f", p99 ≤ {number(row['slo_ms'])} ms" if row["slo_ms"] else ""),
            row["why"],
        )
        for row in document.get("scenarios") or ()
    )
    return "Scenarios", columns, rows, (0, 1, 2, 6, 7), note


def _predicted(document: Json) -> Parts:
    rows = tuple(
        (
            str(each["label"]),
            str(each["batch"]),
            number(float(each["predicted_ms"])),
            number(float(each["measured_ms"])),
            f"{100 * float(each['error']):+.0f}{SPACE}%".replace("-", "−"),
            str(each["basis"]),
        )
        for each in document.get("predicted") or ()
    )
    columns = ("setup", "batch", "predicted (ms)", "measured p50 (ms)", "error", "predicted from")
    note = "Predicted by a plan before the run. A plan for a GPU is of TensorRT."
    return "Predicted and measured", columns, rows, (0, 5), note


def _energy(document: Json) -> Parts:
    found = document.get("energy") or ()
    rows = tuple(
        (
            str(each["label"]),
            str(each["batch"]),
            number(1e3 * float(each["joules"])),
            number(1e3 * float(each["above_idle"])),
            number(float(each["idle_w"])),
            str(each["source"]),
        )
        for each in found
    )
    columns = ("setup", "batch", "mJ per inference", "above idle (mJ)", "idle (W)", "read from")
    note = "Device energy, not that at the wall: no power supply, no fan."
    return "Energy", columns, rows, (0, 5), note
