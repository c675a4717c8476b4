from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from deploykit.benchmarking.cpu_search import choices, search_cpu
from deploykit.core.errors import BadInput, OutOfMemory
from deploykit.engines.data.samples import random_feeds
from deploykit.engines.engine import Arrays
from deploykit.reporting.points import CpuSearch, CpuSettings
from tests.support.fake_engine import FakeEngine
from tests.support.measure.virtual_time import VirtualTime

FEEDS = random_feeds(FakeEngine().inputs, {"N": 4})


class Machine:
    """Engines whose calls take as long as `call_s` says for their settings."""

    def __init__(self, call_s: Callable[[CpuSettings], float]) -> None:
        self.call_s = call_s
        self.clock = VirtualTime()
        self.opened: list[CpuSettings] = []
        self.calls: dict[CpuSettings, int] = {}
        self.engines: list[FakeEngine] = []

    def open(self, settings: CpuSettings) -> FakeEngine:
        machine, seconds = self, self.call_s(settings)

        class Timed(FakeEngine):
            def __call__(self, feeds: Arrays) -> dict[str, np.ndarray]:
                machine.clock.now_ns += round(seconds * 1e9)
                machine.calls[settings] = machine.calls.get(settings, 0) + 1
                return super().__call__(feeds)

        self.opened.append(settings)
        self.engines.append(Timed())
        return self.engines[-1]

    def search(self, candidates: Sequence[CpuSettings], window_s: float = 0.2) -> CpuSearch:
        trials = search_cpu(candidates, self.open, FEEDS, 4, window_s, clock=self.clock)
        return CpuSearch("a.onnx", 4, trials)


def test_choices_use_all_cores_or_fewer_in_one_session() -> None:
    assert {str(each) for each in choices([2])} == {
        "1 session of 1 thread",
        "2 sessions of 1 thread",
        "1 session of 2 threads, spinning off",
        "1 session of 2 threads, spinning on",
    }
    assert choices([1]) == [CpuSettings()]
    for each in choices([6]):
        assert each.sessions == 1 or each.sessions * each.threads == 6
    assert {each.sessions for each in choices([12, 6])} == {1, 2, 3, 4, 6, 12}
    assert str(CpuSettings(16, 1, processes=True)) == "16 processes of 1 thread"


@pytest.mark.parametrize("winner", [*choices([4]), CpuSettings(4, 1, processes=True)], ids=str)
def test_the_fastest_settings_are_found(winner: CpuSettings) -> None:
    """Per row: with s sessions a call of s times the seconds gives the same rate."""

    def call_s(each: CpuSettings) -> float:
        slow = 0.01 if replace(each, processes=winner.processes) == winner else 0.012
        return (0.008 if each == winner else slow) * each.sessions

    assert Machine(call_s).search(choices([4])).fastest == winner


def test_what_lost_by_far_is_timed_in_one_window_only() -> None:
    machine = Machine(lambda each: 0.01 * each.sessions * (3 if each.spinning else 1))
    found = machine.search(choices([4]))
    assert not found.fastest.spinning
    spun = [each for each in machine.calls if each.spinning]
    for each in spun:  # a settling of 50 ms and a window of 200 ms, in calls of 30 ms
        assert each.sessions > 1 or machine.calls[each] <= 2 + 7
    assert machine.calls[found.fastest] >= 4 * 25 / found.fastest.sessions
    assert [each.settings.spinning for each in found.trials][-len(spun) :] == [True] * len(spun)
    assert all(engine.closed for engine in machine.engines)


def test_rates_are_rows_per_second_of_the_last_time_it_ran() -> None:
    slower = iter((0.01, 0.02, 0.02))
    machine = Machine(lambda _: next(slower))
    (trial,) = machine.search([CpuSettings()]).trials
    assert trial.throughput_per_s == pytest.approx(4 / 0.02)


def test_processes_are_not_started_for_windows_shorter_than_their_start() -> None:
    machine = Machine(lambda each: 0.001 * each.sessions)
    machine.search(choices([2]), window_s=0.01)
    assert not any(each.processes for each in machine.opened)
    machine.search(choices([2]), window_s=0.1)
    assert any(each.processes for each in machine.opened)


def test_settings_that_do_not_fit_into_memory_are_left_out() -> None:
    def call_s(each: CpuSettings) -> float:
        if each.sessions > 1:
            raise OutOfMemory("a.onnx: 4 GiB needed")
        return 0.01

    assert Machine(call_s).search(choices([4])).fastest.sessions == 1

    def none(_each: CpuSettings) -> float:
        raise OutOfMemory("a.onnx: 4 GiB needed")

    with pytest.raises(OutOfMemory, match="4 GiB"):
        Machine(none).search(choices([4]))


def test_finalists_that_do_not_fit_together_keep_their_first_rates() -> None:
    limit = iter(range(100))

    def call_s(each: CpuSettings) -> float:
        if next(limit) > 4:  # those of the first windows: 1 + 2 + 1 + 1 sessions
            raise OutOfMemory("a.onnx: 4 GiB needed")
        return 0.01 * each.sessions * (1 if each.threads == 2 and each.spinning else 2)

    assert Machine(call_s).search(choices([2])).fastest == CpuSettings(1, 2, True)


def test_an_engine_that_refuses_the_inputs_ends_the_search() -> None:
    def call_s(_each: CpuSettings) -> float:
        raise BadInput("a.onnx: no such input")

    with pytest.raises(BadInput, match="no such input"):
        Machine(call_s).search(choices([2]))


def test_each_runtime_has_the_settings_that_it_can_choose() -> None:
    """Torch keeps one pool of threads for a process; ONNX Runtime alone lets threads spin."""
    assert choices([2], "onnxruntime") == choices([2])
    assert {str(each) for each in choices([2], "openvino")} == {
        "1 session of 1 thread",
        "1 session of 2 threads",
        "2 sessions of 1 thread",
    }
    assert {str(each) for each in choices([2], "torch")} == {
        "1 process of 1 thread",
        "1 process of 2 threads",
        "2 processes of 1 thread",
    }


def test_settings_that_are_processes_already_are_raced_once() -> None:
    machine = Machine(lambda each: 0.01 * each.sessions * (0.5 if each.threads == 2 else 1))
    found = machine.search(choices([2], "torch"))
    assert len({trial.settings for trial in found.trials}) == len(found.trials) == 3
    assert str(found.fastest) == "1 process of 2 threads"
