"""Put a running server under load and measure how it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.api.arguments import checked
from deploykit.api.artefacts import Progress
from deploykit.api.bench import now
from deploykit.api.load_bodies import find_bodies
from deploykit.api.outputs import claim_report
from deploykit.core.machine import this_machine
from deploykit.core.paths import StrPath
from deploykit.core.provenance import provenance

if TYPE_CHECKING:
    from deploykit.measure.load.result import LoadResult


@checked
def load_test(
    url: str,
    *,
    model: str | None = None,
    rate: float | None = None,
    concurrency: int | None = None,
    duration_s: float = 10.0,
    batch: int = 1,
    processes: int = 1,
    slo_ms: float | None = None,
    fail_on: str | None = None,
    data: StrPath | None = None,
    text: Sequence[str] | None = None,
    expect: StrPath | None = None,
    max_error: float = 1e-3,
    axes: Mapping[str, int] | None = None,
    out: StrPath | None = None,
    force: bool = False,
    command: str = "",
    on_progress: Progress | None = None,
) -> LoadResult:
    """Load a running server: `rate` requests per second (open loop) or `concurrency` of them.

    By default an open loop at half of what a closed loop of 32 connections reaches in 2 s. `data`:
    the inputs to send, an .npz, a folder or golden samples; by default random ones. To a task or a
    pipeline a file, or each of a folder, is sent as it is; `text`: such sentences. `expect`: golden
    samples, or a pipeline's answers as `predict` wrote them (.jsonl): their inputs are sent, and an
    answer that differs by more than `max_error` (max |a-b| / max |a|) has failed. `axes`: sizes of
    axes of any length other than the batch, such as {"T": 128}, or {"axis1": 128, "axis2": 4} where
    there are several. `processes`: generators that share the load. `slo_ms`: also count the answers
    within it, the goodput. `fail_on`: conditions such as "p99>20ms,errors>0"; those that hold are
    in `unmet`, which `raise_if_unmet` turns into GateFailed.
    """
    from deploykit.measure.load.conditions import apply_conditions, parse_conditions
    from deploykit.measure.load.generator import run_load

    inputs, answers = (None if each is None else Path(each) for each in (data, expect))
    bodies = find_bodies(inputs, text or (), answers)
    conditions = parse_conditions(fail_on) if fail_on is not None else ()
    folder = claim_report(out, (data, expect), force=force) if out is not None else None
    result = run_load(
        url,
        model=model,
        rate=rate,
        concurrency=concurrency,
        duration_s=duration_s,
        batch=batch,
        processes=processes,
        slo_ms=slo_ms,
        data=inputs,
        bodies=bodies,
        expect=answers,
        max_error=max_error,
        axes=axes,
        on_progress=on_progress,
    )
    result = apply_conditions(result, conditions)
    if folder is not None:
        _write(result, [each.text for each in conditions], command, folder)
    return result


def _write(result: LoadResult, conditions: Sequence[str], command: str, folder: Path) -> None:
    from deploykit.measure.report import report as reports
    from deploykit.measure.report.verdict import verdict

    failed = {why.partition(":")[0]: why for why in result.unmet}
    report = reports.Report(
        title=f"{result.model} under load",
        created=now(),
        command=command,
        machine=this_machine().to_dict(),
        provenance=provenance(),
        gates=tuple(
            reports.Gate(f"fail on {text}", text not in failed, failed.get(text, ""))
            for text in conditions
        ),
        serving=(result,),
    )
    reports.write(replace(report, verdict=verdict(report)), folder)
