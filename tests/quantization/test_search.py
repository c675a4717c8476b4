"""The search on a made-up network: error adds up over the narrow nodes, and so does the time."""

from __future__ import annotations

import math

import pytest

from deploykit.core.evidence import SearchStep
from deploykit.quantization.search import Budget, Level, Verdict, not_worth, search
from tests.support.graphs.search_network import FAILS, Network, sensitivities


def test_the_narrowest_level_is_kept_as_it_is_where_it_passes() -> None:
    network = Network({"int8": sensitivities(4), "fp16": sensitivities(4)})
    outcome = network.search()
    assert outcome.best is not None
    assert (outcome.best.precision, outcome.best.float32_nodes, outcome.stopped) == ("int8", (), "")
    assert network.evaluated == [("int8", frozenset())]
    assert not network.ranked


def test_only_the_sensitive_nodes_are_kept_in_float32() -> None:
    network = Network({"int8": sensitivities(12, {3: 5.0, 7: 2.0, 9: 0.9})})
    outcome = network.search()
    assert outcome.best is not None
    assert outcome.best.float32_nodes == ("n3", "n7")
    assert outcome.best.model == ("int8", frozenset({"n3", "n7"}))
    assert outcome.best.verdict.drop == pytest.approx(0.9)


@pytest.mark.parametrize("guilty", range(1, 40))
def test_the_fewest_that_pass_are_kept_in_float32(guilty: int) -> None:
    network = Network({"int8": sensitivities(64, dict.fromkeys(range(guilty), 1.1))})
    outcome = network.search()
    assert outcome.best is not None
    assert len(outcome.best.float32_nodes) == guilty


def test_two_hundred_nodes_need_few_runs_of_the_evaluation() -> None:
    network = Network({"int8": sensitivities(200, dict.fromkeys(range(100), 1.1))})
    outcome = network.search()
    assert outcome.best is not None
    assert len(outcome.best.float32_nodes) == 100
    assert len(network.evaluated) <= 1 + 2 * math.ceil(math.log2(200))


def test_a_wider_level_passes_where_the_narrow_one_cannot_be_repaired() -> None:
    network = Network(
        {"int8": sensitivities(4, dict.fromkeys(range(4), 9.0)), "fp16": sensitivities(4)}
    )
    outcome = network.search()
    assert outcome.best is not None
    assert outcome.best.precision == "fp16"
    assert outcome.notes[0].startswith(
        "INT8 fails with 1 of 4 nodes kept in float32; with 2 it is not"
    )


def test_a_repaired_narrow_model_has_to_be_cheaper_than_the_wider_one_that_passes() -> None:
    network = Network(
        {"int8": sensitivities(20, dict.fromkeys(range(8), 9.0)), "fp16": sensitivities(20)},
        narrow_s={"int8": 0.002, "fp16": 0.005},
    )
    # with 8 of 20 nodes in float32, INT8 takes 104 ms, FP16 100 ms: 104 > 95
    outcome = network.search()
    assert outcome.best is not None
    assert outcome.best.precision == "fp16"
    assert all(len(float32_nodes) <= 6 for _, float32_nodes in network.evaluated)  # 7 cost 96 ms
    assert (
        "INT8 fails with 6 of 20 nodes kept in float32; with 7 it is not worth it: 96 ms against "
        in (outcome.notes[0])
    )


def test_a_repaired_narrow_model_is_kept_where_it_is_cheaper() -> None:
    network = Network(
        {"int8": sensitivities(20, dict.fromkeys(range(6), 9.0)), "fp16": sensitivities(20)}
    )
    outcome = network.search()
    assert outcome.best is not None
    assert (outcome.best.precision, len(outcome.best.float32_nodes)) == ("int8", 6)
    assert outcome.best.cost_s == pytest.approx(0.088)


def test_int8_that_passes_but_saves_too_little_gives_way_to_fp16() -> None:
    network = Network(
        {"int8": sensitivities(10), "fp16": sensitivities(10)},
        narrow_s={"int8": 0.0049, "fp16": 0.005},
    )
    outcome = network.search()
    assert outcome.best is not None
    assert outcome.best.precision == "fp16"
    assert outcome.notes == (
        "INT8 is not worth it here: 49 ms against 50 ms in FP16, 2.0% less; 5% less is asked for",
    )


def test_int8_that_saves_too_little_stays_where_fp16_fails() -> None:
    network = Network(
        {"int8": sensitivities(10), "fp16": sensitivities(10, FAILS)},
        narrow_s={"int8": 0.0049, "fp16": 0.005},
    )
    outcome = network.search()
    assert outcome.best is not None
    assert outcome.best.precision == "int8"
    assert outcome.notes == ()


