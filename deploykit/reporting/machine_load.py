"""Measure other load on the machine during a run: other processes, steal, heat, limits.

Figures come from Linux's /proc and /sys; they are None on other systems and if a file is missing.
As in other tools, `HOST_PROC` and `HOST_SYS` name other folders, such as a host's in a container.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from deploykit.core.json_value import Record

_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_OTHERS_CORES, _OTHERS_SHARE = 0.1, 0.01  # share of a core, and of all cores; the larger counts
_STEAL, _HELD = 0.02, 0.01  # of the time
_ROW_S, _STRETCH_S = 0.5, 1.0  # shorter ones prove little: counters have steps of 0.01 s
_STOP = "stop them, or move them to other CPUs, and measure again"
_UNSEEN = "processes that are not visible from here"
_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal")
_CPUS = 8  # most CPUs whose clocks are read


@dataclass(frozen=True)
class Window(Record):
    """A stretch of `seconds`. None: not known.

    `others_cores`: CPU seconds per second of other processes, on the CPUs that this one may use;
    a short window's may be below 0, as counters have steps of 0.01 s, which cancel in the mean.
    `steal`: the share of CPU time that the hypervisor gave to others. `held`: of the time in which
    a limit of the control group stopped this process. `throttled`: the CPU lowered its clock for
    heat. `busiest`: the other process that used most, with its number; "" where none is visible.
    `load_average`: over a minute; `mhz`: mean clock; `celsius`: the hottest sensor of the CPU.
    """

    seconds: float = 0.0
    others_cores: float | None = None
    steal: float | None = None
    held: float | None = None
    throttled: bool = False
    busiest: str = ""
    busiest_cores: float | None = None
    load_average: float | None = None
    mhz: float | None = None
    celsius: float | None = None


@dataclass(frozen=True)
class Outside(Record):
    """The load of other processes `before` anything was timed, `during` that and `after`.

    `mhz` and `celsius` of `during` are the lowest and the highest. `cpus`: that may be used.
    `disturbed_s`: seconds, in stretches of one or more, in which others used more than the bound.
    """

    cpus: int
    before: Window
    during: Window
    after: Window
    disturbed_s: float = 0.0


@dataclass(frozen=True)
class _Reading:
    """Counters since the start of the machine, in seconds of CPU time."""

    busy_s: float
    steal_s: float
    total_s: float
    own_s: float
    held_s: float | None
    throttles: int


@dataclass(frozen=True)
class _Process:
    pid: int
    name: str
    parent: int
    used_s: float
    ended_s: float = 0.0  # CPU time of ended children


@dataclass
class Watch:
    """Reads the counters; `windows` are the closed ones, `own` further processes of the run."""

    own: tuple[int, ...] = ()
    proc: Path = field(default_factory=lambda: Path(os.environ.get("HOST_PROC", "/proc")))
    sys: Path = field(default_factory=lambda: Path(os.environ.get("HOST_SYS", "/sys")))
    windows: list[Window] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        self.know_children()
        self._others = self._find_others()
        self._last = self._read()

    @property
    def cpus(self) -> int:
        return len(self._cpus)

    def know_children(self) -> None:
        """Count the children of this process and of those in `own` as this run's."""
        self._family = {os.getpid(), *self.own}
        parents = {each.pid: each.parent for each in self._processes()}
        while more := {pid for pid, up in parents.items() if up in self._family} - self._family:
            self._family |= more

    def begin(self) -> None:
        """Start a window."""
        self._last = self._read()

    def close(self) -> Window:
        """Return the window since `begin` and start the next one."""
        window = self._window()
        self.windows.append(window)
        return window

    def over(self, length_s: float, sleep: Callable[[float], None]) -> Window:
        """Return a window of `length_s` in which this process sleeps; `windows` omits it."""
        self.begin()
        sleep(length_s)
        return join([self._window()])

    def _window(self) -> Window:
        before, self._last = self._last, self._read()
        load = [_number(line.split()[0]) for line in _lines(self.proc / "loadavg")[:1]]
        state = Window(
            mhz=self._mhz(), celsius=self._celsius(), load_average=next(iter(load), None)
        )
        now = self._last
        if before is None or now is None or now.total_s <= before.total_s:
            return state
        seconds = (now.total_s - before.total_s) / self.cpus
        others = (now.busy_s - before.busy_s - (now.own_s - before.own_s)) / seconds
        name, cores = "", None
        if others >= self.bound:
            name, cores = self._busiest(seconds)
        held = None
        if now.held_s is not None and before.held_s is not None:
            held = (now.held_s - before.held_s) / seconds
        return replace(
            state,
            seconds=seconds,
            others_cores=others,
            steal=(now.steal_s - before.steal_s) / seconds / self.cpus,
            held=held,
            throttled=now.throttles > before.throttles,
            busiest=name,
            busiest_cores=cores,
        )

    @property
    def bound(self) -> float:
        """The load of other processes, in cores, above which a figure cannot be used."""
        return max(_OTHERS_CORES, _OTHERS_SHARE * self.cpus)

    def _read(self) -> _Reading | None:
        with suppress(ValueError):  # another format, under HOST_PROC
            return self._parse()
        return None

    def _parse(self) -> _Reading | None:
        lines = {line.split(" ", 1)[0]: line for line in _lines(self.proc / "stat")}
        fields = [lines[name].split()[1:] for cpu in self._cpus if (name := f"cpu{cpu}") in lines]
        if not fields or any(len(each) < 8 for each in fields):
            return None
        user, nice, system, idle, wait, irq, soft, steal = (
            sum(int(each[at]) for each in fields) / _TICKS_PER_S for at in range(8)
        )
        used = [self._process(pid) for pid in self._family]
        if not any(used):
            return None
        limits = _lines(self.sys / "fs" / "cgroup" / "cpu.stat")
        held = [line.split()[1] for line in limits if line.startswith("throttled_usec")]
        return _Reading(
            busy_s=user + nice + system,
            steal_s=steal,
            total_s=user + nice + system + idle + wait + irq + soft + steal,
            own_s=sum(each.used_s + each.ended_s for each in used if each is not None),
            held_s=int(held[0]) / 1e6 if held else None,
            throttles=sum(
                int(line)
                for cpu in self._cpus[:_CPUS]
                for line in _lines(self._cpu(cpu) / "thermal_throttle" / "core_throttle_count")
            ),
        )

    def _cpu(self, number: int) -> Path:
        return self.sys / "devices" / "system" / "cpu" / f"cpu{number}"

    def _process(self, pid: int) -> _Process | None:
        """Parse a process's line in /proc; its name may hold spaces and brackets."""
        text = "".join(_lines(self.proc / str(pid) / "stat"))
        name, _, rest = text.partition("(")[2].rpartition(")")
        fields = rest.split()
        if len(fields) < 13 or not all(fields[at].isdecimal() for at in (1, 11, 12)):
            return None
        used_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
        ended_s = sum(_number(each) or 0.0 for each in fields[13:15]) / _TICKS_PER_S
        return _Process(pid, name, int(fields[1]), used_s, ended_s)

    def _processes(self) -> Iterator[_Process]:
        with suppress(OSError):
            for each in os.scandir(self.proc):
                if each.name.isdecimal() and (found := self._process(int(each.name))):
                    yield found

    def _find_others(self) -> dict[int, _Process]:
        return {each.pid: each for each in self._processes() if each.pid not in self._family}

    def _busiest(self, seconds: float) -> tuple[str, float | None]:
        """Return the other process that used most since the last call, and its cores."""
        before, self._others = self._others, self._find_others()
        used_s = {
            pid: each.used_s - (before[pid].used_s if pid in before else 0.0)
            for pid, each in self._others.items()
        }
        pid = max(used_s, key=used_s.__getitem__, default=0)
        if not pid or used_s[pid] <= 0:
            return "", None
        return f"{self._others[pid].name} (process {pid})", min(used_s[pid] / seconds, self.cpus)

    def _mhz(self) -> float | None:
        files = [self._cpu(cpu) / "cpufreq" / "scaling_cur_freq" for cpu in self._cpus[:_CPUS]]
        found = [value for file in files for value in _values(file)]
        return sum(found) / len(found) / 1e3 if found else None

    def _celsius(self) -> float | None:
        found = []
        with suppress(OSError):
            for folder in (self.sys / "class" / "hwmon").iterdir():
                if _lines(folder / "name")[:1] and _lines(folder / "name")[0] in _SENSORS:
                    found += [t for file in folder.glob("temp*_input") for t in _values(file)]
        with suppress(OSError):
            for zone in (self.sys / "class" / "thermal").glob("thermal_zone*"):
                found += _values(zone / "temp")
        found = [value / 1e3 for value in found if 0 < value < 150_000]  # others are invalid
        return max(found) if found else None


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
    """Sum up the windows of a run."""
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
    """Merge windows: means over time, the lowest clock, the highest temperature."""
    seconds = sum(each.seconds for each in windows)

    def known(name: str) -> list[float]:
        return [value for each in windows if (value := getattr(each, name)) is not None]

    def mean(name: str) -> float | None:
        timed = [each for each in windows if getattr(each, name) is not None and each.seconds]
        length_s = sum(each.seconds for each in timed)
        whole = sum(getattr(each, name) * each.seconds for each in timed)
        return whole / length_s if timed else None

    used_s: dict[str, float] = {}
    for each in windows:
        if each.busiest:
            more_s = (each.busiest_cores or 0.0) * each.seconds
            used_s[each.busiest] = used_s.get(each.busiest, 0.0) + more_s
    busiest = max(used_s, key=used_s.__getitem__, default="")
    others = mean("others_cores")
    return Window(
        seconds=seconds,
        others_cores=None if others is None else max(0.0, others),
        steal=mean("steal"),
        held=mean("held"),
        throttled=any(each.throttled for each in windows),
        busiest=busiest,
        busiest_cores=used_s[busiest] / seconds if busiest else None,
        load_average=max(known("load_average"), default=None),
        mhz=min(known("mhz"), default=None),
        celsius=max(known("celsius"), default=None),
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


def _lines(path: Path) -> list[str]:
    """Return the lines of a small file; [] if it cannot be read."""
    with suppress(OSError, UnicodeError):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    return []


def _values(path: Path) -> list[float]:
    return [value for line in _lines(path)[:1] if (value := _number(line)) is not None]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
