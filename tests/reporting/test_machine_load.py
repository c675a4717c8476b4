"""The load of other processes, on machines whose /proc and /sys the test makes up."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import numpy as np
import pytest

from deploykit.benchmarking.timing import Setup, Timing, Turns, make_point
from deploykit.engines.engine import Arrays
from deploykit.reporting import machine_load
from deploykit.reporting.machine_load import Watch, Window, invalid, marks, sum_up
from deploykit.reporting.report import Point
from tests.support.fake_engine import FakeEngine
from tests.support.measure.virtual_time import feeds

HZ = os.sysconf("SC_CLK_TCK")
CPUS, OWN, OTHER = 2, os.getpid(), 77  # of the machine, whatever this one has
THROTTLES = "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count"
NOBODY = "processes that are not visible from here"


class Machine:
    """A clock, and a /proc that says who used the CPUs until then. Seconds of CPU time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for pid in (OWN, OTHER):
            (folder / "proc" / str(pid)).mkdir(parents=True)
        self.now_s = self.steal_s = self.ended_s = 0.0
        self.used_s = {OWN: 0.0, OTHER: 50.0}
        self.parents = {OWN: 1, OTHER: 1}
        self.visible = True  # the other process
        self.files: dict[str, str] = {}  # that hold something else

    def text(self, path: Path) -> str:
        name = path.relative_to(self.folder).as_posix()
        if name in self.files or not name.startswith("proc/"):
            return self.files.get(name, "")
        if name == "proc/stat":
            busy = sum(self.used_s.values()) - 50
            idle = max(0.0, CPUS * self.now_s - busy - self.steal_s)
            parts = [busy, 0, 0, 1e4 + idle, 0, 0, 0, self.steal_s, 0, 0]
            lines = [  # together the ticks of the machine, to the last
                f"cpu{cpu} " + " ".join(str((round(part * HZ) + cpu) // CPUS) for part in parts)
                for cpu in range(CPUS)
            ]
            return "\n".join(["cpu 1 2 3", *lines, "intr 5"])
        pid = int(path.parent.name)
        if pid == OTHER and not self.visible:
            return ""
        ticks = f"{round(self.used_s[pid] * HZ)} 0 {round(self.ended_s * HZ)} 0"
        return f"{pid} (mine (r) 2) S {self.parents[pid]} " + "0 " * 9 + ticks

    def run(self, seconds: float, own: float = 0.0, other: float = 0.0, steal: float = 0.0) -> None:
        """Pass time in which this process and another used so many cores."""
        self.now_s += seconds
        self.used_s[OWN] += own * seconds
        self.used_s[OTHER] += other * seconds
        self.steal_s += steal * CPUS * seconds

    def watch(self, *own: int) -> Watch:
        return Watch(own, self.folder / "proc", self.folder / "sys")

    def __call__(self) -> int:
        return round(self.now_s * 1e9)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(CPUS)))
    monkeypatch.setattr(machine_load, "file_text", made.text)
    return made


@pytest.mark.parametrize(
    ("visible", "busiest"), [(True, f"mine (r) 2 (process {OTHER})"), (False, "")]
)
def test_the_cpu_of_others_is_seen_and_named(machine: Machine, visible: bool, busiest: str) -> None:
    watch = machine.watch()
    watch.begin()
    machine.run(10, own=0.5, other=0.4)
    machine.visible = visible
    window = watch.close()
    assert window.seconds == pytest.approx(10, rel=0.01)
    assert window.others_cores == pytest.approx(0.4, rel=0.05)
    assert window.busiest == busiest
    assert window.busiest_cores == (pytest.approx(0.4, rel=0.05) if visible else None)
    (mark,) = marks([window], watch.bound)
    assert mark == f"other processes ran meanwhile, most of all {busiest or NOBODY}"


@pytest.mark.parametrize("child", [True, False])
def test_what_this_run_uses_is_not_the_load_of_others(machine: Machine, child: bool) -> None:
    machine.parents[OTHER] = OWN if child else 1
    watch = machine.watch(*(() if child else (OTHER,)))
    for ended in (False, True)[: 1 + child]:
        machine.run(10, own=0.5, other=0.5)
        if ended:  # and was waited for
            machine.visible, machine.ended_s = False, machine.used_s[OTHER]
        assert watch.close().others_cores == pytest.approx(0, abs=0.02)


