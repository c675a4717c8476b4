"""Repeat the articles' comparison on this machine: what training costs on each device."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import torch

from deploykit.core.cuda_order import with_gpu
from deploykit.core.errors import OutOfMemory, Unsupported
from deploykit.core.evidence import Interval
from deploykit.core.files import StrPath, write_together
from deploykit.core.json_value import Record
from deploykit.core.machine import this_machine
from deploykit.core.recipe import Recipe, Split, Splits, load_recipe
from deploykit.evaluation.artefacts import Progress, no_progress
from deploykit.evaluation.formatting import MISSING, Table, count, spread
from deploykit.evaluation.html_tables import html_table
from deploykit.evaluation.outputs import claim_report, named_files
from deploykit.evaluation.statistics import throughput
from deploykit.reporting import html
from deploykit.reporting.charts import Chart, Mark, Series
from deploykit.reporting.markdown import table_lines
from deploykit.reporting.tables import NOT_MEASURED, machine
from deploykit.training.checks import check_recipe, check_splits
from deploykit.training.data import free_cores, make_batches, time_batches
from deploykit.training.distributed import Processes
from deploykit.training.loop import Run, use_tf32
from deploykit.training.options import TrainingOptions, build_from_recipe, read_splits, settle

PRECISIONS: Mapping[str, tuple[str, ...]] = {
    "cpu": ("float32", "bf16"),
    "cuda": ("float32", "tf32", "bf16", "fp16"),
}
AUGMENTED = "augmented batches"  # in place of a precision
NO_GPU = "no NVIDIA GPU on this machine"
_FEWEST, _STEPS = 3, 20  # steps of a row at least, and as many as _LIMIT_S allows
_LEAST_S, _LIMIT_S = 1.0, 10.0  # of a row's timed steps: a few milliseconds tell nothing
_PEAK = {"what": "peak arithmetic", "cpu": "–", "gpu": "–", "times": "–"}
ARTICLES: tuple[Mapping[str, str], ...] = (  # what they claim, and what they measured for it
    {
        "what": "the article: 20 epochs of 2,000 images, batch 150",
        "cpu": "340",
        "gpu": "13.04",
        "times": "26 by its totals",
        "claim": "28 times faster",
        "measured": "TensorFlow on a Ryzen 5 5600X and an RTX 3070, 26 times by its totals, more "
        "than 33 by its times per batch; build, threads and precision are not given",
    },
    _PEAK
    | {"claim": "12 times the throughput (V100)", "measured": "nothing: FP16 in Tensor Cores"},
    _PEAK
    | {"claim": "20 times without code change (A100)", "measured": "nothing: TF32 against FP32"},
)


@dataclass(frozen=True)
class DeviceRow(Record):
    """The cost of training on a device; `absent`: why it was not measured.

    `samples_per_s`: of loader and step, in turns. `run_s`: all epochs at this rate. A row on
    augmentation has no steps; its `threads` are those that make batches.
    """

    device: str
    precision: str
    batch: int
    threads: int | None = None
    samples_per_s: Interval | None = None
    step_ms: Interval | None = None
    loader_ms: Interval | None = None
    run_s: Interval | None = None
    steps: int = 0
    load_1_min: float | None = None
    absent: str | None = None


@dataclass(frozen=True)
class DeviceTable(Record):
    """The report. `crossovers`: from `find_crossovers`. `devices`: the version of the document."""

    folder: Path
    recipe: str
    data: str
    samples: int
    epochs: int
    batch: int
    created: str
    command: str
    machine: Mapping[str, Any]
    rows: tuple[DeviceRow, ...]
    crossovers: tuple[Mapping[str, Any], ...]
    verdict: tuple[str, ...] = ()
    augment: bool = False
    augmentation: tuple[DeviceRow, ...] = ()
    articles: tuple[Mapping[str, str], ...] = ()
    devices: int = 1


def compare_devices(
    recipe: str,
    out: StrPath,
    *,
    data: StrPath | None = None,
    batch_size: int | None = None,
    augment: bool | None = None,
    compile: bool = False,  # noqa: A002 - torch's own name for it
    force: bool = False,
    command: str = "",
    on_progress: Progress | None = None,
) -> DeviceTable:
    """Time steps and batches of `recipe` on the CPU and a GPU, in each precision that they have.

    Writes report.json, report.md and report.html into the folder `out`. `batch_size`: the middle
    one of three; an eighth and four times as much, at most all samples, are the others. `augment`:
    change the images, as `train` does; augmentation on each processor is timed anyway. `compile`:
    use torch.compile. Nothing is trained to the end, and no accuracy is measured. Raises BadInput.
    """
    read = (data, *named_files(recipe))
    place = claim_report(out, read, force=force, keys=("devices", "rows", "articles"))
    chosen = load_recipe(recipe)
    check_recipe(chosen)
    splits = read_splits(chosen, Path(data) if data else None)
    middle, samples = batch_size or chosen.batch_size, len(splits.train.labels)
    batches = sorted({min(max(1, each), samples) for each in (middle // 8, middle, 4 * middle)})
    progress = on_progress or no_progress
    rows = time_devices(chosen, splits, batches, progress, augment=augment, compile=compile)
    table = DeviceTable(
        folder=place,
        recipe=recipe,
        data=splits.source,
        samples=samples,
        epochs=chosen.epochs,
        batch=min(middle, samples),
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(" ", "seconds"),
        command=command,
        machine=with_gpu(this_machine(), 0).to_dict(),
        rows=tuple(rows),
        crossovers=tuple(find_crossovers(rows)),
        augment=chosen.augmented if augment is None else augment,
        augmentation=tuple(time_augmentation(chosen, splits, batches, progress)),
        articles=ARTICLES,
    )
    table = replace(table, verdict=tuple(conclude(table)))
    document = table.to_dict()
    files = {"html": devices_html(document), "md": devices_markdown(document)}
    files["json"] = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    write_together(place, {f"report.{end}": each for end, each in files.items()})
    return table


Times = tuple[float, ...]  # seconds of making a batch and, unless that is all, of the step on it


def time_devices(
    recipe: Recipe,
    splits: Splits,
    batches: Sequence[int],
    on_progress: Progress = no_progress,
    *,
    augment: bool | None = None,
    compile: bool = False,  # noqa: A002 - torch's own name for it
) -> list[DeviceRow]:
    """Return a row for each device, precision and batch size. Raises BadInput."""
    recipe = recipe.sized_for(splits.build_with)
    splits = check_splits(recipe, splits)
    timings, threads = list[_Timing](), torch.get_num_threads()
    for device, precisions in PRECISIONS.items():
        for precision, compiled in itertools.product(precisions, (False, True)[: 1 + compile]):
            name = f"{precision} compiled" if compiled else precision
            absent = _lacks(device, precision)
            for batch in batches:
                row = DeviceRow(device, name, batch, None if absent else threads, absent=absent)
                options = TrainingOptions(
                    device=device,
                    epochs=1,
                    batch_size=batch,
                    amp=precision if precision in ("bf16", "fp16") else "off",
                    tf32=precision != "float32",
                    augment=augment,
                    compile=compiled,
                )
                timings.append(_Timing(row, _train(recipe, splits, options)))
    return _time_rows(timings, len(splits.train.labels), recipe.epochs, on_progress)


def time_augmentation(
    recipe: Recipe, splits: Splits, batches: Sequence[int], on_progress: Progress = no_progress
) -> list[DeviceRow]:
    """Return a row per batch size and processor that may augment; none without augmentation.

    The time runs from the images in memory until the augmented batch is where the steps run.
    """
    if recipe.augment is None or recipe.backbone is not None:
        return []
    timings, trains_on = [], "cuda" if torch.cuda.is_available() else "cpu"
    threads = {"cpu": max(1, free_cores(torch.device(trains_on))), "cuda": 0}
    for batch, device in itertools.product(batches, PRECISIONS):
        absent = _lacks(device, AUGMENTED)
        row = DeviceRow(
            device, AUGMENTED, batch, None if absent else threads[device], absent=absent
        )
        options = TrainingOptions(device=trains_on, batch_size=batch, augment=True)
        timings.append(_Timing(row, _augment(recipe, splits.train, options, device)))
    return _time_rows(timings, len(splits.train.labels), recipe.epochs, on_progress)


def _lacks(device: str, precision: str) -> str | None:
    if device == "cpu":
        return None
    if not torch.cuda.is_available():
        return NO_GPU
    if precision == "tf32" and torch.cuda.get_device_capability() < (8, 0):
        return "this GPU has no TF32"
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "this GPU has no bfloat16"
    return None


def _train(recipe: Recipe, splits: Splits, options: TrainingOptions) -> Iterator[Times]:
    """Train on the first samples again and again. Raises OutOfMemory, Unsupported."""
    settings = settle(recipe, options)
    few = replace(
        splits,
        train=_first(splits.train, settings.batch_size),
        calibration=_first(splits.calibration, 0),
    )
    torch.manual_seed(0)
    run = Run(recipe, few, settings, build_from_recipe(recipe), "", Processes())
    run.module.train()
    loader = itertools.chain.from_iterable(itertools.repeat(run.batches))

    def now_s() -> float:
        if settings.device.type == "cuda":
            torch.cuda.synchronize(settings.device)
        return time.perf_counter()

    while True:
        with use_tf32(settings.tf32):
            times = [now_s()]
            inputs, labels, _ = next(loader)
            times.append(now_s())
            run.stepper(inputs, labels)
            times.append(now_s())
        if run.stepper.parts > 1:
            raise Unsupported(f"too little memory: fits in {run.stepper.parts} parts only")
        yield times[1] - times[0], times[2] - times[1]


def _first(split: Split, count: int) -> Split:
    return Split({key: each[:count] for key, each in split.inputs.items()}, split.labels[:count])


def _augment(
    recipe: Recipe, train: Split, options: TrainingOptions, device: str
) -> Iterator[Times]:
    settings, where = settle(recipe, options), torch.device(device)
    batches = make_batches(recipe, train, settings, Processes(), where)
    while True:
        yield (time_batches(batches) / 1e3,)


class _Timing:
    """A row that is being timed: `source` does one more batch and yields its seconds."""

    def __init__(self, row: DeviceRow, source: Iterator[Times]) -> None:
        self.row, self.source = row, source
        self.times: list[Times] | None = None  # None before the warm-up
        self.seconds = 0.0

    def go_on(self, samples: int, epochs: int) -> bool:
        """Time one more batch; return whether the row is complete."""
        started = time.perf_counter()
        try:
            times = next(self.source)
        except (OutOfMemory, Unsupported) as exc:
            self.row = replace(self.row, threads=None, absent=exc.message)
            return True
        if self.times is None:
            self.times = []
            return False
        self.times.append(times)
        self.seconds += time.perf_counter() - started
        steps, seconds = len(self.times), self.seconds
        if steps < _FEWEST or seconds < _LEAST_S or (steps < _STEPS and seconds < _LIMIT_S):
            return False
        batch = min(self.row.batch, samples)
        rate = throughput([batch] * steps, [sum(each) for each in self.times])
        parts = [throughput([1] * steps, each) for each in zip(*self.times, strict=True)]
        self.row = replace(
            self.row,
            batch=batch,
            samples_per_s=rate,
            loader_ms=_time_of(1e3, parts[0]),
            step_ms=_time_of(1e3, parts[1]) if len(parts) > 1 else None,
            run_s=_time_of(samples * epochs, rate),
            steps=steps,
            load_1_min=round(os.getloadavg()[0], 2),
        )
        self.source = iter(())  # frees the model
        return True


def _time_of(count: float, rate: Interval) -> Interval:
    """Return how long `count` takes at a rate."""
    ends = (rate.value, rate.high, rate.low)
    return Interval(*(count / each if each > 0 else float("inf") for each in ends))


def _time_rows(
    timings: Sequence[_Timing], samples: int, epochs: int, on_progress: Progress
) -> list[DeviceRow]:
    """Time the CPU's rows in turns, as the machine may be busy; a GPU's alone, for its memory."""
    wanted = [each for each in timings if each.row.absent is None]
    on_cpu = [each for each in wanted if each.row.device == "cpu"]
    done = 0
    for group in (on_cpu, *([each] for each in wanted if each.row.device != "cpu")):
        left = list(group)
        while left:
            for each in tuple(left):
                row = each.row
                on_progress(f"{row.device} {row.precision}, batch {row.batch}", done / len(wanted))
                if each.go_on(samples, epochs):
                    left.remove(each)
                    done += 1
    return [each.row for each in timings]


def find_crossovers(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Find, for each precision of the GPU, the smallest batch from which on it beats the CPU.

    float32 is compared with the CPU's float32, anything else with the CPU's fastest. It is faster
    if the intervals do not touch. Only `measured` batches count; `batch` is None where the CPU is
    not slower at the largest. `rows` have device, precision, batch and `samples_per_s`.
    """
    rates: dict[tuple[str, str], dict[int, Interval]] = {}
    for row in rows:
        if row.samples_per_s is not None:
            rates.setdefault((row.device, row.precision), {})[row.batch] = row.samples_per_s
    found = []
    for (device, precision), gpu in rates.items():
        if device == "cpu":
            continue
        cpus = [
            each
            for (where, kind), each in rates.items()
            if where == "cpu" and (kind == "float32" or precision != "float32")
        ]
        common = sorted(batch for batch in gpu if any(batch in cpu for cpu in cpus))
        lost = [
            batch
            for batch in common
            if gpu[batch].low <= max(cpu[batch].high for cpu in cpus if batch in cpu)
        ]
        won = [batch for batch in common if not lost or batch > lost[-1]]
        found.append({"precision": precision, "batch": won[0] if won else None, "measured": common})
    return found


