"""What is made of a run's records: which requests count, losses, and the generator's own faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deploykit.core.errors import BadInput, GateFailed
from deploykit.loadtest.client import Load, RunRecord
from deploykit.loadtest.load import apply_conditions, parse_conditions, summarise
from deploykit.loadtest.wire import NO_ANSWER, UNSENT
from deploykit.reporting.report import LoadResult, Report
from deploykit.reporting.verdict import verdict

OPEN, CLOSED = Load(100.0, 1024, 0.0, 10.0), Load(None, 1, 0.0, 10.0)


def finished(statuses: dict[int, int] | None = None, taken_s: float = 0.002) -> RunRecord:
    """1000 requests, one each 10 ms, answered after `taken_s`; `statuses` of some."""
    found = RunRecord(opened=1, busy=0.1)
    for i in range(1000):
        found.starts_s.append(i * 0.01)
        found.ends_s.append(i * 0.01 + taken_s)
        found.statuses.append((statuses or {}).get(i, 200))
        found.send_lags_s.append(0.00005)
        found.read_lags_s.append(0.00005)
        found.reads.append(1)
    return found


def result(load: Load, *outcomes: RunRecord) -> LoadResult:
    about = {"batch": 1, "seed": 0, "same_machine": True}
    return LoadResult("http://h", "m", **about, **summarise(load, outcomes))  # type: ignore[arg-type]


def percentile_ms(found: LoadResult, name: str) -> float | None:
    """In ms, or None where losses leave none; `needs` is of those with too few samples."""
    assert found.latency is not None
    assert name not in found.latency.needs
    value = getattr(found.latency, name)
    return value and value.value


def test_latency_is_of_the_measured_time_and_rate_of_answers_in_it() -> None:
    found = result(replace(OPEN, warmup_s=2.0, duration_s=6.0), finished({300: NO_ANSWER}))
    assert (found.sent, found.ok, found.failed) == (800, 799, 1)
    assert percentile_ms(found, "p50_ms") == pytest.approx(2.0)
    assert found.achieved_per_s.value == pytest.approx(599 / 6)
    # JSON takes its figures, whatever numpy made of them
    assert all(not isinstance(value, np.generic) for value in found.to_dict().values())


@pytest.mark.parametrize("load", [OPEN, CLOSED], ids=["open", "closed"])
def test_what_hung_since_the_warm_up_counts(load: Load) -> None:
    found = RunRecord(opened=2)
    for start_s, end_s, status in ((0.1, 0.2, 200), (0.5, 15.0, NO_ANSWER), (3.0, 3.1, 200)):
        found.starts_s.append(start_s)
        found.ends_s.append(end_s)
        found.statuses.append(status)
    found = result(replace(load, warmup_s=1.0, duration_s=9.0), found)
    assert (found.sent, found.ok, found.failed) == (2, 1, 1)


def test_losses_are_infinitely_late_and_refusals_apart() -> None:
    lost = {i: (500, 504, NO_ANSWER, UNSENT)[i // 50 % 4] for i in range(0, 1000, 50)}  # 2 %
    refused = {i: (429, 503)[i % 2] for i in range(7, 1000, 10)}
    found = result(OPEN, finished({**refused, **lost}))
    assert found.latency is not None
    assert percentile_ms(found, "p90_ms") is not None
    assert percentile_ms(found, "p99_ms") is None
    assert (found.latency.samples, found.latency.lost) == (880, 20)
    assert (found.ok, found.refused, found.expired, found.failed) == (880, 100, 5, 10)
    assert (found.unsent, found.sent) == (5, 995)
    assert found.latency.max_ms == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("lost", "none"),
    [
        ([i for i in range(1000) if i % 5], ["p50_ms", "p90_ms", "p99_ms"]),
        (range(3, 1000, 112), ["p99_ms"]),  # 0.9 %: the value is an answer's, its bound may not be
    ],
    ids=["most", "0.9 %"],
)
def test_a_percentile_that_losses_may_reach_is_not_given(lost: Any, none: list[str]) -> None:
    found = result(OPEN, finished(dict.fromkeys(lost, 500)))
    assert found.failed == len(lost)
    names = ("p50_ms", "p90_ms", "p99_ms")
    assert [name for name in names if percentile_ms(found, name) is None] == none


def test_of_several_processes_percentiles_are_of_all_requests() -> None:
    found = result(OPEN, finished(taken_s=0.002), finished(taken_s=0.006))
    assert found.latency is not None
    assert (found.sent, found.latency.samples, found.processes) == (2000, 2000, 2)
    assert percentile_ms(found, "p50_ms") == pytest.approx(2.0)
    assert percentile_ms(found, "p90_ms") == pytest.approx(6.0)
    assert found.achieved_per_s.value == pytest.approx(200, rel=0.01)


def with_lags(what: str, lags_s: list[float]) -> RunRecord:
    found = finished()
    values = getattr(found, what)
    for i, lag_s in enumerate(lags_s):
        values[-1 - i] = lag_s
    return found


@pytest.mark.parametrize(
    ("load", "fault", "reason"),
    [
        (OPEN, with_lags("send_lags_s", [0.0003] * 30), "late: p99 0.30 ms, where 0.2 ms"),
        (OPEN, with_lags("read_lags_s", [0.05] * 30), "it read answers late: p99 50.00 ms"),
        (CLOSED, with_lags("read_lags_s", [0.05] * 30), "it read answers late"),
        (CLOSED, replace(finished(), behind_s=2.0), "connections waited for it 20% of the time"),
        (CLOSED, replace(finished(), busy=0.97), "it used 97% of its core"),
        (OPEN, replace(finished(), limit="Too many open files"), "no more than 1 connections: Too"),
        (OPEN, replace(finished(), waited=40), "40 requests waited for one of its connections"),
    ],
)
def test_a_generator_that_was_the_limit_says_why(load: Load, fault: RunRecord, reason: str) -> None:
    found = result(load, fault)
    assert found.generator_limited
    assert reason in "; ".join(found.limits)


@pytest.mark.parametrize("load", [OPEN, CLOSED], ids=["open", "closed"])
@pytest.mark.parametrize(
    "good",
    [
        finished(),
        with_lags("send_lags_s", [0.5] * 5),
        with_lags("read_lags_s", [0.00015] * 900),
        replace(finished(taken_s=0.05), behind_s=0.5, busy=0.8),
    ],
    ids=["on time", "late five times", "under 0.2 ms", "busy"],
)
def test_a_generator_on_time_is_not_marked(load: Load, good: RunRecord) -> None:
    found = result(load, good)
    assert (found.limits, found.generator_limited) == ((), False)


def test_connections_that_all_wait_for_the_server_are_noted_and_no_fault() -> None:
    found = result(replace(OPEN, connections=8), replace(finished(), waited=40, opened=8))
    assert found.limits == ()
    assert "40 requests were due while all 8 connections" in found.notes[0]
    assert "3 requests were sent again" in result(OPEN, replace(finished(), resent=3)).notes[0]


@pytest.mark.parametrize(("grows_s", "kept"), [(0.0, True), (0.01, True), (0.1, False)])
def test_an_open_loop_that_piles_up_was_not_sustained(grows_s: float, kept: bool) -> None:
    """Each answer takes that share of its start longer: requests pile up by 1 in 10 at 0.1."""
    found = finished(taken_s=0.05)
    for i, start_s in enumerate(found.starts_s):
        found.ends_s[i] += start_s * grows_s
    assert result(OPEN, found).sustained is kept
    assert kept or "did not sustain 100 requests/s" in " ".join(result(OPEN, found).notes)
    assert result(CLOSED, found).sustained is None


def test_requests_whose_connection_broke_do_not_pile_up() -> None:
    found = result(OPEN, finished(dict.fromkeys(range(1000), NO_ANSWER)))
    assert (found.failed, found.sustained, found.notes) == (1000, True, ())


def test_goodput_is_of_answers_in_time() -> None:
    found = finished(taken_s=0.002)
    for i in range(0, 1000, 4):
        found.ends_s[i] += 0.05
    good = result(replace(OPEN, slo_ms=10.0), found)
    assert good.goodput_per_s is not None
    assert good.goodput_per_s.value == pytest.approx(75.0)
    assert good.achieved_per_s.value == pytest.approx(100.0, abs=1)


@pytest.mark.parametrize(
    ("text", "fails"),
    [
        ("p99>20ms, errors>0", []),
        ("p99>1ms", ["p99>1ms: 2"]),
        ("p50<1ms,max>1ms", ["max>1ms: 2"]),
        ("throughput<500/s,goodput<1", ["throughput<500/s: 100 /s", "goodput<1: goodput is not"]),
        ("errors>0.5%", ["errors>0.5%: 1 %"]),
        ("errors>1%,failed>=10,refused>0", ["failed>=10: 10"]),
    ],
)
def test_conditions_fail_a_run(text: str, fails: list[str]) -> None:
    lost = dict.fromkeys(range(3, 10), 500) | dict.fromkeys(range(3), NO_ANSWER)
    outcome = finished(lost if "errors>" in text and "p99" not in text else None)
    found = apply_conditions(result(OPEN, outcome), parse_conditions(text))
    assert len(found.unmet) == len(fails)
    for got, want in zip(found.unmet, fails, strict=True):
        assert got.startswith(want)
    if fails:
        with pytest.raises(GateFailed, match=fails[0].split(":")[0].replace(".", r"\.")):
            found.raise_if_unmet()
    else:
        found.raise_if_unmet()


def unmet(found: LoadResult, text: str = "p99>1000s") -> str:
    """Why the only condition does not hold; "" where it does."""
    return " ".join(apply_conditions(found, parse_conditions(text)).unmet)


def test_a_percentile_that_is_lost_or_unknown_fails() -> None:
    lost = result(OPEN, finished(dict.fromkeys(range(0, 1000, 50), 500)))
    assert unmet(lost) == "p99>1000s: inf s"
    assert lost.latency is not None
    few: dict[str, Any] = {"needs": {"p99_ms": 368}, "p99_ms": None}
    unknown = replace(lost, latency=replace(lost.latency, **few))
    assert unmet(unknown) == "p99>1000s: p99 is not known"


def test_a_load_that_other_work_or_the_generator_limited_meets_no_condition() -> None:
    clean = result(OPEN, finished())
    assert unmet(clean) == ""
    marked = replace(clean, marks=("other processes ran meanwhile, most of all make (process 7)",))
    (sentence, *_) = verdict(Report("", "", "", serving=(marked,)))
    assert "there is no verdict: other processes ran meanwhile, most of all make" in sentence
    assert unmet(marked).startswith("p99>1000s: not known, as other processes ran meanwhile")
    limited = result(CLOSED, replace(finished(), busy=0.99))
    why = "not known, as the generator was the limit: it used 99% of its core"
    assert unmet(limited) == f"p99>1000s: {why}"


@pytest.mark.parametrize(
    "text",
    ["", "p99", "p99>20", "p98>1ms", "p99=1ms", "errors>1ms", "throughput<5%", "p99>-1ms", ","],
)
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="`fail_on`: "):
        parse_conditions(text)
