"""Run the demo: the main job on real data, from training to a report, in one folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deploykit.benchmarking import bench
from deploykit.benchmarking.columns import BASELINE
from deploykit.building import build
from deploykit.core.errors import GateFailed
from deploykit.core.evidence import Gate
from deploykit.core.extras import installed, missing, require
from deploykit.core.files import StrPath
from deploykit.core.json_value import Shown, json_value
from deploykit.evaluation import compare, predict
from deploykit.evaluation.artefacts import Made, Progress, claim_report, no_progress
from deploykit.evaluation.doctor import NEEDS
from deploykit.exporting import export
from deploykit.loadtest import load as load_test
from deploykit.quantization import quantize
from deploykit.reporting import report as reports
from deploykit.reporting.report import Point, Report
from deploykit.reporting.report import best as fastest
from deploykit.reporting.tables import accuracy_of
from deploykit.reporting.verdict import verdict
from deploykit.serving.options import ServeOptions
from deploykit.serving.serve import start_server
from deploykit.training import train

RECIPE = "mnist-cnn"
MAX_DROP = 0.02  # 540 test samples prove no less: one answer moves the bound 0.6 pp
_STEPS = 9


@dataclass(frozen=True)
class DemoResult(Shown):
    """The demo's report, the path of its page, and the rows of its closing table."""

    page: Path
    report: Report
    rows: tuple[tuple[str, ...], ...]

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = json_value(self, without=("rows",))
        return found

    def _repr_html_(self) -> str:
        return self.report._repr_html_()


@dataclass
class _Steps:
    """Reports the progress of the whole demo and the time of each step."""

    on_step: Callable[[str], None]
    on_progress: Progress
    name: str = ""
    taken: list[tuple[str, float]] = field(default_factory=list)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.name = name
        self.progress("", 0.0)
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self.taken.append((name, round(seconds, 3)))
        self.on_step(f"  {seconds:6.1f} s  {name}")

    def progress(self, what: str, share: float) -> None:
        """Report `share`, the progress of the current step, 0 to 1."""
        self.on_progress(f"{self.name}  {what}".rstrip(), (len(self.taken) + share) / _STEPS)


def demo(
    out: StrPath = "out",
    *,
    quick: bool = False,
    force: bool = False,
    on_progress: Progress = no_progress,
    on_step: Callable[[str], None] = lambda _: None,
) -> DemoResult:
    """Run the main job into the folder `out`. Raises GateFailed when parity or accuracy fail.

    `force`: replace files that deploykit did not write.
    """
    if absent := [each for each in NEEDS["demo"] if not installed(each)]:
        raise missing(*absent)
    for module in NEEDS["demo"]:
        require(module)

    folder = claim_report(out, (), force=force)
    folder.mkdir(parents=True, exist_ok=True)
    steps, gates = _Steps(on_step, on_progress), list[tuple[str, str]]()  # name, detail
    checkpoint, data = folder / "model.pt", folder / "data"
    typed, built = {"fp32": folder / "model.onnx"}, dict[str, Path]()

    with steps(f"train {RECIPE}"):
        train.train(
            RECIPE,
            checkpoint,
            epochs=8 if quick else None,
            save_splits=data,
            force=force,
            on_progress=steps.progress,
        )
    with steps("export to ONNX, parity with PyTorch"):
        made = export.export(checkpoint, out=typed["fp32"], force=force, on_progress=steps.progress)
    gates.append(("export", f"error {_worst(made)}"))
    for name in ("fp16", "int8"):
        with steps(f"quantise to {name}, accuracy gate"):
            made = quantize.quantize(
                typed["fp32"],
                name,
                folder / f"model.{name}.onnx",
                calib=data / "calibration.npz",
                data=data / "test.npz",
                max_drop=MAX_DROP,
                runtime="onnxruntime",
                force=force,
            )
        typed[name] = made.path
        gates.append((f"{name} accuracy", made.evaluation.describe() if made.evaluation else ""))
    with steps("build for this machine's CPU"):
        for name in ("fp32", "int8"):  # no fp16: ONNX Runtime's CPU kernels use float32
            made = build.build(
                typed[name], "cpu", out=folder / f"model.{name}.cpu.onnx", force=force
            )
            built[name] = made.path
            gates.append((f"build {name}", f"error {_worst(made)}"))
    with steps("compare the built engine with PyTorch"):
        compared = compare.compare(checkpoint, built["fp32"], data=data / "test.npz")
        compared.raise_if_over()
    gates.append(("built engine against PyTorch", f"error {compared.parity.worst.error:.2g}"))
    with steps("predict the test split"):
        out = folder / "predictions.npz"
        predict.predict(built["int8"], data / "test.npz", out, device="cpu", force=force)
    with steps("measure against the CPU baseline"):
        report = bench.bench(
            [built["int8"], typed["fp16"]],
            against=[typed["fp32"]],
            batches=(1, 32) if quick else (1, 4, 16, 64),
            out=folder,
            data=data / "test.npz",
            force=force,
            seconds=0.5 if quick else 3.0,
            on_progress=steps.progress,
        )
    best = _fastest(report, {BASELINE: built["fp32"], built["int8"].stem: built["int8"]})
    seconds = 1.0 if quick else 5.0
    with steps(f"serve {best.name} over HTTP, under load"), _server(best) as url:
        closed = load_test.load_test(url, concurrency=32, duration_s=seconds)
        quarter = max(1.0, closed.achieved_per_s.value / 4)
        serving = closed, load_test.load_test(url, rate=quarter, duration_s=seconds)
    report = replace(
        report,
        title=f"deploykit demo: {RECIPE} on handwritten digits",
        command=f"deploykit demo -o {folder}" + (" --quick" if quick else ""),
        gates=tuple(Gate(name, True, detail) for name, detail in gates),  # one that fails ends it
        serving=serving,
        steps=tuple(reports.Step(*step) for step in steps.taken),
    )
    report = replace(report, verdict=verdict(report))
    return DemoResult(reports.write(report, folder), report, _rows(report))


