"""The shadow check: sampling, comparison of outputs, and the alarm."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable

import numpy as np
import pytest

from deploykit.core.errors import BadInput
from deploykit.core.tensors import TensorSpec
from deploykit.engines.engine import Arrays
from deploykit.serving.batching.queue import BatchRun, Pending
from deploykit.serving.models.shadow import (
    EVERY,
    WINDOW_ROWS,
    Shadow,
    check_reference,
    compare_outputs,
    exceeds,
)
from tests.support.fake_engine import FakeEngine
from tests.support.serving.running import GatedEngine

Eventually = Callable[[Callable[[], bool]], None]


def rows(count: int, start: float = 0.0) -> np.ndarray:
    return np.arange(start, start + 4 * count, dtype=np.float32).reshape(count, 4)


def feed(shadow: Shadow, x: np.ndarray, y: np.ndarray | None = None) -> None:
    """A request of the rows `x` that was answered with `y`, by default as a FakeEngine does."""
    outputs = {"y": 2 * x + 1 if y is None else y}
    request = Pending({"x": x}, len(x), (), lambda _: None, 0, 0, 0, outputs=outputs)
    shadow.record_run(BatchRun([request], *[0] * (len(BatchRun._fields) - 1)))


def shadowed(engine: FakeEngine, every: int = 1) -> Shadow:
    return Shadow("m", engine, every=every)


def value(shadow: Shadow, name: str) -> float:
    (sample,) = [each for each in shadow.samples() if each.name == f"deploykit_shadow_{name}"]
    assert sample.labels == {"model": "m", "version": "1"}
    return float(sample.value)


def test_requests_are_sampled_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    with shadowed(GatedEngine(), EVERY) as shadow:
        taken: list[int] = []
        put = lambda sample: taken.append(int(sample[0]["x"][0, 0]))  # noqa: E731
        monkeypatch.setattr(shadow._samples, "put_nowait", put)
        for number in range(10_000):
            feed(shadow, rows(1, number))
        assert taken == list(range(0, 10_000, EVERY))
        for period in (2, 10, 100):  # clients that take turns are all sampled
            assert {number % period for number in taken} == set(range(period))


def test_disagreements_are_counted_by_row_and_raise_an_alarm(
    eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    with shadowed(FakeEngine()) as shadow:
        x = rows(8)
        wrong = 2 * x + 1
        wrong[2, 0], wrong[5, 1] = 1000.0, np.nan
        feed(shadow, x, wrong)
        eventually(lambda: value(shadow, "total") == 8)
        assert value(shadow, "disagreements_total") == 2
        assert value(shadow, "max_error") == math.inf
        assert value(shadow, "alarm") == 0  # too few rows for a share
        feed(shadow, x, wrong)
        eventually(lambda: value(shadow, "total") == 16)
        assert value(shadow, "alarm") == 1
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "shadow of model 'm': 4 of the last 16 rows disagree" in caplog.messages[0]

        x = rows(WINDOW_ROWS)  # only the last rows count
        feed(shadow, x)
        eventually(lambda: value(shadow, "total") == 16 + WINDOW_ROWS)
        assert value(shadow, "alarm") == 0
        assert value(shadow, "disagreements_total") == 4
        assert len(caplog.records) == 1
        feed(shadow, x[:100], x[:100])
        eventually(lambda: value(shadow, "alarm") == 1)
        assert "100 of the last 2000 rows" in caplog.messages[1]


def test_samples_are_dropped_while_the_reference_is_slow(eventually: Eventually) -> None:
    engine = GatedEngine(warm=True)
    with shadowed(engine) as shadow:
        for _ in range(20):
            feed(shadow, rows(1))
        dropped = value(shadow, "dropped_total")
        assert 18 <= dropped <= 19  # the reference may have one already
        engine.gate.set()
        eventually(lambda: value(shadow, "total") == 20 - dropped)
        feed(shadow, rows(1))
        eventually(lambda: value(shadow, "total") == 21 - dropped)
        assert value(shadow, "dropped_total") == dropped


def test_a_sample_is_a_copy(eventually: Eventually) -> None:
    """The request's buffers may be reused after its answer."""
    engine = GatedEngine(warm=True)
    with shadowed(engine) as shadow:
        x = rows(2)
        y = 2 * x + 1
        feed(shadow, x, y)
        x[:], y[:] = 0, 77
        engine.gate.set()
        eventually(lambda: value(shadow, "total") == 2)
        assert value(shadow, "disagreements_total") == value(shadow, "max_error") == 0


