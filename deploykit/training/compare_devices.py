"""Repeat the articles' comparison on this machine: what training costs on each device."""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from deploykit.core.errors import OutOfMemory, Unsupported
from deploykit.core.evidence import Interval
from deploykit.core.files import StrPath, write_together
from deploykit.core.json_value import Record
from deploykit.core.machine import now, this_machine
from deploykit.core.profile import with_gpu
from deploykit.core.recipe import Recipe, Split, Splits, load_recipe
from deploykit.evaluation.artefacts import Progress, claim_report, named_files, no_progress
from deploykit.evaluation.formatting import MISSING, Table, count, spread
from deploykit.evaluation.statistics import throughput
from deploykit.reporting.charts import Chart, Mark, Series
from deploykit.reporting.page import Parts, markdown, printable, report_page
from deploykit.reporting.tables import NOT_MEASURED
from deploykit.training.data import Batches, free_cores, make_augmentation, time_batches
from deploykit.training.distributed import Processes
from deploykit.training.loop import Run, use_tf32
from deploykit.training.options import (
    TrainingOptions,
    build_from_recipe,
    check_recipe,
    check_splits,
    read_splits,
    settle,
)

PRECISIONS: Mapping[str, tuple[str, ...]] = {
    "cpu": ("float32", "bf16"),
    "cuda": ("float32", "tf32", "bf16", "fp16"),
}
_NAMES = {"cpu": "CPU", "cuda": "GPU"}
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
    options: TrainingOptions,
    *,
    data: StrPath | None = None,
    force: bool = False,
    command: str = "",
    on_progress: Progress | None = None,
) -> DeviceTable:
    """Time steps and batches of `recipe` on the CPU and a GPU, in each precision that they have.

    Writes report.json, report.md and report.html into the folder `out`. Of `options`, `batch_size`
    is the middle one of three; an eighth and four times as much, at most all samples, are the
    others. `augment` and `compile` are as in `train`; augmentation on each processor is timed
    anyway. Nothing is trained to the end, and no accuracy is measured. Raises BadInput.
    """
    read = (data, *named_files(recipe))
    place = claim_report(out, read, force=force, keys=("devices", "rows", "articles"))
    chosen = load_recipe(recipe)
    check_recipe(chosen)
    splits = read_splits(chosen, Path(data) if data else None)
    middle, samples = options.batch_size or chosen.batch_size, len(splits.train.labels)
    batches = sorted({min(max(1, each), samples) for each in (middle // 8, middle, 4 * middle)})
    progress = on_progress or no_progress
    rows = time_devices(chosen, splits, batches, options, progress)
    table = DeviceTable(
        folder=place,
        recipe=recipe,
        data=splits.source,
        samples=samples,
        epochs=chosen.epochs,
        batch=min(middle, samples),
        created=now(),
        command=command,
        machine=with_gpu(this_machine(), 0).to_dict(),
        rows=tuple(rows),
        crossovers=tuple(find_crossovers(rows)),
        augment=chosen.augmented if options.augment is None else options.augment,
        augmentation=tuple(time_augmentation(chosen, splits, batches, progress)),
        articles=ARTICLES,
    )
    table = replace(table, verdict=tuple(conclude(table)))
    document, parts = devices_document(table), devices_parts(table)
    files = {"html": report_page(document, parts), "md": markdown(document, parts)}
    files["json"] = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    write_together(place, {f"report.{end}": each for end, each in files.items()})
    return table


Times = tuple[float, ...]  # seconds of making a batch and, unless that is all, of the step on it
Source = Generator[Times, None, None]
Jobs = list[tuple[DeviceRow, Source]]


def time_devices(
    recipe: Recipe,
    splits: Splits,
    batches: Sequence[int],
    options: TrainingOptions,
    on_progress: Progress = no_progress,
) -> list[DeviceRow]:
    """Return a row for each device, precision and batch size. Raises BadInput."""
    recipe, jobs = recipe.sized_for(splits.build_with), Jobs()
    splits = check_splits(recipe, splits)
    kinds = [(device, kind) for device, precisions in PRECISIONS.items() for kind in precisions]
    for (device, kind), compiled, batch in itertools.product(
        kinds, (False, True)[: 1 + options.compile], batches
    ):
        own = replace(
            options,
            device=device,
            epochs=1,
            batch_size=batch,
            amp=kind if kind in ("bf16", "fp16") else "off",
            tf32=kind != "float32",
            compile=compiled,
        )
        row = DeviceRow(device, f"{kind} compiled" if compiled else kind, batch)
        row = replace(row, threads=torch.get_num_threads(), absent=_lacks(device, kind))
        jobs.append((row, _train(recipe, splits, own)))
    return _time_rows(jobs, len(splits.train.labels), recipe.epochs, on_progress)


def time_augmentation(
    recipe: Recipe, splits: Splits, batches: Sequence[int], on_progress: Progress = no_progress
) -> list[DeviceRow]:
    """Return a row per batch size and processor that may augment; none without augmentation.

    The time runs from the images in memory until the augmented batch is where the steps run.
    """
    if recipe.augment is None or recipe.backbone is not None:
        return []
    jobs, trains_on = Jobs(), "cuda" if torch.cuda.is_available() else "cpu"
    threads = {"cpu": max(1, free_cores(torch.device(trains_on))), "cuda": 0}
    for batch, device in itertools.product(batches, PRECISIONS):
        options = TrainingOptions(device=trains_on, batch_size=batch, augment=True)
        absent = _lacks(device, AUGMENTED)
        row = DeviceRow(device, AUGMENTED, batch, threads[device], absent=absent)
        jobs.append((row, _augment(recipe, splits.train, options, device)))
    return _time_rows(jobs, len(splits.train.labels), recipe.epochs, on_progress)


def _time_rows(jobs: Jobs, samples: int, epochs: int, on_progress: Progress) -> list[DeviceRow]:
    rows = [replace(row, threads=None) if row.absent else row for row, _ in jobs]

    def time_row(at: int) -> Iterator[None]:
        """Replace row `at` by the measured one; yield between its steps."""
        row, (_, source) = rows[at], jobs[at]
        times, spent_s, enough = list[Times](), 0.0, False
        text = f"{row.device} {row.precision}, batch {row.batch}"
        on_progress(text, at / len(rows))
        try:
            next(source)  # warms up
            while not enough:
                yield
                on_progress(text, at / len(rows))
                started = time.perf_counter()
                times.append(next(source))
                spent_s += time.perf_counter() - started
                least_s = _LEAST_S if len(times) >= _STEPS else _LIMIT_S
                enough = len(times) >= _FEWEST and spent_s >= least_s
            rows[at] = _measured(row, times, samples, epochs)
        except (OutOfMemory, Unsupported) as exc:
            rows[at] = replace(row, threads=None, absent=exc.message)
        source.close()  # frees the model

    # the CPU's rows take turns, as the machine may be busy; a GPU's are alone, for its memory
    there = [at for at, row in enumerate(rows) if row.absent is None]
    on_cpu = [at for at in there if rows[at].device == "cpu"]
    for group in (on_cpu, *([at] for at in there if at not in on_cpu)):
        turns = [time_row(at) for at in group]
        while turns:
            turns = [turn for turn in turns if next(turn, "ended") is None]
    return rows


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


def _train(recipe: Recipe, splits: Splits, options: TrainingOptions) -> Source:
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
            started_s, (inputs, labels, _), made_s = now_s(), next(loader), now_s()
            run.step(inputs, labels)
            ended_s = now_s()
        yield made_s - started_s, ended_s - made_s


def _augment(recipe: Recipe, train: Split, options: TrainingOptions, device: str) -> Source:
    settings, where = settle(recipe, options), torch.device(device)
    augmentation = make_augmentation(recipe, train, where)
    batches = Batches(train, settings.device, settings.batch_size, 0, None, augmentation)
    while True:
        yield (time_batches(batches) / 1e3,)


def _first(split: Split, count: int) -> Split:
    return Split({key: each[:count] for key, each in split.inputs.items()}, split.labels[:count])


def _measured(row: DeviceRow, times: Sequence[Times], samples: int, epochs: int) -> DeviceRow:
    count, batch = len(times), min(row.batch, samples)
    rate = throughput([batch] * count, [sum(each) for each in times])
    parts = [_time_of(1e3, throughput([1] * count, each)) for each in zip(*times, strict=True)]
    return replace(
        row,
        batch=batch,
        samples_per_s=rate,
        loader_ms=parts[0],
        step_ms=parts[1] if len(parts) > 1 else None,
        run_s=_time_of(samples * epochs, rate),
        steps=count,
        load_1_min=round(os.getloadavg()[0], 2),
    )


def _time_of(count: float, rate: Interval) -> Interval:
    ends = (rate.value, rate.high, rate.low)
    return Interval(*(count / each if each > 0 else float("inf") for each in ends))


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
    for precision, gpu in [(kind, each) for (where, kind), each in rates.items() if where != "cpu"]:
        best: dict[int, float] = {}  # by batch, what the CPU may reach
        for (where, kind), cpu in rates.items():
            if where == "cpu" and (kind == "float32" or precision != "float32"):
                best |= {n: max(rate.high, best.get(n, 0.0)) for n, rate in cpu.items()}
        common = sorted(gpu.keys() & best.keys())
        lost = [batch for batch in common if gpu[batch].low <= best[batch]]
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
    work = f"{table.epochs} epochs of {table.samples:,} samples take"
    absent = next((row.absent for row in reversed(table.rows) if row.absent), "")
    if not measured:
        return [f"Nothing could be measured: {absent}."]
    gpu = f" GPU: not measured, {absent}." if absent else ""
    if not rows:
        return [f"The machine was too busy: the interval of every rate holds 0. Repeat it.{gpu}"]
    if len(like) == 2:
        cpu, best = like["cpu"], like["cuda"]
        first = f"In float32 at batch {table.batch} the GPU trains {table.recipe} "
        first += f"{_times(best, cpu)} times as fast as the CPU ({cpu.threads} threads): "
        first += f"{work} {best.run_s.value:.3g} s against {cpu.run_s.value:.3g} s."
    else:
        best = max(rows, key=lambda row: row.samples_per_s.low)
        rate = best.samples_per_s
        first = f"The {_NAMES[best.device]} ({best.threads} threads) trains {table.recipe} at most "
        first += f"at {rate.value:,.4g} samples/s ({rate.low:,.4g} to {rate.high:,.4g}), in "
        first += f"{best.precision} at batch {best.batch}: {work} {best.run_s.value:.3g} s.{gpu}"
    found = [first]
    for each in (*table.crossovers, *find_crossovers(table.augmentation)):
        kind, batch = each["precision"], each["batch"]
        against = "the CPU's float32" if kind == "float32" else "the CPU's fastest"
        start = f"GPU {kind} is ahead of {against}"
        if kind == AUGMENTED:
            start = "The GPU augments batches in less time than the CPU"
        where = f"from batch {batch} on" if batch else "at no batch size"
        found.append(f"{start} {where} (measured: {', '.join(map(str, each['measured']))}).")
    return found


# The report of `train --compare-devices`.

_METHOD = """A batch is made, then a step trains on it, for 1 s at least after a warm-up; the \
CPU's rows take turns. A GPU's work has ended when its clock stops. Brackets and whiskers are 95 % \
intervals over the steps of one process; that of a ratio holds for any two values within. Where a \
backbone is frozen, the head's steps are timed, on features in memory; augmentation is timed from \
the images in memory until the batch is where the steps run. Nothing was trained to the end."""


def devices_document(table: DeviceTable) -> dict[str, Any]:
    """Return the content of report.json, with what every report's page shows."""
    shell = {"title": f"Training {table.recipe} on each device", "notes": [_METHOD], "gates": []}
    return {**shell, "conditions": [], "throttled": [], "quick": False, **table.to_dict()}


def devices_parts(table: DeviceTable) -> Parts:
    table = replace(table, recipe=printable(table.recipe))
    chart = _chart(table)
    tables = [device_rows(table), _articles(table)]
    return Parts([chart] if chart.series else [], [], tables, [])


def device_rows(table: DeviceTable) -> Table:
    """Return each row, with its rate over the CPU's in the same precision and batch."""
    own = {(row.device, row.precision, row.batch): row for row in table.rows + table.augmentation}
    rows = [
        (
            f"{_NAMES[row.device]} {row.precision}",
            count(row.batch),
            f"{NOT_MEASURED}: {row.absent}" if row.absent else _spread(row.samples_per_s),
            _times(row, own.get(("cpu", row.precision, row.batch))),
            *map(_spread, (row.step_ms, row.loader_ms, row.run_s)),
        )
        for row in own.values()
    ]
    columns = ("setup", "batch", "samples/s", "times the CPU", "step (ms)", "loader (ms)")
    gpus = [f"GPU: {each['name']}. " for each in table.machine.get("gpus") or ()]
    threads = next((f"CPU: {row.threads} threads. " for row in table.rows if row.threads), "")
    note = f"{threads}{''.join(gpus)}Batches are {'' if table.augment else 'not '}augmented."
    return Table("Each device", (*columns, f"{table.epochs} epochs (s)"), rows, (0, 2), note)


def _articles(table: DeviceTable) -> Table:
    rows_of = {(row.device, row.precision, row.batch): row for row in table.rows}
    cpu, gpu = (rows_of.get((device, "float32", table.batch)) for device in PRECISIONS)
    what = f"{table.recipe} on this machine: {count(table.epochs)} epochs of "
    what += f"{count(table.samples)} samples at batch {table.batch}, float32"
    runs = (_spread(each.run_s if each else None) for each in (cpu, gpu))
    keys = ("what", "cpu", "gpu", "times", "claim")
    rows = [(what, *runs, _times(gpu, cpu), MISSING)]
    rows += [tuple(each[key] for key in keys) for each in table.articles]
    note = " ".join(f"“{each['claim']}”: {each['measured']}." for each in table.articles)
    columns = ("what", "CPU (s)", "GPU (s)", "times", "claim")
    return Table("Next to the articles", columns, rows, (0, 4), note)


def _chart(table: DeviceTable) -> Chart:
    rows = [(row, rate) for row in table.rows if (rate := row.samples_per_s)]
    batches = sorted({row.batch for row, _ in rows})
    crossings = {each["batch"] for each in table.crossovers[:1]} - {*batches[:1]}
    series = dict[str, list[Mark]]()
    for row, rate in rows:
        crossed = row.device == "cuda" and row.batch in crossings
        text = f"CPU wins below {row.batch}" * crossed
        mark = Mark(float(row.batch), rate.value, rate.low, rate.high, text)
        series.setdefault(f"{_NAMES[row.device]} {row.precision}", []).append(mark)
    return Chart(
        title="Training speed against batch size",
        caption=next((each for each in table.verdict if "GPU" in each), ""),
        x_label="batch size (samples per step)",
        y_label="training speed (samples/s)",
        series=tuple(Series(name, tuple(m), i) for i, (name, m) in enumerate(series.items())),
        x_ticks=tuple((float(batch), str(batch)) for batch in batches),
        x_log=len(batches) > 1,
    )


def _spread(interval: Interval | None) -> str:
    return spread(interval.to_dict() if interval else None)


def _times(row: DeviceRow | None, cpu: DeviceRow | None) -> str:
    """Return a row's rate over that of the CPU; the ends of the interval are the most and least."""
    x, y = (each.samples_per_s if each else None for each in (row, cpu))
    if x is None or y is None or row is cpu:
        return MISSING
    high = x.high / y.low if y.low > 0 else math.inf
    return _spread(Interval(x.value / y.value, x.low / y.high, high))
