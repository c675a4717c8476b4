"""Compare two reports of `bench`: what became slower, and whether that is certain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.core.errors import BadInput
from deploykit.core.paths import StrPath

if TYPE_CHECKING:
    from deploykit.measure.report.compare import ReportComparison


def compare_reports(
    a: StrPath, b: StrPath, *, fail_on_regression: float | None = None
) -> ReportComparison:
    """Compare report `b` with report `a`, both a `report.json` or the folder of one.

    Each row that both have gets the ratio b / a of throughput, p50 and p99, with intervals that
    hold together. `fail_on_regression`: 0.05 makes a figure that is certainly slower by more than
    5 % a regression; see `ReportComparison.raise_if_slower`. Raises BadInput for what is no report,
    and where machine, clocks, threads, versions or inputs differ or a report is not valid, naming
    each reason.
    """
    from deploykit.measure.report.compare import compare_runs
    from deploykit.measure.report.report import read

    bound = fail_on_regression
    if bound is not None and not 0 <= bound < 1:
        raise BadInput(f"`fail_on_regression` must be 0 or more and below 100 %, got {bound:g}")
    return compare_runs(read(Path(a)), read(Path(b)), (str(a), str(b)), bound)
