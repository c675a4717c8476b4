"""Compare two reports row by row: faster, slower or no difference.

The statistical unit is the process: a report's interval is over its processes, or over the rounds
of a single one. The spread between processes is not measured then, so it is assumed, as one draw
for each setup. All intervals hold together (Bonferroni: Dunn, JASA 56, 1961), so that a repeated
run shows no difference in 95 % of all cases, however many rows it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from deploykit.core.errors import BadInput, GateFailed
from deploykit.core.evidence import Interval
from deploykit.core.files import StrPath
from deploykit.core.json_value import Record, table_of
from deploykit.evaluation.formatting import number, spread
from deploykit.evaluation.statistics import FASTER, PROCESS_SPREAD, SLOWER, difference, t_quantile
from deploykit.reporting.report import CLOSED_LOOP, Point, Report, read

_FIGURES: Mapping[str, Callable[[Point], Interval | None]] = {
    "throughput": lambda point: point.throughput_per_s,
    "p50": lambda point: point.latency.p50_ms,
    "p99": lambda point: point.latency.p99_ms,
}
_MOST = 3  # rows with differences that a message names
_TAIL = 0.025  # probability left out on each side
_PROCESS_TAIL = 0.02  # for processes; with 0.025 the rounds' errors raised 5 % to 5.7 %
_LARGEST = 1e100  # largest figure; the square of a larger one is infinite
_MANY = 10**6  # degrees of freedom of a known spread
_PACKAGES = ("deploykit", "numpy", "nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")
_KEYS = ("label", "precision", "scenario", "batch", "sessions", "threads", "settings", "shapes")


@dataclass(frozen=True)
class FigureInBoth(Record):
    """One figure of a row in both reports: "throughput" in rows per second, "p50" or "p99" in ms.

    `ratio`: b / a; the intervals of all ratios of a comparison hold together, in 95 % of all cases.
    `finding`: "faster", "slower", "practically equal" (less than 2 %) or "no difference".
    """

    figure: str
    a: float
    b: float
    ratio: Interval
    finding: str


@dataclass(frozen=True)
class RowInBoth(Record):
    """A row that both reports have. `shapes`: the sizes of its inputs, {} where not known."""

    label: str
    precision: str
    scenario: str
    batch: int
    sessions: int
    threads: int | None
    settings: str
    shapes: Mapping[str, tuple[int, ...]]
    figures: tuple[FigureInBoth, ...]


@dataclass(frozen=True)
class ReportComparison(Record):
    """Report `b` against report `a`.

    `only_a`, `only_b`: rows that the other report lacks. `not_known`: what at least one of the
    reports does not say, so that a difference in it was not seen. `fail_on_regression`: how much
    slower a figure may be, a fraction, or None; `regressions` are the figures that certainly are.
    """

    shown: ClassVar[tuple[str, ...]] = ("regressions", "passed")

    a: str
    b: str
    rows: tuple[RowInBoth, ...]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    not_known: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    fail_on_regression: float | None = None

    @property
    def regressions(self) -> tuple[str, ...]:
        """The figures whose interval is beyond the bound even at its favourable end."""
        bound = self.fail_on_regression
        if bound is None:
            return ()
        return tuple(
            f"{_name(row)}: {each.figure} {spread(each.ratio.to_dict())} times"
            for row in self.rows
            for each in row.figures
            if (
                each.ratio.high < 1 - bound
                if each.figure == "throughput"
                else each.ratio.low > 1 + bound
            )
        )

    @property
    def passed(self) -> bool:
        return not self.regressions

    def _repr_html_(self) -> str:
        rows = [{"row": _name(row), **vars(each)} for row in self.rows for each in row.figures]
        return super()._repr_html_() + table_of("B / A", rows)

    def raise_if_slower(self) -> None:
        """Raise GateFailed, naming the figures, where one is certainly slower than it may be."""
        if self.regressions:
            bound = number((self.fail_on_regression or 0) * 100)
            named = "; ".join(self.regressions)
            raise GateFailed(
                f"{self.b} is slower than {self.a} by more than {bound} %: {named}", result=self
            )


def compare_reports(
    a: StrPath, b: StrPath, *, fail_on_regression: float | None = None
) -> ReportComparison:
    """Compare report `b` with report `a`, both a `report.json` or the folder of one.

    Each common row gets the ratio b / a of throughput, p50 and p99, with intervals that hold
    together. With `fail_on_regression` 0.05 a figure that is certainly slower by more than 5 % is
    a regression; see `ReportComparison.raise_if_slower`. Raises BadInput if a file is not a valid
    report, if machine, clocks, threads, versions or inputs differ, naming each reason, or if there
    is no common row.
    """
    bound = fail_on_regression
    if bound is not None and not 0 <= bound < 1:
        raise BadInput(f"`fail_on_regression` must be 0 or more and below 100 %, got {bound:g}")
    names, both = (str(a), str(b)), (read(a), read(b))
    for report, name in zip(both, names, strict=True):
        _check_valid(report, name)
    differences, not_known = _differences(*(dict(_facts(report)) for report in both))
    rows_a, rows_b = (_rows(report, name) for report, name in zip(both, names, strict=True))
    same = [(point, rows_b[key]) for key, point in rows_a.items() if key in rows_b]
    only_a, only_b = (
        tuple(_name(point) for key, point in rows.items() if key not in others)
        for rows, others in ((rows_a, rows_b), (rows_b, rows_a))
    )
    if not all(point.shapes for pair in same for point in pair):
        not_known.append("sizes of the inputs")
    unlike = [text for pair in same for text in _unlike(*pair)]
    differences += unlike[:_MOST]
    differences += [f"and {len(unlike) - _MOST} more such"] * (len(unlike) > _MOST)
    if differences:
        raise BadInput(
            f"{names[1]} cannot be compared with {names[0]}: {'; '.join(differences)}",
            hint="measure both on one machine in one state, with the same options, the second with "
            f"`against` {names[0]}",
        )
    if not same:
        raise BadInput(f"{names[0]} and {names[1]} have no row in common")
    tests = sum(_figure_pair(name, *pair) is not None for pair in same for name in _FIGURES)
    setups = len({point.label for point, _ in same})
    rows = tuple(_compare_row(*pair, tests=tests, setups=setups) for pair in same)
    notes = tuple(_notes(*both, rows, same))
    return ReportComparison(*names, rows, only_a, only_b, tuple(not_known), notes, bound)


def ratio_of(
    a: Interval, b: Interval, units: tuple[int, int], tests: int, assumed: float = 0.0
) -> Interval:
    """Return the ratio b / a of independent runs; `tests` such intervals hold together.

    It works on logarithms. Each side's standard error is from the relevant bound of its 95 % t
    interval over `units` (processes or rounds); degrees of freedom follow Welch (Biometrika 34,
    1947) and Satterthwaite. `assumed`: an additional half width, added in squares.
    """
    if min(a.low, b.low) <= 0:
        return Interval(b.value / a.value, 0.0, math.inf)
    value, ends = math.log(b.value / a.value), []
    for sign, bounds in (
        (-1, (a.high / a.value, b.value / b.low)),
        (1, (a.value / a.low, b.high / b.value)),
    ):
        parts = [
            ((math.log(bound) / t_quantile(n - 1)) ** 2, n - 1)
            for bound, n in zip(bounds, units, strict=True)
        ]
        variance = sum(part for part, _ in parts)
        weight = sum(part**2 / freedom for part, freedom in parts)
        freedom = max(1, int(variance**2 / weight)) if weight else 1
        half = math.hypot(assumed, t_quantile(freedom, _TAIL / tests) * math.sqrt(variance))
        ends.append(math.exp(max(-700.0, min(value + sign * half, 700.0))))
    return Interval(math.exp(value), *ends)


def _compare_row(a: Point, b: Point, *, tests: int, setups: int) -> RowInBoth:
    processes = [a.processes, b.processes]
    units = [n if n > 1 else point.rounds for n, point in zip(processes, (a, b), strict=True)]
    alone = PROCESS_SPREAD * math.sqrt(sum(n <= 1 for n in processes))
    assumed = alone * t_quantile(_MANY, _PROCESS_TAIL / setups)
    figures = []
    for name in _FIGURES:
        pair = _figure_pair(name, a, b)
        if pair is not None:
            ratio = ratio_of(*pair, (max(2, units[0]), max(2, units[1])), tests, assumed)
            finding = difference(ratio)
            if name != "throughput":  # less is better
                finding = {FASTER: SLOWER, SLOWER: FASTER}.get(finding, finding)
            figures.append(FigureInBoth(name, pair[0].value, pair[1].value, ratio, finding))
    keys: dict[str, Any] = {name: getattr(b, name) for name in _KEYS}
    return RowInBoth(**keys, figures=tuple(figures))


def _figure_pair(name: str, a: Point, b: Point) -> tuple[Interval, Interval] | None:
    """Return the figure of both points; None if one of them has no interval of it."""
    first, second = (_FIGURES[name](point) for point in (a, b))
    known = [
        each
        for each in (first, second)
        if each and 0 < each.value <= each.high < _LARGEST and each.low <= each.value
    ]
    return (known[0], known[1]) if len(known) == 2 else None


def _check_valid(report: Report, name: str) -> None:
    why = [*report.invalid, *(f"the GPU: {each}" for each in report.throttled)]
    for point in report.points if not report.invalid else ():
        why += [f"{_name(point)}: {mark}" for mark in point.marks]
        if point.label in report.wrong:
            why.append(f"{_name(point)}: its outputs failed their gate")
    if why:
        raise BadInput(
            f"{name}: is not valid for a comparison: {'; '.join(dict.fromkeys(why))}",
            hint="measure again, without what disturbed it",
        )
    if not report.points:
        raise BadInput(f"{name}: no engine was timed, so there is nothing to compare")


def _facts(report: Report) -> Iterator[tuple[str, Any]]:
    """Yield the facts that must be equal besides the rows, by name; None if not known."""

    def mapping(value: object) -> Mapping[str, Any]:
        return value if isinstance(value, Mapping) else {}

    machine = dict(report.machine)
    packages = mapping(machine.pop("packages", None))
    memory = machine.pop("memory_bytes", None)
    yield "memory", f"{memory / 2**30:.0f} GiB" if isinstance(memory, int) else None
    machine |= {f"version of {key}": packages[key] for key in _PACKAGES if key in packages}
    for each in report.conditions:
        machine[f"power mode of {each.name}"] = each.power_mode
        machine[f"highest clock of {each.name} in MHz"] = each.clock_max_mhz
    known = report.provenance
    for key, value in mapping(known.get("clocks")).items():
        machine[f"clock {key}" if key == "governor" else f"clocks: {key}"] = value
    machine["CPUs that it may use"] = known.get("affinity")
    machine["inputs"] = known.get("inputs")
    if known:  # without variables the key is absent
        machine["variables of numeric libraries"] = known.get("environment", {})
    needed = ("cpu", "usable_cores", "gpus", "version of deploykit", "clock governor", "inputs")
    for key, value in {**dict.fromkeys(needed), **machine}.items():
        if value is not None or key in needed:  # most machines have no power mode
            yield key.replace("_", " "), value
    yield "length of the timing", "quick" if report.quick else "full"


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the differences, and the facts that at least one report does not have."""
    differences, not_known = [], []
    for name in {**a, **b}:
        one, other = a.get(name), b.get(name)
        if one is None or other is None:
            not_known.append(name)
        elif one != other:
            differences.append(f"{name}: {_shown(one)} against {_shown(other)}")
    return differences, not_known


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(each)}" for key, each in value.items()) or "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(map(_shown, value)) or "none"
    return str(value) or "none"


