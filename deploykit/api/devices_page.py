"""The report of `train --compare-devices` as HTML and Markdown, made from its JSON alone."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from deploykit.measure.report import html
from deploykit.measure.report.chart import Chart, Mark, Series
from deploykit.measure.report.formatting import MISSING, count, spread
from deploykit.measure.report.markdown import table_lines
from deploykit.measure.report.tables import NOT_MEASURED, Table, machine

Json = Mapping[str, Any]
_METHOD = """A batch is made, then a step trains on it, 3 to 20 times after a warm-up. A GPU's \
work has ended when its clock stops. Brackets and whiskers are 95 % intervals over the steps of \
one process; that of a ratio holds for any two values within. Where a backbone is frozen, \
the head's steps are timed, on features in memory. Nothing was trained to the end."""


def devices_html(document: Json) -> str:
    document = html.printable(document)
    (first, *others), chart = document["verdict"], _chart(document)
    title = f"Training {document['recipe']} on each device"
    header = f'<header><p class="over">deploykit report · {escape(document["created"])}</p>'
    method = f"<p>{_METHOD}</p><pre tabindex='0'><code>{escape(document['command'])}</code></pre>"
    items = "".join(f"<li>{escape(each)}</li>" for each in others)
    sections = [
        header + f'<h1>{escape(title)}</h1><p class="verdict">{escape(first)}</p></header>',
        html.figure_html(chart) if chart.series else "",
        html.section_html("What it comes to", "conclusions", f"<ul>{items}</ul>") if items else "",
    ]
    for i, each in enumerate(_tables(document)):
        table = html.html_table(each, caption=False)
        sections.append(html.section_html(each.title, f"table-{i}", table))
    sections.append(html.section_html("How it was measured", "method", method))
    sections.append(html.section_html("Everything", "everything", html.raw_html(document)))
    return html.html_page(title, "\n".join(sections))


def devices_markdown(document: Json) -> str:
    lines = [f"# Training {document['recipe']} on each device", ""]
    lines += [line for sentence in document["verdict"] for line in (sentence, "")]
    lines += [line for table in _tables(document) for line in table_lines(table)]
    return "\n".join([*lines, _METHOD, "", f"    {document['command']}", ""])


def against(document: Json) -> Table:
    """A row for each precision and batch, CPU next to GPU."""
    rows, threads, gpus = {}, "", document["machine"].get("gpus") or ()
    for row in document["rows"]:
        threads = f", {row['threads']} threads" if row["threads"] else threads
        both = [_find(document, d, row["precision"], row["batch"]) for d in ("cpu", "cuda")]
        rows[row["precision"], count(row["batch"])] = (*map(_rate, both), _times(*both))
    places = f"CPU{threads} (samples/s)", f"GPU{', ' * bool(gpus)}{gpus[0]['name'] if gpus else ''}"
    columns = ("precision", "batch", *places, "times")
    return Table("CPU against GPU", columns, tuple((*key, *cells) for key, cells in rows.items()))


def _tables(document: Json) -> list[Table]:
    """Those that have rows, the articles' among them."""
    own = [_find(document, device, "float32", document["batch"]) for device in ("cpu", "cuda")]
    what = f"{document['recipe']} on this machine: {count(document['epochs'])} epochs of "
    what += f"{count(document['samples'])} samples at batch {document['batch']}, float32"
    keys, note = ("what", "cpu", "gpu", "times", "claim"), ""
    rows = [(what, *(_rate(each, "run_s") for each in own), _times(*own), MISSING)]
    for each in document["articles"]:
        rows.append(tuple(each[key] for key in keys))
        note += f"“{each['claim']}”: {each['measured']}. "
    columns = ("what", "CPU (s)", "GPU (s)", "times", "claim")
    articles = Table("Next to the articles", columns, tuple(rows), (0, 4), note.strip())
    rows = [
        (*_setup(row), spread(row["step_ms"]), spread(row["loader_ms"]), spread(row["run_s"]))
        for row in _measured(document)
    ]
    columns = ("setup", "batch", "step (ms)", "loader (ms)", f"{document['epochs']} epochs (s)")
    note = f"Batches are {'' if document['augment'] else 'not '}augmented."
    parts = Table("Loader and compute apart", columns, tuple(rows), note=note)
    found = (against(document), articles, parts, _augmentation(document))
    return [each for each in (*found, machine({**document, "conditions": []})) if each.rows]


