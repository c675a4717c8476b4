"""The verdict of a report: what comes first, what is compared with what, and what is not said."""

from __future__ import annotations

from dataclasses import replace

from deploykit.core.evidence import Gate, Interval
from deploykit.evaluation.latency import Latency
from deploykit.reporting.points import Point
from deploykit.reporting.report import NotMeasured, Report, speedup
from deploykit.reporting.verdict import verdict


def plain(text: str) -> str:
    return text.replace("\u202f", " ")


def find(report: Report, label: str, batch: int) -> Point:
    return next(p for p in report.points if p.label == label and p.batch == batch)


def test_the_verdict_begins_with_the_ratio_its_interval_and_the_accuracy(report: Report) -> None:
    a, b = find(report, "int8 CPU", 64), find(report, "fp32 CPU (baseline)", 64)
    times = report.speedup(a, b)
    assert (
        times.high - times.low > speedup(a, b).high - speedup(a, b).low
    )  # 21 ratios hold together
    first = plain(verdict(report)[0])
    assert first.startswith(
        f"int8 CPU is {times.value:.2f}× [{times.low:.2f}, {times.high:.2f}] "
        "the fp32 CPU (baseline) at batch 64"
    )
    assert first.endswith("top-1 accuracy drop 0.2 pp (−0.3 to 0.7, n = 540).")


def columns(report: Report, *given: tuple[str, int, int, float]) -> Report:
    """`report` with columns of these labels, sessions, threads and speed-ups."""
    base = [p for p in report.points if p.label == report.baseline]

    def at(point: Point, label: str, sessions: int, threads: int, times: float) -> Point:
        rate = point.throughput_per_s
        rates = tuple(times * each for each in point.round_rates)
        faster = Interval(rate.value * times, rate.low * times, rate.high * times)
        changes = {"label": label, "sessions": sessions, "threads": threads}
        return replace(point, **changes, throughput_per_s=faster, round_rates=rates)  # type: ignore[arg-type]

    points = tuple(at(point, *each) for point in base for each in given)
    return replace(report, baseline="fp32 CPU", points=points, accuracy=(), quick=False)


def test_a_copy_of_the_baseline_is_no_faster_because_it_has_more_sessions(report: Report) -> None:
    both = [("fp32 CPU", 1, 2, 1.0), ("fp32 CPU, 2 sessions", 2, 1, 1.5)]
    copy = [("copy", 1, 2, 1.0), ("copy, 2 sessions", 2, 1, 1.5)]
    first = plain(verdict(columns(report, *both, *copy))[0])
    assert first.startswith(
        "copy, 2 sessions and the baseline fp32 CPU, 2 sessions are practically equal at batch 64"
    )
    assert "each in 2 sessions of 1 thread (1.00× [1.00, 1.00])" in first


def test_like_is_compared_with_like_first_and_then_with_the_fastest(report: Report) -> None:
    both = [("fp32 CPU", 1, 2, 1.0), ("fp32 CPU, 2 sessions", 2, 1, 1.5)]
    first, second = verdict(columns(report, *both, ("int8", 1, 2, 3.0)))[:2]
    assert plain(first).startswith("int8 is 3.00× [3.00, 3.00] the baseline fp32 CPU at batch 64")
    assert "each in 1 session of 2 threads" in first
    assert plain(second).startswith(
        "Against the fastest column of the baseline: int8 is 2.00× [2.00, 2.00] the baseline "
        "fp32 CPU, 2 sessions at batch 64"
    )
    assert "1 session of 2 threads against 2 sessions of 1 thread." in second


def test_a_gpu_is_compared_with_the_fastest_on_the_cpu_whatever_its_precision(
    report: Report,
) -> None:
    cpu = [("fp32 CPU", 1, 2, 1.0), ("int8", 1, 2, 4.0)]
    given = columns(report, *cpu, ("TensorRT", 1, 2, 32.0))
    on_gpu = {"device": "cuda:0", "threads": None}
    points = tuple(replace(p, **on_gpu) if p.label == "TensorRT" else p for p in given.points)  # type: ignore[arg-type]
    first, second = verdict(replace(given, points=points))[:2]
    assert plain(first).startswith("TensorRT is 8.00× [8.00, 8.00] the int8 at batch 64")
    assert plain(second).startswith(
        "Against the fastest column of the baseline: TensorRT is 32.0× [32.0, 32.0] the baseline"
    )