def test_a_failing_reference_is_logged_and_counted_as_dropped(
    eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    reference = FakeEngine(max_batch=1)
    with shadowed(reference) as shadow:
        feed(shadow, rows(2))
        eventually(lambda: value(shadow, "dropped_total") == 1)
        feed(shadow, rows(1))
        eventually(lambda: value(shadow, "total") == 1)
    assert "the reference failed: BadInput: fake: batch 2 is above 1" in caplog.messages[0]
    assert not [each for each in threading.enumerate() if each.name == "shadow m"]
    assert not reference.closed
    feed(shadow, rows(1))  # a batch that ends later is not an error
    assert value(shadow, "dropped_total") == 2


# comparison of outputs


def floats(*values: float) -> np.ndarray:
    return np.array([values], np.float32)


SCORES = floats(0.0, 10.0, 5.0)
PIXELS = np.full((1, 2, 2), 1.0)
COMPARED: dict[str, tuple[np.ndarray, np.ndarray, bool]] = {
    "scores within a tenth": (floats(0.5, 9.5, 5.0), SCORES, True),
    "scores off by more than a tenth": (floats(0.0, 8.9, 5.0), SCORES, False),
    "another largest score": (floats(0.0, 9.7, 9.9), floats(0.0, 9.9, 9.7), False),
    "two largest scores within 1 %": (floats(0.0, 9.96, 9.97), floats(0.0, 9.97, 9.96), True),
    "a single number within 1 %": (floats(99.1), floats(100.0), True),
    "near zero": (floats(1e-9), floats(0.0), True),
    "from zero": (floats(1e-3), floats(0.0), False),
    "half precision": (np.float16([[100.1]]), floats(100.0), True),
    "both NaN": (floats(math.nan), floats(math.nan), True),
    "one infinite": (floats(1.0), floats(math.inf), False),
    "an image with one pixel off": (PIXELS + np.eye(2) * [0, 0.02], PIXELS, False),
    "other integers": (np.array([[3, 5]]), np.array([[3, 4]]), False),
    "another shape": (floats(1.0, 2.0), floats(1.0), False),
    "strings": (np.array([["a"]], object), np.array([["b"]], object), False),
    "no values": (np.empty((1, 0), np.float32), np.empty((1, 0), np.float32), True),
}


def disagreements(got: Arrays, want: Arrays, feeds: Arrays | None = None) -> list[bool]:
    """Whether each row disagrees."""
    wrong: list[bool] = compare_outputs(got, want, feeds or {}, 1e-2, batched=True)[0].tolist()
    return wrong


@pytest.mark.parametrize("case", COMPARED)
def test_a_row_disagrees_beyond_the_tolerance_of_its_output(case: str) -> None:
    got, want, agrees = COMPARED[case]
    assert disagreements({"y": got}, {"y": want}) == [not agrees]


@pytest.mark.parametrize(
    ("output", "wrong"),
    [("logits", False), ("image_embeds", True), ("boxes", True), ("coords", True)],
)
def test_only_class_scores_may_vary_by_a_few_per_cent(output: str, wrong: bool) -> None:
    """The highest value of an embedding or of coordinates is no answer."""
    assert disagreements({output: floats(0.5, 9.5, 5.0)}, {output: SCORES}) == [wrong]


def test_tokens_have_classes_where_an_input_has_the_same_places() -> None:
    want = np.array([[[0.0, 10.0], [10.0, 0.0]]], np.float32)
    feeds = {"ids": np.zeros((1, 2), np.int64)}
    got = want + np.float32(0.5)
    assert disagreements({"y": got}, {"y": want}, feeds) == [False]
    assert disagreements({"y": got}, {"y": want}) == [True]
    got[0, 1] = [0.0, 10.0]
    assert disagreements({"y": got}, {"y": want}, feeds) == [True]


def test_a_different_or_missing_output_is_a_disagreement_of_its_row() -> None:
    good, bad, both = floats(1.0), floats(2.0), {"a": floats(1.0), "b": floats(1.0)}
    wrong, most = compare_outputs({"a": good, "b": bad}, both, {}, 1e-2, batched=True)
    assert (wrong.tolist(), most) == ([True], 1.0)
    assert disagreements({"a": good}, both) == [True]
    got, want = np.ones((5, 3), np.float32), np.ones((5, 3), np.float32)
    got[4, 2] = 7
    wrong, most = compare_outputs({"a": got}, {"a": want}, {}, 1e-2, batched=False)
    assert (wrong.tolist(), most) == ([True], 6.0)


@pytest.mark.parametrize(
    ("wrong", "count", "threshold", "alarm"),
    [
        (2, 2, 0.01, False),  # too few for a share
        (3, 3, 0.01, True),
        (3, 300, 0.01, False),  # just the share allowed
        (10, 100, 0.0551, True),  # Wilson's lower bound with 95 % is 0.0552
        (10, 100, 0.0553, False),
        (5, 100_000, 0.0, True),
    ],
)
def test_the_alarm_needs_a_share_certainly_above_the_threshold(
    wrong: int, count: int, threshold: float, alarm: bool
) -> None:
    assert exceeds(wrong, count, threshold) is alarm


def test_a_reference_must_take_the_same_inputs() -> None:
    def other(*specs: TensorSpec) -> FakeEngine:
        engine = FakeEngine()
        engine.inputs, engine.outputs = specs[:1], specs[1:]  # type: ignore[assignment]
        return engine

    x, y = TensorSpec("x", "float32", ("N", 4)), TensorSpec("y", "float16", ("N", 4))
    check_reference(FakeEngine(), other(x, y))
    q = TensorSpec("q", "float32", ("N", 4))
    uint8, z = TensorSpec("x", "uint8", ("N", 4)), TensorSpec("z", "float32", ("N", 4))
    for wrong in ((uint8, y), (z, y), (x, y, q)):
        with pytest.raises(BadInput, match="the shadow's inputs and outputs are"):
            check_reference(FakeEngine(), other(*wrong))
