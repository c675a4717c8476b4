"""Put a running server under load and measure how it answers."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from deploykit.core.arguments import checked
from deploykit.core.errors import BadInput
from deploykit.core.evidence import Gate
from deploykit.core.files import StrPath, check_readable
from deploykit.core.machine import now, provenance, this_machine
from deploykit.evaluation.artefacts import Progress
from deploykit.evaluation.outputs import claim_report
from deploykit.loadtest.bodies import Bodies, Body
from deploykit.loadtest.check import one_line
from deploykit.loadtest.generator import run_load
from deploykit.pipelines.file import input_files, read_answers
from deploykit.reporting import report as reports
from deploykit.reporting.load_result import LoadResult
from deploykit.reporting.verdict import verdict

# Read what a load test sends to /predict: files, sentences, or files with their answers.

MOST_BODIES = 256  # different requests
MOST_BYTES = 64 << 20  # of all
_TYPES = {
    **dict.fromkeys((".jpg", ".jpeg"), "image/jpeg"),
    **{f".{kind}": f"image/{kind}" for kind in ("png", "webp")},
    ".txt": "text/plain",
    ".json": "application/json",
}
_TENSORS = (".npz", ".npy")
_SHOWN = 20  # characters of a sentence, in the report


def find_bodies(
    data: Path | None, text: Sequence[str], expect: Path | None
) -> Callable[[], Bodies] | None:
    """What reads them, once they are wanted; None for arrays, and where nothing is given.

    Raises BadInput for two of the three.
    """
    if text and (data or expect):
        raise BadInput("`text` and `data` or `expect` exclude each other")
    given = [each for each in (data, expect) if each and each.suffix not in _TENSORS]
    return partial(_read_all, data, text, expect) if text or given else None


def _read_all(data: Path | None, text: Sequence[str], expect: Path | None) -> Bodies:

    if expect is not None:
        lines = read_answers(expect)[:MOST_BODIES]
        return Bodies([_read(file) for file, _ in lines], [answer for _, answer in lines])
    found = [Body(one_line(each[:_SHOWN]), "text/plain", each.encode()) for each in text]
    size = 0
    for file in [] if data is None else input_files([data]):
        size += file.stat().st_size
        if found and (size > MOST_BYTES or len(found) >= MOST_BODIES):
            break
        found.append(_read(file))
    return Bodies(found)


def _read(file: Path) -> Body:

    if check_readable(file).stat().st_size > MOST_BYTES:
        raise BadInput(f"{file}: is above the {MOST_BYTES:,} bytes that can be sent")
    kind = _TYPES.get(file.suffix.lower(), "application/octet-stream")
    return Body(file.name, kind, file.read_bytes())


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

    failed = {why.partition(":")[0]: why for why in result.unmet}
    report = reports.Report(
        title=f"{result.model} under load",
        created=now(),
        command=command,
        machine=this_machine().to_dict(),
        provenance=provenance(),
        gates=tuple(
            Gate(f"fail on {text}", text not in failed, failed.get(text, "")) for text in conditions
        ),
        serving=(result,),
    )
    reports.write(replace(report, verdict=verdict(report)), folder)


# Conditions under which a load test fails: "p99>20ms, errors>0, throughput<500".

_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_MS: Mapping[str, float] = {"ms": 1.0, "s": 1e3, "us": 1e-3}
_PERCENTILES, _RATES = ("p50", "p90", "p99", "max"), ("throughput", "goodput")
_COUNTS = ("errors", "refused", "expired", "failed", "unsent")
_CONDITION = re.compile(r"\s*([a-z0-9]+)\s*(>=|<=|>|<)\s*([0-9]*\.?[0-9]+)\s*([a-z/%]*)\s*")


@dataclass(frozen=True)
class Condition:
    """`bound`: in ms for latencies, per second for rates, requests or a share of them."""

    text: str
    metric: str
    operator: str
    bound: float
    is_share: bool = False

    def failure(self, result: LoadResult) -> str | None:
        """Why the run fails by it: it holds, or nobody can tell. None: the run does not."""
        value = self._value(result)
        if value is None:
            return f"{self.text}: {self.metric} is not known"
        if not _OPERATORS[self.operator](value, self.bound):
            return None
        if self.is_share:
            return f"{self.text}: {value:.2%}"
        unit = " ms" if self.metric in _PERCENTILES else "/s" if self.metric in _RATES else ""
        shown = f"{value:,.2f}" if unit else f"{value:,.0f}"
        return f"{self.text}: {shown}{unit}"

    def _value(self, result: LoadResult) -> float | None:
        """None where it is not known. Percentiles that no answer reached are infinite."""
        if self.metric in _COUNTS:
            errors = result.failed + result.expired + result.unsent
            found = errors if self.metric == "errors" else int(getattr(result, self.metric))
            return found / max(result.sent + result.unsent, 1) if self.is_share else float(found)
        if self.metric in _RATES:
            rate = result.achieved_per_s if self.metric == "throughput" else result.goodput_per_s
            return rate.value if rate else None
        if result.latency is None:
            return math.inf
        if self.metric == "max":
            return math.inf if result.latency.lost else result.latency.max_ms
        found_ms = getattr(result.latency, f"{self.metric}_ms")
        if found_ms is None:
            return None if f"{self.metric}_ms" in result.latency.needs else math.inf
        return float(found_ms.value)


def parse_conditions(text: str) -> tuple[Condition, ...]:
    """Read conditions with commas between them. Raises BadInput."""
    return tuple(_parse(part) for part in text.split(","))


def _parse(text: str) -> Condition:
    match = _CONDITION.fullmatch(text)
    metrics = (*_PERCENTILES, *_RATES, *_COUNTS)
    hint = f"such as 'p99>20ms' or 'errors>1%'; metrics are {', '.join(metrics)}"
    if match is None or match[1] not in metrics:
        raise BadInput(f"`fail_on`: '{text.strip()}' is not a condition", hint=hint)
    metric, compare, number, unit = match.groups()
    wanted = tuple(_MS) if metric in _PERCENTILES else ("/s", "")
    wanted = ("%", "") if metric in _COUNTS else wanted
    if unit not in wanted:
        units = " or ".join(each or "no unit" for each in wanted)
        raise BadInput(f"`fail_on`: '{text.strip()}' needs {units}", hint=hint)
    bound = float(number) * _MS.get(unit, 0.01 if unit == "%" else 1.0)
    return Condition(f"{metric}{compare}{number}{unit}", metric, compare, bound, unit == "%")


def apply_conditions(result: LoadResult, conditions: tuple[Condition, ...]) -> LoadResult:
    """The result with what it fails by.

    A run that the generator limited, or other processes disturbed, fails: it proves nothing.

    The conditions hold for the values, not for the ends of their intervals.
    """
    if result.limits or result.marks:
        limited = [f"the generator was the limit: {why}" for why in result.limits[:1]]
        why = "; ".join([*limited, *result.marks])
        return replace(
            result, unmet=tuple(f"{each.text}: not known, as {why}" for each in conditions)
        )
    failures = (each.failure(result) for each in conditions)
    return replace(result, unmet=tuple(why for why in failures if why is not None))
