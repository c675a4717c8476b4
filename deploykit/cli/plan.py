"""`deploykit plan`: predict a model's needs on each target, and show them as tables and lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.cli import output
from deploykit.cli.commands import JSON, api_arguments, described
from deploykit.cli.output import Part, Progress
from deploykit.cli.prove import axis_sizes, sizes
from deploykit.cli.tables import figure, size
from deploykit.evaluation.formatting import Table

if TYPE_CHECKING:
    from deploykit.planning.plan import Planned, TargetPlan
    from deploykit.planning.predict import Prediction

_MUCH = 0.5  # share of a core
_ENDS = ("limit", "memory", "fits", "joules at most")  # the last columns


@described(f"""
MODEL                  A .onnx file; its weights are not read
--profile PROFILE      A hardware target; may be repeated [all]
--batches N,N,...      Batch sizes
--axis NAME=SIZE       Size of another dynamic axis; may be repeated
--slo-ms MS            The latency to meet: name the targets that do; exit 1 if none does
--rate N               Requests per second: show how many replicas carry it with p99 within --slo-ms
{JSON}""")
def plan(
    model: Path,
    profiles: list[str] | None = None,
    batches: str = "1,8,32",
    axes: list[str] | None = None,
    slo_ms: float | None = None,
    rate_per_s: float | None = None,
    as_json: bool = False,
) -> None:
    """Predict memory, latency and throughput on each hardware target.

    Example: deploykit plan model.onnx --profile l4 --profile cpu --slo-ms 20
    """
    given = api_arguments(locals()) | {"profiles": profiles or ()}
    given |= {"batches": sizes("batches", batches)}
    given |= {"axes": axis_sizes("axes", ",".join(axes or ()))}
    from deploykit.planning import plan as planning

    with Progress("plan") as progress:
        result = planning.plan(**given, on_progress=progress)
    output.show(result, lines(result), as_json=as_json)
    result.raise_if_none_meets()


def lines(result: Planned) -> list[Part]:
    axes = ", ".join(f"{name}={count}" for name, count in result.axes.items())
    found: list[Part] = [
        f"{result.model}: {result.flops:,} operations at batch {result.batches[0]}, "
        f"{result.parameters:,} weights in {size(result.weight_bytes)}" + f"; {axes}" * bool(axes),
        "",
    ]
    answers = [line for target in result.targets for line in _answers(target, result)]
    found += [*answers, ""] if answers else []
    if len(result.targets) <= 3:  # more targets than this get one line each
        for target in result.targets:
            found += [*_in_full(target), ""]
    else:
        found += [_overview(result), ""]
    return found + [f"note: {text}" for text in result.notes]


def _in_full(target: TargetPlan) -> list[Part]:
    """Show every precision at every batch."""
    title = f"{target.profile}: {target.summary}"
    if target.why:
        return [f"{title}: nothing predicted: {target.why}"]
    rows = [
        (
            each.precision,
            str(each.batch),
            figure(each.latency_ms),
            figure(each.throughput_per_s),
            f"{each.limit} {each.shares[each.limit]:.0%}",
            size(each.memory_bytes),
            _fits(each),
            figure(each.joules),
        )
        for each in target.predictions
    ]
    header = ("precision", "batch", "ms", "inferences/s", *_ENDS)
    return [f"{title} ({target.basis})", Table("", header, rows)]


def _overview(result: Planned) -> Table:
    """Return a line for each target with its fastest precision."""
    rows: list[tuple[str, ...]] = []
    for target in result.targets:
        if not target.predictions:
            rows.append((target.profile, *["-"] * 7, target.why))
            continue
        fastest = min(target.predictions, key=lambda each: each.latency_ms)
        most = max(target.predictions, key=lambda each: each.throughput_per_s or 0.0)
        rows.append(
            (
                target.profile,
                fastest.precision,
                f"{figure(fastest.latency_ms)} ({fastest.batch})",
                f"{figure(most.throughput_per_s)} ({most.batch})",
                fastest.limit,
                size(most.memory_bytes),
                _fits(most),
                figure(most.joules),
                "",
            )
        )
    header = ("profile", "precision", "ms (batch)", "inferences/s (batch)", *_ENDS, "why not")
    return Table("", header, rows, (0, 1, 8))


def _answers(target: TargetPlan, result: Planned) -> Sequence[str]:
    """Return lines on the requested latency and rate."""
    found = []
    if result.slo_ms is not None and target.predictions:
        best = target.best
        text = (
            f"meets {figure(result.slo_ms)} ms: {best.precision} at batch {best.batch}, "
            f"{figure(best.latency_ms)} ms, {figure(best.throughput_per_s)}/s"
            if best
            else f"does not meet {figure(result.slo_ms)} ms"
        )
        found.append(f"{target.profile} {text}")
    load = target.capacity
    if load is not None and load.replicas:
        plural, busy = "" if load.replicas == 1 else "s", load.server_busy
        own = f" ({busy:.0%} of a core is the server's own work)" * (busy > _MUCH)
        found.append(
            f"{target.profile} carries {figure(load.rate_per_s)}/s with {load.replicas:,} "
            f"replica{plural} of at most {figure(load.rate_each_per_s)}/s in {load.precision} with "
            f"batches of up to {load.max_batch}, p99 {figure(load.p99_ms)} ms{own}"
        )
    elif load is not None:
        why = f"carries no rate within {figure(load.bound_ms)} ms: {load.why}"
        found.append(f"{target.profile} {why}")
    return found


def _fits(each: Prediction) -> str:
    return {True: "yes", False: "NO", None: "not known"}[each.fits]
