"""Make the tables of a report as strings, for all its formats.

A missing measurement is marked as such, never as 0 or an empty cell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from deploykit.evaluation.formatting import (
    MISSING,
    SPACE,
    Json,
    Table,
    count,
    number,
    or_infinite,
    percent,
    spread,
)

NOT_MEASURED = "not measured"
_PERCENTILES = ("p50_ms", "p90_ms", "p99_ms")
_FIGURE = re.compile(r"[−\d.∞\s%p]+( \[|$)")  # a cell with one: "12 300", "0.2 pp [−0.3, 0.7]"


def why_not(document: Json, point: Json) -> str:
    """Return why a point is not used for conclusions; "" if it is used."""
    if point["label"] in document.get("wrong", ()):
        return "wrong outputs"
    return "; ".join(point.get("marks") or ())


def by_label(points: Sequence[Json]) -> dict[str, list[Json]]:
    """Return the points of each setup, sorted by batch."""
    labels = dict.fromkeys(str(point["label"]) for point in points)
    return {
        label: sorted((p for p in points if p["label"] == label), key=lambda p: int(p["batch"]))
        for label in labels
    }


def rate_of(point: Json) -> float:
    return float(point["throughput_per_s"]["value"])


def accuracy_of(rows: Sequence[Json], label: str, precision: str) -> Json | None:
    """Return the setup's row of `accuracy`, else the first of its precision."""
    own = [row for row in rows if row.get("label") and f"{label}, ".startswith(f"{row['label']}, ")]
    own = own or [row for row in rows if row["precision"] == precision][:1]
    return max(own, key=lambda row: len(row.get("label", "")), default=None)


def at_smallest(points: Sequence[Json]) -> list[Json]:
    """Return the points at the smallest batch, which some setups may lack."""
    smallest = min((int(point["batch"]) for point in points), default=1)
    return [point for point in points if int(point["batch"]) == smallest]


def load_label(result: Json) -> str:
    """Return the name of a load level: "32 connections" or "450 requests/s"."""
    if result["mode"] == "open":
        return f"{number(result['rate_per_s'])} requests/s"
    connections = int(result["concurrency"])
    return f"{count(connections)} connection{'s' if connections != 1 else ''}"


def summary(document: Json) -> Table:
    """Return a row for each setup at its best batch; those without a verdict are last."""
    rows, apart = list[Json](), list[Json]()
    smallest = at_smallest(document["points"])
    batch = str(smallest[0]["batch"]) if smallest else "1"
    for label, measured in by_label(document["points"]).items():
        usable = [point for point in measured if not why_not(document, point)]
        chosen = usable or measured
        best, first = max(chosen, key=rate_of), chosen[0]
        scored = accuracy_of(document["accuracy"], label, str(best["precision"]))
        at_first = str(first["batch"]) == batch
        doubt = "wrong outputs" if label in document["wrong"] else "no verdict"
        row = {
            "setup": label,
            "device": best["device"],
            "accuracy": percent(scored["value"], scored["n"]) if scored else NOT_MEASURED,
            f"p50 at batch {batch} (ms)": _ms(first, "p50_ms") if at_first else None,
            f"p99 at batch {batch} (ms)": _ms(first, "p99_ms") if at_first else None,
            "best throughput (inferences/s)": (
                f"{spread(best['throughput_per_s'])} batch {best['batch']}"
            ),
            "× baseline, same batch": _against(document, best) if usable else doubt,
        }
        (rows if usable else apart).append(row)
    sizes = "".join(f"Inputs of the smallest batch: {s}. " for s in map(_sizes, smallest[:1]) if s)
    base = f" The baseline is {document['baseline']}." * bool(document["baseline"])
    note = f"{sizes}Brackets hold 95 % intervals.{base}"
    return make_table("In short", [*rows, *apart], note)


def _ms(point: Json, key: str) -> str:
    latency = point["latency"]
    if latency[key] is not None:
        return spread(latency[key])
    needs = latency.get("needs", {}).get(key)
    return f"too few: {count(point['samples'])}" + (f" of {count(needs)} calls" if needs else "")


def _against(document: Json, point: Json) -> str:
    if why := why_not(document, point):
        return f"no verdict: {why}"
    if point["label"] == document["baseline"]:
        return "baseline"
    keys = ("label", "batch", "scenario")
    for found in document["speedups"]:
        if all(found[key] == point[key] for key in keys):
            return spread(found["ratio"])
    return NOT_MEASURED


def _sizes(point: Json) -> str:
    """Return the inputs of one call, "image 8×3×224×224"; "" if a report has none."""
    shapes: Mapping[str, Sequence[int]] = point["shapes"]
    return "; ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in shapes.items())


