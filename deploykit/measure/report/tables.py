"""The tables of a report, as strings, for every format that it is written in.

What was not measured is marked as such: never a 0 or an empty cell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploykit.measure.report.formatting import (
    MISSING,
    SPACE,
    count,
    number,
    percent,
    points,
    spread,
)
from deploykit.measure.report.limit_tables import limit_tables
from deploykit.measure.report.rows import (
    accuracy_of,
    at_smallest,
    by_label,
    load_label,
    provenance_rows,
    sizes_of,
    why_not,
)

Json = Mapping[str, Any]
NOT_MEASURED = "not measured"
_LATENCY = ("p50 (ms)", "p90 (ms)", "p99 (ms)", "max (ms)")


@dataclass(frozen=True)
class Table:
    """The first column names the row. `text`: the columns (from 0) without figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text: tuple[int, ...] = (0,)
    note: str = ""


def summary(document: Json) -> Table:
    """One row for each setup at its best batch, and one for each load level."""
    rows, apart = list[tuple[str, ...]](), list[tuple[str, ...]]()
    for label, measured in by_label(document["points"]).items():
        usable = [point for point in measured if not why_not(document, point)]
        chosen = usable or measured
        best = max(chosen, key=lambda point: float(point["throughput_per_s"]["value"]))
        first = chosen[0]
        scored = accuracy_of(document["accuracy"], label, str(best["precision"]))
        at_first = str(first["batch"]) == _first_batch(document)
        doubt = "wrong outputs" if label in document["wrong"] else "no verdict"
        (rows if usable else apart).append(
            (
                label,
                str(best["device"]) or MISSING,
                NOT_MEASURED if scored is None else percent(scored["value"], scored["n"]),
                *(_ms(first, key) if at_first else MISSING for key in ("p50_ms", "p99_ms")),
                f"{spread(best['throughput_per_s'])} batch {best['batch']}",
                _against(document, label, best) if usable else doubt,
            )
        )
    rows += apart
    for result in document["serving"]:
        latency = result["latency"] or {"p50_ms": None, "p99_ms": None}
        limited = " (generator-limited)" if result["generator_limited"] else ""
        limited += " (no verdict)" if result["marks"] else ""
        rows.append(
            (
                f"over {'gRPC' if result['protocol'] == 'grpc' else 'HTTP'}, {load_label(result)}",
                MISSING,
                MISSING,
                spread(latency["p50_ms"]),
                spread(latency["p99_ms"]),
                f"{_rows_per_s(result)} batch {result['batch']}{limited}",
                MISSING,
            )
        )
    sizes = [each for each in map(sizes_of, at_smallest(document["points"])[:1]) if each]
    return Table(
        "In short",
        (
            "setup",
            "device",
            "accuracy",
            f"p50 at batch {_first_batch(document)} (ms)",
            f"p99 at batch {_first_batch(document)} (ms)",
            "best throughput (inferences/s)",
            "× baseline, same batch",
        ),
        tuple(rows),
        (0, 1),
        "".join(f"Inputs of the smallest batch: {each}. " for each in sizes)
        + "Brackets hold 95 % intervals.",
    )


def best_by_batch(document: Json) -> Table:
    """Per batch size the baseline and the best on a CPU and on a GPU, where there is one."""
    kinds: Mapping[str, Callable[[Json], bool]] = {
        "baseline": lambda point: point["label"] == document["baseline"],
        "best CPU": lambda point: point["device"] == "cpu",
        "best GPU": lambda point: point["device"] != "cpu",
    }
    kinds = {name: of for name, of in kinds.items() if any(map(of, document["points"]))}
    rows = []
    for batch in sorted({int(point["batch"]) for point in document["points"]}):
        here = [p for p in document["points"] if int(p["batch"]) == batch]
        here = [point for point in here if not why_not(document, point)]
        groups = [list(filter(of, here)) for of in kinds.values()]
        cells = [find(group) for find in (_quickest, _fastest) for group in groups]
        rows += [(str(batch), *cells)] if here else []
    columns = [f"{name}, {what}" for what in ("p50 (ms)", "inferences/s") for name in kinds]
    return Table("Best at each batch", ("batch", *columns), tuple(rows))


def _quickest(found: Sequence[Json]) -> str:
    timed = [point for point in found if point["latency"]["p50_ms"] is not None]
    if not timed:
        return NOT_MEASURED
    best = min(timed, key=lambda point: float(point["latency"]["p50_ms"]["value"]))
    return f"{spread(best['latency']['p50_ms'])} {best['label']}"


def _fastest(found: Sequence[Json]) -> str:
    if not found:
        return NOT_MEASURED
    best = max(found, key=lambda point: float(point["throughput_per_s"]["value"]))
    return f"{spread(best['throughput_per_s'])} {best['label']}"


def _first_batch(document: Json) -> str:
    return str(min((int(point["batch"]) for point in document["points"]), default=1))


def _ms(point: Json, key: str) -> str:
    latency = point["latency"]
    if latency[key] is not None:
        return spread(latency[key])
    needs = latency.get("needs", {}).get(key)
    return f"too few: {count(point['samples'])}" + (f" of {count(needs)} calls" if needs else "")