def _augmentation(document: Json) -> Table:
    """A row for each batch size: what augmenting it takes on each processor."""
    sizes: dict[int, dict[str, Json]] = {}
    for row in document["augmentation"]:
        sizes.setdefault(row["batch"], {})[row["device"]] = row
    rows, threads = [], next((row["threads"] for row in document["augmentation"]), 0)
    for batch, places in sizes.items():
        cpu, gpu = (places.get(device, {}) for device in ("cpu", "cuda"))
        cells = (_rate(cpu, "loader_ms"), _rate(gpu, "loader_ms"))
        rows.append((count(batch), *cells, _faster(cpu, gpu)))
    columns = ("batch", f"CPU, workers: {threads} (ms)", "GPU (ms)", "faster")
    note = "From the images in memory until the augmented batch is where the steps run."
    return Table("Augmentation on each processor", columns, tuple(rows), (0, 3), note)


def _faster(cpu: Json, gpu: Json) -> str:
    """The processor that takes less time, where the intervals do not touch."""
    one, other = (row.get("loader_ms") for row in (cpu, gpu))
    if not one or not other:
        return MISSING
    if one["high"] < other["low"]:
        return "CPU"
    return "GPU" if other["high"] < one["low"] else "neither surely"


def _chart(document: Json) -> Chart:
    rows, series = _measured(document), dict[str, list[Mark]]()
    for row in rows:
        mark = Mark(float(row["batch"]), *row["samples_per_s"].values())
        series.setdefault(_setup(row)[0], []).append(mark)
    batches = sorted({int(row["batch"]) for row in rows})
    flags = [(each["batch"], f"CPU wins below {each['batch']}") for each in document["crossovers"]]
    flags = [each for each in flags[:1] if each[0] not in (None, *batches[:1])]
    return Chart(
        name="devices",
        title="Training speed against batch size",
        finding=next((each for each in document["verdict"] if "GPU" in each), ""),
        x_label="batch size (samples per step)",
        y_label="training speed (samples/s)",
        series=tuple(Series(name, tuple(m), i) for i, (name, m) in enumerate(series.items())),
        x_ticks=tuple((float(batch), str(batch)) for batch in batches),
        x_log=len(batches) > 1,
        flag=flags[0] if flags else None,
        columns=("setup", "batch", "samples/s"),
        rows=tuple((*_setup(row), spread(row["samples_per_s"])) for row in rows),
    )


def _measured(document: Json) -> list[Json]:
    return [row for row in document["rows"] if row["samples_per_s"]]


def _find(document: Json, *wanted: object) -> Json:
    """The row of a device, precision and batch; {} where there is none."""
    keys = ("device", "precision", "batch")
    rows = (row for row in document["rows"] if tuple(row[key] for key in keys) == wanted)
    return next(rows, {})


def _rate(row: Json, key: str = "samples_per_s") -> str:
    absent = row.get("absent")
    return f"{NOT_MEASURED}: {absent}" if absent else spread(row.get(key))


def _times(cpu: Json, gpu: Json) -> str:
    x, y = (row.get("samples_per_s") for row in (gpu, cpu))
    if not x or not y:
        return MISSING
    high = x["high"] / y["low"] if y["low"] > 0 else None
    return spread({"value": x["value"] / y["value"], "low": x["low"] / y["high"], "high": high})


def _setup(row: Json) -> tuple[str, str]:
    return f"{'CPU' if row['device'] == 'cpu' else 'GPU'} {row['precision']}", count(row["batch"])
