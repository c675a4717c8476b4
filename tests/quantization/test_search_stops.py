"""A search that is cut short, by its budget or by Ctrl-C, on a made-up network."""

from __future__ import annotations

import math

import pytest

from deploykit.core.errors import BadInput
from deploykit.core.evidence import SearchStep
from deploykit.quantization.search import Budget, Level, OutOfTime, Verdict, search
from tests.support.graphs.search_network import FAILS, Made, Network, sensitivities


def test_the_time_budget_keeps_what_had_passed() -> None:
    network = Network(
        {"int8": sensitivities(100, dict.fromkeys(range(30), 9.0)), "fp16": sensitivities(100)}
    )
    outcome = network.search(budget_s=35)  # both as they are, 5 s of ranking, one candidate
    assert outcome.stopped == "time budget"
    assert outcome.best is not None
    assert outcome.best.precision == "fp16"
    assert 0 < len(network.ranked) < 100
    assert outcome.why.endswith("(the time budget ran out)")


@pytest.mark.parametrize("nodes", [3, 40, 100])
def test_no_budget_is_overrun_but_by_the_first_candidate(nodes: int) -> None:
    """A candidate takes 10 s and ranking a node 1 s: what would end too late does not begin."""
    for budget_s in range(1, 150, 3):
        network = Network(
            {
                "int8": sensitivities(nodes, dict.fromkeys(range(nodes // 3), 9.0)),
                "fp16": sensitivities(nodes, FAILS),
            }
        )
        network.search(budget_s=budget_s)
        assert network.now <= max(budget_s, 10.0)


def test_nodes_that_there_was_no_time_to_rank_are_named_in_a_note() -> None:
    network = Network({"int8": sensitivities(100, dict.fromkeys(range(30), 9.0))})
    outcome = network.search(budget_s=110)
    assert len(network.ranked) == 50
    assert outcome.notes[0] == "INT8: there was no time to rank 50 nodes"


def test_a_budget_that_ends_before_anything_passed_leaves_float32() -> None:
    network = Network({"int8": sensitivities(8, FAILS), "fp16": sensitivities(8)})
    outcome = network.search(budget_s=10)
    assert (outcome.best, outcome.stopped, len(outcome.steps)) == (None, "time budget", 1)
    assert outcome.why == (
        "float32 stays: no narrower precision had passed (the time budget ran out)"
    )


@pytest.mark.parametrize("later", [0, 1])
def test_ctrl_c_keeps_the_best_so_far(later: int) -> None:
    network = Network({"int8": sensitivities(64, dict.fromkeys(range(5), 9.0))})
    since: list[SearchStep] = []

    def stop(step: SearchStep) -> None:
        if step.passed or since:
            since.append(step)
        if len(since) > later:
            raise KeyboardInterrupt

    outcome = network.search(on_step=stop)
    assert outcome.stopped == "interrupted"
    assert outcome.best is not None
    assert len(outcome.best.float32_nodes) == [8, 6][later]  # 5 would have done


def test_ctrl_c_while_ranking_keeps_the_wider_level_that_passed() -> None:
    network = Network({"int8": sensitivities(4, {0: 9.0}), "fp16": sensitivities(4)})
    level = network.level("int8")

    def interrupted(name: str) -> float:
        raise KeyboardInterrupt

    levels = [
        Level(
            level.precision,
            level.bits,
            level.nodes,
            level.make,
            level.cost_s,
            interrupted,
            level.saving_s,
        ),
        network.level("fp16"),
    ]
    outcome = search(levels, network.evaluate, budget=Budget(0.0, math.inf, lambda: 0.0))
    assert outcome.best is not None
    assert (outcome.best.precision, outcome.stopped) == ("fp16", "interrupted")


@pytest.mark.parametrize("budget_s", [0.0, -1.0, -math.inf, math.nan])
def test_a_budget_that_is_none_is_bad_input(budget_s: float) -> None:
    with pytest.raises(BadInput, match="`budget_s` must be above 0 seconds, got"):
        Network({"int8": sensitivities(2)}).search(budget_s=budget_s)


@pytest.mark.parametrize("budget_s", [1e9, math.inf])
def test_a_long_budget_lets_the_search_come_to_its_end(budget_s: float) -> None:
    outcome = Network({"int8": sensitivities(2)}).search(budget_s=budget_s)
    assert (outcome.stopped, outcome.notes) == ("", ())


def test_precisions_that_there_was_no_time_for_are_named_in_a_note() -> None:
    every = {"fp8": FAILS, "int8": FAILS, "fp16": {}}
    network = Network(
        {name: sensitivities(3, bad) for name, bad in every.items()},
        narrow_s=dict.fromkeys(every, 0.002),
    )
    outcome = network.search(budget_s=15)
    assert outcome.notes == ("not tried, for lack of time: int8, fp16",)
    assert network.search(budget_s=1000).notes[:1] != outcome.notes


def test_a_candidate_is_given_up_where_it_would_overrun() -> None:
    """Ten steps of 2 s: after the first of the second candidate it is seen that they do not fit."""
    network = Network({"int8": sensitivities(3, FAILS), "fp16": sensitivities(3)})
    budget = Budget(0.0, 25.0, lambda: network.now)

    def evaluate(made: Made) -> Verdict:
        step, last = budget.steps(), 10
        for number in range(last):
            step(last - number)
            network.now += 1.0 if made[0] == "int8" else 2.0
        return Verdict(False, 1.0, "fails")

    levels = [network.level(name) for name in network.sensitivities]
    outcome = search(levels, evaluate, budget=budget)
    assert outcome.notes == ("not tried, for lack of time: fp16",)
    assert network.now == 12.0


def test_a_budget_that_does_for_no_candidate_is_bad_input_with_a_cure() -> None:
    network = Network({"int8": sensitivities(3)})
    budget = Budget(0.0, 5.0, lambda: network.now)

    def evaluate(_: Made) -> Verdict:
        step = budget.steps()
        for left in (3, 2, 1):
            step(left)
            network.now += 2.0
        return Verdict(True, 0.0, "passes")

    with pytest.raises(OutOfTime, match="`budget_s` 5: too short to try one candidate") as caught:
        search([network.level("int8")], evaluate, budget=budget)
    assert "name a precision" in (caught.value.hint or "")
    assert network.now <= 5.0
