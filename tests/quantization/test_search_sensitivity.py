"""How sensitivity is measured and ranked, and a search of real graphs by it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from deploykit.graph.cost import Ceilings, predicted_s, savings_s
from deploykit.quantization.search import (
    Budget,
    Level,
    Verdict,
    noise_share,
    rank,
    search,
    sensitivities,
)
from tests.support.graphs.data import feeds, samples
from tests.support.graphs.protos import calibrate, node_costs, quantizable, to_pairs
from tests.support.onnx_zoo import make, save


def test_nodes_with_most_sensitivity_per_saving_come_first() -> None:
    sensitivity = {"cheap": 2.0, "dear": 3.0, "free": 0.1, "unknown": math.nan}
    saving = {"cheap": 0.001, "dear": 0.004, "free": 0.0, "unknown": 1.0}
    order = rank(
        ["late", "dear", "cheap", "free", "unknown"], sensitivity, lambda name: saving[name]
    )
    assert order == ["free", "unknown", "cheap", "dear", "late"]


def test_ranking_stops_when_time_is_up() -> None:
    left = iter([False, False, True])
    assert sensitivities(["a", "b", "c"], lambda _: 1.0, lambda: next(left)) == {"a": 1, "b": 1}


def test_noise_is_counted_as_a_share_of_the_signal() -> None:
    wanted = np.array([3.0, 4.0], np.float32)
    assert noise_share([wanted], [np.array([3.0, 4.5], np.float32)]) == pytest.approx(0.01)
    assert noise_share([wanted, wanted], [wanted, wanted]) == 0


def test_an_overflow_has_infinite_noise_and_a_mask_of_infinity_none() -> None:
    mask = np.array([1.0, -np.inf], np.float32)
    assert noise_share([mask], [mask]) == 0
    assert noise_share([np.ones(2)], [np.array([1.0, np.inf])]) == math.inf


def test_integers_that_differ_are_noise() -> None:
    assert noise_share([np.array([1, 2, 3, 4])], [np.array([1, 2, 3, 5])]) == 0.25


def test_another_number_of_boxes_counts_as_one_whole_output_of_noise() -> None:
    boxes, scores = np.ones((3, 4), np.float32), np.ones(3, np.float32)
    assert noise_share([boxes, scores], [np.ones((2, 4), np.float32), scores]) == 1.0
    assert noise_share([np.arange(3)], [np.arange(2)]) == 1.0


def outlier() -> onnx.ModelProto:
    """Three matrices; one input of 'guilty' is 1000 times the others, and its weights small."""
    random = np.random.default_rng(0)
    width = 32
    weights = {f"w{n}": random.standard_normal((width, width)) / np.sqrt(width) for n in range(3)}
    weights["boost"] = np.where(np.arange(width) == 5, 1e3, 1)
    weights["w1"][5] /= 1e3
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["a"], name="first"),
        helper.make_node("Mul", ["a", "boost"], ["b"], name="mul"),
        helper.make_node("MatMul", ["b", "w1"], ["c"], name="guilty"),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("MatMul", ["r", "w2"], ["y"], name="last"),
    ]
    row = {"x": ("N", width)}, {"y": ("N", width)}
    return make(nodes, *row, {name: array.astype(np.float32) for name, array in weights.items()})


def run(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    ort = pytest.importorskip("onnxruntime")
    from deploykit.engines.onnxruntime.engine import session_options

    session = ort.InferenceSession(model.SerializeToString(), session_options(1))
    return list(session.run(None, dict(inputs)))


def test_on_real_graphs_only_the_node_that_int8_ruins_stays_float32(tmp_path: Path) -> None:
    model = outlier()
    calibration = calibrate(save(model, tmp_path / "m.onnx"), samples(model, 64))
    inputs = feeds(model, 64, seed=1)
    wanted = run(model, inputs)
    target = Ceilings({"fp32": 1e12, "int8": 8e12}, 1e11)
    nodes = quantizable(model)

    def made(keep_float32: frozenset[str]) -> onnx.ModelProto:
        return to_pairs(model, calibration, keep_float32=keep_float32)

    def noise(candidate: onnx.ModelProto) -> float:
        return noise_share(wanted, run(candidate, inputs))

    def evaluate(candidate: onnx.ModelProto) -> Verdict:
        share = noise(candidate)
        return Verdict(share < 0.01, share, f"noise {share:.2%}")

    def cost_s(candidate: onnx.ModelProto) -> float:
        return predicted_s(node_costs(candidate, {"N": 256}), target)

    wide_costs, narrow_costs = (node_costs(m, {"N": 256}) for m in (model, made(frozenset())))
    saved = savings_s(wide_costs, narrow_costs, target)
    level = Level(
        "int8",
        8,
        nodes,
        made,
        cost_s,
        sensitivity=lambda name: noise(made(frozenset(nodes) - {name})),
        saving_s=saved.__getitem__,
    )
    outcome = search([level], evaluate, float32_cost_s=cost_s(model), budget=Budget(0.0, math.inf))
    assert not outcome.steps[0].passed
    assert outcome.best is not None
    assert outcome.best.float32_nodes == ("guilty",)
    assert outcome.best.cost_s < 0.95 * cost_s(model)