def conclude(table: Any) -> list[str]:
    """Return what a table comes to: a headline, then the other sentences.

    The fastest row is that of the highest lower end of an interval: chance makes a row that was
    timed badly look fast. A row whose interval holds 0 says nothing.
    """
    measured = [row for row in table.rows if row.samples_per_s is not None]
    rows = [row for row in measured if row.samples_per_s.low > 0]
    like = {r.device: r for r in rows if (r.precision, r.batch) == ("float32", table.batch)}
    on_cpu = [row for row in rows if row.device == "cpu"]
    work = f"{table.epochs} epochs of {table.samples:,} samples take"
    absent = next((row.absent for row in reversed(table.rows) if row.absent), "")
    if len(like) == 2:
        cpu, gpu = like["cpu"], like["cuda"]
        rates = gpu.samples_per_s, cpu.samples_per_s
        seconds = f"{work} {gpu.run_s.value:.3g} s against {cpu.run_s.value:.3g} s."
        first = f"In float32 at batch {table.batch} the GPU trains {table.recipe} "
        if rates[0].low > rates[1].high or rates[0].high < rates[1].low:
            first += f"{rates[0].value / rates[1].value:.3g} times as fast as"
        else:
            first += "neither surely faster nor slower than"
        found = [f"{first} the CPU ({cpu.threads} threads): {seconds}"]
    elif on_cpu:
        cpu = max(on_cpu, key=lambda row: row.samples_per_s.low)
        rate, run = cpu.samples_per_s, cpu.run_s
        first = f"The CPU ({cpu.threads} threads) trains {table.recipe} at most at "
        first += f"{rate.value:,.4g} samples/s ({rate.low:,.4g} to {rate.high:,.4g}), in "
        first += f"{cpu.precision} at batch {cpu.batch}: {work} {run.value:.3g} s. "
        found = [f"{first}GPU: not measured, {absent}."]
    elif measured:
        gpu = f" GPU: not measured, {absent}." * bool(absent)
        return [f"The machine was too busy: the interval of every rate holds 0. Repeat it.{gpu}"]
    else:
        return [f"Nothing could be measured: {absent}."]
    for each in table.crossovers:
        cpu_kind = "the CPU's float32" if each["precision"] == "float32" else "the CPU's fastest"
        at = f"from batch {each['batch']} on" if each["batch"] else "not at the largest batch"
        batches = ", ".join(map(str, each["measured"]))
        found.append(f"GPU {each['precision']} is ahead of {cpu_kind} {at} (measured: {batches}).")
    return found + conclude_augmentation(table)