def test_float32_stays_where_nothing_saves_anything() -> None:
    network = Network({"fp16": sensitivities(10)}, narrow_s={"fp16": 0.0099})
    outcome = network.search()
    assert outcome.best is None
    assert outcome.notes[0].startswith("FP16 is not worth it here: 99 ms against 100 ms in FLOAT32")
    assert outcome.why == "float32 stays: what passed is not worth it"


def test_float32_stays_where_nothing_passes() -> None:
    network = Network({"int8": sensitivities(3, dict.fromkeys(range(3), 9.0))})
    outcome = network.search()
    assert outcome.best is None
    assert outcome.stopped == ""
    assert outcome.notes == ("INT8 fails with 2 of 3 nodes kept in float32",)
    assert outcome.why == "float32 stays: no narrower precision passed"


def test_a_level_that_costs_as_much_as_what_passes_is_not_ranked_at_all() -> None:
    network = Network(
        {"int8": sensitivities(10, FAILS), "fp16": sensitivities(10)},
        narrow_s={"int8": 0.005, "fp16": 0.005},
    )
    outcome = network.search()
    assert outcome.best is not None
    assert outcome.best.precision == "fp16"
    assert not network.ranked
    assert outcome.notes[0].startswith("INT8 is not worth it here: 50 ms against 50 ms in FP16")


def test_a_level_that_cannot_be_made_is_a_step_that_says_why() -> None:
    network = Network(
        {"int8": sensitivities(4), "fp16": sensitivities(4)}, refused=frozenset({"int8"})
    )
    outcome = network.search()
    assert outcome.best is not None
    assert outcome.best.precision == "fp16"
    assert [(s.precision, s.passed, s.why) for s in outcome.steps] == [
        ("int8", False, "nothing to quantize"),
        ("fp16", True, "drop 0.00"),
    ]


def test_each_step_reports_its_float32_nodes_drop_and_cost() -> None:
    seen: list[SearchStep] = []
    network = Network({"int8": sensitivities(4, {1: 9.0, 2: 9.0})})
    outcome = network.search(on_step=seen.append)
    assert tuple(seen) == outcome.steps
    assert [(s.float32_nodes, s.passed, s.drop) for s in seen] == [
        ((), False, 18.0),
        (("n1",), False, 9.0),
        (("n1", "n2"), True, 0.0),
    ]
    assert [s.cost_s for s in seen] == pytest.approx([0.008, 0.016, 0.024])
    assert [s.elapsed_s for s in seen] == [10, 24, 34]  # 4 s of ranking


def test_a_level_without_nodes_is_tried_as_it_is_only() -> None:
    level = Level("fp8", 8, (), lambda _: "m", lambda _: 1.0, lambda _: 0.0, lambda _: 0.0)
    outcome = search([level], lambda _: Verdict(False, 1.0, "fails"), budget=Budget(0.0, math.inf))
    assert (outcome.best, len(outcome.steps)) == (None, 1)


@pytest.mark.parametrize(
    ("narrow_s", "verdict"),
    [(0.95, ""), (0.951, "4.9% less"), (1.2, "20.0% more")],
)
def test_narrow_has_to_save_five_percent(narrow_s: float, verdict: str) -> None:
    text = not_worth("int8", narrow_s, "fp16", 1.0)
    assert verdict in text
    assert bool(text) == bool(verdict)


def test_a_precision_of_as_many_bits_does_not_make_one_not_worth_it() -> None:
    """FP8 at the cost of an INT8 that passes is no reason to give INT8 up."""
    network = Network(
        {"int8": {"a": 0.1}, "fp8": {"a": 0.1}}, narrow_s={"int8": 0.002, "fp8": 0.002}
    )
    outcome = network.search()
    assert outcome.best is not None
    assert outcome.best.precision == "int8"
    assert [step.precision for step in outcome.steps] == ["int8"]


def test_of_two_wider_precisions_of_as_many_bits_the_first_is_kept() -> None:
    network = Network(
        {"int8": {"a": 0.1}, "fp16": {"a": 0.0}, "bf16": {"a": 0.0}},
        narrow_s={"int8": 0.005, "fp16": 0.005, "bf16": 0.005},
    )
    outcome = network.search()
    assert outcome.best is not None
    assert outcome.best.precision == "fp16"
    assert [step.precision for step in outcome.steps] == ["int8", "fp16"]
