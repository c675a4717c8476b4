"""Metrics: perplexity against its definition, the drop of each kind, and a user's own mistakes."""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from deploykit.core.errors import BadInput, NotFound
from deploykit.evaluation.accuracy import (
    Metric,
    Scores,
    drop_of,
    find_metric,
    log_likelihood,
)

PERPLEXITY = find_metric("perplexity")
EYE = np.eye(4, dtype=np.float32)


def scored(metric: Metric, values: np.ndarray, labels: np.ndarray) -> Scores:
    scores = Scores(metric, "data.npz")
    scores.add({"y": values}, labels)
    return scores


def by_definition(logits: np.ndarray, labels: np.ndarray) -> list[float]:
    """Each sample's mean log-likelihood, in plain Python."""
    found = []
    for rows, words in zip(logits.tolist(), labels.tolist(), strict=True):
        terms = [
            row[word] - math.log(math.fsum(map(math.exp, row)))
            for row, word in zip(rows, words, strict=True)
            if word != -100
        ]
        found.append(math.fsum(terms) / len(terms))
    return found


def test_log_likelihood_is_its_definition_and_leaves_ignored_labels_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random = np.random.default_rng(0)
    logits = random.standard_normal((5, 7, 11)).astype(np.float32) * 3
    labels = random.integers(0, 11, (5, 7))
    labels[0, :3] = -100
    labels[4, 1:] = -100
    expected = by_definition(logits, labels)
    np.testing.assert_allclose(log_likelihood({"y": logits}, labels), expected, rtol=1e-12)
    monkeypatch.setattr("deploykit.evaluation.accuracy._BLOCK_METRICS", 30)  # two rows at once
    np.testing.assert_allclose(log_likelihood({"y": logits}, labels), expected, rtol=1e-12)


def test_log_likelihood_of_a_large_vocabulary_takes_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deploykit.evaluation.accuracy._BLOCK_METRICS", 4000)
    logits = np.zeros((200, 1000), np.float16)
    tracemalloc.start()
    try:
        log_likelihood({"y": logits}, np.zeros(200, np.int64))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 200 * 1000 * 8 / 4  # a quarter of one copy in float64


def test_log_likelihood_of_one_label_per_sample() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], np.float32))
    found = log_likelihood({"y": logits}, np.array([0, 2]))
    np.testing.assert_allclose(found, np.log([0.5, 0.8]), rtol=1e-6)


def test_log_likelihood_of_large_half_precision_logits_does_not_overflow() -> None:
    logits = np.array([[60000.0, 59990.0, -60000.0]], np.float16)
    gap = float(logits[0, 0]) - float(logits[0, 1])
    found = log_likelihood({"y": logits}, np.array([1]))
    assert found[0] == pytest.approx(-gap - math.log1p(math.exp(-gap)))


def test_a_sample_whose_labels_are_all_ignored_weighs_nothing() -> None:
    logits = np.random.default_rng(0).standard_normal((8, 2, 4))
    labels = np.zeros((8, 2), np.int64)
    labels[3] = -100
    a, b = scored(PERPLEXITY, logits, labels), scored(PERPLEXITY, logits * 1.1, labels)
    assert a.values[3] == 0
    np.testing.assert_array_equal(a.weights, [2, 2, 2, 0, 2, 2, 2, 2])
    drop = drop_of(a, b)
    assert drop.n == 7
    kept = np.arange(8) != 3
    assert drop == drop_of(
        scored(PERPLEXITY, logits[kept], labels[kept]),
        scored(PERPLEXITY, logits[kept] * 1.1, labels[kept]),
    )


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (np.zeros((2, 3, 4)), np.zeros((2, 2), int), r"labels of shape \(2, 2\)"),
        (np.zeros((2, 4)), np.zeros((2, 3), int), r"labels of shape \(2, 3\)"),
        (np.zeros((2,)), np.zeros((), int), "need a first output of"),
        (np.zeros((2, 0)), np.zeros(2, int), "need a first output of"),
        (np.zeros((2, 4)), np.zeros(2), "integer labels, got float64 and float64"),
        (np.zeros((2, 4), int), np.zeros(2, int), "needs logits"),
        (np.zeros((2, 4)), np.array([0, 4]), "labels run from 0 to 4, the vocabulary has 4 tokens"),
        (np.zeros((2, 4)), np.array([0, -1]), "labels run from -1 to 0"),
    ],
)
def test_what_has_no_perplexity_is_refused_naming_the_data(
    logits: np.ndarray, labels: np.ndarray, message: str
) -> None:
    with pytest.raises(BadInput, match=f"^data.npz: perplexity: .*{message}"):
        scored(PERPLEXITY, logits, labels)