def conclude_augmentation(table: Any) -> list[str]:
    """Say where augmentation takes less time; say nothing where nothing was augmented."""
    if crossovers := find_crossovers(table.augmentation):
        (each,) = crossovers
        where = f"from batch {each['batch']} on" if each["batch"] else "at no batch size"
        where += f" (measured: {', '.join(map(str, each['measured']))})"
        return [f"The GPU augments batches in less time than the CPU {where}."]
    absent = next((row.absent for row in table.augmentation if row.absent), "")
    for row in table.augmentation:
        if row.batch == table.batch and row.loader_ms is not None:
            first = f"The CPU augments a batch of {row.batch} in {row.loader_ms.value:.3g} ms"
            return [f"{first}. GPU: not measured, {absent}."]
    return []


# The report of `train --compare-devices` as HTML and Markdown, made from its JSON alone.

Json = Mapping[str, Any]
_METHOD = """A batch is made, then a step trains on it, for 1 s at least after a warm-up; the \
CPU's rows take turns. A GPU's work has ended when its clock stops. Brackets and whiskers are 95 % \
intervals over the steps of one process; that of a ratio holds for any two values within. Where a \
backbone is frozen, the head's steps are timed, on features in memory. Nothing was trained to the \
end."""


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
        html.section_html("Summary", "conclusions", f"<ul>{items}</ul>") if items else "",
    ]
    for i, each in enumerate(_tables(document)):
        table = html_table(each, caption=False)
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
    """Return a row for each precision and batch, CPU next to GPU."""
    rows, threads, gpus = {}, "", document["machine"].get("gpus") or ()
    for row in document["rows"]:
        threads = f", {row['threads']} threads" if row["threads"] else threads
        setup = row["precision"], row["batch"]
        both = [_find(document["rows"], device, *setup) for device in PRECISIONS]
        rows[row["precision"], count(row["batch"])] = (*map(_rate, both), _times(*both))
    places = f"CPU{threads} (samples/s)", f"GPU{', ' * bool(gpus)}{gpus[0]['name'] if gpus else ''}"
    columns = ("precision", "batch", *places, "times")
    return Table("CPU against GPU", columns, tuple((*key, *cells) for key, cells in rows.items()))


