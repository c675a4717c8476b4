"""Put a running server under load and measure how it answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.api.artefacts import Progress
from deploykit.api.bench import now
from deploykit.api.outputs import claim_report
from deploykit.core.machine import this_machine
from deploykit.core.paths import StrPath

if TYPE_CHECKING:
    from deploykit.measure.load.generator import LoadResult


def load_test(
    url: str,
    *,
    model: str | None = None,
    rate: float | None = None,
    concurrency: int | None = None,
    duration_s: float = 10.0,
    batch: int = 1,
    data: StrPath | None = None,
    out: StrPath | None = None,
    force: bool = False,
    command: str = "",
    on_progress: Progress | None = None,
) -> LoadResult:
    """Load a running server: `rate` requests per second (open loop) or `concurrency` of them.

    `data`: the inputs to send, an .npz, a folder or golden samples; by default random ones.
    """
    from deploykit.measure.load.generator import run_load
    from deploykit.measure.report import report as reports
    from deploykit.measure.report.verdict import verdict

    folder = claim_report(out, (data,), force=force) if out is not None else None
    result = run_load(
        url,
        model=model,
        rate=rate,
        concurrency=concurrency,
        duration_s=duration_s,
        batch=batch,
        data=Path(data) if data is not None else None,
        on_progress=on_progress,
    )
    if folder is not None:
        report = reports.Report(
            title=f"{result.model} under load",
            created=now(),
            command=command,
            machine=this_machine().to_dict(),
            serving=(result,),
        )
        reports.write(replace(report, verdict=verdict(report)), folder)
    return result
