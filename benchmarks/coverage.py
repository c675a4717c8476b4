"""How often the 95 % intervals of percentiles and rates hold the truth, on simulated calls.

    python benchmarks/coverage.py OUT.md [RUNS]

The truth is known, as the series are drawn: independent calls; calls that depend on each other
(AR(1) under a log-normal); rounds that differ by 1 %, each for itself or drifting (AR(1) with 0.9
from round to round); stalls of 20 calls, one in 1,000 calls. A
cell has the share of intervals that hold the truth and, in brackets, of runs without an interval.
Rates: blocks whose neighbours correlate; in brackets the median width as a share of a t interval's.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from scipy.signal import lfilter

from deploykit.evaluation.statistics import Latency, t_quantile, throughput

PERCENTILES = (50, 90, 99)
SIZES = (
    (5, 400),
    (5, 2000),
    (20, 500),
    (20, 2500),
    (60, 170),
    (60, 830),
    (1, 4000),
    (1, 20_000),
)  # rounds, calls in each
Random = np.random.Generator
Series = Callable[[Random, int, int], np.ndarray]


def dependent(correlation: float, random: Random, rounds: int, size: int) -> np.ndarray:
    return np.exp(0.3 * correlated(correlation, random, rounds * size)).reshape(rounds, size)


def correlated(correlation: float, random: Random, size: int) -> np.ndarray:
    noise = random.standard_normal(size) * math.sqrt(1 - correlation**2)
    first = [correlation * random.standard_normal()]
    series, _ = lfilter([1], [1, -correlation], noise, zi=first)
    return np.asarray(series)


def uneven(spread: float, drift: float, random: Random, rounds: int, size: int) -> np.ndarray:
    noise = np.exp(spread * random.standard_normal((rounds, size)))
    return noise * np.exp(0.01 * correlated(drift, random, rounds))[:, None]


def stalls(random: Random, rounds: int, size: int) -> np.ndarray:
    series = np.exp(0.05 * random.standard_normal(rounds * size))
    for begin in np.flatnonzero(random.random(rounds * size) < 1e-3):
        series[begin : begin + 20] *= 3
    return series.reshape(rounds, size)


SERIES: dict[str, Series] = {
    "independent": partial(dependent, 0.0),
    "correlation 0.9": partial(dependent, 0.9),
    "correlation 0.99": partial(dependent, 0.99),
    "rounds differ by 1 %, calls by 10 %": partial(uneven, 0.1, 0.0),
    "rounds differ by 1 %, calls by 2 %": partial(uneven, 0.02, 0.0),
    "rounds drift by 1 %, calls differ by 2 %": partial(uneven, 0.02, 0.9),
    "stalls": stalls,
}


def truth(name: str) -> list[float]:
    """Of ten million calls; where rounds differ, each is of a round of its own."""
    series, random = SERIES[name], np.random.default_rng(7)
    rounds, size = (10_000_000, 1) if name.startswith("rounds") else (1, 10_000_000)
    many = series(random, rounds, size)
    return [float(np.quantile(many, q / 100)) * 1e3 for q in PERCENTILES]


def cell(series: Series, rounds: int, size: int, q: int, truth_ms: float, runs: int) -> str:
    random = np.random.default_rng(q)
    found = [getattr(Latency.of(*series(random, rounds, size)), f"p{q}_ms") for _ in range(runs)]
    given = [each for each in found if each is not None]
    if len(given) < 0.02 * runs:
        return "none"
    held = np.mean([each.low <= truth_ms <= each.high for each in given])
    refused = f" ({100 - 100 * len(given) / runs:.0f})" if len(given) < runs else ""
    return f"{100 * held:.0f}{refused}"


def rates(correlation: float, blocks: int, runs: int) -> str:
    """Of throughput, of `blocks` of 1 s that vary by 2 %."""
    random = np.random.default_rng(blocks)
    held, widths = 0, []
    for _ in range(runs):
        rows = 500 * (1 + 0.02 * correlated(correlation, random, blocks))
        found = throughput(rows, [1.0] * blocks)
        held += found.low <= 500 <= found.high
        plain = 2 * t_quantile(blocks - 1) * rows.std(ddof=1) / math.sqrt(blocks)
        widths.append((found.high - found.low) / plain)
    return f"{100 * held / runs:.0f} ({np.median(widths):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", type=int, nargs="?", default=1000)
    options = parser.parse_args()
    out, runs = options.out, options.runs
    sizes = [f"{rounds} x {size:,}" for rounds, size in SIZES]
    lines = [
        "# How often intervals hold the truth, in %",
        "",
        f"`python benchmarks/coverage.py OUT.md {runs}`; numpy {np.__version__}.",
        "",
        "Percentiles, rounds x calls: p50 / p90 / p99; in brackets the runs without an interval.",
        "",
        f"| series | {' | '.join(sizes)} |",
        "| --- |" + " --- |" * len(sizes),
    ]
    for name, series in SERIES.items():
        truths_ms = truth(name)
        cells = [
            "one round does not show it"
            if rounds == 1 and name.startswith("rounds")
            else " / ".join(
                cell(series, rounds, size, q, at, runs)
                for q, at in zip(PERCENTILES, truths_ms, strict=True)
            )
            for rounds, size in SIZES
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    lines += [
        "",
        "Throughput (width against a t interval's); 5 count as independent.",
        "",
    ]
    lines += ["| correlation of neighbouring blocks | 5 blocks | 20 blocks | 60 blocks |"]
    lines += ["| --- | --- | --- | --- |"]
    for correlation in (0.0, 0.3, 0.6, 0.9):
        shares = [rates(correlation, blocks, runs) for blocks in (5, 20, 60)]
        lines.append(f"| {correlation} | {' | '.join(shares)} |")
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