def _worst(made: Made) -> str:
    return f"{made.parity.worst.error:.2g}" if made.parity else "not compared"


@contextlib.contextmanager
def _server(engine: Path) -> Iterator[str]:
    """Serve from another process, as `deploykit serve` does, and yield the URL."""
    server = start_server(ServeOptions({RECIPE: engine}, device="cpu"), apart=True)
    with server:
        yield server.url
    if unanswered := server.wait():
        raise GateFailed(f"the server ended with {unanswered} accepted requests unanswered")


def _fastest(report: Report, files: Mapping[str, Path]) -> Path:
    """Return the file with the highest throughput; `files` maps labels of points to files."""
    rates = {point.label: point.throughput_per_s.value for point in report.points}
    name = {label: label.partition(", ")[0] for label in rates}  # without ", 2 sessions"
    return files[name[max((each for each in rates if name[each] in files), key=rates.__getitem__)]]


def _rows(report: Report) -> tuple[tuple[str, ...], ...]:
    """Return rows of setup, accuracy, latency at batch 1 and throughput at the best batch."""

    scores = [each.to_dict() for each in report.accuracy]

    def row(label: str, points: list[Point]) -> tuple[str, ...]:
        smallest = min(points, key=lambda point: point.batch)
        best = max(points, key=lambda point: point.throughput_per_s.value)
        found, p50 = accuracy_of(scores, best.label, best.precision), smallest.latency.p50_ms
        score = f"{found['value']['value'] * 100:.2f} %" if found else "-"
        shown = "too few" if p50 is None else f"{p50.value:.3g} ms"
        shown = shown if smallest.batch == 1 else "-"
        return (label, score, shown, f"{best.throughput_per_s.value:,.0f}/s at {best.batch}")

    rows = []
    for label in dict.fromkeys(point.label for point in report.points):
        rows.append(row(label, [point for point in report.points if point.label == label]))
    cpu = [point for point in report.points if point.device == "cpu"]
    best = max(cpu, key=lambda point: point.throughput_per_s.value)
    quickest = fastest([p for p in cpu if p.batch == min(p.batch for p in cpu)], "p50")
    rows.append(row("best CPU", [quickest, best]))
    gaps = (gap for gap in report.not_measured if gap.what == "GPU")
    rows += [("GPU", "-", "not measured", gap.why) for gap in gaps]
    for result in report.serving:
        p50 = result.latency.p50_ms if result.latency else None
        shown = "-" if p50 is None else f"{p50.value:.3g} ms"
        how = f"{result.concurrency} connections" if result.mode == "closed" else "open loop"
        rate = f"{result.achieved_per_s.value:,.0f} requests/s"
        rows.append((f"served, {how}", "", shown, rate))
    return tuple(rows)