def details(document: Json) -> list[Table]:
    """Return all other tables, ordered as the steps from the weights to the served model."""
    every = [point for chosen in by_label(document["points"]).values() for point in chosen]
    tables = [
        make_table(
            "Accuracy",
            [
                {"setup": row["label"] or row["precision"]}
                | {"precision": row["precision"], "metric": row["metric"], "samples": row["n"]}
                | {"value": percent(row["value"], row["n"])}
                | {"drop": percent(row["drop"], row["n"], "pp") if row["drop"] else "reference"}
                for row in document["accuracy"]
            ],
            "A drop is paired: the same samples on both.",
        ),
        *map(_parity, document["parity"]),
        _points(document, [p for p in every if not why_not(document, p)], "Every point"),
        _points(document, [p for p in every if why_not(document, p)], "Rows without a verdict"),
        serving_table(document),
        *(layers_table(each) for each in document.get("layers") or () if each["sum_ms"]),
        make_table("Artefacts", document["artefacts"]),
        make_table("Steps", document["steps"]),
        make_table(
            "Memory",
            document.get("memory") or (),
            "The most that a fresh process had resident, with Python and the libraries.",
        ),
        make_table(
            "Compute alone",
            [
                {key: point[key] for key in ("label", "batch")}
                | {f"compute {key}": point["compute"][key] for key in _PERCENTILES}
                | {"end to end p50_ms": point["latency"]["p50_ms"]}
                for point in every
                if point.get("compute")
            ],
            "Compute: further calls, less the copies to the GPU and back that the runtime timed.",
        ),
        make_table(
            "Scenarios",
            document.get("scenarios") or (),
            "As MLPerf defines them, but shorter; percentiles by its rule of early stopping, 99 %.",
        ),
        make_table(
            "Predicted and measured",
            document.get("predicted") or (),
            "Predicted by a plan before the run. A plan for a GPU is of TensorRT.",
        ),
        *(
            make_table(title, (document.get(key) or {}).get("points") or ())
            for title, key in (("Roofline", "roofline"), ("Roofline of the GPU", "gpu_roofline"))
        ),
        make_table(
            "Energy",
            document.get("energy") or (),
            "Device energy, not that at the wall: no power supply, no fan.",
        ),
    ]
    return [table for table in tables if table.rows]


def _parity(parity: Json) -> Table:
    rows = [
        {"output": row["output"], "batch": row["batch"], "values": row["values"]}
        | {key: or_infinite(row[key]) for key in ("error", "max_abs", "rms")}
        | {"SQNR (dB)": or_infinite(row["sqnr_db"])}
        | {"argmax (%)": None if row["agreement"] is None else 100 * row["agreement"]}
        | {"mean IoU": "" if row.get("mean_iou") is None else row["mean_iou"]}
        for row in parity["rows"]
    ]
    note = "Error: max |a−b| / max |a|. Whether it is small enough is under Gates."
    return make_table(f"Parity of {parity['b']} with {parity['a']}", rows, note)


def _points(document: Json, chosen: Sequence[Json], title: str) -> Table:
    rows = [
        {"setup": point["label"], "runtime": point["runtime"], "batch": point["batch"]}
        | {"sessions, threads": _sessions(point), "calls": point["samples"]}
        | {f"{key[:3]} (ms)": _ms(point, key) for key in _PERCENTILES}
        | {"max (ms)": or_infinite(point["latency"]["max_ms"])}
        | {"inferences/s": point["throughput_per_s"]}
        | {"× baseline" if title == "Every point" else "verdict": _against(document, point)}
        | {"load": _how(point)}
        for point in chosen
    ]
    note = "From host memory to host memory, after the warm-up; calls are never averaged."
    return make_table(title, rows, note)


def _sessions(point: Json) -> str:
    threads = "" if point["threads"] is None else f" × {point['threads']}"
    return point["settings"] or count(point["sessions"]) + threads


def _how(point: Json) -> str:
    how = f"{point['scenario']}, {number(point['duration_s'])}{SPACE}s in {point['rounds']} rounds"
    if point["processes"] > 1:
        how += f" of {point['processes']} processes"
    return "; ".join(filter(None, [how, _sizes(point), point["note"]]))


def make_table(title: str, rows: Iterable[Json], note: str = "") -> Table:
    """Return a table with a column for each key of `rows`, except those of objects and of "".

    A column without a figure is text, and so is the first one.
    """
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [_cell(name, row.get(name)) for row in rows] for name in names}
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    titles = tuple(re.sub("bytes$", "MB", name.replace("_", " ")) for name in columns)
    figures = [any(map(_FIGURE.match, cells)) for cells in columns.values()]
    text = tuple(at for at, has_figure in enumerate(figures) if at == 0 or not has_figure)
    cells = ((cell or MISSING for cell in row) for row in zip(*columns.values(), strict=True))
    return Table(title, titles, tuple(map(tuple, cells)), text, note)


def _cell(name: str, value: Any) -> str:
    """Return a string, a number or an interval as a cell, "–" for None; bytes in MB; else ""."""
    if value is None or (isinstance(value, Mapping) and "low" in value):
        return spread(value)
    if isinstance(value, (int, float)):
        if name.endswith("bytes"):
            return number(value / 1e6)
        return count(value) if isinstance(value, int) else number(value)
    return value if isinstance(value, str) else ""


