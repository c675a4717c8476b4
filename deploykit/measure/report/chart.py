"""Charts as data: what svg.py draws, with a caption and a table of the same figures."""

from __future__ import annotations

from dataclasses import dataclass

COLOURS = 16  # of `look.css`; 0 is the baseline's
BOUND = -1  # the look of what is no setup: of a limit
Row = tuple[str, ...]


@dataclass(frozen=True)
class Mark:
    """One measured point; `low` to `high` is its interval, `text` its label."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    text: str = ""


@dataclass(frozen=True)
class Series:
    """A line through `marks`, in their order. `upper`: a thin line above it (p99 over p50).

    `plain`: has a few markers only, not one at each mark.
    """

    label: str
    marks: tuple[Mark, ...]
    look: int = 0
    upper: tuple[Mark, ...] = ()
    plain: bool = False


@dataclass(frozen=True)
class Chart:
    """One figure. `finding`: its caption, what a reader should see in it.

    `x_ticks`: positions and labels of the x axis, round numbers where empty. `x_log`, `y_log`
    None: if the values span much. `zero`: the y axis begins at 0. `flag`: an x, and what begins
    there. `limit`: a y, and what it bounds. `columns`, `rows`: the same data as a table.
    """

    name: str
    title: str
    finding: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_ticks: tuple[tuple[float, str], ...] = ()
    x_log: bool | None = None
    y_log: bool | None = None
    zero: bool = True
    flag: tuple[float, str] | None = None
    limit: tuple[float, str] | None = None
    columns: Row = ()
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Bars:
    """One bar for each of `bars`: a name and its parts end to end, as long as they take.

    `parts`: the names of the parts, with the looks from `look` on; a bar has a value for each.
    `looks`: of the setups that the bars are of, whose markers are before their names.
    """

    name: str
    title: str
    finding: str
    x_label: str
    parts: Row
    bars: tuple[tuple[str, tuple[float, ...]], ...]
    look: int = 1
    looks: tuple[int, ...] = ()
    columns: Row = ()
    rows: tuple[Row, ...] = ()


Figure = Chart | Bars
