"""What was measured, as Markdown. Pure.

In: `Results` of one model. Out: a table for each protocol and number of connections, one of start
and memory, and one sentence for each target.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from clients import Sample

from deploykit.core.evidence import Interval
from deploykit.evaluation.statistics import ratio

OURS = "deploykit"


@dataclass(frozen=True)
class Cell:
    """Who was measured, how, and with how many connections."""

    server: str
    protocol: str  # "HTTP" | "gRPC"
    connections: int


@dataclass
class Results:
    """One model's figures. Lists are by round; None: that round has no figure.

    `titles`: name, version and encoding of each server in the order of the tables. `reasons`: why a
    server has no figure, or no further one.
    """

    model: str
    titles: Mapping[str, str]
    samples: dict[Cell, list[Sample | None]] = field(default_factory=dict)
    ceilings: list[Mapping[int, float]] = field(default_factory=list)
    ready_s: dict[str, list[float]] = field(default_factory=dict)
    ready_mib: dict[str, list[float]] = field(default_factory=dict)
    loaded_mib: dict[str, list[float]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def columns(self) -> list[tuple[str, int]]:
        """Protocols and connections, in the order in which they were first measured."""
        return list(dict.fromkeys((cell.protocol, cell.connections) for cell in self.samples))

    def median_per_s(self, cell: Cell) -> float | None:
        rates = [sample.per_s for sample in self.samples.get(cell, ()) if sample]
        return statistics.median(rates) if rates else None


def markdown(results: Results) -> str:
    parts = [f"## {results.model}\n"]
    if results.ceilings:
        parts.append(_ceiling(results))
    parts += [_column(results, *column) for column in results.columns()]
    parts.append(_footprint(results))
    if results.reasons:
        parts.append(
            "".join(f"- {results.titles[name]}: {why}\n" for name, why in results.reasons.items())
        )
    parts.append(verdict(results))
    return "\n".join(part for part in parts if part)


def verdict(results: Results) -> str:
    """Deploykit over the best of the others, for each protocol and number of connections."""
    lines = []
    for protocol, connections in results.columns():
        others = {
            name: rate
            for name in results.titles
            if not name.startswith(OURS)
            and (rate := results.median_per_s(Cell(name, protocol, connections)))
        }
        if not others:
            continue
        best = max(others, key=others.__getitem__)
        times = times_of(results, best, protocol, connections)
        if times is not None:
            lines.append(
                f"- {protocol}, {_connections(connections)}: deploykit answers {_times(times)} "
                f"as many requests as the best of the others, {results.titles[best]}\n"
            )
    return "".join(lines)


def times_of(results: Results, other: str, protocol: str, connections: int) -> Interval | None:
    """How many times as many requests deploykit answers as `other`, by rounds that have both."""
    ours = results.samples.get(Cell(OURS, protocol, connections), [])
    theirs = results.samples.get(Cell(other, protocol, connections), [])
    pairs = [(a.per_s, b.per_s) for a, b in zip(ours, theirs, strict=False) if a and b]
    return _ratio(pairs)


def share_of_ceiling(results: Results, cell: Cell) -> Interval | None:
    """The server's rate over the in-process one at its best batch, by rounds."""
    samples = results.samples.get(cell, [])
    pairs = [
        (sample.per_s, max(rates.values()))
        for sample, rates in zip(samples, results.ceilings, strict=False)
        if sample
    ]
    return _ratio(pairs)


def _ratio(pairs: Sequence[tuple[float, float]]) -> Interval | None:
    if not pairs:
        return None
    if len(pairs) == 1:
        value = pairs[0][0] / pairs[0][1]
        return Interval(value, value, value)
    return ratio([a for a, _ in pairs], [b for _, b in pairs])


def _ceiling(results: Results) -> str:
    found = ", ".join(
        f"{statistics.median(rates[batch] for rates in results.ceilings):,.0f} at {batch}"
        for batch in results.ceilings[0]
    )
    return f"In-process ceiling of the same session, images/s by batch: {found}\n"


def _column(results: Results, protocol: str, connections: int) -> str:
    rows = []
    for name, title in results.titles.items():
        cell = Cell(name, protocol, connections)
        samples = [sample for sample in results.samples.get(cell, ()) if sample]
        if not samples:
            if name in results.reasons and protocol == "HTTP":
                rows.append(f"| {title} | not measured | | | | | | |")
            continue
        rates = [sample.per_s for sample in samples]
        digits = 0 if min(rates) >= 100 else 1
        times = None if name == OURS else times_of(results, name, protocol, connections)
        share = share_of_ceiling(results, cell)
        row = [
            title,
            f"{statistics.median(rates):,.{digits}f}",
            f"{min(rates):,.{digits}f}–{max(rates):,.{digits}f}",
            _median(samples, lambda sample: sample.p50_ms),
            _median(samples, lambda sample: sample.p99_ms),
            f"{share.value:.1%}" if share else "",
            _times(times) if times else "",
            str(sum(sample.errors for sample in samples)),
        ]
        rows.append(f"| {' | '.join(row)} |")
    return (
        f"### {protocol}, {_connections(connections)}\n\n"
        "| server | requests/s | lowest–highest | p50 ms | p99 ms | of ceiling "
        "| deploykit is | errors |\n|---|--:|--:|--:|--:|--:|--:|--:|\n" + "\n".join(rows) + "\n"
    )


def _footprint(results: Results) -> str:
    rows = []
    for name, title in results.titles.items():
        if name in results.ready_s:
            row = [
                title,
                f"{statistics.median(results.ready_s[name]):.2f}",
                f"{statistics.median(results.ready_mib[name]):.0f}",
                f"{statistics.median(results.loaded_mib[name]):.0f}",
            ]
            rows.append(f"| {' | '.join(row)} |")
    return (
        "### Start and memory of all its processes\n\n"
        "| server | first right answer after s | MiB then | MiB after the load |\n"
        "|---|--:|--:|--:|\n" + "\n".join(rows) + "\n"
    )


def _median(samples: Sequence[Sample], part: Callable[[Sample], float]) -> str:
    return f"{statistics.median(map(part, samples)):,.2f}"


def _times(times: Interval) -> str:
    if times.low == times.high:
        return f"{times.value:.2f}x"
    return f"{times.value:.2f}x ({times.low:.2f} to {times.high:.2f})"


def _connections(count: int) -> str:
    return f"{count} connection{'s' * (count > 1)}"
