"""Models on an NVIDIA GPU by torch and ONNX Runtime, beside the same on its CPU. No TensorRT.

In: nothing; models are made here (`tests/zoo`), nothing is downloaded. Out: JSON and Markdown,
written anew after every batch: rows per second and median latency with their 95 % intervals, from
the computer's memory and back ("host") and with inputs and outputs on the GPU ("resident"); the
share of what this GPU was measured to copy and to multiply; the batch from which it beats the CPU.

    python benchmarks/gpu_zoo.py [--models resnet50,lstm] [--batches 1,8,64] [--out DIR]
    python benchmarks/gpu_zoo.py --dry      tiny, on a CPU, to see that it runs: no figure counts

The CPU and all columns of a model take turns in one process. ONNX Runtime needs its CUDA provider.
A column whose answers differ from the CPU's is not timed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # tests/zoo

import numpy as np  # noqa: E402
import torch  # noqa: E402
from child import header  # noqa: E402
from gpu_columns import Arrays, Column, all_columns  # noqa: E402

import deploykit as dk  # noqa: E402
from deploykit.core.errors import DeploykitError, GateFailed, first_line  # noqa: E402
from deploykit.core.machine import this_machine  # noqa: E402
from deploykit.measure.evaluate.parity import compare_engines  # noqa: E402
from deploykit.measure.statistics import Interval, ratio, throughput  # noqa: E402
from deploykit.measure.timing.crossover import crossover  # noqa: E402
from deploykit.measure.timing.sweep import Point, Setup, Timing, sweep  # noqa: E402
from deploykit.onnx_graph.cost import node_costs  # noqa: E402
from deploykit.onnx_graph.graph import Graph  # noqa: E402
from tests.support.zoo import models  # noqa: E402
from tests.support.zoo.members import STEPS, ZOO, Member, prepare  # noqa: E402

MODELS = ("resnet50", "resnet18", "vit-b-16", "bert-tiny", "lstm", "mnist-cnn")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SAMPLES = 32
LEAST_DB = 20.0  # against the CPU's answer; random weights in fp16 keep 30 to 60
GIB = 1 << 30


def resnet50() -> Any:
    models.register_torchvision()
    from torchvision.models import get_model

    return get_model("resnet50", weights=None)


def member(name: str) -> Member:
    """A member of the zoo; ResNet-50 is ResNet-18's with another architecture."""
    if name != "resnet50":
        return ZOO[name]
    return replace(ZOO["resnet18"], name=name, arch=f"{Path(__file__).resolve()}:resnet50")