def _rows_per_s(result: Json) -> str:
    return spread(result["achieved_per_s"], float(result["batch"]))


def _against(document: Json, label: str, point: Json) -> str:
    if why := why_not(document, point):
        return f"no verdict: {why}"
    if label == document["baseline"]:
        return "baseline"
    keys = ("batch", "scenario")
    for found in document["speedups"]:
        if found["label"] == label and all(found[key] == point[key] for key in keys):
            return spread(found["ratio"])
    return NOT_MEASURED


def details(document: Json) -> list[Table]:
    """Everything but the gates, in the order of the steps from the weights to the served model."""
    tables = [
        _accuracy(document),
        *(parity_table(each, _decided_by(document, each)) for each in document["parity"]),
        _points(document, usable=True),
        _points(document, usable=False),
        serving_table(document),
        _artefacts(document),
        _steps(document),
    ]
    tables += [Table(*parts) for parts in limit_tables(document)]
    return [table for table in tables if table.rows]


def gates(document: Json) -> Table:
    rows = tuple(
        (gate["name"], "met" if gate["passed"] else "NOT met", gate["detail"])
        for gate in document["gates"]
    )
    return Table("Gates", ("gate", "result", "detail"), rows, (0, 1, 2))


def _accuracy(document: Json) -> Table:
    rows = tuple(
        (
            row["label"] or row["precision"],
            row["precision"],
            row["metric"],
            count(row["n"]),
            percent(row["value"], row["n"]),
            "reference" if row["drop"] is None else points(row["drop"], row["n"]),
        )
        for row in document["accuracy"]
    )
    columns = ("setup", "precision", "metric", "samples", "value", "drop")
    return Table(
        "Accuracy", columns, rows, (0, 1, 2), "A drop is paired: the same samples on both."
    )


def _decided_by(document: Json, parity: Json) -> str:
    """What decides on an artefact of low precision, whose error no bound applies to; else ""."""
    precisions = {each.get("file"): each.get("precision") for each in document["artefacts"]}
    rival = parity["b"].partition(" in ")[2].split()  # "model.onnx in OpenVINO bf16"
    precision = precisions.get(parity["b"], rival[1] if len(rival) > 1 else "fp32")
    if precision in ("fp32", None):
        return ""
    measured = any(row["precision"] == precision for row in document["accuracy"])
    by = "its accuracy decides, above" if measured else "accuracy, not measured here, decides"
    return f"No bound applies to this error: {precision} rounds, and {by}."


def parity_table(parity: Json, decided_by: str = "") -> Table:
    """The errors, and whether they are within the bound, or what else decides."""
    shared = any(row.get("mean_iou") is not None for row in parity["rows"])
    rows = tuple(
        (
            row["output"],
            count(row["batch"]),
            count(row["values"]),
            *(_or_infinite(row[key]) for key in ("error", "max_abs", "rms", "sqnr_db")),
            MISSING if row["agreement"] is None else number(row["agreement"] * 100),
            *((MISSING if row.get("mean_iou") is None else number(row["mean_iou"]),) * shared),
        )
        for row in parity["rows"]
    )
    names = ("output", "batch", "values", "error", "max abs", "rms", "SQNR (dB)", "argmax (%)")
    columns = names + ("mean IoU",) * shared
    within, bound = "within" if parity["passed"] else "NOT within", number(parity["max_error"])
    note = decided_by or f"{within} the bound of {bound} on max |a−b| / max |a|."
    return Table(f"Parity of {parity['b']} with {parity['a']}", columns, rows, (0,), note)


def _or_infinite(value: float | None) -> str:
    return "∞" if value is None else number(value)


def _points(document: Json, *, usable: bool) -> Table:
    """Those that something is concluded from, or the others, with the reason."""
    rows = tuple(
        (
            str(point["label"]),
            str(point["runtime"]),
            count(point["batch"]),
            point["settings"]
            or count(point["sessions"])
            + (f" × {point['threads']}" if point["threads"] is not None else ""),
            count(point["samples"]),
            *(_ms(point, key) for key in ("p50_ms", "p90_ms", "p99_ms")),
            _or_infinite(point["latency"]["max_ms"]),
            spread(point["throughput_per_s"]),
            _against(document, str(point["label"]), point),
            _how(point),
        )
        for chosen in by_label(document["points"]).values()
        for point in chosen
        if usable is not bool(why_not(document, point))
    )
    first = ("setup", "runtime", "batch", "sessions, threads", "calls", *_LATENCY)
    columns = (*first, "inferences/s", "× baseline", "load")
    note = "From host memory to host memory, after the warm-up; calls are never averaged."
    title = "Every point" if usable else "Rows without a verdict"
    return Table(title, columns, rows, (0, 1, 3, 10, 11) if not usable else (0, 1, 3, 11), note)


def _how(point: Json) -> str:
    how = f"{point['scenario']}, {number(point['duration_s'])}{SPACE}s in {point['rounds']} rounds"
    if point["processes"] > 1:
        how += f" of {point['processes']} processes"
    return "; ".join(filter(None, [how, sizes_of(point), point["note"]]))


