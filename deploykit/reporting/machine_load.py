"""Measure other load on the machine during a run: other processes, steal, heat, limits.

Figures come from Linux's /proc and /sys; they are None on other systems and if a file is missing.
As in other tools, `HOST_PROC` and `HOST_SYS` name other folders, such as a host's in a container.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from deploykit.core.json_value import Record
from deploykit.core.machine import file_text

_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_OTHERS_CORES, _OTHERS_SHARE = 0.1, 0.01  # share of a core, and of all cores; the larger counts
_STEAL, _HELD = 0.02, 0.01  # of the time
_AROUND_S = 0.5  # how long the machine is watched before and after
_ROW_S, _STRETCH_S = 0.5, 1.0  # shorter ones prove little: counters have steps of 0.01 s
_STOP = "stop them, or move them to other CPUs, and measure again"
_UNSEEN = "processes that are not visible from here"


@dataclass(frozen=True)
class Window(Record):
    """A stretch of `seconds`. None: not known.

    `others_cores`: CPU seconds per second of other processes, on the CPUs that this one may use;
    a short window's may be below 0, as counters have steps of 0.01 s, which cancel in the mean.
    `steal`: the share of CPU time that the hypervisor gave to others. `held`: of the time in which
    a limit of the control group stopped this process. `throttled`: the CPU lowered its clock for
    heat. `busiest`: the other process that used most, with its number; "" where none is visible.
    """

    seconds: float = 0.0
    others_cores: float | None = None
    steal: float | None = None
    held: float | None = None
    throttled: bool = False
    busiest: str = ""
    busiest_cores: float | None = None


@dataclass(frozen=True)
class Outside(Record):
    """The load of other processes `before` anything was timed, `during` that and `after`.

    `cpus`: that may be used. `disturbed_s`: seconds, in stretches of one or more, in which others
    used more than the bound.
    """

    cpus: int
    before: Window
    during: Window
    after: Window
    disturbed_s: float = 0.0


class _Process(NamedTuple):
    name: str
    parent: int
    used_s: float
    ended_s: float  # CPU time of ended children


@dataclass
class Watch:
    """Reads the counters; `windows` are the closed ones, `own` further processes of the run."""

    own: tuple[int, ...] = ()
    proc: Path = field(default_factory=lambda: Path(os.environ.get("HOST_PROC", "/proc")))
    sys: Path = field(default_factory=lambda: Path(os.environ.get("HOST_SYS", "/sys")))
    windows: list[Window] = field(default_factory=list)

    def __post_init__(self) -> None:
        numbers = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        self._cpus = [f"cpu{number}" for number in numbers]
        self.cpus = len(self._cpus)
        # the load of other processes, in cores, above which a figure cannot be used
        self.bound = max(_OTHERS_CORES, _OTHERS_SHARE * self.cpus)
        self.know_children()
        self._others = self._processes(without=self._family)
        self._last = self._read()

    def know_children(self) -> None:
        """Count the children of this process and of those in `own` as this run's."""
        self._family = {os.getpid(), *self.own}
        parents = {pid: each.parent for pid, each in self._processes().items()}
        while more := {pid for pid, up in parents.items() if up in self._family} - self._family:
            self._family |= more

    def begin(self) -> None:
        self._last = self._read()

    def close(self) -> Window:
        """Return the window since `begin` and start the next one."""
        window = self._window()
        self.windows.append(window)
        return window

    def around(self, run_s: float) -> Window:
        """Sleep for a tenth of a run, 0.5 s at most; return its window, which `windows` omits."""
        self.begin()
        time.sleep(min(_AROUND_S, run_s / 10))
        return join([self._window()])

    def _window(self) -> Window:
        before, self._last = self._last, self._read()
        spent = {key: value - before[key] for key, value in self._last.items() if key in before}
        if spent.get("total", 0.0) <= 0:
            return Window()
        seconds = spent["total"] / self.cpus
        others = (spent["busy"] - spent["own"]) / seconds
        name, cores = self._busiest(seconds) if others >= self.bound else ("", None)
        return Window(
            seconds=seconds,
            others_cores=others,
            steal=spent["steal"] / spent["total"],
            held=spent["held"] / seconds if "held" in spent else None,
            throttled=spent["throttles"] > 0,
            busiest=name,
            busiest_cores=cores,
        )

    def _read(self) -> dict[str, float]:
        """Return counters, in seconds of CPU time; {} in another format, under HOST_PROC."""
        rows = map(str.split, file_text(self.proc / "stat").splitlines())
        fields = [row[1:9] for row in rows if row and row[0] in self._cpus]
        family = [each for pid in self._family if (each := self._process(pid))]
        held = file_text(self.sys / "fs/cgroup/cpu.stat").partition("throttled_usec ")[2].split()
        folder, count = self.sys / "devices/system/cpu", "thermal_throttle/core_throttle_count"
        counts = [file_text(folder / cpu / count) for cpu in self._cpus]
        try:
            sums = [sum(map(int, column)) / _TICKS_PER_S for column in zip(*fields, strict=True)]
            user, nice, system, _, _, _, _, steal = sums
            found = {"total": sum(sums), "busy": user + nice + system, "steal": steal}
            found["own"] = sum(each.used_s + each.ended_s for each in family)
            found["throttles"] = sum(map(int, filter(None, counts)))
            return found | ({"held": int(held[0]) / 1e6} if held else {}) if family else {}
        except ValueError:
            return {}

    def _process(self, pid: int) -> _Process | None:
        """Parse a process's line in /proc; its name may hold spaces and brackets."""
        name, _, rest = file_text(self.proc / str(pid) / "stat").partition("(")[2].rpartition(")")
        try:
            numbers = [int(each) for each in rest.split()[1:15]]
            used_s, ended_s = (sum(numbers[at : at + 2]) / _TICKS_PER_S for at in (10, 12))
            return _Process(name, numbers[0], used_s, ended_s)
        except (ValueError, IndexError):
            return None

    def _processes(self, without: Collection[int] = ()) -> dict[int, _Process]:
        with suppress(OSError):
            pids = [int(each.name) for each in os.scandir(self.proc) if each.name.isdecimal()]
            found = {pid: self._process(pid) for pid in pids if pid not in without}
            return {pid: each for pid, each in found.items() if each}
        return {}

    def _busiest(self, seconds: float) -> tuple[str, float | None]:
        """Return the other process that used most since the last call, and its cores."""
        before, self._others = self._others, self._processes(without=self._family)
        used_s = {
            pid: each.used_s - (before[pid].used_s if pid in before else 0.0)
            for pid, each in self._others.items()
        }
        pid = max(used_s, key=used_s.__getitem__, default=0)
        if not pid or used_s[pid] <= 0:
            return "", None
        return f"{self._others[pid].name} (process {pid})", min(used_s[pid] / seconds, self.cpus)