def gates(document: Json) -> Table:
    result = {True: "✓ met", False: "✗ NOT met"}
    return make_table(
        "Gates",
        [
            {"gate": gate["name"], "result": result[gate["passed"]], "detail": gate["detail"]}
            for gate in document["gates"]
        ],
    )


def serving_table(document: Json) -> Table:
    rows = [
        {"load": load_label(result), "loop": result["mode"]}
        | {name: result[name] for name in ("sent", "ok", "refused", "expired", "failed")}
        | {"ok/s": result["achieved_per_s"]}
        | {name: (result["latency"] or {}).get(name) for name in _PERCENTILES}
        | {"max_ms": or_infinite(result["latency"]["max_ms"]) if result["latency"] else None}
        | {"generator lag p99_ms": result["lag_p99_ms"], "notes": _load_notes(result)}
        for result in document["serving"]
    ]
    note = "Latency is of successes: from the intended time in the open loop, from the sending in "
    return make_table("Load tests", rows, note + "the closed one.")


def _load_notes(result: Json) -> str:
    named = {**result["server"], **result["options"]}
    notes = [
        f"{result['model']}, batch {result['batch']}, {number(result['duration_s'])}{SPACE}s",
        "client and server on one machine" * result["same_machine"],
        "generator-limited: no verdict" * result["generator_limited"],
        *result["limits"],
        "no verdict" * bool(result["marks"]),
        *result["marks"],
        f"{result['processes']} generator processes" * (result["processes"] > 1),
        result.get("sends") or "",
        *(f"{name} {list(shape)}" for name, shape in result["shapes"].items()),
        *(f"{name} {value}" for name, value in named.items()),
        *result["notes"],
        result["first_error"] or "",
    ]
    return "; ".join(filter(None, notes))


def machine(document: Json) -> Table:
    """Return a row for each known property of the machine and its state, packages last."""
    values = dict(document["machine"])
    packages, gpus = values.pop("packages", None) or {}, values.pop("gpus", None)
    if memory_bytes := values.pop("memory_bytes", None):
        values["memory"] = f"{number(memory_bytes / 2**30)}{SPACE}GiB"
    rows = list(_properties(values))
    names = [f"{gpu['name']}, driver {gpu['driver']}" for gpu in gpus or ()]
    rows += [("GPU", name) for name in names or ["none"] * (gpus is not None)]
    for state in document["conditions"]:
        reasons = state["throttled"]
        state = {key: value for key, value in state.items() if key not in ("name", "trace")}
        state["throttled"] = "not known" if reasons is None else ", ".join(reasons) or "no"
        rows += _properties(state, "GPU: ")
    rows += _properties(document.get("provenance") or {})
    rows += [(name, str(version)) for name, version in packages.items()]
    return Table("Machine and versions", ("what", "value"), rows, (0, 1))


def _properties(values: Json, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield a row for each value, also of objects in others; unknown ones are omitted."""
    for key, value in values.items():
        name = prefix + (key.replace("_", " ") if key.islower() else key)
        if isinstance(value, Mapping):
            yield from _properties(value, f"{name}: ")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield from [(name, ", ".join(map(str, value)))] * bool(value)
        elif value not in (None, ""):
            yield name, str(value)


def part_of(part: float, whole: float | None) -> str:
    return f"{number(100 * part / whole)}{SPACE}%" if whole else MISSING


def layers_table(found: Json, most: int | None = None) -> Table:
    """Return the slowest layers of a LayerTimes in JSON, and the others in one row.

    The note says how far they add up to a call.
    """
    whole, share = found["sum_ms"], found["sum_ms"] / found["call_ms"]
    layers = found["layers"][:most]
    rows = [(e["name"], e["op"], number(e["ms"]), part_of(e["ms"], whole)) for e in layers]
    if others := found["count"] - len(rows):
        rest_ms = max(0.0, whole - sum(each["ms"] for each in layers))
        rows.append((f"{count(others)} others", MISSING, number(rest_ms), part_of(rest_ms, whole)))
    call, profiled = (f"{number(found[key])}{SPACE}ms" for key in ("call_ms", "profiled_ms"))
    note = (
        f"{found['label']} at batch {found['batch']}, {found['runtime']}, {found['calls']} calls: "
        f"{count(found['count'])} layers add up to {part_of(share, 1)} of a call of {call} "
        f"without the profiler, with which one takes {profiled}"
    )
    if abs(share - 1) > 0.05:  # share of a call by which the sum of its layers may differ
        note += f". NOT within 5{SPACE}%, so only the shares say something"
    columns = ("layer", "operator", "ms", "share")
    return Table(f"Time by layer: {found['label']}", columns, rows, (0, 1), f"{note}.")