def _rows(report: Report, name: str) -> dict[tuple[str, str, int], Point]:
    """Return the points by label, scenario and batch, which must be unique."""
    found: dict[tuple[str, str, int], Point] = {}
    for point in report.points:
        key = (point.label, point.scenario, point.batch)
        if key in found:
            raise BadInput(f"{name}: the row {_name(point)} is there twice")
        found[key] = point
    return found


def _unlike(a: Point, b: Point) -> Iterator[str]:
    """Yield what differs between the points; settings cover sessions and threads."""
    for name in ("device", "runtime", *_KEYS):
        one, other = getattr(a, name), getattr(b, name)
        covered = name in ("sessions", "threads") and a.settings and b.settings
        unknown = name == "shapes" and not (one and other)
        if one != other and not covered and not unknown:
            what = {"shapes": "sizes of the inputs"}.get(name, name)
            yield f"{what} of {_name(a)}: {_shown(one)} against {_shown(other)}"


def _name(row: Point | RowInBoth) -> str:
    scenario = "" if row.scenario == CLOSED_LOOP else f", {row.scenario}"
    return f"{row.label}{scenario}, batch {row.batch}"


def _notes(
    a: Report,
    b: Report,
    rows: Sequence[RowInBoth],
    pairs: Sequence[tuple[Point, Point]],
) -> Iterator[str]:
    if a == b:
        yield "both are the report of the same run, so nothing can differ"
    if any(point.processes <= 1 for pair in pairs for point in pair):
        yield (
            f"timed in one process: {PROCESS_SPREAD * 100:g} % from process to process is assumed, "
            "not measured"
        )
    for figure in _FIGURES:
        missing = [_name(pair[0]) for pair in pairs if _figure_pair(figure, *pair) is None]
        if missing:
            more = f" and {len(missing) - 1} more" * (len(missing) > 1)
            yield f"{figure} not compared, without an interval in both: {missing[0]}{more}"
    first = [r.artefacts[0].get("sha256") if r.artefacts else "" for r in (a, b)]
    moved = [row for row in rows if row.label == a.baseline == b.baseline]
    if first[0] == first[1] and any(
        each.finding in (FASTER, SLOWER) for row in moved for each in row.figures
    ):
        yield (
            "the baseline is the same file in both and differs too: the machine was not in the "
            "same state"
        )
