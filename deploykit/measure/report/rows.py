"""Pick rows of a report's document: by setup, by load level, and how each looks in charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deploykit.measure.report.chart import Mark
from deploykit.measure.report.formatting import SPACE, count, number

Json = Mapping[str, Any]


def looks(document: Json) -> dict[str, int]:
    """Setup -> its look in every chart, no two alike. The baseline has 0, whatever its position."""
    labels = list(dict.fromkeys(str(point["label"]) for point in document["points"]))
    others = [label for label in labels if label != document["baseline"]]
    return {document["baseline"]: 0} | {label: i for i, label in enumerate(others, 1)}


def after_setups(document: Json) -> int:
    """The first look that no setup has: of load levels, GPUs and parts of a call."""
    return len(looks(document)) if document.get("points") else 1


def why_not(document: Json, point: Json) -> str:
    """Why nothing is concluded from a point; "" where something is."""
    if point["label"] in document.get("wrong", ()):
        return "wrong outputs"
    return "; ".join(point.get("marks") or ())


def name_in_charts(document: Json, label: str, points: Sequence[Json]) -> str:
    """A setup's label, with a warning where nothing is concluded from some of its points."""
    marked = any(why_not(document, point) for point in points)
    return f"✗ {label}" if marked else label


def by_label(points: Sequence[Json]) -> dict[str, list[Json]]:
    """The points of each setup, by batch."""
    labels = dict.fromkeys(str(point["label"]) for point in points)
    return {
        label: sorted((p for p in points if p["label"] == label), key=lambda p: int(p["batch"]))
        for label in labels
    }


def accuracy_of(rows: Sequence[Json], label: str, precision: str) -> Json | None:
    """The row of `accuracy` that is a setup's, else the first of its precision."""
    own = [row for row in rows if row.get("label") and f"{label}, ".startswith(f"{row['label']}, ")]
    own = own or [row for row in rows if row["precision"] == precision][:1]
    return max(own, key=lambda row: len(row.get("label", "")), default=None)


def sizes_of(point: Json) -> str:
    """The inputs of one call: "image 8×3×224×224"; "" where a report does not say them."""
    shapes: Mapping[str, Sequence[int]] = point["shapes"]
    return "; ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in shapes.items())


def at_smallest(points: Sequence[Json]) -> list[Json]:
    """Those of the smallest batch: a setup may have been timed at larger ones only."""
    smallest = min((int(point["batch"]) for point in points), default=1)
    return [point for point in points if int(point["batch"]) == smallest]


def value(parts: Json | None) -> float | None:
    return None if parts is None else float(parts["value"])


def mark(x: float, parts: Json, text: str = "") -> Mark:
    return Mark(x, parts["value"], parts["low"], parts["high"], text)


def limit_line(slo_ms: float | None, of: str) -> tuple[float, str] | None:
    """Where a chart shows the time that was wanted."""
    return (slo_ms, f"wanted{of}: {number(slo_ms)}{SPACE}ms") if slo_ms else None


def load_label(result: Json) -> str:
    """How a load level is called: "32 connections" or "450 requests/s"."""
    if result["mode"] == "open":
        return f"{number(result['rate_per_s'])} requests/s"
    connections = int(result["concurrency"])
    return f"{count(connections)} connection{'s' if connections != 1 else ''}"


def provenance_rows(found: Json) -> list[tuple[str, str]]:
    """Names and values of a report's provenance."""
    rows = []
    for key, name in (("project", "commit measured"), ("deploykit", "commit of deploykit")):
        commit = found.get(key) or {}
        changed = ", with changes that are not committed" if commit.get("changed") else ""
        rows.append((name, commit["commit"] + changed if "commit" in commit else ""))
    clocks = found.get("clocks") or {}
    units = {"min_mhz": "at least {} MHz", "max_mhz": "at most {} MHz", "turbo": "turbo {}"}
    rows += [
        ("host", str(found.get("host") or "")),
        ("CPU clocks", ", ".join(units.get(key, "{}").format(v) for key, v in clocks.items())),
        ("CPUs used", str(found.get("affinity") or "")),
    ]
    rows += list((found.get("environment") or {}).items())
    return [row for row in rows if row[1]]