def test_a_gate_that_was_not_met_comes_first(report: Report) -> None:
    failed = replace(report, gates=(*report.gates, Gate("fp16 accuracy", False, "drop 3 pp")))
    assert verdict(failed)[0] == "1 of 3 gates NOT met: fp16 accuracy: drop 3 pp."


def test_no_difference_and_a_difference_of_no_use_are_called_that(report: Report) -> None:
    base = tuple(p for p in report.points if p.label == report.baseline)
    same = tuple(replace(p, label="again") for p in base)
    first = verdict(replace(report, points=base + same))[0]
    assert first.startswith("again and the fp32 CPU (baseline) are practically equal at batch")
    wide = tuple(replace(p, round_rates=p.round_rates[2:] + p.round_rates[:2]) for p in same)
    wide = tuple(replace(p, round_rates=(p.round_rates[0] * 1.1, *p.round_rates[1:])) for p in wide)
    first = verdict(replace(report, points=base + wide))[0]
    assert first.startswith("No difference between again and the fp32 CPU (baseline)")


def test_accuracy_that_was_not_measured_is_stated(report: Report) -> None:
    assert "its accuracy was not measured" in verdict(replace(report, accuracy=()))[0]


def test_the_notes_of_both_points_are_in_the_headline(report: Report) -> None:
    noted = tuple(replace(p, note="did not settle") for p in report.points)
    assert verdict(replace(report, points=noted))[0].count("did not settle") == 1


def test_the_baseline_s_own_best_batch_is_named_where_it_is_another(report: Report) -> None:
    points = tuple(p for p in report.points if p.label == report.baseline or p.batch <= 8)
    second = plain(verdict(replace(report, points=points))[1])
    assert second.startswith("Each at its own best batch: fp32 CPU (baseline)")
    assert "inferences/s at 64, int8 CPU" in second


def test_without_a_baseline_no_ratio_is_named(report: Report) -> None:
    first = verdict(replace(report, baseline=""))[0]
    assert "no baseline was measured" in first
    assert "×" not in first.removeprefix("fp32 CPU, 2 × 1")


def test_a_generator_limited_run_gives_no_figure(report: Report) -> None:
    limited = replace(report.serving[0], generator_limited=True, limits=("it slept", "it hung"))
    sentences = verdict(replace(report, serving=(limited,), points=()))
    assert sentences[0] == (
        "Over HTTP at 32 connections there is no verdict: the load generator was the limit, "
        "not the server (it slept; it hung)."
    )


def test_a_report_without_points_and_loads_says_so(report: Report) -> None:
    assert verdict(replace(report, serving=(), points=()))[0] == "No engine was timed."


def test_losses_and_a_rate_that_was_not_sustained_are_in_the_verdict(report: Report) -> None:
    lost = Latency(900, Interval(1, 1, 1), None, None, 5.0, {"p90_ms": 36}, 100)
    bad = replace(report.serving[2], latency=lost, sustained=False, failed=70, unsent=30)
    sentence = plain(verdict(replace(report, serving=(bad,), points=()))[0])
    assert "p50 1.00 ms, p99 none, as 100 had no good answer" in sentence
    assert "70 failed, 30 never sent of" in sentence
    assert "THE RATE WAS NOT SUSTAINED" in sentence


def test_what_was_served_names_refusals_and_the_shared_machine(report: Report) -> None:
    sentence = plain(next(s for s in verdict(report) if "2\u202f000 requests/s" in s))
    assert "30 refused of 9 970" in sentence
    assert "client and server shared one machine" in sentence


def test_a_server_that_answered_nothing_is_reported_with_its_error(report: Report) -> None:
    dead = replace(report.serving[0], latency=None, ok=0, failed=9, sent=9, errors={"boom": 9})
    text = " ".join(verdict(replace(report, serving=(dead,))))
    assert "no request of 9 had a good answer: boom" in text


def test_quick_and_not_measured_are_stated(report: Report) -> None:
    sentences = verdict(report)
    assert sentences[-1] == "Not measured: GPU (no NVIDIA GPU on this machine)."
    assert sentences[-2].startswith("Timings are short")
    assert not any("quick" in s for s in verdict(replace(report, quick=False)))


def test_what_was_not_measured_for_one_reason_is_listed_with_it_once(report: Report) -> None:
    slow = [NotMeasured(f"OpenVINO {name} on the CPU", "far slower") for name in ("fp32", "int8")]
    last = verdict(replace(report, not_measured=tuple(slow)))[-1]
    assert last == (
        "Not measured: OpenVINO fp32 on the CPU and OpenVINO int8 on the CPU (far slower)."
    )
