"""The load of other processes, on machines whose /proc and /sys are written by the test."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import numpy as np
import pytest

from deploykit.benchmarking.timing import Setup, Timing, sweep
from deploykit.engines.data.samples import random_feeds
from deploykit.engines.engine import Arrays
from deploykit.reporting.machine_load import Watch, Window, invalid, marks, sum_up
from deploykit.reporting.points import Point
from tests.support.fake_engine import FakeEngine

HZ = os.sysconf("SC_CLK_TCK")
CPUS = 2  # of the machine, whatever this one has


class Machine:
    """A clock, and a /proc that says who used the CPUs until then. Seconds of CPU time."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.sys = folder / "proc", folder / "sys"
        self.now_s = self.steal_s = 0.0
        self.used_s = {os.getpid(): 0.0, 77: 50.0}
        self.names = {os.getpid(): "pytest", 77: "mine (r) 2"}
        self.parents = {os.getpid(): 1, 77: 1}
        self.write()

    def write(self) -> None:
        busy = sum(self.used_s.values()) - 50
        idle = max(0.0, CPUS * self.now_s - busy - self.steal_s)
        parts = [busy, 0, 0, 1e4 + idle, 0, 0, 0, self.steal_s, 0, 0]
        ticks = [round(part * HZ) for part in parts]
        self.proc.mkdir(parents=True, exist_ok=True)
        lines = [  # together the ticks of the machine, to the last
            " ".join(map(str, [f"cpu{number}", *((each + number) // CPUS for each in ticks)]))
            for number in range(CPUS)
        ]
        (self.proc / "stat").write_text("\n".join(["cpu 1 2 3", *lines, "intr 5"]) + "\n")
        for pid, used_s in self.used_s.items():
            (self.proc / str(pid)).mkdir(exist_ok=True)
            fields = f"S {self.parents[pid]} " + "0 " * 9 + f"{round(used_s * HZ)} 0 0 0"
            (self.proc / str(pid) / "stat").write_text(f"{pid} ({self.names[pid]}) {fields}\n")

    def run(self, seconds: float, own: float = 0.0, other: float = 0.0, steal: float = 0.0) -> None:
        """Pass time in which this process and another used so many cores."""
        self.now_s += seconds
        self.used_s[os.getpid()] += own * seconds
        self.used_s[77] += other * seconds
        self.steal_s += steal * CPUS * seconds
        self.write()

    def sysfs(self, path: str, text: str) -> None:
        (self.sys / path).parent.mkdir(parents=True, exist_ok=True)
        (self.sys / path).write_text(text)

    def watch(self, *own: int) -> Watch:
        return Watch(own, self.proc, self.sys)

    def __call__(self) -> int:
        return round(self.now_s * 1e9)


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(CPUS)))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_cpu_of_others_is_seen_and_named(machine: Machine) -> None:
    watch = machine.watch()
    watch.begin()
    machine.run(10, own=0.5, other=0.4)
    window = watch.close()
    assert window.seconds == pytest.approx(10, rel=0.01)
    assert window.others_cores == pytest.approx(0.4, rel=0.05)
    assert window.busiest == "mine (r) 2 (process 77)"
    assert window.busiest_cores == pytest.approx(0.4, rel=0.05)
    assert marks([window], watch.bound) == (
        "other processes ran meanwhile, most of all mine (r) 2 (process 77)",
    )


@pytest.mark.parametrize(("parent", "own"), [(os.getpid(), ()), (1, (77,))], ids=["child", "named"])
def test_what_this_run_uses_is_not_the_load_of_others(
    machine: Machine, parent: int, own: tuple[int, ...]
) -> None:
    machine.parents[77] = parent
    machine.write()
    watch = machine.watch(*own)
    machine.run(10, own=0.5, other=0.5)
    assert watch.close().others_cores == pytest.approx(0, abs=0.02)
    if parent == 1:
        return
    watch = machine.watch()
    machine.run(10, own=0.5, other=0.5)
    stat = machine.proc / str(parent) / "stat"
    (machine.proc / "77" / "stat").unlink()
    fields = stat.read_text().split()
    fields[15] = str(round(machine.used_s[77] * HZ))  # cutime: of children that were waited for
    stat.write_text(" ".join(fields))
    assert watch.close().others_cores == pytest.approx(0, abs=0.02)


def test_load_of_processes_that_are_not_visible_is_seen(machine: Machine) -> None:
    watch = machine.watch()
    machine.run(10, own=0.5, other=0.5)
    (machine.proc / "77" / "stat").unlink()
    (mark,) = marks([watch.close()], watch.bound)
    assert "processes that are not visible from here" in mark


def test_steal_limits_and_heat_are_seen(machine: Machine) -> None:
    cpu = "devices/system/cpu/cpu0"
    machine.sysfs("fs/cgroup/cpu.stat", "usage_usec 5\nthrottled_usec 1000000\n")
    machine.sysfs(f"{cpu}/thermal_throttle/core_throttle_count", "3\n")
    watch = machine.watch()
    machine.run(10, own=0.5, steal=0.05)
    machine.sysfs("fs/cgroup/cpu.stat", "usage_usec 5\nthrottled_usec 2000000\n")
    machine.sysfs(f"{cpu}/thermal_throttle/core_throttle_count", "4\n")
    window = watch.close()
    watch.windows[:] = [window]
    steal, held, heat = invalid(sum_up(watch, window, window), watch.bound)
    assert steal.startswith("the hypervisor gave CPU time to others (steal) (5%): measure on")
    assert held.startswith("the container's CPU limit stopped the process (10% of the time): raise")
    assert heat == "the CPU lowered its clock (too hot): cool it, and measure again"


@pytest.mark.parametrize("text", ["", "cpu0 1 2\n", "cpu0 a b c d e f g h\n", "\0\xff"])
def test_what_cannot_be_read_is_not_known(machine: Machine, tmp_path: Path, text: str) -> None:
    assert machine.watch().close().others_cores is None  # a window of no length
    (machine.proc / "stat").write_text(text, encoding="latin-1")
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


def feeds(batch: int) -> Arrays:
    return random_feeds(FakeEngine().inputs, {"N": batch})


def timed(
    machine: Machine, other: list[float], batches: tuple[int, ...] = (1,)
) -> tuple[list[Point], Watch]:
    watch = machine.watch()
    setups = [Setup(label, lambda: Disturbed(machine, other)) for label in "AB"]
    timing = Timing(0.0, 2.5, rounds=10)
    return sweep(setups, batches, timing, feeds, clock=machine, watch=watch), watch


def reasons(watch: Watch) -> tuple[str, ...]:
    return invalid(sum_up(watch, Window(), Window()), watch.bound)


def test_a_core_in_thirty_percent_of_the_run_is_named_and_a_quiet_run_has_no_mark(
    tmp_path: Path,
) -> None:
    for seed in range(6):
        random = Random(seed)
        other = [1.0] * 6 + [0.0] * 14  # of 5 s in the run
        random.shuffle(other)
        (reason,) = reasons(timed(Machine(tmp_path / f"busy {seed}"), other)[1])
        assert "mine (r) 2 (process 77)" in reason
        assert "stop them" in reason
        other = [random.uniform(0, 0.05) for _ in range(20)]
        points, watch = timed(Machine(tmp_path / f"quiet {seed}"), other)
        assert reasons(watch) == ()
        assert [point.marks for point in points] == [()] * 2


def test_load_marks_the_rows_that_it_touched_alone(machine: Machine) -> None:
    points, watch = timed(machine, [0.6] * 20 + [0.0] * 1000, (1, 2))  # the first batch's 5 s
    assert [bool(point.marks) for point in points] == [True, True, False, False]
    found = sum_up(watch, Window(), Window())
    assert found.disturbed_s == pytest.approx(5, rel=0.2)
    (reason,) = invalid(found, 9.0)
    assert "(process 77), ran in " in reason
    assert reason.endswith("measure again")


def test_half_a_second_is_too_short_to_tell(machine: Machine) -> None:
    window = Window(seconds=0.4, others_cores=1.0, steal=0.5)
    assert marks([window], 0.1) == ()
    assert len(marks([window, window], 0.1)) == 2


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
