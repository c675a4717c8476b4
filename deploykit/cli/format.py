"""Numbers and lists as short strings: sizes, rates, times, intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deploykit.measure.report.formatting import SPACE, number

if TYPE_CHECKING:
    from deploykit.measure.latency import Latency
    from deploykit.measure.statistics import Interval


def latency(value: Latency | None) -> str:
    """p50, p90 and p99 in milliseconds, with how many samples they are of."""
    if value is None:
        return "not measured: no request had a good answer"
    parts = []
    for name, item in percentiles(value):
        needs = value.needs.get(f"{name}_ms")
        none = f"none: {lost(value)} had no good answer"
        why = f"too few, needs {needs:,} calls" if needs else none
        parts.append(f"{name} {ms(item) if item else why}")
    return ", ".join(parts) + f" (n = {value.samples:,})"


def lost(value: Latency) -> str:
    """The share of calls without an answer."""
    return f"{figure(100 * value.lost / (value.samples + value.lost))} %"


def percentiles(value: Latency) -> list[tuple[str, Interval | None]]:
    return [("p50", value.p50_ms), ("p90", value.p90_ms), ("p99", value.p99_ms)]


def ms(value: Interval | None, needs: int | None = None) -> str:
    """`needs`: how many calls a percentile takes that too few were timed for."""
    few = f"needs {needs:,} calls" if needs else "too few"
    return few if value is None else f"{figure(value.value)} ms"


def figure(value: float | None) -> str:
    """Three digits, and never an exponent; "-" for what is not known."""
    return "-" if value is None else number(value).replace(SPACE, ",")


def percent(value: Interval) -> str:
    return f"{value.value * 100:.2f} % ({value.low * 100:.2f} to {value.high * 100:.2f})"


def plain(value: Interval) -> str:
    """In its own unit, such as perplexity's."""
    return f"{value.value:.5g} ({value.low:.5g} to {value.high:.5g})"


def mix(values: dict[str, Any] | Any) -> str:
    return ", ".join(f"{count} {name}" for name, count in values.items()) or "-"


def versions(values: dict[str, str] | Any) -> str:
    return ", ".join(f"{name} {version}" for name, version in values.items()) or "-"


def size(count: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count} B" if unit == "B" else f"{count:.1f} {unit}"
        count = count / 1000  # type: ignore[assignment]
    return ""


def memory(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.0f} GiB"


def rate(value: float | None, unit: float, name: str) -> str:
    return "-" if value is None else f"{value / unit:.4g} {name}"