def test_steal_limits_and_heat_are_seen(machine: Machine) -> None:
    limits = "usage_usec 5\nthrottled_usec {}\n"
    machine.files |= {"sys/fs/cgroup/cpu.stat": limits.format(10**6), THROTTLES: "3\n"}
    watch = machine.watch()
    machine.run(10, own=0.5, steal=0.05)
    machine.files |= {"sys/fs/cgroup/cpu.stat": limits.format(2 * 10**6), THROTTLES: "4\n"}
    window = watch.close()
    steal, held, heat = invalid(sum_up(watch, window, window), watch.bound)
    assert steal.startswith("the hypervisor gave CPU time to others (steal) (5%): measure on")
    assert held.startswith("the container's CPU limit stopped the process (10% of the time): raise")
    assert heat == "the CPU lowered its clock (too hot): cool it, and measure again"


@pytest.mark.parametrize("text", ["", "cpu0 a b c d e f g h\n"])
def test_what_cannot_be_read_is_not_known(machine: Machine, tmp_path: Path, text: str) -> None:
    assert machine.watch().close().others_cores is None  # a window of no length
    machine.files["proc/stat"] = text
    for watch in (machine.watch(), Watch((), tmp_path / "none", tmp_path / "none")):
        window = watch.close()
        assert (window.others_cores, window.steal, window.held) == (None, None, None)
        assert marks([window], watch.bound) == ()


class Disturbed(FakeEngine):
    """A call takes 125 ms of the machine; `other` says how many cores another process has then."""

    def __init__(self, machine: Machine, other: list[float]) -> None:
        super().__init__()
        self.machine, self.other = machine, other

    def __call__(self, _: Arrays) -> dict[str, np.ndarray]:
        place = int(self.machine.now_s / 0.25) % len(self.other)
        self.machine.run(0.125, own=1.0, other=self.other[place])
        return {}


def timed(
    machine: Machine, other: list[float], batches: tuple[int, ...] = (1,)
) -> tuple[list[Point], Watch]:
    machine.now_s, watch = 0.0, machine.watch()
    setups = [Setup(label, lambda: Disturbed(machine, other)) for label in "AB"]
    timing = Timing(0.0, 2.5, rounds=10)
    turns = Turns(timing, clock=machine, watch=watch)
    return [make_point([each]) for each in turns.measure(setups, batches, feeds)], watch


def test_a_core_in_thirty_percent_of_the_run_is_named_and_a_quiet_run_has_no_mark(
    machine: Machine,
) -> None:
    random = Random(0)
    for _ in range(3):
        other = [1.0] * 6 + [0.0] * 14  # of 5 s in the run
        random.shuffle(other)
        _, watch = timed(machine, other)
        (reason,) = invalid(sum_up(watch, Window(), Window()), watch.bound)
        assert "mine (r) 2 (process 77)" in reason
        assert "stop them" in reason
        points, watch = timed(machine, [random.uniform(0, 0.05) for _ in range(20)])
        assert invalid(sum_up(watch, Window(), Window()), watch.bound) == ()
        assert [point.marks for point in points] == [()] * 2


def test_load_marks_the_rows_that_it_touched_alone(machine: Machine) -> None:
    points, watch = timed(machine, [0.6] * 20 + [0.0] * 1000, (1, 2))  # the first batch's 5 s
    assert [bool(point.marks) for point in points] == [True, True, False, False]
    found = sum_up(watch, Window(), Window())
    assert found.disturbed_s == pytest.approx(5, rel=0.2)
    (reason,) = invalid(found, 9.0)
    assert "(process 77), ran in " in reason
    assert reason.endswith("measure again")


def test_short_blocks_are_seen_in_stretches_of_a_second(machine: Machine) -> None:
    watch = machine.watch()
    one_step = [Window(0.05, 0.2 if at % 10 == 0 else 0.0) for at in range(120)]
    up_and_down = [Window(0.05, 0.2 if at % 2 else -0.2) for at in range(120)]
    busy = [Window(0.05, 0.6)] * 120
    for windows, disturbed_s in ((one_step, 0.0), (up_and_down, 0.0), (busy + one_step, 6.0)):
        watch.windows = windows
        found = sum_up(watch, Window(), Window())
        assert found.disturbed_s == pytest.approx(disturbed_s)
        if windows is up_and_down:  # the steps of the counters cancel
            assert found.during.others_cores == pytest.approx(0.0)
        assert marks(windows, watch.bound) == marks([found.during], watch.bound)
    assert invalid(sum_up(machine.watch(), Window(), Window()), 0.1) == ()
    short = Window(seconds=0.4, others_cores=1.0, steal=0.5)  # too short to tell
    assert (marks([short], 0.1), len(marks([short, short], 0.1))) == ((), 2)
