from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from deploykit.benchmarking.timing import Setup, Timing, order, sweep, time_setups
from deploykit.core.errors import BadInput
from deploykit.core.evidence import Interval
from deploykit.core.tensors import TensorSpec
from deploykit.engines.data.samples import random_feeds
from deploykit.evaluation.statistics import ratio
from tests.support.fake_engine import FakeEngine
from tests.support.measure.virtual_time import QUICK, Bench, Timed


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_an_engine_of_five_milliseconds_measures_five_milliseconds(bench: Bench) -> None:
    (point,) = bench.sweep(bench.setup("A", 0.005))
    assert point.latency.p50_ms == Interval(5.0, 5.0, 5.0)
    assert point.latency.max_ms == 5.0
    assert point.throughput_per_s.value == pytest.approx(4 / 0.005)
    assert point.round_rates == pytest.approx([800, 800])
    assert point.samples == 200
    assert point.duration_s == pytest.approx(1.0)


def test_throughput_is_rows_over_time_even_when_calls_overrun_the_block(bench: Bench) -> None:
    (point,) = bench.sweep(bench.setup("A", 0.35))  # two calls fit into 0.5 s: the second overruns
    assert point.samples == 4
    assert point.duration_s == pytest.approx(1.4)
    assert point.throughput_per_s.value == pytest.approx(4 / 0.35)


def test_a_call_longer_than_its_block_is_timed_once_a_round(bench: Bench) -> None:
    (point,) = bench.sweep(bench.setup("A", 10.0), timing=Timing(0.0, 1.0, 3))
    assert point.samples == 3
    assert point.latency.p50_ms is None


def test_setups_take_turns_forwards_and_backwards(bench: Bench) -> None:
    setups = [bench.setup(label) for label in "ABC"]
    bench.sweep(*setups, timing=Timing(warmup_s=0.0, seconds=1.0, rounds=4))
    assert bench.order == "ACBCABACAB"  # ACB BCA BAC CAB, where neighbours meet joined


@pytest.mark.parametrize("count", range(1, 8))
def test_no_setup_has_a_place_or_a_predecessor_more_often_than_another(count: int) -> None:
    turns = [order(count, turn) for turn in range(2 * count)]
    for turn in turns:
        assert sorted(turn) == list(range(count))
    assert {(at, each) for turn in turns for at, each in enumerate(turn)} == {
        (at, each) for at in range(count) for each in range(count)
    }
    places = Counter((at, each) for turn in turns for at, each in enumerate(turn))
    assert set(places.values()) == {2}
    followed = Counter(pair for turn in turns for pair in pairwise(turn))
    assert set(followed.values()) <= {2}
    assert len(followed) == count * (count - 1)
    for forth, back in zip(turns[::2], turns[1::2], strict=True):
        assert forth == back[::-1]  # so that a drift over the two hits all equally


def test_each_process_opens_and_warms_up_in_another_order(bench: Bench) -> None:
    setups = [bench.setup(label) for label in "AB"]
    for number, expected in ((0, "AB"), (1, "BA")):
        bench.engines.clear()
        bench.journal.clear()
        timing = Timing(warmup_s=1.0, seconds=1.0, rounds=2)
        found = time_setups(setups, [4], timing, bench.feeds, clock=bench.clock, number=number)
        assert "".join(engine.label for engine in bench.engines) == expected
        assert bench.order[:2] == expected
        assert [each.setup.label for each in found] == ["A", "B"]


def test_drift_affects_all_setups_equally(bench: Bench) -> None:
    setups = [
        bench.setup(label, lambda _: 0.005 * (1 + bench.clock.now_ns / 1e9)) for label in "AB"
    ]
    a, b = bench.sweep(*setups, timing=Timing(warmup_s=0.0, seconds=10.0, rounds=10))
    assert a.round_rates[0] > 5 * a.round_rates[-1]
    interval = ratio(a.round_rates, b.round_rates)
    assert interval.low < 1 < interval.high
    assert interval.value == pytest.approx(1, abs=0.05)


