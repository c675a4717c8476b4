"""The tables of a report, as strings, for every format that it is written in.

What was not measured is marked as such: never a 0 or an empty cell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deploykit.evaluation.formatting import MISSING, SPACE, count, number, percent, points, spread
from deploykit.evaluation.html_tables import Json, Table, _or_infinite, parity_table
from deploykit.reporting.charts import Mark

# Pick rows of a report's document: by setup, by load level, and how each looks in charts.

JsonRows = Mapping[str, Any]


def looks(document: JsonRows) -> dict[str, int]:
    """Setup -> its look in every chart, no two alike. The baseline has 0, whatever its position."""
    labels = list(dict.fromkeys(str(point["label"]) for point in document["points"]))
    others = [label for label in labels if label != document["baseline"]]
    return {document["baseline"]: 0} | {label: i for i, label in enumerate(others, 1)}


def after_setups(document: JsonRows) -> int:
    """The first look that no setup has: of load levels, GPUs and parts of a call."""
    return len(looks(document)) if document.get("points") else 1


def why_not(document: JsonRows, point: JsonRows) -> str:
    """Why nothing is concluded from a point; "" where something is."""
    if point["label"] in document.get("wrong", ()):
        return "wrong outputs"
    return "; ".join(point.get("marks") or ())


def name_in_charts(document: JsonRows, label: str, points: Sequence[JsonRows]) -> str:
    """A setup's label, with a warning where nothing is concluded from some of its points."""
    marked = any(why_not(document, point) for point in points)
    return f"✗ {label}" if marked else label


def by_label(points: Sequence[JsonRows]) -> dict[str, list[JsonRows]]:
    """The points of each setup, by batch."""
    labels = dict.fromkeys(str(point["label"]) for point in points)
    return {
        label: sorted((p for p in points if p["label"] == label), key=lambda p: int(p["batch"]))
        for label in labels
    }


def accuracy_of(rows: Sequence[JsonRows], label: str, precision: str) -> JsonRows | None:
    """The row of `accuracy` that is a setup's, else the first of its precision."""
    own = [row for row in rows if row.get("label") and f"{label}, ".startswith(f"{row['label']}, ")]
    own = own or [row for row in rows if row["precision"] == precision][:1]
    return max(own, key=lambda row: len(row.get("label", "")), default=None)


def sizes_of(point: JsonRows) -> str:
    """The inputs of one call: "image 8×3×224×224"; "" where a report does not say them."""
    shapes: Mapping[str, Sequence[int]] = point["shapes"]
    return "; ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in shapes.items())


def at_smallest(points: Sequence[JsonRows]) -> list[JsonRows]:
    """Those of the smallest batch: a setup may have been timed at larger ones only."""
    smallest = min((int(point["batch"]) for point in points), default=1)
    return [point for point in points if int(point["batch"]) == smallest]


def value(parts: JsonRows | None) -> float | None:
    return None if parts is None else float(parts["value"])


def mark(x: float, parts: JsonRows, text: str = "") -> Mark:
    return Mark(x, parts["value"], parts["low"], parts["high"], text)


def limit_line(slo_ms: float | None, of: str) -> tuple[float, str] | None:
    """Where a chart shows the time that was wanted."""
    return (slo_ms, f"wanted{of}: {number(slo_ms)}{SPACE}ms") if slo_ms else None


def load_label(result: JsonRows) -> str:
    """How a load level is called: "32 connections" or "450 requests/s"."""
    if result["mode"] == "open":
        return f"{number(result['rate_per_s'])} requests/s"
    connections = int(result["concurrency"])
    return f"{count(connections)} connection{'s' if connections != 1 else ''}"


def provenance_rows(found: JsonRows) -> list[tuple[str, str]]:
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


# Tables of scenarios, of what a plan predicts, and of energy, as the arguments of `Table`.

JsonLimitTables = Mapping[str, Any]
# title, columns, rows, the columns without figures, note
Parts = tuple[str, tuple[str, ...], tuple[tuple[str, ...], ...], tuple[int, ...], str]


def limit_tables(document: JsonLimitTables) -> list[Parts]:
    """Those that the report has rows for."""
    makers = (_memory_and_cost, _compute, _scenarios, _predicted, _energy)
    found = [make(document) for make in makers]
    return [parts for parts in found if parts[2]]


def _memory_and_cost(document: JsonLimitTables) -> Parts:
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


def _compute(document: JsonLimitTables) -> Parts:
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


def _scenarios(document: JsonLimitTables) -> Parts:
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


def _predicted(document: JsonLimitTables) -> Parts:
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


def _energy(document: JsonLimitTables) -> Parts:
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


NOT_MEASURED = "not measured"
_LATENCY = ("p50 (ms)", "p90 (ms)", "p99 (ms)", "max (ms)")


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