def test_perplexity_weighs_every_token_equally() -> None:
    random = np.random.default_rng(1)
    logits = random.standard_normal((9, 6, 5)) * 2
    worse = logits + random.standard_normal(logits.shape) * 0.5
    labels = random.integers(0, 5, (9, 6))
    labels[random.random(labels.shape) < 0.4] = -100
    drop = drop_of(scored(PERPLEXITY, logits, labels), scored(PERPLEXITY, worse, labels))

    def perplexity(values: np.ndarray) -> float:
        counted = labels != -100
        lse = np.log(np.exp(values).sum(-1))
        chosen = np.take_along_axis(values, np.maximum(labels, 0)[..., None], -1)[..., 0]
        return float(np.exp((lse - chosen)[counted].mean()))

    assert drop.reference.value == pytest.approx(perplexity(logits))
    assert drop.candidate.value == pytest.approx(perplexity(worse))
    assert drop.drop.value == pytest.approx(perplexity(worse) / perplexity(logits) - 1)
    assert drop.drop.low < drop.drop.value < drop.drop.high
    assert drop.unit == "%"


USERS = """
import sys
import numpy as np

def closeness(outputs, labels):
    return 1 - np.abs(outputs["y"][:, 0] - labels)

def right(outputs, labels):
    return outputs["y"].argmax(1) == labels

def whole(outputs, labels): return float(closeness(outputs, labels).mean())
def nan(outputs, labels): return closeness(outputs, labels) * np.nan
def text(outputs, labels): return ["good"] * len(labels)
def ragged(outputs, labels): return [[1], [1, 2]]
def nothing(outputs, labels): pass
def key(outputs, labels): return outputs["logits"]
def leaves(outputs, labels): sys.exit(3)
def writes(outputs, labels): labels[:] = 0
def arguments(outputs): return outputs
NUMBER = 3
"""


@pytest.fixture
def users(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(USERS, encoding="utf-8")
    return str(tmp_path / "mine.py")


def test_a_users_metric_scores_in_its_own_unit(users: str) -> None:
    metric = find_metric(f"{users}:closeness")
    labels = np.zeros(3)
    a = scored(metric, np.array([[0.1], [0.2], [0.3]]), labels)
    b = scored(metric, np.array([[0.2], [0.2], [0.5]]), labels)
    np.testing.assert_allclose(a.values, [0.9, 0.8, 0.7])
    drop = drop_of(a, b)
    assert drop.drop.value == pytest.approx(0.1)
    assert drop.describe() == "drop 0.1, -0.825 to 0.945, n = 3"


def test_a_users_booleans_are_right_and_wrong(users: str) -> None:
    scores = scored(find_metric(f"{users}:right"), EYE, np.array([0, 1, 2, 0]))
    np.testing.assert_array_equal(scores.values, [1, 1, 1, 0])
    assert "proportions" in drop_of(scores, scores).method


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("whole", r"returned float64\[\]"),
        ("nan", "NaN or infinity"),
        ("text", r"returned <U4\[2\]"),
        ("ragged", "failed: ValueError"),
        ("nothing", r"returned object\[\]"),
        ("key", "failed: KeyError: 'logits'"),
        ("leaves", "failed: SystemExit: 3"),
        ("writes", "failed: ValueError: assignment destination is read-only"),
        ("arguments", "failed: TypeError"),
    ],
)
def test_an_error_in_a_users_metric_names_the_metric(users: str, name: str, message: str) -> None:
    with pytest.raises(BadInput, match=rf"data\.npz: metric .*mine\.py:{name}: .*{message}"):
        scored(find_metric(f"{users}:{name}"), np.ones((2, 1)), np.zeros(2))


def test_an_unknown_metric_is_refused_with_the_known_ones(users: str) -> None:
    with pytest.raises(BadInput, match="'f1' is not a metric") as caught:
        find_metric("f1")
    assert caught.value.hint is not None
    assert "top1, perplexity" in caught.value.hint
    with pytest.raises(BadInput, match="NUMBER: is a int, not a function"):
        find_metric(f"{users}:NUMBER")
    with pytest.raises(NotFound, match="has no 'missing'"):
        find_metric(f"{users}:missing")