def marks(windows: Sequence[Window], bound_cores: float) -> tuple[str, ...]:
    """Return why a row timed in `windows` is unreliable: load past a bound."""
    return tuple(what for what, _, _ in _disturbances(join(windows), bound_cores))


def invalid(outside: Outside, bound_cores: float) -> tuple[str, ...]:
    """Return why a whole run is not valid, with the remedy."""
    found = [
        f"{what} ({figure}): {cure}"
        for what, figure, cure in _disturbances(outside.during, bound_cores)
    ]
    share = outside.disturbed_s / outside.during.seconds if outside.during.seconds else 0.0
    if not found and share > 0.25:  # share of the time, in stretches past the bound
        who = outside.during.busiest or _UNSEEN
        found = [f"other processes, most of all {who}, ran in {share:.0%} of the time: {_STOP}"]
    return tuple(found)


def sum_up(watch: Watch, before: Window, after: Window) -> Outside:
    stretch: list[Window] = []
    disturbed_s = 0.0
    for window in watch.windows:
        stretch.append(window)
        found = join(stretch)
        if round(found.seconds, 3) >= _STRETCH_S:
            disturbed_s += found.seconds if (found.others_cores or 0) >= watch.bound else 0
            stretch = []
    return Outside(watch.cpus, before, join(watch.windows), after, disturbed_s)


def join(windows: Sequence[Window]) -> Window:
    """Merge windows: their figures are means over time."""
    seconds = sum(each.seconds for each in windows)

    def mean(name: str) -> float | None:
        known = [(each, value) for each in windows if (value := getattr(each, name)) is not None]
        length_s = sum(each.seconds for each, _ in known)
        return sum(value * each.seconds for each, value in known) / length_s if length_s else None

    used_s: dict[str, float] = defaultdict(float)
    for each in windows:
        used_s[each.busiest] += (each.busiest_cores or 0.0) * each.seconds
    busiest = max(filter(None, used_s), key=used_s.__getitem__, default="")
    others = mean("others_cores")
    return Window(
        seconds=seconds,
        others_cores=None if others is None else max(0.0, others),
        steal=mean("steal"),
        held=mean("held"),
        throttled=any(each.throttled for each in windows),
        busiest=busiest,
        busiest_cores=used_s[busiest] / seconds if busiest else None,
    )


def _disturbances(during: Window, bound_cores: float) -> Iterator[tuple[str, str, str]]:
    """Yield each disturbance, its amount and the remedy."""
    long_enough = during.seconds >= _ROW_S
    if long_enough and (during.others_cores or 0) >= bound_cores:
        what = f"other processes ran meanwhile, most of all {during.busiest or _UNSEEN}"
        yield what, f"{during.others_cores:.2g} cores", _STOP
    if long_enough and (during.steal or 0) >= _STEAL:
        what = "the hypervisor gave CPU time to others (steal)"
        yield what, f"{during.steal:.0%}", "measure on a machine that is not shared"
    if (during.held or 0) >= _HELD:
        what = "the container's CPU limit stopped the process"
        yield what, f"{during.held:.0%} of the time", "raise the limit, or use fewer threads"
    if during.throttled:
        yield "the CPU lowered its clock", "too hot", "cool it, and measure again"