def test_points_come_by_batch_then_in_the_setups_order(bench: Bench) -> None:
    points = bench.sweep(bench.setup("A"), bench.setup("B"), batches=(8, 2))
    assert [(p.batch, p.label) for p in points] == [(8, "A"), (8, "B"), (2, "A"), (2, "B")]


def test_long_calls_are_timed_in_five_rounds(bench: Bench) -> None:
    timing = Timing(1.0, 5.0)
    setups = bench.setup("A", 0.1), bench.setup("B", 0.2)
    assert [point.rounds for point in bench.sweep(*setups, timing=timing)] == [5, 5]
    assert [point.rounds for point in bench.sweep(setups[0], timing=timing)] == [25]


@pytest.mark.parametrize(
    ("seconds", "longest_s", "rounds"),
    [
        (3.0, 1e-4, 60),
        (60.0, 1e-4, 60),
        (2.0, 1e-4, 40),
        (0.5, 1e-4, 20),
        (3.0, 0.05, 30),
        (3.0, 0.075, 20),
        (3.0, 0.076, 5),
    ],
)
def test_rounds_are_as_many_as_fit_at_most_60(
    seconds: float, longest_s: float, rounds: int
) -> None:
    assert Timing(1.0, seconds).rounds_for(longest_s) == rounds
    assert Timing(1.0, seconds, rounds=4).rounds_for(longest_s) == 4


def test_each_round_starts_untimed_as_the_others_cooled_the_caches(bench: Bench) -> None:
    a, b = bench.setup("A"), bench.setup("B")

    def after_other(call: int) -> float:
        return 1.0 if bench.journal[-1:] != ["A"] else 0.005

    a = replace(a, engines=bench.setup("A", after_other).engines)
    point, _ = bench.sweep(a, b)
    assert point.latency.max_ms == 5.0


def test_sessions_run_at_once_and_their_rows_add_up(bench: Bench) -> None:
    (point,) = bench.sweep(bench.setup("A", 0.005, sessions=3))
    assert len(bench.engines) == 3
    assert point.throughput_per_s.value == pytest.approx(3 * 800)
    assert point.latency.p50_ms == Interval(5.0, 5.0, 5.0)
    assert point.samples == 3 * 200
    assert point.sessions == 3


def test_inputs_are_made_once_per_batch_and_shared(bench: Bench) -> None:
    bench.sweep(bench.setup("A"), bench.setup("B"), batches=(1, 2))
    assert bench.fed == [1, 2]
    assert {size for engine in bench.engines for size in engine.batches} == {1, 2}


def test_inputs_of_another_size_than_asked_are_refused(bench: Bench) -> None:
    three = random_feeds(FakeEngine().inputs, {"N": 3})
    with pytest.raises(BadInput, match="made for batch 4 hold 3 rows"):
        sweep([bench.setup("A")], [4], QUICK, lambda _: three)


def test_a_setup_is_left_out_above_its_largest_batch(bench: Bench) -> None:
    points = bench.sweep(bench.setup("A", max_batch=2), bench.setup("B"), batches=(2, 4))
    assert [(p.batch, p.label) for p in points] == [(2, "A"), (2, "B"), (4, "B")]


def test_batches_that_no_engine_takes_are_refused(bench: Bench) -> None:
    with pytest.raises(BadInput, match="no engine takes a batch of 4") as caught:
        bench.sweep(bench.setup("A", max_batch=2), batches=(8, 4))
    assert caught.value.hint == "the largest is 2"


def test_a_fixed_batch_is_not_timed_as_another(bench: Bench) -> None:
    setup = bench.setup("A")

    def fixed() -> Timed:
        engine = setup.engines()
        assert isinstance(engine, Timed)
        engine.inputs = (TensorSpec("x", "float32", (8, 4)),)
        return engine

    setups, eight = [replace(setup, engines=fixed)], random_feeds(FakeEngine().inputs, {"N": 8})
    with pytest.raises(
        BadInput, match=r"A: cannot run batch 4: its input is fixed, x:float32\[8"
    ) as e:
        sweep(setups, [4], QUICK, lambda _: eight, clock=bench.clock)
    assert e.value.hint.startswith("`batches` 8, or export")
    assert sweep(setups, [8], QUICK, lambda _: eight, clock=bench.clock)[0].batch == 8


