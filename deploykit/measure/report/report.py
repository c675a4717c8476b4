"""A report: everything that was measured, as data, and its three files.

In: points, load results, accuracy, parity and what they ran on. Out: `report.json`, which is the
truth, and `report.md` and `report.html`, which are made from it. Nothing reads a clock: the same
report gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from deploykit.core.errors import BadInput, os_reason
from deploykit.core.files import check_readable, make_folder, write_text
from deploykit.measure.load.generator import LoadResult
from deploykit.measure.report.html import page
from deploykit.measure.report.markdown import markdown
from deploykit.measure.statistics import Interval, Latency, ratio
from deploykit.measure.timing.sweep import Point, crossover

VERSION = 1
T = TypeVar("T")


class Gate(NamedTuple):
    """A bound that the run was held to."""

    name: str
    passed: bool
    detail: str


class Accuracy(NamedTuple):
    """A score on `n` samples, a fraction; `drop` against the reference, None for itself."""

    precision: str
    metric: str
    n: int
    value: Interval
    drop: Interval | None


class Step(NamedTuple):
    name: str
    seconds: float


class NotMeasured(NamedTuple):
    """`what` could not be measured, and `why`: "GPU", "no NVIDIA GPU on this machine"."""

    what: str
    why: str


@dataclass(frozen=True)
class Report:
    """All of a run. `created`: ISO 8601. `command`: what repeats it. `baseline`: a point's label.

    `machine`: Machine.to_dict(). `artefacts`: {"file", "sha256", "precision", "format"}. `parity`:
    Parity.to_dict() of each comparison. `verdict`: sentences, the most important first.
    `throttled`: why the GPU was held back meanwhile; then nothing is derived from the points.
    """

    title: str
    created: str
    command: str
    quick: bool = False
    baseline: str = ""
    verdict: tuple[str, ...] = ()
    gates: tuple[Gate, ...] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)
    artefacts: tuple[Mapping[str, str], ...] = ()
    accuracy: tuple[Accuracy, ...] = ()
    parity: tuple[Mapping[str, Any], ...] = ()
    points: tuple[Point, ...] = ()
    serving: tuple[LoadResult, ...] = ()
    steps: tuple[Step, ...] = ()
    notes: tuple[str, ...] = ()
    throttled: tuple[str, ...] = ()
    not_measured: tuple[NotMeasured, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """What `report.json` holds; `speedups` and `crossovers` are derived from the points."""
        return {
            "report": VERSION,
            "title": self.title,
            "created": self.created,
            "command": self.command,
            "quick": self.quick,
            "baseline": self.baseline,
            "verdict": list(self.verdict),
            "gates": [gate._asdict() for gate in self.gates],
            "machine": dict(self.machine),
            "artefacts": [dict(item) for item in self.artefacts],
            "accuracy": [
                row._asdict() | {"value": row.value.to_dict(), "drop": _plain(row.drop)}
                for row in self.accuracy
            ],
            "parity": [dict(item) for item in self.parity],
            "points": [point.to_dict() for point in self.points],
            "throttled": list(self.throttled),
            "speedups": [] if self.throttled else speedups(self.points, self.baseline),
            "crossovers": [] if self.throttled else crossovers(self.points, self.baseline),
            "serving": [result.to_dict() for result in self.serving],
            "steps": [step._asdict() for step in self.steps],
            "notes": list(self.notes),
            "not_measured": [gap._asdict() for gap in self.not_measured],
        }

    def _repr_html_(self) -> str:
        from deploykit.measure.report.notebook import report_html

        return report_html(self)


def speedup(candidate: Point, reference: Point) -> Interval:
    """How many times the reference's throughput the candidate has, paired by round.

    Raises BadInput for points that cannot be compared: another scenario, batch or number of rounds.
    """
    for what in ("scenario", "batch", "rounds"):
        a, b = getattr(candidate, what), getattr(reference, what)
        if a != b:
            raise BadInput(
                f"{candidate.label} and {reference.label} cannot be compared: {what} {a} and {b}",
                hint="measure both in one run, at the same batch sizes",
            )
    return ratio(candidate.round_rates, reference.round_rates)


def speedups(points: Sequence[Point], baseline: str) -> list[dict[str, Any]]:
    """The speed-up of every point that has a baseline of its scenario and batch."""
    found = []
    for point, reference in _pairs(points, baseline):
        found.append(
            {
                "label": point.label,
                "scenario": point.scenario,
                "batch": point.batch,
                "ratio": speedup(point, reference).to_dict(),
            }
        )
    return found


def _pairs(points: Sequence[Point], baseline: str) -> list[tuple[Point, Point]]:
    references = {(p.scenario, p.batch, p.rounds): p for p in points if p.label == baseline}
    keys = [(p, (p.scenario, p.batch, p.rounds)) for p in points if p.label != baseline]
    return [(point, references[key]) for point, key in keys if key in references]


def crossovers(points: Sequence[Point], baseline: str) -> list[dict[str, Any]]:
    """For each other setup the batch from which it stays ahead of the baseline, or None."""
    found = []
    pairs = _pairs(points, baseline)
    for scenario, label in dict.fromkeys((p.scenario, p.label) for p, _ in pairs):
        chosen = [pair for pair in pairs if (pair[0].scenario, pair[0].label) == (scenario, label)]
        for by in ("throughput", "p50"):
            batch = crossover([a for a, _ in chosen], [b for _, b in chosen], by)
            found.append(
                {
                    "label": label,
                    "baseline": baseline,
                    "scenario": scenario,
                    "by": by,
                    "batch": batch,
                }
            )
    return found


def write(report: Report, folder: Path) -> Path:
    """Write report.json, report.md and report.html; returns the path of the last.

    Each is written whole or not at all, the JSON last, so that it never tells of a page that is not
    there. Raises BadInput when `folder` cannot be written to.
    """
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    make_folder(folder)
    out = folder / "report.html"
    write_text(out, page(document))
    write_text(folder / "report.md", markdown(document))
    write_text(folder / "report.json", json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    return out


def read(path: Path) -> Report:
    """Read a `report.json`, or the one in a folder. Raises NotFound or BadInput."""
    path = path / "report.json" if path.is_dir() else path
    check_readable(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise BadInput(f"{path}: cannot be read: {os_reason(exc)}") from exc
    except (ValueError, RecursionError) as exc:
        raise BadInput(f"{path}: is not valid JSON: {exc}") from exc
    if not isinstance(values, dict) or values.get("report") != VERSION:
        raise BadInput(f"{path}: is not a deploykit report of version {VERSION}")
    try:
        return _report(values)
    except KeyError as exc:
        raise BadInput(f"{path}: has no {exc}") from exc
    except (TypeError, ValueError, AttributeError) as exc:
        raise BadInput(f"{path}: is damaged: {exc}") from exc


def _report(values: Mapping[str, Any]) -> Report:
    return Report(
        title=str(values["title"]),
        created=str(values["created"]),
        command=str(values["command"]),
        quick=bool(values["quick"]),
        baseline=str(values["baseline"]),
        verdict=tuple(map(str, values["verdict"])),
        gates=_each(values["gates"], lambda item: Gate(**item)),
        machine=dict(values["machine"]),
        artefacts=_each(values["artefacts"], dict),
        accuracy=_each(
            values["accuracy"],
            lambda item: Accuracy(
                **{**item, "value": Interval(**item["value"]), "drop": _interval(item["drop"])}
            ),
        ),
        parity=_each(values["parity"], dict),
        points=_each(values["points"], _point),
        serving=_each(values["serving"], _load_result),
        steps=_each(values["steps"], lambda item: Step(**item)),
        notes=tuple(map(str, values["notes"])),
        throttled=tuple(map(str, values.get("throttled", ()))),
        not_measured=_each(values["not_measured"], lambda item: NotMeasured(**item)),
    )


def _each(items: Sequence[Any], make: Callable[[Any], T]) -> tuple[T, ...]:
    return tuple(make(item) for item in items)


def _plain(interval: Interval | None) -> dict[str, float] | None:
    return None if interval is None else interval.to_dict()


def _interval(values: Mapping[str, float] | None) -> Interval | None:
    return None if values is None else Interval(**values)


def _latency(values: Mapping[str, Any]) -> Latency:
    percentiles = {key: _interval(values[key]) for key in ("p50_ms", "p90_ms", "p99_ms")}
    return Latency(samples=values["samples"], max_ms=values["max_ms"], **percentiles)


def _point(values: Mapping[str, Any]) -> Point:
    return Point(
        **{
            **values,
            "latency": _latency(values["latency"]),
            "throughput_per_s": Interval(**values["throughput_per_s"]),
            "round_rates": tuple(values["round_rates"]),
        }
    )


def _load_result(values: Mapping[str, Any]) -> LoadResult:
    latency = values["latency"]
    given = {key: value for key, value in values.items() if key != "first_error"}
    return LoadResult(
        **{
            **given,
            "achieved_per_s": Interval(**values["achieved_per_s"]),
            "latency": None if latency is None else _latency(latency),
        }
    )