def serving_table(document: Json) -> Table:
    rows = []
    for result in document["serving"]:
        latency = result["latency"] or {}
        lag_ms = result["lag_p99_ms"]
        rows.append(
            (
                load_label(result),
                result["mode"],
                *(count(result[key]) for key in ("sent", "ok", "refused", "expired", "failed")),
                spread(result["achieved_per_s"]),
                *(spread(latency.get(key)) for key in ("p50_ms", "p90_ms", "p99_ms")),
                _or_infinite(latency["max_ms"]) if latency else MISSING,
                MISSING if lag_ms is None else number(lag_ms),
                _load_notes(result),
            )
        )
    first = ("load", "loop", "sent", "ok", "refused", "expired", "failed", "ok/s", *_LATENCY)
    columns = (*first, "generator lag p99 (ms)", "notes")
    note = "Latency is of successes: from the intended time in the open loop, from the sending in "
    return Table("Load tests", columns, tuple(rows), (0, 1, 13), note + "the closed one.")


def _load_notes(result: Json) -> str:
    notes = [f"{result['model']}, batch {result['batch']}, {number(result['duration_s'])}{SPACE}s"]
    if result["same_machine"]:
        notes.append("client and server on one machine")
    if result["generator_limited"]:
        notes.append("; ".join(["generator-limited: no verdict", *result["limits"]]))
    if result["marks"]:
        notes.append("; ".join(["no verdict", *result["marks"]]))
    if result["processes"] > 1:
        notes.append(f"{result['processes']} generator processes")
    notes += [result["sends"]] if result.get("sends") else []
    notes += [f"{name} {list(shape)}" for name, shape in result["shapes"].items()]
    about = {**result["server"], **result["options"]}
    notes += [f"{name} {value}" for name, value in about.items()]
    notes += result["notes"]
    if result["first_error"]:
        notes.append(str(result["first_error"]))
    return "; ".join(notes)


def _artefacts(document: Json) -> Table:
    keys = ("file", "format", "precision", "sha256")
    rows = tuple(
        (*(str(item.get(key) or MISSING) for key in keys), _megabytes(item.get("bytes")))
        for item in document["artefacts"]
    )
    columns = ("file", "format", "precision", "SHA-256", "size (MB)")
    return Table("Artefacts", columns, rows, (0, 1, 2, 3))


def _megabytes(size: int | None) -> str:
    return MISSING if size is None else number(size / 1e6)


def _steps(document: Json) -> Table:
    rows = tuple((step["name"], number(step["seconds"])) for step in document["steps"])
    return Table("Steps", ("step", "seconds"), rows)


def machine(document: Json) -> Table:
    """The machine and its software: one row per known property, packages last."""
    values: Json = document["machine"]
    rows = []
    for key, value in values.items():
        if key in ("packages", "gpus", "memory_bytes") or value in (None, "", []):
            continue
        text = ", ".join(map(str, value)) if isinstance(value, Sequence) else str(value)
        rows.append((key.replace("_", " "), str(value) if isinstance(value, str) else text))
    if values.get("memory_bytes"):
        rows.append(("memory", f"{number(values['memory_bytes'] / 2**30)}{SPACE}GiB"))
    gpus = values.get("gpus") or []
    rows += [("GPU", f"{gpu['name']}, driver {gpu['driver']}") for gpu in gpus]
    if "gpus" in values and not gpus:
        rows.append(("GPU", "none"))
    modes = [each["power_mode"] for each in document["conditions"] if each["power_mode"]]
    is_jetson = any("sysfs" in each["source"] for each in document["conditions"])
    is_jetson = is_jetson or bool(values.get("l4t") or values.get("board"))
    if is_jetson and not values.get("power_mode"):
        rows.append(("power mode", modes[0] if modes else "NOT KNOWN"))
    rows += [row for each in document["conditions"] for row in _conditions(each)]
    rows += provenance_rows(document.get("provenance") or {})
    rows += [(name, str(version)) for name, version in (values.get("packages") or {}).items()]
    return Table("Machine and versions", ("what", "value"), tuple(rows), (0, 1))


def _conditions(values: Json) -> list[tuple[str, str]]:
    """What held for one GPU during the run; what is not known is left out, throttling is not."""
    low, high, most = (values[f"clock_{key}_mhz"] for key in ("low", "high", "max"))
    rows = []
    if low is not None:
        limit = f", at most {number(most)}" if most is not None else ""
        rows.append(("GPU clock meanwhile", f"{number(low)} to {number(high)}{SPACE}MHz{limit}"))
    if values["power_mean_w"] is not None:
        mean, peak = number(values["power_mean_w"]), number(values["power_high_w"])
        rows.append(("power meanwhile", f"{mean}{SPACE}W on average, {peak}{SPACE}W at most"))
    if values["temperature_c"] is not None:
        rows.append(
            ("temperature meanwhile", f"{number(values['temperature_c'])}{SPACE}°C at most")
        )
    reasons = values["throttled"]
    shown = "not known" if reasons is None else ", ".join(reasons) or "no"
    return [*rows, ("throttled meanwhile", shown)]
