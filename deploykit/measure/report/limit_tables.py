"""Tables of scenarios, of what a plan predicts, and of energy, as the arguments of `Table`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deploykit.measure.report.formatting import MISSING, SPACE, count, number

Json = Mapping[str, Any]
# title, columns, rows, the columns without figures, note
Parts = tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...], tuple[int, ...], str]


def limit_tables(document: Json) -> list[Parts]:
    """Those that the report has rows for."""
    found = (_scenarios(document), _predicted(document), _energy(document))
    return [parts for parts in found if parts[2]]


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
        )
        for each in document.get("predicted") or ()
    )
    columns = ("setup", "batch", "predicted (ms)", "measured p50 (ms)", "error")
    note = "Predicted by a plan from one probe of this machine's CPU, before the run."
    return "Predicted and measured", columns, rows, (0,), note


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