def test_engines_are_closed_at_the_end(bench: Bench) -> None:
    bench.sweep(bench.setup("A", sessions=2), bench.setup("B"))
    assert [engine.closed for engine in bench.engines] == [True] * 3


def failing(error: type[BaseException], at: int) -> Callable[[int], float]:
    def latency_s(call: int) -> float:
        if call == at:
            raise error("stop here")
        return 0.005

    return latency_s


@pytest.mark.parametrize("sessions", [1, 3])
@pytest.mark.parametrize("error", [BadInput, KeyboardInterrupt, ZeroDivisionError])
def test_engines_are_closed_and_threads_gone_when_a_call_fails(
    bench: Bench, error: type[BaseException], sessions: int
) -> None:
    before = set(threading.enumerate())
    with pytest.raises(error, match="stop here"):
        bench.sweep(bench.setup("A", failing(error, at=30), sessions=sessions), bench.setup("B"))
    assert [engine.closed for engine in bench.engines] == [True] * (sessions + 1)
    assert set(threading.enumerate()) <= before


def test_engines_already_open_are_closed_when_another_does_not_open(bench: Bench) -> None:
    def broken() -> FakeEngine:
        raise BadInput("no such file")

    with pytest.raises(BadInput, match="no such file"):
        bench.sweep(bench.setup("A", sessions=2), Setup("B", broken))
    assert [engine.closed for engine in bench.engines] == [True, True]


def test_progress_rises_to_one_and_names_the_step(bench: Bench) -> None:
    reported: list[tuple[str, float]] = []
    bench.sweep(
        bench.setup("A"),
        bench.setup("B"),
        timing=Timing(warmup_s=1.0, seconds=1.0, rounds=2),
        on_progress=lambda what, share: reported.append((what, share)),
    )
    assert reported == [
        ("A, batch 4: warm-up", 0.0),
        ("B, batch 4: warm-up", 0.25),
        ("A, batch 4: round 1", 0.5),
        ("B, batch 4: round 1", 0.625),
        ("B, batch 4: round 2", 0.75),
        ("A, batch 4: round 2", 0.875),
        ("done", 1.0),
    ]


@pytest.mark.parametrize("batches", [(), (0, 1), (1, 1)])
def test_batches_that_make_no_sense_open_nothing(bench: Bench, batches: tuple[int, ...]) -> None:
    with pytest.raises(BadInput, match="`batches` must be"):
        bench.sweep(bench.setup("A"), batches=batches)
    assert bench.engines == []


def test_a_point_says_what_was_timed_and_goes_into_json(bench: Bench) -> None:
    (point,) = bench.sweep(bench.setup("A"), timing=Timing(1.0, 1.0, 2))
    document = json.loads(json.dumps(point.to_dict(), allow_nan=False))
    latency, rate = document.pop("latency"), document.pop("throughput_per_s")
    assert document.pop("round_rates") == pytest.approx([800, 800])
    assert document.pop("duration_s") == pytest.approx(1.0)
    assert sum(document.pop("histogram")["counts"]) == 200
    assert latency["p99_ms"] is None
    assert rate["value"] == pytest.approx(800)
    assert document == {
        "label": "A",
        "precision": "fp32",
        "device": "cpu",
        "runtime": "fake",
        "scenario": "closed-loop",
        "batch": 4,
        "sessions": 1,
        "threads": 1,
        "samples": 200,
        "rounds": 2,
        "note": "",
        "shapes": {"x": [4, 4]},
        "marks": [],
        "processes": 1,
        "settings": "",
        "compute": None,
        "options": {},
    }


def test_the_setup_may_name_the_device_better_than_the_engine(bench: Bench) -> None:
    (point,) = bench.sweep(replace(bench.setup("A"), device="cuda:0"))
    assert point.device == "cuda:0"
