"""The layers of a call are timed in calls of their own, without those that other work disturbed."""

from __future__ import annotations

from collections import Counter

import pytest

from deploykit.benchmarking import layers
from deploykit.benchmarking.layers import time_layers
from deploykit.core.errors import DeploykitError
from deploykit.engines.data.samples import random_feeds
from deploykit.engines.engine import Arrays
from deploykit.reporting.points import LayerKey, LayerTimes
from tests.support.fake_engine import FakeEngine

NOW_S = [0.0]
SLOW = 4  # times as long is every fourth call, as next to other work


def slow(number: int) -> int:
    return SLOW if number % 4 == 3 else 1


class Timed(FakeEngine):
    """Calls of 2 ms on the clock of this file."""

    runtime = "onnxruntime 1.32.0"

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.order = order

    def __call__(self, feeds: Arrays) -> dict[str, object]:  # type: ignore[override]
        NOW_S[0] += 0.002 * slow(len(self.batches))
        self.order.append("plain")
        return super().__call__(feeds)  # type: ignore[return-value]


class Profiled(Timed):
    """Calls of 3 ms in which a convolution takes 1.5 and 250 others 2 us each."""

    empty = False

    def __call__(self, feeds: Arrays) -> dict[str, object]:  # type: ignore[override]
        found = super().__call__(feeds)
        NOW_S[0] += 0.001 * slow(len(self.batches) - 1)
        self.order[-1] = "profiled"
        return found

    def read(self) -> list[Counter[LayerKey]]:
        runs = []
        for number in range(len(self.batches)):
            run = Counter({(f"add {at}", "Add", ""): 2e-3 * slow(number) for at in range(250)})
            run["conv", "Conv", "7"] = 1.5 * slow(number)
            if slow(number) > 1:
                run[f"add {number % 250}", "Add", ""] = 40.0  # where other work stopped the call
            runs.append(Counter() if self.empty else run)
        return runs


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> tuple[Timed, Profiled]:
    monkeypatch.setattr(layers.time, "perf_counter", lambda: NOW_S[0])
    order: list[str] = []
    return Timed(order), Profiled(order)


def timed(engines: tuple[Timed, Profiled]) -> LayerTimes:
    profiled = engines[1]
    feeds = random_feeds(profiled.inputs, {"N": 4})
    return time_layers(*engines, feeds, profiled.read)


def test_the_middle_half_of_the_calls_is_what_counts(engines: tuple[Timed, Profiled]) -> None:
    found = timed(engines)
    assert found.call_ms == pytest.approx(2.0)
    assert found.profiled_ms == pytest.approx(3.0)
    assert found.sum_ms == pytest.approx(2.0)
    assert (found.layers[0].name, found.layers[0].op) == ("conv", "Conv")
    assert found.layers[0].ms == pytest.approx(1.5)
    assert (found.count, len(found.layers)) == (251, 251)
    assert found.runtime == "onnxruntime 1.32.0"


def test_calls_with_and_without_the_profiler_take_turns_after_a_warm_up(
    engines: tuple[Timed, Profiled],
) -> None:
    found = timed(engines)
    order = engines[0].order
    assert order[:6] == ["plain", "profiled"] * 3
    quarter = found.calls // 4
    assert order[6:] == (["plain"] * quarter + ["profiled"] * quarter) * 4
    assert len(order[6:]) == 2 * found.calls
    assert 8 <= found.calls <= 200


def test_a_profile_without_calls_is_refused(engines: tuple[Timed, Profiled]) -> None:
    engines[1].empty = True
    with pytest.raises(DeploykitError, match="its profile holds no whole call"):
        timed(engines)