def _tables(document: Json) -> list[Table]:
    """Return the tables that have rows."""
    found, batch = document["rows"], document["batch"]
    own = [_find(found, device, "float32", batch) for device in PRECISIONS]
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
    tables = (against(document), articles, parts, _augmentation(document))
    return [each for each in (*tables, machine({**document, "conditions": []})) if each.rows]


def _augmentation(document: Json) -> Table:
    """Return a row for each batch size: what augmenting it takes on each processor."""
    found = document["augmentation"]
    rows, threads = [], next((row["threads"] for row in found), 0)
    for batch in dict.fromkeys(row["batch"] for row in found):
        both = [_find(found, device, AUGMENTED, batch) for device in PRECISIONS]
        rows.append((count(batch), *(_rate(each, "loader_ms") for each in both), _faster(*both)))
    columns = ("batch", f"CPU, workers: {threads} (ms)", "GPU (ms)", "faster")
    note = "From the images in memory until the augmented batch is where the steps run."
    return Table("Augmentation on each processor", columns, tuple(rows), (0, 3), note)


def _faster(cpu: Json, gpu: Json) -> str:
    """Return the processor that takes less time, where the intervals do not touch."""
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


def _find(rows: Sequence[Json], *wanted: object) -> Json:
    """Return the row of a device, precision and batch; {} where there is none."""
    return next((r for r in rows if (r["device"], r["precision"], r["batch"]) == wanted), {})


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