@dataclass
class Run:
    """What was measured so far, and where it is written."""

    out: Path
    top: str
    ceilings: dict[str, Interval]
    models: list[Model] = field(default_factory=list)

    def save(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        document = {
            "ceilings": {name: found.to_dict() for name, found in self.ceilings.items()},
            "models": [model.to_dict() for model in self.models],
        }
        text = json.dumps(document, indent=1)
        (self.out / "gpu_zoo.json").write_text(f"{text}\n", encoding="utf-8")
        lines = [self.top, "## Ceilings, measured in this run", ""]
        lines += [
            f"- {name}: {shown(found, 1e12)} {'TB/s' if 'copy' in name else 'TFLOP/s'}"
            for name, found in self.ceilings.items()
        ]
        lines += [line for model in self.models for line in model.markdown(self.ceilings)]
        (self.out / "gpu_zoo.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


@dataclass
class Model:
    """One model's points. `flops` and `traffic_bytes`: of one call, by batch, fp32."""

    name: str
    parameters: int = 0
    points: list[tuple[str, Point]] = field(default_factory=list)  # with the column's group
    notes: list[str] = field(default_factory=list)
    costs: dict[int, tuple[int, int]] = field(default_factory=dict)

    def of(self, group: str, label: str) -> list[Point]:
        return [point for g, point in self.points if (g, point.label) == (group, label)]

    def keys(self) -> list[tuple[str, str]]:
        return list(dict.fromkeys((group, point.label) for group, point in self.points))

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "parameters": self.parameters,
            "notes": self.notes,
            "costs": {
                batch: {"flops": flops, "traffic_bytes": traffic}
                for batch, (flops, traffic) in self.costs.items()
            },
            "points": [{"group": group, **point.to_dict()} for group, point in self.points],
            "wins_from_batch": {
                f"{label}, {group}": batch for (group, label), batch in self.wins().items()
            },
        }

    def wins(self) -> dict[tuple[str, str], int | None]:
        """The batch from which each GPU column that copies has more rows/s than the CPU."""
        baseline = [point for group, point in self.points if group == "cpu"]
        found = {}
        for group, label in self.keys():
            if group == "host" and baseline:
                found[group, label] = crossover(self.of(group, label), baseline)
        return found

    def markdown(self, ceilings: dict[str, Interval]) -> Iterator[str]:
        yield f"\n## {self.name}, {self.parameters / 1e6:.1f} M parameters\n"
        yield from (f"- {note}" for note in self.notes)
        keys = self.keys()
        batches = sorted({point.batch for _, point in self.points})
        for title, cell in (
            ("Rows per second", lambda p: shown(p.throughput_per_s)),
            ("Median latency, ms", lambda p: shown(p.latency.p50_ms)),
        ):
            yield f"\n{title}; half the width of the 95 % interval in %\n"
            yield from self.table(batches, keys, cell)
        yield "\nTimes the CPU's rows per second, rounds in pairs\n"
        yield from self.table(batches, keys[1:], self.against_cpu)
        resident = [key for key in keys if key[0] == "resident"]
        yield (
            "\nShare of the measured ceilings, multiplying / copying, inputs on the GPU. Copying "
            "counts every tensor of every node: above 100 % where caches and fusion save it\n"
        )
        yield from self.table(batches, resident, lambda point: self.shares(point, ceilings))
        wins = [f"{label} {batch or 'never'}" for (_, label), batch in self.wins().items()]
        yield f"\nMore rows/s than the CPU, copies included, from batch: {', '.join(wins)}"

    def table(
        self,
        batches: Sequence[int],
        keys: Sequence[tuple[str, str]],
        cell: Callable[[Point], str],
    ) -> Iterator[str]:
        yield f"| batch | {' | '.join(f'{label}, {group}' for group, label in keys)} |"
        yield f"| --: {'| --: ' * len(keys)}|"
        for batch in batches:
            row = []
            for key in keys:
                fitting = [point for point in self.of(*key) if point.batch == batch]
                row.append(cell(fitting[0]) if fitting else "")
            yield f"| {batch} | {' | '.join(row)} |"

    def against_cpu(self, point: Point) -> str:
        baseline = [p for g, p in self.points if g == "cpu" and p.batch == point.batch]
        return shown(ratio(point.round_rates, baseline[0].round_rates)) if baseline else ""

    def shares(self, point: Point, ceilings: dict[str, Interval]) -> str:
        """Of arithmetic in the column's precision, and of memory traffic if nothing is fused."""
        flops, traffic = self.costs.get(point.batch, (0, 0))
        half = point.precision == "fp16"
        multiply = ceilings["multiply fp16" if half else "multiply tf32"].value
        calls_per_s = point.throughput_per_s.value / point.batch
        moved = traffic / 2 if half else traffic
        copy = ceilings["copy on the device"].value
        return f"{calls_per_s * flops / multiply:.1%} / {calls_per_s * moved / copy:.0%}"


def shown(found: Interval | None, unit: float = 1.0) -> str:
    """The value, and half its interval's width in per cent."""
    if found is None:
        return "too few calls"
    half = (found.high - found.low) / 2 / found.value if found.value else math.inf
    return f"{found.value / unit:.4g} ±{half:.1%}"


def measured_ceilings(device: str, size: int, copy_bytes: int) -> dict[str, Interval]:
    """Bytes/s of copies (on the device: read and written), operations/s of a square product."""
    host = torch.empty(copy_bytes, dtype=torch.uint8, pin_memory=device == "cuda")
    here, there = (torch.empty(copy_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    jobs: list[tuple[str, Callable[[], object], float]] = [
        ("copy on the device", lambda: there.copy_(here), 2.0 * copy_bytes),
        ("copy to the device, pinned", lambda: here.copy_(host, non_blocking=True), copy_bytes),
    ]
    for name, dtype, tf32 in (
        ("multiply fp32", torch.float32, False),
        ("multiply tf32", torch.float32, True),
        ("multiply fp16", torch.float16, False),
    ):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

        def job(a: Any = a, b: Any = b, tf32: bool = tf32) -> object:
            torch.backends.cuda.matmul.allow_tf32 = tf32
            return a @ b

        jobs.append((name, job, 2.0 * size**3))
    found = {name: rate(job, amount, device) for name, job, amount in jobs}
    torch.backends.cuda.matmul.allow_tf32 = True  # as ONNX Runtime's CUDA provider has it
    return found


def rate(job: Callable[[], object], amount: float, device: str, rounds: int = 7) -> Interval:
    """`amount` per second over `rounds` of ten calls after one that warms up."""
    seconds = []
    for number in range(rounds + 1):
        started = time.perf_counter()
        for _ in range(10):
            job()
        if device == "cuda":
            torch.cuda.synchronize()
        if number:
            seconds.append(time.perf_counter() - started)
    return throughput([amount * 10] * rounds, seconds)


def one_model(name: str, run: Run, folder: Path, options: argparse.Namespace, end: float) -> None:
    found, device = Model(name), "cpu" if options.dry else "cuda"
    run.models.append(found)
    one = member(name)
    if one.missing:
        found.notes.append(f"left out: {one.missing}")
        return
    files = prepare(one, folder, samples=SAMPLES)
    found.parameters = files.parameters
    exported = dk.export(
        files.model, out=folder / f"{name}.onnx", arch=files.arch, inputs=list(files.inputs)
    ).path
    onnx_files = {"fp32": exported}
    try:
        half = dk.quantize(exported, "fp16", folder / f"{name}.fp16.onnx", calib=files.calib)
        onnx_files["fp16"] = half.path
    except GateFailed as exc:
        found.notes.append(f"no fp16 file: {exc.message}")
    graph = Graph.open(exported)
    samples = one.sample(SAMPLES, 3)
    columns = all_columns(
        one.build(),
        onnx_files,
        device,
        compiled=options.compile,
        cpu_largest=options.cpu_largest,
    )
    columns = [column for column in columns if right(column, columns[0], tiled(samples, 2), found)]
    timing = Timing(options.warmup, options.seconds, options.rounds)
    for batch in options.batches:
        if time.monotonic() > end:
            found.notes.append(f"stopped before batch {batch}: the time was up")
            break
        feeds = tiled(samples, batch)
        columns = [column for column in columns if fits(column, feeds, batch, found)]
        costs = node_costs(graph, {"N": batch, "T": STEPS})
        totals = [sum(cost.flops or 0 for cost in costs), sum(c.traffic_bytes for c in costs)]
        found.costs[batch] = (totals[0], totals[1])
        for column, point in timed(columns, batch, feeds, timing):
            found.points.append((column.group, point))
        run.save()
        print(f"{name}: batch {batch} done", flush=True)


def timed(
    columns: Sequence[Column], batch: int, feeds: Arrays, timing: Timing
) -> list[tuple[Column, Point]]:
    by_key = {f"{column.label}|{column.group}": column for column in columns}
    setups = [
        Setup(key, lambda column=column: column, precision=column.precision)
        for key, column in by_key.items()
    ]
    points = sweep(setups, [batch], timing, lambda _: feeds)
    return [
        (by_key[point.label], replace(point, label=point.label.partition("|")[0]))
        for point in points
    ]


def tiled(samples: Arrays, batch: int) -> Arrays:
    """`batch` rows of the samples, over and over."""
    return {name: array[np.arange(batch) % len(array)] for name, array in samples.items()}


def right(column: Column, baseline: Column, feeds: Arrays, found: Model) -> bool:
    """Whether a column answers as the CPU does; those that return nothing share one that does."""
    name = f"{column.label}, {column.group}"
    try:
        if column.group != "host":
            column(feeds)
            return True
        parity = compare_engines(baseline, column, [feeds], max_error=sys.float_info.max)
    except (DeploykitError, RuntimeError, ValueError) as exc:
        found.notes.append(f"{name}: not timed: {first_line(exc)}")
        return False
    sqnr_db = min(row.sqnr_db for row in parity.rows)
    if sqnr_db < LEAST_DB:
        found.notes.append(f"{name}: not timed: {sqnr_db:.1f} dB against the CPU")
        return False
    found.notes.append(f"{name}: {sqnr_db:.0f} dB against the CPU")
    return True


def fits(column: Column, feeds: Arrays, batch: int, found: Model) -> bool:
    """Run once, which compiles too; a column that fails is left out from this batch on."""
    if column.max_batch is not None and batch > column.max_batch:
        return False
    try:
        column(feeds)
    except (DeploykitError, RuntimeError) as exc:
        found.notes.append(f"{column.label}, {column.group}: out at {batch}: {first_line(exc)}")
        return False
    return True


def numbers(text: str) -> list[int]:
    return sorted({int(part) for part in text.split(",")})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batches", type=numbers, default=list(BATCHES))
    parser.add_argument("--seconds", type=float, default=0.6, help="timed a point")
    parser.add_argument("--warmup", type=float, default=0.5, help="seconds a point, at most")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--cpu-largest", type=int, default=32, help="batch of the CPU baseline")
    parser.add_argument("--compile", default="inductor", help="torch.compile's backend, '' without")
    parser.add_argument("--limit-s", type=float, default=540, help="no batch is begun after it")
    parser.add_argument("--out", type=Path, default=HERE.parent / "out" / "gpu-zoo")
    parser.add_argument("--dry", action="store_true", help="tiny, on the CPU")
    options = parser.parse_args()
    end = time.monotonic() + options.limit_s
    if not options.dry and not torch.cuda.is_available():
        print("no NVIDIA GPU here: nothing was run (--dry tries the script out)", file=sys.stderr)
        return 3
    if unknown := set(options.models.split(",")) - set(MODELS):
        print(f"error: no model {unknown.pop()}; one of: {', '.join(MODELS)}", file=sys.stderr)
        return 2
    title = "GPU zoo, dry: no figure here means anything" if options.dry else "GPU zoo"
    device, size, copied = ("cpu", 64, 1 << 16) if options.dry else ("cuda", 8192, 2 * GIB)
    gpus = "".join(f"\n{gpu.name}, driver {gpu.driver}\n" for gpu in this_machine().gpus)
    run = Run(options.out, header(title) + gpus, measured_ceilings(device, size, copied))
    run.save()
    for name in options.models.split(","):
        if time.monotonic() > end:
            print(f"{name}: left out, the time was up", flush=True)
            continue
        with tempfile.TemporaryDirectory(prefix="gpu-zoo-") as folder:
            try:
                one_model(name, run, Path(folder), options, end)
            except (DeploykitError, RuntimeError) as exc:
                run.models[-1].notes.append(f"failed: {first_line(exc)}")
                print(f"{name}: failed: {first_line(exc)}", flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
        run.save()
    print((options.out / "gpu_zoo.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
